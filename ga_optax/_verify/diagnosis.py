"""`verify`: compares two gradients, to name the cause of a difference.

    G  =  Σ wᵢ·gᵢ / Σ wᵢ   to rounding, or a `Cause` why not

`Report` is what `verify` returns; `answer` asks the questions in order.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from .. import _checks, accumulator
from .._calls import batches
from .._calls.call import Call, taken_apart
from .._calls.options import Options
from .._calls.separate import accumulate
from .._checks import is_real, named_leaves
from .._passes import jaxprs
from .._text import ruled, unfold, wrap
from . import measured
from .measured import Comparison, Trained, comparing, norm
from .proof import Proof, prove

# == The report ========================================================================


class Cause(enum.Enum):
    """The cause of a difference between the accumulated and the undivided gradient.

    The value is the diagnosis. `EQUAL` and `ROUNDING` are no difference to mend.
    """

    EQUAL = "The two gradients are equal, number for number."
    ROUNDING = "The two gradients differ only by rounding, as sums in another order do."
    SCALE = "The loss is not a mean over its batch: it depends on the batch size."
    WEIGHTS = "The micro-batches' gradients are right, but their weights are wrong."
    AXIS = "The batch is split along the wrong axis: its examples lie along another."
    CROSS_EXAMPLE = "The rows of a batch depend on each other in this loss."
    PROMISE = "A promise of ga_optax.rowwise does not hold: its rows need each other."
    RANDOMNESS = "The loss depends on random numbers, or on the order of its examples."
    NOT_FINITE = "A loss or a gradient is not finite: it contains an inf or a NaN."
    UNDETERMINED = "Neither the program of the loss nor its numbers tell what is wrong."


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """The comparison of a leaf of the gradient.

    Attributes:
      shape: the shape.
      dtype: the dtype.
      max_ulp: how many numbers of the dtype lie between the two gradients at most, as
        training computes them; many near zero, or if the cause is no rounding.
      relative: ‖G - M‖ of the leaf over ‖G‖ of all leaves, in float64.
    """

    shape: tuple[int, ...]
    dtype: str
    max_ulp: int
    relative: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `verify`; `print` shows it as a page.

    With G, the gradient of the undivided batch, and M, the accumulated one:

    Attributes:
      cause: the cause of the difference.
      detail: what the loss shows of the cause, with the lines of your code; or "".
      extent: the size of the difference, both losses, and the precision in which they
        are compared: float64, unless the loss calls code for other dtypes.
      fix: the line of code that fixes the difference, or other advice.
      warnings: mistakes that may be in both gradients; () for most losses.
      weights: the weights that reproduce the undivided batch, Σ wᵢ·gᵢ = G, if the cause
        is `WEIGHTS` or `SCALE`; their ratios are the counts. Otherwise None.
      relative: ‖G - M‖ / ‖G‖ over all leaves; 0 if both are zero.
      leaves: by name of a leaf, a `LeafReport`.
    """

    cause: Cause
    detail: str
    extent: str
    fix: str
    warnings: tuple[str, ...]
    weights: tuple[float, ...] | None
    relative: float
    leaves: dict[str, LeafReport]

    @property
    def max_ulp(self) -> int:
        """The largest `max_ulp` of the leaves."""
        return max(x.max_ulp for x in self.leaves.values())

    @property
    def ok(self) -> bool:
        """True if accumulation gives the gradient of the undivided batch."""
        return self.cause in (Cause.EQUAL, Cause.ROUNDING)

    @property
    def message(self) -> str:
        """The diagnosis, the size of the difference, and the fix: one paragraph."""
        texts = self.cause.value, self.detail, self.extent, self.fix
        return " ".join(filter(None, texts))

    def table(self) -> str:
        """A table with a line for each leaf."""
        rows = [["leaf", "shape", "dtype", "ULPs", "relative"]]
        for name, x in self.leaves.items():
            figures = str(x.max_ulp), f"{x.relative:.1e}"
            rows.append([name.removeprefix("leaf "), str(x.shape), x.dtype, *figures])
        return "\n".join(ruled(rows, left=(0, 1, 2)))

    def __str__(self) -> str:
        verdict = "the same gradient" if self.ok else "NOT the same gradient"
        lines = [f"Micro-batches, each by itself: {verdict} ({self.cause.name})"]
        for title, texts in {
            "What was found": (self.cause.value, self.detail),
            "How large it is": (self.extent,),
            "What to do": (self.fix,),
            "Warning": self.warnings,
        }.items():
            lines += ["", title] if texts else []
            lines += [line for x in filter(None, texts) for line in wrap(f"  {x}")]
        return "\n".join(lines)


