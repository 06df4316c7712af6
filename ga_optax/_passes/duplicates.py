"""A program that computes nothing twice.

XLA merges equal operations early in a program for several devices, and late in a
program for a single device. A division by a value that is used twice, for instance,
stays a division in the first program, and becomes a product with the reciprocal in the
second. A program without equal operations is compiled alike for both.
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
    results: dict[Any, list[core.Var]] = {}  # by what equal equations have in common
    merge_inner = functools.cache(_merged)  # a program that is run twice stays one

    def append(key: Any, avals: Any, equation: core.JaxprEqn) -> list[core.Var]:
        """The results of an equation, or of an equal one that is there already."""
        if key is None or key not in results:
            results[key] = list(map(core.Var, avals))
            equations.append(equation.replace(outvars=results[key]))
        return results[key]

    def broadcast(x: Any, like: Any, at: core.JaxprEqn) -> Any:
        """`x` in the shape of a result: otherwise every reader would broadcast `x`."""
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
                    equation = rewrite.with_inner(equation, merge_inner)
                avals = [v.aval for v in equation.outvars]
                outvars = append(_key(equation), avals, equation)
            names.update(zip(old.outvars, outvars, strict=True))
        return rewrite.rename(jaxpr.outvars, names)

    outvars = visit(jaxpr, {})
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _is_inlined(equation: core.JaxprEqn) -> bool:
    """True for a `jit` without shardings or constants, which only names a program."""
    if read.kind(equation) != "call":
        return False
    [inner] = read.inner(equation)
    places = [equation.params.get(k, ()) for k in ("in_shardings", "out_shardings")]
    is_placed = any(type(x).__name__ != "UnspecifiedValue" for p in places for x in p)
    if is_placed or inner.consts:
        left_alone(equation, "a jitted function with shardings or constants")
    return not (is_placed or inner.consts)


def _key(equation: core.JaxprEqn) -> Any:
    """A key that equal equations share; None for an equation that has no equal."""
    variables = *equation.invars, *equation.outvars
    if any(map(read.is_reference, variables)):
        return None
    if equation.effects or equation.primitive.name == "rng_uniform":
        if read.kind(equation) is None:  # equations inside are logged by themselves
            left_alone(equation, f"{equation.primitive.name} does more than compute")
        return None
    return read.key_of(equation, lambda x: x)
