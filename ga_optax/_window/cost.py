"""The bytes of values, and of what a step keeps for its way back."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax import accumulator
from ga_optax._partition import is_inexact
from ga_optax._passes import primitives, read


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
