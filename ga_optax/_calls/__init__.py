"""The functions that run inside a call: their arguments, checked once, and their way.

    engine        the way of a call, station by station: begin here
    options       the options of all functions, in one record
    call          one call: its arguments by role
    devices       its devices, in one record
    batches       which arguments have rows, how many, and whether k divides them
    results       what `fun` returns, taken apart and put together
    rows          which rows a micro-batch has, and those of results
    region        a call at top level with a data axis
    equation      a call as one equation, which has derivatives
    rules         rules of the user's that have no second derivatives there
    advice        what to do about what is computed whole
    words         keywords of other libraries, and calls outside of `jit`

    gradients     `value_and_grad`
    function      `microbatch`
    dependencies  `batch_dependencies`: the report of a plan
    accumulate    `accumulate`: micro-batches, each by itself
    micro_batch   the program of one of those

Imports `_window`, `_loop`, `_partition`, `_passes`, `_devices` and the root.
"""
