"""The residuals that stay, and for how long, in the bytes that there are.

    everything   each residual stays until the way back: each part runs forward twice
    segments     residuals that cross the end of a segment of levels stay. The others
                 are dropped after the last level that reads them on the way there, and
                 are filled again, segment by segment, on the way back: each part runs
                 forward three times
    less         there are residuals after some levels alone: what lies between two of
                 these levels runs again at each level

As `jax.checkpoint` over layers: the residuals of about √L levels stay, and those of
about √L are filled again (Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear
memory cost", 2016).
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ga_optax._passes import read
from ga_optax._passes.read import is_mark
from ga_optax._window import cost, residuals
from ga_optax._window.schedule import Level, Schedule
from ga_optax._window.shared import share

LITTLE = 2**20  # bytes of residuals that are always allowed: they are worth no pass


class Life(NamedTuple):
    """The bytes of a residual, and the levels that need them.

    Attributes:
      number: the number of its buffer.
      nbytes: the bytes that a device stores.
      of_cotangent: the bytes of the cotangent.
      first: the level that fills the buffer.
      last: the last level that reads it.
      num_iterations: of how many iterations of a scan the residual is the stack.
      is_derived: True if the residual can be computed from other residuals of the same
        level.
    """

    number: int
    nbytes: int
    of_cotangent: int
    first: int
    last: int
    num_iterations: int = 1
    is_derived: bool = False

    @property
    def needed_at(self) -> int:
        """The first level of a segment that can fill the buffer again."""
        return self.first + self.is_derived


def planned(
    schedule: Schedule, of_step: Callable[[], int], limit: int | None
) -> Schedule:
    """The schedule with residuals.

    Args:
      schedule: a schedule without residuals.
      of_step: the bytes that one micro-batch's step takes in any case.
      limit: the bytes that residuals and their cotangents may take at a time. None for
        the bytes of a whole step without the bytes of a level's step, and for `LITTLE`
        at least; segments may take more.
    """
    marked = schedule.copy()
    residuals.store_marked(marked)
    full = marked.copy()
    residuals.store(full, range(1, schedule.end))
    lives = list(_lives(full))
    if not lives:
        return full
    full.peak = peak(lives, (), full.end)
    most = limit
    if most is None:
        most = max(of_step() - largest_step(share(full)), LITTLE)
    ends = _segments(lives, full.end, most)
    # Segments do not divide the stack of a scan: it stays, or the scan runs again.
    stacks = (x.nbytes for x in lives if x.num_iterations > 1)
    bounded = limit is not None or max(stacks, default=0) > most
    if not bounded or peak(lives, ends, full.end) <= most:
        return _in_segments(full, lives, ends)
    return dataclasses.replace(_less(marked, most), unlimited=full)


def has_room(schedule: Schedule, of_step: Callable[[], int], limit: int | None) -> bool:
    """True if a schedule stores something, and no more than the limit of residuals."""
    stored = sum(b.nbytes + b.of_cotangent for b in schedule.buffers)
    most = max(of_step(), LITTLE) if limit is None else limit
    return 0 < stored <= most


# -- Lives -----------------------------------------------------------------------------


def _lives(schedule: Schedule) -> Iterator[Life]:
    last: dict[int, int] = {}
    for level in range(1, schedule.end + 1):
        for x in schedule.needed(schedule.roots(level), Level(level))[1]:
            if x in schedule.views:
                last[schedule.views[x].buffer] = level
    for i, b in enumerate(schedule.buffers):
        if b.kind == "residual":
            e: Any = read.made_by(schedule.jaxpr, b.operand)
            first, iterations = b.level.number, 1
            if read.kind(e) == "scan":
                is_stack = b.operand in e.outvars[read.scan_of(e).num_carry :]
                iterations = read.times(e) if is_stack else 1
            until = last.get(i, first)
            until = schedule.end if is_mark(e, schedule.axis) else until
            more = iterations, _is_derived(schedule, i)
            yield Life(i, b.nbytes, b.of_cotangent, first, until, *more)


def _is_derived(schedule: Schedule, number: int) -> bool:
    """True if other residuals of the same level suffice to compute a residual."""
    operand, level = schedule.buffers[number].operand, schedule.buffers[number].level
    others = set(range(len(schedule.buffers))) - {number}
    after = Level(level.number + 1)
    equations, reads = schedule.needed([operand], after, known=others)
    rows = [y for y in reads if schedule.traits[y].of_rows]
    views = [schedule.views[y] for y in rows if y in schedule.views]
    buffers = [schedule.buffers[view.buffer] for view in views]
    levels = [b.level for b in buffers if b.kind == "residual"]
    of_rows = filter(schedule.is_of_rows, equations)
    same_level = all(schedule.level_of(e) == level.number for e in of_rows)
    return bool(rows) and levels == [level] * len(rows) and same_level


def _in_segments(
    schedule: Schedule, lives: Sequence[Life], ends: tuple[int, ...]
) -> Schedule:
    """The schedule that drops residuals, and fills them again in segments."""
    drops: dict[int, list[int]] = {}
    refills: dict[int, list[int]] = {}
    for x in sorted(lives, key=lambda x: x.last):
        if (end := _refilled(x, ends)) is not None:
            drops.setdefault(x.last, []).append(x.number)
            refills.setdefault(end, []).append(x.number)
    if not drops:
        return schedule
    peak_bytes = peak(lives, ends, schedule.end)
    more = {"drops": drops, "refills": refills, "peak": peak_bytes}
    return dataclasses.replace(schedule, unlimited=schedule, **more)


def _refilled(x: Life, ends: Sequence[int]) -> int | None:
    """The end of the segment with which a residual is filled again; None if it stays.

    A residual stays if later segments read it, or if others that stay are computed of
    it. After the last of the sorted `ends` nothing is dropped.
    """
    first, last = (bisect.bisect_left(ends, n) for n in (x.needed_at, x.last))
    return ends[last] if first >= last < len(ends) else None


def peak(lives: Sequence[Life], ends: Sequence[int], end: int) -> int:
    """The bytes of residuals and of their cotangents, at most at a time."""
    there, back = np.zeros(end + 2, int), np.zeros(end + 2, int)

    def add(levels: np.ndarray, start: int, stop: int, nbytes: int) -> None:
        levels[start] += nbytes
        levels[stop + 1] -= nbytes

    for x in lives:
        refilled = _refilled(x, ends)
        add(there, x.first, end if refilled is None else x.last, x.nbytes)
        add(back, x.first + 1, end if refilled is None else refilled, x.nbytes)
        add(back, x.first + 1, x.last, x.of_cotangent)
    both = np.cumsum(back) + _not_written_over(lives, end)
    return int(max(np.cumsum(there).max(), both.max()))


def _not_written_over(lives: Sequence[Life], end: int) -> np.ndarray:
    """The bytes, by level, of cotangents that are read, and not written over."""
    levels = np.zeros(end + 2, int)
    for nbytes in {x.of_cotangent for x in lives}:
        alike = [x for x in lives if x.of_cotangent == nbytes]
        reads = np.bincount([x.first for x in alike], minlength=end + 2)
        begun = np.bincount([x.last for x in alike], minlength=end + 2)
        levels += nbytes * np.maximum(reads - begun, 0)
    return levels


def largest_step(schedule: Schedule) -> int:
    """About the bytes that the step of any level takes, at most.

    A step is of one micro-batch, or of what all micro-batches share.
    """
    steps = [0]
    for level in {*schedule.by_level, Level(schedule.end)}:
        if level.in_loop:
            roots = schedule.roots(level.number, smooth=True)
        else:
            roots = schedule.operands(level, smooth=True)
        equations, reads = schedule.needed(roots, level)
        smooth = [x for x in reads if schedule.trait(x).smooth]
        grads = sum(cost.nbytes(x) for x in smooth if x in schedule.arguments)
        steps.append(cost.residuals(equations, smooth, reads) + grads)
    return max(steps)


# -- Segments --------------------------------------------------------------------------


def _segments(lives: Sequence[Life], end: int, most: int) -> tuple[int, ...]:
    """The ends of segments that fill the fewest bytes again, with a peak of `most`.

    If there are none with such a peak, the ends with the lowest peak.
    """
    total = sum(x.nbytes for x in lives)
    sizes = (total * n // _TRIALS for n in range(1, _TRIALS))
    trials = {(), *(_ends_of_segments(lives, size) for size in sizes)}

    def price(ends: tuple[int, ...]) -> tuple[int, int, int]:
        size = peak(lives, ends, end)
        again = sum(x.nbytes for x in lives if _refilled(x, ends) is not None)
        return (0 if size <= most else size), again, size

    return min(trials, key=price)


_TRIALS = 40  # sizes of segments


def _ends_of_segments(lives: Sequence[Life], most: int) -> tuple[int, ...]:
    """The ends of segments, each with the residuals that stay below, of `most` bytes.

    Later segments are shorter: when the way back begins, most residuals stay.
    """
    ends: list[int] = []
    in_segment = staying = previous = 0
    rest = sorted(lives, key=lambda x: x.first)
    for level, group in itertools.groupby(rest, lambda x: x.first):
        new = sum(x.nbytes for x in group)
        if in_segment and in_segment + new + staying > most:
            ends.append(previous)
            ended = [x for x in rest if x.needed_at <= previous]
            staying += sum(x.nbytes for x in ended if x.last > previous)
            rest = [x for x in rest if x.needed_at > previous and x.last > previous]
            in_segment = 0
        in_segment, previous = in_segment + new, level
    return tuple(ends)


def _less(schedule: Schedule, most: int) -> Schedule:
    """The schedule with residuals after as many levels as `most` bytes allow."""
    few, many, best = 0, schedule.end - 1, schedule
    while few < many:
        number = (few + many + 1) // 2
        places = ((i + 1) * (schedule.end - 1) // (number + 1) for i in range(number))
        trial = schedule.copy()
        residuals.store(trial, sorted({1 + place for place in places}))
        trial.peak = peak(list(_lives(trial)), (), trial.end)
        if trial.peak <= most:
            few, best = number, trial
        else:
            many = number - 1
    return best
