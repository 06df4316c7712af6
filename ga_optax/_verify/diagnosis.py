"""Why the two gradients differ: questions in order, until one of them has the answer.

A question is a function of what is known that returns a `Finding`, or None if the cause
is another one. To add a cause, add a member to `Cause`, write its question, and put the
question into `_QUESTIONS`, before the more general ones.
"""

import dataclasses

import numpy as np

from ga_optax._verify.comparison import Comparison
from ga_optax._verify.counts import EXACT, code_that_counts, proportions
from ga_optax._verify.dependencies import dependencies, in_words, over_axis
from ga_optax._verify.fit import Fit
from ga_optax._verify.gradients import norm
from ga_optax._verify.loss import Loss, NotFiniteError
from ga_optax._verify.native import Native
from ga_optax._verify.program import draws_random_numbers
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


def diagnose(native: Native) -> Finding:
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
    if drawn and not comparison.same(loss=comparison.loss.traced_again()):
        detail = """Traced a second time, the loss gave another gradient for the same
            batch. It draws random numbers that are not JAX's, from numpy.random for
            example."""
        fix = """Pass a key as rng= to verify, and draw with jax.random from the key
            that the loss then gets as its third argument."""
        return Finding(Cause.RANDOMNESS, fix, detail)
    if comparison.agrees:
        return _rounding(native)
    if comparison.problem.whole_batch:
        return _OURS
    if not comparison.decidable:
        dtype = comparison.loss.dtype
        detail = f"The difference is so small that it may be the rounding of {dtype}."
        fix = f"""Run verify with the code that is bound to {dtype} replaced by plain
            JAX, which it evaluates in float64."""
        return Finding(Cause.UNDETERMINED, fix, detail)
    fit = Fit(comparison)
    findings = (question(fit) for question in _QUESTIONS)
    return next(finding for finding in findings if finding is not None)


def of_device_count(axis_name: str) -> Finding:
    """The finding if the loss depends on the number of devices."""
    detail = f"""The loss reads the number of devices, jax.device_count(), and computes
        something else if it is another one. But the size of {axis_name!r} is the number
        of micro-batches in a window."""
    fix = f"""Use jax.lax.axis_size({axis_name!r}) instead of jax.device_count(), then
        run verify again."""
    return Finding(Cause.UNDETERMINED, fix, detail)


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
        fix = """Divide by jnp.maximum(count, 1) in the loss, and pass a weight_fn that
            returns that count. Weight 0 leaves a micro-batch out, whatever it holds."""
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


# -- If they differ: what else gives the undivided gradient ----------------------------


def _scale(fit: Fit) -> Finding | None:
    """Whether G is c times the mean of the micro-gradients."""
    c, k, share = fit.factor, fit.problem.k, fit.comparison.share
    in_use = c is None and fit.comparison.weighted and fit.factor_of(share)
    if in_use:
        detail = f"""The weights are right, but the undivided gradient is {in_use:.6g}
            times the accumulated one."""
        fix = """Return the mean over what weight_fn counts, and remove any other
            division by a size or a number of parts."""
        weights = tuple((in_use * share).tolist())
        return Finding(Cause.SCALE, fix, detail, weights=weights)
    factor = c and fit.known_factor(c)
    if c is None or factor == 1:  # With 1, the weights are wrong.
        return None
    detail = f"The undivided gradient is {c:.6g} times the mean of the micro-batches'."
    fix = "Return jnp.mean(...), with no factor that depends on the batch size."
    if factor == k:
        detail, fix = _too_small(k, fit.problem.axis_name)
    elif factor == 1 / k:
        detail, fix = _too_large(k, fit.problem.axis_name)
    if fit.comparison.weighted:
        detail += f""" In addition, weight_fn weighs the micro-batches as
            {proportions(fit.comparison.share)}; this loss needs equal weights."""
        fix += """ Leave weight_fn out, or make the loss a mean over what weight_fn
            counts, within the batch that it gets."""
    return Finding(Cause.SCALE, fix, detail, weights=(c / k,) * k)


def _too_small(k: int, axis_name: str | None) -> tuple[str, str]:
    """What a factor of k means, and what fixes it."""
    detail = f"""The mean of the micro-batches' gradients is {k} times too small, and
        there are {k} of them: the loss is a sum over its rows, or it is divided by a
        count over the whole batch."""
    fix = """Return the mean: jnp.mean(...) instead of jnp.sum(...), and divide it by
        nothing else, neither by a count over the whole batch nor by the number of
        micro-batches. """
    fix += (
        f"Or multiply it by jax.lax.axis_size({axis_name!r})."
        if axis_name
        else """Or keep the sum and accumulate sums: ga_optax.MultiSteps(...,
        use_grad_mean=False)."""
    )
    return detail, fix


