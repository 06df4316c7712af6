"""At which levels each equation runs: the one count of passes.

Bit i stands for level i. A `Counter` is kept up to date: a buffer changes what is
behind it alone, so keeping a value of each level takes time for the size of the
program, and not for its square. `counted` is exact: it knows what the way back does
not run forward, because nothing reads it, and what it fills again.
"""

import heapq
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._passes import ir, known
from ga_optax._passes.ir import variables
from ga_optax._window.schedule import Level, Schedule


class Passes(NamedTuple):
    """How often an equation runs over the window, and at which levels, as bits."""

    forward: int
    backward: int
    levels: int


class _Way:
    """The levels at which equations run, there (for all roots) or back (smooth ones).

    Attributes:
      runs: the levels of an equation, by its id; 0 if it runs at none.
      roots: the levels that are to compute a variable.
    """

    def __init__(self, schedule: Schedule, back: bool) -> None:
        self.schedule, self.back = schedule, back
        self.runs: dict[int, int] = {}
        self.roots: dict[Any, int] = {}
        for level in range(1, schedule.end + 1):
            roots = schedule.smooth_roots if back else schedule.roots
            for x in variables(roots(level)):
                self.roots[x] = self.roots.get(x, 0) | 1 << level
        for equation in reversed(schedule.jaxpr.eqns):
            self.runs[id(equation)] = self._runs(equation)

    def due(self, variable: Any) -> int:
        """The levels that read it, or are to compute it."""
        found = self.roots.get(variable, 0)
        for equation, _ in ir.uses(self.schedule.jaxpr, variable):
            found |= self.runs[id(equation)]
        return found

    def _runs(self, equation: core.JaxprEqn) -> int:
        schedule, runs = self.schedule, 0
        for out in equation.outvars:
            if out not in schedule.given:
                runs |= self.due(out) & schedule.computed_at(out)
        return runs

    def update(self, variable: Any) -> None:
        """Counts again what is behind a variable: it has a buffer now."""
        jaxpr, changed = self.schedule.jaxpr, {}

        def push(x: Any) -> None:
            equation = ir.made_by(jaxpr, x)
            if equation is not None:
                place = -ir.place_of(jaxpr, equation)
                if place not in changed:
                    changed[place] = equation
                    heapq.heappush(due, place)

        due: list[int] = []
        push(variable)
        while due:
            equation = changed.pop(heapq.heappop(due))
            runs = self._runs(equation)
            if runs != self.runs[id(equation)]:
                self.runs[id(equation)] = runs
                for x in variables(equation.invars):
                    push(x)


class Counter:
    """A schedule whose passes are counted while buffers are added to it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.there, self.back = _Way(schedule, False), _Way(schedule, True)

    def keep(self, variable: Any, kind: str, level: int) -> None:
        """Adds a buffer that is filled at a level."""
        schedule = self.schedule
        number = schedule.buffer(variable, kind, level)
        buffer = schedule.buffers[number]
        for way in (self.there, self.back):
            if kind != "once" and (not way.back or buffer.has_cotangent):
                way.roots[variable] = way.roots.get(variable, 0) | 1 << level
            way.update(variable)

    def levels(self, equation: core.JaxprEqn) -> int:
        """The levels at which an equation runs on the way there."""
        return self.there.runs[id(equation)]

    def passes(self, equation: core.JaxprEqn) -> Passes | None:
        """How often it runs; None for what does not, or is not of micro-batches.

        As if everything on the way back ran forward before.
        """
        schedule = self.schedule
        runs, returns = self.levels(equation), self.back.runs[id(equation)]
        if not runs or not any(schedule.facts[x].own for x in equation.outvars):
            return None
        smooth = any(schedule.facts[x].smooth for x in equation.outvars)
        with_loss = returns >> schedule.end & 1  # it runs forward for both at once
        forward = runs.bit_count() + returns.bit_count() - with_loss
        return Passes(forward, returns.bit_count() if smooth else 0, runs)

    def again(self) -> dict[int, int]:
        """The levels on whose way back an equation runs forward, by its id.

        The gradient of a product needs its operands, and not its result. So a product
        whose result is added up, or kept, does not run once more.
        """
        read: dict[Any, int] = {}
        found = {}
        for e in reversed(self.schedule.jaxpr.eqns):
            returns, runs = self.back.runs[id(e)], 0
            needs = _needed_back(self.schedule, e)
            for x in e.outvars:
                runs |= read.get(x, 0)
            if needs is None:
                runs = -1
            found[id(e)] = runs = runs & returns
            for x in variables(e.invars):
                kept = any(x is y for y in needs or ())
                read[x] = read.get(x, 0) | (returns if kept else runs)
        return found


def _needed_back(schedule: Schedule, equation: core.JaxprEqn) -> list[Any] | None:
    """The operands that its gradient needs; None if it may need its results, too."""
    facts = [schedule.facts[x] for x in equation.outvars]
    name = equation.primitive.name
    if name in known.LINEAR or not any(fact.own and fact.smooth for fact in facts):
        return []
    if name not in known.OF_TWO:
        return None
    one, two = equation.invars
    of_one, of_two = (schedule.fact(x).smooth for x in (one, two))
    return [one] * of_two + [two] * (of_one or name == "div")


def counted(schedule: Schedule) -> dict[int, Passes]:
    """The passes of every equation that runs, by its id."""
    counter = Counter(schedule)
    again, found = counter.again(), {}
    for e in schedule.jaxpr.eqns:
        if its := counter.passes(e):
            back = again[id(e)] & ~(1 << schedule.end)  # where it runs for both at once
            forward = its.levels.bit_count() + back.bit_count()
            found[id(e)] = its._replace(forward=forward)
    for level in schedule.again:
        for e in refilling(schedule, level):
            if its := found.get(id(e)):
                found[id(e)] = its._replace(forward=its.forward + 1)
    return found


def refilling(schedule: Schedule, level: int) -> list[core.JaxprEqn]:
    """What runs once more before a level goes back, to fill what was dropped."""
    members = schedule.again.get(level, ())
    there = set(range(len(schedule.buffers))) - set(members)
    operands = [schedule.buffers[j].operand for j in members]
    return schedule.needed(operands, Level(level + 1), held=there)[0]
