"""The accumulator: gradient accumulation as a fold over a monoid.

An accumulator is a triple `(total, weight, count)`, and

    add(acc, g, w)  =  (total + w·g,  weight + w,  count + 1)
    merge(a, b)     =  (a.total + b.total,  a.weight + b.weight,  a.count + b.count)
    mean(acc)       =  total / weight

`init` makes the identity of `merge`. An empty accumulator (`count == 0`) holds
nothing, whatever bits its buffers hold: the first `add` overwrites `total` and
never reads it, so nothing has to be zeroed between two windows, and a NaN that
one window met cannot reach the next.

Sum first, divide once. An unweighted `add` is a plain addition, so integer-valued
gradients accumulate without rounding, and the sum of n terms in precision eps is
off by at most `(n - 1)·eps·Σ|g|` (Higham, "Accuracy and Stability of Numerical
Algorithms", 2nd ed., 2002, eq. 4.4).
"""

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

__all__ = ["Accumulator", "add", "init", "mean", "merge"]


class Accumulator(NamedTuple):
    """A sum of weighted gradients, and what it takes to average it.

    Attributes:
      total: Σ w·g, a tree with the shapes of the parameters.
      weight: Σ w, a float scalar (float32; float64 under `jax_enable_x64`).
      count: the number of micro-steps in it, an int32 scalar. At 0 the accumulator
        is empty and `total` is never read.
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
        keep float64. A narrower dtype is taken as it is, and saves its memory at the
        price of its rounding. `None` takes the dtype of each leaf. Complex leaves
        take the complex counterpart.

    Returns:
      An `Accumulator` of zeros, one buffer of the size of `params`, sharded as they
      are.
    """
    dtype = check_dtype(dtype)
    total = jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=accumulator_dtype(p, dtype)), params
    )
    return Accumulator(total, jnp.zeros([], float), jnp.zeros([], jnp.int32))


def add(
    acc: Accumulator, grads: optax.Updates, weight: ArrayLike | None = None
) -> Accumulator:
    """Adds one micro-batch's gradient: one micro-step.

    Reads `grads`, reads and writes `acc.total`, and nothing else; with `acc` donated
    it works in place.

    **Exactness.** Without a weight nothing is multiplied: `mean(add(init(p), g))` is
    `g`, bit for bit. A weight of 0 changes no bit of `total`, whatever `grads`
    holds, NaN included.

    Args:
      acc: the accumulator so far.
      grads: a tree of the structure and shapes of `acc.total`, in floating or complex
        dtypes.
      weight: how much this micro-batch counts, a non-negative scalar, static or
        traced; `None` counts 1. Pass the number of examples, or of tokens that are
        not padding, where the loss is a mean over those.

    Returns:
      The accumulator with `grads` in it.

    Raises:
      ValueError: where `grads` does not match `acc.total` (the message names the
        leaf), or a weight that is known is negative, NaN or no scalar.
      TypeError: where a leaf of `grads` is neither floating nor complex, or `weight`
        is no real number.
    """
    check_gradients(acc.total, grads)
    empty = acc.count == 0

    if weight is None:
        total = jax.tree.map(
            lambda t, g: jnp.where(empty, g.astype(t.dtype), _plus(t, g)),
            acc.total,
            jax.tree.map(jnp.asarray, grads),
        )
        weight = jnp.ones_like(acc.weight)
    else:
        weight = check_weight(weight).astype(acc.weight.dtype)

        def accumulate(t: jax.Array, g: jax.Array) -> jax.Array:
            term = _by_part(jnp.multiply, g, weight, t.dtype)
            kept = jnp.where(empty, jnp.zeros_like(t), t)
            new = jnp.where(empty, term.astype(t.dtype), _plus(t, term))
            # Selected, not multiplied by the weight alone: NaN · 0 is NaN.
            return jnp.where(weight == 0, kept, new)

        total = jax.tree.map(accumulate, acc.total, jax.tree.map(jnp.asarray, grads))

    return Accumulator(
        total,
        jnp.where(empty, weight, acc.weight + weight),
        increment(acc.count),
    )


