"""With `data_axis` the axis spans the micro-batches of all devices, in row order."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from window_losses import (
    ROWS,
    arrays,
    batch_statistics,
    contrastive,
    dice,
    every_collective,
    of_the_window,
    whitened,
    whole_token_mean,
)

import ga_optax as ga

pytestmark = pytest.mark.skipif(
    jax.device_count() < 4 or jax.__version_info__ < (0, 9), reason="needs four devices"
)
DEVICES, K = 4, 2


@pytest.fixture
def mesh():
    return jax.make_mesh(
        (DEVICES,), ("data",), (AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )


def off_by(got, due):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(due), strict=True)
    return max(float(jnp.max(abs(x - y)) / (jnp.max(abs(y)) + 1e-9)) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "fun",
    [
        whole_token_mean,
        dice,
        whitened,
        contrastive,
        batch_statistics,
        every_collective,
    ],
)
def test_devices_and_micro_batches_say_nothing_about_the_loss(fun, mesh):
    with jax.enable_x64(True):
        params, batch = arrays()
        due = jax.jit(of_the_window(fun, DEVICES * K))(params, batch)
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        data_axis = ga.DataAxis("data", mesh=mesh)
        step = ga.value_and_grad(fun, K, axis_name=ROWS, data_axis=data_axis)
        assert off_by(jax.jit(step)(params, batch), due) < 1e-12
        # The twin: another row on the first device.
        moved = batch | {"x": batch["x"].at[0].multiply(3.0)}
        assert off_by(jax.jit(step)(params, moved), due) > 1e-3


def test_each_level_crosses_the_devices_once_and_no_loop_communicates(mesh):
    params, batch = arrays()
    params, batch = (
        jax.tree.map(lambda x: x.astype("float32") if x.dtype == float else x, tree)
        for tree in (params, batch)
    )
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    data_axis = ga.DataAxis("data", mesh=mesh)

    def audited(fun):
        step = ga.value_and_grad(fun, K, axis_name=ROWS, data_axis=data_axis)
        audit = ga.audit(jax.jit(step).lower(params, batch).compile())
        assert not audit.in_loop
        return len(audit.collectives)

    assert audited(whole_token_mean) <= 3  # counts; the loss; gradients
    assert audited(contrastive) <= 3  # there, back, and gradients


@pytest.mark.slow
def test_fsdp_and_aux_go_with_it(mesh):
    with jax.enable_x64(True):
        params, batch = arrays()

        def fun(p, b):
            return contrastive(p, b), {"rows": jax.lax.axis_index(ROWS), "t": p["t"]}

        due = jax.jit(of_the_window(contrastive, DEVICES * K))(params, batch)
        specs = {"w": P("data"), "v": P(), "t": P()}
        params = jax.tree.map(
            lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs
        )
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        data_axis = ga.DataAxis("data", mesh=mesh, param_specs=specs)
        step = ga.value_and_grad(
            fun,
            K,
            axis_name=ROWS,
            has_aux=True,
            aux={"rows": "stack", "t": "mean"},
            data_axis=data_axis,
        )
        (value, aux), grads = jax.jit(step)(params, batch)
        assert off_by((value, grads), due) < 1e-12
        assert list(aux["rows"]) == list(range(DEVICES * K))
        assert grads["w"].sharding.spec == P("data")


def test_what_does_not_go_with_devices_is_an_error(mesh):
    each = ga.DataAxis("data", mesh=mesh, sync="each")
    with pytest.raises(ValueError, match='sync="last"'):
        ga.value_and_grad(contrastive, K, axis_name=ROWS, data_axis=each)
    with pytest.raises(ValueError, match="a name of its own"):
        ga.value_and_grad(contrastive, K, axis_name="data", data_axis="data")

    def local(params, batch):
        return ga.value_and_grad(contrastive, K, axis_name=ROWS, data_axis="data")(
            params, batch
        )

    whole, split = P(), P("data")
    with pytest.raises(ValueError, match="check_vma=False"):
        jax.shard_map(local, mesh=mesh, in_specs=(whole, split), out_specs=whole)(
            *arrays()
        )
