"""How much of what is kept there is room for, and for how long it stays.

    everything   each value stays until the way back: each part runs forward twice
    segments     what goes over the border of every few levels stays. The rest is
                 dropped as soon as no later level reads it on the way there, and filled
                 again, segment by segment, on the way back: forward three times
    less         nothing but what is kept after some levels: what lies between two of
                 them runs again at each

As `jax.checkpoint` over layers: about √L borders stay, and about √L are filled again
(Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", 2016).
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from ga_optax._passes import ir
from ga_optax._window import cost, kept
from ga_optax._window.counts import Counter
from ga_optax._window.read import is_mark
from ga_optax._window.schedule import Level, Schedule
from ga_optax._window.shared import share

LITTLE = 2**20  # bytes: as many may be kept in any case, for that is worth no pass


class Life(NamedTuple):
    """What is kept of a value, for how long.

    Attributes:
      number: of its buffer.
      nbytes: what a device keeps of it.
      of_cotangent: what its cotangent takes.
      made: the level that fills it.
      last: the last level that reads it.
      times: of how many iterations of a loop it is the stack.
      follows: whether it follows from other values that the same level keeps: if these
        stay at the end of a segment, it can be filled again with the next one.
    """

    number: int
    nbytes: int
    of_cotangent: int
    made: int
    last: int
    times: int = 1
    follows: bool = False


def planned(
    schedule: Schedule, of_step: Callable[[], int], limit: int | None
) -> Schedule:
    """The schedule with what to keep.

    Args:
      schedule: one without.
      of_step: the bytes that are taken anyway, for one micro-batch's step.
      limit: the bytes that kept values and their cotangents may take at a time; None
        for as many as leave, of a whole step's bytes, room for that of a level, and
        for `LITTLE` at least. If segments need more, they get what they need: about
        2·√L borders.
    """
    counter = Counter(schedule.copy())
    kept.keep_marks(counter)
    ends = range(schedule.end - 1)
    marked = counter.schedule.copy()
    kept.keep(counter, ends)
    full = counter.schedule
    lives = list(_lives(full))
    if not lives:
        return full
    full.peak = peak(lives, (), full.end)
    most = limit
    if most is None:
        most = max(of_step() - largest_step(share(full)), LITTLE)
    best = _segments(lives, full.end, most)
    # Segments make no less of the stack of a loop: it stays, or the loop runs again.
    stacks = (x.nbytes for x in lives if x.times > 1)
    bounded = limit is not None or max(stacks, default=0) > most
    if not bounded or peak(lives, best, full.end) <= most:
        return _dropping(full, lives, best)
    return dataclasses.replace(_less(marked, most), full=full)


# -- Lives -----------------------------------------------------------------------------


def _lives(schedule: Schedule) -> Iterator[Life]:
    last: dict[int, int] = {}
    for level in range(1, schedule.end + 1):
        for x in schedule.needed(schedule.roots(level), Level(level))[1]:
            if x in schedule.views:
                last[schedule.views[x].buffer] = level
    for i, b in enumerate(schedule.buffers):
        if b.kind == "own":
            x, made = b.operand, b.level
            by: Any = ir.made_by(schedule.jaxpr, x)
            marked = is_mark(by, schedule.axis)
            until = schedule.end if marked else last.get(i, made)
            more = until, _times(by, x), _follows(schedule, i)
            yield Life(i, b.nbytes, b.of_cotangent, made, *more)


def _follows(schedule: Schedule, number: int) -> bool:
    """Whether it is computed of what the same level keeps, and of no earlier rows."""
    x, level = schedule.buffers[number].operand, schedule.buffers[number].level
    others = set(range(len(schedule.buffers))) - {number}
    found, read = schedule.needed([x], Level(level + 1), held=others)
    rows = [y for y in read if schedule.facts[y].own]
    views = [schedule.views[y] for y in rows if y in schedule.views]
    kept_too = [schedule.buffers[view.buffer] for view in views]
    return (
        bool(rows)
        and [b.level for b in kept_too if b.kind == "own"] == [level] * len(rows)
        and all(schedule.level_of(e) == level - 1 for e in found if schedule.is_own(e))
    )


def _times(by: core.JaxprEqn, x: Any) -> int:
    """Of how many iterations a value is the stack, if a loop made it."""
    if ir.kind(by) != "scan":
        return 1
    how = ir.scan_of(by)
    return 1 if x in by.outvars[: how.num_carry] else ir.times(by)


def _dropping(
    schedule: Schedule, lives: Sequence[Life], stays: tuple[int, ...]
) -> Schedule:
    """The schedule that drops what does not stay after the last level that reads it."""
    dropped: dict[int, list[int]] = {}
    again: dict[int, list[int]] = {}
    for x in sorted(lives, key=lambda x: x.last):
        if (at := _again(x, stays)) is not None:
            dropped.setdefault(x.last, []).append(x.number)
            again.setdefault(at, []).append(x.number)
    if not dropped:
        return schedule
    new = dataclasses.replace(schedule, dropped=dropped, again=again, full=schedule)
    new.peak = peak(lives, stays, schedule.end)
    return new


def _again(x: Life, stays: Sequence[int]) -> int | None:
    """The end of the segment with which it is filled again; None if it stays.

    Segments end after levels `stays`, which are sorted. It stays if later segments read
    it, or are computed of it; and after the last of them nothing is dropped.
    """
    first, last = (bisect.bisect_left(stays, n) for n in (x.made + x.follows, x.last))
    return stays[last] if first >= last < len(stays) else None


def peak(lives: Sequence[Life], stays: Sequence[int], end: int) -> int:
    """The bytes of what is kept and of its cotangents, at most at a time."""
    there, back = np.zeros(end + 2, int), np.zeros(end + 2, int)

    def during(at: np.ndarray, start: int, stop: int, nbytes: int) -> None:
        at[start] += nbytes
        at[stop + 1] -= nbytes

    for x in lives:
        again = _again(x, stays)
        during(there, x.made, end if again is None else x.last, x.nbytes)
        during(back, x.made + 1, end if again is None else again, x.nbytes)
        during(back, x.made + 1, x.last, x.of_cotangent)
    both = np.cumsum(back) + _consumed(lives, end)
    return int(max(np.cumsum(there).max(), both.max()))


def _consumed(lives: Sequence[Life], end: int) -> np.ndarray:
    """What cotangents take that a level takes back, but for those written over."""
    found = np.zeros(end + 2, int)
    for nbytes in {x.of_cotangent for x in lives}:
        alike = [x for x in lives if x.of_cotangent == nbytes]
        gone = np.bincount([x.made for x in alike], minlength=end + 2)
        begun = np.bincount([x.last for x in alike], minlength=end + 2)
        found += nbytes * np.maximum(gone - begun, 0)
    return found


def largest_step(schedule: Schedule) -> int:
    """About the bytes that a step takes at a level, at most.

    That of a micro-batch, or of what they share, which is computed once.
    """
    steps = [0]
    for level in {*schedule.numbers, Level(schedule.end)}:
        if level.once:
            roots = schedule.operands(level, smooth=True)
        else:
            roots = schedule.roots(level.number, smooth=True)
        found, read = schedule.needed(roots, level)
        moving = [x for x in read if schedule.fact(x).smooth]
        grads = sum(cost.nbytes(x) for x in moving if x in schedule.given)
        steps.append(cost.residuals(found, moving, read) + grads)
    return max(steps)


# -- What stays ------------------------------------------------------------------------


def _segments(lives: Sequence[Life], end: int, most: int) -> tuple[int, ...]:
    """The levels after which segments end: least is filled again, in `most` bytes.

    If there is no room for any, those that take least.
    """
    total = sum(x.nbytes for x in lives)
    ways = {()} | {_cut_at(lives, total * n // _PARTS) for n in range(1, _PARTS)}

    def taken(stays: tuple[int, ...]) -> tuple[int, int, int]:
        size = peak(lives, stays, end)
        again = sum(x.nbytes for x in lives if _again(x, stays) is not None)
        return (0 if size <= most else size), again, size

    return min(ways, key=taken)


_PARTS = 40  # so many sizes of segments are tried


def _cut_at(lives: Sequence[Life], most: int) -> tuple[int, ...]:
    """The ends of segments that take at most so many bytes with all that stays below.

    So they become shorter: when the way back begins, most stays.
    """
    inside, below, before = 0, 0, 0
    stays: list[int] = []
    left = sorted(lives, key=lambda x: x.made)
    for level, group in itertools.groupby(left, lambda x: x.made):
        new = sum(x.nbytes for x in group)
        if inside and inside + new + below > most:
            crossing = [x for x in left if x.made + x.follows <= before < x.last]
            left = [x for x in left if x.last > before and x not in crossing]
            below += sum(x.nbytes for x in crossing)
            stays.append(before)
            inside = 0
        inside, before = inside + new, level
    return tuple(stays)


def _less(schedule: Schedule, most: int) -> Schedule:
    """The schedule that keeps something after some levels alone, as many as fit."""
    few, many, best = 0, schedule.end - 1, schedule
    while few < many:
        number = (few + many + 1) // 2
        ends = {(i + 1) * (schedule.end - 1) // (number + 1) for i in range(number)}
        counter = Counter(schedule.copy())
        kept.keep(counter, sorted(ends))
        trial = counter.schedule
        lives = list(_lives(trial))
        trial.peak = peak(lives, (), trial.end)
        if trial.peak <= most:
            few, best = number, trial
        else:
            many = number - 1
    return best
