"""Memory and communication of a compiled step.

    plan         the fewest micro-batches that fit into memory
    sizes        numbers of bytes in words, and back
    machines     compilers of machines that this process does not have
    audit        every collective of a compiled step
    hlo          the parser of compiled programs

Imports the root, and `_passes.log`.
"""
