"""Why the two gradients differ: questions in order, until one of them has the answer.

A question is a function of what is known that returns a `Finding`, or None if the cause
is another one. To add a cause, add a member to `Cause`, write its question, and put the
question into `_QUESTIONS`, before the more general ones.
"""

import dataclasses

import numpy as np

from ga_optax._verify.comparison import Comparison
from ga_optax._verify.counts import EXACT, code_that_counts, proportions
from ga_optax._verify.fit import Fit
from ga_optax._verify.gradients import norm
from ga_optax._verify.loss import Loss, NotFiniteError
from ga_optax._verify.meetings import LINES, meetings, of_window
from ga_optax._verify.native import Native
from ga_optax._verify.report import Cause


@dataclasses.dataclass(frozen=True)
class Finding:
    """A cause, in words.

    Attributes:
      cause: the cause.
      mend: what mends it.
      detail: what the cause means here, beyond what is always true of it.
      extent: what to say about the size of the difference.
      weights: those that reproduce the undivided gradient, if there are any.
    """

    cause: Cause
    mend: str
    detail: str = ""
    extent: str = ""
    weights: tuple[float, ...] | None = None


def diagnose(native: Native) -> Finding:
    """Names the cause."""
    comparison = native.comparison
    if comparison.agrees and not norm(comparison.terms):
        mend = "Run verify again at parameters where the gradient is not zero."
        detail = "Both are exactly zero, so this shows nothing."
        return Finding(Cause.EQUAL, mend, detail)
    if comparison.agrees and native.max_ulp == 0:
        return Finding(Cause.EQUAL, _NOTHING)
    # Two traces can differ by more than rounding.
    drawn = not comparison.agrees or native.has_few_digits
    if drawn and not comparison.same(loss=comparison.loss.traced_again()):
        detail = """Traced a second time, the loss gave another gradient for the same
            batch. It draws random numbers that are not JAX's, from numpy.random for
            example."""
        mend = """Pass a key as rng= to verify, and draw with jax.random from the key
            that the loss then gets as its third argument."""
        return Finding(Cause.RANDOMNESS, mend, detail)
    if comparison.agrees:
        return _rounding(native)
    if not comparison.decidable:
        dtype = comparison.loss.dtype
        detail = f"The difference is so small that it may be the rounding of {dtype}."
        mend = f"""Run verify with the code that is bound to {dtype} replaced by plain
            JAX, which it evaluates in float64."""
        return Finding(Cause.UNDETERMINED, mend, detail)
    fit = Fit(comparison)
    findings = (question(fit) for question in _QUESTIONS)
    return next(finding for finding in findings if finding is not None)


def not_finite(error: NotFiniteError) -> Finding:
    """The finding if nothing can be compared."""
    detail = f"The first is {error.first}."
    mend = """To find where it arises, call the loss on that part of the batch inside
        `with jax.debug_nans(True):`. To train past it, pass
        should_drop_window_fn=ga_optax.drop_window_if_not_finite to MultiSteps."""
    if error.only_part and "nan" in error.first:
        detail += (
            " The undivided batch is finite: most likely a mean of nothing, 0 / 0."
        )
        mend = """Divide by jnp.maximum(count, 1) in the loss, and pass a weight_fn that
            returns that count. Weight 0 leaves a micro-batch out, whatever it holds."""
    if error.narrow:
        detail += " In float64 all is finite, so a number is too large for the dtype."
        mend = "Scale the loss down, or compute in bfloat16 or float32 for more range."
    return Finding(Cause.NOT_FINITE, mend, detail)


_NOTHING = "There is nothing to mend."


def _rounding(native: Native) -> Finding:
    extent, mend = "", _NOTHING
    if not native.comparison.noisy:
        extent = """Against float64, the undivided gradient is off by {:.1e} and the
            accumulated one by {:.1e}, relative to its norm. """.format(*native.errors)
    if native.has_few_digits:
        extent += f"That is more than half of the digits of {native.dtype}."
        mend = f"""The accumulation is right, but the gradient is a small difference of
            large numbers, with few correct digits in {native.dtype}. Compute that part
            of the loss in a wider dtype."""
    return Finding(Cause.ROUNDING, mend, extent=extent)


# -- If they differ: what else gives the undivided gradient ----------------------------


