"""Assertions for tests of training code, with chex: the same gradient, the same bits.

    assert_accumulation_equivalent    accumulated = undivided, up to rounding
    assert_trees_bitwise_equal        every bit of every leaf

The assertions fail if there is nothing to compare. Only this module of the package
imports chex (the extra `testing`); import the module by name.
"""

import warnings
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._verify.diagnosis import verify
from ._verify.measured import ulps

__all__ = ["assert_accumulation_equivalent", "assert_trees_bitwise_equal"]


def assert_accumulation_equivalent(
    fun: Callable[..., Any],
    params: optax.Params,
    batch: Any,
    num_microbatches: int,
    **options: Any,
) -> None:
    """Asserts that accumulating over micro-batches gives the undivided gradient.

    >>> import jax.numpy as jnp
    >>> from ga_optax import testing
    >>> def loss(w, x):
    ...     return jnp.sum((x @ w) ** 2)  # a sum: not what accumulation averages
    >>> w, x = jnp.ones(2), jnp.arange(8.0).reshape(4, 2)
    >>> testing.assert_accumulation_equivalent(
    ...     lambda w, x: loss(w, x) / len(x), w, x, num_microbatches=2)
    >>> testing.assert_accumulation_equivalent(
    ...     loss, w, x, num_microbatches=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: [SCALE] The loss is not a mean over its batch: it depends ...

    **Exactness.** The assertion passes if `ga_optax.verify` finds `EQUAL` or
    `ROUNDING`: in float64 both gradients agree to half of the digits, on every leaf. It
    costs as much as `verify`. Warnings of the report become Python warnings.

    Args:
      fun: the loss, as for `ga_optax.verify`.
      params: the parameters.
      batch: the undivided batch.
      num_microbatches: the number of micro-batches to split it into.
      **options: all other options of `ga_optax.verify`.

    Raises:
      AssertionError: if the gradients differ, with the message of the report: the
        cause, the size of the difference, the leaf, and what to do; or if `params` or
        `batch` holds no array.
      TypeError, ValueError: if another argument does not fit.
    """
    _refuse_empty(params=params, batch=batch)
    report = verify(fun, params, batch, num_microbatches, **options)
    for warning in report.warnings:
        warnings.warn(warning, stacklevel=2)
    if not report.ok:
        raise AssertionError(f"[{report.cause.name}] {report.message}")


def assert_trees_bitwise_equal(actual: Any, expected: Any) -> None:
    """Asserts that two trees have the same structure, shapes, dtypes and bits.

    >>> import numpy as np, jax.numpy as jnp
    >>> from ga_optax import testing
    >>> a = {"w": jnp.array([1.0, 2.0])}
    >>> testing.assert_trees_bitwise_equal(a, {"w": jnp.array([1.0, 2.0])})
    >>> b = {"w": jnp.array([1.0, np.nextafter(np.float32(2), np.float32(3))])}
    >>> testing.assert_trees_bitwise_equal(a, b)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: [Chex] Assertion assert_trees_all_equal_comparator failed: ...

    **Exactness.** Bits are compared, not numbers: 0 and -0 differ, and a NaN equals
    only a NaN with the same bits. Every leaf is copied to the host once.

    Args:
      actual: a tree of arrays, numbers or PRNG keys; tree 0 in chex's message.
      expected: the tree that `actual` must equal; tree 1 in chex's message.

    Raises:
      AssertionError: if a leaf differs; the message names the path of the first such
        leaf, the first index that differs, both values in hexadecimal and in decimal,
        and the distance in ULPs (representable numbers). Also if a tree is empty, or if
        structures, shapes or dtypes differ.
    """
    chex.assert_trees_all_equal_structs(actual, expected)
    _refuse_empty(actual=actual, expected=expected)
    chex.assert_trees_all_equal_comparator(
        lambda a, b: _difference(a, b) is None,
        lambda a, b: _difference(a, b) or "",
        actual,
        expected,
    )


def _refuse_empty(**trees: Any) -> None:
    for name, tree in trees.items():
        if not jax.tree.leaves(tree):
            raise AssertionError(
                f"{name} must hold at least one array, but it is {tree!r}. Check the "
                "arguments, because two empty trees are always equal."
            )


def _difference(actual: Any, expected: Any) -> str | None:
    """The difference of two leaves in words; None if all bits are the same."""
    a, b = _array(actual), _array(expected)
    # Keys of two generators can have the same data.
    kinds = [getattr(leaf, "dtype", type(leaf)) for leaf in (actual, expected)]
    for name, x, y in (("dtypes", *kinds), ("shapes", a.shape, b.shape)):
        if x != y:
            return f"the {name} differ, {x} and {y}"
    if not a.dtype.itemsize:  # float0 has no bits
        return None
    parts = (", real part", ", imaginary part") if np.iscomplexobj(a) else ("",)
    a, b = (np.stack([x.real, x.imag][: len(parts)], axis=-1) for x in (a, b))
    a_bits, b_bits = (x.view(f"u{x.dtype.itemsize}") for x in (a, b))
    differ = a_bits != b_bits
    if not differ.any():
        return None
    at = tuple(map(int, np.argwhere(differ)[0]))
    x, y = (f"0x{int(bits[at]):0{2 * a.dtype.itemsize}x}" for bits in (a_bits, b_bits))
    text = (
        f"{differ.sum()} of {differ.size} elements differ in their bits, the "
        f"first at index {at[:-1]}{parts[at[-1]]}: actual {x} ({a[at]!s}), "
        f"expected {y} ({b[at]!s})"
    )
    if jnp.issubdtype(a.dtype, jnp.floating):
        distance = ulps(a, b)
        text += (
            f", {distance[at]} ULPs apart; at most {distance.max()} ULPs apart "
            "anywhere in this leaf"
        )
    return text


def _array(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUM":
        raise AssertionError(
            f"Leaves must be arrays, numbers or PRNG keys, but one is {leaf!r}, a "
            f"{type(leaf).__name__}. Compare that leaf separately."
        )
    return array
