"""The fold inside a call: `value_and_grad` and `accumulate`, one jitted step.

The way of a batch: `microbatch` takes the call, `options` and `call` check its
arguments by role, `program` traces `fun` once, `fold` runs a `loop` over the
micro-batches, the devices merge (`over_devices`), and `fold` divides.

    sizes        `microbatch_size`: the number of micro-batches from the rows of a call
    said_once    what is said in the log: what this JAX lacks
    additions    how a gradient gets into its accumulator: one class for each way
    merges       sums of gradients, and new values (fp8) of which the largest is kept
    in_place     which gradients the backward pass adds itself, and why not all
    sending      gradients that are reduced inside the backward pass
    fences       what keeps a micro-step one program in every grouping
    aux_modes    how aux is put together: one class a mode
    results      what `fun` returns, taken apart and put together
    trees        arrays of given types, which loops and branches need
    axis/        collectives over the micro-batches of a window
    whole_batch  a loss as it is written, partitioned by `_partition`
    any_function  the same for any function: `microbatch`
    dependencies  where rows meet, and what that costs: `batch_dependencies`

Imports `_partition`, `_passes`, `_devices` and the root.
"""
