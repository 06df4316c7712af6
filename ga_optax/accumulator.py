"""The accumulator: gradient accumulation as a fold over a monoid.

An accumulator is a triple `(total, weight, count)`, and

    add(acc, g, w)  =  (total + w·g,  weight + w,  count + 1)
    merge(a, b)     =  (a.total + b.total,  a.weight + b.weight,  a.count + b.count)
    mean(acc)       =  total / weight

`init` makes the identity of `merge`. The buffers of an empty accumulator (`count == 0`)
are never read: the first `add` selects -0.0 instead, so nothing has to be reset between
two windows, and a NaN of one window cannot reach the next. -0.0 + x is x for every x,
-0.0 too. The select comes before the addition, so the addition is last: XLA then
scatters the gradient of an embedding into `total`, and adds inside of matrix products.

Sum first, divide once. An unweighted `add` is a plain addition, so integer-valued
gradients accumulate without rounding, and the sum of n terms in precision eps is
off by at most `(n - 1)·eps·Σ|g|` (Higham, "Accuracy and Stability of Numerical
Algorithms", 2nd ed., 2002, eq. 4.4).
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from . import _checks

__all__ = ["Accumulator", "add", "init", "mean", "merge"]


class Accumulator(NamedTuple):
    """A sum of weighted gradients, with the weight that divides the sum.

    Attributes:
      total: Σ w·g, a tree with the shapes of the parameters.
      weight: Σ w, a float scalar (float32; float64 under `jax_enable_x64`).
      count: the number of added micro-steps, an int32 scalar. Simultaneous work of
        several devices is one micro-step. At 0 the accumulator is empty and `total` is
        never read.
    """

    total: optax.Updates
    weight: jax.Array
    count: jax.Array


def init(params: optax.Params, dtype: Any = jnp.float32) -> Accumulator:
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
      dtype: the dtype of `total`. With float32, the default, float64 leaves keep
        float64. A dtype of lower precision saves memory, and rounds more. `None` takes
        the dtype of each leaf. Complex leaves get the complex counterpart, and integer
        leaves always a floating dtype. Or a prefix of the tree of `params` with such
        dtypes: `{"norms": jnp.float32, "tables": jnp.bfloat16}`.

    Returns:
      An `Accumulator` of zeros, one buffer with the size and the sharding of `params`,
      in the memory of the device.

    Raises:
      TypeError: if a leaf of `params` is no array, or `dtype` is not floating.
      ValueError: if `dtype` is a tree, and no prefix of `params`.
    """
    _checks.check_arrays("params", params)

    def zeros(p: Any, dtype: np.dtype) -> jax.Array:
        where = None
        if _checks.is_on_host(p) and not isinstance(p, jax.core.Tracer):
            where = p.sharding.with_memory_kind("device")
        return jnp.zeros_like(p, dtype=dtype, device=where)

    return _empty(zeros, params, dtype)


def begun(params: optax.Params, dtype: Any) -> Accumulator:
    """`init` for sums that start at once, with the -0.0 that `add` would select.

    In a program, leaves of one type share one array.
    """
    arrays: dict[Any, jax.Array] = {}

    def zeros(p: Any, wide: np.dtype) -> jax.Array:
        # Outside of a program, the type of an array does not say on which device it is.
        key = wide, jax.typeof(p) if isinstance(p, jax.core.Tracer) else id(p)
        if key not in arrays:
            arrays[key] = jnp.full_like(p, -np.zeros([], wide), wide)
        return arrays[key]

    return _empty(zeros, params, dtype)


def _empty(
    zeros: Callable[[Any, np.dtype], jax.Array], params: Any, dtype: Any
) -> Accumulator:
    leaves, structure = jax.tree.flatten(params)
    total = structure.unflatten(map(zeros, leaves, accumulator_dtypes(params, dtype)))
    return Accumulator(total, jnp.zeros([], float), jnp.zeros([], jnp.int32))


