"""What equations take: scalar operations, bytes, and which are cheap to run again."""

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
    """Whether running it again costs little more than reading what it returns."""
    return all(
        ir.kind(e) not in _LOOPS
        if ir.inner_programs(e)
        else not primitives.row_of(e).is_dear
        for e in ir.within(equation)
    )


def work(equation: core.JaxprEqn) -> float:
    """About how many scalar operations it takes."""
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
    """The bytes of a sum of such values."""
    dtype = x.aval.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    wide = accumulator.accumulator_dtype(jnp.zeros([], dtype), np.dtype(np.float32))
    return ir.numbers(x.aval.shape) * wide.itemsize


def of_a_step(jaxpr: core.Jaxpr, params: Sequence[Any]) -> int:
    """About the bytes that a micro-batch's step takes: its residuals and gradients.

    Args:
      jaxpr: the program of a micro-batch.
      params: those of its arguments that it is differentiated with respect to.
    """
    given = [*jaxpr.constvars, *jaxpr.invars]
    return residuals(jaxpr.eqns, params, given) + sum(map(nbytes, params))


def residuals(
    equations: Sequence[core.JaxprEqn], smooth: Iterable[Any], given: Iterable[Any]
) -> int:
    """About the bytes of what the way back reads of the way there.

    What `jax.vjp` keeps: for a product its operands, for any other function that is not
    linear one coefficient for each number that it returns. What is given takes nothing,
    for it is there anyway; of that, some is differentiated: `smooth`.
    """
    smooth, given = set(smooth), set(given)
    read: dict[Any, int] = {}
    inside = 0
    for e in equations:
        moving = [i for i, x in enumerate(e.invars) if ir.is_among(x, smooth)]
        if not moving:
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
            others = [pair[1 - i] for i in moving] + [pair[1]] * (name == "div")
            read |= {x: nbytes(x) for x in ir.variables(others)}
        elif not primitives.is_linear(e) and not _communicates(e):
            inside += sum(map(nbytes, outs))
    return inside + sum(n for x, n in read.items() if x not in given)


def _inside(e: core.JaxprEqn, program: core.Jaxpr, outside: set[Any]) -> int:
    """What a program inside an equation keeps, of which some operands move."""
    pairs = zip(program.invars, ir.operands(e, program), strict=False)
    smooth = [x for x, operand in pairs if ir.is_among(operand, outside)]
    given = [*program.constvars, *program.invars]
    if ir.kind(e) == "scan":  # Of its carry each iteration has one of its own.
        consts, _, slices = ir.scan_of(e).split(program.invars)
        given = [*program.constvars, *consts, *slices]
    return residuals(program.eqns, smooth, given)


def _communicates(equation: core.JaxprEqn) -> bool:
    return any(isinstance(name, str) for name in ir.axes_of(equation))
