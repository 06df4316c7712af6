"""A function of the whole batch, partitioned over micro-batches: GSPMD in time.

A function is traced once, at all n rows. Its program becomes that of one of k
micro-batches, with collectives over a named axis wherever rows need one another:

    program of fun, [n, ...]  ->  program of a micro-batch, [n / k, ...], + collectives

Rows are followed from the leaves of the batch. Each value has a layout: it is *whole*;
or it has *rows* along one dimension, globally [s, n, ...] and here [s, n / k, ...]; or
it is *partial*, a sum over micro-batches that nothing nonlinear has read yet. An axis
that merely is as long as the batch is never taken for rows. An equation without a
rule gathers the operands and is computed whole, which is right and only takes memory.

    values       the layouts, and a value in one
    axis         the axis of the micro-batches, and collectives over it
    notes        records of equations that are computed whole
    writer       the program of a micro-batch while it is written; changes of layout
    factors      rules that follow from entries of the table of primitives, in `_passes`
    columns      functions of pairs of rows, split along columns where rows would meet
    table        the rules of primitives beside or without a row
    linear, shapes, moves, reductions, products, indexing, randoms, nested, loops,
    custom       the rules, by kind
    derivatives  the program that JAX derives of a function with a custom rule
    attached     such functions inlined, with the cotangents of the rule
    splits       calls that say how they split: one record, one body, readers of records
    kernels      the reader of Pallas kernels: a micro-batch runs a part of the grid
    cutting      rows of a whole value, computed from rows of the operands
    created      rows of arrays that the program creates, such as noise
    divided      `microbatch` in a loss
    labels       the part of each value that a micro-batch holds, for reports
    partitioned  `partition`

Imports `_passes` alone.
"""

from ga_optax._partition.axis import Axis, meeting_of
from ga_optax._partition.linear import slots
from ga_optax._partition.notes import Note, unsaid
from ga_optax._partition.partitioned import (
    Argument,
    Partitioned,
    partition,
)
from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Layout,
    Rows,
    RowsMeet,
    Uneven,
)
from ga_optax._passes.read import is_inexact

__all__ = [
    "PARTIAL",
    "WHOLE",
    "Argument",
    "Axis",
    "Layout",
    "Note",
    "Partitioned",
    "Rows",
    "RowsMeet",
    "Uneven",
    "is_inexact",
    "meeting_of",
    "partition",
    "slots",
    "unsaid",
]
