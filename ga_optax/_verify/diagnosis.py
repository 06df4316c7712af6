"""Why the two gradients differ: questions in order, until one of them has the answer.

The program of the loss has the answers (`proof`), and numbers confirm them. A question
is a function of both that returns a cause and what to say, or None if it is another. To
add a cause, add a member to `Cause`, write its question, and put the question into
`_QUESTIONS`, before the more general ones.
"""

import dataclasses
import functools

import jax
import numpy as np

from ga_optax._verify.comparison import Comparison, Native, NotFiniteError
from ga_optax._verify.counts import code_that_counts, proportions
from ga_optax._verify.gradients import norm
from ga_optax._verify.promises import broken
from ga_optax._verify.proof import Proof, in_words, prove
from ga_optax._verify.report import Cause


@dataclasses.dataclass(frozen=True)
class Finding:
    """A cause, in words.

    Attributes:
      cause: the cause.
      fix: what fixes it.
      detail: what the cause means here, beyond what is always true of it.
      extent: what to say about the size of the difference.
      weights: those that reproduce the undivided gradient, if there are any.
    """

    cause: Cause
    fix: str
    detail: str = ""
    extent: str = ""
    weights: tuple[float, ...] | None = None


def diagnose(native: Native, proof: Proof | None) -> Finding:
    """Names the cause."""
    comparison = native.comparison
    if comparison.agrees and not norm(comparison.terms):
        fix = "Run verify again at parameters where the gradient is not zero."
        detail = "Both are exactly zero, so this shows nothing."
        return Finding(Cause.EQUAL, fix, detail)
    if comparison.agrees and native.max_ulp == 0:
        return Finding(Cause.EQUAL, _NOTHING)
    # Two traces can differ by more than rounding.
    drawn = not comparison.agrees or native.has_few_digits
    if drawn and not comparison.same(dataclasses.replace(comparison.problem)):
        detail = """Traced a second time, the loss gave another gradient for the same
            batch. It draws random numbers that are not JAX's, from numpy.random for
            example."""
        fix = """Pass a key as rng= to verify, and draw with jax.random from the key
            that the loss then gets as its third argument."""
        return Finding(Cause.RANDOMNESS, fix, detail)
    if comparison.agrees:
        return _rounding(native)
    if not comparison.decidable:
        dtype = comparison.problem.low.name
        detail = f"The difference is so small that it may be the rounding of {dtype}."
        fix = f"""Run verify with the code that is bound to {dtype} replaced by plain
            JAX, which it evaluates in float64."""
        return Finding(Cause.UNDETERMINED, fix, detail)
    if lines := broken(comparison):
        return _broken(lines)
    if proof is None:
        return Finding(*_UNKNOWN)
    return Asked(comparison, proof).finding()


def not_finite(error: NotFiniteError) -> Finding:
    """The finding if nothing can be compared."""
    detail = f"The first is {error.first}."
    fix = """To find where it arises, call the loss on that part of the batch inside
        `with jax.debug_nans(True):`. To train past it, pass
        should_drop_window_fn=ga_optax.drop_window_if_not_finite to MultiSteps."""
    if error.only_part and "nan" in error.first:
        detail += (
            " The undivided batch is finite: most likely a mean of nothing, 0 / 0."
        )
        fix = """Call ga_optax.value_and_grad with the undivided batch. Or divide by
            jnp.maximum(count, 1) in the loss, and pass a weight_fn that returns that
            count. Weight 0 leaves a micro-batch out, whatever it holds."""
    if error.low_precision:
        detail += " In float64 all is finite, so a number is too large for the dtype."
        fix = "Scale the loss down, or compute in bfloat16 or float32 for more range."
    return Finding(Cause.NOT_FINITE, fix, detail)


_NOTHING = """There is nothing to fix. A factor that is in both gradients does not show,
    such as a division of the loss by the number of micro-batches: remove it, because
    accumulation divides."""


def _rounding(native: Native) -> Finding:
    extent, fix = "", _NOTHING
    if not native.comparison.noisy:
        extent = """Against float64, the undivided gradient is off by {:.1e} and the
            accumulated one by {:.1e}, relative to its norm. """.format(*native.errors)
    if native.has_few_digits:
        extent += f"That is more than half of the digits of {native.dtype}."
        fix = f"""The accumulation is right, but the gradient is a small difference of
            large numbers, with few correct digits in {native.dtype}. Compute that part
            of the loss in a wider dtype."""
    return Finding(Cause.ROUNDING, fix, extent=extent)


def _broken(lines: list[str]) -> Finding:
    detail = f"""With the rows of a micro-batch it gives another result, or gradient,
        than with all rows: {"; ".join(lines)}. ga_optax.value_and_grad would be as
        wrong."""
    fix = """Take ga_optax.rowwise off that function, or put into it only what works row
        by row. What needs all rows, such as batch statistics, belongs outside: there
        ga_optax.value_and_grad computes it of all rows."""
    return Finding(Cause.PROMISE, fix, detail)


