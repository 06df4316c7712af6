"""A loss and its arguments, how its batch is divided, and both of its gradients."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._checks import named_leaves
from ga_optax._verify.wide import Wide, wide_dtype

# Half of the binary digits of float32, in which weights are counted.
_WEIGHT = 2.0**-12


class Pair(NamedTuple):
    """The comparison of G, the gradient of all rows, with M, the weighted mean of gᵢ.

    Attributes:
      sizes: ‖G‖ of each leaf for None, ‖gᵢ‖ for i.
      losses: the loss of all rows for None, of micro-batch i for i.
      terms: ‖G‖ + Σ |wᵢ|·‖gᵢ‖ of each leaf, for weights that add up to 1.
      not_finite: the first inf or NaN, in words; "" if there is none.
      off: ‖G - M‖ of each leaf.
      factor: the c for which c·M is as large as G.
      rest: ‖G - c·M‖ of each leaf.
      leaves: the shape, the dtype, ULPs and differences of each leaf, at most; [] if
        something is not finite.
    """

    sizes: dict[int | None, np.ndarray]
    losses: dict[int | None, float]
    terms: np.ndarray
    not_finite: str
    off: np.ndarray
    factor: float
    rest: np.ndarray
    leaves: list[tuple[tuple[int, ...], str, int, float]]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of `verify`, checked, as arrays in their own dtypes.

    Attributes:
      fun: the loss, without aux.
      params: the parameters.
      batch: the undivided batch.
      key: the key, as a tuple of one; empty if there is none.
      k: the number of micro-batches.
      weight: the weight of a micro-batch, with the arguments of `fun`, or None.
      axes: along which axis each leaf of the batch is split; None if it stays whole.
      x64: True if the caller works under `jax_enable_x64`.
    """

    fun: Callable[..., Any]
    params: Any
    batch: Any
    key: tuple[Any, ...]
    k: int
    weight: Callable[..., jax.Array] | None
    axes: Sequence[int | None]
    x64: bool

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the rows, `[micro-batch, row]`."""
        pairs = zip(jax.tree.leaves(self.batch), self.axes, strict=True)
        n = next(x.shape[axis] for x, axis in pairs if axis is not None)
        return np.arange(n, dtype=np.int32).reshape(self.k, -1)

    def take(self, rows: np.ndarray) -> Any:
        """These rows of the batch."""
        leaves, structure = jax.tree.flatten(self.batch)
        pairs = zip(leaves, self.axes, strict=True)
        return structure.unflatten(
            x if axis is None else x[(slice(None),) * axis + (rows,)]
            for x, axis in pairs
        )

    def args(self, part: int | None) -> tuple[Any, ...]:
        """The arguments of the loss for a micro-batch, or for all rows if None."""
        keys = jax.tree.map(lambda key: jax.random.fold_in(key, part or 0), self.key)
        batch = self.batch if part is None else self.take(self.rows[part])
        return self.params, batch, *keys

    def weights(self) -> np.ndarray:
        """The weight of each micro-batch, under `jax_enable_x64`.

        Rounding in float32 makes no weight wrong; in bfloat16 it does.
        """
        if self.weight is None:
            return np.ones(self.k)
        args = list(map(self.args, range(self.k)))
        wide = jax.jit(Wide(self.weight, self.x64))
        with jax.enable_x64(self.x64):
            used = np.array([float(self.weight(*x)) for x in args])
        exact = np.array([float(wide(*x)) for x in args])
        return np.where(np.abs(used - exact) <= _WEIGHT * exact, exact, used)

    def both(self, gradient: Callable[[], Any], weights: np.ndarray) -> Pair:
        """The two gradients, each traced by itself, one micro-gradient at a time."""
        of_whole, of_part, total = gradient(), gradient(), weights.sum() or 1.0
        losses, sizes = {}, {}
        losses[None], whole = of_whole(*self.args(None))
        terms = sizes[None] = norms(whole)
        acc = accumulator.init(whole)

        def added(acc: Any, i: int) -> Any:  # frees a gradient before the next
            losses[i], grads = of_part(*self.args(i))
            sizes[i] = norms(grads)
            return _add(acc, grads, float(weights[i]))

        for i in map(int, np.flatnonzero(weights)):  # weight 0 excludes inf and NaN
            acc = added(acc, i)
            terms = terms + weights[i] / total * sizes[i]
        mean: Any = accumulator.mean(acc)
        mean = [x.astype(y.dtype) for x, y in zip(mean, whole, strict=True)]
        bad = (self._not_finite(i, sizes[i], losses[i]) for i in (*[*sizes][1:], None))
        factor = ratio(norm(sizes[None]), norm(norms(mean)))
        off, rest = norms(whole, mean), norms(whole, mean, factor)
        first = next(filter(None, bad), "")
        leaves = [] if first else list(map(_figures, whole, mean))
        return Pair(sizes, losses, terms, first, off, factor, rest, leaves)

    def _not_finite(self, part: int | None, sizes: np.ndarray, loss: float) -> str:
        """Names an inf or a NaN of a micro-batch, or of all rows for None."""
        where = "the undivided batch"
        if part is not None:
            rows = self.rows[part]
            where = f"micro-batch {part} (rows {rows[0]} to {rows[-1]})"
        leaf = int(np.argmin(np.isfinite(sizes)))
        name = named_leaves(self.params)[leaf][0]
        if not math.isfinite(sizes[leaf]):
            return f"the gradient of {where}, {name}: {sizes[leaf]}"
        return "" if math.isfinite(loss) else f"the loss of {where}: {loss}"


_add = jax.jit(accumulator.add, donate_argnums=0)


def _figures(whole: jax.Array, mean: jax.Array) -> tuple[Any, str, int, float]:
    a, b = np.asarray(whole), np.asarray(mean)
    off = np.abs(a.astype(wide_dtype(a.dtype)) - b.astype(wide_dtype(a.dtype)))
    most = int(ulps(a, b).max(initial=0)), float(off.max(initial=0.0))
    return a.shape, a.dtype.name, *most


def compiled(fun: Callable[..., Any], x64: bool) -> Callable[..., Any]:
    """Loss and gradient, compiled: a number and a list."""
    run = jax.jit(fun)

    def gradient(*args: Any) -> tuple[float, list[jax.Array]]:
        with jax.enable_x64(x64):
            value, grads = run(*args)
        return float(value), jax.tree.leaves(grads)

    return gradient


@jax.jit
def _squares(x: jax.Array, y: jax.Array, factor: float) -> jax.Array:
    exact = wide_dtype(x.dtype)
    return jnp.sum(jnp.abs(x.astype(exact) - factor * y.astype(exact)) ** 2)


def norms(a: list[Any], b: list[Any] | None = None, factor: float = 1.0) -> np.ndarray:
    """‖a - factor · b‖ of each leaf, or ‖a‖, under `jax_enable_x64`."""
    pairs = zip(a, b or a, strict=True)
    return np.sqrt([float(_squares(x, y, factor if b else 0.0)) for x, y in pairs])


def norm(norms: np.ndarray) -> float:
    """‖x‖ of all leaves together, from the norms of each."""
    return float(np.sqrt((norms**2).sum()))


def ratio(x: float, y: float) -> float:
    """The quotient x / y, where 0 / 0 is 0."""
    return x / y if y else (math.inf if x else 0.0)


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The distance of two arrays in representable numbers, element by element.

    Args:
      a: an array of a floating or complex dtype.
      b: another one, of the same shape and dtype.

    Returns:
      uint64 distances; for a complex number, the larger distance of its two parts. Both
      zeros are one number. A NaN lies beyond inf, as far as its bits say.
    """
    if np.iscomplexobj(a):
        return np.maximum(ulps(a.real, b.real), ulps(a.imag, b.imag))
    places = _place(a), _place(b)
    return np.maximum(*places) - np.minimum(*places)


def _place(x: np.ndarray) -> np.ndarray:
    """The place of each number among all of its dtype, with both zeros at 2⁶³."""
    bits = x.copy().view(f"u{x.dtype.itemsize}").astype(np.uint64)
    sign, zero = np.uint64(1 << (8 * x.dtype.itemsize - 1)), np.uint64(1 << 63)
    return np.where(bits & sign, zero - (bits & ~sign), zero + bits)
