"""What equations take: scalar operations, bytes, and which are cheap to run again."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from ga_optax._passes import ir

# What XLA fuses into what reads it. Anything else is worth keeping.
_NAMES = """
abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh axis_index
bitcast bitcast_convert_type broadcast_in_dim cbrt ceil clamp concatenate conj
convert_element_type copy copy_p cos cosh div dynamic_slice dynamic_update_slice eq erf
erf_inv erfc exp exp2 expand_dims expm1 floor gather ge gt imag integer_pow iota
is_finite le log log1p logistic lt max min mul name ne neg nextafter not
optimization_barrier or pad pow pvary real reduce_and reduce_max reduce_min reduce_or
reduce_precision reduce_prod reduce_sum rem reshape rev round rsqrt scatter scatter-add
select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split
sqrt square squeeze stop_gradient sub tan tanh transpose xor
"""
_CHEAP = frozenset(_NAMES.split())
_MOVES = (
    *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice"),
    *("copy", "copy_p", "name", "stop_gradient", "iota", "optimization_barrier"),
)
_LOOPS = ("scan", "while")
_DEEP = 100  # operations for each number that something unknown reads or returns


def is_cheap(equation: core.JaxprEqn) -> bool:
    """Whether running it again costs little more than reading what it returns."""
    programs = ir.inner_programs(equation)
    if not programs:
        return equation.primitive.name in _CHEAP
    loops = ir.kind(equation) in _LOOPS
    return not loops and all(is_cheap(e) for p in programs for e in p.eqns)


def work(equation: core.JaxprEqn) -> float:
    """About how many scalar operations it takes."""
    shapes = [
        getattr(x.aval, "shape", ()) for x in (*equation.invars, *equation.outvars)
    ]
    largest = max((math.prod(shape) for shape in shapes), default=0)
    if programs := ir.inner_programs(equation):
        inside = sum(work(e) for p in programs for e in p.eqns)
        length = equation.params["length"] if ir.kind(equation) == "scan" else 1
        return length * inside
    name = equation.primitive.name
    if name in _MOVES:
        return 0.0
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * math.prod(shapes[-1]) * math.prod(shapes[0][i] for i in contracted)
    if name == "conv_general_dilated":
        features = shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(shapes[-1]) * math.prod(shapes[1]) / max(features, 1)
    return float(largest if is_cheap(equation) else _DEEP * largest)


def nbytes(x: Any) -> int:
    """The bytes of a value."""
    return math.prod(x.aval.shape) * x.aval.dtype.itemsize


def of_a_step(closed: Any, params: Sequence[Any], rest: Sequence[Any]) -> int:
    """The bytes that one micro-batch's step takes: its residuals and its gradients.

    Args:
      closed: the program of a micro-batch, the loss first, without collectives.
      params: its first arguments, to differentiate with respect to.
      rest: the others.
    """

    def residuals(params: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        def loss(*params: Any) -> Any:
            args = *params, *rest
            return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)[0]

        return jax.tree.leaves(jax.vjp(loss, *params)[1])

    kept = jax.eval_shape(residuals, list(params), list(rest))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in (*kept, *params))
