"""The examples in docstrings and in the README run as they are printed."""

import doctest
import importlib
import json
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import ga_optax

ROOT = pathlib.Path(__file__).parents[1]
MODULES = [name for _, name, _ in pkgutil.iter_modules(ga_optax.__path__)]


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_print_what_they_say(name):
    if name == "__main__":
        pytest.skip("the command line has no docstring examples")
    module = importlib.import_module(f"ga_optax.{name}")
    failed, _ = doctest.testmod(module)
    assert failed == 0


def test_every_public_function_has_an_example_or_is_documented_elsewhere():
    finder = doctest.DocTestFinder(recurse=False)
    for name in ("MultiSteps", "apply_gradients", "flush", "from_optax"):
        tests = finder.find(getattr(ga_optax, name), name)
        assert any(test.examples for test in tests), name


def test_the_program_in_the_readme_runs_as_pasted():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program, printed = re.findall(r"```(?:python|text)\n(.*?)```", text, re.S)[:2]
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert out == printed


def test_the_numbers_in_the_readme_are_those_of_the_benchmark():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    record = json.loads((ROOT / "benchmarks/results/micro_step.json").read_text())
    ours, theirs = (
        next(row for row in record["rows"] if row["side"] == side)
        for side in ("ga apply_gradients", "optax.MultiSteps")
    )
    assert "--optimizers adam" in record["command"]
    for claim in (
        f"1/{ours['optax_over_it']:.0f} of the time",
        (
            f"{ours['temporaries_mb']:.3f} MB of temporaries instead of "
            f"{theirs['temporaries_mb']:.0f} MB"
        ),
        f"{ours['over_floor']:.2f} times the floor",
    ):
        assert claim in text


def test_all_is_sorted_and_complete():
    assert ga_optax.__all__ == sorted(ga_optax.__all__)
    for name in ga_optax.__all__:
        assert hasattr(ga_optax, name)
