"""What XLA made of a step: what fits, and what it communicates.

    plan         the fewest micro-batches that fit
    machines     machines that are not here, by their compilers
    audit        every collective of a compiled step
    hlo          the parser of compiled programs

Imports the root, and of `_passes` what is said of a program.
"""
