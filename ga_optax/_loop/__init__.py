"""The loop over micro-batches: one forward and one backward pass, and additions.

A loop takes a `LossProgram` (of one micro-batch) and `Devices`, and knows no
call.

    micro_step  these two, behind fences
    in_place    gradients that the backward pass itself adds
    folds       results of micro-batches, put together
    loop        `run_loop`: the scan, additions of gradients, states of devices

Imports `_passes`, `_devices` and the root.
"""