def _too_large(k: int, axis_name: str | None) -> tuple[str, str]:
    """What a factor of 1 / k means, and what fixes it."""
    detail = f"""The mean of the micro-batches' gradients is {k} times too large, and
        there are {k} of them: """
    if axis_name is None:
        detail += "the loss is divided by its batch size twice."
        fix = "Return jnp.mean(...), and do not divide it by the batch size again."
        return detail, fix
    detail += f"""the loss is a sum over {axis_name!r} of what is a mean in each
        micro-batch already."""
    fix = f"""Put jax.lax.pmean(..., {axis_name!r}) around a mean over the rows, and
        jax.lax.psum around a sum over them alone. A loss that is a plain mean needs
        neither."""
    return detail, fix


def _weights(fit: Fit) -> Finding | None:
    """Whether G = Σ wᵢ·gᵢ with weights that depend on the batch alone."""
    found, comparison = fit.weights, fit.comparison
    if found is None:
        return None
    total, trust = float(found.values.sum()), fit.trust
    share, code = found.values / total, None
    plain = np.allclose(share, 1 / len(share), rtol=1e-6, atol=0)
    problem = fit.problem
    parts = [problem.take(problem.batch, problem.rows(i)) for i in range(problem.k)]
    counted = not plain and code_that_counts(parts, problem.axes, share, trust)
    # Counts are exact, also if the fit has few digits.
    if counted and comparison.reproduces(total * counted[1]):
        (code, share), trust = counted, EXACT
    used = f"as {proportions(comparison.share)}" if comparison.weighted else "equally"
    shown = proportions(share, trust)
    detail = f"They count {used} now, but must count as {shown}"
    if plain:
        fix = "Leave weight_fn out."
        detail += ": the loss is a plain mean, and needs no weights."
    else:
        fix = f"""Pass a weight_fn to ga_optax.value_and_grad that returns the number
            your loss divides by: {shown} for these micro-batches, or a multiple."""
        detail += """ or a multiple of that. The loss divides by a count that differs
            between micro-batches, most likely of the tokens that are not padding."""
    if code:
        fix = f"Pass weight_fn=lambda batch: {code} to ga_optax.value_and_grad."
        if problem.axis_name is None:
            fix += f""" With ga_optax.MultiSteps, pass weight={code} with every
                micro-batch."""
    if not found.known.all():
        which = ", ".join(map(str, np.flatnonzero(~found.known)))
        detail += f""" The gradients do not show how micro-batches {which} share their
            weight (here equally), because these are identical or have no gradient."""
    if abs(total - 1) > 1e-3:
        size, factor = ("small", total) if total > 1 else ("large", 1 / total)
        detail += f""" In addition, the accumulated gradient is too {size} by a factor
            of {factor:.6g}: the loss is also divided by a size or a number of parts."""
        fix += " Then remove the other division from the loss."
    return Finding(Cause.WEIGHTS, fix, detail, weights=tuple((total * share).tolist()))


def _constant(fit: Fit) -> Finding | None:
    """Whether the loss is a sum over examples plus a term without any."""
    detail = f"""The loss is a sum over examples plus a constant term, such as an L2
        penalty on the parameters. Accumulation keeps the constant and divides the sum
        by {fit.problem.k}, so no single factor fixes it."""
    fix = """Return the mean over the examples, jnp.mean(...) instead of jnp.sum(...),
        plus the penalty as it is, with its coefficient chosen for a mean."""
    return Finding(Cause.SCALE, fix, detail) if fit.has_constant() else None


# With `whole_batch=True` nothing else can differ, unless something is wrong.
_OURS = Finding(
    Cause.UNDETERMINED,
    """Please report it with the loss. To train until then, leave whole_batch out, and
        see what verify says without it.""",
    """With whole_batch=True the two gradients are those of one program. If the loss
        calls no code that has a state of its own, this is a mistake of ga_optax.""",
)
_TOO_FEW = Finding(
    Cause.UNDETERMINED,
    "Run verify with 3 or more micro-batches, or with more parameters.",
    "Several causes explain gradients of so few numbers.",
)


def _any_two(fit: Fit) -> Finding | None:
    """Whether two micro-batches fit with weights whose sum is open."""
    return _TOO_FEW if fit.any_two else None


# -- If they differ: what changes the undivided gradient -------------------------------


def _another_axis(fit: Fit) -> Finding | None:
    """Whether the batch is [time, batch, ...], so that axis 1 holds the examples."""
    problem = fit.problem.along_another_axis()
    if problem is None:
        return None
    try:
        other = Comparison(Loss(problem, fit.comparison.loss.progress))
        if other.same(rows=problem.rows(0)):
            return None  # That axis has no part in the loss.
        weights = None if other.agrees else Fit(other).weights
    except Exception:
        return None  # Any: the code is the user's, and may not take such a batch.
    if not other.agrees and (weights is None or abs(weights.values.sum() - 1) > 1e-3):
        return None
    axes = f"batch_axes={problem.batch_axes!r}"
    detail = f"""Split with {axes}, the same batch does give the undivided gradient.
        Most likely the axis along which it is split now is time, as axis 0 is in
        [time, batch, ...]."""
    fix = f"""Pass {axes} to ga_optax.value_and_grad, or swap the two axes of the
        batch, jnp.swapaxes(x, 0, 1), and let the loss swap them back."""
    if not other.agrees:
        fix += " Then run verify again, because the weights are wrong, too."
    return Finding(Cause.AXIS, fix, detail)


