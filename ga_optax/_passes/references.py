"""What a program does with the mutable arrays that it makes (`jax.new_ref`).

    r = new_ref x;  r[0] <- y;  z = r[...]    ->    z = jit(the same)(x, y)

Equations over one reference must stay in their order, and run as often as each other,
which no variable between them says. Who orders equations anew, or runs some of them
again, sees them as one equation: a jitted function that nobody opens.
"""

from typing import Any

import jax
from jax.extend import core

from ga_optax._passes import interpret, read, rewrite


def grouped(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program, with one equation for all that works on references it has made."""
    made = any(read.is_reference(x) for e in jaxpr.eqns for x in e.outvars)
    return _with_group(jaxpr) if made else jaxpr


def is_group(equation: core.JaxprEqn) -> bool:
    """Whether it is a jitted function that works on references itself."""
    programs = read.inner_programs(equation) if read.kind(equation) == "call" else ()
    return any(_touches(e) for program in programs for e in program.eqns)


def are_inside(equation: core.JaxprEqn) -> bool:
    """Whether an equation works on references, or one inside it."""
    return any(map(_touches, read.within(equation)))


def effects(jaxpr: core.Jaxpr) -> frozenset[Any]:
    """What others can see of a program: not that it makes references for itself."""
    own = "InternalMutableArrayEffect"
    return frozenset(x for x in jaxpr.effects if type(x).__name__ != own)


def check_own(jaxpr: core.Jaxpr, option: str) -> None:
    """Raises if a program reads or writes a reference that it has not made."""
    if any(map(read.is_reference, (*jaxpr.constvars, *jaxpr.invars))):
        raise TypeError(
            f"With {option} micro-batches run more than once, so fun must not read or "
            "write a reference (jax.new_ref) from outside of it, but it does. Pass the "
            "value of the reference, ref[...], return what is new as aux, and write it "
            "after the call. A reference that fun makes itself is fine."
        )


def _touches(equation: core.JaxprEqn) -> bool:
    return any(map(read.is_reference, (*equation.invars, *equation.outvars)))


def _with_group(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """All equations that touch references, and those in between, as one."""
    first = [e for e in jaxpr.eqns if _touches(e)]
    after = read.following(jaxpr, (x for e in first for x in e.outvars))
    before, _ = read.needed(jaxpr, (x for e in first for x in e.invars))
    between = [e for e in before if not after.isdisjoint(e.outvars)]
    due = set(map(id, (*first, *between)))
    group: list[core.JaxprEqn] = []
    rest: list[core.JaxprEqn] = []
    later: list[core.JaxprEqn] = []
    for e in jaxpr.eqns:
        follows = not after.isdisjoint(read.variables(e.invars))
        (group if id(e) in due else later if follows else rest).append(e)
    one, same = _as_one(jaxpr, group, [*rest, *later])
    return jaxpr.replace(
        eqns=[*rest, *one, *rewrite.renamed(later, same)],
        outvars=rewrite.rename(jaxpr.outvars, same),
    )


def _as_one(
    jaxpr: core.Jaxpr, group: list[core.JaxprEqn], others: list[core.JaxprEqn]
) -> tuple[list[core.JaxprEqn], dict[Any, Any]]:
    """A jitted function of the group, and results that are other variables."""
    ends = {*read.variables(jaxpr.outvars)}
    ends.update(x for e in others for x in read.variables(e.invars))
    made = dict.fromkeys(x for e in group for x in e.outvars)
    reads = dict.fromkeys(x for e in group for x in read.variables(e.invars))
    inputs = [x for x in reads if x not in made]
    results = [x for x in made if x in ends]

    def run(*values: Any) -> list[Any]:
        return interpret.bind(jaxpr, group, inputs, results, values)

    program = interpret.program_of(jax.jit(run), *(x.aval for x in inputs)).jaxpr
    known = dict(zip(program.invars, inputs, strict=True))
    pairs = list(zip(program.outvars, results, strict=True))
    same = {result: known[x] for x, result in pairs if x in known}
    known |= {x: result for x, result in pairs if x not in known}
    calls = [e.replace(source_info=group[0].source_info) for e in program.eqns]
    return rewrite.renamed(calls, known), same
