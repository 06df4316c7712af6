"""View by block: a parameter tree as named layers.

A partition assigns every leaf of a tree to one block,

    leaves(tree)  =  leaves(block 1)  ∪  ...  ∪  leaves(block n),     disjoint,

so `replace(p, tree, name, select(p, tree, name)) == tree` for every block. If a model
scans over its layers, their parameters are stacked in leaves of shape `[layers, ...]`,
and a block is one index of the leading axis.

`add` is `accumulator.add`, one block at a time, for a backward pass that computes the
gradient of one layer after another and has no memory for two gradients. A micro-step is
complete when every block has been added once. Only then does `add` return an
`Accumulator`, whose `weight` and `count` include the micro-step.
"""

from ._by_block import OpenMicroStep, Spec, add, flatten, replace, select, unflatten
from ._partition import Block, Partition, Stacked, partition
from ._summary import BlockReport, BlockRow, norms, not_finite, report

__all__ = [
    "Block",
    "BlockReport",
    "BlockRow",
    "OpenMicroStep",
    "Partition",
    "Spec",
    "Stacked",
    "add",
    "flatten",
    "norms",
    "not_finite",
    "partition",
    "replace",
    "report",
    "select",
    "unflatten",
]
