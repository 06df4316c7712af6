"""Every example in a docstring runs as pasted, and one that donates holds no copies.

An example sees only what it imports itself, and no name of its module.
"""

import doctest
import functools
import importlib
import pkgutil

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest

import ga_optax as ga
from ga_optax.accumulator import Accumulator

pytestmark = pytest.mark.usefixtures("optax_promotion")

JIT = jax.jit
LARGER = 2**20  # elements along the first axis


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
DONATING = [name for name in EXAMPLES if "donate_argnums" in EXAMPLES[name].docstring]


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


@pytest.mark.parametrize(
    "broken",
    [
        ">>> functools.partial(int)()\n0\n",  # an import of the module's, not its own
        ">>> 1 + 1\n3\n",
    ],
)
def test_an_example_that_lacks_an_import_or_prints_something_else_is_found(broken):
    test = doctest.DocTestParser().get_doctest(broken, {}, "broken", None, 0)
    assert run(test)[0]


def test_every_module_with_a_public_function_is_walked():
    owners = {name.split(".")[1] for name in EXAMPLES}
    assert {"accumulator", "blocks", "data", "flax", "schedules", "testing"} <= owners
    finder = doctest.DocTestFinder(recurse=False)
    for name in ("MultiSteps", "apply_gradients", "flush", "from_optax"):
        assert any(test.examples for test in finder.find(getattr(ga, name), name)), name


# -- Donation --------------------------------------------------------------------------


class Recorded:
    """What `jax.jit` returns, and the shapes that it was called with."""

    def __init__(self, fun, **options):
        self.fun, self.options, self.args = fun, options, None
        self.jitted = JIT(fun, **options)

    def __call__(self, *args):
        self.args = self.args or jax.eval_shape(lambda *args: args, *args)
        return self.jitted(*args)

    def __getattr__(self, name):
        return getattr(self.jitted, name)


def donating_functions(test):
    """The donating functions among the names of an example, after it has run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", Recorded)
        said, names = run(test)
    assert not said, said
    return [
        value
        for value in names.values()
        if isinstance(value, Recorded)
        and value.args
        and "donate_argnums" in value.options
    ]


def donated_leaves(fun, options, args):
    """The shapes of what a function is given to write over."""
    leaves = jax.tree.leaves(JIT(fun, **options).lower(*args).args_info)
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves if x.donated]


def trees_of_temporaries(fun, options, args):
    """Temporaries with and without donation, over the bytes of the largest leaf.

    They are those of larger arguments: the first axis of every array has `LARGER`
    elements. In an example with scalar parameters, these become vectors.
    """
    scalar = not any(leaf.shape for leaf in donated_leaves(fun, options, args))

    def larger(leaf):
        if isinstance(leaf, Accumulator):
            return leaf._replace(total=jax.tree.map(larger, leaf.total))
        if isinstance(leaf, ga.MultiStepsState):
            fields = {x: grown(y) for x, y in leaf._asdict().items()}
            return leaf._replace(**fields | {"counters": leaf.counters})
        if leaf.shape or scalar:
            return jax.ShapeDtypeStruct((LARGER, *leaf.shape[1:]), leaf.dtype)
        return leaf

    def grown(tree):
        own = (Accumulator, ga.MultiStepsState)
        return jax.tree.map(larger, tree, is_leaf=lambda x: isinstance(x, own))

    args = grown(args)
    largest = max(map(helpers.nbytes, donated_leaves(fun, options, args)))
    assert largest > 1e6  # tiny programs have no temporaries
    kept = {name: x for name, x in options.items() if name != "donate_argnums"}
    return [
        helpers.temporaries(JIT(fun, **o), *args) / largest for o in (options, kept)
    ]


def test_the_examples_of_both_folds_donate():
    assert {"apply_gradients", "accumulate"} <= {n.rsplit(".", 1)[1] for n in DONATING}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", DONATING)
def test_the_donation_in_an_example_makes_no_copies(name):
    steps = donating_functions(EXAMPLES[name])
    assert steps or not name.endswith(("apply_gradients", ".accumulate"))
    for step in steps:
        with_it, without = trees_of_temporaries(step.fun, step.options, step.args)
        assert with_it - without < 0.01
        # It takes gradients; those that compute them hold activations.
        if name.endswith(".apply_gradients"):
            assert with_it < 0.01


def test_results_in_the_order_that_crosses_the_buffers_take_two_trees():
    """The twin: state and parameters are donated, parameters and state come back."""
    tx = ga.MultiSteps(optax.adam(1e-3), 4)
    crossed = functools.partial(ga.apply_gradients, tx)
    params = jnp.zeros(3)
    options = {"donate_argnums": (1, 2)}
    args = jax.eval_shape(lambda: (params, tx.init(params), params))
    trees, without = trees_of_temporaries(crossed, options, args)
    assert trees == pytest.approx(2.0, abs=0.01)
    assert trees - without > 1
