"""The cause of a difference of the two gradients: questions in order, up to an answer.

The program of the loss has the answers (`proof`), and numbers confirm them. A question
is a function of `Evidence`. It returns a cause, a detail and a fix; or None if the
cause is another. To add a cause, add a member to `Cause`, write the question, and put
the question into `_QUESTIONS`, before more general questions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._checks import divisors
from ga_optax._verify.counts import EXACT, code_that_counts, proportions
from ga_optax._verify.gradients import Problem, compiled, norm, norms
from ga_optax._verify.proof import prove
from ga_optax._verify.report import Cause
from ga_optax._verify.wide import Wide

# Half of float64's 52 binary digits. No algorithm that loses half of its digits would
# train, and 2⁻²⁶ = 1.5e-8 is below the 6e-8 to which float32 rounds.
_TOLERANCE = 2.0**-26
# A leaf whose gradient is zero up to rounding (the bias before a normalisation) has no
# correct digits. It must agree to three quarters of the digits of the whole gradient.
_FLOOR = 2.0**-39

Answer = tuple[Cause, str, str] | None


class Evidence:
    """A loss, the proof from its program, and both gradients in numbers.

    Attributes:
      problem: the loss and its arguments.
      proof: the proof; None if the program of the loss cannot be partitioned.
      note: a remark on the precision of the numbers, or "".
      share: the weights in use, which add up to 1.
      exact: the two gradients in float64, as far as the loss runs in it.
      native: the two gradients as training computes them.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.note = problem, ""
        self.proof: Any = prove(problem)
        weights = problem.weights()
        self.exact = problem.both(self.gradient, weights)
        if self.low != np.float64:
            self.note = f"""The loss calls code that computes in {self.low}, so the
                diagnosis cannot see effects as small as the rounding of {self.low}."""
        self.share = weights / (weights.sum() or 1.0)
        self.native = problem.both(self._native, weights)

    def gradient(self) -> Callable[..., Any]:
        """Returns a function for the loss and the gradient in float64, traced anew."""
        fun = jax.value_and_grad(lambda *x: self.problem.fun(*x))
        self._wide = Wide(fun, self.problem.x64)
        return compiled(self._wide, x64=True)

    def _native(self) -> Callable[..., Any]:
        """Returns a function for loss and gradient in the dtypes of training."""
        fun = jax.value_and_grad(lambda *x: self.problem.fun(*x))
        return compiled(fun, self.problem.x64)

    @property
    def low(self) -> np.dtype:
        """The lowest floating precision of the gradient in the diagnosis."""
        return self._wide.low

    @property
    def tolerance(self) -> float:
        """The largest relative rounding error of a sum, also in low precision."""
        return max(_TOLERANCE, 4 * float(jnp.finfo(self.low).eps))

    def is_rounding(self, off: np.ndarray, scale: float = 1.0) -> bool:
        """True if differences `off` are rounding, of `scale` times these gradients."""
        terms = scale * self.exact.terms
        return bool((off <= self.tolerance * terms + _FLOOR * norm(terms)).all())

    @property
    def agrees(self) -> bool:
        """True if the two gradients differ by rounding."""
        return self.is_rounding(self.exact.off)

    @property
    def has_few_digits(self) -> bool:
        """True if less than half of the digits of the native gradient are right."""
        eps = max(float(jnp.finfo(dtype).eps) for _, dtype, *_ in self.native.leaves)
        return norm(self.native.off) > math.sqrt(eps) * norm(self.exact.terms)

    @property
    def losses(self) -> tuple[float, float]:
        """The loss of the undivided batch, and the accumulated loss."""
        whole, *parts = self.exact.losses.values()
        return whole, float(np.dot(self.share[self.share != 0], parts))

    @functools.cached_property
    def fitting(self) -> tuple[np.ndarray, float] | None:
        """Weights of the batch alone, and a factor c, for which G = c·Σ wᵢ·gᵢ."""
        proof, k, fitted = self.proof, self.problem.k, None
        for share in proof.shares() if proof.opaque or proof.in_counts else ():
            pair = self.problem.both(self.gradient, share)
            c = pair.factor
            if c in (0.0, math.inf) or not self.is_rounding(pair.rest, max(1.0, c)):
                continue
            trust = max(EXACT, self.tolerance)
            if factors := [x for x in (1.0, k, 1 / k) if abs(c / x - 1) <= trust]:
                return share, float(factors[0])
            # A gradient of one number is a multiple of any other.
            size = sum(math.prod(shape) for shape, *_ in pair.leaves)
            if proof.in_counts and (not proof.meetings or size > 1):
                fitted = share, c
        return fitted


# -- By numbers ------------------------------------------------------------------------


