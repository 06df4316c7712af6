"""The gradients that `verify` compares: how they are computed, and how far apart.

`Loss` evaluates the user's loss on rows of the batch, in float64 where it can.
`Comparison` holds D, the undivided gradient less the accumulated one, and decides
whether it is rounding. `Native` has both gradients as training computes them.
"""

import copy
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ga_optax._checks import leaf_name
from ga_optax._verify_report import LeafReport

__all__ = ["Comparison", "Fun", "Loss", "Native", "NotFiniteError", "Progress", "ulps"]

# Half of float64's 52 binary digits. No algorithm that loses half its digits would
# train, and 2⁻²⁶ = 1.5e-8 is below the 6e-8 to which float32 rounds.
TOLERANCE = 2.0**-26
# A leaf whose gradient is zero but for rounding (the bias before a normalisation) has
# no digits right. Three quarters of them are asked of it, relative to the whole
# gradient.
_FLOOR = 2.0**-39
# D counts as rounding if it is at most this many times the change that a new rounding
# makes in it. Two independent roundings differ by √2 times their size; a fact differs
# by a few times the narrow dtype's precision.
NOISE = 4.0


class NotFiniteError(Exception):
    """The first inf or NaN: where it is, and what is known beside."""

    def __init__(
        self,
        where: str,
        losses: tuple[float, float],
        *,
        only_part: bool = False,
        narrow: bool = False,
    ) -> None:
        super().__init__(where)
        self.where = where
        self.losses = losses
        self.only_part = only_part
        self.narrow = narrow


