"""References: mutable arrays that a program makes (`jax.new_ref`).

    r = new_ref x;  r[0] <- y;  z = r[...]    ->    z = jit(the same)(x, y)

Equations over one reference must stay in order, and all run equally often, but no
variable between them says so. So code that reorders or repeats equations gets them as
one equation: a jitted function that nobody opens.
"""

from typing import Any

import jax
from jax.extend import core

from ga_optax._passes import interpret, read, rewrite


def grouped(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program with one equation for all that touch references it makes."""
    made = any(read.is_reference(x) for e in jaxpr.eqns for x in e.outvars)
    return _with_group(jaxpr) if made else jaxpr


def is_group(equation: core.JaxprEqn) -> bool:
    """True for a jitted function whose own equations touch references."""
    programs = read.inner_programs(equation) if read.kind(equation) == "call" else ()
    return any(_touches(e) for program in programs for e in program.eqns)


def are_inside(equation: core.JaxprEqn) -> bool:
    """True if an equation, or one inside it, touches references."""
    return any(map(_touches, read.within(equation)))


def effects(jaxpr: core.Jaxpr) -> frozenset[Any]:
    """The effects of a program, without those on references it makes itself."""
    internal = "InternalMutableArrayEffect"
    return frozenset(x for x in jaxpr.effects if type(x).__name__ != internal)


def check_own(jaxpr: core.Jaxpr) -> None:
    """Raises if a program reads or writes a reference from outside."""
    if any(map(read.is_reference, (*jaxpr.constvars, *jaxpr.invars))):
        raise TypeError(
            "With value_and_grad micro-batches run more than once, so fun must not "
            "read or write a reference (jax.new_ref) from outside of it, but it does. "
            "Pass the value of the reference, ref[...], return what is new as aux, and "
            "write it after the call. A reference that fun makes itself is fine."
        )


def _touches(equation: core.JaxprEqn) -> bool:
    return any(map(read.is_reference, (*equation.invars, *equation.outvars)))


def _with_group(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program with one equation for all that touch references, or stand between."""
    touching = [e for e in jaxpr.eqns if _touches(e)]
    dependent = read.following(jaxpr, (x for e in touching for x in e.outvars))
    needed, _ = read.needed(jaxpr, (x for e in touching for x in e.invars))
    between = [e for e in needed if not dependent.isdisjoint(e.outvars)]
    grouped = set(map(id, (*touching, *between)))
    group: list[core.JaxprEqn] = []
    rest: list[core.JaxprEqn] = []
    later: list[core.JaxprEqn] = []
    for e in jaxpr.eqns:
        follows = not dependent.isdisjoint(read.variables(e.invars))
        (group if id(e) in grouped else later if follows else rest).append(e)
    calls, same = _as_call(jaxpr, group, [*rest, *later])
    return jaxpr.replace(
        eqns=[*rest, *calls, *rewrite.renamed(later, same)],
        outvars=rewrite.rename(jaxpr.outvars, same),
    )


def _as_call(
    jaxpr: core.Jaxpr, group: list[core.JaxprEqn], others: list[core.JaxprEqn]
) -> tuple[list[core.JaxprEqn], dict[Any, Any]]:
    """A jitted function of a group, and results that are operands, by variable."""
    ends = {*read.variables(jaxpr.outvars)}
    ends.update(x for e in others for x in read.variables(e.invars))
    outvars = dict.fromkeys(x for e in group for x in e.outvars)
    invars = dict.fromkeys(x for e in group for x in read.variables(e.invars))
    inputs = [x for x in invars if x not in outvars]
    results = [x for x in outvars if x in ends]

    def run(*values: Any) -> list[Any]:
        return interpret.bind(jaxpr, group, inputs, results, values)

    program = interpret.program_of(jax.jit(run), *(x.aval for x in inputs)).jaxpr
    known = dict(zip(program.invars, inputs, strict=True))
    pairs = list(zip(program.outvars, results, strict=True))
    same = {result: known[x] for x, result in pairs if x in known}
    known |= {x: result for x, result in pairs if x not in known}
    calls = [e.replace(source_info=group[0].source_info) for e in program.eqns]
    return rewrite.renamed(calls, known), same
