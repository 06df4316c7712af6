"""Memory and communication of a compiled step.

    plan   the fewest micro-batches that fit into memory, on this machine or another
    audit  every collective of a compiled step, from its HLO

Imports the root, and `_passes.places`.
"""
