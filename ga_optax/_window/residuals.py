"""The choice of the residuals, which later levels read and need not compute again.

Every level is a pass over the micro-batches, forward and backward. A network that two
levels need would run in both, unless its values are residuals: then each part of `fun`
runs forward at the level that needs it first, once more before its backward pass, and
backward once.

After each level a minimum cut chooses the smallest set of residuals on all ways from
costly equations to later levels. Cheap equations, such as activation functions, run
again behind the cut. Earlier residuals may be part of the cut, at half their price: in
a residual network the sum so far is kept, and not each of its terms, which every later
level would have to add up. `room` chooses which residuals stay, and for how long.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core

from ga_optax._passes import read
from ga_optax._passes.read import is_mark, variables
from ga_optax._window import cost, counts, cut
from ga_optax._window.counts import LoopSets
from ga_optax._window.schedule import Schedule

_LONGEST = 32  # cheap equations in a row that run again behind a residual
_FORWARD = 2  # runs that every equation has, with residuals too
_EARLIER = 1 / 2  # the price of a residual that is stored already


def store_marked(schedule: Schedule) -> None:
    """Stores what `checkpoint_name(x, axis)` marks, if a later level reads it."""
    readers = counts.counted(schedule).readers
    for e in schedule.jaxpr.eqns:
        for x in e.outvars if is_mark(e, schedule.axis) else ():
            traits = schedule.traits[x]
            is_read = readers.get(x, 0) >> traits.level + 1
            if is_read and traits.of_rows and x not in schedule.views:
                schedule.buffer(x, "residual", traits.level)


def store(schedule: Schedule, levels: Iterable[int]) -> None:
    """Stores residuals after each of these levels, in order."""
    loops = counts.counted(schedule)
    for level, border in _borders(loops, levels):
        for x in _chosen(loops, level, border):
            schedule.buffer(x, "residual", level)


def _borders(loops: LoopSets, levels: Iterable[int]) -> Iterator[tuple[int, list[Any]]]:
    """The values of rows up to each level that an equation after the level reads."""
    schedule, by_level = loops.schedule, {}
    for e in filter(schedule.is_of_rows, schedule.jaxpr.eqns):
        by_level.setdefault(schedule.level_of(e), []).extend(e.outvars)
    last = {x: _last_reader(loops, x) for some in by_level.values() for x in some}
    border, first = [], 1
    for level in levels:
        new = (by_level.get(i, ()) for i in range(first, level + 1))
        border = [x for x in itertools.chain(border, *new) if last[x] > level]
        first = level + 1
        yield level, border


def _last_reader(loops: LoopSets, variable: Any) -> int:
    """The last level that reads a variable; -1 if there is none."""
    schedule = loops.schedule
    readers = (e for e, _ in read.uses(schedule.jaxpr, variable))
    levels = [schedule.level_of(e) for e in readers if loops.of(e)]
    return max([loops.roots.get(variable, 0).bit_length() - 1, *levels])


def _chosen(loops: LoopSets, level: int, border: Sequence[Any]) -> list[Any]:
    """The new residuals after a level; none if only cheap equations would run again."""
    equations, earlier = _behind(loops, border, level)
    sources = _costly(loops, equations, level)
    if not sources:
        return []

    def size(x: Any) -> float:
        price = _EARLIER if x in earlier else 1.0
        return price * loops.schedule.num_values["residual"] * cost.nbytes(x) + 1

    cut_values = cut.smallest(equations, [*sources, *earlier], set(border), size)
    return [x for x in cut_values if x not in earlier]


def _behind(
    loops: LoopSets, border: Sequence[Any], level: int
) -> tuple[list[core.JaxprEqn], list[Any]]:
    """The equations that later loops run for a border, and residuals that they read."""
    schedule = loops.schedule
    jaxpr, views, buffers = schedule.jaxpr, schedule.views, schedule.buffers

    def is_known(x: Any) -> bool:
        e = read.made_by(jaxpr, x)
        if x in views or e is None:
            return True
        return not (loops.of(e) >> level + 1 and schedule.is_of_rows(e))

    equations, reads = read.needed(jaxpr, border, is_known)
    stored = (x for x in reads if x in views)
    return equations, [x for x in stored if buffers[views[x].buffer].kind == "residual"]


def _costly(
    loops: LoopSets, equations: Sequence[core.JaxprEqn], level: int
) -> list[Any]:
    """The results that loops up to a level compute, and that later ones must not.

    They are results of equations that are not cheap, or that end `_LONGEST` equations
    in a row, and that would run more often than with residuals.
    """
    up_to = (1 << level + 1) - 1
    depth: dict[Any, int] = {}
    sources = []
    for e in equations:
        steps = 1 + max((depth.get(x, 0) for x in variables(e.invars)), default=0)
        depth.update(dict.fromkeys(e.outvars, steps))
        is_dear = not read.is_cheap(e) or steps % _LONGEST == 0
        if is_dear and loops.of(e) & up_to and loops.num_runs(e) > _FORWARD:
            sources += e.outvars
    return sources
