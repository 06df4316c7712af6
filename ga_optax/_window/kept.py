"""Which values of the micro-batches a window keeps, so that levels run nothing again.

Every level is a pass over the micro-batches, there and back. A network that two levels
need would run in both, unless what it computed is kept: then each part of `fun` runs
forward where a level needs it first, once more before its backward pass, and backward
once.

Between two levels the smallest set of values is kept that every way from what must not
run again to a later level goes through. What is cheap, such as an activation function,
runs again behind it. What is kept already may be part of that set, at half its price:
in a residual network the sum so far is kept, and not each of its terms, of which every
later level would have to add it up. `room` says which of them stay, and for how long.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core

from ga_optax._passes import ir
from ga_optax._passes.ir import variables
from ga_optax._window import cost, cut
from ga_optax._window.counts import Counter
from ga_optax._window.read import is_mark

_LONGEST = 32  # equations, however cheap, that run again behind what is kept
_FORWARD, _BACKWARD = 2, 1  # passes that every equation has
_AGAIN = 1 / 2  # the price of what is kept already


def keep_marks(counter: Counter) -> None:
    """Keeps what `checkpoint_name(x, axis)` marks, if a later level reads it."""
    schedule = counter.schedule
    for e in schedule.jaxpr.eqns:
        for x in e.outvars if is_mark(e, schedule.axis) else ():
            level = schedule.facts[x].level + 1
            later = counter.there.due(x) >> level + 1
            if later and schedule.facts[x].own and x not in schedule.views:
                counter.keep(x, "own", level)


def keep(counter: Counter, ends: Iterable[int]) -> None:
    """Keeps what later levels would run again, after each of `ends`, in their order."""
    for end, border in _borders(counter, ends):
        for x in _smallest(counter, end, border):
            counter.keep(x, "own", end + 1)


def _borders(counter: Counter, ends: Iterable[int]) -> Iterator[tuple[int, list[Any]]]:
    """The values of micro-batches up to each level that something after it reads."""
    facts, last = counter.schedule.facts, _last_readers(counter)
    made: dict[int, list[Any]] = {}
    for x in last:
        made.setdefault(facts[x].level, []).append(x)
    now, level = [], -1
    for end in ends:
        while level < end:
            level += 1
            now += made.get(level, [])
        now = [x for x in now if last[x] > end]
        yield end, now


def _last_readers(counter: Counter) -> dict[Any, int]:
    """The level of the last that reads each value that differs by micro-batch."""
    schedule, last = counter.schedule, {}

    def read(atoms: Iterable[Any], level: int) -> None:
        for x in variables(atoms):
            if schedule.facts[x].own and x not in schedule.given:
                last[x] = max(last.get(x, level), level)

    for e in schedule.jaxpr.eqns:
        if counter.levels(e):
            read(e.invars, schedule.facts[e.outvars[0]].level)
    for level in range(1, schedule.end + 1):
        read(schedule.roots(level), level - 1)
    return last


def _smallest(counter: Counter, end: int, border: Sequence[Any]) -> list[Any]:
    """What to keep of the levels up to `end`; nothing if nothing runs too often."""
    after, held = _behind(counter, border, end)
    up_to = (1 << end + 2) - 1  # the levels that run no later than what is kept here
    depth: dict[Any, int] = {}
    sources, costly = [], set()
    for e in after:
        steps = 1 + max((depth.get(x, 0) for x in variables(e.invars)), default=0)
        depth.update(dict.fromkeys(e.outvars, steps))
        ran = bool(counter.levels(e) & up_to)
        dear = not cost.is_cheap(e) or steps % _LONGEST == 0
        if ran and dear and counter.is_often(e, _FORWARD, _BACKWARD):
            sources += e.outvars
        # To keep what comes of it would run it where nothing else does.
        if (dear and not ran) or not costly.isdisjoint(variables(e.invars)):
            costly.update(e.outvars)

    def size(x: Any) -> float:
        price = _AGAIN if x in held else 1.0
        nbytes = price * counter.schedule.times["own"] * cost.nbytes(x) + 1
        return nbytes if x not in costly else math.inf

    if not sources:
        return []
    sources += held
    found = cut.smallest(after, sources, set(border), size)
    return [x for x in found if x not in held]


def _behind(
    counter: Counter, border: Sequence[Any], end: int
) -> tuple[list[core.JaxprEqn], list[Any]]:
    """What runs after a level to compute its border, and what it reads that is kept."""
    schedule, found = counter.schedule, {}
    held: dict[Any, None] = {}
    due = list(border)
    while due:
        x = due.pop()
        if x in schedule.views:
            if schedule.buffers[schedule.views[x].buffer].kind == "own":
                held[x] = None
            continue
        e = ir.made_by(schedule.jaxpr, x)
        place = None if e is None else ir.place_of(schedule.jaxpr, e)
        if e is None or place in found:
            continue
        if counter.levels(e) >> end + 2 and schedule.is_own(e):
            found[place] = e
            due += variables(e.invars)
    return [found[place] for place in sorted(found)], list(held)
