"""Meshes, shardings and collectives.

    meshes       questions about meshes, axes and shardings; `DataAxis`; `By`: who
                 distributes what is computed
    record       the devices of a call: what is known of the mesh
    collectives  everything that communicates; the rows of each micro-batch; sums in
                 one order on any number of devices

Questions about shardings belong here. Imports the root's modules alone.
"""
