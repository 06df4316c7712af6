"""Pieces of what micro-batches share, as by `microbatch`.

What is computed of a large sum, such as the layers of experts of their slots, and is
separate along an axis of the sum, may take more than the rows of a micro-batch. Then it
is computed in pieces along that axis.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from .._partition.held import WHOLE, Axis, Rows
from .._partition.partitioned import Argument, partition
from .._passes import equation, jaxprs
from . import costs
from .meetings import is_collective

LITTLE = 2**20  # bytes: of what takes no more there are no pieces


def in_pieces(
    jaxpr: core.Jaxpr, axis: str, traits: dict[Any, Any], how: dict[str, Any]
) -> core.Jaxpr:
    """The program, in which each such part is one equation.

    `how` has the fields of a `Divided`. It has as many pieces at most.
    """
    sums = [
        x
        for e in jaxpr.eqns
        if e.primitive.name == "psum" and is_collective(e, axis)
        for x in e.outvars
        if jaxprs.nbytes(x) > LITTLE // 16
    ]
    if not sums:
        return jaxpr
    shared = {x for x, its in traits.items() if not its.of_rows}
    own = [e for e in jaxpr.eqns if shared.isdisjoint(e.outvars)]
    smooth = {x for x in shared if traits[x].smooth}
    most = max(costs.bytes_of_residuals(own, smooth, shared), LITTLE)
    for x in sums:
        group = _computed_of(jaxpr, traits, x)
        made = {y for e in group for y in e.outvars}
        rest = [e for e in jaxpr.eqns if made.isdisjoint(e.outvars)]
        reads, used = (
            dict.fromkeys(jaxprs.variables(y for e in some for y in e.invars))
            for some in (group, rest)
        )
        used |= dict.fromkeys(jaxprs.variables(jaxpr.outvars))
        ins = [y for y in reads if y not in made]
        outs = [y for y in used if y in made]
        if costs.bytes_of_residuals(group, smooth, ins) <= most:
            continue
        program = jaxprs.between(jaxpr, group, ins, outs, ins)[0]
        if (one := _divided(program, x, smooth, how)) is not None:
            jaxpr = jaxpr.replace(eqns=_in_order([*rest, one], traits))
    return jaxpr


def _computed_of(
    jaxpr: core.Jaxpr, traits: dict[Any, Any], x: Any
) -> list[core.JaxprEqn]:
    """The equations that follow from a sum, and need no rows and no later sum."""
    found, group = {x}, []
    for e in jaxpr.eqns:
        if found.isdisjoint(jaxprs.variables(e.invars)):
            continue
        if e.effects or any(
            one.primitive.name == equation.NAME for one in jaxprs.within(e)
        ):
            return []
        its = traits[e.outvars[0]]
        if its.level == traits[x].level and not its.of_rows:
            group.append(e)
            found.update(e.outvars)
    return group


def _divided(
    program: core.Jaxpr, x: Any, smooth: set[Any], how: dict[str, Any]
) -> core.JaxprEqn | None:
    """The equation of a program in pieces of `x`; None if no axis of `x` allows it."""
    names: Any = program.invars
    outs: Any = program.outvars
    shape, most = x.aval.shape, how["number"]
    axes = sorted(range(len(shape)), key=shape.__getitem__, reverse=True)
    numbers = [n for n in range(most, 1, -1) if most % n == 0]
    for d, number in itertools.product(axes, numbers):
        if shape[d] % number:
            continue
        arguments = [
            Argument(y.aval, Rows(d) if y is x else WHOLE, y in smooth) for y in names
        ]
        part = partition(program, arguments, Axis("pieces", number, 0))
        if part.meets or part.whole:
            continue
        of = [d if y is x else None for y in names]
        how = {**how, "number": number, "name": "what micro-batches share"}
        divided = equation.Divided.of_program(core.ClosedJaxpr(program, ()), of, **how)
        types = [y.aval for y in names]
        [e] = jax.make_jaxpr(divided.bind)(types).jaxpr.eqns
        source = max(program.eqns, key=jaxprs.work).source_info
        return e.replace(invars=names, outvars=outs, source_info=source)
    return None


def _in_order(
    equations: Sequence[core.JaxprEqn], traits: dict[Any, Any]
) -> list[core.JaxprEqn]:
    """Equations by level; of a level those of rows are last, and read the others."""

    def place(e: core.JaxprEqn) -> tuple[int, bool]:
        every = [traits[x] for x in e.outvars or jaxprs.variables(e.invars)]
        return max(((x.level, x.of_rows) for x in every), default=(0, False))

    return sorted(equations, key=place)
