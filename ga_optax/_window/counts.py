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
      back: the loops whose way back runs an equation, by its id.
    """

    schedule: Schedule
    roots: dict[Any, int]
    readers: dict[Any, int]
    runs: dict[int, int]
    back: dict[int, int]

    def of(self, equation: core.JaxprEqn) -> int:
        """The loops in which an equation runs."""
        return self.runs[id(equation)]

    def num_runs(self, equation: core.JaxprEqn) -> int:
        """The forward runs of an equation; the last loop goes back at once."""
        back = self.back[id(equation)] & ~(1 << self.schedule.end)
        return self.of(equation).bit_count() + back.bit_count()


def counted(schedule: Schedule) -> LoopSets:
    """The loops of a schedule."""
    roots, smooth = (_roots(schedule, smooth) for smooth in (False, True))
    readers, runs = _runs(schedule, roots)
    return LoopSets(schedule, roots, readers, runs, _runs(schedule, smooth)[1])


def _roots(schedule: Schedule, smooth: bool) -> dict[Any, int]:
    """The loops that have a variable as a root, or as a root with a cotangent."""
    roots: dict[Any, int] = {}
    for level in range(1, schedule.end + 1):
        for x in variables(schedule.roots(level, smooth=smooth)):
            roots[x] = roots.get(x, 0) | 1 << level
    return roots


def _runs(
    schedule: Schedule, roots: dict[Any, int]
) -> tuple[dict[Any, int], dict[int, int]]:
    """The loops that read each variable, and those that run each equation."""
    readers, runs = dict(roots), {}
    for e in reversed(schedule.jaxpr.eqns):
        loops = 0
        for x in e.outvars:
            loops |= readers.get(x, 0) & schedule.computed_at(x)
        runs[id(e)] = loops
        for x in variables(e.invars):
            readers[x] = readers.get(x, 0) | loops
    return readers, runs
