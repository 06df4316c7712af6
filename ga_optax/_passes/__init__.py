"""Changes of the program of a loss before it runs, micro-batch by micro-batch.

    table          the passes in their order, and `run`, which leaves out one that fails
    facts          what passes know of a call
    constants      tables that a loss computes of constants alone
    casts          casts of parameters, moved into the scans over them
    gathered       parameters that are gathered where they are used
    shards         other sharded arrays that are gathered where they are used
    repeats        equations that are alike, differentiated once
    products       gradients that are added by the products that compute them
    duplicates     a program in which nothing is computed twice

    read           reads a program: its equations, who reads a variable, what is inside
    rewrite        programs with other equations, variables, types or constants
    interpret      runs programs, and traces programs of Python functions
    references     mutable arrays that a program makes (`jax.new_ref`)
    places         the line of the user's code from which an equation is
    primitives     the table of primitives: one row a primitive
    notation       the notation in which a row says how dimensions split
    known          side effects and rules of a program, and code that cannot be read
    log            sentences about a program, for the log
    arrivals       the form in which a gradient comes out of the backward pass
    probe          a check that this JAX writes programs as they are read here
    rowwise        functions whose rows do not need each other, as the user promises
    closures       a function with other values in place of those that it closes over
    transformable  a loop with references, which is transformed as the plain one
    divided        a function over micro-batches as one equation, and its derivatives

A pass is a function from programs to programs. Imports `_devices` and the root.
"""
