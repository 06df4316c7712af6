"""What all micro-batches share is computed once, and not by each of them.

What depends on parameters and on filled buffers alone, and not on rows, is the same in
every micro-batch: the factors of a covariance, a loss of gathered rows. Its values
become buffers that are filled without a loop. Their cotangents add up as those of other
buffers do, and go back through it once.

Where it takes little beside what the rows take it stays in the loops, and so does what
is cheap and depends on parameters alone: a cast of all weights, kept, would be another
copy of them.
"""

import collections
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from ga_optax._passes import ir
from ga_optax._passes.ir import following
from ga_optax._window import cost, cut
from ga_optax._window.counts import Counter
from ga_optax._window.rules import is_collective
from ga_optax._window.schedule import Schedule

_LITTLE = 1 / 20  # of the work of the rows


def share(schedule: Schedule) -> Schedule:
    """The schedule with buffers for what is computed once."""
    counter = Counter(schedule.copy())
    jaxpr = schedule.jaxpr
    made = [e.outvars for e in jaxpr.eqns if is_collective(e, schedule.axis)]
    gathered = following(jaxpr, [x for outs in made for x in outs])
    of_rows: dict[int, float] = collections.defaultdict(float)  # by their levels
    for e in filter(schedule.is_own, jaxpr.eqns):
        of_rows[counter.levels(e)] += cost.work(e)
    groups: dict[int, list[core.JaxprEqn]] = {}
    for e in jaxpr.eqns:
        if _is_shared(schedule, e):
            groups.setdefault(schedule.level_of(e), []).append(e)
    for level in range(schedule.end):
        group = [e for e in groups.get(level, ()) if counter.levels(e)]
        sources = [
            x
            for e in group
            if not cost.is_cheap(e)
            or (cost.work(e) and not gathered.isdisjoint(e.outvars))
            for x in e.outvars
        ]
        if sources and _is_much(counter, group, of_rows):
            for x in _smallest(counter, group, sources):
                counter.keep(x, "once", level)
    return counter.schedule


def parted(jaxpr: core.Jaxpr, axis: str, own: Sequence[Any]) -> core.Jaxpr:
    """The program in whose checkpoints what all micro-batches share is apart.

    A checkpoint may hold both what comes of sums over all rows, such as the layers of
    experts, and what rows read of that. `own` is what differs between micro-batches.
    """
    theirs, met = set(own), set()

    def change(e: core.JaxprEqn) -> list[core.JaxprEqn]:
        parts = _in_two(e, theirs, met) if ir.kind(e) == "checkpoint" else [e]
        for x in parts:
            if is_collective(x, axis):
                met.update(x.outvars)
                continue
            for some in (theirs, met):
                if not some.isdisjoint(ir.variables(x.invars)):
                    some.update(x.outvars)
        return parts

    return ir.changed(jaxpr, change)


def _in_two(e: core.JaxprEqn, theirs: set[Any], met: set[Any]) -> list[core.JaxprEqn]:
    """A checkpoint as one of what all share, of what `met`, and one of the rest."""
    [inside] = ir.inner_programs(e)
    outside = dict(zip(inside.invars, e.invars, strict=True))
    own, shared = (
        following(inside, [v for v, x in outside.items() if ir.is_among(x, some)])
        for some in (theirs, met)
    )
    shared -= {*own, *outside}
    rest = [x.invars for x in inside.eqns if shared.isdisjoint(x.outvars)]
    read = set(ir.variables([*inside.outvars, *itertools.chain(*rest)]))
    names = {x: core.Var(x.aval) for x in shared & read}
    first, _ = ir.needed(inside, names, outside.__contains__)
    if e.effects or not own or all(map(cost.is_cheap, first)):
        return [e]

    def part(wanted: Sequence[Any], known: Mapping[Any, Any], outs: Any) -> Any:
        equations, read = ir.needed(inside, wanted, known.__contains__)
        ends = {"constvars": [], "invars": read, "outvars": wanted}
        new = ir.with_inner(e, lambda _: inside.replace(eqns=equations, **ends))
        return new.replace(invars=[known[x] for x in read], outvars=outs)

    one = part([*names], outside, [*names.values()])
    return [one, part(inside.outvars, outside | names, e.outvars)]


def _is_shared(schedule: Schedule, equation: core.JaxprEqn) -> bool:
    """Whether it says the same in all micro-batches."""
    alone = not is_collective(equation, schedule.axis) and not equation.effects
    return bool(equation.outvars) and not schedule.is_own(equation) and alone


def _is_much(
    counter: Counter, group: list[core.JaxprEqn], of_rows: Mapping[int, float]
) -> bool:
    """Whether it takes more than a little of the loops in which it runs."""
    levels = functools.reduce(operator.or_, map(counter.levels, group))
    shared = sum(cost.work(e) * counter.levels(e).bit_count() for e in group)
    rows = sum(x * (levels & its).bit_count() for its, x in of_rows.items())
    return shared > _LITTLE * rows


def _smallest(
    counter: Counter, group: list[core.JaxprEqn], sources: list[Any]
) -> list[Any]:
    """The smallest set of shared values of which the loops compute the rest."""
    inside = {id(e) for e in group}
    sinks = set()
    for e in group:
        for x in e.outvars:
            readers = (r for r, _ in ir.uses(counter.schedule.jaxpr, x))
            outside = (r for r in readers if id(r) not in inside)
            if counter.there.roots.get(x) or any(map(counter.levels, outside)):
                sinks.add(x)

    def size(x: Any) -> float:
        return cost.nbytes(x) + 1.0

    return cut.smallest(group, sources, sinks, size)
