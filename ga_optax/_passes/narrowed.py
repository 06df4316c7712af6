"""Sharded parameters that are cast before they are gathered: `sync="last"`.

A loss often casts its parameters to bfloat16, and does nothing else with them. If each
device casts its part before all parts are gathered, the network carries half as much,
and the gathered parameters take half the memory. No micro-batch casts them any more.

The program then takes such a parameter in low precision, and returns its gradient in
low precision, as the cast would receive it. The values are the same.
"""

from typing import Any

import numpy as np
from jax.extend import core

from ga_optax._passes import read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.primitives import CAST
from ga_optax._passes.read import Program


def narrowed(program: Program, facts: Facts) -> Program:
    """The program, which takes some parameters in the dtype to which it casts them."""
    jaxpr, dtypes = program.jaxpr, {}
    for x, is_gathered in zip(jaxpr.invars, facts.gathered_params, strict=False):
        found = _dtypes_read(jaxpr, x) if is_gathered else set()
        if len(found) == 1 and None not in found:
            [dtypes[x]] = found
        elif len(found) > 1:
            [(reader, _), *_] = read.uses(jaxpr, x)
            left_alone(
                reader, "a parameter is not cast to one dtype wherever it is read"
            )
    return program._replace(jaxpr=_taking(jaxpr, dtypes)) if dtypes else program


def _dtypes_read(jaxpr: core.Jaxpr, x: Any) -> set[np.dtype | None]:
    """The dtypes to which readers narrow a variable; None for other readers."""
    found: set[np.dtype | None] = set()
    if x in read.variables(jaxpr.outvars):
        found.add(None)
    for equation, i in read.uses(jaxpr, x):
        if read.kind(equation) in read.THROUGH and not _is_carried(equation, i):
            [inner] = read.inner_programs(equation)
            found |= _dtypes_read(inner, inner.invars[i])
        else:
            found.add(_narrower(equation))
    return found


def _is_carried(equation: core.JaxprEqn, i: int) -> bool:
    """True if the i-th argument of a scan is in the carry."""
    if read.kind(equation) != "scan":
        return False
    how = read.scan_of(equation)
    return 0 <= i - how.num_consts < how.num_carry


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


def _taking(jaxpr: core.Jaxpr, dtypes: dict[Any, Any]) -> core.Jaxpr:
    """The program with arguments of other dtypes, which it no longer casts to these."""
    new = {
        x: core.Var(x.aval.update(dtype=dtype, weak_type=False))
        for x, dtype in dtypes.items()
    }

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        ins = equation.invars
        if equation.primitive.name == CAST and read.is_among(ins[0], dtypes):
            new[equation.outvars[0]] = new[ins[0]]
            return []

        def change_inner(inner: core.Jaxpr) -> core.Jaxpr:
            pairs = zip(inner.invars, ins, strict=True)
            inside = {v: dtypes[x] for v, x in pairs if read.is_among(x, dtypes)}
            return _taking(inner, inside)

        if not dtypes.keys().isdisjoint(read.variables(ins)):
            equation = rewrite.with_inner(equation, change_inner)
        return [equation.replace(invars=rewrite.rename(ins, new))]

    jaxpr = rewrite.changed(jaxpr, change)
    invars, outvars = (rewrite.rename(xs, new) for xs in (jaxpr.invars, jaxpr.outvars))
    return jaxpr.replace(invars=invars, outvars=outvars)
