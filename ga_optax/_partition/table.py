"""Which rule each primitive has. What is not here is computed whole."""

from ga_optax._partition import (
    custom,
    cutting,
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
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), reductions.collective),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), reductions.cumulative
    ),
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), reductions.along),
    **dict.fromkeys(
        """reduce_window_sum reduce_window_max reduce_window_min
        select_and_scatter_add select_and_gather_add""".split(),  # noqa: SIM905
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
        """cholesky eig eigh householder_product lu qr geqrf schur svd
        tridiagonal_solve""".split(),  # noqa: SIM905
        products.batched(2),
    ),
    "lu_pivots_to_permutation": products.batched(1),
    "triangular_solve": products.triangular_solve,
    "fft": products.fourier,
    "gather": indexing.gather,
    **dict.fromkeys(
        """scatter scatter-add scatter-sub scatter-mul scatter-max
        scatter-min""".split(),  # noqa: SIM905
        indexing.scatter,
    ),
    "random_bits": randoms.random_bits,
    **dict.fromkeys(
        """random_wrap random_unwrap random_seed random_fold_in
        random_split""".split(),  # noqa: SIM905
        randoms.keys,
    ),
}

_NESTED: dict[str, Rule] = {
    "checkpoint": nested.checkpoint,
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
    *("cholesky", "eig", "eigh", "householder_product", "lu", "qr", "geqrf", "schur"),
    *("svd", "lu_pivots_to_permutation", "tridiagonal_solve", "triangular_solve"),
    *("fft", "random_bits", "random_wrap", "random_unwrap", "random_seed"),
    *("reduce_window_sum", "reduce_window_max", "reduce_window_min", "approx_top_k"),
    *("select_and_scatter_add", "select_and_gather_add", "random_fold_in"),
    "random_split",
}

RULES = Rules(
    _KNOWN,
    linear.linear,
    _NESTED,
    custom.passed_on,
    _UNEVEN,
    cutting.draws,
)