# -- If they differ --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """What the questions read.

    Attributes:
      comparison: the two gradients, which differ by more than rounding.
      proof: what the program of the loss says.
    """

    comparison: Comparison
    proof: Proof

    def finding(self) -> Finding:
        """The answer of the first question that has one, and what holds for each."""
        answers = (question(self) for question in _QUESTIONS)
        answer = next(filter(None, answers), None)
        if answer is None:
            return Finding(*_UNKNOWN)
        cause, fix, detail = answer
        if self.proof.whole:
            detail += f""" Nothing is known of {self.proof.whole}, so this is by the
                numbers of this batch alone."""
        fix = f"""Call ga_optax.value_and_grad(loss, {self.proof.problem.k}) with the
            undivided batch: it gives the gradient of any loss as it is written. For
            micro-batches, each by itself: {fix[0].lower()}{fix[1:]}"""
        share, c = self.weights or (np.empty(0), 1.0)
        return Finding(cause, fix, detail, weights=tuple((c * share).tolist()) or None)

    @functools.cached_property
    def weights(self) -> tuple[np.ndarray, float] | None:
        """Weights, and a factor, with which micro-batches give the whole gradient."""
        proof, found = self.proof, None
        k, alike = proof.problem.k, proof.meets_in_counts
        size = sum(x.size for x in jax.tree.leaves(proof.problem.params))
        for share in proof.shares() if alike or proof.whole else ():
            c = self.comparison.factor(share)
            if c is None:
                continue
            if c in (1, k, 1 / k):
                return share, c
            # One number is a multiple of any other.
            if alike and (not proof.meetings or size > 1):
                found = share, c
        return found

    @functools.cached_property
    def order_matters(self) -> bool:
        """Whether the same rows in another order have another gradient."""
        rows = np.roll(self.proof.problem.rows(None), 1)
        return not self.comparison.same(rows=rows)

    @functools.cached_property
    def adds_up(self) -> bool:
        """Whether what a row adds to the gradient depends on no other row.

        It may depend on the row's place.
        """
        place = np.arange(self.proof.problem.batch_size)
        some = place % 2 == 0, place < len(place) // 2
        return all(map(self.comparison.adds_up, some))

    @functools.cached_property
    def draws(self) -> bool:
        """Whether random numbers that no row has a key for change the gradient."""
        keys = self.proof.problem.keys(1)
        return self.proof.draws and (
            (bool(keys) and not self.comparison.same(keys=keys)) or self.order_matters
        )


# What a question returns: the cause, what fixes it, and what it means here.
Answer = tuple[Cause, str, str] | None


def _scale(asked: Asked) -> Answer:
    """Whether the loss depends on the batch size, with weights that are right."""
    comparison, k = asked.comparison, asked.proof.problem.k
    if asked.weights is None:
        return None
    share, c = asked.weights
    in_use = comparison.weighted and np.allclose(share, comparison.share, rtol=1e-6)
    if in_use:
        detail = f"""The weights are right, but the undivided gradient is {c:.6g} times
            the accumulated one."""
        fix = """Return the mean over what weight_fn counts, and remove any other
            division by a size or a number of parts."""
        return Cause.SCALE, fix, detail
    if c == 1 or not np.allclose(share, 1 / k, rtol=1e-9):
        return None
    detail = f"The undivided gradient is {c:.6g} times the mean of the micro-batches'."
    fix = "Return jnp.mean(...), with no factor that depends on the batch size."
    if c == k:
        detail = f"""The mean of the micro-batches' gradients is {k} times too small,
            and there are {k} of them: the loss is a sum over its rows, or it is divided
            by a count over the whole batch."""
        fix = """Return the mean: jnp.mean(...) instead of jnp.sum(...), and divide it
            by nothing else, neither by a count over the whole batch nor by the number
            of micro-batches. Or keep the sum and accumulate sums:
            ga_optax.MultiSteps(..., use_grad_mean=False)."""
    elif c == 1 / k:
        detail = f"""The mean of the micro-batches' gradients is {k} times too large,
            and there are {k} of them: the loss is divided by its batch size twice."""
        fix = "Return jnp.mean(...), and do not divide it by the batch size again."
    if comparison.weighted:
        detail += f""" In addition, weight_fn weighs the micro-batches as
            {proportions(comparison.share)}; this loss needs equal weights."""
        fix += """ Leave weight_fn out, or make the loss a mean over what weight_fn
            counts, within the batch that it gets."""
    return Cause.SCALE, fix, detail


def _weights(asked: Asked) -> Answer:
    """Whether G = Σ wᵢ·gᵢ with weights that depend on the batch alone."""
    if asked.weights is None:
        return None
    (share, c), comparison = asked.weights, asked.comparison
    used = f"as {proportions(comparison.share)}" if comparison.weighted else "equally"
    shown = proportions(share)
    detail = f"They count {used} now, but must count as {shown}"
    if not asked.proof.meetings:
        fix = "Leave weight_fn out."
        detail += ": the loss is a plain mean, and needs no weights."
    else:
        fix = f"""Pass a weight_fn to ga_optax.accumulate that returns the number your
            loss divides by: {shown} for these micro-batches, or a multiple."""
        detail += f""" or a multiple of that. The loss divides by a number that differs
            between micro-batches, most likely a count of the tokens that are not
            padding. Where: {in_words(asked.proof.counts)}."""
        if code := code_that_counts(asked.proof.problem, share):
            fix = f"""Pass weight_fn=lambda batch: {code} to ga_optax.accumulate. With
                ga_optax.MultiSteps, pass weight={code} with every micro-batch."""
    if c != 1:
        size, factor = ("small", c) if c > 1 else ("large", 1 / c)
        detail += f""" In addition, the accumulated gradient is too {size} by a factor
            of {factor:.6g}: the loss is also divided by a size or a number of parts."""
        fix += " Then remove the other division from the loss."
    return Cause.WEIGHTS, fix, detail


def _another_axis(asked: Asked) -> Answer:
    """Whether the batch is [time, batch, ...], so that axis 1 holds the examples."""
    problem = asked.proof.problem.along_another_axis()
    proof = None if problem is None else prove(problem)
    if proof is None or not proof.has_rows or not asked.proof.meetings:
        return None
    try:
        other = Comparison(proof.problem)
        right = other.agrees or (Asked(other, proof).weights or (0, 0))[1] == 1
    except Exception:
        return None  # Any: the code is the user's, and may not take such a batch.
    axes = f"batch_axes={proof.problem.batch_axes!r}"
    detail = f"""Split with {axes}, the same batch does give the undivided gradient.
        Most likely the axis along which it is split now is time, as axis 0 is in
        [time, batch, ...]."""
    fix = f"""Pass {axes} to ga_optax.accumulate, or swap the two axes of the
        batch, jnp.swapaxes(x, 0, 1), and let the loss swap them back."""
    if not other.agrees:
        fix += " Then run verify again, because the weights are wrong, too."
    return (Cause.AXIS, fix, detail) if right else None


def _random(asked: Asked) -> Answer:
    """Whether micro-batches draw other numbers than the undivided batch."""
    detail = """The loss draws random numbers for the whole batch at once, most likely
        for dropout with one key. Then micro-batches draw other numbers than the
        undivided batch. That is as good for training, but it cannot be compared."""
    fix = """Train as it is. To compare, switch the randomness off (such as
        deterministic=True), or give each example a key of its own: put
        jax.random.split(key, batch_size) into the batch and draw under jax.vmap. A
        second cause may be hidden: run verify again without randomness."""
    return (Cause.RANDOMNESS, fix, detail) if asked.draws else None


def _by_position(asked: Asked) -> Answer:
    """Whether the loss weighs its rows by their places."""
    proof = asked.proof
    in_numbers = all(x.part.aval.size == 1 for x in proof.counts)
    apart = proof.has_place and proof.meets_in_counts and in_numbers
    if not asked.order_matters or not (apart or asked.adds_up):
        return None
    detail = """The same examples in another order give another gradient: the loss
        weighs examples by position, or leaves some out."""
    fix = "Give each example its weight in its own row, 0 to leave it out."
    return Cause.RANDOMNESS, fix, detail


def _each_by_itself(asked: Asked) -> Answer:
    """Whether rows do not need each other, but no factor fixes it."""
    proof, k = asked.proof, asked.proof.problem.k
    if proof.meetings or not proof.has_rows:
        return None
    detail = f"""Rows do not need each other, but no single factor fixes it: the loss is
        a sum over examples plus a term that is none, such as an L2 penalty on the
        parameters, or a mean. Accumulation keeps that and divides the sum by {k}."""
    fix = """Return the mean over the examples, jnp.mean(...) instead of jnp.sum(...),
        plus the penalty as it is, with its coefficient chosen for a mean."""
    return Cause.SCALE, fix, detail


def _meet(asked: Asked) -> Answer:
    """Whether rows depend on each other."""
    found = [x for x in asked.proof.meetings if x.of_params] or asked.proof.meetings
    detail = f"""The program of the loss does more with values of all rows than weigh
        micro-batches. Where: {in_words(found)}."""
    fix = """No weight_fn can fix it, because each micro-batch sees only itself. Use
        statistics that do not come from the batch, such as those of layer
        normalisation; train on the mean itself, without its root or logarithm; put rows
        that belong together, such as the steps of a sequence, into one row of the
        batch, [batch, time, ...]."""
    return (Cause.CROSS_EXAMPLE, fix, detail) if found else None


_QUESTIONS = (
    _scale,
    _weights,
    _another_axis,
    _random,
    _by_position,
    _each_by_itself,
    _meet,
)
_UNKNOWN = (
    Cause.UNDETERMINED,
    """Call ga_optax.value_and_grad with the undivided batch: there the loss sees all
    rows at once. Or look for what the loss does otherwise for a batch of another size,
    such as an `if` that asks for it.""",
)
