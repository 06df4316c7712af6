"""What equations take: scalar operations, bytes, and which are cheap to run again."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax import accumulator
from ga_optax._passes import ir, known

# They compute nothing.
_LAYOUTS = {*known.MOVES, "expand_dims", "slice", "copy", "copy_p", "name", "iota"}
_LOOPS = ("scan", "while")
_DEEP = 100  # operations for each number that something unknown reads or returns


def is_cheap(equation: core.JaxprEqn) -> bool:
    """Whether running it again costs little more than reading what it returns."""
    return all(
        ir.kind(e) not in _LOOPS
        if ir.inner_programs(e)
        else e.primitive.name in known.CHEAP
        for e in ir.within(equation)
    )


def work(equation: core.JaxprEqn) -> float:
    """About how many scalar operations it takes."""
    shapes = [
        getattr(x.aval, "shape", ()) for x in (*equation.invars, *equation.outvars)
    ]
    largest = max(map(ir.numbers, shapes), default=0)
    if programs := ir.inner_programs(equation):
        inside = sum(work(e) for p in programs for e in p.eqns)
        length = equation.params["length"] if ir.kind(equation) == "scan" else 1
        return length * inside
    name = equation.primitive.name
    if name in _LAYOUTS:
        return 0.0
    if name == known.PRODUCT:
        (contracted, _), _ = equation.params["dimension_numbers"]
        return (
            2.0 * ir.numbers(shapes[-1]) * ir.numbers(shapes[0][i] for i in contracted)
        )
    if name == known.CONVOLUTION:
        features = shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * ir.numbers(shapes[-1]) * ir.numbers(shapes[1]) / max(features, 1)
    return float(largest if is_cheap(equation) else _DEEP * largest)


def nbytes(x: Any) -> int:
    """The bytes of a value."""
    return ir.numbers(x.aval.shape) * x.aval.dtype.itemsize


def nbytes_of_sum(x: Any) -> int:
    """The bytes of a sum of such values."""
    dtype = x.aval.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    wide = accumulator.accumulator_dtype(jnp.zeros([], dtype), np.dtype(np.float32))
    return ir.numbers(x.aval.shape) * wide.itemsize


def of_a_step(jaxpr: core.Jaxpr, params: Sequence[Any]) -> int:
    """About the bytes that a micro-batch's step takes: its residuals and gradients.

    Arguments that the way back reads again take nothing, for they are there anyway.

    Args:
      jaxpr: the program of a micro-batch.
      params: those of its arguments that it is differentiated with respect to.
    """
    return _residuals(jaxpr, set(params)) + sum(map(nbytes, params))


def _residuals(jaxpr: core.Jaxpr, smooth: set[Any]) -> int:
    """The bytes of what the way back of a program reads; `smooth` arguments have one.

    What `jax.vjp` keeps, read off the program: for a product its operands, for any
    other function that is not linear one coefficient for each number that it returns.
    """
    smooth, given = set(smooth), {*jaxpr.constvars, *jaxpr.invars}
    read: dict[Any, int] = {}
    inside = 0
    for e in jaxpr.eqns:
        moving = [i for i, x in enumerate(e.invars) if _is_in(x, smooth)]
        if not moving:
            continue
        outs = [x for x in e.outvars if jnp.issubdtype(x.aval.dtype, jnp.inexact)]
        smooth.update(outs)
        name, kind = e.primitive.name, ir.kind(e)
        programs = ir.inner_programs(e)
        if kind == "checkpoint":
            read |= {x: nbytes(x) for x in ir.variables(e.invars)}
        elif programs:
            times = ir.scan_of(e).length if kind == "scan" else 1
            some = [_moving_inside(e, program, moving) for program in programs]
            pairs = zip(programs, some, strict=True)
            inside += times * max(_residuals(p, its) for p, its in pairs)
        elif name in known.OF_TWO:
            pair = e.invars
            others = [pair[1 - i] for i in moving] + [pair[1]] * (name == "div")
            read |= {x: nbytes(x) for x in ir.variables(others)}
        elif name not in known.LINEAR and not _communicates(e):
            inside += sum(map(nbytes, outs))
    return inside + sum(n for x, n in read.items() if x not in given)


def _is_in(x: Any, some: set[Any]) -> bool:
    return ir.is_variable(x) and x in some


def _communicates(equation: core.JaxprEqn) -> bool:
    return any(isinstance(name, str) for name in ir.axes_of(equation))


def _moving_inside(
    equation: core.JaxprEqn, program: core.Jaxpr, moving: Sequence[int]
) -> set[Any]:
    """The arguments of a program inside an equation that some of its operands are."""
    first = len(equation.invars) - len(program.invars)
    return {program.invars[i - first] for i in moving if i >= first}
