"""Meshes, shardings and collectives.

    meshes       questions about meshes, axes and shardings
    membership   splits a batch into micro-batches, and joins them
    collectives  everything that communicates, and `merge_across`
    logical      sums over logical devices: one order on any number of devices
    data_axis    `DataAxis`: the axis that splits the batch, and its options

Questions about shardings belong here. Imports the root's modules alone.
"""