def merge(a: Accumulator, b: Accumulator) -> Accumulator:
    """Adds two accumulators: of two devices, or of two halves of a window.

    **Exactness.** Commutative bit for bit; associative up to the rounding of the
    sums. Merging with an empty accumulator changes no bit, whatever that one's
    buffers hold.

    Args:
      a: an accumulator.
      b: another one, with the same tree, shapes and dtypes.

    Returns:
      The accumulator of all micro-steps of both.

    Raises:
      ValueError: where the trees or shapes differ; the message names the leaf.
    """
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
    equal integers is that integer. A weight of 1 changes no bit (division would flush
    subnormal numbers on some backends). An accumulator of weight 0, an empty one too,
    has the mean 0, not NaN.

    Args:
      acc: the accumulator.

    Returns:
      A tree with the shapes and dtypes of `acc.total`.
    """
    return jax.tree.map(lambda t: average(t, acc.weight), acc.total)


def average(total: jax.Array, weight: jax.Array) -> jax.Array:
    """The `mean` of one leaf: `total / weight`, exact where the weight is 0 or 1."""
    some = jnp.where(weight == 1, total, divide(total, weight))
    return jnp.where(weight == 0, jnp.zeros_like(total), some)


def divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """`total / weight`, correctly rounded; `total / 1` where the weight is 0.

    XLA rewrites a division by a broadcast scalar into a product with its reciprocal,
    which rounds twice: 41 · fl(1 / 41) is not 1 in float32. A divisor that depends on
    the element keeps the division a division.
    """

    def quotient(t: jax.Array, w: jax.Array) -> jax.Array:
        return t / jnp.where(t == 0, jnp.ones_like(w), w)

    some = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    return _by_part(quotient, total, some, total.dtype).astype(total.dtype)


# -- Dtypes ----------------------------------------------------------------------------


def accumulator_dtype(leaf: ArrayLike, dtype: np.dtype | None) -> np.dtype:
    """The dtype in which gradients of `leaf` accumulate; see `init` for the rule."""
    own = jnp.result_type(leaf)
    if dtype is None:
        return own
    wide = own in (jnp.float64, jnp.complex128) and dtype == jnp.float32
    real = np.dtype(np.float64) if wide else dtype
    if not jnp.issubdtype(own, jnp.complexfloating):
        return real
    return np.dtype(np.complex128 if real == jnp.float64 else np.complex64)


def _computation_dtype(dtype: np.dtype) -> np.dtype:
    """Where products and quotients are rounded: never below single precision."""
    return dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)


def _plus(total: jax.Array, term: jax.Array) -> jax.Array:
    wide = _computation_dtype(total.dtype)
    return (total.astype(wide) + term.astype(wide)).astype(total.dtype)


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


def increment(counter: jax.Array) -> jax.Array:
    """`counter + 1`, or the largest number where that overflows."""
    return jnp.asarray(optax.safe_increment(counter))


# -- Checks, all of them before anything is traced -------------------------------------


def leaf_name(path: tuple[Any, ...]) -> str:
    """How error messages name the leaf at a key path."""
    return f"leaf {jax.tree_util.keystr(path)}" if path else "the only leaf"


def check_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """Returns `dtype` as JAX will use it, or raises where it cannot hold gradients."""
    if dtype is None:
        return None
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            "The accumulator dtype must be a floating dtype, but it is "
            f"{dtype.name}. Use float32, or bfloat16 where memory is short; complex "
            "leaves take the complex counterpart by themselves."
        )
    return dtype


def check_gradients(
    reference: Any, grads: Any, *, name: str = "grads", expected: str = "the parameters"
) -> None:
    """Raises unless `grads` has the leaves of `reference`: structure, shapes, dtypes.

    Args:
      reference: the tree that says what is required.
      grads: the tree that came.
      name: what the message calls the tree that came.
      expected: what the message calls the tree that says what is required.
    """
    check_structure(reference, grads, name=name, expected=expected)
    required = jax.tree_util.tree_flatten_with_path(reference)[0]
    for (path, want), got in zip(required, jax.tree.leaves(grads), strict=True):
        where = f"{leaf_name(path)} of {name}"
        if jnp.shape(got) != jnp.shape(want):
            raise ValueError(
                f"{where} must have shape {jnp.shape(want)}, as in {expected}, but it "
                f"has shape {jnp.shape(got)}. Pass the gradient with respect to the "
                "parameters that the state was made for."
            )
        dtype = jax.dtypes.result_type(got)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"{where} must be floating or complex, but it has dtype {dtype.name}. "
                "Differentiate with respect to floating parameters alone, and keep "
                "the others out of the optimizer, with optax.masked for example."
            )
        if jnp.issubdtype(dtype, jnp.complexfloating) and not jnp.issubdtype(
            jnp.result_type(want), jnp.complexfloating
        ):
            raise TypeError(
                f"{where} is complex ({dtype.name}), but {expected} hold a real leaf "
                "there. Take the real part, or make the parameter complex."
            )


def check_structure(
    reference: Any,
    tree: Any,
    *,
    name: str,
    expected: str,
    todo: str = "Pass the gradient with respect to the parameters that the state was "
    "made for.",
) -> None:
    """Raises a `ValueError` unless both trees have one structure; names the leaf."""
    structure = jax.tree.structure(reference)
    if jax.tree.structure(tree) == structure:
        return
    want, got = (
        [path for path, _ in jax.tree_util.tree_flatten_with_path(t)[0]]
        for t in (reference, tree)
    )
    missing = [path for path in want if path not in got]
    extra = [path for path in got if path not in want]
    if missing:
        what = f"{leaf_name(missing[0])} is missing"
    elif extra:
        what = f"{leaf_name(extra[0])} is not in {expected}"
    else:
        received = jax.tree.structure(tree)
        what = f"the containers differ: {structure} required, {received} received"
    more = len(missing) + len(extra) - 1
    raise ValueError(
        f"{name} must have the tree structure of {expected}, but {what}"
        + (f", and {more} more differ" if more > 0 else "")
        + f". {todo}"
    )


def check_weight(weight: ArrayLike) -> jax.Array:
    """Returns `weight` as an array, or raises where it is known not to be a weight."""
    todo = "Pass how many examples (or tokens) the micro-batch holds, or None for 1."
    if isinstance(weight, (bool, np.bool_)) or not isinstance(
        weight, (numbers.Real, np.ndarray, jax.Array)
    ):
        raise TypeError(
            f"weight must be a real number, but it is {weight!r} of type "
            f"{type(weight).__name__}. {todo}"
        )
    shape, dtype = jnp.shape(weight), jnp.result_type(weight)
    if shape != ():
        raise ValueError(
            f"weight must be a scalar, but it has shape {shape}. {todo} Sum a mask "
            "over the whole micro-batch."
        )
    if not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        raise TypeError(
            f"weight must be a real number, but it has dtype {dtype.name}. {todo}"
        )
    if not isinstance(weight, jax.core.Tracer):
        value = float(jax.device_get(weight))
        if not value >= 0 or math.isinf(value):
            raise ValueError(
                f"weight must be finite and not negative, but it is {value}. {todo}"
            )
    return jnp.asarray(weight)