# == `verify` ==========================================================================


@_checks.explains_keywords
def verify(
    fun: Callable[..., Any],
    params: optax.Params,
    batch: Any,
    num_microbatches: int,
    *,
    weight_fn: Callable[..., ArrayLike] | None = None,
    has_aux: bool = False,
    rng: Any = None,
    batch_axes: Any = 0,
) -> Report:
    """Compares the accumulated gradient with the undivided one; names the cause.

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
    >>> print(report.fix.partition(": Pass ")[2].partition(" to ")[0])
    weight_fn=lambda batch: batch['mask'].sum()
    >>> by_count = lambda batch: batch["mask"].sum()
    >>> ga.verify(loss, params, batch, num_microbatches=3, weight_fn=by_count).ok
    True

    Run `verify` once when you switch accumulation on: outside `jit`, with the loss that
    you train with, real parameters and one real batch. `print(report)` prints a page:
    the cause, the size of the difference, and the line of code that fixes it.

    `verify` is for micro-batches, each by itself: `ga_optax.accumulate`, `MultiSteps`,
    or a loop of your own. `ga_optax.value_and_grad` with the whole batch gives the
    undivided gradient of any loss.

    **Proof.** The program of `fun`, traced once at all rows, is partitioned over
    micro-batches, and shows how the loss depends on rows. If no row meets another, the
    loss is a sum of rows, and only the scale can be wrong (`SCALE`). If rows meet in
    numbers without parameters, such as a count of tokens, the part of each micro-batch
    is its weight (`WEIGHTS`), and the page names the line. If rows meet otherwise, no
    weights can help, and the page names all lines (`CROSS_EXAMPLE`). If the program
    draws random numbers for the whole batch, or weighs rows by position, the cause is
    `RANDOMNESS`. A promise of `ga_optax.rowwise` is believed, unless the loss in parts
    is another number (`PROMISE`). Both gradients are compared in numbers, which confirm
    weights and scales, find inf, NaN and rounding, and decide for code that JAX cannot
    see into. Otherwise the cause is `UNDETERMINED`.

    **Warnings.** The report warns of a loss that does not use its batch, and of counts
    that are equal in this batch, but may differ in the next. A factor that is in both
    gradients does not show: a loss that is divided by k, as PyTorch users write it.

    A constant term, such as an L2 penalty on the parameters, is right beside a mean
    loss, weighted or not, because a weighted mean keeps constants. Beside a *sum* the
    term is wrong: the sum needs the factor k, and the constant must not have the
    factor. The cause is then `SCALE`, and the fix is to return a mean.

    **Exactness.** Gradients, losses and weights are compared in float64, where relative
    differences below 2⁻²⁶ count as rounding. The program of `fun` is traced in its own
    dtypes and evaluated with all floats in float64, so a cast to bfloat16 neither
    rounds nor hides anything, and random draws are those of training. Code that
    computes in a low precision alone (Pallas, callbacks) runs as it is, and the page
    says so. A difference below four units of that precision is then `ROUNDING`, and a
    difference below half of the digits `UNDETERMINED`. What `ga_optax.accumulate`
    computes in the dtypes of training has to be finite; `max_ulp` counts the numbers
    between that and the undivided gradient in these dtypes.

    **Memory.** In float64: three gradient trees, two copies of the parameters and one
    of the batch, for any `num_microbatches`. The undivided batch has to fit, too.

    **Time.** In float64, a gradient of the undivided batch and k of micro-batches, and
    once more for each number that may be the weights, if there is a cause to find. In
    the dtypes of training, both gradients once.

    Args:
      fun: the loss, `fun(params, batch)`, or `fun(params, batch, key)` if `rng` is
        given. The loss is a real floating scalar; with `has_aux`, `fun` returns a pair
        of the loss and an aux, which is not compared. Close over all else.
      params: the parameters, a tree of floating or complex leaves.
      batch: the undivided batch, a tree of arrays whose axis 0 are the rows (or as
        `batch_axes` says). Leaves without rows (scalars, tables, those of another
        length than most of the bytes) go whole; `ga_optax.accumulate` has to be told,
        with None in its `batch_axes`. Micro-batch i is the rows from `i·B/k` up to
        `(i + 1)·B/k`, on a mesh, too. Leaves may be PRNG keys, one for each row.
      num_microbatches: k; it must divide the number of rows, for micro-batches have one
        size here.
      weight_fn: a function of one micro-batch (a tree like `batch`) that returns its
        weight, and takes the aux, too, if `has_aux`; pass the one that you train with.
      has_aux: True if `fun` returns a pair.
      rng: a PRNG key, or a tree of them. As in `ga_optax.accumulate`, micro-batch i
        gets `jax.random.fold_in(rng, i)`; the undivided batch is micro-batch 0 of 1.
      batch_axes: where to split, as for `ga_optax.accumulate`.

    Returns:
      A `Report`. Read its `warnings`, too.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced; if
        what `fun` returns does not fit, before anything runs.
    """

    def pair(*args: Any) -> Any:
        """The loss and the weight."""
        loss, _, aux = taken_apart(given, fun(*args), any_aux=True)
        read = (args[1], aux) if has_aux else args[1:2]
        return loss, _checks.check_weight(weight_fn(*read) if weight_fn else 1.0)

    given = Options(
        fun,
        num_microbatches,
        has_aux=has_aux,
        batch_axes=batch_axes,
        weight_fn=weight_fn,
    ).checked()
    _checks.check_not_empty("params", params, "Pass the parameters, then the batch.")
    args = jax.tree.map(_placed, (params, batch))
    k = given.num_microbatches
    axes = _axes(Call.of(given, args, {}, hint=True), k)
    params, batch = jax.tree.map(jnp.asarray, args)
    key = () if rng is None else (rng,)
    options: Any = {"rng_argnums": (2,) * len(key)}
    options["batch_axes"] = jax.tree.structure(batch).unflatten(axes)
    options["weight_fn"] = lambda batch, weight: weight
    run = jax.jit(accumulate(pair, k, has_aux=True, **options))
    # `accumulate` checks the rest, and what `fun` returns, before anything runs.
    value, acc = run(accumulator.init(params), params, batch, *key)
    x64 = jnp.result_type(float) == jnp.float64
    problem = measured.Problem(params, batch, key, pair, k, axes, x64)
    whole = jax.jit(jax.grad(pair, has_aux=True))(*problem.args(None))[0]
    trained = measured.compared(value, whole, accumulator.mean(acc))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return report_of(problem, trained)


