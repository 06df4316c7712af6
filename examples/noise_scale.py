"""The gradient noise scale of a small network: the largest batch that still pays.

The scale is tr Σ / |G|²: at this batch size noise and gradient are equal. Let g_i be
the gradient of micro-batch i of k, each of w examples, and g their mean over a window
of W = k·w. Then (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018)

    tr Σ  ≈  (w·Σ|g_i|² - W·|g|²) / (k - 1)         |G|²  ≈  |g|² - tr Σ / W

It needs scikit-learn: the dependency group `demo`.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
import sklearn.datasets

import ga_optax as ga

SIZE, K = 8, 8  # examples in a micro-batch, micro-batches in a window
DECAY = 0.98  # of the means over windows: estimates of one window are far off
KEY = jax.random.key(0)
tx = ga.MultiSteps(optax.sgd(0.1), K, track_norm=True)


def loss(params, images, labels):
    """The mean cross-entropy."""
    logits = jax.nn.gelu(images @ params["hidden"]) @ params["out"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


@jax.jit
def window(params, state, digits, step):
    """One step, and the estimates of |G|² and tr Σ of its window."""

    def micro_step(carry, rows):
        params, state = carry
        grads = jax.grad(loss)(params, *(x[rows] for x in digits))
        square = optax.tree.norm(grads, squared=True)
        return ga.apply_gradients(tx, grads, state, params), square

    rows = ga.data.window_indices(KEY, step, len(digits[0]), SIZE * K, K)
    (params, state), squares = jax.lax.scan(micro_step, (params, state), rows)
    square = ga.grad_norm(state) ** 2
    trace = SIZE * (jnp.sum(squares) - K * square) / (K - 1)
    return params, state, jnp.stack([square - trace / (SIZE * K), trace])


if __name__ == "__main__":
    argparse.ArgumentParser().parse_args()
    digits: Any = sklearn.datasets.load_digits()
    digits = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)
    draws = [jax.random.normal(KEY, (64, 32)) / 8, jax.random.normal(KEY, (32, 10)) / 6]
    params = dict(zip(("hidden", "out"), draws, strict=True))
    state, mean = tx.init(params), jnp.zeros(2)
    for step in range(600):
        params, state, estimates = window(params, state, digits, step)
        mean = DECAY * mean + (1 - DECAY) * estimates
        if step % 100 == 99:
            scale = f"noise scale {mean[1] / mean[0]:.0f} examples"
            print(f"step {step + 1}: {scale}; a window has {SIZE * K}")
