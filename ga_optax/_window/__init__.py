"""A loss whose rows meet, level by level: micro-batches are devices in time.

A program of a micro-batch, with collectives over an axis of the window, is run as
devices would run it, in the memory of one micro-batch and of what these carry. A module
for each step:

    read      one flat list of equations, which shows every collective; `rules` says
              what is known of each of them
    schedule  a level for each value: how many collectives are on the longest way to it;
              what does not depend on the parameters, such as a token count, comes first
    shared    what all micro-batches share is computed once
    counts    at which levels each equation runs, kept up to date
    kept      what later levels would compute again is kept
    room      as far as there is room: what stays, and what is filled again
    stages    a scan in whose body rows meet on the side is a scan for each level
    forward   fills the buffers of a level: one scan over the micro-batches
    backward  the loss, then level by level: a `Loop` each; the cotangents of buffers
              are gradients like those of parameters
    after     results that need no rows, from buffers, once

A collective fills a *buffer*: a sum or an extremum over the window, or the stack of its
operands. Its result is a *view* of that buffer. Once the buffers below a level are
filled, the micro-batches are independent again. `cost` and `cut` say what is worth
keeping, `values` evaluates the program, and `run` is the way through. `passes` lists
what runs, stage by stage; `levels` says what was decided, and `plans` shows it.

By default no part of `fun` runs more than three times forward and once backward, or
twice if what has to be kept for that is at most what one micro-batch's step takes, or
1 MiB; `residual_bytes` is another limit.

Imports `_loop`, `_partition`, `_passes`, `_devices` and the root.
"""