def _axes(call: Call, k: int) -> list[int | None]:
    """The axis along which each leaf is split; None for a leaf without the rows."""
    rows, came, _ = batches.counted_rows(call, hint=True)
    if rows % k:
        raise ValueError(
            f"num_microbatches={k} must divide the batch axis, but {came}."
            f"{call.question} verify asks about micro-batches of one size, each by "
            "itself, as accumulate and MultiSteps add them up: use "
            f"{_checks.one_of(_checks.divisors(rows))}. value_and_grad and microbatch "
            "take any number of rows, and give the undivided gradient."
        )
    return [
        None if axis is None or x.shape[axis] != rows else axis
        for x, axis in zip(jax.tree.leaves(call.at(1)), call.batch_axes, strict=True)
    ]


def _placed(x: Any) -> Any:
    """An array with the same sharding, of which a slice needs no `out_sharding`."""
    if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
        mesh = Mesh(x.sharding.mesh.devices, x.sharding.mesh.axis_names)
        return jax.device_put(x, x.sharding.update(mesh=mesh))
    return x


# == Questions and answers =============================================================
# The cause of a difference of the two gradients: questions in order, up to an answer.
#
# The program of the loss has the answers (see `prove`), and numbers confirm them. An
# answer is a cause, a detail and a fix. To add a cause, add a member to `Cause`, advice
# to `_FIXES`, and the question to `answer`, before more general questions.

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

    def __init__(self, problem: measured.Problem, trained: Trained) -> None:
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
        return Cause.ROUNDING if exact.off.any() else Cause.EQUAL, "", ""
    half = float(jnp.finfo(evidence.low).eps) ** 0.5  # of the digits
    is_low = evidence.low != np.float64 and (exact.off <= half * exact.terms).all()
    if proof is None or is_low:
        return Cause.UNDETERMINED, "", ""
    close = {"rel_tol": max(2.0**-12, evidence.tolerance), "abs_tol": 2.0**-30}
    if proof.draws or not math.isclose(proof.loss(), exact.losses[0], **close):
        if proof.promised and not proof.draws:
            return _broken(problem, proof)
        detail = """The loss draws random numbers for the whole batch at once, or new
            ones each time it is traced, and micro-batches draw others. A second cause
            may be hidden."""
        return Cause.RANDOMNESS, detail, ""
    if evidence.fitting is not None:
        return _fits(evidence, *evidence.fitting)
    if not proof.in_counts and (axes := _other_axes(problem)) is not None:
        detail = f"""With batch_axes={axes!r} no row needs another. Most likely axis 0
            is time, as in [time, batch, ...]."""
        return Cause.AXIS, detail, repr(axes)
    if proof.has_place and proof.in_counts:
        detail = "The loss weighs examples by their position in the batch."
        return Cause.RANDOMNESS, detail, ""
    if proof.meetings and proof.in_counts:
        return _several_denominators(problem, proof)
    if proof.meetings:
        detail = f"The lines where rows meet: {'; '.join(proof.meetings)}."
        return Cause.CROSS_EXAMPLE, detail, _OF_ROWS
    detail = "The loss is a sum of rows plus a term that is no sum, such as a penalty."
    return (Cause.SCALE, detail, "") if proof.has_rows else (Cause.UNDETERMINED, "", "")


