"""The stages of a window, with how often each equation runs.

A stage is a loop over the micro-batches, or a computation of what they share. A stage
on the way back knows which equations need not run forward, since no gradient reads
their results, and which buffers it fills again. `run` runs this list; reports show
it.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from .._passes import primitives
from .._passes.jaxprs import is_cheap, variables
from .schedule import Level, Schedule


class Stage(NamedTuple):
    """A loop over the micro-batches, or a computation of what they share.

    Attributes:
      name: the name, in words.
      kind: what it does: "fill" or "fill again" buffers, take cotangents "back", or
        compute "the loss", or what comes "after" it.
      level: the time: buffers of earlier levels are known.
      forward: the equations that run forward.
      back: the equations through which cotangents go back, if they have some.
      fills: the buffers that it fills, by number.
    """

    name: str
    kind: str
    level: Level
    forward: Sequence[core.JaxprEqn]
    back: Sequence[core.JaxprEqn] = ()
    fills: Sequence[int] = ()


def stages(schedule: Schedule) -> Iterator[Stage]:
    """The stages of a window, in the order in which they run."""
    numbers, last = range(schedule.end), Level(schedule.end)
    for n in numbers:
        for level in (Level(n), Level(n + 1, in_loop=False)):
            if members := schedule.filled_at(level):
                runs = schedule.needed(schedule.operands(level), level)[0]
                yield Stage(_name(level), "fill", level, runs, fills=members)
    runs, back = (
        schedule.needed(schedule.roots(schedule.end, smooth=smooth), last)[0]
        for smooth in (False, True)
    )
    yield Stage("the loss", "the loss", last, runs, back, schedule.filled_at(last))
    for n in reversed(numbers):
        if members := schedule.refills.get(n):
            others = set(range(len(schedule.buffers))) - set(members)
            operands = [schedule.buffers[j].operand for j in members]
            level, name = Level(n + 1), f"level {n}, filled again"
            runs = schedule.needed(operands, level, known=others)[0]
            yield Stage(name, "fill again", level, runs, fills=members)
        for level in (Level(n + 1, in_loop=False), Level(n)):
            if roots := schedule.operands(level, smooth=True):
                back = schedule.needed(roots, level)[0]
                runs = _read_back(schedule, back) if level.in_loop else back
                yield Stage(f"{_name(level)}, back", "back", level, runs, back)
    if runs := schedule.needed(schedule.epilogue_results, schedule.epilogue)[0]:
        yield Stage("after the loops", "after", schedule.epilogue, runs)


def _name(level: Level) -> str:
    return f"level {level.number}{', shared' * (not level.in_loop)}"


class Runs(NamedTuple):
    """The runs of an equation over the rows; `costs` is True if it is not cheap."""

    costs: bool = False
    forward: int = 0
    backward: int = 0


def runs_of_equations(schedule: Schedule) -> dict[int, Runs]:
    """The runs of every equation of rows, by its id."""
    forward, backward = collections.Counter(), collections.Counter()
    for stage in stages(schedule):
        forward.update(map(id, stage.forward))
        backward.update(id(e) for e in stage.back if schedule.is_smooth(e))
    return {
        id(e): Runs(not is_cheap(e), forward[id(e)], backward[id(e)])
        for e in schedule.jaxpr.eqns
        if schedule.is_of_rows(e) and forward[id(e)]
    }


def most_runs(runs: Iterable[Runs]) -> Runs:
    """The most runs of costly equations; if there are none, of all.

    The gradient of a costly equation may be in the rule of a cheap one.
    """
    runs = list(runs)
    costly = [x for x in runs if x.costs] or runs
    costs, forward, backward = map(max, zip(Runs(), *costly, strict=True))
    return Runs(costs, forward, backward or int(any(x.backward for x in runs)))


def _read_back(
    schedule: Schedule, equations: Sequence[core.JaxprEqn]
) -> list[core.JaxprEqn]:
    """The equations that run forward again before cotangents go back through all.

    The gradient of a product needs the operands, and not the result. So a product whose
    result is added up or stored does not run again.
    """
    again: list[core.JaxprEqn] = []
    read: set[Any] = set()
    for e in reversed(equations):
        needs = _needed_back(schedule, e)
        if needs is None or not read.isdisjoint(e.outvars):
            again.append(e)
            needs = e.invars
        read.update(variables(needs))
    return again[::-1]


def _needed_back(schedule: Schedule, equation: core.JaxprEqn) -> list[Any] | None:
    """The operands that the gradient needs; None if it may need the results, too."""
    differs = schedule.is_of_rows(equation) and schedule.is_smooth(equation)
    if primitives.is_linear(equation) or not differs:
        return []
    if not primitives.needs_other(equation):
        return None
    one, two = equation.invars
    of_one, of_two = (schedule.trait(x).smooth for x in (one, two))
    return [one] * of_two + [two] * (of_one or equation.primitive.name == "div")
