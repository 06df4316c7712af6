"""D, the undivided gradient less the accumulated one, and whether it is rounding.

It takes one micro-gradient at a time, so that three gradient trees suffice for any k.
`Native` has both gradients as training computes them, in the parameters' own dtypes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._verify import gradients
from ga_optax._verify.gradients import Leaves, norm, norms, ratio, subtract
from ga_optax._verify.problem import Problem
from ga_optax._verify.report import LeafReport

# Half of float64's 52 binary digits. No algorithm that loses half of its digits would
# train, and 2⁻²⁶ = 1.5e-8 is below the 6e-8 to which float32 rounds.
TOLERANCE = 2.0**-26
# A leaf whose gradient is zero up to rounding (the bias before a normalisation) has no
# correct digits. It must agree to three quarters of the digits of the whole gradient.
_FLOOR = 2.0**-39
# How far a factor may be off that is a number of micro-batches.
_TRUST = 1e-6
# Two independent roundings differ by √2 times their size, and a real difference is at
# least a few times the rounding of the lower precision.
NOISE = 4.0


class Comparison:
    """D = G - Σ wᵢ·gᵢ / Σ wᵢ, and how large it may be.

    Attributes:
      problem: what evaluates G and the gᵢ.
      weighted: whether the micro-batches count differently.
      share: the weights in use, divided by their sum.
      undivided: ‖G‖ of each leaf.
      difference: ‖D‖ of each leaf.
      relative: ‖D‖ / ‖G‖ of each leaf.
      relative_norm: ‖D‖ / ‖G‖ over all leaves.
      terms: ‖G‖ + Σ |wᵢ|·‖gᵢ‖ of each leaf.
      noise: how much D changes if the loss rounds differently, of each leaf.
      noisy: whether that had to be measured.
      agrees: whether D is rounding.
      decidable: whether D is more than rounding can be.
      losses: the undivided batch's loss, and the accumulated one.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, weights = problem, problem.weights
        self.weighted = not (weights == 1).all()
        self.share = weights / (weights.sum() or 1.0)
        difference = self._residual(self.share, self._recorded)
        self.difference = norms(difference)
        self.relative = np.array(list(map(ratio, self.difference, self.undivided)))
        self.relative_norm = ratio(norm(self.difference), norm(self.undivided))
        self.noise = np.zeros_like(self.difference)
        self.agrees = self._is_rounding(self.difference)
        eps = float(jnp.finfo(problem.low).eps)
        self.noisy = not self.agrees and eps > np.finfo(np.float64).eps
        if self.noisy:
            # At parameters that are moved by the rounding of the low precision.
            near = _moved(problem.params, 2 * eps)
            beside = functools.partial(problem.gradient, params=near)
            other = self._residual(self.share, beside)
            self.noise = norms(subtract(other, difference, 1.0))
            self.agrees = self._is_rounding(self.difference)
        # Code that is bound to a low precision may lose half of its digits, too.
        lost = math.sqrt(eps) * self.terms
        self.decidable = not self.noisy or bool((self.difference > lost).any())

    def allowed(self, scale: float = 1.0) -> np.ndarray:
        """How far rounding may move each leaf of a sum with `scale` times the terms."""
        terms = scale * self.terms
        return TOLERANCE * terms + _FLOOR * norm(terms) + NOISE * self.noise

    def same(self, problem: Problem | None = None, **other: Any) -> bool:
        """Whether another loss, or other rows or keys, have the gradient G, too."""
        found = (problem or self.problem).gradient(**other)
        return self._is_rounding(norms(subtract(self.problem.gradient(), found, 1.0)))

    def adds_up(self, some: np.ndarray) -> bool:
        """Whether G is a sum of what rows at some places add, and those at the others.

        With other rows at some, at the others, and at all places, it is the same sum.
        """
        own = np.arange(self.problem.batch_size, dtype=np.int32)
        other, rest = np.roll(own, 1), self.problem.gradient()
        for rows, sign in (
            (np.where(some, other, own), 1.0),
            (np.where(some, own, other), 1.0),
            (other, -1.0),
        ):
            rest = subtract(rest, self.problem.gradient(rows=rows), sign)
        return self._is_rounding(norms(rest), scale=2.0)  # of four gradients

    def factor(self, share: np.ndarray) -> float | None:
        """The c with G = c·Σ wᵢ·gᵢ, for weights that add up to 1, on every leaf.

        Of k, 1 / k and 1 it is the number itself, as far as that is known.
        """
        total = self._residual(-share, self.problem.gradient)
        whole = self.problem.gradient()
        mean = subtract(total, whole, 1.0)
        size = norm(norms(mean))
        c = ratio(norm(self.undivided), size)
        if c in (0.0, math.inf):
            return None
        rest = norms(subtract(whole, mean, c))
        if not self._is_rounding(rest, scale=max(1.0, c)):
            return None
        trust = max(_TRUST, NOISE * norm(self.noise) / size)
        known = (self.problem.k, 1 / self.problem.k, 1.0)
        return next((float(x) for x in known if abs(c / x - 1) <= trust), c)

    def _is_rounding(self, rest: np.ndarray, scale: float = 1.0) -> bool:
        return bool((rest <= self.allowed(scale)).all())

    def _residual(
        self, weights: np.ndarray, gradient: Callable[[int | None], Leaves]
    ) -> Leaves:
        """G - Σ wᵢ·gᵢ of these gradients; a weight of 0 leaves gᵢ out."""
        rest = gradient(None)
        for i in map(int, np.flatnonzero(weights)):
            # Nothing else holds gᵢ when the next one comes.
            rest = subtract(rest, gradient(i), float(weights[i]))
        return rest

    def _recorded(self, part: int | None) -> Leaves:
        """G or gᵢ, which enter the sums; raises if there is an inf or a NaN."""
        value, grads = self.problem.evaluate(part)
        if part is None:
            self.undivided = self.terms = norms(grads)
            self.losses = value, 0.0
        else:
            share = float(self.share[part])
            self.terms = self.terms + abs(share) * norms(grads)
            self.losses = self.losses[0], self.losses[1] + share * value
        found = self._not_finite(part, value, grads)
        if found is None:
            return grads
        if part is None and len(self.share) > 1:
            # Which micro-batch it comes from. One of weight 0 may hold anything.
            parts = map(int, np.flatnonzero(self.share))
            bad = (self._not_finite(i, *self.problem.evaluate(i)) for i in parts)
            found = next(filter(None, bad), found)
        raise NotFiniteError(found, self.losses, only_part=part is not None)

    def _not_finite(self, part: int | None, value: float, grads: Leaves) -> str | None:
        return _first_not_finite(self.problem, self.problem.place(part), value, grads)


