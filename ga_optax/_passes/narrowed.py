"""Sharded parameters that are cast before they are gathered: `sync="last"`.

A loss often casts a parameter to bfloat16, and does nothing else with it. If each
device casts its part before all parts are gathered, the network carries half as much,
and the gathered parameter takes half the memory. No micro-batch casts it any more.

The program then takes the parameter in low precision, and returns the gradient that the
cast would get. One cast alone must read the parameter, once in a run: the gradients of
several casts are added up in the precision of the parameter.
"""

from typing import Any

import numpy as np
from jax.extend import core

from ga_optax._passes import interpret, read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.primitives import CAST
from ga_optax._passes.read import Program


def narrowed(program: Program, facts: Facts) -> Program:
    """The program, which takes some parameters in the dtype to which it casts them."""
    jaxpr = program.jaxpr
    for i, is_gathered in enumerate(facts.gathered_once):
        x = jaxpr.invars[i]
        if is_gathered and (dtype := _dtype_of_cast(jaxpr, x)):
            jaxpr = _taking(jaxpr, i, dtype)
        elif is_gathered:
            for reader, _ in read.uses(jaxpr, x):
                if _narrower(reader):
                    left_alone(reader, "not one cast alone reads the parameter")
    return program._replace(jaxpr=jaxpr)


def _dtype_of_cast(jaxpr: core.Jaxpr, x: Any) -> np.dtype | None:
    """The dtype of the cast to fewer bits that alone reads a variable; or None."""
    use = read.only_use(jaxpr, x)
    if use is None:
        return None
    equation, i = use
    if read.is_inline(equation) or read.is_sliced(equation, i):
        [inner] = read.inner_programs(equation)
        return _dtype_of_cast(inner, inner.invars[i])
    return _narrower(equation)


def _narrower(equation: core.JaxprEqn) -> np.dtype | None:
    """The dtype of a cast to fewer bits; None for any other equation.

    And None for 8 bits, which not every network carries.
    """
    if equation.primitive.name != CAST or equation.params["sharding"] is not None:
        return None
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    is_narrower = 2 <= after.dtype.itemsize < before.dtype.itemsize
    return after.dtype if is_narrower and read.is_inexact(after) else None


def _taking(jaxpr: core.Jaxpr, i: int, dtype: np.dtype) -> core.Jaxpr:
    """The program with an i-th argument of that dtype, and without the cast to it."""
    x: Any = jaxpr.invars[i]
    new = core.Var(x.aval.update(dtype=dtype, weak_type=False))
    jaxpr = jaxpr.replace(invars=interpret.put(jaxpr.invars, [i], [new]))
    [(equation, j)] = read.uses(jaxpr, x)
    if equation.primitive.name == CAST:
        known = {equation.outvars[0]: new}
        eqns = rewrite.renamed((e for e in jaxpr.eqns if e is not equation), known)
        return jaxpr.replace(eqns=eqns, outvars=rewrite.rename(jaxpr.outvars, known))
    inner = rewrite.with_inner(equation, lambda inner: _taking(inner, j, dtype))
    inner = inner.replace(invars=rewrite.rename(inner.invars, {x: new}))
    return jaxpr.replace(eqns=[inner if e is equation else e for e in jaxpr.eqns])
