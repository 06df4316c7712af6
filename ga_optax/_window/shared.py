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
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core

from ga_optax._passes import read, rewrite
from ga_optax._passes.read import following
from ga_optax._window import cost, counts, cut
from ga_optax._window.counts import LoopSets
from ga_optax._window.meetings import is_collective
from ga_optax._window.schedule import Schedule

_LITTLE = 1 / 20  # of the work of the rows


def has_much(jaxpr: core.Jaxpr, rows: Iterable[Any]) -> bool:
    """True if micro-batches share more than a little of the work of a program.

    `rows` are the arguments that differ between micro-batches.
    """
    shared, of_rows = _work(jaxpr, set(rows))
    return shared > _LITTLE * of_rows


def _work(jaxpr: core.Jaxpr, of_rows: set[Any]) -> tuple[float, float]:
    """The work of equations that are not cheap and read no rows; and of the others."""
    shared = rest = 0.0
    for e in jaxpr.eqns:
        its = [read.is_among(x, of_rows) for x in e.invars]
        if not any(its):
            shared += 0.0 if read.is_cheap(e) else read.work(e)
        elif read.is_inline(e):
            [inside] = read.inner_programs(e)
            some = _work(inside, set(itertools.compress(inside.invars, its)))
            shared, rest = shared + some[0], rest + some[1]
        else:
            rest += read.work(e)
        of_rows.update(e.outvars if any(its) else ())
    return shared, rest


def share(schedule: Schedule) -> Schedule:
    """The schedule with buffers for values that are computed once."""
    loops = counts.counted(schedule.copy())
    jaxpr = schedule.jaxpr
    meetings = [e.outvars for e in jaxpr.eqns if is_collective(e, schedule.axis)]
    gathered = following(jaxpr, [x for outs in meetings for x in outs])
    of_rows: dict[int, float] = collections.defaultdict(float)  # by their loops
    for e in filter(schedule.is_of_rows, jaxpr.eqns):
        of_rows[loops.of(e)] += read.work(e)
    groups: dict[int, list[core.JaxprEqn]] = {}
    for e in jaxpr.eqns:
        if _is_shared(schedule, e):
            groups.setdefault(schedule.level_of(e), []).append(e)
    for level in range(1, schedule.end + 1):
        group = [e for e in groups.get(level, ()) if loops.of(e)]
        sources = [
            x
            for e in group
            if not read.is_cheap(e)
            or (read.work(e) and not gathered.isdisjoint(e.outvars))
            for x in e.outvars
        ]
        if sources and _is_much(loops, group, of_rows):
            for x in _smallest(loops, group, sources):
                loops.schedule.buffer(x, "shared", level)
    return loops.schedule


def parted(jaxpr: core.Jaxpr, axis: str, rows: Sequence[Any]) -> core.Jaxpr:
    """The program with checkpoints of their own for values that micro-batches share.

    One checkpoint may hold values of parameters alone, such as weights that it casts;
    values of sums over all rows, such as the layers of experts; and values of rows that
    read both. `rows` are the arguments that differ between micro-batches.
    """
    of_rows, gathered = set(rows), set()

    def change(e: core.JaxprEqn) -> list[core.JaxprEqn]:
        is_checkpoint = read.kind(e) == "checkpoint" and not e.effects
        parts = _apart(e, of_rows, gathered) if is_checkpoint else [e]
        for x in parts:
            if is_collective(x, axis):
                gathered.update(x.outvars)
                continue
            for some in (of_rows, gathered):
                if not some.isdisjoint(read.variables(x.invars)):
                    some.update(x.outvars)
        return parts

    return rewrite.changed(jaxpr, change)


def _apart(
    e: core.JaxprEqn, of_rows: set[Any], gathered: set[Any]
) -> list[core.JaxprEqn]:
    """A checkpoint of values of parameters, one of values of `gathered`, and the rest.

    The rest reads of the others what equations that are not cheap compute. What is
    cheap runs again in the rest, so that it is no residual.
    """
    [inside] = read.inner_programs(e)
    outside = dict(zip(inside.invars, e.invars, strict=True))
    rows, sums = (
        following(inside, [v for v, x in outside.items() if read.is_among(x, some)])
        for some in (of_rows, gathered)
    )
    pairs = list(zip(inside.outvars, e.outvars, strict=True))
    computed = [x for one in inside.eqns for x in one.outvars]
    shared = {*computed} - rows
    parts, known = [], outside
    for group in (shared - sums, shared & sums):
        results = [x for x in pairs if read.is_among(x[0], group)]
        rest = [x.invars for x in inside.eqns if group.isdisjoint(x.outvars)]
        reads = group & {*read.variables(itertools.chain(*rest))}
        dear = (x for x in computed if x in reads and _is_dear(inside, x, known))
        names = {x: dict(results).get(x, core.Var(x.aval)) for x in dear}
        results += (x for x in names.items() if x not in results)
        parts += [_part(e, results, known)] if results else []
        pairs = [x for x in pairs if x not in results]
        known = known | names
    parts += [_part(e, pairs, known)] if pairs else []
    return parts if len(parts) > 1 else [e]


def _is_dear(jaxpr: core.Jaxpr, x: Any, known: Container[Any]) -> bool:
    """True if a value takes an equation that is not cheap."""
    equations, _ = read.needed(jaxpr, [x], known.__contains__)
    return not all(map(read.is_cheap, equations))


def _part(
    e: core.JaxprEqn, results: Collection[tuple[Any, Any]], known: Mapping[Any, Any]
) -> core.JaxprEqn:
    """A checkpoint of some values in a checkpoint: of each the name inside and outside.

    `known` has the names outside of values that are computed before.
    """
    [inside] = read.inner_programs(e)
    wanted, outs = ([pair[i] for pair in results] for i in (0, 1))
    equations, reads = read.needed(inside, wanted, known.__contains__)
    ends = {"constvars": [], "invars": reads, "outvars": wanted}
    new = rewrite.with_inner(e, lambda _: inside.replace(eqns=equations, **ends))
    return new.replace(invars=[known[x] for x in reads], outvars=outs)


def _is_shared(schedule: Schedule, equation: core.JaxprEqn) -> bool:
    """True if the equation has the same result in every micro-batch."""
    is_alone = not is_collective(equation, schedule.axis) and not equation.effects
    return bool(equation.outvars) and is_alone and not schedule.is_of_rows(equation)


def _is_much(
    loops: LoopSets, group: list[core.JaxprEqn], of_rows: Mapping[int, float]
) -> bool:
    """True if a group takes more than a little of the work of its loops."""
    group_loops = functools.reduce(operator.or_, map(loops.of, group))
    shared = sum(read.work(e) * loops.of(e).bit_count() for e in group)
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
