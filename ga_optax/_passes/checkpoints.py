"""`jax.checkpoint` of another function, with the options of an equation."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def checkpointed(equation: core.JaxprEqn, body: Callable[..., Any]) -> Any:
    """`jax.checkpoint` of another function, with the options of an equation.

    One that computes again for a gradient stays so: XLA must not merge it with the
    values that it computes again.
    """
    options = {key: equation.params[key] for key in ("prevent_cse", "policy")}
    run = jax.checkpoint(body, **options)
    if not equation.params["differentiated"]:
        return run

    def again(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
        *_, last = closed.jaxpr.eqns
        last = last.replace(params=last.params | {"differentiated": True})
        jaxpr = closed.jaxpr.replace(eqns=[*closed.jaxpr.eqns[:-1], last])
        out = jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return again
