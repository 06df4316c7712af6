"""A function of the whole batch, partitioned over micro-batches: GSPMD in time.

A function is traced once, at all n rows. Its program becomes that of one of k
micro-batches, with collectives over a named axis wherever rows need one another:

    program of fun, [n, ...]  ->  program of a micro-batch, [n / k, ...], + collectives

Rows are followed from the leaves of the batch. Each value has a layout: it is *whole*;
or it has *rows* along one dimension, globally [s, n, ...] and here [s, n / k, ...]; or
it is *partial*, a sum over micro-batches that nothing nonlinear has read yet. An axis
that merely is as long as the batch is never taken for rows. What has no rule gathers
its operands and is computed whole, which is always right and only takes memory.

    values       the layouts, and a value in one
    axis         the axis of the micro-batches, and collectives over it
    notes        what is recorded of equations that are computed whole
    writer       the program of a micro-batch while it is written; changes of layout
    factors      what follows from a row of the table of primitives, in `_passes`
    columns      functions of pairs of rows, split along columns where rows would meet
    table        which rule each primitive has beside or without a row
    linear, shapes, moves, reductions, products, indexing, randoms, nested, loops,
    custom       the rules, by kind
    derivatives  the program that JAX derives of a function with a rule of its own
    attached     such functions in the open, with the cotangents that the rule gives
    splits       calls that say how they split: one record, one body, readers of records
    kernels      the reader of Pallas kernels, of whose grid a micro-batch runs a part
    cutting      a value's rows computed from the rows of what it is made of
    created      rows of what the program creates, such as noise for a generator
    divided      what runs over micro-batches of its own: `microbatch` in a loss
    labels       what a micro-batch holds of each value, for reports
    program      `partition`, which puts these together

Imports `_passes` alone.
"""

from ga_optax._partition.axis import Axis, meeting_of
from ga_optax._partition.linear import slots
from ga_optax._partition.notes import Note
from ga_optax._partition.partitioned import (
    Argument,
    Partitioned,
    partition,
)
from ga_optax._partition.values import PARTIAL, WHOLE, Layout, Rows
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
    "is_inexact",
    "meeting_of",
    "partition",
    "slots",
]
