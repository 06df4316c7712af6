"""The rule of each primitive. A primitive without a rule is computed whole.

A primitive with a row of dimensions needs no more (`_passes.primitives`). The rules
here are for what a row cannot say; where it says something, they come after it.
"""

from functools import partial

from ga_optax._partition import (
    custom,
    cutting,
    divided,
    factors,
    indexing,
    kernels,
    linear,
    loops,
    moves,
    nested,
    products,
    randoms,
    reductions,
    shapes,
    splits,
)
from ga_optax._partition.writer import Rule, Rules
from ga_optax._passes.divided import NAME, WRITTEN
from ga_optax._passes.primitives import ROWWISE, TABLE

_OWN: dict[Rule, str] = {
    reductions.reduce_: "reduce_sum reduce_max reduce_min reduce_prod reduce_and "
    "reduce_or reduce_xor",
    reductions.argument: "argmax argmin",
    reductions.cumulative: "cumsum cumprod cummax cummin cumlogsumexp",
    reductions.collective: "psum psum_invariant pmax pmin",
    shapes.barrier: "optimization_barrier",
    shapes.reshape: "reshape",
    shapes.tile: "tile",
    moves.move: " ".join(name for name, row in TABLE.items() if row.shifts),
    shapes.dynamic_slice: "dynamic_slice",
    factors.summed: "dot_general",
    products.convolution: "conv_general_dilated",
    products.ragged_dot: "ragged_dot_general",
    indexing.scatter: "scatter scatter-add scatter-sub scatter-mul scatter-max "
    "scatter-min",
    splits.rowwise: ROWWISE,
    randoms.random_bits: "random_bits",
    partial(splits.split, kernels.pallas_call): "pallas_call",
    partial(splits.split, splits.custom_partitioning): "custom_partitioning",
    partial(splits.split, splits.cudnn_attention): "dot_product_attention_fwd_wrapper "
    "dot_product_attention_bwd_wrapper",
}

_NESTED: dict[str, Rule] = {
    "checkpoint": nested.checkpoint,
    "scan": loops.scan,
    "while": loops.while_,
    "cond": nested.cond,
    "custom_linear_solve": nested.linear_solve,
    "shard_map": nested.shard_map,
    "call_hi_primitive": nested.expanded,
    "custom_jvp_call": custom.custom_jvp,
    "custom_vjp_call": custom.custom_vjp,
    NAME: divided.divided,
    WRITTEN: divided.written,
}


_ROWS = {name for name, row in TABLE.items() if row.dims is not None}
_KNOWN: dict[str, Rule] = {
    **dict.fromkeys(sorted(_ROWS), factors.forward),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), reductions.compared),
    **{
        name: factors.before(rule) if name in _ROWS else rule
        for rule, names in _OWN.items()
        for name in names.split()
    },
    "gather": indexing.gather,  # which follows its row by itself
}

RULES = Rules(
    lambda w, e, vs: vs,
    _KNOWN,
    linear.linear,
    _NESTED,
    custom.passed_on,
    cutting.recut,
    cutting.draws,
)
