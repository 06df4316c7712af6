"""The documentation site: `make docs`, or `sphinx-build -W --keep-going docs DIR`."""

import concurrent.futures
import os
import pathlib
import re
import sys
import tomllib
import urllib.request

import jax.typing
import optax
from sphinx.util import inspect
from sphinx.util.typing import stringify_annotation

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent), str(HERE.parent / "benchmarks")]

project = "ga_optax"
author = "The ga_optax developers"
copyright = author  # noqa: A001  # Sphinx reads this name
release = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"][
    "version"
]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "benchmark_table",
    "code_links",
    "lines_of_code",
    "search_sections",
]
exclude_patterns = ["_build", "_ext", "**.ipynb_checkpoints"]
html_theme = "furo"
html_title = f"{project} {release}"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_search_scorer = str(HERE / "_ext" / "search_scorer.js")
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "monokai"

copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

# Every name in a role must be found. Names in plain backticks in docstrings become a
# link where they are found, and code where they are not. Those of other projects become
# links if their inventories can be read.
nitpicky = True
default_role = "py:obj"
nitpick_ignore_regex = [
    ("py:obj", "(?s:.*)"),
    ("py:class", r"(collections|jax|numpy|optax|flax)\..*|(.*\.)?(M|PyTree|Step)"),
    ("py:class", r"ga_optax\._(partition|window)\..*"),
]

_INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "jax": "https://docs.jax.dev/en/latest/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "flax": "https://flax.readthedocs.io/en/latest/",
}


def _is_reachable(address):
    """Whether an inventory can be read; Sphinx itself warns of one that it cannot."""
    try:
        with urllib.request.urlopen(address + "objects.inv", timeout=5):
            return True
    except OSError:
        return False


# A test builds the same site with and without a network, so it asks for none.
intersphinx_mapping = {}
if not os.environ.get("DOCS_OFFLINE"):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = pool.map(_is_reachable, _INVENTORIES.values())
        intersphinx_mapping = {
            name: (address, None)
            for (name, address), here in zip(_INVENTORIES.items(), found, strict=True)
            if here
        }

nb_execution_mode = "off"  # tests/test_notebooks.py executes them
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False

_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "References:")


def _as_rest(app, what, name, obj, options, lines):
    """Makes reStructuredText of a docstring, in place, before its sections are read.

    Indented paragraphs are equations, to be shown as they stand; |x| is a norm.
    """
    del app, name, obj, options
    out, section, quoted, doctest = [], False, False, False
    for i, line in enumerate(lines):
        text = line.strip()
        doctest = text.startswith(">>>") or (doctest and bool(text))
        starts = line.startswith("    ") and not (i and lines[i - 1].strip())
        if text and not line.startswith(" "):
            quoted, section = False, text in _SECTIONS
        elif starts and not quoted and not section:
            quoted = True
            out += ["::", ""]
        plain = not quoted and not doctest
        out.append(_escape_norms(line) if plain else line)
    # Napoleon takes what stands before a colon in the first line of a property for its
    # type. So that line is an empty comment.
    lines[:] = ["..", "", *out] if what in ("property", "attribute") else out


def _escape_norms(line):
    return re.sub(r"`[^`]*`|\|", lambda m: r"\|" if m[0] == "|" else m[0], line)


def _skip(app, what, name, obj, skip, options):
    """The fields of a named tuple are described in its docstring, under Attributes."""
    del app, what, name, options
    return True if type(obj).__name__ == "_tuplegetter" else skip


# Types by their public names, unions first. Sphinx names the modules that define them.
_TYPES = {
    stringify_annotation(value, "smart"): name
    for value, name in (
        (optax.Params, "PyTree"),
        (jax.typing.ArrayLike, "~jax.typing.ArrayLike"),
        (jax.typing.DTypeLike, "~jax.typing.DTypeLike"),
        (jax.Array, "~jax.Array"),
        (
            optax.GradientTransformationExtraArgs,
            "~optax.GradientTransformationExtraArgs",
        ),
        (optax.GradientTransformation, "~optax.GradientTransformation"),
    )
}


def _with_public_types(app, what, name, obj, options, signature, returned):
    """Writes ArrayLike, say, for the eight types that it stands for."""
    del app, name, options
    if what == "class" and (signature or "").startswith("(*args"):
        # A metaclass, that of NNX, hides what the class takes.
        takes = inspect.signature(obj.__init__, bound_method=True)
        signature = inspect.stringify_signature(takes, show_annotation=False)
    for value, short in _TYPES.items():
        signature = signature and signature.replace(value, short)
        returned = returned and returned.replace(value, short)
    return signature, returned


def setup(app):
    """Connects the three functions above."""
    app.connect("autodoc-process-signature", _with_public_types)
    app.connect("autodoc-process-docstring", _as_rest, priority=100)
    app.connect("autodoc-skip-member", _skip)
