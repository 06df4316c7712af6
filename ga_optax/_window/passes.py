"""What a window runs, stage by stage: the one count of passes.

A stage is a loop over the micro-batches, or what they share, once. It knows what the
way back does not run forward, because nothing reads it, and what it fills again.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._passes import primitives
from ga_optax._passes.ir import variables
from ga_optax._window import cost
from ga_optax._window.schedule import Level, Schedule


class Stage(NamedTuple):
    """One loop over the micro-batches, or what they share, once.

    Attributes:
      name: when it runs.
      level: what is known.
      forward: the equations that it computes.
      back: those that it takes cotangents back through, as far as these have some.
      fills: the buffers that it leaves for later stages, by number.
    """

    name: str
    level: Level
    forward: Sequence[core.JaxprEqn]
    back: Sequence[core.JaxprEqn] = ()
    fills: Sequence[int] = ()


def stages(schedule: Schedule) -> Iterator[Stage]:
    """Those of a window, in the order in which they run."""
    levels = [Level(n, once) for n in range(schedule.end) for once in (False, True)]
    last = Level(schedule.end)

    def name(level: Level) -> str:
        return f"level {level.number}{', shared' * level.once}"

    for level in levels:
        if members := schedule.at(level):
            runs = schedule.needed(schedule.operands(level), level)[0]
            yield Stage(name(level), level, runs, fills=members)
    runs, back = (
        schedule.needed(schedule.roots(schedule.end, smooth=smooth), last)[0]
        for smooth in (False, True)
    )
    yield Stage("the loss", last, runs, back, schedule.at(last))
    for level in reversed(levels):
        if level.once and (members := schedule.again.get(level.number)):
            stage = f"level {level.number}, filled again"
            after = Level(level.number + 1)
            there = set(range(len(schedule.buffers))) - set(members)
            operands = [schedule.buffers[j].operand for j in members]
            runs = schedule.needed(operands, after, held=there)[0]
            yield Stage(stage, after, runs, fills=members)
        if roots := schedule.operands(level, smooth=True):
            back = schedule.needed(roots, level)[0]
            runs = back if level.once else _read_back(schedule, back)
            yield Stage(f"{name(level)}, back", level, runs, back)
    after = Level(schedule.end, once=True)
    roots = [schedule.jaxpr.outvars[i] for i in sorted(schedule.after)]
    if runs := schedule.needed(roots, after)[0]:
        yield Stage("after the loops", after, runs)


class Passes(NamedTuple):
    """How often something runs over the rows, and whether it costs something."""

    costs: bool = False
    forward: int = 0
    backward: int = 0


def counted(schedule: Schedule) -> dict[int, Passes]:
    """The passes of every equation of micro-batches that runs, by its id."""
    forward, backward = collections.Counter(), collections.Counter()
    for stage in stages(schedule):
        forward.update(map(id, stage.forward))
        backward.update(id(e) for e in stage.back if schedule.is_smooth(e))
    every = [e for e in schedule.jaxpr.eqns if schedule.is_own(e) and forward[id(e)]]
    return {
        id(e): Passes(not cost.is_cheap(e), forward[id(e)], backward[id(e)])
        for e in every
    }


def most(some: Iterable[Passes]) -> Passes:
    """The most of those that cost something; if none of them does, of all."""
    found = list(some)
    dear = [x for x in found if x.costs] or found
    return Passes(*map(max, zip(Passes(), *dear, strict=True)))


def _read_back(
    schedule: Schedule, equations: Sequence[core.JaxprEqn]
) -> list[core.JaxprEqn]:
    """Those of them that run forward before cotangents go back through all.

    The gradient of a product needs its operands, and not its result. So a product
    whose result is added up, or kept, does not run once more.
    """
    found: list[core.JaxprEqn] = []
    read: set[Any] = set()
    for e in reversed(equations):
        needs = _needed_back(schedule, e)
        if needs is None or not read.isdisjoint(e.outvars):
            found.append(e)
            needs = e.invars
        read.update(variables(needs))
    return found[::-1]


def _needed_back(schedule: Schedule, equation: core.JaxprEqn) -> list[Any] | None:
    """The operands that its gradient needs; None if it may need its results, too."""
    differs = schedule.is_own(equation) and schedule.is_smooth(equation)
    if primitives.is_linear(equation) or not differs:
        return []
    if not primitives.needs_other(equation):
        return None
    one, two = equation.invars
    of_one, of_two = (schedule.fact(x).smooth for x in (one, two))
    return [one] * of_two + [two] * (of_one or equation.primitive.name == "div")
