"""How many representable numbers lie between two others."""

import numpy as np


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
            f"ULPs need one shape and one dtype, but these are {a.dtype}{a.shape} and "
            f"{b.dtype}{b.shape}. Cast both to the dtype in which to count."
        )
    if np.iscomplexobj(a):
        return np.maximum(ulps(a.real, b.real), ulps(a.imag, b.imag))
    (a_negative, a_size), (b_negative, b_size) = _sign_and_size(a), _sign_and_size(b)
    apart = np.maximum(a_size, b_size) - np.minimum(a_size, b_size)
    return np.where(a_negative == b_negative, apart, a_size + b_size)


def _sign_and_size(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether the sign bit is set, and how many numbers lie between `x` and zero."""
    bits = x.copy().view(f"u{x.dtype.itemsize}").astype(np.uint64)
    sign = np.uint64(1 << (8 * x.dtype.itemsize - 1))
    return (bits & sign) != 0, bits & (sign - np.uint64(1))
