"""At which levels each equation runs, while it is planned what to keep.

Bit i stands for level i. A `Counter` is kept up to date: a buffer changes what is
behind it alone, so keeping a value of each level takes time for the size of the
program, and not for its square. `passes` counts what comes of it.
"""

import heapq
from typing import Any

from jax.extend import core

from ga_optax._passes import ir
from ga_optax._passes.ir import variables
from ga_optax._window.schedule import Schedule


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
            for x in variables(schedule.roots(level, smooth=back)):
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
        runs = 0
        for out in equation.outvars:
            runs |= self.due(out) & self.schedule.computed_at(out)
        return runs

    def update(self, variable: Any) -> None:
        """Counts again what is behind a variable: it has a buffer now."""
        jaxpr, due = self.schedule.jaxpr, []

        def push(x: Any) -> None:
            if (equation := ir.made_by(jaxpr, x)) is not None:
                heapq.heappush(due, -ir.place_of(jaxpr, equation))

        push(variable)
        while due:
            equation = jaxpr.eqns[-heapq.heappop(due)]
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

    def is_often(self, equation: core.JaxprEqn, forward: int, backward: int) -> bool:
        """Whether it runs more often than that, if all on the way back runs before."""
        runs, returns = self.levels(equation), self.back.runs[id(equation)]
        with_loss = returns >> self.schedule.end & 1  # it runs forward for both at once
        back = self.schedule.is_smooth(equation) * returns.bit_count()
        there = runs.bit_count() + returns.bit_count() - with_loss
        return there > forward or back > backward
