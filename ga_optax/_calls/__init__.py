"""The functions that run inside a call, `value_and_grad` first, and their arguments.

    functions  `value_and_grad`, `microbatch`, `batch_dependencies`
    separate   `accumulate`: micro-batches, each by itself
    engine     the stations of a call, and a call as one equation: begin here

    options    the options of all functions, in one record
    call       the arguments of one call, by role, and its results
    batches    the rows of the arguments, and whether k divides them
    rows       the rows of each micro-batch, and of results
    regions    what runs in a `jax.shard_map` over the data axes
    undivided  all rows at once, what does not fit, and advice

Imports `_window`, `_loop`, `_partition`, `_passes`, `_devices` and the root.
"""
