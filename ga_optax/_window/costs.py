"""The cost of equations, in bytes."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from .._passes import jaxprs, primitives


def bytes_of_step(jaxpr: core.Jaxpr, params: Sequence[Any]) -> int:
    """About the bytes of a micro-batch's step: residuals and gradients.

    Args:
      jaxpr: the program of a micro-batch.
      params: the arguments with respect to which it is differentiated.
    """
    arguments = [*jaxpr.constvars, *jaxpr.invars]
    residuals = bytes_of_residuals(jaxpr.eqns, params, arguments)
    return residuals + sum(map(jaxprs.nbytes, params))


def bytes_of_residuals(
    equations: Sequence[core.JaxprEqn], smooth: Iterable[Any], given: Iterable[Any]
) -> int:
    """About the bytes of the residuals that `jax.vjp` keeps, and fills again at a time.

    The residuals of a product are its operands; of any other nonlinear function, one
    coefficient for each number of the result. Those inside of a `jax.checkpoint` are
    filled again, one checkpoint after the other.

    Args:
      equations: the program.
      smooth: the arguments that are differentiated.
      given: the values that are stored in any case, and take no more bytes.
    """
    return sum(_residuals(equations, smooth, given))


def _residuals(
    equations: Sequence[core.JaxprEqn], smooth: Iterable[Any], given: Iterable[Any]
) -> tuple[int, int]:
    """About the bytes of the residuals, and of those of the largest checkpoint."""
    smooth, given = set(smooth), set(given)
    reads: dict[Any, int] = {}
    inside = again = 0
    for e in equations:
        places = [i for i, x in enumerate(e.invars) if jaxprs.is_among(x, smooth)]
        if not places:
            continue
        outs = [x for x in e.outvars if jaxprs.is_inexact(x.aval)]
        smooth.update(outs)
        name, kind = e.primitive.name, jaxprs.kind(e)
        if programs := jaxprs.inner_programs(e):
            some = [_inside(e, p, smooth) for p in programs]
            kept, filled = map(max, zip(*some, strict=True))
            if kind == "checkpoint":
                reads |= {x: jaxprs.nbytes(x) for x in jaxprs.variables(e.invars)}
                kept, filled = 0, kept + filled
            inside, again = inside + jaxprs.times(e) * kept, max(again, filled)
        elif primitives.needs_other(e):
            pair = e.invars
            others = [pair[1 - i] for i in places] + [pair[1]] * (name == "div")
            reads |= {x: jaxprs.nbytes(x) for x in jaxprs.variables(others)}
        elif name == "exp":  # its result, which other gradients may need as well
            reads |= {x: jaxprs.nbytes(x) for x in outs}
        elif linear := primitives.entry_of(e).linear_in(len(e.invars)):
            # Such as the condition of a select.
            others = [x for i, x in enumerate(e.invars) if i not in linear]
            reads |= {x: jaxprs.nbytes(x) for x in jaxprs.variables(others)}
        elif not _communicates(e):
            inside += sum(map(jaxprs.nbytes, outs))
    return inside + sum(n for x, n in reads.items() if x not in given), again


def _inside(
    e: core.JaxprEqn, program: core.Jaxpr, outside: set[Any]
) -> tuple[int, int]:
    """About the bytes of the residuals of a program inside an equation."""
    pairs = zip(program.invars, jaxprs.operands(e, program), strict=False)
    smooth = [x for x, operand in pairs if jaxprs.is_among(operand, outside)]
    given = [*program.constvars, *program.invars]
    if jaxprs.kind(e) == "scan":  # each iteration has another carry
        consts, _, slices = jaxprs.scan_of(e).split(program.invars)
        given = [*program.constvars, *consts, *slices]
    return _residuals(program.eqns, smooth, given)


def _communicates(equation: core.JaxprEqn) -> bool:
    return any(isinstance(name, str) for name in jaxprs.axes_of(equation))
