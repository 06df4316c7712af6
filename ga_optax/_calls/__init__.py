"""The functions that run inside a call, `value_and_grad` first, and their arguments.

    engine              the stations of a call: begin here
    options             the options of all functions, in one record
    call                the arguments of one call, by role
    devices             the devices of a call, in one record
    batches             the rows of the arguments, and whether k divides the rows
    results             loss, carry and aux, taken apart and put together
    rows                the rows of each micro-batch, and of results
    region              a call at top level with a data axis
    equation            a call as one equation, which has derivatives
    second_derivatives  custom rules, which have no second derivatives in a window
    advice              advice on code that is computed for all rows
    words               keywords of other libraries, and calls outside of `jit`

    gradients           `value_and_grad`
    function            `microbatch`
    dependencies        `batch_dependencies`: the report of a plan
    accumulate          `accumulate`: micro-batches, each by itself
    micro_batch         the program of one micro-batch of `accumulate`

Imports `_window`, `_loop`, `_partition`, `_passes`, `_devices` and the root.
"""
