"""A sum that is all of a loss waits: each micro-batch adds its part of it.

The loss of a window is the mean over its k micro-batches, and for what is linear

    mean of f(psum(x))  =  mean of f(k x).

So a loss that is a `psum` itself, such as a mean over all tokens, needs no level. That
is for the user's own `axis_name`: in a program of the whole batch sums wait already,
see `_partition/linear`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._inside.axis.rules import is_collective
from ga_optax._inside.axis.schedule import Fact
from ga_optax._partition import is_inexact, slots
from ga_optax._passes import ir

_Parts = Mapping[Any, Any]  # what a micro-batch adds, by what it adds to


def with_parts(
    jaxpr: core.Jaxpr, axis: str, size: int, facts: Mapping[Any, Fact]
) -> core.Jaxpr:
    """The program with such a loss, if sums in its own can wait."""
    parts: dict[Any, Any] = {}
    levels = {x: fact.level for x, fact in facts.items()}
    equations = list(jaxpr.eqns)
    for e in _ends(jaxpr):
        if not all(is_inexact(x.aval) and facts[x].params for x in e.outvars):
            continue
        if e.primitive.name == "psum" and is_collective(e, axis):
            for x, out in zip(e.invars, e.outvars, strict=True):
                [times] = _times(size, x).eqns
                parts[out], levels[out] = core.Var(out.aval), levels[out] - 1
                ends = {"invars": [x, times.invars[1]], "outvars": [parts[out]]}
                equations.append(times.replace(**ends))
        elif _is_linear(e, parts, facts) and not _is_late(e, parts, levels):
            parts |= {x: core.Var(x.aval) for x in e.outvars}
            its = max(levels[x] for x in ir.variables(e.invars))
            levels |= dict.fromkeys(e.outvars, its)
            equations += ir.renamed([e], parts)
    loss, *rest = jaxpr.outvars
    if not ir.is_variable(loss) or loss not in parts:
        return jaxpr
    outvars = [parts[loss], *rest]
    jaxpr = jaxpr.replace(eqns=equations, outvars=outvars)

    def acts(e: core.JaxprEqn) -> bool:
        return any(getattr(effect, "name", "") != axis for effect in e.effects)

    return jaxpr.replace(eqns=ir.needed(jaxpr, outvars, runs=acts)[0])


def _ends(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """The equations of operands in which the loss may be linear."""
    due, found = set(ir.variables(jaxpr.outvars[:1])), []
    for e in reversed(jaxpr.eqns):
        if not due.isdisjoint(e.outvars):
            found.append(e)
            places = [i for i in range(len(e.invars)) if slots(e, [i]) is not None]
            due.update(ir.variables(e.invars[i] for i in places))
    return found[::-1]


def _is_linear(e: core.JaxprEqn, parts: _Parts, facts: Mapping[Any, Fact]) -> bool:
    """Whether it is linear in what has parts, alike in all micro-batches."""
    here = [i for i, x in enumerate(e.invars) if ir.is_variable(x) and x in parts]
    places = slots(e, here) if here else None
    if places is None or e.effects:
        return False
    others = [x for i, x in enumerate(e.invars) if i not in places]
    return not any(facts[x].own for x in ir.variables(others))


def _is_late(e: core.JaxprEqn, parts: _Parts, levels: Mapping[Any, int]) -> bool:
    """Whether it reads later levels: then the sum is better added up before them."""
    read = ir.variables(e.invars)
    return min(levels[x] for x in read if x in parts) < max(levels[x] for x in read)


def _times(size: int, x: Any) -> core.Jaxpr:
    return jax.make_jaxpr(lambda x: x * jnp.asarray(size, x.dtype))(x.aval).jaxpr
