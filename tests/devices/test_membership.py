"""Which rows are in which micro-batch, where nothing names the mesh of a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mean_of, mesh_of, squares
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ga_optax import value_and_grad

pytestmark = pytest.mark.usefixtures("fast_compilation")

K, ROWS, WIDTH = 4, 64, 16


ARGS = np.eye(WIDTH, dtype=np.float32), np.ones((ROWS, WIDTH), np.float32)


def test_one_traced_program_has_neighbours_on_one_device_and_strides_on_eight():
    def loss(w, x):
        return squares(w, x), x[:, 0]

    step = mean_of(loss, K, has_aux=True, aux="stack")
    rows = np.arange(ROWS, dtype=np.float32)
    args = ARGS[0], rows[:, None] * ARGS[1]
    whole, split = (NamedSharding(mesh_of(8), x) for x in (P(), P("data")))
    strides = rows.reshape(-1, K).T
    for shardings, due in (
        ({}, rows.reshape(K, -1)),
        ({"in_shardings": (whole, split)}, strides),
        ({"out_shardings": whole}, strides),  # the results alone name the mesh
    ):
        (_, found), _ = jax.jit(step, **shardings)(*args)
        np.testing.assert_array_equal(found, due)
    # Rows that come back are those of the batch, however it was split.
    step = jax.jit(value_and_grad(loss, K, has_aux=True), in_shardings=(whole, split))
    np.testing.assert_array_equal(step(*args)[0][1], rows)


def own_operations(step):
    return str(jax.make_jaxpr(step)(*ARGS)).count("ga_optax_split")


@pytest.mark.cpu
def test_the_switch_leaves_the_operation_out():
    assert own_operations(mean_of(squares, K)) == 1
    assert not own_operations(mean_of(squares, K, optimize=False))


def with_its_neighbour(w, x):
    y = (x @ w).reshape(-1, 2, WIDTH)
    return ((y[:, 0] - 2 * y[:, 1]) ** 2).mean()


def at_its_place(w, x):
    return ((x @ w - jnp.arange(float(ROWS))[:, None]) ** 2).mean()


@pytest.mark.cpu
@pytest.mark.quick
@pytest.mark.parametrize(
    ("loss", "waits"), [(squares, 1), (with_its_neighbour, 0), (at_its_place, 0)]
)
def test_a_split_waits_for_the_lowering_if_rows_may_come_in_any_order(loss, waits):
    step = value_and_grad(loss, K)
    assert own_operations(step) == waits
    whole, split = (NamedSharding(mesh_of(8), x) for x in (P(), P("data")))
    rows = np.random.default_rng(0).integers(-3, 4, (ROWS, WIDTH)).astype(np.float32)
    found = jax.jit(step, in_shardings=(whole, split))(ARGS[0], rows)
    due = jax.value_and_grad(loss)(ARGS[0], rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, due)
