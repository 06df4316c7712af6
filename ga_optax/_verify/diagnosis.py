"""The cause of a difference of the two gradients: questions in order, up to an answer.

The program of the loss has the answers (`proof`), and numbers confirm them. An answer
is a cause, a detail and a fix. To add a cause, add a member to `Cause`, advice to
`_FIXES`, and the question to `answer`, before more general questions.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._checks import is_real, named_leaves
from ga_optax._passes import read
from ga_optax._text import unfold
from ga_optax._verify.gradients import Comparison, Problem, Trained, comparing, norm
from ga_optax._verify.proof import Proof, prove
from ga_optax._verify.report import Cause, LeafReport, Report

# Half of float64's 52 binary digits. No algorithm that loses half of its digits would
# train, and 2⁻²⁶ = 1.5e-8 is below the 6e-8 to which float32 rounds.
_TOLERANCE = 2.0**-26
# A leaf whose gradient is zero up to rounding (the bias before a normalisation) has no
# correct digits. It must agree to three quarters of the digits of the whole gradient.
_FLOOR = 2.0**-39

# The precision of shares, which are quotients of counts in float64.
_EXACT = 1e-6

Answer = tuple[Cause, str, str]


class Evidence:
    """A loss, the proof from its program, and both gradients in numbers.

    Attributes:
      problem: the loss and its arguments.
      trained: the two gradients as training computes them.
      proof: the proof; None if the program of the loss cannot be partitioned.
      weights: the weights in use.
      exact: the two gradients in float64, as far as the loss runs in it.
      low: the lowest floating precision of the gradient in that comparison.
      tolerance: the largest relative rounding error of a sum in it.
      agrees: True if the two gradients differ by rounding.
    """

    def __init__(self, problem: Problem, trained: Trained) -> None:
        self.problem, self.trained = problem, trained
        self.weights = problem.weights()
        self.proof: Any = prove(problem)
        self._compare, wide = comparing(problem)
        self.exact = self._compared(self.weights)
        self.low: np.dtype = wide.low
        self.tolerance = max(_TOLERANCE, 4 * float(jnp.finfo(self.low).eps))
        self.agrees = self._is_rounding(self.exact.off, self.exact.terms)

    def _compared(self, weights: np.ndarray) -> Comparison:
        share = weights / (weights.sum() or 1.0)
        return jax.tree.map(np.asarray, self._compare(*self.problem[:3], share))

    def _is_rounding(self, off: np.ndarray, terms: np.ndarray) -> bool:
        """True if differences `off` are rounding, of sums of these terms."""
        return bool((off <= self.tolerance * terms + _FLOOR * norm(terms)).all())

    @functools.cached_property
    def fitting(self) -> tuple[np.ndarray, float] | None:
        """Weights of the batch alone, and a factor c, for which G = c·Σ wᵢ·gᵢ."""
        proof, k, fitted = self.proof, self.problem.k, None
        for weights in proof.weights() if proof.opaque or proof.in_counts else ():
            pair = self._compared(weights)
            c, terms = float(pair.factor), max(1.0, pair.factor) * pair.terms
            if not 0 < c < math.inf or not self._is_rounding(pair.rest, terms):
                continue
            trust = max(_EXACT, self.tolerance)
            if factors := [x for x in (1.0, k, 1 / k) if abs(c / x - 1) <= trust]:
                return weights, float(factors[0])
            # A gradient of one number is a multiple of any other.
            if sum(x.size for x in jax.tree.leaves(self.problem.params)) > 1:
                fitted = weights, c
        return fitted


def answer(evidence: Evidence) -> Answer:
    """The cause, a detail, and what is filled into the advice."""
    problem, proof, exact = evidence.problem, evidence.proof, evidence.exact
    used = np.append(evidence.weights, 1) != 0  # weight 0 excludes inf and NaN
    if not np.isfinite(exact.sizes[used]).all():
        return _not_finite(problem, np.where(used[:, None], exact.sizes, 0))
    if not evidence.trained.is_finite:
        detail = "In float64 all is finite, so a number is too large for the dtype."
        return Cause.NOT_FINITE, detail, ""
    if evidence.agrees:
        detail = "" if exact.terms.any() else "Both are exactly zero."
        return Cause.ROUNDING if exact.off.any() else Cause.EQUAL, detail, ""
    half = float(jnp.finfo(evidence.low).eps) ** 0.5  # of the digits
    is_low = evidence.low != np.float64 and (exact.off <= half * exact.terms).all()
    if proof is None or is_low:
        return Cause.UNDETERMINED, "", ""
    if proof.draws:
        detail = """The loss draws random numbers for the whole batch at once, and
            micro-batches draw others. A second cause may be hidden."""
        return Cause.RANDOMNESS, detail, ""
    close = {"rel_tol": max(2.0**-12, evidence.tolerance), "abs_tol": 2.0**-30}
    if not math.isclose(proof.loss(), exact.losses[0], **close):
        return _another_loss(problem, proof)
    if evidence.fitting is not None:
        return _fits(evidence, *evidence.fitting)
    if not proof.in_counts and (axes := _other_axes(problem)) is not None:
        detail = f"""With batch_axes={axes!r} no row needs another. Most likely axis 0
            is time, as in [time, batch, ...]."""
        return Cause.AXIS, detail, repr(axes)
    if proof.has_place and proof.in_counts:
        detail = "The loss weighs examples by their position in the batch."
        return Cause.RANDOMNESS, detail, ""
    if proof.meetings:
        detail = f"The lines where rows meet: {'; '.join(proof.meetings)}."
        return Cause.CROSS_EXAMPLE, detail, ""
    detail = "The loss is a sum of rows plus a term that is no sum, such as a penalty."
    return (Cause.SCALE, detail, "") if proof.has_rows else (Cause.UNDETERMINED, "", "")


def _not_finite(problem: Problem, sizes: np.ndarray) -> Answer:
    """The first inf or NaN, of micro-batches first; `sizes` has a line for each."""
    i, j = np.argwhere(~np.isfinite(sizes))[0]
    pairs = zip(jax.tree.leaves(problem.batch), problem.axes, strict=True)
    n = next(x.shape[d] for x, d in pairs if d is not None) // problem.k
    where = f"micro-batch {i} (rows {i * n} to {(i + 1) * n - 1})"
    where = where if i < problem.k else "the undivided batch"
    names = [*(name for name, _ in named_leaves(problem.params)), "the loss"]
    return Cause.NOT_FINITE, f"The first is in {where}, {names[j]}: {sizes[i][j]}.", ""


def _another_loss(problem: Problem, proof: Proof) -> Answer:
    """A broken promise, with lines; or a loss that differs each time it is traced."""
    if not proof.promised:
        detail = """Traced a second time, the loss was another number. It draws random
            numbers that are not those of JAX, from numpy.random for example."""
        return Cause.RANDOMNESS, detail, ""
    plain = prove(problem, promises=False)
    lines = [x for x in plain.meetings if x not in proof.meetings] if plain else []
    detail = f"""With the rows of a micro-batch it gives another result, in
        ga_optax.value_and_grad, too: {"; ".join(lines or proof.promised)}."""
    return Cause.PROMISE, detail, ""


def _fits(evidence: Evidence, weights: np.ndarray, c: float) -> Answer:
    """The scale or the weights, where other ones give the undivided gradient."""
    used, meetings = evidence.weights, "; ".join(evidence.proof.meetings)
    shares = [x / x.sum() for x in (weights, used, np.ones_like(used))]
    right, equal = (np.allclose(shares[0], x, rtol=1e-6) for x in shares[1:])
    details, fix = [], "Leave weight_fn out: the loss is a plain mean."
    if not right:
        now, goal = (" : ".join(f"{x:.6g}" for x in w) for w in (used, weights))
        details.append(f"They count as {now}, but must count as {goal}, or a multiple.")
    if not right and meetings:
        details.append(f"""The loss divides by a number that differs between
            micro-batches, such as a count of tokens. Where: {meetings}.""")
        fix = "Pass a weight_fn to ga_optax.accumulate that returns that number."
        if code := _code_that_counts(evidence.problem, shares[0]):
            fix = f"""Pass weight_fn=lambda batch: {code} to ga_optax.accumulate, or
                weight={code} to ga_optax.MultiSteps with every micro-batch."""
    if c != 1:
        size = f"{c:.6g} times too small" if c > 1 else f"{1 / c:.6g} times too large"
        details.append(f"""The accumulated gradient is {size}: the loss is a sum, or is
            divided by a size or a number of parts.""")
        fix += " Divide the loss by no other size or number of parts."
    cause = Cause.SCALE if right or (equal and c != 1) else Cause.WEIGHTS
    return cause, " ".join(details), fix


def _code_that_counts(problem: Problem, share: np.ndarray) -> str | None:
    """An expression in `batch`, a micro-batch, with these shares, if there is one."""
    paths = (path for path, _ in jax.tree.leaves_with_path(problem.batch))
    for path, leaf, axis in zip(paths, problem.parts(), problem.axes, strict=True):
        if axis is None or not is_real(leaf.dtype):
            continue
        name, x = f"batch{jax.tree_util.keystr(path)}", np.asarray(leaf, np.float64)
        views = {name: x}
        if x.ndim > 2 and axis == 0:  # the mask of a shifted sequence, too
            views[f"{name}[:, 1:]"] = x[:, :, 1:]
        # A sum in half a float would round the count.
        half = "dtype='float32'" * (read.is_inexact(leaf) and leaf.dtype.itemsize < 4)
        for view, y in views.items():
            for code, z in {
                f"{view}.sum({half})": y,
                f"({view} != 0).sum()": y != 0,
                f"({view} >= 0).sum()": y >= 0,
                f"({view} != -100).sum()": y != -100,  # PyTorch's ignored label
            }.items():
                counts = z.reshape(len(z), -1).sum(1)
                total = counts.sum()
                if total > 0 and np.abs(counts / total - share).max() < _EXACT:
                    return code
    return None


def _other_axes(problem: Problem) -> Any:
    """The axes of the batch, 1 for 0, if along them rows meet in counts at most."""
    leaves, structure = jax.tree.flatten(problem.batch)
    pairs = list(zip(leaves, problem.axes, strict=True))
    axes = [1 - d if d in (0, 1) and x.ndim > 1 else None for x, d in pairs]
    sizes = {x.shape[1 - d] for x, d in pairs if d in (0, 1) and x.ndim > 1}
    # In micro-batches of one row.
    proof = (
        prove(problem._replace(axes=axes, k=min(sizes))) if len(sizes) == 1 else None
    )
    if proof is None or not proof.has_rows or proof.has_place or not proof.in_counts:
        return None
    return axes[0] if len({*axes}) == 1 else jax.tree.unflatten(structure, axes)


# The advice for each cause. {} is filled in.
_FIXES = {
    Cause.EQUAL: """Nothing. A factor in both gradients does not show, such as a
        division of the loss by the number of micro-batches: remove it. Where a gradient
        is zero, run verify again at other parameters.""",
    Cause.SCALE: """Return jnp.mean(...), not jnp.sum(...), or the mean over what
        weight_fn counts, not divided by a number of micro-batches, plus the penalty as
        it is. Or sum up: ga_optax.MultiSteps(..., use_grad_mean=False).""",
    Cause.WEIGHTS: "{}",
    Cause.AXIS: """Pass batch_axes={} to ga_optax.accumulate, or swap the two axes. Then
        run verify again: the weights may be wrong, too.""",
    Cause.CROSS_EXAMPLE: """No weight_fn can fix it. Use statistics of one row, as layer
        normalisation does; train on the mean itself, without a root or logarithm of it;
        put rows that belong together into one row, [batch, time, ...]; give a row that
        does not count weight 0; put ga_optax.rowwise around code that JAX cannot see
        into, if its rows do not need each other.""",
    Cause.PROMISE: "Take ga_optax.rowwise off it, or compute sums of rows outside.",
    Cause.RANDOMNESS: """Dropout may train as it is. To compare, switch it off, or put a
        key of each example into the batch, jax.random.split(key, batch_size), and draw
        under jax.vmap. Draw nothing with NumPy. Put weights of examples into rows.""",
    Cause.NOT_FINITE: """To find where it arises, call the loss on these rows inside
        `with jax.debug_nans(True):`. A mean of nothing, 0 / 0, needs
        jnp.maximum(count, 1), and a weight_fn that returns the count; float16 needs a
        smaller loss. To train past it, pass MultiSteps
        should_drop_window_fn=ga_optax.drop_window_if_not_finite.""",
    Cause.UNDETERMINED: """Look for what the loss does otherwise for a batch of another
        size, such as an `if`; and put plain JAX in place of code for one dtype.""",
}
_FIXES[Cause.ROUNDING] = _FIXES[Cause.EQUAL]
# The causes of which the undivided batch is no way out.
_ALONE = (Cause.EQUAL, Cause.ROUNDING, Cause.PROMISE, Cause.NOT_FINITE)


def report(problem: Problem, trained: Trained) -> Report:
    """The answer, and the size of the difference."""
    evidence = Evidence(problem, trained)
    exact, (cause, detail, blank) = evidence.exact, answer(evidence)
    fix = _FIXES[cause].format(blank)
    if cause not in _ALONE:
        fix = f"""Call ga_optax.value_and_grad(loss, {problem.k}) with the undivided
            batch, which gives the gradient of any loss. For micro-batches, each by
            itself: {fix}"""
    weighs = cause in (Cause.WEIGHTS, Cause.SCALE)
    weights, c = (weighs and evidence.fitting) or (np.array([]), 1.0)
    shares = exact.off / (norm(exact.sizes[-1, :-1]) or 1.0)
    figures = zip(named_leaves(problem.params), trained.ulps, shares, strict=True)
    leaves = {
        name: LeafReport(x.shape, x.dtype.name, ulps, float(share))
        for (name, x), ulps, share in figures
    }
    relative = float(norm(shares))
    return Report(
        cause,
        *map(unfold, (detail, _extent(evidence, relative, leaves), fix)),
        warnings=tuple(map(unfold, _warnings(evidence))),
        weights=tuple((c * weights / weights.sum()).tolist()) or None,
        relative=relative,
        leaves=leaves,
    )


def _extent(evidence: Evidence, relative: float, leaves: dict[str, LeafReport]) -> str:
    """The size of the difference, and remarks on the numbers, in sentences."""
    (whole, mean), low = evidence.exact.losses, evidence.low
    shares = {name: leaf.relative for name, leaf in leaves.items()}
    worst = sorted(shares, key=shares.__getitem__, reverse=True)[:5]
    each = ", ".join(f"{shares[name]:.2g} on {name}" for name in worst)
    text = f"""In {low} the gradients differ by {relative:.3g} of the norm of the
        undivided one: {each}. Loss: {whole:.6g} undivided, {mean:.6g} accumulated."""
    if low != np.float64:
        text += f""" The loss calls code that computes in {low}, so effects as small as
            the rounding of {low} cannot be seen."""
    return text


def _warnings(evidence: Evidence) -> list[str]:
    """Mistakes that may be in both gradients, in sentences."""
    proof, k, texts = evidence.proof, evidence.problem.k, []
    if proof is None or k == 1:
        return []
    if not proof.has_rows:
        texts.append(f"""The loss does not use its batch, but most likely closes over
            the data: micro-batches take {k} times the time, and as much memory.""")
    unweighted = evidence.agrees and (evidence.weights == 1).all()
    if unweighted and proof.meetings and proof.in_counts:
        texts.append(f"""The gradients agree because counts are equal in this batch.
            Pass a weight_fn that returns the count: {"; ".join(proof.meetings)}.""")
    return texts
