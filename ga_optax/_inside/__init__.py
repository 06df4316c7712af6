"""The fold inside a call: `value_and_grad` and `accumulate`, one jitted step.

The way of a batch: `microbatch` takes the call, `options` and `call` check its
arguments by role, `program` traces `fun` once, `loop` runs it over the micro-batches,
the devices merge, and `microbatch` divides.

    aux_modes    how aux is put together: one class a mode
    in_place     which gradients the backward pass adds itself, and why not all
    sending      gradients that are reduced inside the backward pass
    axis/        collectives over the micro-batches of a window

Imports `_passes`, `_devices` and the root.
"""
