"""A loss and its arguments, and both of its gradients in numbers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._devices.membership import split
from ga_optax._verify.wide import Wide


class Problem(NamedTuple):
    """The arguments of `verify`, checked, as arrays in their own dtypes.

    Attributes:
      params: the parameters.
      batch: the undivided batch.
      key: the key, as a tuple of one; empty if there is none.
      fun: the loss, which returns the weight, too.
      k: the number of micro-batches.
      axes: along which axis each leaf of the batch is split; None if it stays whole.
      x64: True if the caller works under `jax_enable_x64`.
    """

    params: Any
    batch: Any
    key: tuple[Any, ...]
    fun: Callable[..., Any]
    k: int
    axes: Sequence[int | None]
    x64: bool

    def parts(self) -> list[Any]:
        """The leaves of the batch; first of all axes is that of the micro-batches."""
        pairs = zip(jax.tree.leaves(self.batch), self.axes, strict=True)
        return [x if d is None else split(x, self.k, d, False) for x, d in pairs]

    def args(self, part: Any) -> tuple[Any, ...]:
        """The arguments of the loss for a micro-batch, or for all rows if None."""
        index, batch = 0 if part is None else part, self.batch
        if part is not None:
            pairs = zip(self.parts(), self.axes, strict=True)
            leaves = (x if d is None else x[part] for x, d in pairs)
            batch = jax.tree.structure(batch).unflatten(leaves)
        keys = jax.tree.map(lambda key: jax.random.fold_in(key, index), self.key)
        return self.params, batch, *keys

    def weights(self) -> np.ndarray:
        """The weight of each micro-batch, in float64: sums in float32 are as right."""
        weight = jax.jit(Wide(lambda *x: self.fun(*x)[1], self.x64))
        return np.array([float(weight(*self.args(i))) for i in range(self.k)])


class Trained(NamedTuple):
    """Both gradients, as training computes them.

    Attributes:
      is_finite: True if the accumulated one is finite, and the mean of the losses.
      ulps: by leaf, how many numbers of its dtype lie between them, at most.
    """

    is_finite: bool
    ulps: list[int]


def trained(value: Any, whole: Any, mean: Any) -> Trained:
    """The comparison of the gradient of all rows with the accumulated one.

    `value` is the accumulated loss.
    """
    out = jax.tree.leaves((value, mean))
    is_finite = all(bool(jnp.isfinite(x).all()) for x in out)
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(mean), strict=True)
    both = ((np.asarray(x), np.asarray(y.astype(x.dtype))) for x, y in pairs)
    return Trained(is_finite, [int(ulps(x, y).max(initial=0)) for x, y in both])


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The distance of two arrays of a dtype, in representable numbers.

    Both zeros are one number. A NaN lies beyond inf, as far as its bits say. Of a
    complex number, it is the larger distance of its two parts.
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


class Comparison(NamedTuple):
    """G, the gradient of all rows, and M, the weighted mean of gᵢ, in float64.

    Attributes:
      losses: the loss of all rows, and the weighted mean of those of micro-batches.
      sizes: ‖x‖ of each leaf of the gradient and, last, of the loss; a line for each
        micro-batch, and the last one for all rows.
      terms: ‖G‖ + Σ |wᵢ|·‖gᵢ‖ of each leaf, for weights that add up to 1.
      off: ‖G - M‖ of each leaf.
      factor: the c for which c·M is as large as G.
      rest: ‖G - c·M‖ of each leaf.
    """

    losses: Any
    sizes: Any
    terms: Any
    off: Any
    factor: Any
    rest: Any


def comparing(problem: Problem) -> tuple[Callable[..., Any], Wide]:
    """A function of the data and of weights, and the loss and gradient in float64.

    The weights add up to 1. Weight 0 excludes NaN. The gradients of micro-batches are
    computed one at a time.
    """
    gradient = Wide(jax.value_and_grad(lambda *x: problem.fun(*x)[0]), problem.x64)

    def leaves(problem: Problem, part: Any) -> list[Any]:
        loss, grads = gradient(*problem.args(part))
        return [*jax.tree.leaves(grads), loss]

    def norms(xs: list[Any], ys: list[Any], c: Any) -> jax.Array:
        pairs = zip(xs, ys, strict=True)
        return jnp.stack([jnp.linalg.norm((x - c * y).ravel()) for x, y in pairs])

    @jax.jit
    def compared(params: Any, batch: Any, key: Any, weights: jax.Array) -> Comparison:
        given = problem._replace(params=params, batch=batch, key=key)

        def step(sums: list[Any], i: Any) -> tuple[list[Any], Any]:
            part, w = leaves(given, i), weights[i]
            pairs = zip(sums, part, strict=True)
            return [x + jnp.where(w == 0, 0, w * y) for x, y in pairs], size(part)

        whole = leaves(given, None)
        zeros = list(map(jnp.zeros_like, whole))
        size = functools.partial(norms, ys=zeros, c=0)
        mean, of_parts = jax.lax.scan(step, zeros, jnp.arange(problem.k))
        sizes, w = jnp.stack([*of_parts, size(whole)]), jnp.append(weights, 1)[:, None]
        terms = jnp.where(w == 0, 0, w * sizes).sum(0)
        factor = norm(size(whole)[:-1]) / norm(size(mean)[:-1])
        off, rest = (norms(whole, mean, c)[:-1] for c in (1, factor))
        return Comparison((whole[-1], mean[-1]), sizes, terms[:-1], off, factor, rest)

    return compared, gradient


def norm(norms: Any) -> Any:
    """‖x‖ of all leaves together, from the norms of each."""
    return (norms**2).sum() ** 0.5
