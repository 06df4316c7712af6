"""Changes of the program of a loss before it runs, micro-batch by micro-batch.

    table       the passes in their order
    shared      passes on what micro-batches share: parameters, constants
    products    products that add to a sum before they are rounded
    pullback    `jax.vjp`, which differentiates equal equations once
    shards      sharded arrays without a gradient, gathered where they are used

    jaxprs      reads, rewrites, runs and traces programs
    primitives  the table of primitives: one row a primitive, and its notation
    places      lines of the user's code, also in the log
    effects     side effects: which equations may move
    facts       what passes need to know of a call
    checkpoints  `jax.checkpoint` of another function
    feedback    rings of a scan with its carry
    alive       the most bytes alive in a program, which decides what runs
    rowwise     functions whose rows do not need each other, as the user promises
    associative_scan  JAX's, of which the partition knows what it computes
    equation    a function over micro-batches as one equation, with its derivatives
    new_primitive  equations of JAX that run programs of ours

A pass is a function from programs to programs. Imports `_devices` and the root.
"""
