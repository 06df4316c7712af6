"""`verify`: compares the gradient of k micro-batches with the undivided gradient.

Let G be the gradient of the undivided batch, gᵢ those of its micro-batches, and wᵢ the
weights in use. G should be Σ wᵢ·gᵢ / Σ wᵢ up to rounding. If not, the program of the
loss shows the cause: the loss is no mean of rows; the loss divides by a count, so that
other weights are right; or rows depend on each other, at lines that the report names.

    diagnosis  `verify`, the questions in order, the answers, and the report
    measured   how the loss depends on rows, and both gradients in numbers
"""