_KEYS = """put jax.random.split(key, batch_size) into the batch and draw under jax.vmap.
    A second cause may be hidden: run verify again without randomness."""


def _another_key(fit: Fit) -> Finding | None:
    detail = """Another key gives another gradient, most likely because of dropout. Then
        micro-batches draw other random numbers than the undivided batch. That is as
        good for training, but it cannot be compared."""
    fix = f"""Nothing in training. To compare, switch the randomness off (such as
        deterministic=True), or give each example a key of its own: {_KEYS}"""
    if fit.problem.axis_name is None:
        fix += f" {_SAME_NUMBERS}"
    same = not fit.problem.key or fit.comparison.same(key=1)
    return None if same else Finding(Cause.RANDOMNESS, fix, detail)


def _another_order(fit: Fit) -> Finding | None:
    comparison, problem = fit.comparison, fit.problem
    rows = np.random.default_rng(1).permutation(problem.batch_size).astype(np.int32)
    if (rows == problem.rows(None)).all():  # of two or three rows
        rows = rows[::-1].copy()
    if comparison.same(rows=rows):
        return None
    if not draws_random_numbers(problem) and comparison.rows_interact():
        return _of_neighbours(fit)
    detail = """The same examples in another order give another gradient: the loss
        draws random numbers for the whole batch at once (dropout with one key), or
        weighs examples by position."""
    fix = f"Give each example its weight or its key in its own row. For keys, {_KEYS}"
    if problem.axis_name is None:
        fix += f" {_SAME_NUMBERS}"
    return Finding(Cause.RANDOMNESS, fix, detail)


def _of_neighbours(fit: Fit) -> Finding:
    """Rows depend on each other by their places, so where the batch is cut matters."""
    detail = """Their order matters, too: the same rows in another order give another
        gradient, and no random numbers are drawn. """
    detail += _where(
        fit,
        """differences of neighbouring rows, such as h[1:] - h[:-1], a cumulative sum or
        a recurrence over rows, pairs by position""",
    )
    fix = """Put rows that belong together, such as the steps of a sequence, into one
        row of the batch, [batch, time, ...], and compare them along that axis. Then no
        micro-batch cuts them apart."""
    if fit.problem.axis_name is None:
        fix = f"{_WHOLE_BATCH} Or: {fix}"
    return Finding(Cause.CROSS_EXAMPLE, fix, detail)


def _undetermined(fit: Fit) -> Finding | None:
    return _TOO_FEW if fit.ambiguous else None


def _cross_example(fit: Fit) -> Finding:
    """Nothing else is left."""
    name = fit.problem.axis_name
    detail = """Their order does not matter, and no weights of the micro-batches
        reproduce the undivided gradient. """
    detail += _where(
        fit,
        """batch normalisation, a contrastive loss with the batch as negatives, the
        load-balancing term of a mixture of experts, a standard deviation or a maximum
        over the batch, a root or a logarithm of a mean""",
    )
    if name is not None:
        fix = f"""Look for what a micro-batch computes of its rows alone, or adds up
            over {name!r} although it is a mean. {over_axis((), name)}"""
        return Finding(Cause.CROSS_EXAMPLE, fix, detail)
    fix = f"""No weight_fn can fix it, because each micro-batch sees only itself.
        {_WHOLE_BATCH} Or pass axis_name="rows", and communicate in the loss.
        {over_axis(dependencies(fit.problem), "rows")} Or use statistics that do not
        come from the batch, such as those of layer normalisation; or train on the mean
        itself, without its root or logarithm."""
    return Finding(Cause.CROSS_EXAMPLE, fix, detail)


_WHOLE_BATCH = """Pass whole_batch=True to ga_optax.value_and_grad: it computes the
    undivided gradient of the loss as it is, and keeps what rows must know of each
    other. Check it with verify(..., whole_batch=True)."""


_SAME_NUMBERS = """If the undivided batch's numbers matter, pass whole_batch=True to
    ga_optax.value_and_grad, and the key as it is: micro-batches then draw what the
    undivided batch draws. Check it with verify(..., whole_batch=True)."""


def _where(fit: Fit, usual: str) -> str:
    """The lines where rows depend on each other, or the usual reasons."""
    axis_name = fit.problem.axis_name
    lines = "" if axis_name else in_words(dependencies(fit.problem))
    return f"Where: {lines}." if lines else f"Usual reasons: {usual}."


_QUESTIONS = (
    _scale,
    _weights,
    _constant,
    _any_two,
    _another_axis,
    _another_key,
    _another_order,
    _undetermined,
    _cross_example,
)
