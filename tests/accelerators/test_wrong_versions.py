"""What versions of XLA compile wrongly, and what we do about it: docs/compilers.md.

`make wrong JAX=0.11.2` runs this file with the compilers of that version.
"""

import re

import jax
import jax.numpy as jnp
import pytest
import targets  # before a backend starts
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax import accumulator
from ga_optax._compiled import plan

K, WORDS, WIDTH, ROWS = 2, 96, 64, 16
TABLE = 4 * WORDS * WIDTH


def looked_up(p, b):
    return jnp.mean(jnp.sum(p[b["ids"]] * b["y"], -1))


def rows_meet(p, b):
    return jax.nn.logsumexp(jnp.sum(p[b["ids"]] * b["y"], (1, 2)), 0)


STEPS = {
    "value_and_grad": lambda loss: ga.value_and_grad(loss, K),
    "plain": lambda loss: ga.value_and_grad(loss, K, optimize=False),
    "microbatch": lambda loss: jax.value_and_grad(ga.microbatch(loss, K)),
    "accumulate": lambda loss: (
        lambda p, b: ga.accumulate(loss, K)(accumulator.init(p), p, b)
    ),
}


def compiled(target, step):
    """A step on a mesh that it is not told of: a whole table, and sharded rows."""
    mesh = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def placed(dims, dtype, spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    ids = placed((ROWS, 8), jnp.int32, P("d"))
    y = placed((ROWS, 8, WIDTH), jnp.float32, P("d"))
    table = placed((WORDS, WIDTH), jnp.float32, P())
    with plan.find_machine(target).arguments((table, {"ids": ids, "y": y})) as args:
        return jax.jit(lambda *args: step(*args)).lower(*args).compile()


def loses_rows(program):
    """True if devices, which are told apart in the loop, add up only behind it."""
    adds = [c for c in ga.audit(program).in_loop if c.num_bytes >= TABLE]
    return "partition-id" in program.as_text() and not adds


@pytest.mark.parametrize("target", ["h100:4", "v5e:2x2"])
@pytest.mark.parametrize("loss", [looked_up, rows_meet])
@pytest.mark.parametrize("how", STEPS)
def test_no_device_forgets_what_it_added(how, loss, target, monkeypatch):
    if (how, loss) == ("accumulate", rows_meet):
        pytest.skip("micro-batches, each by itself")
    assert not loses_rows(compiled(target, STEPS[how](loss)))
    # The twin: without a fence.
    due = accumulator.LOSES_ROWS
    monkeypatch.setattr(accumulator, "LOSES_ROWS", False)
    assert loses_rows(compiled(target, STEPS[how](loss))) == due


# -- Residuals on the host -------------------------------------------------------------

LAYERS, LAYER = 16, 512
RESIDUAL = 4 * 256 * LAYER
POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)


def offloading(w, x):
    def layer(h, w):
        h = checkpoint_name(h, "h")
        return h + jnp.tanh(jnp.tanh(h @ w) @ w.T), None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer, policy=POLICY), x, w)[0] ** 2)


def test_residuals_are_read_from_the_last_to_the_first():
    """Where a GPU's copy steps through the stack; before 0.10.2 it reads an index."""
    device = SingleDeviceSharding(targets.device("h200"))
    args = [
        jax.ShapeDtypeStruct(dims, jnp.float32, sharding=device)
        for dims in ((LAYERS, LAYER, LAYER), (8 * 256, LAYER))
    ]

    def step(w, x):  # JAX lowers the moves inside if one is outside
        there = jax.device_put(x[0], jax.memory.Space.Host)
        return ga.value_and_grad(offloading, 8)(w, x), there

    program = jax.jit(step).lower(*args).compile()
    found = re.findall(r'byte_stride":"?(-?\d+)', program.as_text())
    steps = set(map(int, found))
    stays = jax.__version_info__ < (0, 10, 2)
    wrong = jax.__version_info__[:3] in ((0, 10, 2), (0, 11, 0))
    assert (RESIDUAL in steps, -RESIDUAL in steps) == (not stays, not stays | wrong)