class Progress:
    """A line on stderr, where somebody watches and it takes longer than two seconds."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.done = 0
        self.shown = False

    def tick(self) -> None:
        """One more gradient was evaluated."""
        self.done += 1
        seconds = time.monotonic() - self.start
        if seconds > 2 and sys.stderr.isatty():
            self.shown = True
            text = f"\rga_optax.verify: {self.done} gradients, {seconds:.0f} s "
            print(text, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self.shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


class Fun(NamedTuple):
    """The user's loss and its arguments, in their own dtypes.

    Attributes:
      fun: the loss, without aux.
      params: the parameters, as arrays.
      batch: the undivided batch, as arrays.
      rng: the key, or None.
      x64: whether the caller works under `jax_enable_x64`.
    """

    fun: Callable[..., Any]
    params: Any
    batch: Any
    rng: Any
    x64: bool

    def keys(self, i: int) -> tuple[Any, ...]:
        """What micro-batch i gets after the batch: its key, or nothing."""
        if self.rng is None:
            return ()
        return (jax.tree.map(lambda key: jax.random.fold_in(key, i), self.rng),)

    def gradient_of_rows(self) -> Callable[..., Any]:
        """A function of params, batch, rows and keys: loss and gradient, as leaves."""

        def gradient(params: Any, batch: Any, rows: Any, keys: Any) -> Any:
            def loss(params: Any) -> Any:
                return self.fun(params, jax.tree.map(lambda x: x[rows], batch), *keys)

            value, grads = jax.value_and_grad(loss)(params)
            return value, jax.tree.leaves(grads)

        return gradient


class Loss:
    """The loss of some rows of the batch and its gradient, in float64 where it can be.

    Gradients come as lists of float64 arrays, in the order of the leaves; complex
    leaves as their real and imaginary parts, stacked.

    Attributes:
      dtype: the narrowest floating dtype that is computed in.
      eps: its precision.
      note: what a reader has to know about that, or nothing.
      params: the parameters, in the dtype to evaluate at.
    """

    def __init__(self, call: Fun, progress: Progress) -> None:
        self.call, self.progress = call, progress
        self.compiled = jax.jit(call.gradient_of_rows())
        paths = jax.tree_util.tree_flatten_with_path(call.params)[0]
        self.names = [leaf_name(path) for path, _ in paths]
        self.num_rows = jax.tree.leaves(call.batch)[0].shape[0]
        self.params, self.batch = _wide(call.params), _wide(call.batch)
        self.x64 = True
        self.note = ""
        try:
            narrow = self.narrowest()
        except Exception as error:
            # Any: the code is the user's, and it did trace in its own dtypes before.
            self.params, self.batch, self.x64 = call.params, call.batch, call.x64
            narrow = self.narrowest()
            reason = str(error).strip().split("\n")[0][:100]
            self.note = (
                f"The loss does not run in float64 ({type(error).__name__}: {reason}), "
                f"so it was computed as it is, in {narrow.name}; effects as small as "
                "its rounding cannot be told from it."
            )
        if self.x64 and narrow != np.float64:
            self.note = (
                f"The loss casts to {narrow.name} inside, so the diagnosis is no more "
                "precise than that; effects as small as its rounding cannot be told "
                "from it."
            )
        self.dtype, self.eps = narrow.name, float(jnp.finfo(narrow).eps)

    def again(self) -> "Loss":
        """The same loss, to be traced afresh."""
        other = copy.copy(self)
        other.compiled = jax.jit(self.call.gradient_of_rows())
        return other

    def narrowest(self) -> np.dtype:
        """The coarsest floating dtype that the loss and its gradient compute in."""
        rows = np.arange(self.num_rows, dtype=np.int32)
        with jax.enable_x64(self.x64):
            jaxpr = jax.make_jaxpr(self.call.gradient_of_rows())(
                self.params, self.batch, rows, self.call.keys(0)
            )
        dtypes = {np.dtype(np.float64), *_floating(jaxpr.jaxpr)}
        return max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))

    def gradient(
        self, rows: np.ndarray, key: int = 0, params: Any = None
    ) -> tuple[float, list[jax.Array]]:
        """Loss and gradient of these rows, with the key of micro-batch `key`."""
        params = self.params if params is None else params
        with jax.enable_x64(self.x64):
            value, grads = self.compiled(
                params, self.batch, rows.astype(np.int32), self.call.keys(key)
            )
        self.progress.tick()
        grads.reverse()  # Leaf by leaf, so that there are never two copies of all.
        return float(value), [_real(grads.pop()) for _ in range(len(grads))]

    def nearby(self, size: float, seed: int) -> Any:
        """The parameters, each moved by a random part of itself, at most `size`."""
        with jax.enable_x64(self.x64):
            return _moved(self.params, jax.random.key(seed), size)


@jax.jit
def _moved(params: Any, key: jax.Array, size: ArrayLike) -> Any:
    leaves, structure = jax.tree.flatten(params)
    moved = []
    for i, x in enumerate(leaves):
        part = jax.random.uniform(jax.random.fold_in(key, i), x.shape, jnp.float32)
        part = (size * (2 * part - 1)).astype(x.dtype)
        # A zero does not move by a part of itself.
        moved.append(jnp.where(x == 0, part, x * (1 + part)))
    return jax.tree.unflatten(structure, moved)


@jax.jit
def _wide(tree: Any) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x.astype(jnp.float64)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return x.astype(jnp.complex128)
        return x

    return jax.tree.map(cast, tree)


def _real(x: jax.Array) -> jax.Array:
    """A leaf in float64; of a complex one, its two parts."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    return x if x.dtype == jnp.float64 else x.astype(jnp.float64)


