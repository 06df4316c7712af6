"""Random softmaxes over rows: exponents, shifts, factors and masks of any size.

    S = Σ f · exp(a - g),  a = t · x       loss = Σ log S, Σ S, or Σ f · log_softmax(a)

The exponents are whole and even numbers, which any dtype has and subtracts exactly. So
what is left are the roundings of `exp`, of factors and of sums. In float64 nothing
overflows, so that the same program is the oracle.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = jnp.float32, jnp.bfloat16
N, C = 8, 3

# By name, a shift of the rows: of all of them, and of those that a mask keeps.
SHIFTS = {
    "max": lambda a, kept: a.max(0),
    "max, kept": lambda a, kept: kept.max(0),
    "guarded": lambda a, kept: jnp.where(jnp.isfinite(kept.max(0)), kept.max(0), 0),
    "of all": lambda a, kept: a.max(),
    "no less than 0": lambda a, kept: jnp.maximum(a.max(0), 0),
    "no more than 0": lambda a, kept: jnp.minimum(a.max(0), 0),
    "half": lambda a, kept: (a.max(0) + a.min(0)) / 2,
    "another column": lambda a, kept: a.max(0)[::-1],
    "min": lambda a, kept: a.min(0),
}
FACTORS = "none", "near 1", "a mask", "any size", "large", "of columns"
MASKS = "none", "after exp", "before exp"
LOSSES = "log", "sum", "log_softmax"


def program(seed):
    """A random program in one of two dtypes, and its batch.

    It returns a number for each column, whose sum is the loss, and how large what is
    added up to each of them is.
    """
    rng = np.random.default_rng(seed)
    dtype, limit = DTYPES[seed % 2], math.log(float(jnp.finfo(jnp.float32).max))
    shift, factors = rng.choice(list(SHIFTS)), rng.choice(FACTORS)
    masks, loss = rng.choice(MASKS), rng.choice(LOSSES, p=(0.5, 0.3, 0.2))
    stops, together = rng.random() < 0.7, rng.random() < 0.5
    largest = limit * rng.choice((0.05, 0.5, 0.9))
    x = 2 * np.round(rng.uniform(-largest, largest, (N, C)) / 2)
    x = np.sort(x, 0)[:: rng.choice((1, -1))] if together else x
    f = {
        "none": np.ones_like(x),
        "near 1": rng.uniform(0.5, 2, x.shape),
        "a mask": rng.random(x.shape) < 0.5,
        "any size": np.exp(rng.uniform(-0.9, 0.9, x.shape) * limit),
        "large": np.where(x < x.max(0), 0.4, 1 / np.exp(limit)) * np.exp(limit),
        "of columns": np.exp(rng.uniform(-0.3, 0.3, (1, C)) * limit) + 0 * x,
    }[factors]
    mask = rng.random(x.shape) < 0.6
    has_factors = factors != "none" or loss == "log_softmax"

    def columns(t, batch):
        x, f, mask = batch
        a = kept = t * x
        if masks != "none":
            kept = jnp.where(mask, a, -jnp.inf)
        if loss == "log_softmax":
            found = (f * jax.nn.log_softmax(a, 0)).sum(0)
            return found, abs(found) + f.sum(0)
        g = SHIFTS[shift](a, kept)
        g = jax.lax.stop_gradient(g) if stops else g
        terms = jnp.exp((kept if masks == "before exp" else a) - g)
        terms = terms * f if has_factors else terms
        terms = jnp.where(mask, terms, 0) if masks != "none" else terms
        total = terms.sum(0)
        if loss == "log":
            return jnp.log(total), abs(jnp.log(total)) + 1
        return total, total

    batch = jnp.asarray(x, dtype), jnp.asarray(f, dtype), jnp.asarray(mask)
    return columns, batch
