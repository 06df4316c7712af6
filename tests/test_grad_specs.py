"""Gradients of whole parameters that come back sharded: ZeRO-1 and ZeRO-2."""

import functools

import jax
import jax.numpy as jnp
import pytest
import test_devices as on
from helpers import nbytes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._loop import in_place

K, DEVICES = 4, 8
SPECS = on.SHARDED | {"bias": P("data")}


@pytest.fixture
def mesh():
    return on.make_mesh(AxisType.Auto)


def moved(audit):
    """The bytes that each kind of collective sends: in loops, and outside of them."""
    sent = {}
    for c in audit.collectives:
        place = c.kind, bool(c.loops)
        sent[place] = sent.get(place, 0) + c.total_bytes
    return sent


@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("sync", ["last", "each"])
def test_every_gradient_is_reduce_scattered_once(sync, optimize, mesh):
    params, batch = on.make_params(), on.make_batch()
    axis = ga.DataAxis("data", grad_specs=SPECS, sync=sync)
    fun = functools.partial(ga.value_and_grad, optimize=optimize, data_axis=axis)
    args = on.put(params, mesh, P()), on.put(batch, mesh, P("data"))
    audit, got = on.compiled_and_run(fun(on.mean_loss, K), mesh, *args)
    each, times = sync == "each", K if sync == "each" else 1
    scattered = {("reduce-scatter", each): times * on.GRADIENT_BYTES}
    assert moved(audit) == scattered | {("all-reduce", False): on.SCALARS}
    assert jax.tree.map(lambda g: g.sharding.spec, got[1]) == SPECS
    want = jax.value_and_grad(on.mean_loss)(params, batch)
    on.assert_close(got, want)


@pytest.mark.exhaustive
@pytest.mark.skipif(not in_place.HAS_REFS, reason="gradients are whole for a moment")
def test_a_model_that_scans_never_holds_a_whole_gradient(mesh):
    """The sum, and the gradient of one layer; all of it if layers are split."""
    layers, width = 8, 128

    def loss(params, x):
        h, _ = jax.lax.scan(jax.checkpoint(on._layer), x, params)
        return jnp.mean(jnp.square(h))

    params = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((4 * K * DEVICES, width), jnp.float32)
    x = x.update(sharding=NamedSharding(mesh, P("data")))

    def temporaries(spec, sync="each"):
        axis = ga.DataAxis("data", mesh=mesh, grad_specs=spec, sync=sync)
        step = jax.jit(ga.value_and_grad(loss, K, data_axis=axis))
        memory = step.lower(params, x).compile().memory_analysis()
        return memory.temp_size_in_bytes / nbytes(params)

    assert temporaries(P(None, "data")) < 1 / DEVICES + 2 / layers
    assert temporaries(P("data")) > 1
    assert temporaries(P(None, "data"), "last") > 1


def test_inside_a_shard_map_it_is_the_same(mesh):
    params, batch = on.make_params(), on.make_batch()
    axis = ga.DataAxis("data", grad_specs=SPECS, sync="each")
    fun = ga.value_and_grad(on.mean_loss, K, data_axis=axis)
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), SPECS)
    )
    audit, got = on.compiled_and_run(mapped, mesh, params, batch)
    assert moved(audit)["reduce-scatter", True] == K * on.GRADIENT_BYTES
    on.assert_close(got, jax.value_and_grad(on.mean_loss)(params, batch))


def test_specs_split_the_largest_dimension_that_can_be(mesh):
    axis = ga.DataAxis("data", mesh=mesh)
    assert axis.specs(on.make_params()) == SPECS
    shapes = {(): P(), (12, 3): P(), (16, 99, 8): P("data")}
    shapes[8, 16, 16] = P(None, "data")
    trees = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert axis.specs(trees) == list(shapes.values())
