"""What each leaf of the parameters adds to a program before it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga
from ga_optax import accumulator

K = 4


def loss(params, x):
    for scale in params:
        x = jnp.tanh(x * scale)
    return jnp.mean(jnp.square(x))


def plain_scan(params, x):
    def micro_step(carry, x):
        new = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(jnp.add, carry, new), None

    zeros = jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)
    parts = jnp.reshape(x, (K, -1, *x.shape[1:]))
    return jax.tree.map(lambda x: x / K, jax.lax.scan(micro_step, zeros, parts)[0])


def lines(step, leaves):
    params = [jax.ShapeDtypeStruct((1, 3), jnp.float32)] * leaves
    x = jax.ShapeDtypeStruct((2 * K, 3), jnp.float32)
    return len(jax.jit(step).lower(params, x).as_text().splitlines())


def of_a_leaf(step):
    """How many lines one leaf more adds to a program."""
    return (lines(step, 24) - lines(step, 8)) / 16


def test_a_leaf_adds_to_a_program_what_it_adds_to_a_plain_scan(monkeypatch):
    assert of_a_leaf(ga.value_and_grad(loss, K)) <= of_a_leaf(plain_scan)
    # The twin begins with zeros that it clears, one by one.
    monkeypatch.setattr(accumulator, "begun", cleared)
    assert of_a_leaf(ga.value_and_grad(loss, K)) > of_a_leaf(plain_scan)


def cleared(params, dtype):
    acc = accumulator.init(params, dtype)
    clear = lambda x: accumulator.cleared(x, acc.count == 0)  # noqa: E731
    return acc._replace(total=jax.tree.map(clear, acc.total))


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_a_window_begins_with_negative_zeros(dtype):
    params = [jnp.ones(2, dtype), jnp.ones(2, dtype), jnp.ones(3, dtype)]
    made = []

    def begun(params):
        made.append(accumulator.begun(params, np.dtype(np.float32)))
        return made[0]

    acc = jax.jit(begun)(params)
    first, second, _ = made[0].total
    assert first is second
    for x, p in zip(acc.total, params, strict=True):
        assert (x.shape, x.dtype) == (p.shape, dtype)
        assert not np.any(x)
        assert np.signbit(x.real).all()
        assert np.signbit(x.imag).all() or dtype == np.float32


def test_arrays_outside_of_a_program_are_not_shared():
    params = [jnp.ones(2), jnp.ones(2)]
    first, second = accumulator.begun(params, np.dtype(np.float32)).total
    assert first is not second
