"""Every example in a docstring runs as pasted.

An example sees only what it imports itself, and no name of its module.
"""

import doctest
import importlib
import pkgutil

import pytest

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")


def modules():
    """Every module of the package, that of the command line too."""
    names = [name for _, name, _ in pkgutil.walk_packages(ga.__path__, "ga_optax.")]
    return [ga, *map(importlib.import_module, names)]


def examples():
    """The docstrings with an example, by the name of what they belong to."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    for module in modules():
        for test in finder.find(module, module.__name__):
            if test.examples:
                test.globs = {"__name__": "__main__"}  # and nothing of the module
                found[test.name] = test
    return found


EXAMPLES = examples()


def run(test):
    """Runs an example; returns what it says if it fails, and its names."""
    said = []
    copy = doctest.DocTest(
        test.examples, dict(test.globs), test.name, test.filename, test.lineno, None
    )
    doctest.DocTestRunner(verbose=False).run(copy, out=said.append, clear_globs=False)
    return "".join(said), copy.globs


@pytest.mark.grid(12)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_prints_what_it_says_with_nothing_but_its_own_imports(name):
    said, _ = run(EXAMPLES[name])
    assert not said, said


def test_every_module_with_a_public_function_is_walked():
    owners = {name.split(".")[1] for name in EXAMPLES}
    assert {"accumulator", "blocks", "data", "flax", "schedules", "testing"} <= owners
    finder = doctest.DocTestFinder(recurse=False)
    for name in ("MultiSteps", "apply_gradients", "flush", "from_optax"):
        assert any(test.examples for test in finder.find(getattr(ga, name), name)), name
