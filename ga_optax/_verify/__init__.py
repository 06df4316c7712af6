"""Is it the same gradient? Compares k micro-batches with the undivided batch.

Let G be the gradient of the undivided batch, gᵢ those of its micro-batches, and wᵢ the
weights in use. The question is whether

    D  =  G - Σ wᵢ·gᵢ / Σ wᵢ

is zero up to rounding. If it is not, `diagnosis` asks what does give G: c times the
mean of the gᵢ (the loss is a sum), a mean of the gᵢ with other weights (the loss is a
mean over a count that differs between micro-batches), a sum and a constant, the same
examples in another order, or another key. If nothing does, the examples interact.

Each module imports only those above it:

    report        what the user gets, and the page that it prints
    gradients     norms and differences of gradients, and ULPs
    wide          the same function with every float in float64
    problem       the user's arguments, and how the batch is divided
    loss          evaluates the loss in float64, if it can; names the first inf or NaN;
                  shows the progress
    comparison    D, and whether it is rounding
    native        both gradients as training computes them
    fit           which weights of the gᵢ give G
    counts        those weights as whole numbers, and as code
    program       what the program of the loss shows without running it
    dependencies  the lines of the loss where rows depend on each other
    diagnosis     the questions, in order: each one has one cause as its answer
    summary       puts the report together, with the size of the difference
    api           `verify`
"""

from ga_optax._verify.api import verify
from ga_optax._verify.report import Cause, LeafReport, Report

__all__ = ["Cause", "LeafReport", "Report", "verify"]
