"""All public functions of JAX over micro-batches: right, and few computed whole."""

import pathlib

import jax
import pytest
from corpus.functions import AXES, MODULES, functions, off, page, ways

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore"),  # of functions for what they are asked with
]
PAGE = pathlib.Path(__file__).parents[2] / "benchmarks" / "FUNCTIONS.md"


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_is_that_of_all_rows(module, axis):
    wrong = {}
    with jax.enable_x64(True):
        for name, f in functions():
            if name.rpartition(".")[0] == module:
                for fun in ways(f, axis):
                    if not (far := off(fun)) < 1:
                        wrong[name] = far
    assert wrong == {}


@pytest.mark.exhaustive
def test_the_page_of_those_computed_whole_is_what_the_script_prints():
    due = PAGE.read_text()
    if f"JAX {jax.__version__} " not in due:
        pytest.skip("printed with another version of jax")
    with jax.enable_x64(True):
        assert page() == due.rstrip("\n")
