"""Which weights of the micro-gradients give the undivided gradient.

The fit never holds the gradients. A linear equation between vectors holds between their
images under any linear map too, so each gradient is reduced to a sketch of
max(4096, 8·k) numbers. It keeps the rank of k vectors with probability near 1, and
lengths to a few per cent. Gradients that are no larger than that are kept whole.

References:
  K. Clarkson, D. Woodruff, "Low-Rank Approximation and Regression in Input Sparsity
  Time", J. ACM 63(6), 2017, section 2 (the sketch).
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._verify.comparison import NOISE, TOLERANCE, Comparison
from ga_optax._verify.gradients import Evaluated, Leaves, norm

# Singular values below this, relative to the largest, count as zero in a fit.
_RANK = 1e-11


class Weights(NamedTuple):
    """Weights wᵢ with Σ wᵢ·gᵢ = G, and which of them the gradients determine."""

    values: np.ndarray
    known: np.ndarray


class Fit:
    """What is known about G and the gᵢ, in sketches, as linear equations for weights.

    Weights that depend on the batch alone hold at other parameters too, and between
    neighbouring micro-batches and their union. So, with g' at parameters nearby and gᵢⱼ
    the gradient over the rows of both (in it, gᵢ is in a window of these two alone),

        Σ wᵢ·gᵢ = G,   Σ wᵢ·g'ᵢ = G',   wᵢ·(gᵢⱼ - gᵢ) + wⱼ·(gᵢⱼ - gⱼ) = 0,   Σ wᵢ = 1

    Even for a single scalar parameter these are more equations than weights if there
    are three micro-batches or more, so a loss that is no weighted mean does not fit.

    Attributes:
      comparison: the two gradients, which differ by more than rounding.
      problem: what they are the gradients of.
      trust: how precise a fitted weight is.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.problem = comparison, comparison.problem
        self._k = self.problem.k
        # In units of what rounding may do to each leaf, so that a leaf counts however
        # small its gradient is, and one that is nothing but rounding does not.
        unit = comparison.allowed() / TOLERANCE
        self._unit = np.where(unit > 0, unit, 1.0)
        self._noise = NOISE * norm(comparison.noise / self._unit)

        here = self._point(None)
        near = self._point(comparison.loss.nearby(0.1, seed=2))
        self._points = [here, near] if np.isfinite(near).all() else [here]
        self._here, self._target = here[:, :-1], here[:, -1]
        self._equations = np.concatenate(self._points)
        # gᵢⱼ of neighbours, as columns; and gᵢ and gⱼ in the window of the two, which
        # are those of here, unless micro-batches communicate.
        self._pairs, sides = np.zeros((len(here), 0)), [here[:, :-2], here[:, 1:-1]]
        if self._k > 2:
            rows = itertools.pairwise(map(self.problem.rows, range(self._k)))
            windows = [self._window(np.concatenate(ij), i) for i, ij in enumerate(rows)]
            found = np.stack(windows, axis=2)
            if np.isfinite(found).all():
                self._pairs, sides = found[0], [*found[1:], *sides]
        self._left, self._right, *_ = sides

        self._size = float(np.linalg.norm(self._equations[:, :-1], 2))
        noise = self._noise / self._size if self._size else 0.0
        self.trust, self._zero = max(1e-6, noise), max(1e-9, noise)
        self._cutoff = max(_RANK, noise)
        self._rank = self._rank_of(self._equations[:, :-1])
        self._best = self._solve(self._equations)  # whatever the weights add up to

    # -- The answers -------------------------------------------------------------------

    @functools.cached_property
    def ambiguous(self) -> bool:
        """Whether weights, a factor and anything else would all fit.

        They do if there are two micro-batches and all gradients have one direction.
        """
        directions = np.concatenate([p[:, :-1] for p in self._points], axis=1)
        one = self._rank <= 1 and self._rank_of(directions) == 1
        return self._k == 2 and one and self._fits(self._best)

    @functools.cached_property
    def factor(self) -> float | None:
        """The c with G = c times the mean of the gᵢ; all parts of a size have one c."""
        return self.factor_of(np.full(self._k, 1 / self._k))

    def factor_of(self, share: np.ndarray) -> float | None:
        """The c with G = c·Σ wᵢ·gᵢ, for weights that add up to 1."""
        mean = self._here @ share
        c = float(mean @ self._target / (mean @ mean or 1.0))
        weights = c * share
        if c <= 0 or not self._fits(weights) or not self._pairs_fit(weights):
            return None
        known = self.known_factor(c)
        # One equation, and any c solves it.
        open_ = not self._pairs.size and self._rank <= 1 and known in (None, 1)
        if open_ or not self.comparison.reproduces(weights):
            return None
        return None if known != 1 and self._is_normalised() else c

    def known_factor(self, c: float) -> float | None:
        """Which of k, 1 / k and 1 `c` is, if any."""
        known = (self._k, 1 / self._k, 1)
        return next((f for f in known if abs(c / f - 1) <= self.trust), None)

    @property
    def any_two(self) -> bool:
        """Whether two micro-batches fit with weights that do not add up to 1."""
        off = abs(self._best.sum() - 1) > self.trust and self._best.min() >= 0
        return self._k == 2 and off and self._fits(self._best)

    @functools.cached_property
    def weights(self) -> Weights | None:
        """Weights with Σ wᵢ·gᵢ = G that depend on the batch alone."""
        if self.factor is not None and self.known_factor(self.factor) == 1:
            return Weights(np.full(self._k, 1 / self._k), np.ones(self._k, bool))
        found = self._weighted_mean() or self._scaled_weighted_mean()
        reproduces = self.comparison.reproduces
        if found is None or self.ambiguous or not reproduces(found.values):
            return None
        # A maximum over the batch has a weight of 1 for the part that holds it.
        return found if self._hold_nothing(found.values == 0) else None

    def has_constant(self) -> bool:
        """Whether gᵢ = P + dᵢ and G = P + Σ dᵢ: a sum over examples and a constant.

        The constant shows in any two parts and their union: P = gᵢ + gⱼ - gᵢⱼ.
        """
        columns, rows = self._here, self.problem.rows(0)
        if self._pairs.size:
            constants = self._left + self._right - self._pairs
        elif self._k == 2 and len(rows) > 1:
            halves = self._window(rows[: len(rows) // 2 * 2], 0, apart=True)
            constants = (halves[1] + halves[2] - halves[0])[:, None]
        else:
            return False
        constant = constants.mean(1)
        rest = columns.sum(1) - (self._k - 1) * constant - self._target
        terms = np.concatenate([columns, constants], axis=1)
        alike = self._small(constants - constant[:, None], terms)
        return alike and self._small(rest, terms)

    # -- The sketches ------------------------------------------------------------------

    def _sketch(self, evaluated: Evaluated) -> np.ndarray:
        size = max(4096, 1 << (8 * self._k - 1).bit_length())  # a power of two
        return np.asarray(_sketch(evaluated[1], self._unit, size))

    def _point(self, params: Any) -> np.ndarray:
        """Sketches at some parameters: of the gᵢ, and of G in the last column."""
        of_part = self.comparison.loss.of_part
        parts = [*range(self._k), None]
        point = np.stack([self._sketch(of_part(i, params)) for i in parts], axis=1)
        # A micro-batch of weight 0 may hold anything.
        left_out = np.append(self.comparison.share == 0, False)
        return np.where(left_out & ~np.isfinite(point).all(0), 0.0, point)

    def _window(
        self, rows: np.ndarray, first: int, apart: bool = False
    ) -> list[np.ndarray]:
        """Sketches of a window of two: undivided; and of each, if `apart`.

        Or if micro-batches communicate, so that a window is more than its parts.
        """
        of_rows, whole = self.comparison.loss.of_rows, {"parts": 1}
        each = {"parts": 2}, {"parts": 2, "member": 1}
        apart = apart or self.problem.axis_name is not None
        parts = (whole, *each) if apart else (whole,)
        return [self._sketch(of_rows(rows, first, **part)) for part in parts]

    # -- What fits ---------------------------------------------------------------------

    def _rank_of(self, matrix: np.ndarray) -> int:
        return int(np.linalg.matrix_rank(matrix, rtol=self._cutoff))

    def _small(self, rest: np.ndarray, terms: np.ndarray) -> bool:
        """Whether `rest` is rounding, of a sum of such terms."""
        size = np.linalg.norm(terms, axis=0).sum()
        return bool(np.linalg.norm(rest) <= TOLERANCE * size + self._noise)

    def _fits(self, weights: np.ndarray) -> bool:
        """Whether Σ wᵢ·gᵢ = G at all points."""
        signed = np.append(weights, -1.0)
        return all(self._small(p @ signed, p * signed) for p in self._points)

    def _pairs_fit(self, weights: np.ndarray) -> bool:
        """Whether gᵢⱼ = c·(wᵢ·gᵢ + wⱼ·gⱼ) / (wᵢ + wⱼ), with one c for all."""
        if not self._pairs.size:
            return True
        share = weights[:-1] + weights[1:]
        sums = self._left * weights[:-1] + self._right * weights[1:]
        means = sums / np.where(share > 0, share, 1.0)
        c = (means * self._pairs).sum() / ((means**2).sum() or 1.0)
        return self._small(self._pairs - c * means, self._pairs)

    def _solve(self, equations: np.ndarray) -> np.ndarray:
        matrix, target = equations[:, :-1], equations[:, -1]
        return np.linalg.lstsq(matrix, target, rcond=self._cutoff)[0]

    def _weighted_mean(self) -> Weights | None:
        """Weights that add up to 1."""
        columns, i = self._here, np.arange(self._pairs.shape[1])
        left, right = (self._pairs - x[:, i] for x in (self._left, self._right))
        # A few random combinations of the equations of a pair stand for all.
        mix = np.random.default_rng(0).normal(size=(16, len(columns))) / 4
        of_pairs = np.zeros((len(i), len(mix), self._k + 1))
        of_pairs[i, :, i], of_pairs[i, :, i + 1] = (mix @ left).T, (mix @ right).T
        of_pairs = of_pairs.reshape(-1, self._k + 1)
        of_sum = np.full((1, self._k + 1), self._size or 1.0)
        equations = np.concatenate([self._equations, of_sum, of_pairs])
        weights = self._solve(equations)
        weights = np.where(np.abs(weights) < self._zero, 0.0, weights)
        off = max(-weights.min(), abs(weights.sum() - 1))
        if off > self.trust or not self._fits(weights):
            return None
        rest = left * weights[i] + right * weights[i + 1]
        terms = np.concatenate([self._pairs, columns], axis=1)
        if not all(self._small(x, terms) for x in rest.T):
            return None
        _, singular, basis = np.linalg.svd(equations[:, :-1], full_matrices=False)
        null = basis[singular <= self._cutoff * singular[0]]
        return Weights(np.maximum(weights, 0.0), np.linalg.norm(null, axis=0) < 1e-6)

    def _scaled_weighted_mean(self) -> Weights | None:
        """Weights with any sum: those of a mean that is off by a factor as well."""
        if not self._pairs.size or self._rank < self._k or not self._fits(self._best):
            return None
        weights = np.maximum(self._best, 0.0)
        right = self._best.min() >= -self.trust and self._pairs_fit(weights)
        return Weights(weights, np.ones(self._k, bool)) if right else None

    def _is_normalised(self) -> bool:
        """Whether rows that come twice count as if they came once: true of any mean.

        It tells a sum from a mean if all micro-batches but one hold nothing.
        """
        i = int(np.argmax(np.linalg.norm(self._here, axis=0)))
        rows = self.problem.rows(i)
        once = self._sketch(self.comparison.loss.of_rows(rows, i))
        same = np.stack([once, *self._window(np.tile(rows, 2), i)], axis=1)
        return self._small(same - same[:, :1], same)

    def _hold_nothing(self, parts: np.ndarray) -> bool:
        """Whether no row of these micro-batches counts, so that their weight can be 0.

        Then their gradient comes from a term without examples, such as an L2 penalty,
        and each of their rows, repeated, has the same gradient.
        """
        columns = []
        for i in map(int, np.flatnonzero(parts & self._here.any(0))):
            rows = self.problem.rows(i)
            alike, of_rows = rows[[0, -1], None], self.comparison.loss.of_rows
            columns += [self._sketch(of_rows(x.repeat(len(rows)), i)) for x in alike]
        same = np.array(columns).T
        return not columns or self._small(same - same[:, :1], same)


@functools.partial(jax.jit, static_argnums=2)
def _sketch(grads: Leaves, unit: jax.Array, size: int) -> jax.Array:
    """Gradients as `size` numbers: each element into a random place, ± at random."""
    grads = [x.ravel() / unit[i] for i, x in enumerate(grads)]
    if sum(x.size for x in grads) <= size:
        return jnp.concatenate(grads)
    total = jnp.zeros(size, jnp.float64)
    for i, x in enumerate(grads):
        key = jax.random.fold_in(jax.random.key(0), i)
        bits = jax.random.bits(key, x.shape, jnp.uint32)
        place = (bits & jnp.uint32(size - 1)).astype(jnp.int32)
        total = total.at[place].add(jnp.where(bits >> jnp.uint32(31) == 0, x, -x))
    return total
