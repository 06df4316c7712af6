"""In float16 nothing overflows that does not in the undivided batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("fast_compilation")

K, ROWS, WIDTH = 8, 64, 4
HALF = jnp.float16
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)) / 100, HALF)
SCALE = 32768.0  # as loss scaling starts with


def scaled_sum(w, x):
    return jnp.sum((x @ w.astype(HALF)).astype(jnp.float32)) * SCALE


def sum_in_half(w, x):
    return jnp.sum((x @ w.astype(HALF)) * HALF(SCALE / 2))


def root(w, x):
    return jnp.sqrt(scaled_sum(w, x) ** 2 + 1)


@pytest.mark.grid(1, 12)
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("dtype", [HALF, jnp.float32], ids=["half", "float32"])
@pytest.mark.parametrize("fun", [scaled_sum, sum_in_half, root])
def test_a_scaled_sum_overflows_only_where_it_does_without(fun, dtype, optimize):
    w = jnp.ones(WIDTH, dtype)
    due, of_due = jax.jit(jax.value_and_grad(fun))(w, X)
    step = ga.value_and_grad(fun, K, optimize=optimize)
    got, grads = jax.jit(step)(w, X)
    assert np.all(np.isfinite(of_due))
    assert (grads.dtype, got.dtype) == (of_due.dtype, due.dtype)
    # Products of 64 rows are rounded to 11 bits; their sum is in float32 or wider.
    size = SCALE * jnp.sum(jnp.abs(X.astype(jnp.float32)), 0)
    bound = 4 * float(jnp.finfo(HALF).eps) * size
    np.testing.assert_array_less(jnp.abs(grads - of_due), bound)
    np.testing.assert_allclose(got, due, rtol=0, atol=float(jnp.sum(bound)))


def test_what_overflows_without_it_still_does():
    """The twin: the gradients are as large as they are."""
    w = jnp.ones(WIDTH, HALF)

    def fun(w, x):
        return scaled_sum(w, x) * 1000

    step = jax.jit(ga.value_and_grad(fun, K))
    assert not np.all(np.isfinite(jax.grad(fun)(w, X)))
    assert not np.all(np.isfinite(step(w, X)[1]))


def test_small_gradients_keep_their_digits():
    w = jnp.ones(WIDTH, HALF)

    def fun(w, x):
        return jnp.sum((x @ w).astype(jnp.float32)) / SCALE * 8

    due = jax.jit(jax.grad(fun))(w, X)
    _, got = jax.jit(ga.value_and_grad(fun, K))(w, X)
    tiny = float(jnp.finfo(HALF).smallest_subnormal)
    np.testing.assert_array_less(jnp.abs(got - due), 65 * tiny)
    assert jnp.any(jnp.abs(due) > 64 * tiny)
