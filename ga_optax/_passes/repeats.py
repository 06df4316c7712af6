"""Equations that repeat, which JAX then differentiates once.

Each layer of a model has the equations of the layer before, and JAX applies its rules
to every one of them. To a jitted function it applies them once, and keeps the result.
So equations that are alike become calls of one function. JAX inlines these while it
traces, and what comes out is the program that would come out without them.
"""

import collections
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from ga_optax._passes import ir, known
from ga_optax._passes.facts import Facts
from ga_optax._passes.ir import Program
from ga_optax._passes.notes import left_alone

# A function costs as much as the rules of two equations.
_FEW = 3


def called(program: Program, facts: Facts) -> Program:
    """The program with calls in place of equations that repeat."""
    jaxpr = program.jaxpr
    _say(jaxpr.eqns)
    keys = list(map(_key, jaxpr.eqns))
    number = collections.Counter(keys)
    calls: dict[Any, core.JaxprEqn | None] = {}
    equations = []
    for key, equation in zip(keys, jaxpr.eqns, strict=True):
        if key is not None and number[key] >= _FEW:
            if key not in calls:
                calls[key] = ir.as_call(jaxpr, equation)
                if calls[key] is None:
                    left_alone(
                        equation,
                        "a function of it would give other types, or is not inlined",
                    )
            if (call := calls[key]) is not None:
                operands = ir.variables(equation.invars)
                how = {"primitive": call.primitive, "params": call.params}
                equation = equation.replace(invars=operands, **how)
        equations.append(equation)
    return program._replace(jaxpr=jaxpr.replace(eqns=equations))


def _key(equation: core.JaxprEqn) -> Any:
    """What equations that are alike have in common; None for one that stays as it is.

    One that reads a variable twice stays: what comes back to that variable would be
    added up in another order.
    """
    if not ir.variables(equation.invars) or _why_not(equation):
        return None
    return ir.key_of(equation, lambda x: x.aval)


def _why_not(equation: core.JaxprEqn) -> str:
    """Why an equation stays as it is."""
    if not known.is_built_in(equation):
        return f"{equation.primitive.name} is not known"
    read = ir.variables(equation.invars)
    return "it reads a value twice" if len(set(read)) < len(read) else ""


def _say(equations: Sequence[core.JaxprEqn]) -> None:
    """Names those that could have been alike; JAX itself remembers jitted functions."""
    whys = [(e, _why_not(e)) for e in equations if ir.kind(e) != "call"]
    number = collections.Counter((e.primitive, why) for e, why in whys)
    for equation, why in whys:
        if why and number[equation.primitive, why] >= _FEW:
            left_alone(equation, why)
