"""Meshes, shardings and collectives.

    meshes       questions about meshes, axes and shardings; `DataAxis`; the devices of
                 a loop, and `By`: who distributes what it computes
    collectives  everything that communicates; the rows of each micro-batch; sums in
                 one order on any number of devices

Questions about shardings belong here. Imports the root's modules alone.
"""
