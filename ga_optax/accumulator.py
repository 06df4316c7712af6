"""The accumulator: gradient accumulation as a fold over a monoid.

An accumulator is a triple `(total, weight, count)`, and

    add(acc, g, w)  =  (total + w·g,  weight + w,  count + 1)
    merge(a, b)     =  (a.total + b.total,  a.weight + b.weight,  a.count + b.count)
    mean(acc)       =  total / weight

`init` makes the identity of `merge`. An empty accumulator (`count == 0`) holds
nothing, whatever bits its buffers hold: the first `add` selects -0.0 in their place,
so nothing has to be reset between two windows, and a NaN that one window met cannot
reach the next. -0.0 + x is x for every x, -0.0 too. Selecting before the addition, and
not after it, leaves the addition last: XLA then scatters the gradient of an embedding
into `total`, and adds inside of matrix products.

Sum first, divide once. An unweighted `add` is a plain addition, so integer-valued
gradients accumulate without rounding, and the sum of n terms in precision eps is
off by at most `(n - 1)·eps·Σ|g|` (Higham, "Accuracy and Stability of Numerical
Algorithms", 2nd ed., 2002, eq. 4.4).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from ga_optax._checks import (
    check_arrays,
    check_dtype,
    check_gradients,
    check_type,
    check_weight,
)

__all__ = ["Accumulator", "add", "init", "mean", "merge"]


class Accumulator(NamedTuple):
    """A sum of weighted gradients, and what it takes to average it.

    Attributes:
      total: Σ w·g, a tree with the shapes of the parameters.
      weight: Σ w, a float scalar (float32; float64 under `jax_enable_x64`).
      count: the number of micro-steps in it, an int32 scalar; what several devices do
        at the same time is one micro-step. At 0 the accumulator is empty and `total` is
        never read.
    """

    total: optax.Updates
    weight: jax.Array
    count: jax.Array


def init(params: optax.Params, dtype: DTypeLike | None = jnp.float32) -> Accumulator:
    """Makes an empty accumulator for gradients of `params`.

    >>> import jax.numpy as jnp
    >>> from ga_optax import accumulator
    >>> acc = accumulator.init({"w": jnp.zeros(2, jnp.bfloat16)})
    >>> acc = accumulator.add(acc, {"w": jnp.array([1.0, 2.0], jnp.bfloat16)})
    >>> acc = accumulator.add(acc, {"w": jnp.array([3.0, 4.0], jnp.bfloat16)})
    >>> accumulator.mean(acc)["w"]
    Array([2., 3.], dtype=float32)

    Args:
      params: the tree to accumulate gradients of; only shapes, dtypes and shardings
        are read.
      dtype: the dtype of `total`. float32, the default, is a floor: float64 leaves
        keep float64. One of lower precision is taken as it is, and saves its memory
        at the price of its rounding. `None` takes the dtype of each leaf. Complex
        leaves take the complex counterpart, and integer leaves a floating dtype
        always.

    Returns:
      An `Accumulator` of zeros, one buffer of the size of `params`, sharded as they
      are.

    Raises:
      TypeError: if a leaf of `params` is no array, or `dtype` is not floating.
    """
    dtype = check_dtype(dtype)
    check_arrays("params", params)
    total = jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=accumulator_dtype(p, dtype)), params
    )
    return Accumulator(total, jnp.zeros([], float), jnp.zeros([], jnp.int32))


def begun(params: optax.Params, dtype: DTypeLike | None) -> Accumulator:
    """`init` for sums that begin at once: it holds the -0.0 that `add` would select.

    In a program, leaves of one type are one array.
    """
    dtype = check_dtype(dtype)
    made: dict[Any, jax.Array] = {}

    def zeros(p: Any) -> jax.Array:
        own = accumulator_dtype(p, dtype)
        # An array outside of a program lies somewhere, which its type does not say.
        key = own, jax.typeof(p) if isinstance(p, jax.core.Tracer) else id(p)
        if key not in made:
            made[key] = jnp.full_like(p, -np.zeros([], own), own)
        return made[key]

    total = jax.tree.map(zeros, params)
    return Accumulator(total, jnp.zeros([], float), jnp.zeros([], jnp.int32))


def _check(name: str, acc: Any) -> None:
    """Raises unless it is an accumulator; an open micro-step says itself what it is."""
    if not hasattr(acc, "missing"):
        check_type(name, acc, Accumulator, "Start with accumulator.init(params).")


def add(
    acc: Accumulator, grads: optax.Updates, weight: ArrayLike | None = None
) -> Accumulator:
    """Adds one micro-batch's gradient: one micro-step.

    Reads `grads`, reads and writes `acc.total`, and nothing else; with `acc` donated
    it works in place.

    **Exactness.** Without a weight nothing is multiplied: `mean(add(init(p), g))` is
    `g`, bit for bit. (XLA's additions on a CPU treat subnormal numbers as 0.) A weight
    of 0 changes no bit of `total`, whatever `grads` holds, NaN included.

    Args:
      acc: the accumulator so far.
      grads: a tree of the structure and shapes of `acc.total`, in floating or complex
        dtypes.
      weight: how much this micro-batch counts, a non-negative scalar, static or
        traced; `None` counts 1. If the loss is a mean over examples, or over tokens
        that are not padding, pass their number. True counts 1 and False 0. A traced
        weight cannot raise: if it is negative, the total and the weight are NaN.

    Returns:
      The accumulator with `grads` in it.

    Raises:
      ValueError: if `grads` does not match `acc.total` (the message names the leaf),
        or if a weight that is not traced is negative, NaN or no scalar.
      TypeError: if a leaf of `grads` is neither floating nor complex, or if `weight`
        is no real number.
    """
    _check("acc", acc)
    check_gradients(acc.total, grads)
    empty = acc.count == 0
    totals, structure = jax.tree.flatten(acc.total)
    totals = [cleared(t, empty) for t in totals]
    terms = list(map(jnp.asarray, jax.tree.leaves(grads)))
    one = jnp.ones_like(acc.weight)
    if weight is not None:
        weight = one = as_weight(weight, one.dtype)
        zero, pairs = unknown_zero(acc.count), zip(totals, terms, strict=True)
        terms = [weighted(g, one, t.dtype, zero) for t, g in pairs]

    return Accumulator(
        jax.tree.unflatten(structure, add_terms(totals, terms, weight)),
        jnp.where(empty, one, acc.weight + one),
        increment(acc.count),
    )


def merge(a: Accumulator, b: Accumulator) -> Accumulator:
    """Adds two accumulators, of two halves of a window for example.

    **Exactness.** Commutative bit for bit; associative up to the rounding of the
    sums. Merging with an empty accumulator changes no bit, whatever that one's
    buffers hold.

    Args:
      a: an accumulator.
      b: another one, with the same tree, shapes and dtypes.

    Returns:
      The accumulator of all micro-steps of both.

    Raises:
      ValueError: if the trees or shapes differ; the message names the leaf.
    """
    _check("a", a)
    _check("b", b)
    check_gradients(a.total, b.total, name="b.total", expected="a.total")

    def combine(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(b.count == 0, x, jnp.where(a.count == 0, y, x + y))

    return Accumulator(
        jax.tree.map(combine, a.total, b.total),
        combine(a.weight, b.weight),
        a.count + b.count,
    )


def mean(acc: Accumulator) -> optax.Updates:
    """Divides `total` by `weight`: the weighted mean of the gradients.

    **Exactness.** One rounding, that of a true division, under `jit` too: the mean of
    equal integers is that integer. (XLA's division on GPUs is not correctly rounded.)
    A weight of 1 changes no bit (division would flush subnormal numbers on some
    backends). If the accumulator has weight 0, or is empty, the mean is 0, not NaN.

    Args:
      acc: the accumulator.

    Returns:
      A tree with the shapes and dtypes of `acc.total`.
    """
    _check("acc", acc)
    return jax.tree.map(lambda t: average(t, acc.weight), acc.total)


# -- Ways to divide --------------------------------------------------------------------
#
# Each encodes one fact about XLA. All of them round once.


def divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """`total / weight`, rounded as a division is; `total / 1` if the weight is 0.

    XLA rewrites a division by a broadcast scalar into a product with its reciprocal,
    which rounds twice: 41 · fl(1 / 41) is not 1 in float32. A divisor that depends on
    the element keeps the division a division.
    """

    def quotient(t: jax.Array, w: jax.Array) -> jax.Array:
        return t / jnp.where(jnp.isnan(t), jnp.ones_like(w), w)

    some = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    return _by_part(quotient, total, some, total.dtype).astype(total.dtype)


@jax.custom_jvp
def average(total: jax.Array, weight: jax.Array) -> jax.Array:
    """The `mean` of one leaf: as `divide`, but exact for the weights 0 and 1.

    Some backends flush subnormal numbers in a division, and none does in a select.
    """
    some = jnp.where(weight == 1, total, divide(total, weight))
    return jnp.where(weight == 0, jnp.zeros_like(total), some)


@average.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]) -> Any:
    # That of a division: to a select a weight of 1 is a constant.
    (total, weight), (of_total, of_weight) = primals, tangents
    some = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    change = (of_total - divide(total, some) * of_weight) / some
    change = jnp.where(weight == 0, jnp.zeros_like(change), change)
    return average(total, weight), change.astype(total.dtype)


def accumulator_dtype(leaf: ArrayLike, dtype: np.dtype | None) -> np.dtype:
    """The dtype in which gradients of `leaf` accumulate; see `init` for the rule."""
    own = jnp.result_type(leaf)
    if dtype is None:
        return own if jnp.issubdtype(own, jnp.inexact) else np.dtype(np.float32)
    wide = own in (jnp.float64, jnp.complex128) and dtype == jnp.float32
    real = np.dtype(np.float64) if wide else dtype
    if not jnp.issubdtype(own, jnp.complexfloating):
        return real
    return np.dtype(np.complex128 if real == jnp.float64 else np.complex64)


def as_weight(weight: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """A weight, checked, in a dtype; NaN if it is traced and turns out negative."""
    number = check_weight(weight).astype(dtype)
    if not isinstance(weight, jax.core.Tracer):
        return number
    return jnp.where(number < 0, jnp.full_like(number, jnp.nan), number)


def _computation_dtype(dtype: np.dtype) -> np.dtype:
    """Where products and quotients are rounded: never below single precision."""
    return dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)


def plus(total: jax.Array, term: jax.Array) -> jax.Array:
    """`total + term` in the dtype of `total`, rounded no coarser than float32."""
    wide = _computation_dtype(total.dtype)
    return _in(_in(total, wide) + _in(term, wide), total.dtype)


def _in(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x.astype(dtype)`, if that does anything: tracing it takes time for each leaf."""
    return x if x.dtype == dtype else x.astype(dtype)


def weighted(
    x: jax.Array, weight: jax.Array, dtype: np.dtype, zero: jax.Array | None
) -> jax.Array:
    """`x · weight`, a term of a sum in `dtype`, `rounded` before if there is a zero."""
    product = _by_part(jnp.multiply, x, weight, dtype)
    return product if zero is None else rounded(product, zero)


@jax.custom_jvp
def rounded(x: jax.Array, zero: jax.Array) -> jax.Array:
    """`x`, rounded to its dtype before it is added to anything.

    A product and a sum may become one fused multiply-add, which rounds once, in one
    program and not in another; and XLA holds numbers of 16 bits in 32. Its CPU backend
    takes barriers away before LLVM contracts. So `x` is multiplied by a 1 that no
    compiler knows, as `zero` is an `unknown_zero`: if that product is contracted with a
    sum, `x` is rounded all the same. (Its derivative is right without the rule, too,
    which jax before 0.12 forgets in a loop that is differentiated backwards twice.)
    """
    if jnp.iscomplexobj(x):
        return jax.lax.complex(rounded(x.real, zero), rounded(x.imag, zero))
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    wide = _computation_dtype(x.dtype)
    one, digits = (1 + zero).astype(wide), jnp.finfo(x.dtype).nmant
    # With the range of `wide`, or numbers that are subnormal in `x.dtype` would be 0.
    exact = jax.lax.reduce_precision(_in(x, wide), jnp.finfo(wide).nexp, digits)
    return _in(exact * one, x.dtype)


@rounded.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]) -> Any:
    return rounded(*primals), tangents[0]


