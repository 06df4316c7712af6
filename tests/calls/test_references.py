"""Losses that write to references of their own, `jax.new_ref`: of all rows at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error, mean_of, normal, off

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

W, X = normal(3, 2), normal(8, 3)


def of_rows(w, x):
    ref = jax.new_ref(jnp.zeros((8, 2)))
    ref[...] = x @ w
    ref[2] = ref[2] * 3
    return jnp.std(ref[...])


def of_params(w, x):
    ref = jax.new_ref(w)
    ref[0] = ref[0] * 2
    return jnp.std(x @ ref[...])


@jax.custom_vjp
def by_rule(h):
    return jnp.std(h)


def written_back(h, ct):
    ref = jax.new_ref(h)
    ref[...] = ct * (h - h.mean()) / h.size / h.std()
    return (ref[...],)


by_rule.defvjp(lambda h: (by_rule(h), h), written_back)


@pytest.mark.grid(2)
@pytest.mark.parametrize("loss", [of_rows, of_params, lambda w, x: by_rule(x @ w)])
def test_a_loss_with_references_is_computed_of_all_rows_with_a_warning(loss):
    with pytest.warns(UserWarning, match="reference .jax.new_ref.|custom_vjp_call"):
        found = error(loss, 4, W, X)
    bound = 100 * X.size * np.finfo(np.float32).eps
    other = jax.value_and_grad(loss)(1.01 * W, X)  # the twin: other parameters
    assert found < bound < off(other, jax.value_and_grad(loss)(W, X))


def test_one_from_outside_of_the_loss_is_refused():
    ref = jax.new_ref(jnp.zeros([]))

    def loss(w, x):
        ref[...] += 1.0
        return jnp.mean(x @ w)

    with pytest.raises(TypeError, match="from outside of it"):
        ga.value_and_grad(loss, 4)(W, X)


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("k", [1, 4])
def test_micro_batches_by_themselves_write_to_one_from_outside(k, optimize):
    count = jax.new_ref(0)

    def loss(w, x, counts=True):
        if counts:
            count[...] += 1
        return jnp.mean(jnp.tanh(x @ w))

    want = jax.value_and_grad(loss)(W, X, counts=False)
    assert off(mean_of(loss, k, optimize=optimize)(W, X), want) < 1e-6
    assert int(count[...]) == k
