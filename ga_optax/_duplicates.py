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


def merged(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """`jaxpr` without inner `jit`s, where equal equations are one; also in its loops."""
    equations: list[core.JaxprEqn] = []
    found: dict[Any, list[core.Var]] = {}
    programs: dict[int, tuple[Any, Any]] = {}

    def again(x: Any) -> Any:
        """A parameter of an equation, with every program in it merged."""
        if isinstance(x, (tuple, list)):
            return type(x)(map(again, x)) if type(x) in (tuple, list) else x
        if not isinstance(x, (core.Jaxpr, core.ClosedJaxpr)):
            return x
        if id(x) not in programs:
            inner = x.jaxpr if isinstance(x, core.ClosedJaxpr) else x
            new = merged(inner)
            new = core.ClosedJaxpr(new, x.consts) if inner is not x else new
            programs[id(x)] = x, new
        return programs[id(x)][1]

    def broadcast(x: Any, like: Any) -> Any:
        """`x` in the shape of the result, which each reader would broadcast itself."""
        if isinstance(x, core.Literal) or x.aval.shape == like.shape:
            return x
        key = x, like.shape
        if key not in found:
            found[key] = [core.Var(x.aval.update(shape=like.shape, sharding=like.sharding))]
            dims = tuple(range(x.aval.ndim))
            params = {"shape": like.shape, "broadcast_dimensions": dims, "sharding": like.sharding if any(like.sharding.spec) else None}
            equations.append(core.new_jaxpr_eqn([x], found[key], jax.lax.broadcast_in_dim_p, params, set()))
        return found[key][0]

    def visit(jaxpr: core.Jaxpr, known: dict[Any, Any]) -> list[Any]:
        """Appends the equations; `known` maps old variables to new ones."""

        def read(x: Any) -> Any:
            return x if isinstance(x, core.Literal) else known.get(x, x)

        for equation in jaxpr.eqns:
            invars = list(map(read, equation.invars))
            if equation.primitive.name in _ELEMENTWISE:
                invars = [broadcast(x, equation.outvars[0].aval) for x in invars]
            inner = _inlined(equation)
            if inner is not None:
                outvars = visit(inner, dict(zip(inner.invars, invars, strict=True)))
            else:
                params = {name: again(x) for name, x in equation.params.items()}
                key = _key(equation, invars, params)
                if key not in found or key is None:
                    found[key] = [core.Var(v.aval) for v in equation.outvars]
                    new = equation.replace(
                        invars=invars, outvars=found[key], params=params
                    )
                    equations.append(new)
                outvars = found[key]
            known.update(zip(equation.outvars, outvars, strict=True))
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


def _key(equation: core.JaxprEqn, invars: list[Any], params: dict[str, Any]) -> Any:
    """What equal equations have in common; None for one that has no equal."""
    variables = *invars, *equation.outvars
    refs = any(hasattr(v.aval, "inner_aval") for v in variables)
    if equation.effects or refs or equation.primitive.name == "rng_uniform":
        return None
    operands = tuple(
        (str(x.aval), np.asarray(x.val).tobytes()) if isinstance(x, core.Literal) else x
        for x in invars
    )
    key = equation.primitive, operands, tuple(sorted(params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key
