"""Casts of parameters, moved to where a scan has sliced them.

Many losses cast all parameters first, and then scan over the layers. The gradients of
all layers then exist at once, to be cast back, beside a copy of the parameters. If each
layer is cast inside the scan, its gradient can be added there. The values are the same.

Inside of a scan a cast goes on into what is rematerialised, or the scan would keep what
it gives.

A cast of a whole parameter stays where it is, in each micro-step: see `is_narrowed`.
"""

import operator
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from ga_optax._passes import ir, known
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts
from ga_optax._passes.ir import Program
from ga_optax._passes.notes import left_alone


def sunk(program: Program, facts: Facts) -> Program:
    """The program with casts moved, of parameters that are then added in slices.

    A stack of gradients, if it still were one, would be wider.
    """
    jaxpr = program.jaxpr
    leaves = jaxpr.invars[: facts.num_params]
    moved = _sunk(jaxpr, set(leaves))
    if moved is jaxpr:
        return program
    sliced = {x for x in leaves if arrival(moved, x) == "slices"}
    for x in leaves:
        for cast, _ in ir.uses(jaxpr, x) if x not in sliced else ():
            if cast.primitive.name == known.CAST and _sinks(jaxpr, cast, False):
                left_alone(cast, "its gradient does not come in slices")
    return program._replace(jaxpr=_sunk(jaxpr, sliced))


def _sunk(jaxpr: core.Jaxpr, params: set[Any], sliced: bool = False) -> core.Jaxpr:
    """The program, with casts of these arguments inside of the scans over them.

    `sliced` says that it is the body of such a scan.
    """
    casts = {
        e.outvars[0]: e
        for e in jaxpr.eqns
        if e.primitive.name == known.CAST
        and ir.is_among(e.invars[0], params)
        and _sinks(jaxpr, e, sliced)
    }
    equations = []
    for equation in jaxpr.eqns:
        kind = ir.kind(equation)
        if kind in ir.THROUGH:
            ins: list[Any] = equation.invars
            cast = [casts[x] if ir.is_among(x, casts) else None for x in ins]
            ins = [e.invars[0] if e else x for e, x in zip(cast, ins, strict=True)]

            def inside(inner: core.Jaxpr, kind=kind, ins=ins, cast=cast) -> core.Jaxpr:
                inner = _with_casts(inner, cast)
                pairs = zip(inner.invars, ins, strict=True)
                own = {v for v, x in pairs if ir.is_among(x, params)}
                return _sunk(inner, own, sliced or kind == "scan") if own else inner

            equation = ir.with_inner(equation, inside)
            if any(cast):
                equation = equation.replace(invars=ins)
        if casts.keys().isdisjoint(equation.outvars):
            equations.append(equation)
    same = all(map(operator.is_, equations, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=equations)


def _with_casts(jaxpr: core.Jaxpr, casts: Sequence[core.JaxprEqn | None]) -> core.Jaxpr:
    """The program of arguments some of which are yet to be cast."""
    if not any(casts):
        return jaxpr
    invars, first = list[Any](jaxpr.invars), []
    for i, cast in enumerate(casts):
        if cast is not None:
            whole: Any = cast.invars[0].aval
            invars[i] = core.Var(jaxpr.invars[i].aval.update(dtype=whole.dtype))
            ends = {"invars": [invars[i]], "outvars": [jaxpr.invars[i]]}
            first.append(cast.replace(**ends))
    return jaxpr.replace(invars=invars, eqns=[*first, *jaxpr.eqns])


def _sinks(jaxpr: core.Jaxpr, cast: core.JaxprEqn, sliced: bool) -> bool:
    """Whether a cast can be moved into a scan over it, or on inside of one."""
    [out] = cast.outvars
    if cast.params["sharding"] is None and _is_read_once(jaxpr, out, sliced):
        return True
    if any(ir.is_sliced(*use) for use in ir.uses_inside(jaxpr, out)):
        left_alone(cast, "it is sharded, or not read by one scan alone")
    return False


def _is_read_once(jaxpr: core.Jaxpr, variable: Any, sliced: bool) -> bool:
    """Whether it is read once, by a scan over its leading dimension or inside one."""
    use = ir.only_use(jaxpr, variable)
    if use is None:
        return False
    equation, i = use
    if not ir.is_inline(equation):
        return ir.is_sliced(equation, i)
    [inner] = ir.inner_programs(equation)
    return sliced or _is_read_once(inner, inner.invars[i], sliced)


def is_narrowed(jaxpr: core.Jaxpr, variable: Any) -> bool:
    """Whether all that is read of a variable is a cast of it to fewer bits."""

    def narrows(equation: core.JaxprEqn, i: int) -> bool:
        if ir.is_inline(equation):
            [inner] = ir.inner_programs(equation)
            return is_narrowed(inner, inner.invars[i])
        if equation.primitive.name != known.CAST:
            return False
        return equation.params["new_dtype"].itemsize < variable.aval.dtype.itemsize

    read = ir.uses(jaxpr, variable)
    unread = ir.num_readers(jaxpr, variable) != len(read) or not read
    return not unread and all(narrows(*use) for use in read)
