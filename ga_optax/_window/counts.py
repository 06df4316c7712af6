"""The loops that compute each value on the way there. Bit i stands for loop i."""

from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._passes.read import variables
from ga_optax._window.schedule import Schedule


class LoopSets(NamedTuple):
    """The loops that compute values which no buffer of a schedule holds.

    Attributes:
      schedule: the schedule, as it was when the loops were counted.
      roots: the loops that have a variable as a root.
      readers: the loops that read a variable, or have it as a root.
      runs: the loops in which an equation runs, by its id.
    """

    schedule: Schedule
    roots: dict[Any, int]
    readers: dict[Any, int]
    runs: dict[int, int]

    def of(self, equation: core.JaxprEqn) -> int:
        """The loops in which an equation runs."""
        return self.runs[id(equation)]


def counted(schedule: Schedule) -> LoopSets:
    """The loops of a schedule."""
    roots: dict[Any, int] = {}
    for level in range(1, schedule.end + 1):
        for x in variables(schedule.roots(level)):
            roots[x] = roots.get(x, 0) | 1 << level
    readers, runs = dict(roots), {}
    for e in reversed(schedule.jaxpr.eqns):
        loops = 0
        for x in e.outvars:
            loops |= readers.get(x, 0) & schedule.computed_at(x)
        runs[id(e)] = loops
        for x in variables(e.invars):
            readers[x] = readers.get(x, 0) | loops
    return LoopSets(schedule, roots, readers, runs)
