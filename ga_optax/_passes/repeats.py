"""Equations that repeat, which JAX then differentiates once.

Each layer of a model has the equations of the layer before, and JAX applies the rule of
a primitive to every equation. A jitted function it differentiates once, and keeps the
result. So equal equations become calls of one jitted function, which JAX inlines: the
program of the gradient is the same, and is traced in less time.
"""

import collections
from typing import Any

import jax
from jax.extend import core, source_info_util

from ga_optax._passes import interpret, known, read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.read import Program

_FEW = 3  # equal equations: a function takes as long as the rules of two


def called(program: Program, facts: Facts) -> Program:
    """The program with calls in place of equations that repeat."""
    jaxpr = program.jaxpr
    keys = {id(e): _key(e) for e in jaxpr.eqns}
    number = collections.Counter(keys.values())
    calls: dict[Any, core.JaxprEqn | None] = {}

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        key = keys[id(equation)]
        if key is None or number[key] < _FEW:
            return [equation]
        if isinstance(key, str):
            left_alone(equation, key)
            return [equation]
        if key not in calls:
            calls[key] = _as_call(jaxpr, equation)
        if (call := calls[key]) is None:
            left_alone(equation, "a function would give results of other types")
            return [equation]
        how = {"primitive": call.primitive, "params": call.params}
        return [equation.replace(invars=read.variables(equation.invars), **how)]

    return program._replace(jaxpr=rewrite.changed(jaxpr, change))


def _key(equation: core.JaxprEqn) -> Any:
    """A value that equal equations share; a sentence for an equation that must stay.

    None for a call, and for an equation without operands: these cost no rule.
    """
    operands, name = read.variables(equation.invars), equation.primitive.name
    if not operands or read.kind(equation) == "call":
        return None
    if not known.is_built_in(equation):
        return f"{name} is not known"
    if len(set(operands)) < len(operands):
        # A function would add up the cotangents of the value in another order.
        return f"{name} reads a value twice"
    return read.key_of(equation, lambda x: x.aval)


def _as_call(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> core.JaxprEqn | None:
    """A call, which JAX inlines, of a jitted function that is the equation.

    None if the results of the function have other types, as those of a sharding
    constraint in a region may.
    """
    operands, results = read.variables(equation.invars), equation.outvars
    # Inlined, the equation has the name and the line of each call.
    bare = equation.replace(source_info=source_info_util.new_source_info())

    def run(*values: Any) -> list[Any]:
        return interpret.bind(jaxpr, [bare], operands, results, values)

    program = interpret.program_of(jax.jit(run), *(x.aval for x in operands))
    [call] = program.jaxpr.eqns
    if [x.aval for x in call.outvars] != [x.aval for x in results]:
        return None
    inline = call.params["inline"]
    early = getattr(type(inline), "JAX_EARLY", True)  # an enumeration since jax 0.11
    return call.replace(params=call.params | {"inline": early})
