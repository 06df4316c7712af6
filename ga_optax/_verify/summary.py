"""Puts a report together: the answer, and how large the difference is, in words."""

import math

import jax
import numpy as np

from ga_optax._checks import named_leaves
from ga_optax._text import unfold
from ga_optax._verify.diagnosis import Asked, answer
from ga_optax._verify.gradients import Problem, norm, ratio
from ga_optax._verify.report import MOST, SAME, Cause, LeafReport, Report


def answered(problem: Problem) -> Report:
    """Compares, and says what was found."""
    with jax.enable_x64(True):
        asked = Asked(problem)
        cause, detail, fix = answer(asked)
        ok, leaves = cause in SAME, () if cause is Cause.NOT_FINITE else _leaves(asked)
        relative = ratio(norm(asked.exact.off), norm(asked.exact.sizes[None]))
        worst = sorted(leaves, key=lambda leaf: -leaf.max_abs)[:MOST]
        extent = _extent(asked, worst[0], relative) if leaves else [_NOTHING]
    if fix[0].islower():
        fix = f"""Call ga_optax.value_and_grad(loss, {problem.k}) with the undivided
            batch: it gives the gradient of any loss as it is written. For
            micro-batches, each by itself: {fix}"""
        if asked.proof is not None and asked.proof.opaque:
            opaque = "; ".join(asked.proof.opaque)
            detail += f" Nothing is known of {opaque}: this is by numbers alone."
    texts = (cause.value, detail), extent, (fix,), _warnings(asked, ok)
    diagnosis, extent, [fix], warnings = (
        tuple(map(unfold, filter(None, text))) for text in texts
    )
    of_scale = cause in (Cause.WEIGHTS, Cause.SCALE) and asked.fitting
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
        dtype=asked.low.name,
        losses=asked.losses,
        num_microbatches=problem.k,
        batch_size=problem.rows.size,
        diagnosis=diagnosis,
        extent=extent,
    )


_NOTHING = "No difference can be measured."


def _leaves(asked: Asked) -> tuple[LeafReport, ...]:
    names = (name for name, _ in named_leaves(asked.problem.params))
    relative = map(ratio, asked.exact.off, asked.exact.sizes[None])
    both = zip(names, asked.native.leaves, map(float, relative), strict=True)
    return tuple(LeafReport(name, *figures, part) for name, figures, part in both)


def _extent(asked: Asked, leaf: LeafReport, relative: float) -> list[str]:
    """How large the difference is, and what to know of the numbers, in sentences."""
    whole, mean = asked.losses
    losses = f"Loss: {whole:.6g} undivided, {mean:.6g} accumulated."
    if not asked.agrees:
        off = f"""The accumulated gradient is off by {_share(relative)} of the undivided
            gradient's norm, the most on {leaf.name}: {_share(leaf.relative)}."""
        return [off, losses, asked.note]
    off = ""
    if leaf.max_abs:
        part = ratio(norm(asked.native.off), norm(asked.exact.sizes[None]))
        off = f"""They differ by {_share(part)} of the undivided gradient's norm, and by
            {leaf.max_ulp} ULPs at most on {leaf.name}. An ULP is a step between
            neighbouring numbers; near zero, many of them mean little."""
    if abs(whole - mean) > 1e-3 * abs(whole):
        losses = f"""The gradients agree, but the loss does not. {losses} Some term that
            has no gradient is not a mean over the examples."""
    return [off, losses, asked.note]


def _share(fraction: float) -> str:
    if math.isinf(fraction):
        return "more than all"
    return f"{100 * fraction:.3g}%" if fraction > 1e-3 else f"{fraction:.1e}"


# -- A mistake that may be in both gradients -------------------------------------------


def _warnings(asked: Asked, ok: bool) -> list[str]:
    proof, k, found = asked.proof, asked.problem.k, []
    if proof is None or k == 1:
        return []
    if not proof.has_rows:
        shapes = sorted(np.shape(x) for x in proof.given)
        data = [x for x in shapes if asked.problem.rows.size in x]
        of = f", of shape {data[-1]} for example," if data else ""
        found.append(f"""The loss does not use its batch. Each of the {k} micro-batches
            computes the same, which takes {k} times the time and saves no memory. Most
            likely the loss closes over the data{of} instead of reading it from its
            batch argument.""")
    if k > 2 and proof.is_divided_by(k):  # a half belongs to many losses
        found.append(f"""The last operation of the loss divides it by {k}, the number of
            micro-batches. PyTorch needs that, but ga_optax divides itself: remove it,
            unless it has another reason. Both gradients have this factor.""")
    if ok and asked.problem.weight is None and proof.meetings and proof.in_counts:
        found.append(f"""The gradients agree because the micro-batches of this batch
            count alike. Those of another may not. Where: {"; ".join(proof.meetings)}.
            Pass a weight_fn that returns it, or use ga_optax.value_and_grad.""")
    return found
