"""Functions that change a program: its equations, variables, types, constants."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core

from ga_optax._passes import read


def without_values(jaxpr: Any) -> core.Jaxpr:
    """The program without the values of its constants, which newer JAX holds in it.

    A program that is kept for later would keep tracers whose trace has ended.
    """
    consts = getattr(jaxpr, "consts", ())
    return jaxpr.with_consts([None] * len(consts)) if consts else jaxpr


def with_constants(jaxpr: core.Jaxpr, number: int) -> core.Jaxpr:
    """The same program, whose first arguments, `number` of them, become constants."""
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
    """The program without equations that check or print, and return nothing."""
    eqns = [silent_equation(e) for e in jaxpr.eqns if e.outvars or not read.acts(e)]
    return jaxpr.replace(eqns=eqns, effects=_of_values(jaxpr))


def silent_equation(equation: core.JaxprEqn) -> core.JaxprEqn:
    """The equation without equations inside that check or print, and return nothing."""
    if not read.acts(equation):
        return equation
    return with_inner(equation, silent).replace(effects=_of_values(equation))


def _of_values(x: Any) -> Any:
    return type(x.effects)(filter(read.is_of_values, x.effects))


def unrounded(jaxpr: core.Jaxpr, results: Iterable[int]) -> core.Jaxpr:
    """The program, some results of which come before they are rounded."""
    outvars = list(jaxpr.outvars)
    for i in results:
        outvars[i] = read.roundings(jaxpr, outvars[i])[0]
    return jaxpr.replace(outvars=outvars)


def renamed(
    equations: Iterable[core.JaxprEqn], known: Mapping[Any, Any]
) -> list[core.JaxprEqn]:
    """The equations, with other variables or literals in place of those in `known`."""
    return [
        e.replace(invars=rename(e.invars, known), outvars=rename(e.outvars, known))
        for e in equations
    ]


def changed(
    jaxpr: core.Jaxpr, change: Callable[[core.JaxprEqn], Iterable[core.JaxprEqn]]
) -> core.Jaxpr:
    """The program with new equations in place of each; itself if all stay the same."""
    eqns = [new for equation in jaxpr.eqns for new in change(equation)]
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def rename(atoms: Iterable[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The atoms, with those in `known` replaced."""
    return [x if isinstance(x, core.Literal) else known.get(x, x) for x in atoms]


def with_inner(
    equation: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
    """The equation with new programs inside; itself if all stay the same."""
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
