"""Is it the same gradient? Compares k micro-batches with the undivided batch.

With G the gradient of the undivided batch, gᵢ those of its micro-batches and wᵢ the
weights in use, the question is whether

    D  =  G - Σ wᵢ·gᵢ / Σ wᵢ

is zero but for rounding. Where it is not, the cause is found by asking what does give
G, in this order: c times the mean of the gᵢ (a sum where a mean is due); a weighted
mean of the gᵢ, with unknown weights (a mean over a count that differs between
micro-batches; the weights are that count); a sum and a constant; the same examples in
another order, or with another key. If nothing does, examples see each other.

**Arithmetic.** In float64, with parameters and batch cast to it. What rounding may do
is told from what it may not by half of the digits: D counts as rounding up to
`2⁻²⁶·Σ|wᵢ|·‖gᵢ‖`, leaf by leaf, which is less than a float32 gradient could show. A
loss that rounds to a narrower dtype inside is evaluated again, at parameters moved by
that dtype's rounding: D is rounding where it changes as much as it is large, and a fact
where it stays.

**Memory.** Three float64 gradient trees and two copies of the parameters, for any k.
The fit never holds the gᵢ: it works on sketches of them (`ga_optax._verify_fit`).
Weights and factors that were fitted are then checked on the whole tree.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.typing import ArrayLike

from ga_optax import _microbatch
from ga_optax._checks import (
    check_gradients,
    check_num_microbatches,
    check_weight,
    leaf_name,
)
from ga_optax._verify_fit import System
from ga_optax._verify_gradients import (
    Comparison,
    Fun,
    Loss,
    Native,
    NotFiniteError,
    Progress,
    norm,
    ratio,
)
from ga_optax._verify_report import Cause, LeafReport, Report

__all__ = ["Cause", "LeafReport", "Report", "verify"]


def verify(
    fun: Callable[..., Any],
    params: optax.Params,
    batch: Any,
    num_microbatches: int,
    *,
    weight_fn: Callable[..., ArrayLike] | None = None,
    has_aux: bool = False,
    rng: Any = None,
) -> Report:
    """Is the gradient over micro-batches that of the undivided batch? If not, why not?

    >>> import jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(params, batch):  # a mean over the elements that the mask keeps
    ...     error = (batch["x"] @ params["w"] - batch["y"]) ** 2
    ...     return (error * batch["mask"]).sum() / batch["mask"].sum()
    >>> params = {"w": jnp.array([1.0, 2.0])}
    >>> batch = {
    ...     "x": jnp.array([[1.0, 0], [0, 1], [1, 1], [2, 0], [3, 1], [0, 2]]),
    ...     "y": jnp.array([0.0, 1, 0, 2, 1, 0]),
    ...     "mask": jnp.array([1.0, 1, 1, 0, 0, 1]),
    ... }
    >>> report = ga.verify(loss, params, batch, num_microbatches=3)
    >>> print(report.cause.name, [round(w, 6) for w in report.weights])
    WEIGHTS [0.5, 0.25, 0.25]
    >>> print(report.mend.partition(" to ")[0])
    Pass weight_fn=lambda batch: batch['mask'].sum()
    >>> by_count = lambda batch: batch["mask"].sum()
    >>> ga.verify(loss, params, batch, num_microbatches=3, weight_fn=by_count).ok
    True

    Run it once when you switch accumulation on, on real parameters and one real batch,
    outside `jit`, with a loss that stands as it does in training. `print(report)` is a
    page that says what is wrong, how large it is, and the line of code that mends it.

    It compares `fun` over the batch with `fun` over its parts. What is wrong in both
    alike it cannot see: a loss that is divided by a constant k is its own mean, and
    equal.

    A constant term, such as an L2 penalty on the parameters, is the same in every
    micro-batch, and any weighted mean keeps it: beside a mean loss it is right, and
    beside a token-weighted one too. Beside a *sum* it is neither: the sum needs the
    factor k, the constant must not have it. That is reported as `SCALE`, and the mend
    is to make a mean of the sum.

    **Exactness.** `EQUAL` and `max_ulp` compare what `jax.jit` of `jax.value_and_grad`
    and of `ga_optax.value_and_grad` give in the parameters' own dtypes. The cause is
    found in float64, to half of its digits; fitted counts are right to 1e-3 and mostly
    to 1e-10, those of micro-batches without gradient included. A cause is named only if
    the numbers rule the others out; else it is `UNDETERMINED`. Where `fun` does not run
    in float64, or casts to a narrower dtype, that dtype's rounding is measured, and an
    effect smaller than four times that counts as rounding; counts that were fitted have
    that dtype's digits, unless they are found in the batch. The page then says so.

    **Memory.** The undivided batch's gradient has to fit, in float64. In float64 too:
    three gradient trees, two copies of the parameters and one of the batch, whatever
    `num_microbatches` is; and a vector of max(4096, 8·k) numbers for each micro-batch.

    **Time.** Two gradients of the undivided batch and k of micro-batches in float64,
    and the same once in the parameters' dtype; about five times that where there is a
    cause to find. A terminal shows progress on stderr.

    Args:
      fun: the loss, `fun(params, batch)`, or `fun(params, batch, key)` where `rng` is
        given. It returns a real floating scalar, or with `has_aux` a pair of that and
        anything else, which is not compared. Close over what is not split.
      params: the parameters, a tree of floating or complex leaves.
      batch: the undivided batch, a tree of arrays whose axis 0 are the rows, all of one
        length. Micro-batch i is the rows `i·B/k` up to `(i + 1)·B/k`, as in
        `ga_optax.value_and_grad`. Leaves that are PRNG keys, one a row, are split too.
      num_microbatches: k; it must divide the rows.
      weight_fn: a function of one micro-batch (a tree like `batch`) that returns its
        weight; pass the one that you train with.
      has_aux: whether `fun` returns a pair.
      rng: a PRNG key, or a tree of them. As in `ga_optax.value_and_grad`, micro-batch i
        sees `jax.random.fold_in(rng, i)`; the undivided batch is micro-batch 0 of 1.

    Returns:
      A `Report`.

    Raises:
      TypeError, ValueError: before `fun` is traced, where an argument does not fit;
        after it was traced, and before anything runs, where what `fun` returned does
        not.
    """
    k = _check(fun, params, batch, num_microbatches, rng)
    params, batch = jax.tree.map(_placed, (params, batch))
    args = (params, batch) if rng is None else (params, batch, rng)
    loss_fun = _without_aux(fun) if has_aux else fun
    accumulated = _microbatch.value_and_grad(
        loss_fun, k, rng_argnums=() if rng is None else 2, weight_fn=weight_fn
    )
    # The checks of `value_and_grad`, and of what `fun` returns, before anything runs.
    jax.eval_shape(accumulated, *args)

    rows = jax.tree.leaves(batch)[0].shape[0]
    weights = np.ones(k)
    if weight_fn is not None:
        parts = (jax.tree.map(lambda x, i=i: x[i], _rows(batch, k)) for i in range(k))
        weights = np.array([float(check_weight(weight_fn(part))) for part in parts])

    progress = Progress()
    x64 = bool(jnp.result_type(float) == jnp.float64)
    call = Fun(loss_fun, params, batch, rng, x64)
    with jax.enable_x64(True), progress:
        loss = Loss(call, progress)
        try:
            check = Comparison(loss, k, rows, weights)
            native = Native(loss, accumulated)
        except NotFiniteError as found:
            return _not_finite(found, k, rows, loss.dtype)
        finding = _agreement(check, native) if check.agrees else _diagnose(check)
    return _report(finding, check, native)


# -- What was found --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Finding:
    """A cause, in words: what it means here, and what mends it."""

    cause: Cause
    detail: str
    mend: str
    weights: np.ndarray | None = None
    size: str = ""


_NOTHING = "There is nothing to mend."
_HIDDEN = "Another cause may hide behind: run verify again with the randomness off."


def _agreement(check: Comparison, native: Native) -> _Finding:
    """Names the cause where the diagnosis sees no difference but rounding."""
    if norm(check.terms) == 0:
        return _Finding(
            Cause.EQUAL,
            "All of them are exactly zero, so that anything would agree.",
            "Run verify again at parameters where the gradient is not zero.",
        )
    if all(leaf.max_ulp == 0 for leaf in native.leaves):
        return _Finding(Cause.EQUAL, "", _NOTHING)
    mend, size = _NOTHING, ""
    if not check.noisy:
        undivided, accumulated = native.errors
        size = (
            f"Against float64, the undivided gradient is off by {undivided:.1e} and "
            f"the accumulated one by {accumulated:.1e}, relative to its norm."
        )
    # Half of the digits, as in float64. Two tracings can differ by more than rounding.
    if native.distance > math.sqrt(native.eps) * norm(check.terms):
        changing = _changing(check)
        if changing is not None:
            return changing
        size += f" That is more than half of the digits of {native.dtype}."
        mend = (
            "The accumulation is right, but the gradient itself has few digits in "
            f"{native.dtype}: somewhere it is a small difference of large numbers. "
            "Compute that part of the loss in a wider dtype."
        )
    return _Finding(Cause.ROUNDING, "", mend, size=size.strip())


def _changing(check: Comparison) -> _Finding | None:
    """A loss that is not a function of its arguments."""
    if check.same(check.run.again(), np.arange(check.rows), 0):
        return None
    return _Finding(
        Cause.RANDOMNESS,
        "Traced a second time, the loss gave another gradient for the same batch: it "
        "draws random numbers that are not JAX's, from numpy.random for example.",
        "Pass a key as rng= to verify, and draw with jax.random from the key that the "
        "loss then gets as its third argument.",
    )


def _diagnose(check: Comparison) -> _Finding:
    """Names the cause of a difference that is not rounding."""
    changing = _changing(check)
    if changing is not None:
        return changing
    run = check.run
    rows = np.arange(check.rows)
    system = System(check)
    finding = (
        _scale(check, system) or _weights(check, system) or _constant(check, system)
    )
    if finding is not None:
        return finding

    if run.call.rng is not None and not check.same(run, rows, 1):
        return _Finding(
            Cause.RANDOMNESS,
            "Another key gives another gradient: dropout, most likely. The "
            "micro-batches draw other random numbers than the undivided batch. That is "
            "as good in training, but it cannot be compared.",
            "Nothing in training. To compare, switch the randomness off (such as "
            "deterministic=True), or give each example a key of its own: put "
            "jax.random.split(key, batch_size) into the batch, and draw under "
            f"jax.vmap. {_HIDDEN}",
        )
    if not check.same(run, np.roll(rows, check.rows // check.k), 0):
        return _Finding(
            Cause.RANDOMNESS,
            "The same examples in another order give another gradient, so the loss "
            "knows the place of an example in the batch: random numbers drawn for the "
            "batch as a whole (dropout with one key), or weights by position.",
            "Give each example its random numbers or its weight with its row: put "
            "jax.random.split(key, batch_size) into the batch, and draw under "
            f"jax.vmap. {_HIDDEN}",
        )
    if system.ambiguous:
        return _Finding(
            Cause.UNDETERMINED,
            "",
            "Run verify with 3 or more micro-batches, or with more parameters.",
        )
    return _Finding(
        Cause.CROSS_EXAMPLE,
        "The order of the examples does not matter, and no weights of the "
        "micro-batches reproduce the undivided batch. Usual reasons: batch "
        "normalisation, a contrastive loss with the batch as negatives, the "
        "load-balancing term of a mixture of experts, a standard deviation or a "
        "maximum over the batch, the square root or the logarithm of a mean.",
        "No weight_fn can mend it: each micro-batch sees itself alone. Use statistics "
        "that do not come from the batch (group or layer normalisation, running "
        "averages), or compute that term over the whole batch outside the "
        "accumulated loss, or accept that accumulation trains another loss. A root or "
        "a logarithm of a mean: train on the mean itself.",
    )


def _scale(check: Comparison, system: System) -> _Finding | None:
    """G = c times the mean of the micro-gradients, c the same for all of one size."""
    k = check.k
    mean = system.here.columns.mean(1)
    if not mean.any():
        return None
    c = float(mean @ system.here.target / (mean @ mean))
    weights = np.full(k, c / k)
    if c <= 0 or not system.fits(weights):
        return None
    trust = system.tolerance()
    factor = next((f for f in (k, 1 / k, 1) if abs(c / f - 1) <= trust), c)
    if system.pairs is not None:
        means = (system.here.columns[:, :-1] + system.here.columns[:, 1:]) / 2
        c_pair = float((means * system.pairs).sum() / ((means**2).sum() or 1.0))
        if not system.small(system.pairs - c_pair * means, means):
            return None
    elif system.collinear and factor not in (k, 1 / k):
        return None
    if not check.reproduces(weights) or (factor != 1 and system.is_normalised()):
        return None
    if factor == 1:
        return _weights_finding(check, system, np.full(k, 1 / k), np.ones(k, bool))
    mean = "The mean of the gradients of the micro-batches"
    if factor == k:
        detail = (
            f"{mean} is {k} times too small, {k} being the number of micro-batches: "
            "their losses add up to the loss of the batch. Either the loss is a sum "
            "over examples, or it was divided by hand already, by the number of "
            "micro-batches or by a count over the whole batch."
        )
        mend = (
            "Return the mean: jnp.mean(...) for jnp.sum(...). If the loss is divided "
            "by the number of micro-batches or by a count over the whole batch, take "
            "that out: accumulation divides. Or keep the sum, and have it summed: "
            "ga_optax.MultiSteps(..., use_grad_mean=False)."
        )
    elif factor == 1 / k:
        detail = (
            f"{mean} is {k} times too large, {k} being the number of micro-batches: "
            "the loss is divided by the size of its batch once too often."
        )
        mend = "Return jnp.mean(...) as it is, and divide by the batch size no more."
    else:
        detail = (
            f"The undivided gradient is {c:.6g} times the mean of those of the "
            "micro-batches."
        )
        mend = (
            "Return jnp.mean(...) over the examples, with no factor that depends on "
            "the size of the batch."
        )
    if check.weights is not None:
        detail += (
            " Beside that, weight_fn weighs the micro-batches as "
            f"{_proportions(check.share)}, and this loss asks for equal weights."
        )
        mend += (
            " Leave weight_fn out, or make the loss a mean over what weight_fn counts, "
            "within the batch that it gets."
        )
    return _Finding(Cause.SCALE, detail, mend, weights)


def _weights(check: Comparison, system: System) -> _Finding | None:
    """G = Σ wᵢ·gᵢ with weights that depend on the batch alone."""
    weights, known = system.normalised()
    if weights is None:
        weights, known = system.unnormalised()
    if weights is None or system.ambiguous or not check.reproduces(weights):
        return None
    # A maximum over the batch has a weight of 1 for the part that holds it.
    if not system.hold_nothing(np.flatnonzero(weights == 0)):
        return None
    return _weights_finding(check, system, weights, known)


def _weights_finding(
    check: Comparison, system: System, weights: np.ndarray, known: np.ndarray
) -> _Finding:
    k, total = check.k, float(weights.sum())
    share, trust = weights / total, system.tolerance()
    uniform = np.allclose(share, 1 / k, rtol=1e-6, atol=0)
    code = None
    if not uniform:
        code, counted = _weight_fn_for(check.run.call.batch, share, trust)
        # The counts are exact where the fit has the digits of a narrow dtype.
        if code and check.reproduces(total * counted):
            share, trust = counted, _EXACT
        else:
            code = None
    weights = total * share
    shown = _proportions(share, trust)
    used = "equally" if check.weights is None else f"as {_proportions(check.share)}"
    detail = f"They count {used} now, and must count as {shown}"
    if uniform:
        detail += "."
        detail += " So the loss is a plain mean, and needs no weights."
        mend = "Leave weight_fn out."
    else:
        detail += (
            " or a multiple of that. So the loss is a mean over something that the "
            "micro-batches hold unequal numbers of, tokens that are not padding most "
            "likely, and these are the numbers."
        )
        if code:
            mend = (
                f"Pass weight_fn=lambda batch: {code} to ga_optax.value_and_grad. With "
                f"ga_optax.MultiSteps, pass weight={code} with every micro-batch."
            )
        else:
            mend = (
                "Pass weight_fn=lambda batch: ... to ga_optax.value_and_grad, a "
                "function of one micro-batch that returns the number your loss divides "
                f"by. For these micro-batches its values were, up to a factor, {shown}."
            )
    if not known.all():
        which = ", ".join(str(i) for i in np.flatnonzero(~known))
        detail += (
            f" The gradients leave open how micro-batches {which} share their part "
            "(they are identical, or without gradient): it is divided evenly here."
        )
    if abs(total - 1) > 1e-3:
        off = f"small by a factor {total:.6g}"
        if total < 1:
            off = f"large by a factor {1 / total:.6g}"
        detail += (
            f" Beside that the accumulated gradient is too {off}: the loss is divided "
            "by a size or a number of micro-batches as well."
        )
        mend += " Then take the other division out of the loss."
    return _Finding(Cause.WEIGHTS, detail, mend, weights)


def _constant(check: Comparison, system: System) -> _Finding | None:
    """G = P + Σ dᵢ with gᵢ = P + dᵢ: a sum over examples and a term without any."""
    if not system.has_constant():
        return None
    return _Finding(
        Cause.SCALE,
        "The loss is a sum over examples and a constant term, such as an L2 penalty on "
        "the parameters. Accumulation keeps the constant as it is and divides the sum "
        f"by {check.k}, the number of micro-batches, so that no single factor mends "
        "it.",
        "Return the mean over the examples, jnp.mean(...) for jnp.sum(...), plus the "
        "penalty as it is (with its coefficient chosen for a mean).",
    )


# To this many digits shares are compared with counts, where the fit is in float64.
_EXACT = 1e-6


def _proportions(share: np.ndarray, trust: float = _EXACT) -> str:
    """Weights as whole numbers where there are small ones, or in units of the least."""
    digits = 6
    if trust > _EXACT:
        digits = max(2, math.floor(-math.log10(trust)))
    else:
        total = np.arange(1, 100_001)
        fits = np.ones(total.shape, bool)
        for s in share:
            scaled = total * s
            fits &= np.abs(scaled - np.round(scaled)) < _EXACT
        if fits.any():
            return " : ".join(f"{s * total[fits][0]:.0f}" for s in share)
    unit = min((s for s in share if s > 1e-9), default=1.0)
    return " : ".join(f"{s / unit:.{digits}g}" if s > 1e-9 else "0" for s in share)


def _weight_fn_for(
    batch: Any, share: np.ndarray, trust: float
) -> tuple[str | None, np.ndarray]:
    """The expression in `batch` whose values come closest to these shares.

    With its own shares; `None` where no expression comes as close as `trust`.
    """
    k = len(share)
    forms = (
        ("{}.sum({})", lambda x: x),
        ("({} != 0).sum()", lambda x: x != 0),
        ("({} >= 0).sum()", lambda x: x >= 0),
        ("({} != -100).sum()", lambda x: x != -100),  # PyTorch's ignored label
    )
    closest, code, best = max(_EXACT, trust), None, share
    for path, leaf in jax.tree_util.tree_flatten_with_path(_rows(batch, k))[0]:
        if not jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype != jnp.bool_:
            continue
        values = np.asarray(leaf).astype(np.float64)
        # A sum in half a float would round the count.
        half = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        dtype = "dtype='float32'" if half else ""
        name = "batch" + jax.tree_util.keystr(path)
        views = [(name, values)]
        if values.ndim >= 3:  # the mask of a shifted sequence, too
            views += [(f"{name}[:, 1:]", values[:, :, 1:])]
        for view, part in views:
            for form, counts in forms:
                counted = counts(part).reshape(k, -1).sum(1).astype(np.float64)
                if not np.isfinite(counted).all() or (counted < 0).any():
                    continue
                counted /= counted.sum() or 1.0
                # Of several as close as rounding, the first, which is the simplest.
                apart = np.abs(counted - share).max()
                if apart < closest and (code is None or apart < 0.5 * closest):
                    closest, code, best = apart, form.format(view, dtype), counted
    return code, best


# -- The report ------------------------------------------------------------------------


def _report(finding: _Finding, check: Comparison, native: Native) -> Report:
    """The report of a comparison."""
    relative = check.relative()
    leaves = tuple(
        dataclasses.replace(leaf, relative=float(r))
        for leaf, r in zip(native.leaves, relative, strict=True)
    )
    max_ulp = max(leaf.max_ulp for leaf in leaves)
    ok = finding.cause in (Cause.EQUAL, Cause.ROUNDING)
    whole = ratio(norm(check.difference), norm(check.undivided))

    size = []
    if finding.cause is Cause.ROUNDING:
        size.append(
            f"They differ by {_of_the_norm(native)}, and by at "
            f"most {max_ulp} ULP{'s' * (max_ulp != 1)} (steps between neighbouring "
            f"numbers of the dtype), on "
            f"{max(leaves, key=lambda leaf: leaf.max_ulp).name}."
            + " Many ULPs mean an element near zero, where the terms cancel."
            * (max_ulp > 1000)
        )
    elif not ok and check.agrees:
        size.append(
            f"As training computes them, they differ by {_of_the_norm(native)}."
        )
    elif not ok:
        worst = leaves[int(np.argmax(relative))]
        off = f"{_percent(whole)} of the undivided gradient"
        if math.isinf(whole):
            off = f"{norm(check.difference):.2g}, where the undivided gradient is zero"
        size.append(
            f"The accumulated gradient is off by {off} (norm of the difference"
            + ("" if math.isinf(whole) else " over the norm of the gradient")
            + f"), the most on {worst.name}: {_percent(worst.relative)}."
        )
    if finding.size:
        size.append(finding.size)
    undivided, accumulated = losses = check.loss, check.accumulated_loss
    if abs(undivided - accumulated) > 1e-3 * abs(undivided) and ok:
        size.append(
            f"The gradients agree, but the loss does not: {undivided:.6g} undivided, "
            f"{accumulated:.6g} accumulated. Some term of it that has no gradient is "
            "not a mean over the examples. Training does not notice."
        )
    else:
        size.append(f"Loss: {undivided:.6g} undivided, {accumulated:.6g} accumulated.")
    if check.noisy:
        size.append(check.run.note)

    wrong = (
        (finding.cause.value, finding.detail)
        if finding.detail
        else (finding.cause.value,)
    )
    message = " ".join((*wrong, *size[:1], finding.mend))
    if not message.endswith((".", ")")):
        message += "."
    weights = finding.weights
    return Report(
        ok=ok,
        cause=finding.cause,
        message=message,
        weights=None if weights is None else tuple(float(w) for w in weights),
        max_ulp=max_ulp,
        relative=whole,
        leaves=leaves,
        mend=finding.mend,
        dtype=check.run.dtype if check.noisy else "float64",
        losses=losses,
        num_microbatches=check.k,
        batch_size=check.rows,
        diagnosis=wrong,
        extent=tuple(size),
    )


def _not_finite(found: NotFiniteError, k: int, rows: int, dtype: str) -> Report:
    detail = f"The first is {found.where}."
    mend = (
        "Find out where the loss makes it: call the loss on that part of the batch "
        "inside `with jax.debug_nans(True):`. To train past it, pass "
        "should_skip_update_fn=ga_optax.drop_window_if_not_finite to "
        "ga_optax.MultiSteps."
    )
    if found.only_part and "nan" in found.where:
        detail += (
            " The undivided batch is finite, so this part is empty in some sense: most "
            "likely a mean over no element, 0 / 0, where everything is masked."
        )
        mend = (
            "Divide by jnp.maximum(count, 1) in the loss, and pass a weight_fn that "
            "returns that count: a micro-batch of weight 0 is left out, whatever it "
            "holds."
        )
    if found.narrow:
        detail += " In float64 all is finite, so a number is too large for the dtype."
        mend = (
            "Scale the loss down, or compute in a dtype with a larger range: bfloat16 "
            "or float32 for float16."
        )
    size = "No difference can be measured."
    return Report(
        ok=False,
        cause=Cause.NOT_FINITE,
        message=f"{Cause.NOT_FINITE.value} {detail} {mend}",
        weights=None,
        max_ulp=None,
        relative=math.nan,
        leaves=(),
        mend=mend,
        dtype=dtype,
        losses=found.losses,
        num_microbatches=k,
        batch_size=rows,
        diagnosis=(Cause.NOT_FINITE.value, detail),
        extent=(size,),
    )


def _of_the_norm(native: Native) -> str:
    if math.isinf(native.relative):
        return f"{native.distance:.1e} in norm, where the gradient is zero"
    return f"{native.relative:.1e} of the gradient's norm"


def _percent(fraction: float) -> str:
    if not math.isfinite(fraction):
        return "all of it"
    return f"{100 * fraction:.3g}%" if fraction < 9.99 else f"{fraction:.3g} times"


# -- Checks ----------------------------------------------------------------------------


def _placed(x: ArrayLike) -> jax.Array:
    """As an array, where it lies; its rows can be picked without an `out_sharding`."""
    x = jnp.asarray(x)
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or isinstance(
        sharding.mesh, AbstractMesh
    ):
        return x
    auto = (AxisType.Auto,) * len(sharding.mesh.axis_names)
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names, axis_types=auto)
    to = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return jax.device_put(x, to)


def _rows(batch: Any, k: int) -> Any:
    """The batch with an axis of micro-batches before the rows."""
    return jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch)


def _without_aux(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The loss alone; nothing is asked of the aux."""

    def loss(*args: Any) -> Any:
        out = fun(*args)
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            what = f"something of type {type(out).__name__}"
            if isinstance(out, (tuple, list)):
                what = f"a {type(out).__name__} of {len(out)}"
            raise TypeError(
                "fun must return a pair (loss, aux) with has_aux=True, but it "
                f"returned {what}. Return a pair, or leave has_aux out."
            )
        return out[0]

    return loss


