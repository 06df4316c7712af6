"""The table of rules, by primitive. A primitive without a rule is computed whole.

A primitive with a row of dimensions needs no more (`_passes.primitives`). The rules
here are for what a row cannot say; where it says something, they come after it.
"""

from functools import partial

from .._passes import equation
from .._passes.primitives import ROWWISE, SCAN, TABLE
from . import (
    custom,
    factors,
    groups,
    indexing,
    linear,
    moves,
    nested,
    passed_on,
    reductions,
    splits,
)
from .created import draws_rows, random_bits, recut
from .writer import Rule, Rules

_OWN: dict[Rule, str] = {
    reductions.reduce_: "reduce_sum reduce_max reduce_min reduce_prod reduce_and "
    "reduce_or reduce_xor",
    reductions.place_of_extremum: "argmax argmin",
    reductions.cumulative: "cumsum",
    linear.barrier: "optimization_barrier",
    moves.reshape: "reshape",
    moves.tile: "tile",
    moves.move: " ".join(name for name, row in TABLE.items() if row.shifts),
    moves.dynamic_slice: "dynamic_slice",
    factors.into_sums: "dot_general psum psum_invariant",
    groups.convolution: "conv_general_dilated",
    groups.ragged_dot: "ragged_dot_general",
    indexing.scatter: "scatter scatter-add scatter-sub scatter-mul scatter-max "
    "scatter-min",
    splits.rowwise: ROWWISE,
    random_bits: "random_bits",
    partial(splits.split_call, splits.pallas_call): "pallas_call",
    partial(splits.split_call, splits.custom_partitioning): "custom_partitioning",
    partial(
        splits.split_call, splits.cudnn_attention
    ): "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper",
}

_NESTED: dict[str, Rule] = {
    "checkpoint": nested.checkpoint,
    "scan": nested.scan,
    "while": nested.while_,
    "cond": nested.cond,
    "custom_linear_solve": nested.linear_solve,
    "shard_map": nested.shard_map,
    "call_hi_primitive": nested.expanded,
    "custom_jvp_call": custom.custom_jvp,
    "custom_vjp_call": custom.custom_vjp,
    equation.NAME: nested.divided,
    equation.WRITTEN: nested.written_gradient,
    SCAN: splits.associative_scan,
}

_ROWS = {name for name, row in TABLE.items() if row.dims is not None}

_KNOWN: dict[str, Rule] = {
    **dict.fromkeys(sorted(_ROWS), factors.along_rows),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), reductions.compared),
    **{
        name: factors.before_factors(rule) if name in _ROWS else rule
        for rule, names in _OWN.items()
        for name in names.split()
    },
    "gather": indexing.gather,  # which follows its row by itself
}

# Each number of a result needs those at the same place along rows, or their sum: it is
# the same whatever rows are next to each other.
_BY_FACTORS = factors.along_rows, reductions.compared

IN_ANY_ORDER = {x for x, rule in _KNOWN.items() if rule in _BY_FACTORS}

IN_ANY_ORDER |= {*_OWN[reductions.reduce_].split(), "dot_general", "iota"}

RULES = Rules(
    lambda w, e, vs: vs,
    _KNOWN,
    linear.linear,
    _NESTED,
    passed_on.passed_on,
    recut,
    reductions.turned_to,
    draws_rows,
)
