"""The loop over micro-batches: one forward and one backward pass, and additions.

A loop takes a `LossProgram` (of one micro-batch) and a `DeviceContext`, and knows no
call.

    loss          these two, and the arrays of a loop
    run           a loop on this device, merged over all devices
    loop          the scan itself
    additions     each gradient is added to an accumulator
    folds         the other results: one record for each way to put results together
    in_place      the gradients that the backward pass adds itself, and the reasons
    sending       gradients that are scattered inside the backward pass
    over_devices  the states of devices, put together
    fences        keep a micro-step one program in every grouping
    trees         arrays of given types

Imports `_passes`, `_devices` and the root.
"""
