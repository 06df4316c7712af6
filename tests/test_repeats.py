"""Equations that are alike are differentiated once, and the program is the same."""

import helpers
import jax
import jax.numpy as jnp
import pytest
from helpers import normal
from jax.interpreters import ad

import ga_optax as ga

LAYERS, WIDTH = 6, 4
OPTIMIZE = pytest.mark.parametrize("optimize", [True, False])


def dense(params, x):
    for w in params:
        x = jnp.tanh(x @ w + 0.5 * jnp.square(x))
    return jnp.mean(x * x)


def arguments(dtype=jnp.float32):
    ws = [normal(WIDTH, WIDTH, seed=i).astype(dtype) for i in range(LAYERS)]
    return ws, normal(8, WIDTH, seed=9).astype(dtype)


def mixed(params, x):
    """Layers with a jitted function, a rule, a checkpoint, keys and a scan."""

    @jax.checkpoint
    def layer(x, w):
        return jax.nn.relu(jax.nn.softmax(x @ w) - 0.2)

    for i, w in enumerate(params):
        keep = jax.random.bernoulli(
            jax.random.fold_in(jax.random.key(0), i), 0.5, (WIDTH,)
        )
        table = jnp.sin(jnp.arange(WIDTH, dtype=x.dtype) * 0.7)
        x = x + jnp.where(keep[None], layer(x, w), 0) * table[None]
    stacked = jnp.stack(params)
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stacked)[0]
    return jnp.mean(jnp.square(x))


def text_of(loss, *args, **options):
    step = jax.jit(ga.value_and_grad(loss, 2, **options))
    return step.lower(*args).as_text()


@OPTIMIZE
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("loss", [dense, mixed])
def test_the_program_is_that_without_the_pass(loss, dtype, optimize, monkeypatch):
    args = arguments(dtype)
    with_pass = text_of(loss, *args, optimize=optimize)
    helpers.without_pass(monkeypatch, "repeats")
    assert text_of(loss, *args, optimize=optimize) == with_pass


@OPTIMIZE
def test_a_rule_is_run_once_for_all_layers(optimize, monkeypatch):
    runs = []
    rule = ad.primitive_jvps[jax.lax.tanh_p]

    def counted(*args, **kwargs):
        runs.append(1)
        return rule(*args, **kwargs)

    monkeypatch.setitem(ad.primitive_jvps, jax.lax.tanh_p, counted)
    options = {"optimize": optimize}
    jax.make_jaxpr(ga.value_and_grad(dense, 2, **options))(*arguments())
    assert len(runs) == 1
    helpers.without_pass(monkeypatch, "repeats")
    jax.make_jaxpr(ga.value_and_grad(dense, 2, **options))(*arguments())
    assert len(runs) == 1 + LAYERS