def _check(name: str, acc: Any) -> None:
    """Raises unless `acc` is an accumulator."""
    if not hasattr(acc, "missing"):  # reading a `blocks.OpenMicroStep` raises
        _checks.check_type(
            name, acc, Accumulator, "Start with accumulator.init(params)."
        )


def add(
    acc: Accumulator, grads: optax.Updates, weight: ArrayLike | None = None
) -> Accumulator:
    """Adds one micro-batch's gradient: one micro-step.

    `add` reads `grads`, reads and writes `acc.total`, and nothing else; with `acc`
    donated, XLA updates `total` in place.

    **Exactness.** Without a weight nothing is multiplied: `mean(add(init(p), g))` is
    `g`, bit for bit. (XLA's additions on a CPU treat subnormal numbers as 0.) A weight
    of 0 changes no bit of `total`, whatever `grads` holds, NaN included.

    Args:
      acc: the accumulator so far.
      grads: a tree of the structure and shapes of `acc.total`, in floating or complex
        dtypes.
      weight: the weight of this micro-batch, a non-negative scalar, static or traced;
        `None` counts 1. If the loss is a mean over examples, or over tokens that are
        not padding, pass the number of these examples or tokens. True counts 1 and
        False 0. A negative traced weight cannot raise: the total and the weight are
        NaN.

    Returns:
      The accumulator with `grads` added.

    Raises:
      ValueError: if `grads` does not match `acc.total` (the message names the leaf),
        or if a weight that is not traced is negative, NaN or no scalar.
      TypeError: if a leaf of `grads` is neither floating nor complex, or if `weight`
        is no real number.
    """
    _check("acc", acc)
    _checks.check_gradients(acc.total, grads)
    _checks.check_on_device("acc.total", acc.total)
    _checks.check_on_device("grads", grads)
    empty = acc.count == 0
    totals, structure = jax.tree.flatten(acc.total)
    totals = [cleared(_kept(t), empty) for t in totals]
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
    sums. Merging with an empty accumulator changes no bit, whatever its buffers hold.

    Args:
      a: an accumulator.
      b: another accumulator, with the same tree, shapes and dtypes.

    Returns:
      The accumulator of all micro-steps of both.

    Raises:
      ValueError: if the trees or shapes differ; the message names the leaf.
    """
    _check("a", a)
    _check("b", b)
    _checks.check_gradients(a.total, b.total, name="b.total", expected="a.total")

    def combine(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(b.count == 0, x, jnp.where(a.count == 0, y, x + y))

    return Accumulator(
        jax.tree.map(combine, a.total, b.total),
        combine(a.weight, b.weight),
        a.count + b.count,
    )


def mean(acc: Accumulator) -> optax.Updates:
    """Divides `total` by `weight`: the weighted mean of the gradients.

    **Exactness.** One rounding, of a true division, under `jit` too: the mean of equal
    integers is that integer. (XLA's division on GPUs is not correctly rounded.) A
    weight of 1 changes no bit (division would flush subnormal numbers on some
    backends). If the accumulator has weight 0, or is empty, the mean is 0, not NaN.

    Args:
      acc: the accumulator.

    Returns:
      A tree with the shapes and dtypes of `acc.total`.
    """
    _check("acc", acc)
    return jax.tree.map(lambda t: average(t, acc.weight), acc.total)


# -- Products, quotients and sums that round once --------------------------------------


def divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """`total / weight`, rounded as a division is; `total / 1` if the weight is 0.

    XLA rewrites a division by a broadcast scalar into a product with the reciprocal,
    which rounds twice: 41 · fl(1 / 41) is not 1 in float32. XLA does not rewrite a
    division whose divisor depends on the element.
    """

    def quotient(t: jax.Array, w: jax.Array) -> jax.Array:
        return t / jnp.where(jnp.isnan(t), jnp.ones_like(w), w)

    divisor = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    return _by_part(quotient, total, divisor, total.dtype).astype(total.dtype)


@jax.custom_jvp
def average(total: jax.Array, weight: jax.Array) -> jax.Array:
    """The `mean` of one leaf: `divide`, but exact for the weights 0 and 1.

    Some backends flush subnormal numbers in a division; no backend does in a select.
    """
    quotient = jnp.where(weight == 1, total, divide(total, weight))
    return jnp.where(weight == 0, jnp.zeros_like(total), quotient)


@average.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]) -> Any:
    # The derivative of the division: the select holds a weight of 1 constant.
    (total, weight), (d_total, d_weight) = primals, tangents
    divisor = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    d_mean = (d_total - divide(total, divisor) * d_weight) / divisor
    d_mean = jnp.where(weight == 0, jnp.zeros_like(d_mean), d_mean)
    return average(total, weight), d_mean.astype(total.dtype)


def accumulator_dtypes(params: Any, dtype: Any) -> list[np.dtype]:
    """The dtype of each leaf of `total`; see `init` for the rule."""
    dtype = _checks.check_dtype(dtype)
    return [
        accumulator_dtype(p, of_part)
        for of_part, part in _checks.parts_of_prefix("The dtype", dtype, params)
        for p in jax.tree.leaves(part)
    ]


def accumulator_dtype(leaf: Any, dtype: np.dtype | None) -> np.dtype:
    """The dtype in which gradients of `leaf` accumulate; see `init` for the rule."""
    leaf_dtype = jnp.result_type(leaf)
    if dtype is None:
        inexact = jnp.issubdtype(leaf_dtype, jnp.inexact)
        return leaf_dtype if inexact else np.dtype(np.float32)
    wide = leaf_dtype in (jnp.float64, jnp.complex128) and dtype == jnp.float32
    real = np.dtype(np.float64) if wide else dtype
    if not jnp.issubdtype(leaf_dtype, jnp.complexfloating):
        return real
    return np.dtype(np.complex128 if real == jnp.float64 else np.complex64)


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of sums: of integers if `dtype` is, and of 32 bits or more."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.promote_types(dtype, np.float32)
    kind = np.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int32
    return np.promote_types(dtype, kind)


def as_weight(weight: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Returns a checked weight in a dtype; NaN for a negative traced weight."""
    number = _checks.check_weight(weight).astype(dtype)
    if not isinstance(weight, jax.core.Tracer):
        return number
    return jnp.where(number < 0, jnp.full_like(number, jnp.nan), number)


def _computation_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype for products and quotients: at least single precision."""
    return dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)


def plus(total: jax.Array, term: jax.Array) -> jax.Array:
    """`total + term` in the dtype of `total`, computed in at least float32."""
    wide = _computation_dtype(total.dtype)
    x, y = cast(total, wide), cast(term, wide)
    # JAX's NumPy takes several times as long to trace.
    both = jax.lax.add(x, y) if x.shape == y.shape else x + y
    return cast(both, total.dtype)


def cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x.astype(dtype)`; not traced, which takes time, if `x` has the dtype."""
    return x if x.dtype == dtype else x.astype(dtype)


def weighted(
    x: jax.Array, weight: jax.Array, dtype: np.dtype, zero: jax.Array | None
) -> jax.Array:
    """`x · weight`, a term of a sum in `dtype`; `rounded` if there is a `zero`."""
    product = _by_part(jnp.multiply, x, weight, dtype)
    return product if zero is None else rounded(product, zero)


@jax.custom_jvp
def rounded(x: jax.Array, zero: jax.Array) -> jax.Array:
    """`x`, rounded to its dtype before a sum reads it.

    In one program and not in another, a product and a sum may become one fused
    multiply-add, which rounds once; and XLA keeps numbers of 16 bits in 32. XLA's CPU
    backend removes barriers before LLVM contracts. So `x` is multiplied by a 1 that no
    compiler knows (`zero` is an `unknown_zero`): if LLVM contracts this product with a
    sum, `x` is rounded nevertheless. (The derivative is right without the rule, too.
    jax before 0.12 forgets the rule in a loop that is differentiated backwards twice.)
    """
    if jnp.iscomplexobj(x):
        return jax.lax.complex(rounded(x.real, zero), rounded(x.imag, zero))
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    wide = _computation_dtype(x.dtype)
    one, digits = (1 + zero).astype(wide), jnp.finfo(x.dtype).nmant
    # With the exponents of `x.dtype`, subnormal numbers of `x.dtype` would become 0.
    exact = jax.lax.reduce_precision(cast(x, wide), jnp.finfo(wide).nexp, digits)
    return cast(exact * one, x.dtype)


@rounded.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]) -> Any:
    return rounded(*primals), tangents[0]


