"""Norms and differences of gradients, which are lists of leaves here, and ULPs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

Leaves = list[jax.Array]


def real(x: jax.Array) -> jax.Array:
    """A leaf in float64; a complex one as its real and imaginary parts, stacked."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    return x if x.dtype == jnp.float64 else x.astype(jnp.float64)


@functools.partial(jax.jit, donate_argnums=0)
def subtract(total: Leaves, leaves: Leaves, weight: float) -> Leaves:
    """`total` less `weight` times `leaves`; it takes the buffers of `total`."""
    return [t - weight * x for t, x in zip(total, leaves, strict=True)]


@jax.jit
def _squares(leaves: Leaves) -> jax.Array:
    return jnp.stack([jnp.sum(x * x) for x in leaves])


@jax.jit
def _squared_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((real(x) - real(y)) ** 2)


def norms(leaves: Leaves) -> np.ndarray:
    """‖x‖ of each leaf."""
    return np.sqrt(np.asarray(_squares(leaves)))


def norm(norms: np.ndarray) -> float:
    """‖x‖ of all leaves together, from the norms of each."""
    return float(np.sqrt((norms**2).sum()))


def distance(a: Leaves, b: Leaves) -> float:
    """‖a - b‖, for leaves of any dtype, which are cast one at a time."""
    return math.sqrt(sum(map(_squared_distance, a, b)))


def ratio(x: float, y: float) -> float:
    """The quotient x / y, where 0 / 0 is 0."""
    return x / y if y else (math.inf if x else 0.0)


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many representable numbers lie between two arrays, element by element.

    Args:
      a: an array of a floating or complex dtype.
      b: another one, of the same shape and dtype.

    Returns:
      uint64 distances; for a complex number, the larger distance of its two parts. Both
      zeros are one number. A NaN lies beyond inf, as far as its bits say.

    Raises:
      ValueError: if shapes or dtypes differ.
    """
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise ValueError(
            f"ULPs need one shape and one dtype, not {a.dtype}{a.shape} and "
            f"{b.dtype}{b.shape}. Cast both to the dtype in which to count."
        )
    if np.iscomplexobj(a):
        return np.maximum(ulps(a.real, b.real), ulps(a.imag, b.imag))
    places = _place(a), _place(b)
    return np.maximum(*places) - np.minimum(*places)


def _place(x: np.ndarray) -> np.ndarray:
    """The place of each number among all of its dtype, with both zeros at 2⁶³."""
    bits = x.copy().view(f"u{x.dtype.itemsize}").astype(np.uint64)
    sign, zero = np.uint64(1 << (8 * x.dtype.itemsize - 1)), np.uint64(1 << 63)
    return np.where(bits & sign, zero - (bits & ~sign), zero + bits)