def unknown_zero(count: jax.Array) -> jax.Array:
    """0, computed of a counter."""
    return jnp.minimum(count, 0)


def _by_part(
    operation: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    weight: jax.Array,
    dtype: np.dtype,
) -> jax.Array:
    """`operation(x, weight)`, rounded no coarser than `dtype` or float32."""
    wide = _computation_dtype(dtype)
    weight = weight.astype(jnp.finfo(wide).dtype)
    x = x.astype(wide)
    if not jnp.issubdtype(wide, jnp.complexfloating):
        return operation(x, weight)
    # By parts: as a complex number the weight would be w + 0i, and 0 · inf is NaN.
    return jax.lax.complex(operation(x.real, weight), operation(x.imag, weight))


def parts(x: jax.Array) -> tuple[jax.Array, ...]:
    """The real and the imaginary part of complex numbers, and others as they are."""
    return (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)


def cleared(total: jax.Array, empty: jax.Array) -> jax.Array:
    """`total`, or -0.0 everywhere if it holds nothing yet."""
    return jnp.where(empty, -jnp.zeros([], total.dtype), total)


def add_terms(
    totals: list[jax.Array],
    terms: list[jax.Array],
    weight: jax.Array | None,
) -> list[jax.Array]:
    """`totals + terms`; `totals` if a weight is given and is 0."""
    sums = [plus(x, y) for x, y in zip(totals, terms, strict=True)]
    if weight is None:
        return sums
    # Selected, not multiplied by the weight alone: NaN · 0 is NaN.
    pairs = zip(totals, sums, strict=True)
    return [jnp.where(weight == 0, old, new) for old, new in pairs]


def increment(counter: jax.Array) -> jax.Array:
    """`counter + 1`, or the largest number where that overflows."""
    counter = jnp.asarray(counter)
    last = np.asarray(jnp.iinfo(counter.dtype).max, counter.dtype)
    goes_on = jax.lax.lt(counter, last)
    return jax.lax.add(counter, jax.lax.convert_element_type(goes_on, counter.dtype))
