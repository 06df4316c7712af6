"""The documentation site: `make docs`, or `sphinx-build -W --keep-going docs DIR`."""

import pathlib
import re
import sys
import tomllib

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "ga_optax"
author = "The ga_optax developers"
copyright = author  # noqa: A001  # Sphinx reads this name
release = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["project"][
    "version"
]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "benchmark_table",
    "command_help",
]
exclude_patterns = ["_build", "_ext", "**.ipynb_checkpoints"]
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "monokai"

# Every name in a role must be found. Names in plain backticks in docstrings become a
# link where they are found, and code where they are not; those of other projects, in
# signatures and base classes, would need their inventories, and so the network.
nitpicky = True
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", "(?s:.*)"), ("py:class", r"(optax|flax|M$).*")]

nb_execution_mode = "off"  # tests/test_notebooks.py executes them
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it in words, with shapes
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


def setup(app):
    """Connects the two functions above."""
    app.connect("autodoc-process-docstring", _as_rest, priority=100)
    app.connect("autodoc-skip-member", _skip)
