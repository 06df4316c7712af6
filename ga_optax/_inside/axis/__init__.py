"""Collectives over the micro-batches of a window: micro-batches are devices in time.

`value_and_grad(fun, k, axis_name=a)` traces `fun` with the named axis `a` bound, and

    value, grads  =  value_and_grad(p -> mean(vmap(fun, axis_name=a)(p, micro-batches)))

to rounding, in the memory of one micro-batch and of what the collectives carry. It
takes three steps, a module each; `rules` holds what is known of each collective.

**Read** (`read`): the program of `fun` becomes one flat list of equations. Jitted
functions are opened, a `jax.checkpoint` is cut at its collectives, and a short scan
with collectives in it is unrolled. Whatever else communicates is an error.

**Plan** (`plan`): each value gets a level: how many collectives are on the longest way
to it. What does not depend on the parameters, such as a token count, comes before all
that does. A collective fills a *buffer*: a sum or an extremum over the window, or the
stack of its operands. Its result is a *view* of that buffer.

**Run** (`run`): once the buffers below a level are filled, the micro-batches are
independent again, and everything is an ordinary loop over them.

    forward, level by level     fill the buffers of the level: one scan
    the loss                    a `Loop`: its parameters are the buffers, too, so that
                                their cotangents are gradients that it accumulates
    back, level by level        a `Loop` over  Σ <cotangent, operand>,  whose gradients
                                are those of the parameters and of earlier buffers

What is stacked stands for itself at higher levels, so an encoder is not run again for
the loss of what it encoded. Three kinds of values are stacked: operands of
`all_gather`; values that a higher level reads, that are no larger than the operands
of its collectives, and that would be computed once more otherwise; and those that
`checkpoint_name(x, axis_name)` marks.

A last level that the loss reads only as a whole (a loss that is a `psum` itself, or a
metric) is no level of its own if its cotangents are known in advance: then its buffers
are filled in the loop that takes the gradients.
"""

from ga_optax._inside.axis.run import fold

__all__ = ["fold"]