def _moved(params: Any, size: float) -> Any:
    """The parameters, each moved by a random part of itself, at most `size`."""
    rng = np.random.default_rng(1)

    def move(x: jax.Array) -> jax.Array:
        part = jnp.asarray(rng.uniform(-size, size, x.shape), x.dtype)
        # A zero does not move by a part of itself.
        return jnp.where(x == 0, part, x * (1 + part))

    return jax.tree.map(move, params)


# -- What cannot be compared -----------------------------------------------------------


@dataclasses.dataclass(eq=False)
class NotFiniteError(Exception):
    """There is an inf or a NaN, so that nothing can be compared.

    Attributes:
      first: which the first one is, in words.
      losses: the undivided batch's loss, and the accumulated one, as far as known.
      only_part: whether the undivided batch has none.
      low_precision: whether float64 has none.
    """

    first: str
    losses: tuple[float, float] = (math.nan, math.nan)
    only_part: bool = False
    low_precision: bool = False


def _first_not_finite(
    problem: Problem, place: str, value: float, grads: Leaves
) -> str | None:
    """Names the first inf or NaN of the gradient, else of the loss, if there is one."""
    finite = [bool(jnp.isfinite(x).all()) for x in grads]
    if all(finite):
        return None if math.isfinite(value) else f"the loss {place}: {value}"
    leaf = finite.index(False)
    array = np.asarray(grads[leaf])
    index = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
    found = array[index]
    # Without the part of a complex number.
    index = index[array.ndim - jnp.ndim(jax.tree.leaves(problem.params)[leaf]) :]
    at = f" at index {index}" if index else ""
    loss = "" if math.isfinite(value) else f", and the loss there is {value}"
    return f"the gradient {place}, {problem.names[leaf]}{at}: {found}{loss}"


