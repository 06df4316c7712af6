"""The fit of `verify`: which weights of the micro-gradients give the undivided one.

The fit never holds the gradients: a linear equation between vectors holds between their
images under any linear map too, so each gradient is reduced to a sketch of
max(4096, 8·k) numbers, which keeps the rank of k vectors with probability near 1, and
lengths to a few per cent. Gradients that are no larger than that are kept whole.

References:
  K. Clarkson, D. Woodruff, "Low-Rank Approximation and Regression in Input Sparsity
  Time", J. ACM 63(6), 2017, section 2 (the sketch).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._verify_gradients import NOISE, TOLERANCE, Comparison, norm

__all__ = ["System"]

# Singular values below this, relative to the largest, count as zero in a fit.
_RANK = 1e-11


@dataclasses.dataclass(frozen=True)
class _Block:
    """Sketches at one point: the micro-gradients as columns, and the undivided one."""

    columns: np.ndarray
    target: np.ndarray


class System:
    """What is known about G and the gᵢ, in sketches, as linear equations for weights.

    Weights that depend on the batch alone hold at other parameters too, and between
    neighbouring micro-batches and their union. So, with g' at parameters nearby and gᵢⱼ
    the gradient over the rows of both,

        Σ wᵢ·gᵢ = G,   Σ wᵢ·g'ᵢ = G',   wᵢ·(gᵢⱼ - gᵢ) + wⱼ·(gᵢⱼ - gⱼ) = 0,   Σ wᵢ = 1

    With a single scalar parameter these still are more equations than weights, for
    three micro-batches and more, so that a loss which is no weighted mean does not fit.
    """

    def __init__(self, check: Comparison) -> None:
        self.check, self.k = check, check.k
        # In units of what rounding may do to each leaf, so that a leaf counts however
        # small its gradient is, and one that is nothing but rounding does not.
        unit = check.allowed(check.terms) / TOLERANCE
        self.unit = np.where(unit > 0, unit, 1.0)
        self.noise = NOISE * norm(check.noise / self.unit)
        self.here = self.block(check.run.params)
        self.near = self.block(check.run.nearby(0.1, seed=2))
        blocks = [self.here]
        if np.isfinite(self.near.columns).all() and np.isfinite(self.near.target).all():
            blocks.append(self.near)
        self.blocks = blocks
        self.pairs = None
        if self.k > 2:
            both = [
                np.concatenate([check.part(i), check.part(i + 1)])
                for i in range(self.k - 1)
            ]
            pairs = np.stack([self.sketch(rows, 0) for rows in both], axis=1)
            self.pairs = pairs if np.isfinite(pairs).all() else None
        stacked = np.concatenate([b.columns for b in blocks])
        singular = np.linalg.svd(stacked, compute_uv=False)
        self.size = float(singular[0])
        self.cutoff = max(_RANK, self.noise / self.size if self.size else 0.0)
        rank = int((singular > self.cutoff * self.size).sum())
        self.collinear = rank <= 1
        self.unique = rank == self.k
        # Two micro-gradients and one direction for all: weights, a factor and anything
        # else would fit.
        side_by_side = np.concatenate([b.columns for b in blocks], axis=1)
        singular = np.linalg.svd(side_by_side, compute_uv=False)
        directions = int((singular > self.cutoff * singular[0]).sum())
        self.ambiguous = False
        if self.k == 2 and self.collinear and directions == 1:
            c = np.linalg.lstsq(
                stacked, np.concatenate([b.target for b in blocks]), rcond=self.cutoff
            )[0]
            self.ambiguous = self.fits(c)

    def sketch(self, rows: np.ndarray, key: int, params: Any = None) -> np.ndarray:
        grads = self.check.run.gradient(rows, key, params)[1]
        size = max(4096, _power_of_two(8 * self.k))
        return np.asarray(_sketch(grads, self.unit, size))

    def block(self, params: Any) -> _Block:
        target = self.sketch(np.arange(self.check.rows), 0, params)
        columns = [self.sketch(self.check.part(i), i, params) for i in range(self.k)]
        columns = np.stack(columns, axis=1)
        # What has weight 0 may hold anything.
        left_out = (self.check.share == 0) & ~np.isfinite(columns).all(0)
        return _Block(np.where(left_out, 0.0, columns), target)

    def small(self, rest: np.ndarray, terms: np.ndarray) -> bool:
        """Whether `rest` is rounding, of a sum of such terms."""
        return bool(
            np.linalg.norm(rest)
            <= TOLERANCE * np.linalg.norm(terms, axis=0).sum() + self.noise
        )

    def fits(self, weights: np.ndarray) -> bool:
        """Whether Σ wᵢ·gᵢ = G at both points."""
        return all(
            self.small(
                b.columns @ weights - b.target,
                np.concatenate([b.columns * weights, b.target[:, None]], axis=1),
            )
            for b in self.blocks
        )

    def normalised(self) -> tuple[np.ndarray | None, np.ndarray]:
        """The weights of a weighted mean, and which of them the equations determine."""
        k = self.k
        rows = [*(b.columns for b in self.blocks), np.full((1, k), self.size or 1.0)]
        right = [*(b.target for b in self.blocks), np.full(1, self.size or 1.0)]
        left, after = self.steps()
        if self.pairs is not None:
            # A few random combinations of the equations of a pair stand for all.
            mix = np.random.default_rng(0).normal(size=(16, len(self.here.target)))
            mix /= np.sqrt(len(mix))
            for i in range(k - 1):
                equation = np.zeros((len(mix), k))
                equation[:, i] = mix @ left[:, i]
                equation[:, i + 1] = mix @ after[:, i]
                rows.append(equation)
                right.append(np.zeros(len(mix)))
        matrix, target = np.concatenate(rows), np.concatenate(right)
        weights = np.linalg.lstsq(matrix, target, rcond=self.cutoff)[0]
        none = max(1e-9, self.noise / self.size if self.size else 0.0)
        weights = np.where(np.abs(weights) < none, 0.0, weights)
        _, singular, basis = np.linalg.svd(matrix, full_matrices=False)
        null = basis[singular <= self.cutoff * singular[0]]
        known = np.linalg.norm(null, axis=0) < 1e-6

        fits = (
            bool((weights >= -self.tolerance()).all())
            and abs(weights.sum() - 1) <= self.tolerance()
            and self.fits(weights)
        )
        if fits and self.pairs is not None:
            terms = left * weights[:-1], after * weights[1:]
            scale = np.concatenate([self.pairs, self.here.columns], axis=1)
            fits = all(
                self.small(terms[0][:, [i]] + terms[1][:, [i]], scale)
                for i in range(k - 1)
            )
        return (np.maximum(weights, 0.0) if fits else None), known

    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """gᵢⱼ - gᵢ and gᵢⱼ - gⱼ, as columns."""
        if self.pairs is None:
            return np.zeros((0, 0)), np.zeros((0, 0))
        columns = self.here.columns
        return self.pairs - columns[:, :-1], self.pairs - columns[:, 1:]

    def tolerance(self) -> float:
        """To what a fitted weight is trusted."""
        return max(1e-6, self.noise / self.size if self.size else 0.0)

    def unnormalised(self) -> tuple[np.ndarray | None, np.ndarray]:
        """The weights of a weighted mean that is off by a factor as well."""
        known = np.ones(self.k, bool)
        if self.pairs is None or not self.unique:
            return None, known
        weights = np.linalg.lstsq(
            np.concatenate([b.columns for b in self.blocks]),
            np.concatenate([b.target for b in self.blocks]),
            rcond=self.cutoff,
        )[0]
        if (weights < -self.tolerance()).any() or not self.fits(weights):
            return None, known
        weights = np.maximum(weights, 0.0)
        # The union of two is a weighted mean off by one and the same factor.
        share = weights[:-1] + weights[1:]
        share = np.where(share > 0, share, 1.0)
        columns = self.here.columns * weights
        means = (columns[:, :-1] + columns[:, 1:]) / share
        factor = (means * self.pairs).sum() / ((means**2).sum() or 1.0)
        fits = self.small(self.pairs - factor * means, self.pairs)
        return (weights if fits else None), known

    def is_normalised(self) -> bool:
        """Whether rows that come twice count as if they came once: true of any mean.

        It tells a sum from a mean where all micro-batches but one hold nothing.
        """
        i = int(np.argmax(np.linalg.norm(self.here.columns, axis=0)))
        once = self.here.columns[:, i]
        twice = self.sketch(np.tile(self.check.part(i), 2), i)
        return self.small(twice - once, np.stack([twice, once], axis=1))

    def hold_nothing(self, parts: np.ndarray) -> bool:
        """Whether no row of these micro-batches counts, so that their weight can be 0.

        Then a term without examples is all that is left, such as an L2 penalty, and any
        of these rows, repeated, has the same gradient.
        """
        columns = [
            self.sketch(np.full_like(self.check.part(i), row), int(i))
            for i in parts
            if self.here.columns[:, i].any()
            for row in self.check.part(i)[[0, -1]]
        ]
        if not columns:
            return True
        same = np.stack(columns, axis=1)
        return self.small(same - same[:, :1], same)

    def has_constant(self) -> bool:
        """Whether gᵢ = P + dᵢ and G = P + Σ dᵢ: a sum over examples and a constant.

        The constant shows in any two parts and their union: P = gᵢ + gⱼ - gᵢⱼ.
        """
        columns, target = self.here.columns, self.here.target
        if self.pairs is not None:
            constants = columns[:, :-1] + columns[:, 1:] - self.pairs
        elif self.k == 2 and self.check.rows > 2:
            rows = self.check.part(0)
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            parts = [self.sketch(half, 0) for half in halves]
            constants = (parts[0] + parts[1] - columns[:, 0])[:, None]
        else:
            return False
        constant = constants.mean(1)
        expected = columns.sum(1) - (self.k - 1) * constant
        terms = np.concatenate([columns, constants], axis=1)
        return self.small(constants - constant[:, None], terms) and self.small(
            expected - target, terms
        )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.partial(jax.jit, static_argnums=2)
def _sketch(tree: list[jax.Array], unit: jax.Array, size: int) -> jax.Array:
    """A tree as `size` numbers: each element into a random place, ± at random."""
    tree = [x.ravel() / unit[i] for i, x in enumerate(tree)]
    if sum(x.size for x in tree) <= size:
        return jnp.concatenate(tree)
    total = jnp.zeros(size, jnp.float64)
    for i, x in enumerate(tree):
        bits = jax.random.bits(
            jax.random.fold_in(jax.random.key(0), i), (x.size,), jnp.uint32
        )
        place = (bits & jnp.uint32(size - 1)).astype(jnp.int32)
        x = jnp.where(bits >> jnp.uint32(31) == 0, x, -x)
        total = total.at[place].add(x)
    return total
