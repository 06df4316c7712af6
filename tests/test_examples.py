"""Every example says what it needs, and what its options are."""

import ast
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = [
    path
    for folder in ("examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]
EXAMPLES = [path for path in SCRIPTS if path.is_relative_to(ROOT / "examples")]
# What is installed with ga_optax, and what the others are called on a package index.
ALWAYS = {"ga_optax", "jax", "numpy", "optax", *sys.stdlib_module_names}
NAMES = {"orbax": "orbax-checkpoint", "sklearn": "scikit-learn"}
OURS = {"ga_optax.flax": "flax", "ga_optax.testing": "chex"}


def imported(path):
    """The modules that a script imports, and `from` them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def needs(path):
    """The packages that a script imports, itself or through the scripts beside it."""
    found = set()
    for name in imported(path):
        top = name.partition(".")[0]
        if (beside := path.with_name(f"{top}.py")).exists():
            found |= needs(beside)
        elif name in OURS:
            found.add(OURS[name])
        elif top not in ALWAYS:
            found.add(NAMES.get(top, top))
    return found


def declared(path):
    """The packages that its docstring names, in the sentence that begins "It needs"."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    [sentence] = re.findall(
        r"It needs(.*?)the\s+dependency\s+group\s+`demo`", text, re.S
    )
    return set(re.findall(r"[a-z][a-z-]+", re.sub(r"`.*?`", "", sentence)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_names_all_that_it_needs_and_the_group_has_it(path):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert needs(path) <= declared(path)
    assert needs(path) <= {re.split(r"[^\w-]", name)[0] for name in groups["demo"]}


def test_a_package_that_comes_through_a_module_of_ours_is_seen(tmp_path):
    """The twin: what hid chex from the list."""
    program = tmp_path / "program.py"
    program.write_text('"""It needs flax: the dependency\ngroup `demo`."""\n')
    assert needs(program) == set()
    for line in ("from ga_optax import testing", "import beside"):
        (tmp_path / "beside.py").write_text("import ga_optax.testing, orbax.checkpoint")
        program.write_text(f"{program.read_text()}{line}\n")
        assert "chex" in needs(program)
        assert declared(program) == {"flax"}
    assert needs(program) == {"chex", "orbax-checkpoint"}


HELP = """
import pathlib, runpy, sys

for path in sys.argv[1:]:
    sys.path[0] = str(pathlib.Path(path).parent)
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        assert stop.code in (0, None), (path, stop)
    else:
        raise AssertionError(path)
"""


@pytest.mark.published
def test_every_script_has_help():
    run = subprocess.run(
        [sys.executable, "-c", HELP, *map(str, SCRIPTS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path]))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    for path in SCRIPTS:
        assert f"usage: {path.name} [-h]" in run.stdout
