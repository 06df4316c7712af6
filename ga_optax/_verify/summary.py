"""The report: the answer, and the size of the difference in words."""

import math

import jax
import numpy as np

from ga_optax._checks import named_leaves
from ga_optax._text import unfold
from ga_optax._verify.diagnosis import Evidence, answer
from ga_optax._verify.gradients import Problem, norm, ratio
from ga_optax._verify.report import MOST, SAME, Cause, LeafReport, Report


def answered(problem: Problem) -> Report:
    """Compares the gradients, and returns the report."""
    with jax.enable_x64(True):
        evidence = Evidence(problem)
        cause, detail, fix = answer(evidence)
        ok, leaves = (
            cause in SAME,
            () if cause is Cause.NOT_FINITE else _leaves(evidence),
        )
        relative = ratio(norm(evidence.exact.off), norm(evidence.exact.sizes[None]))
        worst = sorted(leaves, key=lambda leaf: -leaf.max_abs)[:MOST]
        extent = _extent(evidence, worst[0], relative) if leaves else [_NOTHING]
    if fix[0].islower():
        fix = f"""Call ga_optax.value_and_grad(loss, {problem.k}) with the undivided
            batch, which gives the gradient of any loss. For micro-batches, each by
            itself: {fix}"""
        if evidence.proof is not None and evidence.proof.opaque:
            opaque = "; ".join(evidence.proof.opaque)
            detail += (
                f" Nothing is known of {opaque}: the cause follows from numbers alone."
            )
    texts = (cause.value, detail), extent, (fix,), _warnings(evidence, ok)
    diagnosis, extent, [fix], warnings = (
        tuple(map(unfold, filter(None, text))) for text in texts
    )
    of_scale = cause in (Cause.WEIGHTS, Cause.SCALE) and evidence.fitting
    return Report(
        ok=ok,
        cause=cause,
        message=" ".join((*diagnosis, *extent[:1], fix)),
        weights=tuple((of_scale[0] * of_scale[1]).tolist()) if of_scale else None,
        max_ulp=max((leaf.max_ulp for leaf in leaves), default=None),
        relative=relative if leaves else math.nan,
        leaves=leaves,
        worst=tuple(worst),
        fix=fix,
        warnings=warnings,
        dtype=evidence.low.name,
        losses=evidence.losses,
        num_microbatches=problem.k,
        batch_size=problem.rows.size,
        diagnosis=diagnosis,
        extent=extent,
    )


_NOTHING = "No difference can be measured."


def _leaves(evidence: Evidence) -> tuple[LeafReport, ...]:
    names = (name for name, _ in named_leaves(evidence.problem.params))
    relative = map(ratio, evidence.exact.off, evidence.exact.sizes[None])
    both = zip(names, evidence.native.leaves, map(float, relative), strict=True)
    return tuple(LeafReport(name, *figures, part) for name, figures, part in both)


def _extent(evidence: Evidence, leaf: LeafReport, relative: float) -> list[str]:
    """The size of the difference, and remarks on the numbers, in sentences."""
    whole, mean = evidence.losses
    losses = f"Loss: {whole:.6g} undivided, {mean:.6g} accumulated."
    if not evidence.agrees:
        off = f"""The accumulated gradient is off by {_share(relative)} of the undivided
            gradient's norm. The largest difference is {leaf.max_abs:.1e}, on
            {leaf.name}, which is off by {_share(leaf.relative)} of its norm."""
        return [off, losses, evidence.note]
    off = ""
    if leaf.max_abs:
        part = ratio(norm(evidence.native.off), norm(evidence.exact.sizes[None]))
        off = f"""They differ by {_share(part)} of the undivided gradient's norm, and by
            {leaf.max_ulp} ULPs at most on {leaf.name}. An ULP is a step between
            neighbouring numbers; near zero, many of them mean little."""
    if abs(whole - mean) > 1e-3 * abs(whole):
        losses = f"""The gradients agree, but the loss does not. {losses} A term without
            gradient is no mean over the examples."""
    return [off, losses, evidence.note]


def _share(fraction: float) -> str:
    if math.isinf(fraction):
        return "more than all"
    return f"{100 * fraction:.3g}%" if fraction > 1e-3 else f"{fraction:.1e}"


def _warnings(evidence: Evidence, ok: bool) -> list[str]:
    """Mistakes that may be in both gradients, in sentences."""
    proof, k, texts = evidence.proof, evidence.problem.k, []
    if proof is None or k == 1:
        return []
    if not proof.has_rows:
        shapes = sorted(np.shape(x) for x in proof.given)
        data = [x for x in shapes if evidence.problem.rows.size in x]
        example = f", of shape {data[-1]} for example," if data else ""
        texts.append(f"""The loss does not use its batch. Each micro-batch computes the
            same, in {k} times the time and as much memory. Most likely the loss closes
            over the data{example} instead of reading the batch argument.""")
    if k > 2 and proof.is_divided_by(k):  # a half belongs to many losses
        texts.append(f"""The last operation of the loss divides it by {k}, the number of
            micro-batches. PyTorch needs the division, but ga_optax divides itself:
            remove the division, unless it has another reason.""")
    if ok and evidence.problem.weight is None and proof.meetings and proof.in_counts:
        texts.append(f"""The gradients agree because the micro-batches of this batch
            have equal counts; other batches may not. Where:
            {"; ".join(proof.meetings)}. Pass a weight_fn that returns the count, or use
            ga_optax.value_and_grad.""")
    return texts
