"""How to change a program: other equations, variables, types, constants."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core

from ga_optax._passes import read


def without_values(jaxpr: Any) -> core.Jaxpr:
    """The program alone; newer JAX holds the values of its constants in it, too.

    Whoever keeps a program for later would keep tracers that end before.
    """
    held = getattr(jaxpr, "consts", ())
    return jaxpr.with_consts([None] * len(held)) if held else jaxpr


def with_constants(jaxpr: core.Jaxpr, number: int) -> core.Jaxpr:
    """The same program, of which so many of the first arguments are constants, too."""
    variables = [*jaxpr.constvars, *jaxpr.invars[:number]]
    values = [None] * len(variables)
    return closing_over(jaxpr, variables, values, jaxpr.invars[number:])


def without_constants(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same program, whose constants are its first arguments."""
    return closing_over(jaxpr, [], [], [*jaxpr.constvars, *jaxpr.invars])


def closing_over(
    jaxpr: core.Jaxpr, constants: Sequence[Any], values: Sequence[Any], invars: Any
) -> core.Jaxpr:
    """The same program with other constants and arguments."""
    # In newer JAX a program holds the values of its constants, too.
    more = {"consts": values} if hasattr(jaxpr, "consts") else {}
    return jaxpr.replace(constvars=constants, invars=invars, **more)


def silent(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program without the equations that act and return nothing."""
    eqns = [silent_equation(e) for e in jaxpr.eqns if e.outvars or not read.acts(e)]
    return jaxpr.replace(eqns=eqns, effects=_of_values(jaxpr))


def silent_equation(equation: core.JaxprEqn) -> core.JaxprEqn:
    """The equation without what acts inside of it, and returns nothing."""
    if not read.acts(equation):
        return equation
    return with_inner(equation, silent).replace(effects=_of_values(equation))


def _of_values(x: Any) -> Any:
    return type(x.effects)(filter(read.is_of_values, x.effects))


def unrounded(jaxpr: core.Jaxpr, results: Iterable[int]) -> core.Jaxpr:
    """The program whose numbers among some results come before they are rounded."""
    outvars = list(jaxpr.outvars)
    for i in results:
        outvars[i] = read.roundings(jaxpr, outvars[i])[0]
    return jaxpr.replace(outvars=outvars)


def renamed(
    equations: Iterable[core.JaxprEqn], known: Mapping[Any, Any]
) -> list[core.JaxprEqn]:
    """Equations with other variables, or literals, in place of those in `known`."""
    return [
        e.replace(invars=rename(e.invars, known), outvars=rename(e.outvars, known))
        for e in equations
    ]


def changed(
    jaxpr: core.Jaxpr, change: Callable[[core.JaxprEqn], Iterable[core.JaxprEqn]]
) -> core.Jaxpr:
    """The program, with others in place of each equation; itself if none is new."""
    eqns = [new for equation in jaxpr.eqns for new in change(equation)]
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def rename(atoms: Iterable[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The atoms, with those in `known` replaced."""
    return [x if isinstance(x, core.Literal) else known.get(x, x) for x in atoms]


def with_inner(
    equation: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
    """The equation, with each program inside it changed; itself if none is."""
    programs = read.inner_programs(equation)
    new = {id(program): change(program) for program in programs}
    if all(new[id(program)] is program for program in programs):
        return equation

    def changed(x: Any) -> Any:
        if not hasattr(x, "eqns"):
            return x
        program = getattr(x, "jaxpr", x)
        return new[id(x)] if program is x else x.replace(jaxpr=new[id(program)])

    params = {
        key: tuple(map(changed, x)) if isinstance(x, tuple) else changed(x)
        for key, x in equation.params.items()
    }
    return equation.replace(params=params)
