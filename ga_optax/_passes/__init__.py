"""What is done to the program of a loss before it runs, micro-batch by micro-batch.

    table          the passes in their order, and `run`, which leaves out what raises
    facts          what they must know of a call
    constants      tables that a loss computes of constants alone
    casts          casts of parameters, moved into the scans over them
    gathered       parameters that are gathered where they are used
    shards         other sharded arrays that are gathered where they are used
    repeats        equations that are alike, differentiated once
    products       gradients that are added by the products that compute them
    duplicates     a program in which nothing is computed twice

    read           what is in a program: what runs it, who reads it, what it takes
    rewrite        programs with other equations, variables, types or constants
    interpret      programs that are run, and that are traced of Python functions
    references     what a program does with the mutable arrays that it makes
    places         which line of the user's code an equation is from
    primitives     what is known of each primitive: one row a primitive
    notation       how a row says what becomes of dimensions
    known          effects and rules of a program, and what hides what it does
    log            what is said of a program in the log
    arrivals       how a gradient comes out of the backward pass
    probe          whether this JAX writes programs as they are read here
    rowwise        functions whose rows do not need each other, as the user promises
    closures       a function with other values in the place of what it closes over
    transformable  a loop with references, which is transformed as the plain one
    divided        a function over micro-batches as one equation, and its derivatives

A pass is a function from programs to programs. Imports `_devices` and the root.
"""