def _floating(jaxpr: Any) -> Iterator[np.dtype]:
    """The floating dtypes of everything that a program computes."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                yield np.dtype(jnp.finfo(dtype).dtype)
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(parameter, "eqns"):
                yield from _floating(getattr(parameter, "jaxpr", parameter))


@functools.partial(jax.jit, donate_argnums=0)
def add_scaled(
    total: list[jax.Array], tree: list[jax.Array], factor: ArrayLike
) -> list[jax.Array]:
    return [t + factor * x for t, x in zip(total, tree, strict=True)]


@jax.jit
def _squares(tree: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.sum(x * x) for x in tree])


def norms(tree: list[jax.Array]) -> np.ndarray:
    """‖x‖ of each leaf."""
    return np.sqrt(np.asarray(_squares(tree)))


def norm(norms: np.ndarray) -> float:
    return float(np.sqrt((norms**2).sum()))


def ratio(x: float, y: float) -> float:
    if y:
        return x / y
    return math.inf if x else 0.0


class Comparison:
    """D, the undivided gradient less the accumulated one, and how large it may be.

    Attributes:
      weights: the weights in use, or None where each micro-batch counts the same.
      share: the weights, divided by their sum.
      undivided: ‖G‖ of each leaf.
      difference: ‖D‖ of each leaf.
      terms: ‖G‖ + Σ |wᵢ|·‖gᵢ‖ of each leaf.
      noise: how much D changes with the roundings inside the loss, of each leaf.
      noisy: whether that had to be measured.
      agrees: whether D is rounding.
      loss, accumulated_loss: of the undivided batch, and over the micro-batches.
    """

    def __init__(self, run: Loss, k: int, rows: int, weights: np.ndarray) -> None:
        self.run, self.k, self.rows = run, k, rows
        self.weights = None if (weights == 1).all() else weights
        self.share = weights / (weights.sum() or 1.0)
        self.noise = np.zeros(len(run.names))
        difference = self.subtract(self.share, self.run.params, record=True)
        self.difference = norms(difference)
        self.noisy = not self.agrees and run.eps > np.finfo(np.float64).eps
        if self.noisy:
            other = self.subtract(self.share, run.nearby(2 * run.eps, seed=1))
            minus = np.float64(-1.0)
            self.noise = norms(add_scaled(other, difference, minus))

    def part(self, i: int) -> np.ndarray:
        """The rows of micro-batch i."""
        size = self.rows // self.k
        return np.arange(i * size, (i + 1) * size)

    def subtract(
        self, weights: np.ndarray, params: Any, *, record: bool = False
    ) -> list[jax.Array]:
        """G - Σ wᵢ·gᵢ, one micro-gradient at a time; a weight of 0 leaves it out."""
        rest = self.gradient(None, params, record)
        terms = norms(rest)
        if record:
            self.undivided = terms
        for i in np.flatnonzero(weights):
            grads = self.gradient(int(i), params, record)
            terms = terms + abs(weights[i]) * norms(grads)
            rest = add_scaled(rest, grads, np.float64(-weights[i]))
            del grads  # before the next one comes
        if record:
            self.terms = terms
        return rest

    def gradient(self, i: int | None, params: Any, record: bool) -> list[jax.Array]:
        """The gradient of micro-batch i or of the whole, checked if `record`."""
        rows = np.arange(self.rows) if i is None else self.part(i)
        value, grads = self.run.gradient(rows, i or 0, params)
        if not record:
            return grads
        if i is None:
            self.loss, self.accumulated_loss = value, 0.0
        else:
            self.accumulated_loss += float(self.share[i]) * value
        where = "of the undivided batch"
        if i is not None:
            where = f"of micro-batch {i} (rows {rows[0]} to {rows[-1]})"
        bad = _first_not_finite(value, grads, self.run, where)
        if bad is not None:
            raise NotFiniteError(
                self.earliest(bad) if i is None else bad,
                (self.loss, self.accumulated_loss),
                only_part=i is not None,
            )
        return grads

    def earliest(self, bad: str) -> str:
        """Where the first inf or NaN of an undivided batch comes from.

        Not from what has weight 0, which may hold anything.
        """
        for i in map(int, np.flatnonzero(self.share)):
            rows = self.part(i)
            where = f"of micro-batch {i} (rows {rows[0]} to {rows[-1]})"
            value, grads = self.run.gradient(rows, i)
            found = _first_not_finite(value, grads, self.run, where)
            if found is not None and self.k > 1:
                return found
        return bad

    def allowed(self, terms: np.ndarray) -> np.ndarray:
        """How far rounding may move each leaf of a sum of such terms."""
        return TOLERANCE * terms + _FLOOR * norm(terms) + NOISE * self.noise

    @property
    def agrees(self) -> bool:
        return bool((self.difference <= self.allowed(self.terms)).all())

    def relative(self) -> np.ndarray:
        pairs = zip(self.difference, self.undivided, strict=True)
        return np.array([ratio(d, g) for d, g in pairs])

    def same(self, run: Loss, rows: np.ndarray, key: int) -> bool:
        """Whether `run` has the undivided gradient for these rows and this key too."""
        rest = self.run.gradient(np.arange(self.rows))[1]
        rest = add_scaled(rest, run.gradient(rows, key)[1], np.float64(-1.0))
        return bool((norms(rest) <= self.allowed(self.terms)).all())

    def reproduces(self, weights: np.ndarray) -> bool:
        """Whether Σ wᵢ·gᵢ = G on every leaf, not in a sketch alone."""
        rest = norms(self.subtract(weights, self.run.params))
        return bool((rest <= self.allowed(self.terms * max(1.0, weights.sum()))).all())


@jax.jit
def _finite(tree: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in tree])


def _first_not_finite(
    value: float, grads: list[jax.Array], run: Loss, where: str
) -> str | None:
    finite = np.asarray(_finite(grads))
    if not finite.all():
        leaf = int(np.argmin(finite))
        array = np.asarray(grads[leaf])
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        found = array[index]
        if array.ndim > jnp.ndim(jax.tree.leaves(run.params)[leaf]):
            index = index[1:]
        at = f" at index {index}" if index else ""
        loss = "" if math.isfinite(value) else f", and the loss there is {value}"
        return f"the gradient {where}, {run.names[leaf]}{at}: {found}{loss}"
    return None if math.isfinite(value) else f"the loss {where}: {value}"


class Native:
    """Both gradients as training computes them, in the parameters' own dtypes.

    Attributes:
      leaves: a report for each leaf, without its relative difference.
      distance: ‖G - M‖ of the two.
      relative: that over ‖G‖.
      errors: ‖x - G‖ / ‖G‖ of the undivided and of the accumulated one, G in float64.
      dtype, eps: the narrowest floating dtype in it, and its precision.
    """

    def __init__(self, run: Loss, accumulated: Callable[..., Any]) -> None:
        call = run.call
        undivided = jax.grad(call.fun)
        rng = () if call.rng is None else (call.rng,)
        with jax.enable_x64(call.x64):
            whole = jax.jit(undivided)(call.params, call.batch, *call.keys(0))
            run.progress.tick()
            parts = jax.jit(accumulated)(call.params, call.batch, *rng)[1]
            run.progress.tick()
        whole, parts = jax.tree.leaves(whole), jax.tree.leaves(parts)
        for where, tree in (
            ("of the undivided batch", whole),
            ("accumulated over the micro-batches", parts),
        ):
            bad = _first_not_finite(0.0, tree, run, where)
            if bad is not None:
                raise NotFiniteError(bad, (math.nan, math.nan), narrow=True)
        dtypes = {run.dtype, *(x.dtype.name for x in whole)}
        self.dtype = max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))
        self.eps = float(jnp.finfo(self.dtype).eps)
        self.leaves = [
            _compare_leaf(name, a, b)
            for name, a, b in zip(run.names, whole, parts, strict=True)
        ]
        exact = run.gradient(np.arange(run.num_rows))[1]
        size = norm(norms(exact))
        self.distance = math.sqrt(sum(map(_squares_apart, whole, parts)))
        self.relative = ratio(self.distance, size)
        self.errors = tuple(
            ratio(math.sqrt(sum(map(_squares_apart, tree, exact))), size)
            for tree in (whole, parts)
        )


@jax.jit
def _squares_apart(x: jax.Array, y: jax.Array) -> jax.Array:
    """‖x - y‖² of two leaves."""
    return jnp.sum((_real(x) - _real(y)) ** 2)


def _compare_leaf(name: str, a: jax.Array, b: jax.Array) -> LeafReport:
    x, y = np.asarray(a), np.asarray(b)
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    far = np.abs(x.astype(wide) - y.astype(wide))
    return LeafReport(
        name,
        x.shape,
        x.dtype.name,
        int(ulps(x, y).max(initial=0)),
        float(far.max(initial=0.0)),
        0.0,  # known to the comparison in float64
    )


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many representable numbers lie between two arrays, element by element.

    Args:
      a: an array of a floating or complex dtype.
      b: another one, of the same shape and dtype.

    Returns:
      uint64 distances; of a complex number, the larger of its two parts. Both zeros are
      one number. NaN lies beyond inf, as far as its bits say.

    Raises:
      ValueError: where shapes or dtypes differ.
    """
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise ValueError(
            f"ULPs need one shape and one dtype, but these are {a.dtype}{a.shape} and "
            f"{b.dtype}{b.shape}. Cast to the dtype that the question is about."
        )
    if np.iscomplexobj(a):
        return np.maximum(ulps(a.real, b.real), ulps(a.imag, b.imag))

    def order(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
        sign = np.uint64(1 << (8 * x.dtype.itemsize - 1))
        return (bits & sign) != 0, (bits & (sign - np.uint64(1))).reshape(x.shape)

    (a_below, a_size), (b_below, b_size) = order(a), order(b)
    apart = np.maximum(a_size, b_size) - np.minimum(a_size, b_size)
    return np.where(
        a_below.reshape(a.shape) == b_below.reshape(b.shape), apart, a_size + b_size
    )
