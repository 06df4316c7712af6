"""Aux comes back as the undivided batch gives it, on one device and on many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mean_of
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax.testing import assert_trees_bitwise_equal

pytestmark = pytest.mark.usefixtures("fast_compilation")

ROWS, WIDTH = 16, 4
KINDS = [AxisType.Auto, AxisType.Explicit]


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


W, X = integers(0, WIDTH), integers(1, ROWS, WIDTH)


def loss(w, x):
    """Every kind of leaf; means over powers of two of integers, so all are exact."""
    scores = x @ w
    return jnp.mean(scores), {
        "mean": jnp.mean(x),
        "rows": jnp.int32(x.shape[0]),
        "positive of features": jnp.sum(x > 0, axis=0, dtype=jnp.int32),
        "mean of features": jnp.mean(x, axis=0),  # WIDTH is the rows of 4 in 16
        "scores": scores,
        "time-major": jnp.stack([scores, 2 * scores, -scores]),
        "flat": x.reshape(-1),
        "right": (scores > 0, None),
    }


def undivided(w=W, x=X):
    return jax.value_and_grad(loss, has_aux=True)(w, x)


@pytest.mark.quick
@pytest.mark.parametrize("k", [1, 4, 16])
def test_every_leaf_is_that_of_the_undivided_batch(k):
    got = jax.jit(ga.value_and_grad(loss, k, has_aux=True))(W, X)
    assert_trees_bitwise_equal(got, undivided())
    if k == 4:  # features are as many as rows: an axis is not guessed from its length
        one = loss(W, X[:4])[1]
        assert one["scores"].shape == one["mean of features"].shape


# -- On devices ------------------------------------------------------------------------


@pytest.mark.grid(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sync", ["last", "each"])
@pytest.mark.parametrize("k", [1, 2])
def test_rows_of_all_devices_come_in_the_order_of_the_batch(kind, sync, k):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    fun = ga.value_and_grad(
        loss, k, has_aux=True, data_axis=ga.DataAxis("data", mesh=mesh, sync=sync)
    )
    # The twin: an order other than that of the rows would show.
    assert len(set(np.asarray(X @ W).tolist())) > 4
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        w = jax.device_put(W, jax.NamedSharding(mesh, P()))
        compiled = jax.jit(fun).lower(w, x).compile()
        got = compiled(w, x)
    assert_trees_bitwise_equal(*jax.device_get((got, undivided())))
    if sync == "last":  # no row moved
        assert {c.kind for c in ga.audit(compiled, mesh).collectives} == {"all-reduce"}


def test_rows_of_a_strided_split_come_in_the_order_of_the_batch():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        w = jax.device_put(W, jax.NamedSharding(mesh, P()))
        got = jax.jit(ga.value_and_grad(loss, 4, has_aux=True))(w, x)
        stack = mean_of(loss, 4, has_aux=True, aux="stack")
        parts = jax.device_get(jax.jit(stack)(w, x)[0][1]["scores"])
    assert_trees_bitwise_equal(*jax.device_get((got, undivided())))
    # The twin: the micro-batches themselves come in another order.
    np.testing.assert_array_equal(parts, (X @ W).reshape(4, 4).T)


def test_inside_a_shard_map_every_device_has_its_rows():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    fun = ga.value_and_grad(loss, 2, has_aux=True, data_axis="data")
    rows = {"scores": P("data"), "time-major": P(None, "data"), "flat": P("data")}
    specs = dict.fromkeys(undivided()[0][1], P()) | rows | {"right": P("data")}
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=((P(), specs), P())
    )
    assert_trees_bitwise_equal(*jax.device_get((jax.jit(mapped)(W, X), undivided())))
