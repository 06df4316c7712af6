"""Random programs of every form are those of the whole batch; see `whole_random`."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import whole_moves
from whole_programs import STEPS
from whole_random import AXES, BOUND, WAYS, Program, check, draw

from ga_optax._partition import moves
from ga_optax._passes.primitives import Factor

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")


@pytest.mark.grid(3, 100)
@pytest.mark.parametrize("seed", range(100))
def test_random_programs_are_those_of_the_whole_batch(seed):
    assert (check(draw(seed)) or 0) < BOUND  # of some steps numbers overflow


@pytest.mark.grid(2, 30)
@pytest.mark.parametrize("seed", range(30))
def test_what_moves_rows_and_anything_else_are_those_of_the_whole_batch(seed):
    assert (check(whole_moves.draw(seed)) or 0) < BOUND


@pytest.mark.grid(1)
@pytest.mark.parametrize("way", ["window", "of a gradient", "gradient of it", "twice"])
def test_the_twin_that_moves_along_one_axis_alone_is_off(way, monkeypatch):
    # A pad of rows and columns, after which there are as many.
    pairs = whole_moves.Pairs(57, ways=(way,), names=(("padded", "by_number"),))
    assert check(pairs) < BOUND
    every = [Factor((d,), (d,)) for d in range(9)]
    monkeypatch.setattr(moves, "factors", SimpleNamespace(of_equation=lambda e: every))
    assert check(pairs) > 1e-6


@pytest.mark.grid(2, 8)
@pytest.mark.parametrize("name", STEPS)
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
