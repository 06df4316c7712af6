"""The cost of equations: scalar operations, bytes, and whether they are cheap."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax import accumulator
from ga_optax._partition import is_inexact
from ga_optax._passes import primitives, read

_REPEATED = ("scan", "while")
_DEEP = 100  # operations for each number that something unknown reads or returns


def is_cheap(equation: core.JaxprEqn) -> bool:
    """True if running an equation again costs little more than reading its results."""
    return all(
        read.kind(e) not in _REPEATED
        if read.inner_programs(e)
        else not primitives.entry_of(e).is_dear
        for e in read.within(equation)
    )


def work(equation: core.JaxprEqn) -> float:
    """About how many scalar operations an equation takes."""
    shapes = [
        getattr(x.aval, "shape", ()) for x in (*equation.invars, *equation.outvars)
    ]
    largest = max(map(read.numbers, shapes), default=0)
    if programs := read.inner_programs(equation):
        return read.times(equation) * sum(work(e) for p in programs for e in p.eqns)
    name = equation.primitive.name
    if primitives.entry_of(equation).is_exact and primitives.is_linear(equation):
        return 0.0
    if name == primitives.PRODUCT:
        (contracted, _), _ = equation.params["dimension_numbers"]
        return (
            2.0
            * read.numbers(shapes[-1])
            * read.numbers(shapes[0][i] for i in contracted)
        )
    if name == primitives.CONVOLUTION:
        features = shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
        of_one = read.numbers(shapes[1]) / max(read.numbers([features]), 1)
        return 2.0 * read.numbers(shapes[-1]) * of_one
    return float(largest if is_cheap(equation) else _DEEP * largest)


def nbytes(x: Any) -> int:
    """The bytes of a value."""
    return read.numbers(x.aval.shape) * x.aval.dtype.itemsize


def nbytes_of_sum(x: Any) -> int:
    """The bytes of a sum of such values, in the dtype of sums."""
    dtype = x.aval.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    wide = accumulator.accumulator_dtype(jnp.zeros([], dtype), np.dtype(np.float32))
    return read.numbers(x.aval.shape) * wide.itemsize


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
    reads: dict[Any, int] = {}
    inside = 0
    for e in equations:
        places = [i for i, x in enumerate(e.invars) if read.is_among(x, smooth)]
        if not places:
            continue
        outs = [x for x in e.outvars if is_inexact(x.aval)]
        smooth.update(outs)
        name, kind = e.primitive.name, read.kind(e)
        programs = read.inner_programs(e)
        if kind == "checkpoint":
            reads |= {x: nbytes(x) for x in read.variables(e.invars)}
        elif programs:
            inside += read.times(e) * max(_inside(e, p, smooth) for p in programs)
        elif primitives.needs_other(e):
            pair = e.invars
            others = [pair[1 - i] for i in places] + [pair[1]] * (name == "div")
            reads |= {x: nbytes(x) for x in read.variables(others)}
        elif not primitives.is_linear(e) and not _communicates(e):
            inside += sum(map(nbytes, outs))
    return inside + sum(n for x, n in reads.items() if x not in given)


def _inside(e: core.JaxprEqn, program: core.Jaxpr, outside: set[Any]) -> int:
    """About the bytes of the residuals of a program inside an equation."""
    pairs = zip(program.invars, read.operands(e, program), strict=False)
    smooth = [x for x, operand in pairs if read.is_among(operand, outside)]
    given = [*program.constvars, *program.invars]
    if read.kind(e) == "scan":  # each iteration has another carry
        consts, _, slices = read.scan_of(e).split(program.invars)
        given = [*program.constvars, *consts, *slices]
    return residuals(program.eqns, smooth, given)


def _communicates(equation: core.JaxprEqn) -> bool:
    return any(isinstance(name, str) for name in read.axes_of(equation))
