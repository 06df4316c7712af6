"""Is it the same gradient? Compares k micro-batches with the undivided batch.

Let G be the gradient of the undivided batch, gᵢ those of its micro-batches, and wᵢ the
weights in use. The question is whether

    D  =  G - Σ wᵢ·gᵢ / Σ wᵢ

is zero up to rounding. If it is not, the program of the loss says why: it is no mean of
rows; it divides by a count, so that the weights are others; or rows meet at these
lines. `diagnosis` asks in order, and confirms each answer by numbers.

Each module imports only those above it:

    report        what the user gets, and the page that it prints
    gradients     norms and differences of gradients, and ULPs
    wide          the same function with every float in float64
    problem       the user's arguments, and how the batch is divided; evaluates the loss
                  in float64, if it can, and shows the progress
    comparison    D, and whether it is rounding, or what is not finite; both gradients
                  in training
    counts        weights as whole numbers, and as code
    proof         how the loss is made of its rows, from its program
    promises      whether what `rowwise` promises is so
    program       what that shows although the gradients are equal
    diagnosis     the questions, in order: each one has one cause as its answer
    summary       asks, and puts the report together, with the size of the difference
    api           `verify`
"""

from ga_optax._verify.api import verify
from ga_optax._verify.report import Cause, LeafReport, Report

__all__ = ["Cause", "LeafReport", "Report", "verify"]
