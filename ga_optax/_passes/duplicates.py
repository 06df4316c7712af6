"""A program without duplicates: what it computes twice, it computes once.

XLA merges equal operations early in a program for several devices, and late in one for
a single device. A division by a value that is used twice, for instance, stays a
division in the one, and becomes a product with the reciprocal in the other. If there is
nothing to merge, both are compiled alike.
"""

from typing import Any

import jax
import numpy as np
from jax.extend import core

# They broadcast their operands.
_ELEMENTWISE = {"add", "sub", "mul", "div", "max", "min", "pow"}
# They run the programs among their parameters.
_RUNS = {"scan", "while", "cond", "remat2", "checkpoint"}


def merged(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """`jaxpr` without inner `jit`s, where equal equations are one, also in loops."""
    equations: list[core.JaxprEqn] = []
    found: dict[Any, list[core.Var]] = {}
    programs: dict[int, tuple[Any, Any]] = {}

    def again(x: Any) -> Any:
        """A parameter of an equation, merged if it is a program."""
        if type(x) is tuple:
            return tuple(map(again, x))
        if not isinstance(x, (core.Jaxpr, core.ClosedJaxpr)):
            return x
        if id(x) not in programs:
            closed = isinstance(x, core.ClosedJaxpr)
            new = core.ClosedJaxpr(merged(x.jaxpr), x.consts) if closed else merged(x)
            programs[id(x)] = x, new
        return programs[id(x)][1]

    def append(key: Any, avals: Any, equation: core.JaxprEqn) -> list[core.Var]:
        """Its results; new ones, unless there is an equal equation."""
        if key is None or key not in found:
            found[key] = list(map(core.Var, avals))
            equations.append(equation.replace(outvars=found[key]))
        return found[key]

    def broadcast(x: Any, like: Any) -> Any:
        """`x` in the shape of the result, which every reader would broadcast itself."""
        if isinstance(x, core.Literal) or x.aval.shape == like.shape:
            return x
        place = like.sharding if any(like.sharding.spec) else None
        params = {
            "shape": like.shape,
            "broadcast_dimensions": tuple(range(x.aval.ndim)),
            "sharding": place,
        }
        new = core.new_jaxpr_eqn([x], [], jax.lax.broadcast_in_dim_p, params, set())
        aval = x.aval.update(shape=like.shape, sharding=like.sharding)
        return append((x, like.shape), [aval], new)[0]

    def visit(jaxpr: core.Jaxpr, known: dict[Any, Any]) -> list[Any]:
        """Appends the equations; `known` maps old variables to new ones."""

        def read(x: Any) -> Any:
            return x if isinstance(x, core.Literal) else known.get(x, x)

        for old in jaxpr.eqns:
            equation = old.replace(invars=list(map(read, old.invars)))
            if equation.primitive.name in _ELEMENTWISE:
                aval = old.outvars[0].aval
                invars = [broadcast(x, aval) for x in equation.invars]
                equation = equation.replace(invars=invars)
            inner = _inlined(equation)
            if inner is not None:
                pairs = zip(inner.invars, equation.invars, strict=True)
                outvars = visit(inner, dict(pairs))
            else:
                if equation.primitive.name in _RUNS:
                    params = {name: again(x) for name, x in equation.params.items()}
                    equation = equation.replace(params=params)
                avals = [v.aval for v in equation.outvars]
                outvars = append(_key(equation), avals, equation)
            known.update(zip(old.outvars, outvars, strict=True))
        return list(map(read, jaxpr.outvars))

    outvars = visit(jaxpr, {})
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _inlined(equation: core.JaxprEqn) -> core.Jaxpr | None:
    """The program of a `jit` that does no more than name it."""
    params = equation.params
    if equation.primitive.name not in ("jit", "pjit") or params["jaxpr"].consts:
        return None
    places = *params["in_shardings"], *params["out_shardings"]
    told = any(type(x).__name__ != "UnspecifiedValue" for x in places)
    return None if told else params["jaxpr"].jaxpr


def _key(equation: core.JaxprEqn) -> Any:
    """What equal equations have in common; None for one that has no equal."""
    variables = *equation.invars, *equation.outvars
    refs = any(hasattr(v.aval, "inner_aval") for v in variables)
    if equation.effects or refs or equation.primitive.name == "rng_uniform":
        return None
    operands = tuple(
        (str(x.aval), np.asarray(x.val).tobytes()) if isinstance(x, core.Literal) else x
        for x in equation.invars
    )
    key = equation.primitive, operands, tuple(sorted(equation.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key
