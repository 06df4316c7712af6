"""Random programs of every form are those of the whole batch; see `random_programs`."""

import jax.numpy as jnp
import pytest
from corpus.random_programs import AXES, BOUND, MOVES, WAYS, Program, check, draw
from corpus.steps import STEPS

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")


@pytest.mark.grid(5, 120)
@pytest.mark.parametrize("seed", range(120))
def test_random_programs_are_those_of_the_whole_batch(seed):
    assert (check(draw(seed)) or 0) < BOUND  # of some steps numbers overflow


@pytest.mark.grid(2, 12)
@pytest.mark.parametrize("name", [*MOVES, *STEPS])
def test_every_step_is_right_by_itself(name):
    assert check(Program(3, names=(name,))) < BOUND


@pytest.mark.grid(1)
@pytest.mark.parametrize("way", ["window", "of a gradient", "gradient of it", "twice"])
def test_the_twin_whose_rows_come_in_another_order_is_off(way, monkeypatch):
    ours, theirs = WAYS[way]

    def turned(fun, *args, **options):
        def other(params, batch):
            turned = {name: jnp.flip(batch[name], AXES[name]) for name in "xyz"}
            return fun(params, batch | turned)

        return ours(other, *args, **options)

    # Of this seed the derivatives by the parameters depend on rows, the second, too.
    program = Program(10, names=("running",), ways=(way,))
    assert check(program) < BOUND
    monkeypatch.setitem(WAYS, way, (turned, theirs))
    assert check(program) > 1e-6
