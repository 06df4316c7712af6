"""What any loss costs: passes, counted in the program, and bytes of XLA."""

import jax
import jax.numpy as jnp
import pytest
from helpers import mean_of as by_themselves
from helpers import temporaries

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")
K, ROWS, IN, OUT = 4, 32, 64, 256
P = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(IN, OUT), (OUT, 8)]]
B = {
    "x": jax.ShapeDtypeStruct((ROWS, IN), jnp.float32),
    "m": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
}


def network(p, b):
    return (jnp.tanh(b["x"] @ p[0]) @ p[1]).sum(1)


def mean(p, b):
    return (network(p, b) ** 2).mean()


def masked_mean(p, b):
    return (network(p, b) ** 2 * b["m"]).sum() / b["m"].sum()


def total(p, b):
    return (network(p, b) ** 2).sum()


def root(p, b):
    return jnp.sqrt(mean(p, b))


def dice(p, b):
    q = jax.nn.sigmoid(network(p, b))
    return 1 - 2 * (q * b["m"]).sum() / (q.sum() + b["m"].sum())


def normalised(p, b):
    h = jnp.tanh(b["x"] @ p[0])
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1)
    return ((h @ p[1]) ** 4).mean()


def contrastive(p, b):
    z = jnp.tanh(b["x"] @ p[0]) @ p[1]
    logits = z @ jax.lax.stop_gradient(z).T
    return (jax.nn.logsumexp(logits, 1) - jnp.diagonal(logits)).mean()


def step(fun, make=ga.value_and_grad, **options):
    return jax.jit(make(fun, K, **options))


def counted(fun, *make, **options):
    """How many tanh and products are in its loops, each of which runs over all rows."""
    text = step(fun, *make, **options).lower(P, B).as_text()
    return text.count("stablehlo.tanh"), text.count("stablehlo.dot_general")


def number_of_each_row(k=1):
    return k * ROWS * 4


# Tanh run forward alone; products forward, and to the gradients of the weights.
@pytest.mark.parametrize("fun", [mean, total, masked_mean])
def test_what_a_weight_would_mend_takes_one_forward_and_one_backward_pass(fun):
    assert counted(fun) == (1, 2 + 3)
    if fun is masked_mean:  # the twin: the network is computed once more
        assert counted(root) == (2, 4 + 3)


@pytest.mark.parametrize("fun", [root, dice, normalised, contrastive])
def test_others_take_at_most_two_forward_passes_and_one_backward_pass(fun):
    tanh, products = counted(fun)
    once, of_loop = counted(fun, by_themselves)
    forward = jax.jit(fun).lower(P, B).as_text().count("stablehlo.dot_general")
    assert once == 1 < tanh == 2
    assert products <= of_loop + forward
    if fun is normalised:  # the twin: three levels, and nothing is kept
        assert counted(fun, residual_bytes=0)[0] > 2


@pytest.mark.grid(1, 4)
@pytest.mark.parametrize("fun", [mean, total, masked_mean, dice])
def test_they_take_the_temporaries_of_micro_batches_by_themselves(fun):
    def needs(fun, *make):
        return temporaries(step(fun, *make), P, B)

    loop = needs(fun, by_themselves)
    if fun in (mean, total):
        assert 0 < needs(fun) <= loop
    else:  # their counts and ratios: not even four numbers for each row
        assert needs(fun) < loop + number_of_each_row(4)
        # The twin: the layer of a normalisation is kept.
        assert needs(normalised) > loop + number_of_each_row(64)
