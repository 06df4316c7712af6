"""Accumulating costs one gradient tree, and the batch costs nothing."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import nbytes, temporaries

import ga_optax as ga
from ga_optax._loop.micro_step import HAS_REFS

LAYERS, WIDTH, HIDDEN, LENGTH = 12, 512, 2048, 64  # 8.4 MB a layer
K, BATCH = 8, 32

pytestmark = pytest.mark.skipif(
    not HAS_REFS, reason="the plain sum holds two gradient trees"
)


def loss(params, x):
    def layer(h, p):
        return h + jnp.tanh(h @ p["up"]) @ p["down"], None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean(jnp.square(h @ params["out"]))


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"up": array(LAYERS, WIDTH, HIDDEN), "down": array(LAYERS, HIDDEN, WIDTH)}
PARAMS = {"layers": PARAMS, "out": array(WIDTH, 64)}
TREE = nbytes(PARAMS) / 1e6
OPT = optax.adam(1e-3)


def batch(rows):
    return array(rows, LENGTH, WIDTH)


def megabytes(fun, *args, donate=()):
    taken = temporaries(jax.jit(fun, donate_argnums=donate), *args)
    assert taken > 1e6  # tiny programs report 0
    return taken / 1e6


@functools.cache
def alone(k, rows, optimize=True):
    gradient = jax.value_and_grad(loss)
    if k:
        gradient = ga.value_and_grad(loss, k, optimize=optimize)
    return megabytes(gradient, PARAMS, batch(rows))


def with_adam(gradient, rows):
    def step(params, state, x):
        value, grads = gradient(params, x)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes its count
            updates, state = OPT.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(OPT.init, PARAMS)
    return megabytes(step, PARAMS, state, batch(rows), donate=(0, 1))


# Where weights are divided by, XLA:CPU writes the mean beside the sum; the compilers of
# accelerators do not (`tests/accelerators/test_memory.py`).
@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [K, 6])
def test_with_adam_a_window_takes_little_more_than_a_single_micro_batch(k):
    size = BATCH // K
    single = with_adam(jax.value_and_grad(loss), size)

    def window(**options):
        return with_adam(ga.value_and_grad(loss, k, **options), k * size)

    assert window() <= 1.10 * single
    # The twin: a sum by hand takes another gradient tree.
    assert window(optimize=False) > 1.5 * single


def test_it_does_not_grow_with_the_batch_and_the_undivided_one_does():
    assert abs(alone(2 * K, 2 * BATCH) - alone(K, BATCH)) < 0.1
    assert alone(0, 2 * BATCH) > 1.5 * alone(0, BATCH)


@pytest.mark.cpu
def test_a_donated_accumulator_is_updated_where_it_lies():
    acc = jax.eval_shape(ga.accumulator.init, PARAMS)
    call = ga.accumulate(loss, 2)
    taken = megabytes(call, acc, PARAMS, batch(2 * BATCH // K), donate=0)
    assert taken < 0.5 * TREE