def _not_finite(problem: measured.Problem, sizes: np.ndarray) -> Answer:
    """The first inf or NaN, of micro-batches first; `sizes` has a line for each."""
    i, j = np.argwhere(~np.isfinite(sizes))[0]
    pairs = zip(jax.tree.leaves(problem.batch), problem.axes, strict=True)
    n = next(x.shape[d] for x, d in pairs if d is not None) // problem.k
    where = f"micro-batch {i} (rows {i * n} to {(i + 1) * n - 1})"
    where = where if i < problem.k else "the undivided batch"
    names = [*(name for name, _ in named_leaves(problem.params)), "the loss"]
    return Cause.NOT_FINITE, f"The first is in {where}, {names[j]}: {sizes[i][j]}.", ""


def _broken(problem: measured.Problem, proof: Proof) -> Answer:
    """A promise that does not hold, with lines."""
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


def _several_denominators(problem: measured.Problem, proof: Proof) -> Answer:
    """A loss of terms that are divided by different numbers, none with parameters."""
    named: dict[str, str] = {}
    for counts in proof.values(proof.counts):
        ratio = " : ".join(f"{x:.6g}" for x in counts)
        code = _code_that_counts(problem, counts / (counts.sum() or 1.0))
        named[ratio] = f"{code or 'a number'} ({ratio} in the micro-batches)"
    others = ["the number of rows, or by none"] * (len(named) == 1)
    detail = f"""One weight cannot count for all terms of the loss, which are divided by
        different numbers: {" and ".join([*named.values(), *others])}. Where:
        {"; ".join(proof.meetings)}."""
    return Cause.CROSS_EXAMPLE, detail, _OF_TERMS


def _code_that_counts(problem: measured.Problem, share: np.ndarray) -> str | None:
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
        half = "dtype='float32'" * (jaxprs.is_inexact(leaf) and leaf.dtype.itemsize < 4)
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


def _other_axes(problem: measured.Problem) -> Any:
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


_OF_ROWS = """Use statistics of one row, as layer normalisation does; train on the mean
    itself, without a root or logarithm of it; put rows that belong together into one
    row, [batch, time, ...]; give a row that does not count weight 0; put
    ga_optax.rowwise around code that JAX cannot see into, if its rows do not need each
    other."""

_OF_TERMS = """Divide all terms by one of these numbers; or accumulate each term into an
    accumulator of its own, with its denominator as the weight_fn, and add the means."""

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
    Cause.CROSS_EXAMPLE: "No weight_fn can fix it. {}",
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


def report_of(problem: measured.Problem, trained: Trained) -> Report:
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
