"""What is done to the program of a loss before it runs, micro-batch by micro-batch.

    ir           programs as JAX traces them; the one module that knows primitives
    constants    tables that a loss computes of constants alone
    casts        casts of parameters, moved into the scans over them
    products     gradients that are added by the products that compute them
    gathered     parameters that are gathered where they are used
    duplicates   a program in which nothing is computed twice

A pass is a function from programs to programs. Imports `_devices` and the root.
"""
