"""Changes of the program of a loss before it runs, micro-batch by micro-batch.

    table       the passes in their order, and those of parameters
    products    passes on sums of products, constants and equal equations
    shards      sharded arrays without a gradient, gathered where they are used

    jaxprs      reads, rewrites, runs and traces programs
    primitives  the table of primitives: one row a primitive, and its notation
    about       lines of the user's code, the log, side effects, facts of a call
    feedback    rings of a scan with its carry
    rowwise     functions whose rows do not need each other, as the user promises
    equation    a function over micro-batches as one equation, and its derivatives

A pass is a function from programs to programs. Imports `_devices` and the root.
"""
