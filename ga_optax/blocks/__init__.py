"""View by block: a parameter tree as named layers.

A partition says which leaves of a tree make up which block,

    leaves(tree)  =  leaves(block 1)  ∪  ...  ∪  leaves(block n),     disjoint,

so `replace(p, tree, name, select(p, tree, name)) == tree` for every block. If a model
scans over its layers, their parameters are stacked in leaves of shape `[layers, ...]`,
and a block is one index of the leading axis.

`add` is `accumulator.add`, one block at a time. It is for a backward pass that produces
the gradient of one layer after another and has no room for two of them. A micro-step is
complete when every block has been added once. Only then is there an `Accumulator`
again, with a `weight` and a `count` that include the micro-step.
"""

from ga_optax.blocks._micro_step import OpenMicroStep, add
from ga_optax.blocks._partition import Block, Partition, Stacked, partition
from ga_optax.blocks._select import Spec, flatten, replace, select, unflatten
from ga_optax.blocks._summary import BlockReport, BlockRow, norms, not_finite, report

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
