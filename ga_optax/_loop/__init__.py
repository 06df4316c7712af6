"""The loop over micro-batches: one forward and one backward pass, and additions.

It takes a `Step` (what a micro-batch does) and a `Where` (on which devices), and knows
no call.

    step          these two, and the arrays of a loop
    run           a loop on this device, merged over all of them
    loop          the scan itself
    additions     how a gradient gets into its accumulator
    ways          how other results are put together: one record for each way
    in_place      which gradients the backward pass adds itself, and why not all
    sending       gradients that are reduced inside the backward pass
    over_devices  the states of devices, put together
    fences        what keeps a micro-step one program in every grouping
    trees         arrays of given types, which loops and branches need

Imports `_passes`, `_devices` and the root.
"""
