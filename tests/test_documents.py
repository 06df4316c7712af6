"""The examples in docstrings and in the README run as they are printed."""

import doctest
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import ga_optax

ROOT = pathlib.Path(__file__).parents[1]
MODULES = [name for _, name, _ in pkgutil.walk_packages(ga_optax.__path__, "ga_optax.")]
FINDER = doctest.DocTestFinder(recurse=False)


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_run_as_pasted_and_print_what_they_say(name):
    if name == "ga_optax.__main__":
        pytest.skip("the command line has no docstring examples")
    # With no names but their own: a reader pastes an example, and not the module.
    failed, _ = doctest.testmod(importlib.import_module(name), globs={})
    assert failed == 0


DONATING = [
    name
    for name in ga_optax.__all__
    if "donate_arg" in (getattr(ga_optax, name).__doc__ or "")
]


class Recorded:
    """A jitted function that records the arguments of its calls."""

    def __init__(self, jitted, calls):
        self.jitted, self.calls = jitted, calls

    def __call__(self, *args):
        self.calls.append((self.jitted, args))
        return self.jitted(*args)

    def __getattr__(self, name):
        return getattr(self.jitted, name)


def temporaries_of_an_example(text, name, monkeypatch):
    """Temporaries over results, in bytes, of the calls in an example that donate.

    Every axis is made 1,000 times as long, so that arrays count and scalars do not. A
    call whose results are small beside its data has nothing to donate, and is left out.
    """
    calls, jit = [], jax.jit

    def recording(fun, **options):
        jitted = jit(fun, **options)
        return Recorded(jitted, calls) if "donate_argnums" in options else jitted

    def longer(leaf):
        leaf = jnp.asarray(leaf)
        return jax.ShapeDtypeStruct([1000 * n for n in leaf.shape], leaf.dtype)

    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", recording)
        assert doctest.DocTestRunner().run(test, clear_globs=False).failed == 0
    found = []
    for jitted, args in calls:
        memory = jitted.lower(*jax.tree.map(longer, args)).compile().memory_analysis()
        if memory.output_size_in_bytes > 0.1 * memory.argument_size_in_bytes:
            found.append(memory.temp_size_in_bytes / memory.output_size_in_bytes)
    return found


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("name", DONATING)
def test_an_example_that_donates_needs_no_copies(name, monkeypatch):
    text = inspect.getdoc(getattr(ga_optax, name))
    found = temporaries_of_an_example(text, name, monkeypatch)
    assert all(ratio < 0.1 for ratio in found), found
    assert found or name != "apply_gradients"


CROSSED = """
    >>> import jax, jax.numpy as jnp
    >>> step = jax.jit(lambda a, b: (b + 1, a + 1), donate_argnums=(0, 1))
    >>> a, b = step(jnp.zeros(100), jnp.ones(100))
"""


def test_an_example_that_donates_in_another_order_has_copies(monkeypatch):
    assert "apply_gradients" in DONATING
    straight = CROSSED.replace("(b + 1, a + 1)", "(a + 1, b + 1)")
    (crossed,), (fine,) = (
        temporaries_of_an_example(text, "twin", monkeypatch)
        for text in (CROSSED, straight)
    )
    assert fine < 0.1 < 0.4 < crossed


def test_every_public_function_has_an_example_or_is_documented_elsewhere():
    for name in ("MultiSteps", "apply_gradients", "flush", "from_optax"):
        tests = FINDER.find(getattr(ga_optax, name), name)
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


def result(name):
    text = (ROOT / "benchmarks/results" / f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


def readme_table():
    """Rows of the README's table of numbers: ours, Optax's, and the command."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- numbers -->(.*)<!-- end of numbers -->", text, re.S)[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    return {name: cells for name, *cells in rows[2:]}


def recorded():
    """The same numbers, out of the files that the commands wrote."""
    step, memory, wire = map(result, ("micro_step", "memory", "collectives"))
    assert "--optimizers adam" in step["command"]
    ours, theirs = (
        next(row for row in step["rows"] if row["side"] == side)
        for side in ("ga apply_gradients", "optax.MultiSteps")
    )
    megabytes, gradients = (
        next(row for row in record["results"] if row["k"] == 16)[unit]
        for record, unit in ((memory, "mb"), (wire, "over_gradient"))
    )
    peer = "optax.MultiSteps"
    return [
        [f"{ours['over_floor']:.2f}", f"{theirs['over_floor']:.1f}"],
        [f"{ours['temporaries_mb']:.3f} MB", f"{theirs['temporaries_mb']:.0f} MB"],
        [f"{megabytes['ga_optax']:.0f} MB", f"{megabytes[peer]:.0f} MB"],
        [f"{gradients['ga_optax']:.2f}", f"{gradients[peer]:.2f}"],
    ]


def test_the_numbers_in_the_readme_are_those_of_the_benchmarks():
    rows = list(readme_table().values())
    assert [row[:2] for row in rows[:-1]] == recorded()
    # This row is not a measurement: tests/test_exactness.py tests it.
    assert rows[-1][:2] == ["yes", "no"]


def test_each_number_in_the_readme_has_its_command():
    for name, (_, _, command) in readme_table().items():
        script = re.fullmatch(r"`python (\S+\.py)[^`]*`|the same", command)
        assert script, name
        if script[1]:
            assert (ROOT / script[1]).exists()


def test_all_is_sorted_and_complete():
    assert ga_optax.__all__ == sorted(ga_optax.__all__)
    for name in ga_optax.__all__:
        assert hasattr(ga_optax, name)
