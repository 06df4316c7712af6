"""What is known of JAX's primitives, and what a program does beyond its results.

A pass changes equations of these primitives alone, and leaves the others where they
are. What is not known may hold anything in its backward pass: so it is differentiated
by itself to see whether that prints, calls back or communicates.
"""

import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._passes import ir, places

CAST = "convert_element_type"
PRODUCT, CONVOLUTION = "dot_general", "conv_general_dilated"
SUM, SUM_OF_TWO, SCATTER = "reduce_sum", "add_any", "scatter-add"
# They move numbers, one to one or one to many, and so do their transposes.
MOVES = ("transpose", "reshape", "squeeze", "broadcast_in_dim")
# They broadcast an operand, whose gradient is a sum over what it went to.
BROADCASTS = ("add", "sub", "mul", "broadcast_in_dim")
# They round nothing, or as often as the one who reads the result.
EXACT = {
    *("iota", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims"),
    *("slice", "concatenate", "pad", "rev", "select_n", CAST, "copy"),
}
# Their gradients need no operand, and no result.
LINEAR = {*EXACT, SUM, SUM_OF_TWO, "add", "sub", "neg"} - {"select_n"}
# The gradient of an operand needs the other one; that of a divisor both.
OF_TWO = {PRODUCT, CONVOLUTION, "mul", "div"}
# They broadcast their operands.
ELEMENTWISE = {"add", "sub", "mul", "div", "max", "min", "pow"}
CONSTRAINT = "sharding_constraint"
ADD_TO, WRITE, READ_OUT, NEW_REF = "addupdate", "swap", "freeze", "new_ref"

# Parameters that are read or given here, by primitive.
PARAMETERS = {
    "scan": ("length", "reverse", "unroll"),
    "jit": ("in_shardings", "out_shardings", "in_layouts", "donated_invars"),
    "remat2": ("prevent_cse", "policy"),
    PRODUCT: ("dimension_numbers", "precision", "preferred_element_type"),
    CAST: ("new_dtype", "weak_type", "sharding"),
    "broadcast_in_dim": ("shape", "broadcast_dimensions", "sharding"),
    **dict.fromkeys((NEW_REF, ADD_TO, WRITE, READ_OUT), ()),
}

# Those of jax.lax whose transposes are linear and do nothing else.
_NAMES = """
abs acos acosh add add_any after_all all_gather all_gather_invariant
all_gather_reduced all_to_all and approx_top_k argmax argmin asin asinh atan atan2
atanh axis_index bessel_i0e bessel_i1e bitcast_convert_type broadcast_in_dim cbrt ceil
cholesky clamp clz complex concatenate conj conv_general_dilated convert_element_type
copy copy_p cos cosh cumlogsumexp cummax cummin cumprod cumsum digamma div dot_general
dynamic_slice dynamic_update_slice eig eigh empty2 eq eq_to erf erf_inv erfc exp exp2
expand_dims expm1 fft floor gather ge gt hessenberg householder_product igamma
igamma_grad_a igammac imag integer_pow iota is_finite le le_to lgamma log log1p log2
logistic lt lt_to lu max min mul mulhi name ne neg nextafter not one_minus_square
optimization_barrier or pad pbroadcast pcast pmax pmin polygamma polynomial
population_count pow ppermute psum psum2 psum_invariant pvary qr ragged_all_to_all
random_bits random_clone random_fold_in random_gamma random_seed random_split
random_unwrap random_wrap real reduce reduce_and reduce_max reduce_min reduce_or
reduce_precision reduce_prod reduce_scatter reduce_sum reduce_window reduce_window_max
reduce_window_min reduce_window_sum reduce_xor regularized_incomplete_beta rem reshape
reshard rev rng_bit_generator round rsqrt scatter scatter-add scatter-max scatter-min
scatter-mul scatter-sub scatter_add scatter_max scatter_min scatter_mul scatter_sub
schur select_and_gather_add select_and_scatter select_and_scatter_add select_n
sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin
sinh slice sort split sqrt square squeeze stack stop_gradient sub svd tan tanh
threefry2x32 tile top_k transpose triangular_solve tridiagonal tridiagonal_solve
unstack xor zeta
"""
_BUILT_IN = frozenset(_NAMES.split())
# Those that are worth keeping the results of; XLA fuses the others into their readers.
_DEAR = """
approx_top_k cholesky conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum
dot_general eig eigh fft hessenberg householder_product igamma igamma_grad_a igammac lu
polygamma qr random_bits random_gamma ragged_all_to_all reduce_window reduce_window_max
reduce_window_min reduce_window_sum regularized_incomplete_beta rng_bit_generator schur
select_and_gather_add select_and_scatter select_and_scatter_add sort svd threefry2x32
top_k triangular_solve tridiagonal tridiagonal_solve zeta
"""
CHEAP = _BUILT_IN - frozenset(_DEAR.split())
_RUNS = {"custom_jvp_call"}  # its rule is run as JAX differentiates it


def constrained_to(equation: core.JaxprEqn) -> Any:
    """The sharding that an equation asks for; None if it is no such constraint."""
    is_constraint = equation.primitive.name == CONSTRAINT
    return equation.params.get("sharding") if is_constraint else None


def is_known(equation: core.JaxprEqn) -> bool:
    """Whether a pass may move an equation: it and all inside it are known."""
    return all(
        is_built_in(e) or (not e.effects and (ir.kind(e) or e.primitive.name) in _PURE)
        for e in ir.within(equation)
    )


def is_built_in(equation: core.JaxprEqn) -> bool:
    """Whether it is a primitive of `jax.lax` that does nothing but compute."""
    return not equation.effects and equation.primitive.name in _BUILT_IN


_PURE = {"call", "checkpoint", "scan", "while", "cond", *_RUNS}


# -- What a program does beside its results --------------------------------------------


class Reason(NamedTuple):
    """Why something is not done to a program, and the line of the user's code."""

    why: str
    line: str = ""


class Deeds(NamedTuple):
    """What a program does that is not known to be harmless.

    Attributes:
      acts: why its effects could come in another order; None if they cannot.
      bends: why its gradient may not scale with its cotangent; None if it does.
    """

    acts: Reason | None = None
    bends: Reason | None = None

    def __or__(self, other: Any) -> "Deeds":
        return Deeds(self.acts or other.acts, self.bends or other.bends)


_deeds: Any = weakref.WeakKeyDictionary()  # by program


def deeds(jaxpr: core.Jaxpr) -> Deeds:
    """What the program of a loss does, there and back."""
    if jaxpr not in _deeds:
        found = Deeds()
        for equation in jaxpr.eqns:
            if equation.effects or equation.primitive.name not in _BUILT_IN:
                found |= _deeds_of(jaxpr, equation)
        _deeds[jaxpr] = found
    return _deeds[jaxpr]


def _deeds_of(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> Deeds:
    name, found = equation.primitive.name, Deeds()
    line = places.line_of(equation.source_info)
    calls = ir.kind(equation) is not None
    for program in ir.inner_programs(equation) if calls else ():
        found |= deeds(program)
    if equation.effects:
        found |= Deeds(Reason("fun prints, calls back or communicates", line))
    if calls or equation.effects:
        return found
    bends = None
    if name not in _RUNS:
        bends = Reason(f"{name} may have a rule of its own", line)
    try:
        effects = backward(jaxpr, equation).effects
    except Exception as error:  # Any: the rule is the user's.
        why = f"{name} raises {type(error).__name__} if it is differentiated alone"
        return Deeds(Reason(why, line), bends)
    acts = Reason(f"the rule of {name} prints, calls back or communicates", line)
    return Deeds(acts if effects else None, bends)


def backward(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> core.Jaxpr:
    """The program that computes an equation and takes a cotangent back through it."""
    ins = list(dict.fromkeys(ir.variables(equation.invars)))
    smooth = [i for i, x in enumerate(ins) if _is_smooth(x)]
    outs = [x for x in equation.outvars if _is_smooth(x)]

    def run(*values: Any) -> Any:
        def of_smooth(*some: Any) -> list[Any]:
            new = [*values]
            for i, x in zip(smooth, some, strict=True):
                new[i] = x
            return ir.bind(jaxpr, [equation], ins, outs, new)

        out, pullback = jax.vjp(of_smooth, *(values[i] for i in smooth))
        return pullback(list(map(jnp.ones_like, out)))

    closed: Any = jax.make_jaxpr(run)(*(x.aval for x in ins))
    return closed.jaxpr


def _is_smooth(x: Any) -> bool:
    return jnp.issubdtype(getattr(x.aval, "dtype", np.dtype(bool)), jnp.inexact)
