"""Which rule each primitive has. What is not here is computed whole."""

from ga_optax._partition import (
    custom,
    elementwise,
    indexing,
    linear,
    moves,
    nested,
    products,
    randoms,
    reductions,
    shapes,
)
from ga_optax._partition.writer import Rule, Rules

_KNOWN: dict[str, Rule] = {
    **dict.fromkeys(elementwise.NAMES, elementwise.elementwise),
    **dict.fromkeys(
        """reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or
        reduce_xor""".split(),  # noqa: SIM905
        reductions.reduce_,
    ),
    **dict.fromkeys(("argmax", "argmin"), reductions.argument),
    **dict.fromkeys(("psum", "pmax", "pmin"), reductions.collective),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), reductions.cumulative
    ),
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), reductions.along),
    **dict.fromkeys(
        """reduce_window_sum reduce_window_max reduce_window_min
        select_and_scatter_add select_and_gather_add cumred_reduce_window""".split(),  # noqa: SIM905
        reductions.windows,
    ),
    "transpose": shapes.transpose,
    "squeeze": shapes.squeeze,
    "broadcast_in_dim": shapes.broadcast_in_dim,
    "reshape": shapes.reshape,
    "concatenate": shapes.concatenate,
    "stack": shapes.stack,
    "unstack": shapes.unstack,
    "split": shapes.split,
    **dict.fromkeys(("slice", "pad", "rev"), moves.move),
    "tile": shapes.tile,
    "dynamic_slice": shapes.dynamic_slice,
    "dynamic_update_slice": shapes.dynamic_update_slice,
    "dot_general": products.dot_general,
    "conv_general_dilated": products.convolution,
    **dict.fromkeys(
        """cholesky eig eigh householder_product lu lu_pivots_to_permutation
        qr geqrf schur svd tridiagonal_solve""".split(),  # noqa: SIM905
        products.batched(2),
    ),
    "triangular_solve": products.triangular_solve,
    "fft": products.fourier,
    "gather": indexing.gather,
    **dict.fromkeys(
        """scatter scatter-add scatter_add scatter-mul scatter_mul scatter-max
        scatter_max scatter-min scatter_min""".split(),  # noqa: SIM905
        indexing.scatter,
    ),
    "random_bits": randoms.random_bits,
    **dict.fromkeys(
        ("random_wrap", "random_unwrap", "random_seed", "random_fold_in"), randoms.keys
    ),
}

_NESTED: dict[str, Rule] = {
    **dict.fromkeys(("remat2", "remat", "checkpoint"), nested.checkpoint),
    "scan": nested.scan,
    "while": nested.while_,
    "cond": nested.cond,
    "custom_linear_solve": nested.linear_solve,
    "call_hi_primitive": nested.expanded,
    "custom_jvp_call": custom.custom_jvp,
    "custom_vjp_call": custom.custom_vjp,
}

# A rule that is not here would take the rows beyond the last for rows of the batch.
_UNEVEN = elementwise.NAMES | {
    *("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "cumsum"),
    *("sort", "top_k", "transpose", "squeeze", "broadcast_in_dim", "reshape"),
    *("concatenate", "stack", "unstack", "split", "slice", "pad", "rev"),
    *("dynamic_slice", "dot_general", "conv_general_dilated", "gather"),
    *("cholesky", "eigh", "lu", "qr", "svd", "triangular_solve", "fft"),
    *("random_bits", "random_wrap", "random_unwrap", "random_fold_in"),
}

RULES = Rules(
    _KNOWN,
    linear.linear,
    _NESTED,
    dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), nested.opened),
    custom.passed_on,
    _UNEVEN,
)
