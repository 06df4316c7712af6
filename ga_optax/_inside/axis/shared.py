"""What all micro-batches share is computed once, and not by each of them.

What depends on parameters and on filled buffers alone, and not on rows, is the same in
every micro-batch: the factors of a covariance, a loss of gathered rows. Its values
become buffers that are filled without a loop. Their cotangents add up as those of other
buffers do, and go back through it once.

Where it takes little beside what the rows take it stays in the loops, and so does what
is cheap and depends on parameters alone: a cast of all weights, kept, would be another
copy of them.
"""

from typing import Any

from jax.extend import core

from ga_optax._inside.axis import cost, cut
from ga_optax._inside.axis.rules import is_collective
from ga_optax._inside.axis.schedule import Schedule
from ga_optax._passes.ir import following, variables

_LITTLE = 1 / 20  # of the work of the rows


def share(schedule: Schedule) -> Schedule:
    """The schedule with buffers for what is computed once."""
    schedule = schedule.copy()
    made = [e.outvars for e in schedule.jaxpr.eqns if is_collective(e, schedule.axis)]
    gathered = following(schedule.jaxpr, [x for outs in made for x in outs])
    for level in range(schedule.end):
        runs = schedule.levels(schedule.roots)
        group = [e for e in schedule.jaxpr.eqns if _is_shared(schedule, e, level, runs)]
        sources = [
            x
            for e in group
            if not cost.is_cheap(e)
            or (cost.work(e) and not gathered.isdisjoint(e.outvars))
            for x in e.outvars
        ]
        if sources and _is_much(schedule, group, runs):
            for x in _smallest(schedule, group, sources, runs):
                schedule.buffer(x, "once", level + 0.5)
    return schedule


def _is_shared(
    schedule: Schedule, equation: core.JaxprEqn, level: int, runs: dict[int, int]
) -> bool:
    """Whether it runs in loops, but says the same in all micro-batches."""
    facts = [schedule.facts[x] for x in equation.outvars]
    here = bool(facts) and all(f.level == level and not f.own for f in facts)
    alone = not is_collective(equation, schedule.axis) and not equation.effects
    return here and alone and id(equation) in runs


def _is_much(
    schedule: Schedule, group: list[core.JaxprEqn], runs: dict[int, int]
) -> bool:
    """Whether it takes more than a little of the loops in which it runs."""

    def total(equations: list[core.JaxprEqn], levels: int) -> float:
        each = ((cost.work(e), runs.get(id(e), 0) & levels) for e in equations)
        return sum(work * which.bit_count() for work, which in each)

    levels = 0
    for e in group:
        levels |= runs[id(e)]
    own = [
        e for e in schedule.jaxpr.eqns if any(schedule.fact(x).own for x in e.outvars)
    ]
    return total(group, levels) > _LITTLE * total(own, levels)


def _smallest(
    schedule: Schedule,
    group: list[core.JaxprEqn],
    sources: list[Any],
    runs: dict[int, int],
) -> list[Any]:
    """The smallest set of shared values of which the loops compute the rest."""
    inside = {id(e) for e in group}
    levels = range(1, schedule.end + 1)
    sinks = {x for i in levels for x in variables(schedule.roots(i))}
    for e in schedule.jaxpr.eqns:
        if id(e) in runs and id(e) not in inside:
            sinks.update(variables(e.invars))

    def size(x: Any) -> float:
        return cost.nbytes(x) + 1.0

    return cut.smallest(cut.readers(group, sources), sources, sinks, size)