def _not_finite(evidence: Evidence) -> Answer:
    exact, native = evidence.exact.not_finite, evidence.native.not_finite
    if not (exact or native):
        return None
    detail = f"The first is {exact or native}."
    fix = """To find where it arises, call the loss on that part of the batch inside
        `with jax.debug_nans(True):`. To train past it, pass
        should_drop_window_fn=ga_optax.drop_window_if_not_finite to MultiSteps."""
    if not exact:
        detail += " In float64 all is finite, so a number is too large for the dtype."
        fix = "Scale the loss down, or compute in bfloat16 or float32 for more range."
    elif "nan" in exact and np.isfinite(evidence.exact.sizes[None]).all():
        detail += " The undivided batch is finite: perhaps a mean of nothing, 0 / 0."
        fix = """divide by jnp.maximum(count, 1) in the loss, and pass a weight_fn that
            returns that count. Weight 0 leaves a micro-batch out, whatever it holds."""
    return Cause.NOT_FINITE, detail, fix


def _unlike(evidence: Evidence) -> Answer:
    if evidence.agrees and not evidence.has_few_digits:
        return None
    run, other = evidence.gradient(), evidence.gradient()
    args = evidence.problem.args(None)
    if evidence.is_rounding(norms(run(*args)[1], other(*args)[1])):
        return None
    detail = """Traced a second time, the loss gave another gradient. It draws random
        numbers that are not those of JAX, from numpy.random for example."""
    fix = "Pass a key as rng=, which the loss gets, too, and draw with jax.random."
    return Cause.RANDOMNESS, detail, fix


def _same(evidence: Evidence) -> Answer:
    if not evidence.agrees:
        return None
    fix = """There is nothing to fix. A factor that is in both gradients does not show,
        such as a division of the loss by the number of micro-batches: remove it."""
    if not norm(evidence.exact.terms):
        fix = "Run verify again at parameters where the gradient is not zero."
        return Cause.EQUAL, "Both are exactly zero, so this shows nothing.", fix
    if not evidence.native.off.any():
        return Cause.EQUAL, "", fix
    if not evidence.has_few_digits:
        return Cause.ROUNDING, "", fix
    fix = """The gradient is a small difference of large numbers. Compute that part of
        the loss in a wider dtype."""
    return Cause.ROUNDING, "That is more than half of the digits of its dtype.", fix


def _undetermined(evidence: Evidence) -> Answer:
    exact, low = evidence.exact, evidence.low
    if evidence.proof is None:
        return _UNKNOWN
    half = math.sqrt(float(jnp.finfo(low).eps))  # of the digits
    if low == np.float64 or (exact.off > half * exact.terms).any():
        return None
    detail = f"The difference is so small that it may be the rounding of {low}."
    fix = f"Run verify with plain JAX in place of the code that computes in {low}."
    return Cause.UNDETERMINED, detail, fix


_UNKNOWN = (
    Cause.UNDETERMINED,
    "",
    "look for what the loss does otherwise for a batch of another size: an `if`?",
)


# -- By the program --------------------------------------------------------------------


def _fits(evidence: Evidence) -> Answer:
    """The scale or the weights, if other ones give the undivided gradient."""
    if evidence.fitting is None:
        return None
    (share, c), k, used = evidence.fitting, evidence.problem.k, evidence.share
    right, equal = (np.allclose(share, x, rtol=1e-6) for x in (used, 1 / k))
    weighted = not np.allclose(used, 1 / k, rtol=1e-9)
    size = f"{c:.6g} times too small" if c > 1 else f"{1 / c:.6g} times too large"
    scale = f"The accumulated gradient is {size}"
    if right or (equal and c != 1):
        why, fix = _SCALES[(c > 1) - (c < 1) if c in (k, 1 / k) else 0]
        detail = f"{scale}: {why}." + " The weights are right." * (weighted and right)
        if weighted and not right:
            detail += f""" In addition, weight_fn weighs the micro-batches as
                {proportions(used)}; this loss needs equal weights."""
            fix += " Leave weight_fn out, or make the loss a mean over what it counts."
        return Cause.SCALE, detail, fix
    shown, now = proportions(share), f"as {proportions(used)}" * weighted or "equally"
    detail = f"They count {now} now, but must count as {shown} or a multiple of that."
    fix = "leave weight_fn out: the loss is a plain mean, and needs no weights."
    if evidence.proof.meetings:
        detail += f""" The loss divides by a number that differs between micro-batches,
            such as a count of tokens. Where: {"; ".join(evidence.proof.meetings)}."""
        fix = f"""pass a weight_fn to ga_optax.accumulate that returns the number your
            loss divides by: {shown} for these micro-batches, or a multiple."""
        if code := code_that_counts(evidence.problem, share):
            fix = f"""pass weight_fn=lambda batch: {code} to ga_optax.accumulate. With
                ga_optax.MultiSteps, pass weight={code} with every micro-batch."""
    if c != 1:
        detail += f" {scale}: the loss is also divided by a size or a number of parts."
        fix += " Then remove the other division from the loss."
    return Cause.WEIGHTS, detail, fix