def unknown_zero(count: jax.Array) -> jax.Array:
    """0, computed from a counter, so that no compiler knows the value."""
    return jnp.minimum(count, 0)


def _by_part(
    operation: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    weight: jax.Array,
    dtype: np.dtype,
) -> jax.Array:
    """`operation(x, weight)`, computed in at least `dtype` and float32."""
    wide = _computation_dtype(dtype)
    weight = weight.astype(jnp.finfo(wide).dtype)
    x = x.astype(wide)
    if not jnp.issubdtype(wide, jnp.complexfloating):
        return operation(x, weight)
    # By part: as a complex number the weight would be w + 0i, and 0 · inf is NaN.
    return jax.lax.complex(operation(x.real, weight), operation(x.imag, weight))


def parts(x: jax.Array) -> tuple[jax.Array, ...]:
    """The real and the imaginary part of complex numbers; `(x,)` for real numbers."""
    return (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)


def loses_rows(jaxlib: str) -> bool:
    """True for versions of jaxlib whose XLA may lose what a loop adds to a table.

    On a mesh the gradient of a table that is read at sharded indices is a scatter and
    an all-reduce. XLA's pass `while-loop-all-reduce-code-motion` takes the all-reduce
    out of a loop that adds up such gradients, and leaves in the loop what was right
    before: all devices but one start each iteration from zeros (openxla/xla 49143, by
    the compilers of H100 and v5e). The pass does not look through a barrier on the
    carry, which costs nothing on one device.
    """
    return (0, 10, 1) <= tuple(map(int, re.findall(r"\d+", jaxlib)[:3])) < (0, 12)


