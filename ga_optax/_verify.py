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
The fit never holds the gᵢ: a linear equation between vectors holds between their images
under any linear map too, so each gradient is reduced to a sketch of max(4096, 8·k)
numbers, which keeps the rank of k vectors with probability near 1, and lengths to a few
per cent. Gradients that are no larger than that are kept whole. Weights and factors
that were fitted are then checked on the whole tree.

References:
  K. Clarkson, D. Woodruff, "Low-Rank Approximation and Regression in Input Sparsity
  Time", J. ACM 63(6), 2017, section 2 (the sketch).
"""

import copy
import dataclasses
import enum
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ga_optax import _microbatch
from ga_optax.accumulator import check_gradients, check_weight, leaf_name

__all__ = ["Cause", "LeafReport", "Report", "verify"]

# Half of float64's 52 binary digits. No algorithm that loses half its digits would
# train, and 2⁻²⁶ = 1.5e-8 is below the 6e-8 to which float32 rounds.
_TOLERANCE = 2.0**-26
# A leaf whose gradient is zero but for rounding (the bias before a normalisation) has
# no digits right. Three quarters of them are asked of it, relative to the whole
# gradient.
_FLOOR = 2.0**-39
# D counts as rounding if it is at most this many times the change that a new rounding
# makes in it. Two independent roundings differ by √2 times their size; a fact differs
# by a few times the narrow dtype's precision.
_NOISE = 4.0
# Singular values below this, relative to the largest, count as zero in a fit.
_RANK = 1e-11


class Cause(enum.Enum):
    """Why an accumulated gradient differs from the undivided one, or that it does not.

    The value of each is its diagnosis.
    """

    EQUAL = "The two gradients are equal, number for number."
    ROUNDING = (
        "The two gradients differ by rounding alone: the same terms were added in "
        "another order."
    )
    SCALE = (
        "The accumulated gradient is too small or too large by a factor that does not "
        "depend on the data: the loss is not a mean over the examples of its batch."
    )
    WEIGHTS = (
        "The micro-batches count in the wrong proportions: the gradient of each is "
        "right, but their mean needs other weights."
    )
    CROSS_EXAMPLE = (
        "The examples of a batch see each other in this loss, so that the loss of a "
        "batch is no combination of the losses of its parts, with any weights."
    )
    RANDOMNESS = (
        "The loss depends on more than its examples: on random numbers, or on the "
        "order or the position of the examples in the batch."
    )
    NOT_FINITE = "A loss or a gradient is not finite: it holds an inf or a NaN."
    UNDETERMINED = (
        "The two gradients differ, and this batch cannot tell why: the parameters are "
        "so few that several causes explain the numbers."
    )


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """How one leaf of the gradient compares.

    Attributes:
      name: its path in the parameters.
      shape: its shape.
      dtype: its dtype, in which `max_ulp` counts.
      max_ulp: how many representable numbers lie between the two gradients, at most
        over the elements. Large next to a zero too, where it means little.
      max_abs: the largest absolute difference of the two gradients in that dtype.
      relative: ‖G - M‖ / ‖G‖ of the leaf in float64, G undivided and M accumulated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    max_ulp: int
    max_abs: float
    relative: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` found; `print` it to read it.

    Attributes:
      ok: whether accumulation gives the undivided batch's gradient: whether the cause
        is `EQUAL` or `ROUNDING`.
      cause: why it does not.
      message: what is wrong, by how much, on which leaf, and what to do: one paragraph.
      weights: the weights that reproduce the undivided batch, Σ wᵢ·gᵢ = G, where the
        cause is `WEIGHTS` or `SCALE`; their ratios are the counts. Otherwise None.
      max_ulp: the largest of the leaves; None where the cause is `NOT_FINITE`.
      relative: ‖G - M‖ / ‖G‖ over all leaves, in float64; 0 where both are zero.
      leaves: a `LeafReport` for each leaf, in the order of the tree.
      mend: the line of code that mends it, or what to do where no line can.
      dtype: the narrowest floating dtype in which the loss computed for the diagnosis.
      losses: the undivided batch's loss, and the accumulated one.
      num_microbatches: k.
      batch_size: rows of the undivided batch.
      diagnosis: what is wrong, in sentences.
      extent: how large it is, in sentences.
    """

    ok: bool
    cause: Cause
    message: str
    weights: tuple[float, ...] | None
    max_ulp: int | None
    relative: float
    leaves: tuple[LeafReport, ...]
    mend: str
    dtype: str
    losses: tuple[float, float]
    num_microbatches: int
    batch_size: int
    diagnosis: tuple[str, ...]
    extent: tuple[str, ...]

    def __str__(self) -> str:
        k, rows = self.num_microbatches, self.batch_size
        verdict = "The same gradient" if self.ok else "NOT the same gradient"
        lines = [
            f"{verdict}  ({self.cause.name})",
            "",
            (
                f"Compared: the gradient over one batch of {rows} rows, and the "
                "gradient accumulated over the same rows in "
                f"{k} micro-batch{'es' * (k > 1)} of {rows // k}."
            ),
        ]
        for title, paragraphs in (
            ("What was found" if self.ok else "What is wrong", self.diagnosis),
            ("How large it is", self.extent),
            ("What to do", (self.mend,)),
        ):
            lines += ["", title, *(f"  {p}" for p in paragraphs)]
        lines = [part for line in lines for part in _wrap(line)]
        if self.leaves:
            lines += ["", *_table(self.leaves)]
        return "\n".join(lines)


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
    effect smaller than four times that counts as rounding. The page then says so.

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
    params, batch = jax.tree.map(jnp.asarray, (params, batch))
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

    progress = _Progress()
    x64 = bool(jnp.result_type(float) == jnp.float64)
    call = _Fun(loss_fun, params, batch, rng, x64)
    with jax.enable_x64(True), progress:
        loss = _Loss(call, progress)
        try:
            check = _Comparison(loss, k, rows, weights)
            native = _Native(loss, accumulated)
        except _NotFiniteError as found:
            return _not_finite(found, k, rows, loss.dtype)
        finding = _agreement(check, native) if check.agrees else _diagnose(check)
    return _report(finding, check, native)


# -- The page --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Finding:
    """A cause, in words: what it means here, and what mends it."""

    cause: Cause
    detail: str
    mend: str
    weights: np.ndarray | None = None
    size: str = ""


def _report(finding: _Finding, check: "_Comparison", native: "_Native") -> Report:
    relative = check.relative()
    leaves = tuple(
        dataclasses.replace(leaf, relative=float(r))
        for leaf, r in zip(native.leaves, relative, strict=True)
    )
    max_ulp = max(leaf.max_ulp for leaf in leaves)
    ok = finding.cause in (Cause.EQUAL, Cause.ROUNDING)
    whole = _ratio(_norm(check.difference), _norm(check.undivided))

    size = []
    if finding.cause is Cause.ROUNDING:
        size.append(
            f"They differ by {native.relative:.1e} of the gradient's norm, and by at "
            f"most {_count(max_ulp, 'ULP')} (steps between neighbouring numbers of "
            f"the dtype), on {max(leaves, key=lambda leaf: leaf.max_ulp).name}."
            + " Many ULPs mean an element near zero, where the terms cancel."
            * (max_ulp > 1000)
        )
    elif not ok:
        worst = leaves[int(np.argmax(relative))]
        off = f"{_percent(whole)} of the undivided gradient"
        if math.isinf(whole):
            off = f"{_norm(check.difference):.2g}, where the undivided gradient is zero"
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
            f"{accumulated:.6g} accumulated. A term without gradient is no mean."
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


def _not_finite(found: "_NotFiniteError", k: int, rows: int, dtype: str) -> Report:
    detail = f"The first is {found.where}."
    mend = (
        "Find out where the loss makes it: call fun on that part of the batch inside "
        "`with jax.debug_nans(True):`. To train past it, pass "
        "should_skip_update_fn=ga_optax.drop_window_if_not_finite to MultiSteps."
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


def _table(leaves: tuple[LeafReport, ...]) -> Iterator[str]:
    header = ("leaf", "shape", "dtype", "max ULP", "max |difference|", "relative")
    body = [
        (
            leaf.name.removeprefix("leaf "),
            str(leaf.shape),
            leaf.dtype,
            str(leaf.max_ulp),
            f"{leaf.max_abs:.1e}",
            f"{leaf.relative:.1e}",
        )
        for leaf in leaves
    ]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    for row in (header, *body):
        left = "  ".join(x.ljust(w) for x, w in zip(row[:3], widths, strict=False))
        right = "  ".join(x.rjust(w) for x, w in zip(row[3:], widths[3:], strict=True))
        yield f"{left}  {right}"
    yield "(max ULP and max |difference| in that dtype; relative as in the diagnosis)"


def _wrap(line: str, width: int = 88) -> Iterator[str]:
    """Breaks a line at spaces, and indents what follows as it was."""
    indent = " " * (len(line) - len(line.lstrip()))
    out = ""
    for word in line.split():
        if out and len(indent) + len(out) + 1 + len(word) > width:
            yield indent + out
            out = word
        else:
            out = f"{out} {word}" if out else word
    yield indent + out if out else ""


def _percent(fraction: float) -> str:
    if not math.isfinite(fraction):
        return "all of it"
    return f"{100 * fraction:.3g}%" if fraction < 9.99 else f"{fraction:.3g} times"


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number != 1)}"


# -- What was found --------------------------------------------------------------------


def _agreement(check: "_Comparison", native: "_Native") -> _Finding:
    if _norm(check.terms) == 0:
        return _Finding(
            Cause.EQUAL,
            "All of them are exactly zero, so that anything would agree.",
            "Run verify again at parameters where the gradient is not zero.",
        )
    if all(leaf.max_ulp == 0 for leaf in native.leaves):
        return _Finding(Cause.EQUAL, "", "Nothing.")
    undivided, accumulated = native.errors
    size = ""
    if not check.noisy:
        size = (
            f"Against float64, the undivided gradient is off by {undivided:.1e} and "
            f"the accumulated one by {accumulated:.1e}, relative to its norm."
        )
    return _Finding(Cause.ROUNDING, "", "Nothing.", size=size)


def _diagnose(check: "_Comparison") -> _Finding:
    """Names the cause of a difference that is not rounding."""
    run = check.run
    rows = np.arange(check.rows)
    if not check.same(run.again(), rows, 0):
        return _Finding(
            Cause.RANDOMNESS,
            "Traced a second time, fun gave another gradient for the same batch: it "
            "draws random numbers that are not JAX's, from numpy.random for example.",
            "Pass a key as rng=, and draw with jax.random from the key that fun gets.",
        )
    system = _System(check)
    finding = (
        _scale(check, system) or _weights(check, system) or _constant(check, system)
    )
    if finding is not None:
        return finding

    hidden = "Another cause may hide behind: run verify again with the randomness off."
    if run.call.rng is not None and not check.same(run, rows, 1):
        return _Finding(
            Cause.RANDOMNESS,
            "Another key gives another gradient: dropout, most likely. The "
            "micro-batches draw other random numbers than the undivided batch. That is "
            "as good in training, but it cannot be compared.",
            "Nothing in training. To compare, switch the randomness off (such as "
            "deterministic=True), or give each example a key of its own: put "
            "jax.random.split(key, batch_size) into the batch, and draw under "
            "jax.vmap. " + hidden,
        )
    if not check.same(run, np.roll(rows, check.rows // check.k), 0):
        return _Finding(
            Cause.RANDOMNESS,
            "The same examples in another order give another gradient, so fun knows "
            "the place of an example in the batch: random numbers drawn for the batch "
            "as a whole (dropout with one key), or weights by position.",
            "Give each example its random numbers or its weight with its row: put "
            "jax.random.split(key, batch_size) into the batch, and draw under "
            "jax.vmap. " + hidden,
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
        "load-balancing term of a mixture of experts, a standard deviation over the "
        "batch.",
        "No weight_fn can mend it: each micro-batch sees itself alone. Use statistics "
        "that do not come from the batch (group or layer normalisation, running "
        "averages), or compute that term over the whole batch outside the "
        "accumulated loss, or accept that accumulation trains another loss.",
    )


def _scale(check: "_Comparison", system: "_System") -> _Finding | None:
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
        return _weights_finding(check, np.full(k, 1 / k), np.ones(k, bool))
    if factor == k:
        detail = (
            f"It is {k} times too small, {k} being the number of micro-batches: the "
            "losses of the micro-batches add up to the loss of the batch. Either the "
            "loss is a sum over examples, or it was divided by the number of "
            "micro-batches already, by hand."
        )
        mend = (
            "Return the mean: jnp.mean(...) for jnp.sum(...). If the loss is divided "
            "by the number of micro-batches, take that out: value_and_grad divides."
        )
    elif factor == 1 / k:
        detail = (
            f"It is {k} times too large, {k} being the number of micro-batches: the "
            "loss is divided by the size of its batch once too often."
        )
        mend = "Return jnp.mean(...) as it is, and divide by the batch size no more."
    else:
        detail = f"The undivided gradient is {c:.6g} times the accumulated one."
        mend = (
            "Return jnp.mean(...) over the examples, with no factor that depends on "
            "the size of the batch."
        )
    return _Finding(Cause.SCALE, detail, mend, weights)


def _weights(check: "_Comparison", system: "_System") -> _Finding | None:
    """G = Σ wᵢ·gᵢ with weights that depend on the batch alone."""
    weights, known = system.normalised()
    if weights is None:
        weights, known = system.unnormalised()
    if weights is None or system.ambiguous or not check.reproduces(weights):
        return None
    return _weights_finding(check, weights, known)


def _weights_finding(
    check: "_Comparison", weights: np.ndarray, known: np.ndarray
) -> _Finding:
    k, total = check.k, float(weights.sum())
    share = weights / total
    whole = _whole(share)
    shown = " : ".join(map(str, whole)) if whole else _ratios(share)
    uniform = np.allclose(share, 1 / k, rtol=1e-6, atol=0)
    used = "equally" if check.weights is None else f"as {_ratios(check.share)}"
    detail = (
        f"They count {used} now, and must count as {shown}"
        + (" or a multiple of that" if whole and not uniform else "")
        + "."
    )
    if uniform:
        detail += " So the loss is a plain mean, and needs no weights."
        mend = "Leave weight_fn out."
    else:
        detail += (
            " So the loss is a mean over something that the micro-batches hold unequal "
            "numbers of, tokens that are not padding most likely, and these are the "
            "numbers."
        )
        code = _weight_fn_for(check.run.call.batch, k, share)
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
        detail += (
            f" Beside that the accumulated gradient is too small by a factor "
            f"{total:.6g}:"
            " the loss is divided by a size or a number of micro-batches as well."
        )
        mend += " Then take the other division out of the loss."
    return _Finding(Cause.WEIGHTS, detail, mend, weights)


def _constant(check: "_Comparison", system: "_System") -> _Finding | None:
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


def _ratios(share: np.ndarray) -> str:
    """Weights as ratios to the smallest that is not zero, in six digits."""
    unit = min((s for s in share if s > 1e-9), default=1.0)
    shown = [f"{s / unit:.6g}" if s > 1e-9 else "0" for s in share]
    return " : ".join(shown)


def _whole(share: np.ndarray) -> list[int] | None:
    """The smallest whole numbers in these proportions, of a total up to 100,000."""
    total = np.arange(1, 100_001)
    fits = np.ones(total.shape, bool)
    for s in share:
        scaled = total * s
        fits &= np.abs(scaled - np.round(scaled)) < 1e-6
    if not fits.any():
        return None
    return [round(float(s * total[fits][0])) for s in share]


def _weight_fn_for(batch: Any, k: int, share: np.ndarray) -> str | None:
    """An expression in `batch` whose values for the micro-batches have these ratios."""
    forms = (
        ("{}.sum()", lambda x: x),
        ("({} != 0).sum()", lambda x: x != 0),
        ("({} >= 0).sum()", lambda x: x >= 0),
        ("({} != -100).sum()", lambda x: x != -100),  # PyTorch's ignored label
    )
    for path, leaf in jax.tree_util.tree_flatten_with_path(_rows(batch, k))[0]:
        if not jnp.issubdtype(leaf.dtype, np.number) and leaf.dtype != jnp.bool_:
            continue
        values = np.asarray(leaf).astype(np.float64)
        name = "batch" + jax.tree_util.keystr(path)
        views = [(name, values)]
        if values.ndim >= 3:  # the mask of a shifted sequence, too
            views += [(f"{name}[:, 1:]", values[:, :, 1:])]
        for code, view in views:
            for form, counts in forms:
                counted = counts(view).reshape(k, -1).sum(1).astype(np.float64)
                if (
                    np.isfinite(counted).all()
                    and (counted >= 0).all()
                    and counted.sum() > 0
                    and np.abs(counted / counted.sum() - share).max() < 1e-6
                ):
                    return form.format(code)
    return None


# -- Gradients -------------------------------------------------------------------------


class _NotFiniteError(Exception):
    """The first inf or NaN: where it is, and what is known beside."""

    def __init__(
        self,
        where: str,
        losses: tuple[float, float],
        *,
        only_part: bool = False,
        narrow: bool = False,
    ) -> None:
        super().__init__(where)
        self.where = where
        self.losses = losses
        self.only_part = only_part
        self.narrow = narrow


class _Progress:
    """A line on stderr, where somebody watches and it takes longer than two seconds."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.done = 0
        self.shown = False

    def tick(self) -> None:
        """One more gradient was evaluated."""
        self.done += 1
        seconds = time.monotonic() - self.start
        if seconds > 2 and sys.stderr.isatty():
            self.shown = True
            text = f"\rga_optax.verify: {self.done} gradients, {seconds:.0f} s "
            print(text, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self.shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


class _Fun(NamedTuple):
    """The user's loss and its arguments, in their own dtypes.

    Attributes:
      fun: the loss, without aux.
      params: the parameters, as arrays.
      batch: the undivided batch, as arrays.
      rng: the key, or None.
      x64: whether the caller works under `jax_enable_x64`.
    """

    fun: Callable[..., Any]
    params: Any
    batch: Any
    rng: Any
    x64: bool

    def keys(self, i: int) -> tuple[Any, ...]:
        """What micro-batch i gets after the batch: its key, or nothing."""
        if self.rng is None:
            return ()
        return (jax.tree.map(lambda key: jax.random.fold_in(key, i), self.rng),)

    def gradient_of_rows(self) -> Callable[..., Any]:
        """A function of params, batch, rows and keys: loss and gradient, as leaves."""

        def gradient(params: Any, batch: Any, rows: Any, keys: Any) -> Any:
            def loss(params: Any) -> Any:
                return self.fun(params, jax.tree.map(lambda x: x[rows], batch), *keys)

            value, grads = jax.value_and_grad(loss)(params)
            return value, jax.tree.leaves(grads)

        return gradient


class _Loss:
    """The loss of some rows of the batch and its gradient, in float64 where it can be.

    Gradients come as lists of float64 arrays, in the order of the leaves; complex
    leaves as their real and imaginary parts, stacked.

    Attributes:
      dtype: the narrowest floating dtype that is computed in.
      eps: its precision.
      note: what a reader has to know about that, or nothing.
      params: the parameters, in the dtype to evaluate at.
    """

    def __init__(self, call: _Fun, progress: _Progress) -> None:
        self.call, self.progress = call, progress
        self.compiled = jax.jit(call.gradient_of_rows())
        paths = jax.tree_util.tree_flatten_with_path(call.params)[0]
        self.names = [leaf_name(path) for path, _ in paths]
        self.num_rows = jax.tree.leaves(call.batch)[0].shape[0]
        self.params, self.batch = _wide(call.params), _wide(call.batch)
        self.x64 = True
        self.note = ""
        try:
            narrow = self.narrowest()
        except Exception as error:
            # Any: the code is the user's, and it did trace in its own dtypes before.
            self.params, self.batch, self.x64 = call.params, call.batch, call.x64
            narrow = self.narrowest()
            reason = str(error).strip().split("\n")[0][:100]
            self.note = (
                f"The loss does not run in float64 ({type(error).__name__}: {reason}), "
                f"so it was computed as it is, in {narrow.name}; effects as small as "
                "its rounding cannot be told from it."
            )
        if self.x64 and narrow != np.float64:
            self.note = (
                f"The loss casts to {narrow.name} inside, so the diagnosis is no more "
                "precise than that; effects as small as its rounding cannot be told "
                "from it."
            )
        self.dtype, self.eps = narrow.name, float(jnp.finfo(narrow).eps)

    def again(self) -> "_Loss":
        """The same loss, to be traced afresh."""
        other = copy.copy(self)
        other.compiled = jax.jit(self.call.gradient_of_rows())
        return other

    def narrowest(self) -> np.dtype:
        """The coarsest floating dtype that the loss and its gradient compute in."""
        rows = np.arange(self.num_rows, dtype=np.int32)
        with jax.enable_x64(self.x64):
            jaxpr = jax.make_jaxpr(self.call.gradient_of_rows())(
                self.params, self.batch, rows, self.call.keys(0)
            )
        dtypes = {np.dtype(np.float64), *_floating(jaxpr.jaxpr)}
        return max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))

    def gradient(
        self, rows: np.ndarray, key: int = 0, params: Any = None
    ) -> tuple[float, list[jax.Array]]:
        """Loss and gradient of these rows, with the key of micro-batch `key`."""
        params = self.params if params is None else params
        with jax.enable_x64(self.x64):
            value, grads = self.compiled(
                params, self.batch, rows.astype(np.int32), self.call.keys(key)
            )
        self.progress.tick()
        grads.reverse()  # Leaf by leaf, so that there are never two copies of all.
        return float(value), [_real(grads.pop()) for _ in range(len(grads))]

    def nearby(self, size: float, seed: int) -> Any:
        """The parameters, each moved by a random part of itself, at most `size`."""
        with jax.enable_x64(self.x64):
            return _moved(self.params, jax.random.key(seed), size)


@jax.jit
def _moved(params: Any, key: jax.Array, size: ArrayLike) -> Any:
    leaves, structure = jax.tree.flatten(params)
    moved = []
    for i, x in enumerate(leaves):
        part = jax.random.uniform(jax.random.fold_in(key, i), x.shape, jnp.float32)
        part = (size * (2 * part - 1)).astype(x.dtype)
        # A zero does not move by a part of itself.
        moved.append(jnp.where(x == 0, part, x * (1 + part)))
    return jax.tree.unflatten(structure, moved)


@jax.jit
def _wide(tree: Any) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x.astype(jnp.float64)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return x.astype(jnp.complex128)
        return x

    return jax.tree.map(cast, tree)


def _real(x: jax.Array) -> jax.Array:
    """A leaf in float64; of a complex one, its two parts."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    return x if x.dtype == jnp.float64 else x.astype(jnp.float64)


def _floating(jaxpr: Any) -> Iterator[np.dtype]:
    """The floating dtypes of everything that a program computes."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                yield np.dtype(jnp.finfo(dtype).dtype)
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(parameter, "eqns"):
                yield from _floating(getattr(parameter, "jaxpr", parameter))


@functools.partial(jax.jit, donate_argnums=0)
def _add_scaled(
    total: list[jax.Array], tree: list[jax.Array], factor: ArrayLike
) -> list[jax.Array]:
    return [t + factor * x for t, x in zip(total, tree, strict=True)]


@jax.jit
def _squares(tree: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.sum(x * x) for x in tree])


def _norms(tree: list[jax.Array]) -> np.ndarray:
    """‖x‖ of each leaf."""
    return np.sqrt(np.asarray(_squares(tree)))


def _norm(norms: np.ndarray) -> float:
    return float(np.sqrt((norms**2).sum()))


def _ratio(x: float, y: float) -> float:
    if y:
        return x / y
    return math.inf if x else 0.0


class _Comparison:
    """D, the undivided gradient less the accumulated one, and how large it may be.

    Attributes:
      weights: the weights in use, or None where each micro-batch counts the same.
      share: the weights, divided by their sum.
      undivided: ‖G‖ of each leaf.
      difference: ‖D‖ of each leaf.
      terms: ‖G‖ + Σ |wᵢ|·‖gᵢ‖ of each leaf.
      noise: how much D changes with the roundings inside the loss, of each leaf.
      noisy: whether that had to be measured.
      agrees: whether D is rounding.
      loss, accumulated_loss: of the undivided batch, and over the micro-batches.
    """

    def __init__(self, run: _Loss, k: int, rows: int, weights: np.ndarray) -> None:
        self.run, self.k, self.rows = run, k, rows
        self.weights = None if (weights == 1).all() else weights
        self.share = weights / (weights.sum() or 1.0)
        self.noise = np.zeros(len(run.names))
        difference = self.subtract(self.share, self.run.params, record=True)
        self.difference = _norms(difference)
        self.noisy = not self.agrees and run.eps > np.finfo(np.float64).eps
        if self.noisy:
            other = self.subtract(self.share, run.nearby(2 * run.eps, seed=1))
            minus = np.float64(-1.0)
            self.noise = _norms(_add_scaled(other, difference, minus))

    def part(self, i: int) -> np.ndarray:
        """The rows of micro-batch i."""
        size = self.rows // self.k
        return np.arange(i * size, (i + 1) * size)

    def subtract(
        self, weights: np.ndarray, params: Any, *, record: bool = False
    ) -> list[jax.Array]:
        """G - Σ wᵢ·gᵢ, one micro-gradient at a time; a weight of 0 leaves it out."""
        rest = self.gradient(None, params, record)
        terms = _norms(rest)
        if record:
            self.undivided = terms
        for i in np.flatnonzero(weights):
            grads = self.gradient(int(i), params, record)
            terms = terms + abs(weights[i]) * _norms(grads)
            rest = _add_scaled(rest, grads, np.float64(-weights[i]))
            del grads  # before the next one comes
        if record:
            self.terms = terms
        return rest

    def gradient(self, i: int | None, params: Any, record: bool) -> list[jax.Array]:
        """The gradient of micro-batch i or of the whole, checked if `record`."""
        rows = np.arange(self.rows) if i is None else self.part(i)
        value, grads = self.run.gradient(rows, i or 0, params)
        if not record:
            return grads
        if i is None:
            self.loss, self.accumulated_loss = value, 0.0
        else:
            self.accumulated_loss += float(self.share[i]) * value
        where = "of the undivided batch"
        if i is not None:
            where = f"of micro-batch {i} (rows {rows[0]} to {rows[-1]})"
        bad = _first_not_finite(value, grads, self.run, where)
        if bad is not None:
            raise _NotFiniteError(
                self.earliest(bad) if i is None else bad,
                (self.loss, self.accumulated_loss),
                only_part=i is not None,
            )
        return grads

    def earliest(self, bad: str) -> str:
        """Where the first inf or NaN of an undivided batch comes from."""
        for i in range(self.k):
            rows = self.part(i)
            where = f"of micro-batch {i} (rows {rows[0]} to {rows[-1]})"
            value, grads = self.run.gradient(rows, i)
            found = _first_not_finite(value, grads, self.run, where)
            if found is not None and self.k > 1:
                return found
        return bad

    def allowed(self, terms: np.ndarray) -> np.ndarray:
        """How far rounding may move each leaf of a sum of such terms."""
        return _TOLERANCE * terms + _FLOOR * _norm(terms) + _NOISE * self.noise

    @property
    def agrees(self) -> bool:
        return bool((self.difference <= self.allowed(self.terms)).all())

    def relative(self) -> np.ndarray:
        pairs = zip(self.difference, self.undivided, strict=True)
        return np.array([_ratio(d, g) for d, g in pairs])

    def same(self, run: _Loss, rows: np.ndarray, key: int) -> bool:
        """Whether `run` has the undivided gradient for these rows and this key too."""
        rest = self.run.gradient(np.arange(self.rows))[1]
        rest = _add_scaled(rest, run.gradient(rows, key)[1], np.float64(-1.0))
        return bool((_norms(rest) <= self.allowed(self.terms)).all())

    def reproduces(self, weights: np.ndarray) -> bool:
        """Whether Σ wᵢ·gᵢ = G on every leaf, not in a sketch alone."""
        rest = _norms(self.subtract(weights, self.run.params))
        return bool((rest <= self.allowed(self.terms * max(1.0, weights.sum()))).all())


@jax.jit
def _finite(tree: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in tree])


def _first_not_finite(
    value: float, grads: list[jax.Array], run: _Loss, where: str
) -> str | None:
    finite = np.asarray(_finite(grads))
    if not finite.all():
        leaf = int(np.argmin(finite))
        array = np.asarray(grads[leaf])
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        found = array[index]
        if array.ndim > jnp.ndim(jax.tree.leaves(run.params)[leaf]):
            index = index[1:]
        at = f" at index {index}" if index else ""
        loss = "" if math.isfinite(value) else f", and the loss there is {value}"
        return f"the gradient {where}, {run.names[leaf]}{at}: {found}{loss}"
    return None if math.isfinite(value) else f"the loss {where}: {value}"


class _Native:
    """Both gradients as training computes them, in the parameters' own dtypes.

    Attributes:
      leaves: a report for each leaf, without its relative difference.
      relative: ‖G - M‖ / ‖G‖ of the two.
      errors: ‖x - G‖ / ‖G‖ of the undivided and of the accumulated one, G in float64.
    """

    def __init__(self, run: _Loss, accumulated: Callable[..., Any]) -> None:
        call = run.call
        undivided = jax.grad(call.fun)
        rng = () if call.rng is None else (call.rng,)
        with jax.enable_x64(call.x64):
            whole = jax.jit(undivided)(call.params, call.batch, *call.keys(0))
            run.progress.tick()
            parts = jax.jit(accumulated)(call.params, call.batch, *rng)[1]
            run.progress.tick()
        whole, parts = jax.tree.leaves(whole), jax.tree.leaves(parts)
        for where, tree in (
            ("of the undivided batch", whole),
            ("accumulated over the micro-batches", parts),
        ):
            bad = _first_not_finite(0.0, tree, run, where)
            if bad is not None:
                raise _NotFiniteError(bad, (math.nan, math.nan), narrow=True)
        self.leaves = [
            _compare_leaf(name, a, b)
            for name, a, b in zip(run.names, whole, parts, strict=True)
        ]
        exact = run.gradient(np.arange(run.num_rows))[1]
        size = _norm(_norms(exact))
        self.relative = _ratio(math.sqrt(sum(map(_squares_apart, whole, parts))), size)
        self.errors = tuple(
            _ratio(math.sqrt(sum(map(_squares_apart, tree, exact))), size)
            for tree in (whole, parts)
        )


@jax.jit
def _squares_apart(x: jax.Array, y: jax.Array) -> jax.Array:
    """‖x - y‖² of two leaves."""
    return jnp.sum((_real(x) - _real(y)) ** 2)


def _compare_leaf(name: str, a: jax.Array, b: jax.Array) -> LeafReport:
    x, y = np.asarray(a), np.asarray(b)
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    far = np.abs(x.astype(wide) - y.astype(wide))
    return LeafReport(
        name,
        x.shape,
        x.dtype.name,
        int(ulps(x, y).max(initial=0)),
        float(far.max(initial=0.0)),
        0.0,  # known to the comparison in float64
    )


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many representable numbers lie between two arrays, element by element.

    Args:
      a: an array of a floating or complex dtype.
      b: another one, of the same shape and dtype.

    Returns:
      uint64 distances; of a complex number, the larger of its two parts. Both zeros are
      one number. NaN lies beyond inf, as far as its bits say.

    Raises:
      ValueError: where shapes or dtypes differ.
    """
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise ValueError(
            f"ULPs need one shape and one dtype, but these are {a.dtype}{a.shape} and "
            f"{b.dtype}{b.shape}. Cast to the dtype that the question is about."
        )
    if np.iscomplexobj(a):
        return np.maximum(ulps(a.real, b.real), ulps(a.imag, b.imag))

    def order(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
        sign = np.uint64(1 << (8 * x.dtype.itemsize - 1))
        return (bits & sign) != 0, (bits & (sign - np.uint64(1))).reshape(x.shape)

    (a_below, a_size), (b_below, b_size) = order(a), order(b)
    apart = np.maximum(a_size, b_size) - np.minimum(a_size, b_size)
    return np.where(
        a_below.reshape(a.shape) == b_below.reshape(b.shape), apart, a_size + b_size
    )


# -- The fit ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Block:
    """Sketches at one point: the micro-gradients as columns, and the undivided one."""

    columns: np.ndarray
    target: np.ndarray


class _System:
    """What is known about G and the gᵢ, in sketches, as linear equations for weights.

    Weights that depend on the batch alone hold at other parameters too, and between
    neighbouring micro-batches and their union. So, with g' at parameters nearby and gᵢⱼ
    the gradient over the rows of both,

        Σ wᵢ·gᵢ = G,   Σ wᵢ·g'ᵢ = G',   wᵢ·(gᵢⱼ - gᵢ) + wⱼ·(gᵢⱼ - gⱼ) = 0,   Σ wᵢ = 1

    With a single scalar parameter these still are more equations than weights, for
    three micro-batches and more, so that a loss which is no weighted mean does not fit.
    """

    def __init__(self, check: _Comparison) -> None:
        self.check, self.k = check, check.k
        # In units of what rounding may do to each leaf, so that a leaf counts however
        # small its gradient is, and one that is nothing but rounding does not.
        unit = check.allowed(check.terms) / _TOLERANCE
        self.unit = np.where(unit > 0, unit, 1.0)
        self.noise = _NOISE * _norm(check.noise / self.unit)
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
            <= _TOLERANCE * np.linalg.norm(terms, axis=0).sum() + self.noise
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


# -- Checks ----------------------------------------------------------------------------


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
    k = _microbatch.check_num_microbatches(num_microbatches)
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