# -- As training computes them ---------------------------------------------------------


class Native:
    """How the two gradients differ as training computes them.

    Attributes:
      comparison: the two gradients in float64, if the loss runs in float64.
      leaves: a report for each leaf.
      max_ulp: the largest of the leaves.
      distance: ‖G - M‖, G undivided and M accumulated.
      relative: that over ‖G‖.
      worst: the same, those that differ most by more than rounding first.
      errors: ‖x - G‖ / ‖G‖ of each of the two, with G in float64.
      dtype: the floating dtype of the lowest precision in it.
      has_few_digits: whether less than half of that dtype's digits are right.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, problem = comparison, comparison.problem
        # Each is traced by itself, as in training.
        funs = problem.of_part(problem.fun), problem.of_part(problem.fun)
        grad, other = (jax.jit(jax.grad(fun)) for fun in funs)
        with jax.enable_x64(problem.x64):
            whole = jax.tree.leaves(grad(*problem.args(None)))
            problem.progress.tick()
            acc = accumulator.init(problem.params)
            for i, weight in enumerate(problem.weights):
                grads = other(*problem.args(i))
                given = None if problem.weight is None else float(weight)
                acc = accumulator.add(acc, grads, given)
                problem.progress.tick()
            means = jax.tree.leaves(accumulator.mean(acc))
        parts = [x.astype(y.dtype) for x, y in zip(means, whole, strict=True)]
        places = problem.place(None), "accumulated over the micro-batches"
        for place, leaves in zip(places, (whole, parts), strict=True):
            found = _first_not_finite(problem, place, 0.0, leaves)
            if found is not None:
                raise NotFiniteError(found, low_precision=True)
        names, relative = problem.names, comparison.relative
        self.leaves = tuple(map(_compare_leaf, names, whole, parts, relative))
        self.max_ulp = max(leaf.max_ulp for leaf in self.leaves)
        sizes = np.array([leaf.max_ulp for leaf in self.leaves], float)
        if not comparison.agrees:
            # Not a leaf whose gradient is zero but for rounding.
            real = comparison.difference > comparison.allowed()
            sizes = np.where(real, comparison.relative, -1.0)
        order = np.argsort(-sizes, kind="stable")
        self.worst = tuple(self.leaves[i] for i in order)
        dtypes = {problem.low.name, *(x.dtype.name for x in whole)}
        eps, self.dtype = max((float(jnp.finfo(d).eps), d) for d in dtypes)
        exact = problem.gradient()
        size = norm(comparison.undivided)
        self.distance = gradients.distance(whole, parts)
        self.relative = ratio(self.distance, size)
        self.has_few_digits = self.distance > math.sqrt(eps) * norm(comparison.terms)
        off = [gradients.distance(x, exact) for x in (whole, parts)]
        self.errors = [ratio(x, size) for x in off]


def _compare_leaf(
    name: str, whole: jax.Array, parts: jax.Array, relative: float
) -> LeafReport:
    a, b = np.asarray(whole), np.asarray(parts)
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    return LeafReport(
        name=name,
        shape=a.shape,
        dtype=a.dtype.name,
        max_ulp=int(gradients.ulps(a, b).max(initial=0)),
        max_abs=float(np.abs(a.astype(wide) - b.astype(wide)).max(initial=0.0)),
        relative=float(relative),
    )
