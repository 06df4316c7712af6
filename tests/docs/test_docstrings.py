"""Every example in a docstring runs as pasted, and returns what it donates in order."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")


def examples():
    """The docstrings with an example, by the name of what they belong to."""
    names = [name for _, name, _ in pkgutil.walk_packages(ga.__path__, "ga_optax.")]
    found = {}
    for module in (ga, *map(importlib.import_module, names)):
        for test in doctest.DocTestFinder().find(module, module.__name__):
            if test.examples:
                test.globs = {"__name__": "__main__"}  # and nothing of the module
                found[test.name] = test
    return found


EXAMPLES = examples()
DONATING = [name for name in EXAMPLES if "donate_argnums" in EXAMPLES[name].docstring]


class Donating:
    """What `jax.jit` returns: what it takes to write over comes back in its order."""

    def __init__(self, fun, donate_argnums=(), jit=jax.jit, **options):
        self.jitted = jit(fun, donate_argnums=donate_argnums, **options)
        self.argnums = np.atleast_1d(donate_argnums).astype(int)

    def __call__(self, *args):
        given = [jax.tree.structure(args[i]) for i in self.argnums]
        out = self.jitted(*args)
        came = map(jax.tree.structure, out if type(out) is tuple else [out])
        assert [tree for tree in came if tree in given] == given
        return out

    def __getattr__(self, name):
        return getattr(self.jitted, name)


@pytest.mark.grid(12)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_prints_what_it_says_with_nothing_but_its_own_imports(
    name, monkeypatch
):
    said = []
    if name in DONATING:
        monkeypatch.setattr(jax, "jit", Donating)
    if name.endswith(".microbatch"):  # of two devices
        mesh_of(2)
    doctest.DocTestRunner(verbose=False).run(EXAMPLES[name], out=said.append)
    assert not said, "".join(said)


def test_results_in_another_order_than_what_is_donated_would_be_seen():
    step = Donating(lambda x, tree: ({"a": x}, x), donate_argnums=(0, 1))
    with pytest.raises(AssertionError):
        step(jnp.ones(3), {"a": jnp.ones(3)})


def test_every_module_with_a_public_function_is_walked():
    owners = {name.split(".")[1] for name in EXAMPLES}
    assert {"accumulate", "apply_gradients"} <= {x.split(".")[-1] for x in DONATING}
    assert {"accumulator", "blocks", "data", "flax", "testing"} <= owners
    finder = doctest.DocTestFinder(recurse=False)
    for name in ("MultiSteps", "apply_gradients", "flush", "from_optax"):
        assert any(test.examples for test in finder.find(getattr(ga, name), name)), name
