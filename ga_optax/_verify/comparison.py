"""D, the undivided gradient less the accumulated one, and whether it is rounding.

It takes one micro-gradient at a time, so that three gradient trees suffice for any k.
`Native` has both gradients as training computes them, in the parameters' own dtypes.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._verify import gradients
from ga_optax._verify.gradients import Leaves, dot, norm, norms, ratio, subtract
from ga_optax._verify.loss import Loss, NotFiniteError, first_not_finite, moved
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
      loss: what evaluates G and the gᵢ.
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

    def __init__(self, loss: Loss) -> None:
        self.loss, self.problem = loss, loss.problem
        weights = self.problem.weights
        self.weighted = not (weights == 1).all()
        self.share = weights / (weights.sum() or 1.0)
        difference = self._residual(self.share, self._recorded)
        self.difference = norms(difference)
        self.relative = np.array(list(map(ratio, self.difference, self.undivided)))
        self.relative_norm = ratio(norm(self.difference), norm(self.undivided))
        self.noise = np.zeros_like(self.difference)
        self.agrees = self._is_rounding(self.difference)
        self.noisy = not self.agrees and loss.eps > np.finfo(np.float64).eps
        if self.noisy:
            # At parameters that are moved by the rounding of the low precision.
            near = moved(self.problem.params, 2 * loss.eps)
            other = self._residual(self.share, lambda i: loss.of_part(i, near)[1])
            self.noise = norms(subtract(other, difference, 1.0))
            self.agrees = self._is_rounding(self.difference)
        # Code that is bound to a low precision may lose half of its digits, too.
        lost = math.sqrt(loss.eps) * self.terms
        self.decidable = not self.noisy or bool((self.difference > lost).any())

    def allowed(self, scale: float = 1.0) -> np.ndarray:
        """How far rounding may move each leaf of a sum with `scale` times the terms."""
        terms = scale * self.terms
        return TOLERANCE * terms + _FLOOR * norm(terms) + NOISE * self.noise

    def same(
        self, *, loss: Loss | None = None, rows: np.ndarray | None = None, key: int = 0
    ) -> bool:
        """Whether another loss, other rows or another key have the gradient G, too."""
        rows = self.problem.rows(None) if rows is None else rows
        whole = self.loss.of_part(None)[1]
        other = (loss or self.loss).of_rows(rows, key)[1]
        return self._is_rounding(norms(subtract(whole, other, 1.0)))

    def factor(self, share: np.ndarray) -> float | None:
        """The c with G = c·Σ wᵢ·gᵢ, for weights that add up to 1, on every leaf.

        Of k, 1 / k and 1 it is the number itself, as far as that is known.
        """
        total = self._residual(-share, self._of_part)
        whole = self._of_part(None)
        mean = subtract(total, whole, 1.0)
        size, noise = norm(norms(mean)), norm(self.noise)
        c = float(dot(whole, mean)) / (size**2 or 1.0)
        rest = norms(subtract(whole, mean, c))
        if not c > 0 or not self._is_rounding(rest, scale=max(1.0, c)):
            return None
        trust = max(_TRUST, NOISE * noise / (size or 1.0))
        known = (self.problem.k, 1 / self.problem.k, 1.0)
        return next((float(x) for x in known if abs(c / x - 1) <= trust), c)

    def _of_part(self, part: int | None) -> Leaves:
        return self.loss.of_part(part)[1]

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
        value, grads = self.loss.of_part(part)
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
            bad = (self._not_finite(i, *self.loss.of_part(i)) for i in parts)
            found = next(filter(None, bad), found)
        raise NotFiniteError(found, self.losses, only_part=part is not None)

    def _not_finite(self, part: int | None, value: float, grads: Leaves) -> str | None:
        return first_not_finite(self.problem, self.problem.place(part), value, grads)


# -- As training computes them ---------------------------------------------------------


class Native:
    """How the two gradients differ as training computes them.

    Attributes:
      comparison: the two gradients in float64, if the loss runs in float64.
      leaves: a report for each leaf.
      max_ulp: the largest of the leaves.
      distance: ‖G - M‖, G undivided and M accumulated.
      relative: that over ‖G‖.
      errors: ‖x - G‖ / ‖G‖ of each of the two, with G in float64.
      dtype: the floating dtype of the lowest precision in it.
      has_few_digits: whether less than half of that dtype's digits are right.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        loss, problem = comparison.loss, comparison.problem
        params, batch = problem.params, problem.batch
        # Each is traced by itself, as in training.
        grad, other = (
            jax.jit(jax.grad(problem.of_part(problem.fun))) for _ in range(2)
        )
        with jax.enable_x64(problem.x64):
            whole = jax.tree.leaves(grad(params, batch, *problem.part(None)))
            loss.progress.tick()
            acc = accumulator.init(params)
            for i, weight in enumerate(problem.weights):
                grads = other(params, batch, *problem.part(i))
                given = None if problem.weight is None else float(weight)
                acc = accumulator.add(acc, grads, given)
                loss.progress.tick()
            means = jax.tree.leaves(accumulator.mean(acc))
        parts = [x.astype(y.dtype) for x, y in zip(means, whole, strict=True)]
        places = problem.place(None), "accumulated over the micro-batches"
        for place, leaves in zip(places, (whole, parts), strict=True):
            found = first_not_finite(problem, place, 0.0, leaves)
            if found is not None:
                raise NotFiniteError(found, low_precision=True)
        names, relative = problem.names, comparison.relative
        self.leaves = tuple(map(_compare_leaf, names, whole, parts, relative))
        self.max_ulp = max(leaf.max_ulp for leaf in self.leaves)
        dtypes = {loss.dtype, *(x.dtype.name for x in whole)}
        eps, self.dtype = max((float(jnp.finfo(d).eps), d) for d in dtypes)
        exact = loss.of_part(None)[1]
        size = norm(norms(exact))
        self.distance = gradients.distance(whole, parts)
        self.relative = ratio(self.distance, size)
        self.has_few_digits = self.distance > math.sqrt(eps) * norm(comparison.terms)
        self.errors = [
            ratio(gradients.distance(x, exact), size) for x in (whole, parts)
        ]


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
