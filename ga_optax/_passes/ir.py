"""Programs as JAX traces them: what is inside an equation, and how to change it.

`core.Jaxpr` is data. What reads it or changes it here follows the names of primitives,
and leaves alone what it does not know.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

# What a program runs once, as if it stood there itself.
INLINE = ("jit", "pjit", "remat2", "checkpoint")


def inner_programs(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs inside an equation: loop bodies, branches, jitted functions."""
    for parameter in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
        if hasattr(parameter, "eqns"):
            yield getattr(parameter, "jaxpr", parameter)


def uses(jaxpr: core.Jaxpr, variable: Any) -> list[tuple[core.JaxprEqn, int]]:
    """The equations that read a variable, and as which of their arguments."""
    return [(e, i) for e in jaxpr.eqns for i, x in enumerate(e.invars) if x is variable]


def with_inner(
    equation: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
    """The equation, with each program inside it changed; itself if none is."""

    def changed(x: Any) -> Any:
        if not hasattr(x, "eqns"):
            return x
        inner = getattr(x, "jaxpr", x)
        new = change(inner)
        return x if new is inner else x.replace(jaxpr=new) if inner is not x else new

    params = {
        key: tuple(map(changed, x)) if isinstance(x, tuple) else changed(x)
        for key, x in equation.params.items()
    }
    same = all(
        x is y or (isinstance(x, tuple) and all(map(lambda a, b: a is b, x, y)))
        for x, y in zip(params.values(), equation.params.values(), strict=True)
    )
    return equation if same else equation.replace(params=params)


def equations_of(
    fun: Callable[..., Any], invars: Sequence[Any], result: core.Var
) -> list[core.JaxprEqn]:
    """Equations that compute `result` as `fun` of other values of a program."""
    jaxpr = jax.make_jaxpr(fun)(*(x.aval for x in invars)).jaxpr
    known = dict(zip(jaxpr.invars, invars, strict=True)) | {jaxpr.outvars[0]: result}

    def renamed(xs: Iterable[Any]) -> list[Any]:
        return [x if isinstance(x, core.Literal) else known.get(x, x) for x in xs]

    return [
        e.replace(invars=renamed(e.invars), outvars=renamed(e.outvars))
        for e in jaxpr.eqns
    ]


def bind(
    jaxpr: core.Jaxpr,
    equations: Sequence[core.JaxprEqn],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    values: Sequence[Any],
) -> list[Any]:
    """The values of `outvars`, from those of `invars`, by equations of `jaxpr`."""
    pairs = zip(invars, values, strict=True)
    known = {v: x for v, x in pairs if not isinstance(v, core.Literal)}
    effects = frozenset().union(*(equation.effects for equation in equations))
    program = jaxpr.replace(
        constvars=[],
        invars=list(known),
        outvars=list(outvars),
        eqns=list(equations),
        effects=effects,
    )
    return jax.core.eval_jaxpr(program, (), *known.values())
