"""Puts a report together: the finding, and how large the difference is, in words."""

import math
from typing import Any

import jax

from ga_optax._text import unfold
from ga_optax._verify.comparison import Comparison, Native, NotFiniteError
from ga_optax._verify.diagnosis import Finding, diagnose, not_finite
from ga_optax._verify.gradients import norm
from ga_optax._verify.problem import Problem
from ga_optax._verify.program import warnings
from ga_optax._verify.proof import prove
from ga_optax._verify.report import MOST, SAME, Cause, Report


def answered(problem: Problem) -> Report:
    """Compares, and says what was found."""
    with jax.enable_x64(True), problem.progress:
        proof = prove(problem)
        try:
            native = Native(Comparison(problem))
            finding = diagnose(native, proof)
        except NotFiniteError as error:
            finding, sizes = not_finite(error), ["No difference can be measured."]
            figures: Any = {"dtype": problem.low.name, "losses": error.losses}
        else:
            sizes, figures = _sizes(finding, native), _figures(native)
        said = warnings(proof, finding.cause in SAME)
    diagnosis = tuple(filter(None, (finding.cause.value, unfold(finding.detail))))
    extent, fix = tuple(map(unfold, filter(None, sizes))), unfold(finding.fix)
    return Report(
        ok=finding.cause in SAME,
        cause=finding.cause,
        message=" ".join((*diagnosis, extent[0], fix)),
        weights=finding.weights,
        fix=fix,
        warnings=tuple(map(unfold, said)),
        num_microbatches=problem.k,
        batch_size=problem.batch_size,
        diagnosis=diagnosis,
        extent=extent,
        **figures,
    )


def _figures(native: Native) -> dict[str, Any]:
    """The numbers of a report."""
    comparison = native.comparison
    return {
        "dtype": comparison.problem.low.name if comparison.noisy else "float64",
        "losses": comparison.losses,
        "max_ulp": native.max_ulp,
        "relative": comparison.relative_norm,
        "leaves": native.leaves,
        "worst": native.worst[:MOST],
    }


def _sizes(finding: Finding, native: Native) -> list[str]:
    """How large the difference is, in sentences."""
    comparison = native.comparison
    losses = _losses(finding.cause, *comparison.losses)
    note = comparison.problem.note if comparison.noisy else ""
    return [_difference(finding.cause, native), finding.extent, losses, note]


def _difference(cause: Cause, native: Native) -> str:
    """How far the gradients are apart; nothing if they are equal."""
    comparison = native.comparison
    if cause is Cause.EQUAL:
        return ""
    if not comparison.agrees:
        off = _of_norm(norm(comparison.difference), comparison.relative_norm)
        leaf = native.worst[0]
        return f"""The accumulated gradient is off by {off}, the most on {leaf.name}:
            {_share(leaf.relative)}."""
    off = _of_norm(native.distance, native.relative)
    if cause is not Cause.ROUNDING:
        return f"As training computes them, they differ by {off}."
    leaf = native.worst[0]
    ulps = f"{leaf.max_ulp} ULP{'s' * (leaf.max_ulp != 1)}"
    return f"""They differ by {off}, and by at most {ulps}, on {leaf.name}. An ULP is a
        step between neighbouring numbers; near zero, many of them mean little."""


def _losses(cause: Cause, undivided: float, accumulated: float) -> str:
    values = f"{undivided:.6g} undivided, {accumulated:.6g} accumulated."
    if cause not in SAME or abs(undivided - accumulated) <= 1e-3 * abs(undivided):
        return f"Loss: {values}"
    return f"""The gradients agree, but the loss does not: {values} Some term of it that
        has no gradient is not a mean over the examples. Training does not notice."""


def _of_norm(distance: float, relative: float) -> str:
    if math.isinf(relative):
        return f"{distance:.1e} in norm, and the undivided gradient is zero"
    return f"{_share(relative)} of the undivided gradient's norm"


def _share(fraction: float) -> str:
    if not math.isfinite(fraction):
        return "all of it"
    return f"{100 * fraction:.3g}%" if fraction > 1e-3 else f"{fraction:.1e}"