def _check(fun: Any, params: Any, batch: Any, num_microbatches: Any, rng: Any) -> int:
    """Returns k, or raises; `value_and_grad` checks the rest."""
    if not callable(fun):
        raise TypeError(
            "fun must be a function of the parameters and the batch, but it is "
            f"{fun!r}. Pass the loss function itself, not its value."
        )
    k = check_num_microbatches(num_microbatches)
    if not jax.tree.leaves(params):
        raise ValueError(
            "params must hold at least one array, but it is a "
            f"{type(params).__name__} without any. Pass the parameters first, then the "
            "batch: two empty gradients agree whatever the loss is."
        )
    check_gradients(params, params, name="params", expected="params")
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not leaves:
        raise ValueError(
            "batch must hold at least one array, but it is a "
            f"{type(batch).__name__} without any. Pass the undivided batch, with the "
            "examples along axis 0."
        )
    for path, leaf in leaves:
        if jnp.ndim(leaf) == 0:
            raise ValueError(
                f"Every leaf of the batch must have a batch axis, but "
                f"{leaf_name(path)} is a scalar. Close over what is not split: lambda "
                "params, batch: loss(params, batch, scalar)."
            )
    if rng is not None and not jax.tree.leaves(rng):
        raise ValueError(
            f"rng must be a PRNG key, or None, but it is {rng!r}. Pass "
            "jax.random.key(seed), for example."
        )
    return k
