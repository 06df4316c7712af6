"""Which values of the micro-batches a window keeps, so that levels run nothing again.

Every level is a pass over the micro-batches, there and back. A network that two levels
need would run in both, unless what it computed is kept: then each part of `fun` runs
forward where a level needs it first, once more before its backward pass, and backward
once.

Between two levels the smallest set of values is kept that every way from what must not
run again to a later level goes through. What is cheap, such as an activation function,
runs again behind it.

If all of that is more than the limit, it is kept between some levels alone: those for
which the least is computed again, in that many bytes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._inside.axis import cost, cut
from ga_optax._inside.axis.read import is_mark
from ga_optax._inside.axis.schedule import Schedule
from ga_optax._passes.ir import is_variable, variables

_LONGEST = 32  # equations, however cheap, that run again behind what is kept
_TRIALS = 30
_FORWARD, _BACKWARD = 2, 1  # passes that every equation has


def keep_marks(schedule: Schedule) -> None:
    """Keeps what `checkpoint_name(x, axis)` marks, if a later level reads it."""
    read: dict[Any, int] = {}
    runs = schedule.levels(schedule.roots)
    for e in schedule.jaxpr.eqns:
        for x in variables(e.invars):
            read[x] = read.get(x, 0) | runs.get(id(e), 0)
    for level in range(1, schedule.end + 1):
        for x in variables(schedule.roots(level)):
            read[x] = read.get(x, 0) | 1 << level
    for e in schedule.jaxpr.eqns:
        for x in e.outvars if is_mark(e, schedule.axis) else ():
            level = schedule.facts[x].level + 1
            later = read.get(x, 0) >> level + 1
            if later and schedule.facts[x].own and x not in schedule.views:
                schedule.buffer(x, "own", level)


def keep(
    schedule: Schedule, num_microbatches: int, limit: Callable[[], float]
) -> Schedule:
    """The schedule with what else to keep, in at most `limit` bytes.

    Args:
      schedule: one with the marks.
      num_microbatches: those of one device.
      limit: the bytes of what it keeps, and of the largest part of its cotangents.
    """
    ends = range(schedule.end - 1)
    everything = _with(schedule, ends, num_microbatches)
    sizes = [_added(schedule, everything, end, num_microbatches) for end in ends]
    if not any(sizes) or _taken(sizes) <= (most := limit()):
        return everything
    works = [_work(everything, end + 1) for end in ends]
    best = schedule
    # The least price of a byte, in operations, at which what is kept is little enough.
    low, high = 0.0, sum(works) * len(works)
    for _ in range(_TRIALS):
        price = (low + high) / 2
        some = _cheapest(works, [price * x for x in sizes])
        trial = _with(schedule, some, num_microbatches)
        taken = [_added(schedule, trial, end, num_microbatches) for end in ends]
        if _taken(taken) <= most:
            best, high = trial, price
        else:
            low = price
    return best


def _taken(sizes: Sequence[int]) -> int:
    """The bytes of what is kept, and of the largest part of its cotangents."""
    return sum(sizes) + max(sizes)


def _cheapest(works: Sequence[float], prices: Sequence[float]) -> list[int]:
    """After which levels to keep something: least work done again, and least price.

    A level runs all levels since the last after which something was kept.
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for stop in range(1, len(works) + 1):
        ways = []
        for start in range(stop):
            before, kept = best[start]
            again = sum(works[i] * (stop - i) for i in range(start, stop))
            ways.append((before + again + prices[stop - 1], [*kept, stop - 1]))
        best.append(min(ways))
    # What is after the last runs with the loss.
    ways = [
        (
            before + sum(works[i] * (len(works) + 1 - i) for i in range(n, len(works))),
            kept,
        )
        for n, (before, kept) in enumerate(best)
    ]
    return min(ways)[1]


