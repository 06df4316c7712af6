"""A program without duplicates: what it computes twice, it computes once.

XLA merges equal operations early in a program for several devices, and late in one for
a single device. A division by a value that is used twice, for instance, stays a
division in the one, and becomes a product with the reciprocal in the other. If there is
nothing to merge, both are compiled alike.
"""

import functools
from typing import Any

import jax
from jax.extend import core

from ga_optax._passes import interpret, primitives, read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.read import Program


def merged(program: Program, facts: Facts) -> Program:
    """A program without inner `jit`s, where equal equations are one, also in loops."""
    return program._replace(jaxpr=_merged(program.jaxpr))


def _merged(jaxpr: core.Jaxpr) -> core.Jaxpr:
    equations: list[core.JaxprEqn] = []
    found: dict[Any, list[core.Var]] = {}
    again = functools.cache(_merged)  # a program that is run twice stays one

    def append(key: Any, avals: Any, equation: core.JaxprEqn) -> list[core.Var]:
        """Its results; new ones, unless there is an equal equation."""
        if key is None or key not in found:
            found[key] = list(map(core.Var, avals))
            equations.append(equation.replace(outvars=found[key]))
        return found[key]

    def broadcast(x: Any, like: Any, at: core.JaxprEqn) -> Any:
        """`x` in the shape of the result, which every reader would broadcast itself."""
        if isinstance(x, core.Literal) or x.aval.shape == like.shape:
            return x
        place = like.sharding if any(like.sharding.spec) else None
        aval = x.aval.update(shape=like.shape, sharding=like.sharding)

        def run(y: jax.Array) -> jax.Array:
            dims = range(y.ndim)
            return jax.lax.broadcast_in_dim(y, like.shape, dims, out_sharding=place)

        [new] = interpret.traced(run, [x], core.Var(aval), at)
        return append((x, like.shape), [aval], new)[0]

    def visit(jaxpr: core.Jaxpr, names: dict[Any, Any]) -> list[Any]:
        """Appends the equations; `names` maps old variables to new ones."""
        for old in jaxpr.eqns:
            equation = old.replace(invars=rewrite.rename(old.invars, names))
            if primitives.entry_of(equation).broadcasts and len(equation.invars) > 1:
                aval = old.outvars[0].aval
                invars = [broadcast(x, aval, old) for x in equation.invars]
                equation = equation.replace(invars=invars)
            if _is_inlined(equation):
                [inner] = read.inner_programs(equation)
                pairs = zip(inner.invars, equation.invars, strict=True)
                outvars = visit(inner, dict(pairs))
            else:
                if read.kind(equation) not in (None, "call"):
                    equation = rewrite.with_inner(equation, again)
                avals = [v.aval for v in equation.outvars]
                outvars = append(_key(equation), avals, equation)
            names.update(zip(old.outvars, outvars, strict=True))
        return rewrite.rename(jaxpr.outvars, names)

    outvars = visit(jaxpr, {})
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _is_inlined(equation: core.JaxprEqn) -> bool:
    """Whether it is a `jit` that does no more than name its program."""
    if read.kind(equation) != "call":
        return False
    [inner] = read.inner(equation)
    places = [equation.params.get(k, ()) for k in ("in_shardings", "out_shardings")]
    told = any(type(x).__name__ != "UnspecifiedValue" for its in places for x in its)
    if told or inner.consts:
        left_alone(equation, "a jitted function with shardings or constants")
    return not (told or inner.consts)


def _key(equation: core.JaxprEqn) -> Any:
    """What equal equations have in common; None for one that has no equal."""
    variables = *equation.invars, *equation.outvars
    if any(map(read.is_reference, variables)):
        return None
    if equation.effects or equation.primitive.name == "rng_uniform":
        if read.kind(equation) is None:  # of what is inside it is said there
            left_alone(equation, "it does more than compute")
        return None
    return read.key_of(equation, lambda x: x)
