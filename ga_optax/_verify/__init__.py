"""`verify`: compares the gradient of k micro-batches with the undivided gradient.

Let G be the gradient of the undivided batch, gᵢ those of its micro-batches, and wᵢ the
weights in use. G should be Σ wᵢ·gᵢ / Σ wᵢ up to rounding. If not, the program of the
loss shows the cause: the loss is no mean of rows; the loss divides by a count, so that
other weights are right; or rows depend on each other, at lines that the report names.

Each module imports only those above it:

    report        the result, and the page that it prints
    wide          the same function with every float in float64
    gradients     the arguments, and one comparison of both gradients
    proof         how the loss depends on rows, from its program
    diagnosis     the questions in order, the answers, and the report
    api           `verify`
"""

from ga_optax._verify.api import verify
from ga_optax._verify.report import Cause, LeafReport, Report

__all__ = ["Cause", "LeafReport", "Report", "verify"]