LOSES_ROWS = loses_rows(jax.lib.__version__)


def _kept(total: jax.Array) -> jax.Array:
    """`total`, which a loop of the caller's may carry."""
    inside = LOSES_ROWS and isinstance(total, jax.core.Tracer)
    return jax.lax.optimization_barrier(total) if inside else total


def cleared(total: jax.Array, empty: jax.Array) -> jax.Array:
    """`total`, or -0.0 everywhere if the accumulator is empty."""
    return jnp.where(empty, -jnp.zeros([], total.dtype), total)


def add_terms(
    totals: list[jax.Array],
    terms: list[jax.Array],
    weight: jax.Array | None,
) -> list[jax.Array]:
    """`totals + terms`; `totals` if there is a weight of 0."""
    sums = [plus(x, y) for x, y in zip(totals, terms, strict=True)]
    if weight is None:
        return sums
    # A select, because NaN · 0 is NaN.
    pairs = zip(totals, sums, strict=True)
    return [jnp.where(weight == 0, old, new) for old, new in pairs]


def increment(counter: jax.Array) -> jax.Array:
    """`counter + 1`, or the largest number if that overflows."""
    counter = jnp.asarray(counter)
    largest = np.asarray(jnp.iinfo(counter.dtype).max, counter.dtype)
    one = jax.lax.convert_element_type(jax.lax.lt(counter, largest), counter.dtype)
    return jax.lax.add(counter, one)
