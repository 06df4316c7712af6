"""With sync="each" parameters are gathered where they are used, and no activations."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ga_optax as ga

K, DEVICES, LAYERS, WIDTH = 2, 4, 2, 64


def loss(params, x):
    @jax.checkpoint
    def layer(h, p):
        h = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        y = jnp.tanh((h * p["gain"][None, None]).astype(jnp.bfloat16) @ low(p["up"]))
        return h + (y @ low(p["down"])).astype(jnp.float32), None

    h = low(params["table"])[x].astype(jnp.float32)
    return jnp.mean(jax.lax.scan(layer, h, params["layers"])[0] ** 2)


def low(x):
    return x.astype(jnp.bfloat16)


def arguments(mesh):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)

    layers = {
        "gain": normal(LAYERS, WIDTH),
        "up": normal(LAYERS, WIDTH, 2 * WIDTH),
        "down": normal(LAYERS, 2 * WIDTH, WIDTH),
    }
    params = {"table": normal(32, WIDTH), "layers": layers}
    specs = jax.tree.map(lambda p: P(*[None] * (p.ndim - 1), "data"), params)
    places = jax.tree.map(lambda s: jax.NamedSharding(mesh, s), specs)
    rows = jax.NamedSharding(mesh, P("data"))
    tokens = jnp.asarray(rng.integers(0, 32, (K * DEVICES * 2, 128)))
    x = jax.device_put(tokens, rows)
    return specs, jax.device_put(params, places), x


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["gathered", "left to the compiler"])
def test_parameters_and_gradients_cross_the_network_and_nothing_else(kind, monkeypatch):
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(auto,))
    specs, params, x = arguments(mesh)
    if kind != "gathered":  # the twin
        helpers.without_pass(monkeypatch, "gathered")
    each = ga.DataAxis("data", mesh=mesh, param_specs=specs, sync="each")
    step = jax.jit(ga.value_and_grad(loss, K, data_axis=each)).lower(params, x)
    compiled = step.compile()
    found = ga.audit(compiled, mesh).collectives
    kinds = {c.kind for c in found}
    size = sum(p.nbytes for p in jax.tree.leaves(params))
    moved = sum(c.total_bytes for c in found if c.loops)
    is_small = moved <= 2 * K * size and kinds <= {"all-gather", "all-reduce"}
    assert is_small == (kind == "gathered"), (kinds, moved / size)
