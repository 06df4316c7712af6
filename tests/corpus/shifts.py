"""Random softmaxes over rows: exponents, shifts, factors and masks of any size.

    S = Σ f · exp(a - g),  a = t · x       loss = Σ log S, Σ S, or Σ f · log_softmax(a)

The exponents are whole and even numbers, which any dtype has and subtracts exactly. So
what is left are the roundings of `exp`, of factors and of sums. The oracle is NumPy's,
with the exponents of an 80-bit number.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = jnp.float32, jnp.bfloat16, jnp.float64
N, C = 8, 3

# By name, a shift of the rows: of all of them, and of those that a mask keeps.
SHIFTS = {
    "max": lambda a, kept, xp: a.max(0),
    "max, kept": lambda a, kept, xp: kept.max(0),
    "guarded": lambda a, kept, xp: xp.where(xp.isfinite(kept.max(0)), kept.max(0), 0),
    "of all": lambda a, kept, xp: a.max(),
    "no less than 0": lambda a, kept, xp: xp.maximum(a.max(0), 0),
    "no more than 0": lambda a, kept, xp: xp.minimum(a.max(0), 0),
    "half": lambda a, kept, xp: (a.max(0) + a.min(0)) / 2,
    "another column": lambda a, kept, xp: a.max(0)[::-1],
    "min": lambda a, kept, xp: a.min(0),
}
FACTORS = "none", "near 1", "a mask", "any size", "large", "of columns"
MASKS = "none", "after exp", "before exp"
LOSSES = "log", "sum", "log_softmax"


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss of a number `t` and a batch: exponents, factors and a mask."""

    shift: str
    masks: str
    stops: bool
    has_factors: bool
    loss: str
    batch: tuple[jax.Array, jax.Array, jax.Array]

    def value(self, t, batch):
        x, f, mask = batch
        a = kept = t * x
        if self.masks != "none":
            kept = jnp.where(mask, a, -jnp.inf)
        g = SHIFTS[self.shift](a, kept, jnp)
        g = jax.lax.stop_gradient(g) if self.stops else g
        if self.loss == "log_softmax":
            return jnp.sum(f * jax.nn.log_softmax(a, 0))
        terms = jnp.exp((kept if self.masks == "before exp" else a) - g)
        terms = terms * f if self.has_factors else terms
        terms = jnp.where(mask, terms, 0) if self.masks != "none" else terms
        total = terms.sum(0)
        return jnp.sum(jnp.log(total) if self.loss == "log" else total)

    def oracle(self):
        """The value, its derivative, and the sums of the magnitudes of their terms."""
        x, f, mask = (np.asarray(x).astype(np.longdouble) for x in self.batch)
        keeps = mask > 0 if self.masks != "none" else np.ones_like(mask, bool)
        f = f if self.has_factors else np.ones_like(f)
        kept = np.where(keeps, x, -np.inf)
        if self.loss == "log_softmax":
            p = np.exp(x - x.max(0))
            p, log = p / p.sum(0), x - x.max(0) - np.log(p.sum(0))
            terms = f * log, f * (x - (p * x).sum(0))
            return *(y.sum() for y in terms), *(np.abs(y).sum() for y in terms)
        g = SHIFTS[self.shift](x, kept, np)
        # The derivative of a shift of t·x is the shift of x; of its twin, 0.
        slope = x - (0 if self.stops else g)
        terms = f * np.where(keeps, np.exp(np.where(keeps, x, 0) - g), 0)
        terms, slopes = terms.sum(0), (terms * np.where(keeps, slope, 0)).sum(0)
        most = abs(x).max() * (1 if self.stops else 2)  # those of rows, and of g
        if self.loss == "log":
            value, slopes = np.log(terms), slopes / terms
            return value.sum(), slopes.sum(), np.abs(value).sum() + 1, most * C
        return terms.sum(), slopes.sum(), terms.sum(), most * terms.sum()


def program(seed):
    """A random program in one of three dtypes."""
    rng = np.random.default_rng(seed)
    dtype, limit = DTYPES[seed % 3], math.log(float(jnp.finfo(DTYPES[seed % 3]).max))
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
    batch = jnp.asarray(x, dtype), jnp.asarray(f, dtype), jnp.asarray(mask)
    return Program(str(shift), str(masks), bool(stops), has_factors, str(loss), batch)
