"""A loss whose rows meet, level by level: micro-batches are devices in time.

A program of a micro-batch, with collectives over an axis of the window, runs as devices
would run it, in the memory of one micro-batch and of what the collectives carry. A
module for each step:

    flat        one list of equations, which shows every collective; `split_scans`
                makes a scan for each level of a scan in whose body rows meet
    schedule    a level for each value: how many collectives are on the longest way to
                it. Values that no parameter changes, such as a token count, come first.
                `rules` has a buffer for each kind of collective
    shared      values that all micro-batches share are computed once
    residuals   values that later levels would compute again; `counts` tells the loops
                in which each equation runs
    room        the residuals that stay, and those that are filled again
    run         the chain: buffers go from level to level, and cotangents come back
    forward     fills the buffers of a level: one scan over the micro-batches
    backward    takes the cotangents of a level back: a `Loop` for each; the cotangents
                of buffers are gradients, as the gradients of parameters are

A collective fills a *buffer*: a sum or an extremum over the window, or the stack of its
operands. The result of the collective is a *view* of the buffer. Once the buffers of
earlier levels are filled, the micro-batches are independent again. `cost` and `cut`
choose residuals, and `evaluation` evaluates the program. `runs` lists the stages of a
window, which `run` runs, and `report` and `describe` show.

By default no part of `fun` runs more than three times forward and once backward; or
twice forward, if the residuals for that take at most the bytes of one micro-batch's
step, or 1 MiB. `residual_bytes` is another limit.

Imports `_loop`, `_partition`, `_passes`, `_devices` and the root.
"""
