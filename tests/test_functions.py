"""All public functions of JAX over micro-batches: right, and few computed whole."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
import whole_functions
from whole_functions import AXES, MODULES, called, functions, off, ways, whole

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore"),  # of functions for what they are asked with
]
BOUND = 1e-9  # in float64, of sums of some hundred terms, through inverses
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "functions.md"


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_is_that_of_all_rows(module, axis):
    wrong = {}
    with jax.enable_x64(True):
        for name, f in functions():
            if name.rpartition(".")[0] == module:
                for fun in ways(f, axis):
                    if not (far := off(fun)) < BOUND:
                        wrong[name] = far
    assert wrong == {}


FEW = {
    "sort along rows": (jnp.sort, "x, axis", 0, ["sort"]),
    "sort in a row": (jnp.sort, "x, axis", 1, []),
    "softmax": (jax.nn.softmax, "x, axis", 0, []),
    "running sum": (jnp.cumsum, "x, axis", 0, []),
    "running maximum": (jnp.maximum.accumulate, "x, axis", 1, []),
}


@pytest.mark.parametrize("name", FEW)
def test_few_are_computed_whole(name):
    f, way, axis, due = FEW[name]
    with jax.enable_x64(True):
        fun = called(f, way, axis)
        assert off(fun) < BOUND
        assert whole(fun) == due


@pytest.mark.exhaustive
def test_the_page_of_those_computed_whole_is_what_the_script_prints():
    due = PAGE.read_text()
    if f"JAX {jax.__version__} " not in due:
        pytest.skip("printed with another version of jax")
    with jax.enable_x64(True):
        assert whole_functions.page() == due.rstrip("\n")
