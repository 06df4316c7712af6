"""`jax.checkpoint` of another function, with the options of an equation."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from . import jaxprs


def checkpointed(equation: core.JaxprEqn, body: Callable[..., Any]) -> Any:
    """`jax.checkpoint` of another function, with the options of an equation.

    The function returns a list. One that computes again for a gradient stays so: XLA
    must not merge it with the values that it computes again.
    """
    options = {key: equation.params[key] for key in ("prevent_cse", "policy")}
    run = jax.checkpoint(body, **options)
    if not equation.params["differentiated"]:
        return run

    def again(*args: Any) -> list[Any]:
        jaxpr, consts = jaxprs.program_of(run, *args)
        *others, last = jaxpr.eqns
        last = last.replace(params=last.params | {"differentiated": True})
        program = jaxprs.Program(jaxpr.replace(eqns=[*others, last]), consts)
        return jaxprs.results(program, jax.tree.leaves(args))

    return again
