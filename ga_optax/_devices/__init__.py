"""What communicates: meshes, what lies where on them, and collectives.

    meshes       which mesh, which axes, what is sharded or varies: questions
    membership   which rows are in which micro-batch, and back
    collectives  what communicates, and `merge_across`
    logical      sums over logical devices: one order on any number of devices
    data_axis    `DataAxis`: what goes with the axis that splits the batch

Ask here before you look at a sharding yourself. Imports the root's modules alone.
"""
