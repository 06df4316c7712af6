"""What each leaf of the parameters adds to a program before it is compiled."""

import jax
import jax.numpy as jnp
import pytest

import ga_optax as ga
from ga_optax import accumulator
from ga_optax._passes import ir

K = 4


def loss(params, x):
    for scale in params:
        x = jnp.tanh(x * scale)
    return jnp.mean(jnp.square(x))


def terms(params, x):
    """Each matrix in a term of its own: all their products share an operand."""
    products = (x.astype(w.dtype) @ w for w in params)
    return sum(jnp.mean(jnp.square(y)).astype(jnp.float32) for y in products)


def plain_scan(loss):
    def window(params, x):
        def micro_step(carry, x):
            new = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), carry, new), None

        wide = [jnp.zeros(w.shape, jnp.float32) for w in params]
        parts = jnp.reshape(x, (K, -1, *x.shape[1:]))
        value, grads = jax.lax.scan(micro_step, (jnp.zeros([]), wide), parts)[0]
        means = [(g / K).astype(w.dtype) for g, w in zip(grads, params, strict=True)]
        return value / K, means

    return window


def lines(step, leaves, leaf):
    x = jax.ShapeDtypeStruct((2 * K, 3), jnp.float32)
    return len(jax.jit(step).lower([leaf] * leaves, x).as_text().splitlines())


VECTOR = jax.ShapeDtypeStruct((1, 3), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((3, 3), jnp.float32)


def of_a_leaf(step, leaf=VECTOR):
    """How many lines one leaf more adds to a program."""
    return (lines(step, 24, leaf) - lines(step, 8, leaf)) / 16


def test_a_leaf_adds_to_a_program_what_it_adds_to_a_plain_scan(monkeypatch):
    assert of_a_leaf(ga.value_and_grad(loss, K)) <= of_a_leaf(plain_scan(loss))
    # The twin begins with zeros that it clears, one by one.
    monkeypatch.setattr(accumulator, "begun", cleared)
    assert of_a_leaf(ga.value_and_grad(loss, K)) > of_a_leaf(plain_scan(loss))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_that_are_alike_are_traced_once_and_are_one_function(
    dtype, monkeypatch
):
    leaf, traced = MATRIX.update(dtype=dtype), []
    once = ir.traced
    monkeypatch.setattr(ir, "traced", lambda *a: traced.append(1) or once(*a))
    plain = of_a_leaf(plain_scan(terms), leaf)
    # A mean in bfloat16 is rounded once, where the sum of all rows is.
    more = 1.3 if dtype == jnp.bfloat16 else 1.0
    assert of_a_leaf(ga.value_and_grad(terms, K), leaf) <= more * plain
    assert len(traced) == 2  # of two programs
    # The twin has no name for what they have in common.
    monkeypatch.setattr(ir, "key_of", lambda *_: object())
    assert of_a_leaf(ga.value_and_grad(terms, K), leaf) > 1.2 * plain
    assert len(traced) == 2 + 24 + 8


def cleared(params, dtype):
    acc = accumulator.init(params, dtype)
    clear = lambda x: accumulator.cleared(x, acc.count == 0)  # noqa: E731
    return acc._replace(total=jax.tree.map(clear, acc.total))
