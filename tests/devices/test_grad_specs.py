"""Gradients that come back sharded, or reduced; parameters that are gathered."""

import collections

import jax
import jax.numpy as jnp
import pytest
import test_devices as on
from helpers import mean_of, mesh_of, put
from jax.sharding import PartitionSpec as P

import ga_optax as ga

K = 4
SPECS = on.SHARDED | {"bias": P("data")}
MESH = mesh_of(8)


def moved(audit):
    """The bytes that each kind of collective sends: in loops, and outside of them."""
    sent = collections.Counter()
    for c in audit.collectives:
        sent[c.kind, bool(c.loops)] += c.total_bytes
    return sent


@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("sync", ["last", "each"])
def test_every_gradient_is_reduce_scattered_once(sync, optimize):
    axis = ga.DataAxis("data", grad_specs=SPECS, sync=sync)
    audit, got = on.window(MESH, K, optimize=optimize, data_axis=axis)
    each, times = sync == "each", K if sync == "each" else 1
    scattered = {("reduce-scatter", each): times * on.GRADIENT_BYTES}
    assert moved(audit) == scattered | {("all-reduce", False): on.SCALARS}
    assert jax.tree.map(lambda g: g.sharding.spec, got[1]) == SPECS


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("optimize", [True, False])
def test_a_weight_of_0_keeps_a_nan_on_its_device(optimize):
    """A micro-batch of one device is padding alone, with NaN in it."""
    batch, rows = on.make_batch(), slice(10, 12)
    batch["mask"] = batch["mask"].at[rows].set(0.0)
    batch["x"] = batch["x"].at[rows].set(jnp.nan)
    args = put(on.make_params(), MESH, P()), put(batch, MESH, P("data"))

    def gradient(weight_fn=on.count, **options):
        axis = ga.DataAxis("data", mesh=MESH, **options)
        roles = {"weight_fn": weight_fn, "optimize": optimize, "data_axis": axis}
        return jax.jit(mean_of(on.token_loss, K, **roles))(*args)

    want, each = gradient(), {"grad_specs": SPECS, "sync": "each"}
    rest = jax.tree.map(lambda x: jnp.delete(x, rows, 0), batch)
    on.assert_close(want, jax.value_and_grad(on.token_loss)(on.make_params(), rest))
    on.assert_close(gradient(**each), want)
    # The twin: it has a weight.
    assert jnp.isnan(gradient(lambda batch: jnp.ones([]), **each)[1]["in"]).all()


def test_inside_a_shard_map_it_is_the_same():
    axis = ga.DataAxis("data", grad_specs=SPECS, sync="each")
    fun = ga.value_and_grad(on.mean_loss, K, data_axis=axis)
    audit, got = on.mapped_and_run(fun, MESH, on.ROWS_APART, (P(), SPECS))
    assert moved(audit)["reduce-scatter", True] == K * on.GRADIENT_BYTES
    on.assert_close(got, on.whole_batch())


def test_specs_split_the_largest_dimension_that_can_be():
    axis = ga.DataAxis("data", mesh=MESH)
    assert axis.specs(on.make_params()) == SPECS
    shapes = {(): P(), (12, 3): P()}
    shapes |= {(16, 99, 8): P("data"), (8, 16, 16): P(None, "data")}
    trees = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert axis.specs(trees) == list(shapes.values())
