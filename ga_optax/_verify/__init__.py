"""Is it the same gradient? Compares k micro-batches with the undivided batch.

Let G be the gradient of the undivided batch, gᵢ those of its micro-batches, and wᵢ the
weights in use. The question is whether G is Σ wᵢ·gᵢ / Σ wᵢ, up to rounding. If it is
not, the program of the loss says why: it is no mean of rows; it divides by a count, so
that the weights are others; or rows meet at these lines.

Each module imports only those above it:

    report        what the user gets, and the page that it prints
    wide          the same function with every float in float64
    gradients     the user's arguments; both gradients, norms and ULPs
    counts        weights as whole numbers, and as code
    proof         how the loss is made of its rows, from its program
    diagnosis     the questions, in order: each one has one cause as its answer
    summary       asks, and puts the report together, with the size of the difference
    api           `verify`
"""

from ga_optax._verify.api import verify
from ga_optax._verify.report import Cause, LeafReport, Report

__all__ = ["Cause", "LeafReport", "Report", "verify"]
