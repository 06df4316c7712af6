"""The cost of equations: scalar operations, bytes, and whether they are cheap."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax import accumulator
from ga_optax._partition import is_inexact
from ga_optax._passes import ir, primitives

_LOOPS = ("scan", "while")
_DEEP = 100  # operations for each number that something unknown reads or returns


def is_cheap(equation: core.JaxprEqn) -> bool:
    """True if running an equation again costs little more than reading its results."""
    return all(
        ir.kind(e) not in _LOOPS
        if ir.inner_programs(e)
        else not primitives.row_of(e).is_dear
        for e in ir.within(equation)
    )


def work(equation: core.JaxprEqn) -> float:
    """About how many scalar operations an equation takes."""
    shapes = [
        getattr(x.aval, "shape", ()) for x in (*equation.invars, *equation.outvars)
    ]
    largest = max(map(ir.numbers, shapes), default=0)
    if programs := ir.inner_programs(equation):
        return ir.times(equation) * sum(work(e) for p in programs for e in p.eqns)
    name = equation.primitive.name
    if primitives.row_of(equation).is_exact and primitives.is_linear(equation):
        return 0.0
    if name == primitives.PRODUCT:
        (contracted, _), _ = equation.params["dimension_numbers"]
        return (
            2.0 * ir.numbers(shapes[-1]) * ir.numbers(shapes[0][i] for i in contracted)
        )
    if name == primitives.CONVOLUTION:
        features = shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
        of_one = ir.numbers(shapes[1]) / max(ir.numbers([features]), 1)
        return 2.0 * ir.numbers(shapes[-1]) * of_one
    return float(largest if is_cheap(equation) else _DEEP * largest)


def nbytes(x: Any) -> int:
    """The bytes of a value."""
    return ir.numbers(x.aval.shape) * x.aval.dtype.itemsize


def nbytes_of_sum(x: Any) -> int:
    """The bytes of a sum of such values, in the dtype of sums."""
    dtype = x.aval.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    wide = accumulator.accumulator_dtype(jnp.zeros([], dtype), np.dtype(np.float32))
    return ir.numbers(x.aval.shape) * wide.itemsize


def of_a_step(jaxpr: core.Jaxpr, params: Sequence[Any]) -> int:
    """About the bytes of a micro-batch's step: residuals and gradients.

    Args:
      jaxpr: the program of a micro-batch.
      params: the arguments with respect to which it is differentiated.
    """
    arguments = [*jaxpr.constvars, *jaxpr.invars]
    return residuals(jaxpr.eqns, params, arguments) + sum(map(nbytes, params))


def residuals(
    equations: Sequence[core.JaxprEqn], smooth: Iterable[Any], given: Iterable[Any]
) -> int:
    """About the bytes of the residuals that `jax.vjp` keeps.

    The residuals of a product are its operands; of any other nonlinear function, one
    coefficient for each number of the result.

    Args:
      equations: the program.
      smooth: the arguments that are differentiated.
      given: the values that are stored in any case, and take no more bytes.
    """
    smooth, given = set(smooth), set(given)
    read: dict[Any, int] = {}
    inside = 0
    for e in equations:
        places = [i for i, x in enumerate(e.invars) if ir.is_among(x, smooth)]
        if not places:
            continue
        outs = [x for x in e.outvars if is_inexact(x.aval)]
        smooth.update(outs)
        name, kind = e.primitive.name, ir.kind(e)
        programs = ir.inner_programs(e)
        if kind == "checkpoint":
            read |= {x: nbytes(x) for x in ir.variables(e.invars)}
        elif programs:
            inside += ir.times(e) * max(_inside(e, p, smooth) for p in programs)
        elif primitives.needs_other(e):
            pair = e.invars
            others = [pair[1 - i] for i in places] + [pair[1]] * (name == "div")
            read |= {x: nbytes(x) for x in ir.variables(others)}
        elif not primitives.is_linear(e) and not _communicates(e):
            inside += sum(map(nbytes, outs))
    return inside + sum(n for x, n in read.items() if x not in given)


def _inside(e: core.JaxprEqn, program: core.Jaxpr, outside: set[Any]) -> int:
    """About the bytes of the residuals of a program inside an equation."""
    pairs = zip(program.invars, ir.operands(e, program), strict=False)
    smooth = [x for x, operand in pairs if ir.is_among(operand, outside)]
    given = [*program.constvars, *program.invars]
    if ir.kind(e) == "scan":  # each iteration has another carry
        consts, _, slices = ir.scan_of(e).split(program.invars)
        given = [*program.constvars, *consts, *slices]
    return residuals(program.eqns, smooth, given)


def _communicates(equation: core.JaxprEqn) -> bool:
    return any(isinstance(name, str) for name in ir.axes_of(equation))
