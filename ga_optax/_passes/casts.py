"""Casts of parameters, moved to where a scan has sliced them.

Many losses cast all parameters first, and then scan over the layers. The gradients of
all layers then exist at once, to be cast back, beside a copy of the parameters. If each
layer is cast inside the scan, its gradient can be added there. The values are the same.

Inside of a scan, a cast moves on into a rematerialised function. Otherwise the scan
would keep the cast layer as a residual.

A cast of a whole parameter stays where it is, in each micro-step: see `is_narrowed`.
"""

from typing import Any

from jax.extend import core

from ga_optax._passes import interpret, read, rewrite
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.primitives import CAST
from ga_optax._passes.read import Program


def sunk(program: Program, facts: Facts) -> Program:
    """The program with casts moved into scans, where gradients then come in slices.

    Otherwise a cast stays: the gradients of all layers would be a wider stack.
    """
    jaxpr = program.jaxpr
    for x in jaxpr.invars[: facts.num_params]:
        moved = _sunk(jaxpr, x)
        if arrival(moved, x) == "slices":
            jaxpr = moved
            continue
        for cast, _ in read.uses(jaxpr, x):
            if cast.primitive.name == CAST and _sinks(jaxpr, cast, False):
                left_alone(cast, "its gradient does not come in slices")
    return program._replace(jaxpr=jaxpr)


def _sunk(jaxpr: core.Jaxpr, x: Any, sliced: bool = False) -> core.Jaxpr:
    """The program, with the cast of an argument inside of the scan over the argument.

    `sliced` is True for the body of such a scan.
    """
    use, cast = read.only_use(jaxpr, x), None
    if use and use[0].primitive.name == CAST and _sinks(jaxpr, use[0], sliced):
        cast = use[0]
        use = read.only_use(jaxpr, cast.outvars[0])
    if use is None or read.kind(use[0]) not in read.THROUGH:
        return jaxpr
    equation, i = use

    def inside(inner: core.Jaxpr) -> core.Jaxpr:
        if cast is not None:
            inner = _with_cast(inner, i, cast)
        return _sunk(inner, inner.invars[i], sliced or read.kind(equation) == "scan")

    new = rewrite.with_inner(equation, inside)
    if new is equation:
        return jaxpr
    new = new.replace(invars=interpret.put(equation.invars, [i], [x]))
    eqns = [new if e is equation else e for e in jaxpr.eqns if e is not cast]
    return jaxpr.replace(eqns=eqns)


def _with_cast(jaxpr: core.Jaxpr, i: int, cast: core.JaxprEqn) -> core.Jaxpr:
    """The program, which casts its i-th argument first."""
    whole: Any = cast.invars[0].aval
    x = core.Var(jaxpr.invars[i].aval.update(dtype=whole.dtype))
    first = cast.replace(invars=[x], outvars=[jaxpr.invars[i]])
    invars = interpret.put(jaxpr.invars, [i], [x])
    return jaxpr.replace(invars=invars, eqns=[first, *jaxpr.eqns])


def _sinks(jaxpr: core.Jaxpr, cast: core.JaxprEqn, sliced: bool) -> bool:
    """True if a cast can move into the scan over its result, or on inside the scan."""
    [out] = cast.outvars
    if cast.params["sharding"] is None and _is_read_once(jaxpr, out, sliced):
        return True
    if any(use and read.is_sliced(*use) for use in read.uses_inside(jaxpr, out)):
        left_alone(cast, "the cast is sharded, or not read by one scan alone")
    return False


def _is_read_once(jaxpr: core.Jaxpr, variable: Any, sliced: bool) -> bool:
    """True if a variable is read once, by a scan over the variable or inside one."""
    use = read.only_use(jaxpr, variable)
    if use is None:
        return False
    equation, i = use
    if not read.is_inline(equation):
        return read.is_sliced(equation, i)
    [inner] = read.inner_programs(equation)
    return sliced or _is_read_once(inner, inner.invars[i], sliced)


def is_narrowed(jaxpr: core.Jaxpr, variable: Any) -> bool:
    """True if only casts to fewer bits read a variable."""

    def narrows(equation: core.JaxprEqn, _: int) -> bool:
        is_cast = equation.primitive.name == CAST
        size = variable.aval.dtype.itemsize
        return is_cast and equation.params["new_dtype"].itemsize < size

    reads = list(read.uses_inside(jaxpr, variable))
    return bool(reads) and all(use and narrows(*use) for use in reads)
