"""A loss whose rows meet, level by level: micro-batches are devices in time.

A program of a micro-batch, with collectives over an axis of the window, runs as devices
would run it, in the memory of one micro-batch and of what the collectives carry. A
module for each step:

    flat      one list of equations, which shows every collective
    schedule  a level for each value: how many collectives are on the longest way to
              it. Values that no parameter changes, such as a token count, come first
    room      the residuals that stay, and those that are filled again
    levels    a level there and back: one scan over the micro-batches each; the
              cotangents of buffers are gradients, as those of parameters are
    run       the chain: buffers go from level to level, and cotangents come back; the
              list of its stages, which reports print

A collective fills a *buffer*: a sum or an extremum over the window, or the stack of its
operands. The result of the collective is a *view* of the buffer. Once the buffers of
earlier levels are filled, the micro-batches are independent again.

By default no part of `fun` runs more than three times forward and once backward; or
twice forward, if the residuals for that take at most the bytes of one micro-batch's
step, or 1 MiB. `residual_bytes` is another limit. If a window is counted to take more
than the undivided batch, that runs.

Imports `_loop`, `_partition`, `_passes`, `_devices` and the root.
"""
