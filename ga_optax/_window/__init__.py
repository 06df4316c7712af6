"""A loss whose rows meet, level by level: micro-batches are devices in time.

A program of a micro-batch, with collectives over an axis of the window, runs as devices
would run it, in the memory of one micro-batch and of what the collectives carry. A
module for each step:

    flat      one list of equations, which shows every collective
    schedule  a level for each value: how many collectives are on the longest way to
              it. Values that no parameter changes, such as a token count, come first
    meetings  the collectives by which rows meet
    costs     the bytes of equations; `cuts`, the smallest values between two parts
    stages    the loops that a schedule becomes
    pieces    what micro-batches share, in pieces along an axis of its own
    room      the residuals that stay, and those that are filled again
    kept      the residuals of a window that goes forward alone
    levels    a level there and back: one scan over the micro-batches each; the
              cotangents of buffers are gradients, as those of parameters are
    run       the chain: buffers go from level to level, and cotangents come back
    report    what runs, in words

A collective fills a *buffer*: a sum or an extremum over the window, or the stack of its
operands. The result of the collective is a *view* of the buffer. Once the buffers of
earlier levels are filled, the micro-batches are independent again.

By default no part of `fun` runs more than three times forward and once backward; or
twice forward, if the residuals for that take at most the bytes of one micro-batch's
step, or 1 MiB. `residual_bytes` is another limit. If the plan may take more than the
undivided batch, both programs are counted by one ruler (`_passes.alive`); plans with
less room are tried, and if none takes less, the undivided batch runs.

Imports `_loop`, `_partition`, `_passes`, `_devices` and the root.
"""