# The reason for a factor of k, of 1 / k, or another factor, and the fix.
_SCALES = {
    1: (
        "the loss is a sum over its rows, or divided by a count over the whole batch",
        """return jnp.mean(...) instead of jnp.sum(...), divided neither by a count nor
        by the number of micro-batches. Or accumulate sums:
        ga_optax.MultiSteps(..., use_grad_mean=False).""",
    ),
    -1: (
        "the loss divides by the batch size twice",
        "return jnp.mean(...), and do not divide it by the batch size again.",
    ),
    0: (
        "the loss depends on a size or a number of parts",
        "return jnp.mean(...), with no factor that depends on the batch size.",
    ),
}


def _another_axis(evidence: Evidence) -> Answer:
    """The other axis, if the batch is [time, batch, ...] with examples along axis 1."""
    problem, (leaves, structure) = (
        evidence.problem,
        jax.tree.flatten(evidence.problem.batch),
    )
    pairs = list(zip(leaves, evidence.problem.axes, strict=True))
    axes = [1 - d if d in (0, 1) and x.ndim > 1 else None for x, d in pairs]
    sizes = {x.shape[1 - d] for x, d in pairs if d in (0, 1) and x.ndim > 1}
    if not evidence.proof.meetings or len(sizes) != 1 or sizes <= {0, 1}:
        return None
    numbers = divisors(sizes.pop())
    k = problem.k if problem.k in numbers else numbers[1]
    try:
        other = Evidence(dataclasses.replace(problem, axes=axes, k=k))
        right = other.agrees or (other.fitting or (0, 0))[1] == 1
    except Exception:
        return None  # Any: the code is the user's, and may not take such a batch.
    if not right or not other.proof.has_rows:
        return None
    tree = axes[0] if len({*axes}) == 1 else jax.tree.unflatten(structure, axes)
    detail = f"""With batch_axes={tree!r}, the same batch gives the undivided gradient.
        Most likely axis 0 is time, as in [time, batch, ...]."""
    fix = f"pass batch_axes={tree!r} to ga_optax.accumulate, or swap the two axes."
    if not other.agrees:
        fix += " Then run verify again, because the weights are wrong, too."
    return Cause.AXIS, detail, fix


def _random(evidence: Evidence) -> Answer:
    """Randomness, if micro-batches draw other numbers than the undivided batch."""
    if not evidence.proof.draws:
        return None
    detail = """The loss draws random numbers for the whole batch at once, most likely
        for dropout. Micro-batches draw other numbers, which is as good for training,
        but cannot be compared. A second cause may be hidden."""
    fix = """train as it is. To compare, switch the randomness off, or put a key for
        each example into the batch, jax.random.split(key, batch_size), and draw under
        jax.vmap."""
    return Cause.RANDOMNESS, detail, fix


def _promise(evidence: Evidence) -> Answer:
    """A broken promise, if the loss is another number with promised functions split."""
    proof, loss = evidence.proof, evidence.exact.losses[None]
    if not proof.promised or math.isclose(proof.loss(), loss, rel_tol=2**-12):
        return None
    plain = prove(evidence.problem, promises=False)
    lines = [x for x in plain.meetings if x not in proof.meetings] if plain else []
    detail = f"""With the rows of a micro-batch the function gives another result than
        with all rows: {"; ".join(lines or proof.promised)}. ga_optax.value_and_grad
        would be as wrong."""
    fix = "Take ga_optax.rowwise off that function, or compute sums of rows outside."
    return Cause.PROMISE, detail, fix


def _by_position(evidence: Evidence) -> Answer:
    """Randomness, if the loss weighs rows by position in the batch."""
    if not (evidence.proof.has_place and evidence.proof.in_counts):
        return None
    detail = "The loss weighs examples by their position in the batch."
    fix = "give each example its weight in its own row, 0 to leave it out."
    return Cause.RANDOMNESS, detail, fix


def _meet(evidence: Evidence) -> Answer:
    """Rows that depend on each other."""
    if not evidence.proof.meetings:
        return None
    detail = f"The lines where rows meet: {'; '.join(evidence.proof.meetings)}."
    fix = """no weight_fn can fix it. Use statistics of one row, as layer normalisation
        does; train on the mean itself, without a root or logarithm of it; put rows that
        belong together into one row, [batch, time, ...]; give a row that does not count
        weight 0."""
    return Cause.CROSS_EXAMPLE, detail, fix


def _with_a_penalty(evidence: Evidence) -> Answer:
    """The scale of a sum beside a term that is no sum, if no rows meet."""
    if not evidence.proof.has_rows:
        return None
    detail = """No single factor fixes it: the loss is a sum over examples plus a term
        that is no sum, such as an L2 penalty."""
    fix = "return the mean over the examples, plus the penalty as it is."
    return Cause.SCALE, detail, fix


_QUESTIONS = (
    *(_not_finite, _unlike, _same, _undetermined, _fits, _another_axis),
    *(_random, _promise, _by_position, _meet, _with_a_penalty),
)


def answer(evidence: Evidence) -> tuple[Cause, str, str]:
    """The answer of the first question that has one."""
    return next(filter(None, (question(evidence) for question in _QUESTIONS)), _UNKNOWN)
