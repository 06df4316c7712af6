"""The last micro-batch merges inside its backward pass, and no bit changes."""

import jax
import jax.numpy as jnp
import pytest
import test_devices as on
from helpers import mean_of
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._loop import in_place
from ga_optax.testing import assert_trees_bitwise_equal

K = 4
PLACES = {
    "whole": {},
    "gradients sharded": {"grad_specs": on.SHARDED},
    "sharded": {"param_specs": on.SHARDED},
}


def both(fun, mesh, place, *args, k=K, make=ga.value_and_grad, **options):
    """The audit and the result, without and with `overlap`."""
    found = []
    for overlap in (False, True):
        axis = ga.DataAxis("data", overlap=overlap, **PLACES[place])
        call = make(fun, k, data_axis=axis, **options)
        found.append(on.compiled_and_run(call, mesh, *args))
    return found


def placed(mesh, place, batch):
    specs = PLACES[place].get("param_specs", P())
    return on.put(on.make_params(), mesh, specs), on.put(batch, mesh, P("data"))


def in_loops(audit):
    """What is reduced inside of loops, and how often."""
    return [(c.num_bytes, c.times) for c in on.gradient_reductions(audit) if c.loops]


@pytest.mark.grid(1)
@pytest.mark.parametrize("place", PLACES)
def test_each_layer_meets_in_the_backward_loop_and_no_bit_changes(place):
    mesh = on.make_mesh(AxisType.Auto)
    args = placed(mesh, place, on.make_batch())
    (without, want), (audit, got) = both(on.mean_loss, mesh, place, *args)
    assert_trees_bitwise_equal(got, want)
    layer = 4 * on.WIDTH * on.WIDTH
    assert in_loops(without) == []
    assert in_loops(audit) == [(layer, on.LAYERS)] * in_place.HAS_REFS
    assert audit.total_bytes == without.total_bytes
    # The twin: the same sums in another order.
    other = jax.jit(jax.value_and_grad(on.mean_loss))(*args)
    on.assert_close(got, other)
    with pytest.raises(AssertionError):
        assert_trees_bitwise_equal(got, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", [1, K])
def test_weights_aux_carry_and_keys_are_the_same(k):
    """And a micro-batch of weight 0 keeps its NaN to itself, the last one too."""
    mesh = on.make_mesh(AxisType.Auto)
    batch = on.make_batch()
    last = slice(-64 // 8 // k, None)
    batch["mask"] = batch["mask"].at[last].set(0.0)
    batch["x"] = batch["x"].at[last].set(jnp.nan)
    params, batch = placed(mesh, "whole", batch)

    def loss(params, batch, key, seen):
        noise = 0.1 * jax.random.normal(key, batch["x"].shape)
        errors = on.squares(params, batch | {"x": batch["x"] + noise})
        kept = jnp.sum(batch["mask"])
        value = jnp.sum(errors * batch["mask"]) / kept
        return value, (seen + 1, jnp.sum(jnp.where(batch["mask"] > 0, errors, 0.0)))

    roles = {"rng_argnums": 2, "carry_argnums": 3, "has_aux": True}
    roles["weight_fn"] = lambda batch, aux: on.count(batch)
    args = params, batch, jax.random.key(0), jnp.int32(0)
    (_, want), (audit, got) = both(
        loss, mesh, "whole", *args, k=k, make=mean_of, **roles
    )
    assert len(in_loops(audit)) == in_place.HAS_REFS
    assert jnp.isfinite(want[1]["layers"]).all()
    assert_trees_bitwise_equal(got, want)
