"""Memory and communication of a compiled step.

    plan         the fewest micro-batches that fit into memory
    machines     compilers of machines that this process does not have
    audit        every collective of a compiled step
    hlo          the parser of compiled programs

Imports the root, and `_passes.log`.
"""
