"""The functions that run inside a call: their arguments, checked once, and their way.

    options       the options of all of them, in one record
    call          one call: its arguments by role
    batches       what of it has rows, how many, and whether they can be divided
    region        a call at top level with a data axis
    results       what `fun` returns, taken apart and put together
    words         keywords that there are elsewhere, calls outside of `jit`, what this
                  JAX lacks

    gradients     `value_and_grad`
    kinds         that of complex losses and integer parameters
    law           that as one equation, which has the derivatives of the law
    rules         rules of the user's that have no second derivatives there
    whole         the gradient of the whole batch: traced, partitioned, run
    advice        what to do about what is computed whole, and when it is said
    layouts       that program, where rows meet in it, and what comes back
    function      `microbatch`
    equation      a call of that as one equation, and what runs it
    dependencies  `batch_dependencies`
    accumulate    `accumulate`: micro-batches, each by itself
    micro_batch   the program of one of those

Imports `_window`, `_loop`, `_partition`, `_passes`, `_devices` and the root.
"""
