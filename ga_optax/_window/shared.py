"""Values that all micro-batches share are computed once.

A value of parameters and of filled buffers alone, and not of rows, is the same in every
micro-batch: the factors of a covariance, a loss of gathered rows. Such values become
buffers that are filled without a loop. Their cotangents add up as the cotangents of
other buffers, and go back once.

A value stays in the loops if it takes little work beside the rows, or if it is cheap
and depends on parameters alone: a stored cast of all weights would be another copy.
"""

import collections
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from ga_optax._passes import read, rewrite
from ga_optax._passes.read import following
from ga_optax._window import cost, counts, cut
from ga_optax._window.counts import LoopSets
from ga_optax._window.meetings import is_collective
from ga_optax._window.schedule import Schedule

_LITTLE = 1 / 20  # of the work of the rows


def share(schedule: Schedule) -> Schedule:
    """The schedule with buffers for values that are computed once."""
    loops = counts.counted(schedule.copy())
    jaxpr = schedule.jaxpr
    meetings = [e.outvars for e in jaxpr.eqns if is_collective(e, schedule.axis)]
    gathered = following(jaxpr, [x for outs in meetings for x in outs])
    of_rows: dict[int, float] = collections.defaultdict(float)  # by their loops
    for e in filter(schedule.is_of_rows, jaxpr.eqns):
        of_rows[loops.of(e)] += cost.work(e)
    groups: dict[int, list[core.JaxprEqn]] = {}
    for e in jaxpr.eqns:
        if _is_shared(schedule, e):
            groups.setdefault(schedule.level_of(e), []).append(e)
    for level in range(1, schedule.end + 1):
        group = [e for e in groups.get(level, ()) if loops.of(e)]
        sources = [
            x
            for e in group
            if not cost.is_cheap(e)
            or (cost.work(e) and not gathered.isdisjoint(e.outvars))
            for x in e.outvars
        ]
        if sources and _is_much(loops, group, of_rows):
            for x in _smallest(loops, group, sources):
                loops.schedule.buffer(x, "shared", level)
    return loops.schedule


def parted(jaxpr: core.Jaxpr, axis: str, rows: Sequence[Any]) -> core.Jaxpr:
    """The program with a checkpoint of its own for values that micro-batches share.

    One checkpoint may hold values of sums over all rows, such as the layers of experts,
    and values of rows that read them. `rows` are the arguments that differ between
    micro-batches.
    """
    of_rows, gathered = set(rows), set()

    def change(e: core.JaxprEqn) -> list[core.JaxprEqn]:
        is_checkpoint = read.kind(e) == "checkpoint"
        parts = _in_two(e, of_rows, gathered) if is_checkpoint else [e]
        for x in parts:
            if is_collective(x, axis):
                gathered.update(x.outvars)
                continue
            for some in (of_rows, gathered):
                if not some.isdisjoint(read.variables(x.invars)):
                    some.update(x.outvars)
        return parts

    return rewrite.changed(jaxpr, change)


def _in_two(
    e: core.JaxprEqn, of_rows: set[Any], gathered: set[Any]
) -> list[core.JaxprEqn]:
    """A checkpoint of shared values that are computed of `gathered`, and the rest."""
    [inside] = read.inner_programs(e)
    outside = dict(zip(inside.invars, e.invars, strict=True))
    rows, shared = (
        following(inside, [v for v, x in outside.items() if read.is_among(x, some)])
        for some in (of_rows, gathered)
    )
    shared -= {*rows, *outside}
    rest = [x.invars for x in inside.eqns if shared.isdisjoint(x.outvars)]
    reads = set(read.variables([*inside.outvars, *itertools.chain(*rest)]))
    names = {x: core.Var(x.aval) for x in shared & reads}
    first, _ = read.needed(inside, names, outside.__contains__)
    if e.effects or not rows or all(map(cost.is_cheap, first)):
        return [e]

    def part(wanted: Sequence[Any], known: Mapping[Any, Any], outs: Any) -> Any:
        equations, reads = read.needed(inside, wanted, known.__contains__)
        ends = {"constvars": [], "invars": reads, "outvars": wanted}
        new = rewrite.with_inner(e, lambda _: inside.replace(eqns=equations, **ends))
        return new.replace(invars=[known[x] for x in reads], outvars=outs)

    one = part([*names], outside, [*names.values()])
    return [one, part(inside.outvars, outside | names, e.outvars)]


def _is_shared(schedule: Schedule, equation: core.JaxprEqn) -> bool:
    """True if the equation has the same result in every micro-batch."""
    is_alone = not is_collective(equation, schedule.axis) and not equation.effects
    return bool(equation.outvars) and is_alone and not schedule.is_of_rows(equation)


def _is_much(
    loops: LoopSets, group: list[core.JaxprEqn], of_rows: Mapping[int, float]
) -> bool:
    """True if a group takes more than a little of the work of its loops."""
    group_loops = functools.reduce(operator.or_, map(loops.of, group))
    shared = sum(cost.work(e) * loops.of(e).bit_count() for e in group)
    rows = sum(x * (group_loops & some).bit_count() for some, x in of_rows.items())
    return shared > _LITTLE * rows


def _smallest(
    loops: LoopSets, group: list[core.JaxprEqn], sources: list[Any]
) -> list[Any]:
    """The smallest set of shared values from which loops can compute the others."""
    inside = {id(e) for e in group}
    sinks = set()
    for x in (x for e in group for x in e.outvars):
        readers = (r for r, _ in read.uses(loops.schedule.jaxpr, x))
        outside = (r for r in readers if id(r) not in inside)
        if loops.roots.get(x) or any(map(loops.of, outside)):
            sinks.add(x)

    def size(x: Any) -> float:
        return cost.nbytes(x) + 1.0

    return cut.smallest(group, sources, sinks, size)
