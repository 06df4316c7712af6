"""With sync="each" parameters are gathered where they are used, and no activations."""

import jax
import jax.numpy as jnp
import pytest
from helpers import array, mesh_of, put, without_pass
from jax.sharding import PartitionSpec as P

import ga_optax as ga

K, DEVICES, LAYERS, WIDTH = 2, 4, 2, 64


def loss(params, x):
    low = lambda x: x.astype(jnp.bfloat16)  # noqa: E731

    @jax.checkpoint
    def layer(h, p):
        h = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        y = jnp.tanh((h * p["gain"][None, None]).astype(jnp.bfloat16) @ low(p["up"]))
        return h + (y @ low(p["down"])).astype(jnp.float32), None

    h = low(params["table"])[x].astype(jnp.float32)
    return jnp.mean(jax.lax.scan(layer, h, params["layers"])[0] ** 2)


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["gathered", "left to the compiler"])
def test_parameters_and_gradients_cross_the_network_and_nothing_else(kind, monkeypatch):
    mesh, layers = mesh_of(DEVICES), (LAYERS, WIDTH)
    params = {"up": array(*layers, 2 * WIDTH), "down": array(LAYERS, 2 * WIDTH, WIDTH)}
    params = {"table": array(32, WIDTH), "layers": params | {"gain": array(*layers)}}
    specs = jax.tree.map(lambda p: P(*[None] * (p.ndim - 1), "data"), params)
    tokens = jnp.arange(K * DEVICES * 2 * 128).reshape(-1, 128) * 7 % 32
    args = put(params, mesh, specs), put(tokens, mesh, P("data"))
    if kind != "gathered":  # the twin
        without_pass(monkeypatch, "gathered")
    each = ga.DataAxis("data", mesh=mesh, param_specs=specs, sync="each")
    compiled = (
        jax.jit(ga.value_and_grad(loss, K, data_axis=each)).lower(*args).compile()
    )
    found = ga.audit(compiled, mesh).collectives
    kinds = {c.kind for c in found}
    size = sum(p.nbytes for p in jax.tree.leaves(params))
    moved = sum(c.total_bytes for c in found if c.loops)
    is_small = moved <= 2 * K * size and kinds <= {"all-gather", "all-reduce"}
    assert is_small == (kind == "gathered"), (kinds, moved / size)