def _scale(fit: Fit) -> Finding | None:
    """Whether G is c times the mean of the micro-gradients."""
    c, k, share = fit.factor, fit.problem.k, fit.comparison.share
    in_use = c is None and fit.comparison.weighted and fit.factor_of(share)
    if in_use:
        detail = f"""The weights are right, but the undivided gradient is {in_use:.6g}
            times the accumulated one."""
        mend = """Return the mean over what weight_fn counts, and remove any other
            division by a size or a number of parts."""
        weights = tuple((in_use * share).tolist())
        return Finding(Cause.SCALE, mend, detail, weights=weights)
    factor = c and fit.known_factor(c)
    if c is None or factor == 1:  # With 1, the weights are wrong.
        return None
    detail = f"The undivided gradient is {c:.6g} times the mean of the micro-batches'."
    mend = "Return jnp.mean(...), with no factor that depends on the batch size."
    if factor == k:
        detail = f"""The mean of the micro-batches' gradients is {k} times too small,
            and there are {k} of them. Either the loss is a sum over examples, or it is
            already divided by {k} or by a count over the whole batch."""
        mend = """Return the mean: jnp.mean(...) instead of jnp.sum(...). If the loss is
            divided by the number of micro-batches or by a count over the whole batch,
            remove that, because accumulation divides. """
        mend += (
            f"Or multiply it by jax.lax.axis_size({fit.problem.axis_name!r})."
            if fit.problem.axis_name
            else """Or keep the sum and accumulate sums: ga_optax.MultiSteps(...,
            use_grad_mean=False)."""
        )
    elif factor == 1 / k:
        detail = f"""The mean of the micro-batches' gradients is {k} times too large,
            and there are {k} of them: the loss is divided by its batch size twice."""
        mend = "Return jnp.mean(...), and do not divide it by the batch size again."
    if fit.comparison.weighted:
        detail += f""" In addition, weight_fn weighs the micro-batches as
            {proportions(fit.comparison.share)}; this loss needs equal weights."""
        mend += """ Leave weight_fn out, or make the loss a mean over what weight_fn
            counts, within the batch that it gets."""
    return Finding(Cause.SCALE, mend, detail, weights=(c / k,) * k)


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
    # Counts are exact, also if the fit has the digits of a narrow dtype.
    if counted and comparison.reproduces(total * counted[1]):
        (code, share), trust = counted, EXACT
    used = f"as {proportions(comparison.share)}" if comparison.weighted else "equally"
    shown = proportions(share, trust)
    detail = f"They count {used} now, but must count as {shown}"
    if plain:
        mend = "Leave weight_fn out."
        detail += ": the loss is a plain mean, and needs no weights."
    else:
        mend = f"""Pass a weight_fn to ga_optax.value_and_grad that returns the number
            your loss divides by: {shown} for these micro-batches, or a multiple."""
        detail += """ or a multiple of that. The loss divides by a count that differs
            between micro-batches, most likely of the tokens that are not padding."""
    if code:
        mend = f"Pass weight_fn=lambda batch: {code} to ga_optax.value_and_grad."
        if problem.axis_name is None:
            mend += f""" With ga_optax.MultiSteps, pass weight={code} with every
                micro-batch."""
    if not found.known.all():
        which = ", ".join(map(str, np.flatnonzero(~found.known)))
        detail += f""" The gradients do not show how micro-batches {which} share their
            weight (here equally), because these are identical or have no gradient."""
    if abs(total - 1) > 1e-3:
        size, factor = ("small", total) if total > 1 else ("large", 1 / total)
        detail += f""" In addition, the accumulated gradient is too {size} by a factor
            of {factor:.6g}: the loss is also divided by a size or a number of parts."""
        mend += " Then remove the other division from the loss."
    return Finding(Cause.WEIGHTS, mend, detail, weights=tuple((total * share).tolist()))


def _constant(fit: Fit) -> Finding | None:
    """Whether the loss is a sum over examples plus a term without any."""
    detail = f"""The loss is a sum over examples plus a constant term, such as an L2
        penalty on the parameters. Accumulation keeps the constant and divides the sum
        by {fit.problem.k}, so no single factor mends it."""
    mend = """Return the mean over the examples, jnp.mean(...) instead of jnp.sum(...),
        plus the penalty as it is, with its coefficient chosen for a mean."""
    return Finding(Cause.SCALE, mend, detail) if fit.has_constant() else None


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
    mend = f"""Pass {axes} to ga_optax.value_and_grad, or swap the two axes of the
        batch, jnp.swapaxes(x, 0, 1), and let the loss swap them back."""
    if not other.agrees:
        mend += " Then run verify again, because the weights are wrong, too."
    return Finding(Cause.AXIS, mend, detail)


_KEYS = """put jax.random.split(key, batch_size) into the batch and draw under jax.vmap.
    A second cause may be hidden: run verify again without randomness."""


def _another_key(fit: Fit) -> Finding | None:
    detail = """Another key gives another gradient, most likely because of dropout. Then
        micro-batches draw other random numbers than the undivided batch. That is as
        good for training, but it cannot be compared."""
    mend = f"""Nothing in training. To compare, switch the randomness off (such as
        deterministic=True), or give each example a key of its own: {_KEYS}"""
    same = not fit.problem.key or fit.comparison.same(key=1)
    return None if same else Finding(Cause.RANDOMNESS, mend, detail)


def _another_order(fit: Fit) -> Finding | None:
    detail = """The same examples in another order give another gradient: the loss
        draws random numbers for the whole batch at once (dropout with one key), or
        weighs examples by position."""
    mend = f"Give each example its weight or its key in its own row. For keys, {_KEYS}"
    rows = fit.problem.rows
    same = fit.comparison.same(rows=np.roll(rows(None), len(rows(0))))
    return None if same else Finding(Cause.RANDOMNESS, mend, detail)


def _undetermined(fit: Fit) -> Finding | None:
    return _TOO_FEW if fit.ambiguous else None


def _cross_example(fit: Fit) -> Finding:
    """Nothing else is left."""
    name = fit.problem.axis_name
    detail = """Their order does not matter, and no weights of the micro-batches
        reproduce the undivided gradient. Usual reasons: batch normalisation, a
        contrastive loss with the batch as negatives, the load-balancing term of a
        mixture of experts, a standard deviation or a maximum over the batch, a root
        or a logarithm of a mean."""
    if name is not None:
        mend = f"""Look for what a micro-batch computes of its rows alone, and
            communicate it over {name!r}, too. {of_window(LINES, name)}"""
        return Finding(Cause.CROSS_EXAMPLE, mend, detail)
    mend = f"""No weight_fn can mend it, because each micro-batch sees only itself. Pass
        axis_name="rows" to ga_optax.value_and_grad: then the loss sees the whole window
        in collectives over that axis. {of_window(meetings(fit.problem), "rows")} Check
        it with verify(axis_name="rows"). Or use statistics that do not come from the
        batch, such as those of layer normalisation; or train on the mean itself,
        without its root or logarithm."""
    return Finding(Cause.CROSS_EXAMPLE, mend, detail)


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
