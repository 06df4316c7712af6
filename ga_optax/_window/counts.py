"""The loops in which each equation runs, while residuals are chosen.

Bit i stands for loop i. A `Counter` is kept up to date: a new buffer only changes
counts upstream of it, so planning is linear in the program. `runs` counts the final
schedule.
"""

import heapq
from typing import Any

from jax.extend import core

from ga_optax._passes import read
from ga_optax._passes.read import variables
from ga_optax._window.schedule import Schedule


class _Direction:
    """The loops in which equations run, forward (for all roots) or back (smooth ones).

    Attributes:
      runs: the loops in which an equation runs, by its id.
      roots: the loops that have a variable as a root.
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

    def readers(self, variable: Any) -> int:
        """The loops that read the variable, or have it as a root."""
        loops = self.roots.get(variable, 0)
        for equation, _ in read.uses(self.schedule.jaxpr, variable):
            loops |= self.runs[id(equation)]
        return loops

    def _runs(self, equation: core.JaxprEqn) -> int:
        loops = 0
        for x in equation.outvars:
            loops |= self.readers(x) & self.schedule.computed_at(x)
        return loops

    def update(self, variable: Any) -> None:
        """Counts again upstream of a variable, which has a new buffer."""
        jaxpr, queue = self.schedule.jaxpr, []

        def push(x: Any) -> None:
            if (equation := read.made_by(jaxpr, x)) is not None:
                heapq.heappush(queue, -read.place_of(jaxpr, equation))

        push(variable)
        while queue:
            equation = jaxpr.eqns[-heapq.heappop(queue)]
            runs = self._runs(equation)
            if runs != self.runs[id(equation)]:
                self.runs[id(equation)] = runs
                for x in variables(equation.invars):
                    push(x)


class Counter:
    """A schedule whose runs are counted while buffers are added."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.forward = _Direction(schedule, back=False)
        self.back = _Direction(schedule, back=True)

    def store(self, variable: Any, kind: str, level: int) -> None:
        """Adds a buffer that is filled at a level."""
        schedule = self.schedule
        buffer = schedule.buffers[schedule.buffer(variable, kind, level)]
        for side in (self.forward, self.back):
            if kind != "shared" and (not side.back or buffer.has_cotangent):
                side.roots[variable] = side.roots.get(variable, 0) | 1 << level
            side.update(variable)

    def loops(self, equation: core.JaxprEqn) -> int:
        """The loops in which an equation runs on the way there."""
        return self.forward.runs[id(equation)]

    def exceeds(self, equation: core.JaxprEqn, forward: int, backward: int) -> bool:
        """True if an equation runs more often forward or backward than that."""
        loops, back = self.loops(equation), self.back.runs[id(equation)]
        both = back >> self.schedule.end & 1  # the loop of the loss runs it once
        runs = loops.bit_count() + back.bit_count() - both
        returns = self.schedule.is_smooth(equation) * back.bit_count()
        return runs > forward or returns > backward
