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

import itertools
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
    schedule, made = counter.schedule, {}
    for e in filter(schedule.is_own, schedule.jaxpr.eqns):
        made.setdefault(schedule.level_of(e), []).extend(e.outvars)
    last = {x: _last_reader(counter, x) for its in made.values() for x in its}
    now, first = [], 0
    for end in ends:
        new = (made.get(level, ()) for level in range(first, end + 1))
        now = [x for x in itertools.chain(now, *new) if last[x] > end]
        first = end + 1
        yield end, now


def _last_reader(counter: Counter, variable: Any) -> int:
    """The level of the last that reads it; less than any if nothing does."""
    schedule = counter.schedule
    readers = (e for e, _ in ir.uses(schedule.jaxpr, variable))
    levels = [schedule.level_of(e) for e in readers if counter.levels(e)]
    # What a level is to compute may be of the one before.
    return max([counter.there.roots.get(variable, 0).bit_length() - 2, *levels])


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
    schedule = counter.schedule
    jaxpr, views, buffers = schedule.jaxpr, schedule.views, schedule.buffers

    def is_known(x: Any) -> bool:
        e = ir.made_by(jaxpr, x)
        runs = e is not None and counter.levels(e) >> end + 2 and schedule.is_own(e)
        return x in views or not runs

    found, read = ir.needed(jaxpr, border, is_known)
    kept = (x for x in read if x in views)
    return found, [x for x in kept if buffers[views[x].buffer].kind == "own"]