def _with(schedule: Schedule, ends: Iterable[int], num_microbatches: int) -> Schedule:
    """The schedule that keeps what is needed after those levels."""
    schedule = schedule.copy()
    for end in ends:
        for x in _smallest(schedule, end, num_microbatches):
            schedule.buffer(x, "own", end + 1)
    return schedule


def _added(old: Schedule, new: Schedule, end: int, num_microbatches: int) -> int:
    buffers = new.buffers[len(old.buffers) :]
    sizes = [cost.nbytes(b.operand) for b in buffers if b.level == end + 1]
    return num_microbatches * sum(sizes)


def _work(schedule: Schedule, level: int) -> float:
    found, _ = schedule.needed(schedule.roots(level), level)
    return sum(map(cost.work, found))


# -- Passes ----------------------------------------------------------------------------


class Passes(NamedTuple):
    """How often an equation runs over the window, and at which levels, as bits.

    As if everything on the way back ran forward before.
    """

    forward: int
    backward: int
    levels: int


def passes(schedule: Schedule) -> dict[int, Passes]:
    """The passes of every equation that differs between micro-batches, by its id."""
    there = schedule.levels(schedule.roots)
    back = schedule.levels(schedule.smooth_roots)
    found = {}
    for e in schedule.jaxpr.eqns:
        runs, returns = there.get(id(e), 0), back.get(id(e), 0)
        if runs and any(schedule.facts[x].own for x in e.outvars):
            smooth = any(
                x in schedule.reached and schedule.facts[x].smooth for x in e.outvars
            )
            with_loss = returns >> schedule.end & 1  # it runs forward for both at once
            forward = runs.bit_count() + returns.bit_count() - with_loss
            backward = returns.bit_count() if smooth else 0
            found[id(e)] = Passes(forward, backward, runs)
    return found


# -- The smallest set ------------------------------------------------------------------


def _smallest(schedule: Schedule, end: int, num_microbatches: int) -> list[Any]:
    """What to keep of the levels up to `end`; nothing if nothing runs too often."""
    counted = passes(schedule)
    after = [e for e in schedule.jaxpr.eqns if _after(counted, e, end)]
    depth: dict[Any, int] = {}
    sources, costly = [], set()
    for e in after:
        steps = 1 + max(
            (depth.get(x, 0) for x in e.invars if is_variable(x)), default=0
        )
        depth.update(dict.fromkeys(e.outvars, steps))
        ran = bool(counted[id(e)].levels & _up_to(end))
        dear = not cost.is_cheap(e) or steps % _LONGEST == 0
        its = counted[id(e)]
        if ran and dear and (its.forward > _FORWARD or its.backward > _BACKWARD):
            sources += e.outvars
        # To keep what comes of it would run it where nothing else does.
        if (dear and not ran) or not costly.isdisjoint(variables(e.invars)):
            costly.update(e.outvars)

    def size(x: Any) -> float:
        can = x not in costly and schedule.facts[x].level <= end
        return num_microbatches * cost.nbytes(x) + 1 if can else math.inf

    return _cut(schedule, end, after, sources, size) if sources else []


def _cut(
    schedule: Schedule,
    end: int,
    after: Sequence[core.JaxprEqn],
    sources: list[Any],
    size: Callable[[Any], float],
) -> list[Any]:
    """The smallest set between `sources` and what later levels read."""
    later = range(end + 2, schedule.end + 1)
    sinks = {x for i in later for x in variables(schedule.roots(i))}

    def is_early(x: Any) -> bool:
        return schedule.facts[x].level <= end

    for e in after:
        if not all(map(is_early, e.outvars)):
            sinks.update(variables(e.invars))
    return cut.smallest(cut.readers(after, sources, is_early), sources, sinks, size)


def _up_to(end: int) -> int:
    """The levels that run no later than what is kept of `end`, as bits."""
    return (1 << end + 2) - 1


def _after(counted: dict[int, Passes], equation: core.JaxprEqn, end: int) -> bool:
    its = counted.get(id(equation))
    return its is not None and its.levels >> end + 2 != 0
