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

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from ga_optax._inside.axis import cost, kept
from ga_optax._inside.axis.counts import Counter
from ga_optax._inside.axis.read import is_mark
from ga_optax._inside.axis.schedule import Schedule
from ga_optax._passes import ir


class Life(NamedTuple):
    """What is kept of a value, for how long.

    Attributes:
      number: of its buffer.
      nbytes: what a device keeps of it.
      of_cotangent: what its cotangent takes.
      made: the level that fills it.
      last: the last level that reads it.
      times: of how many iterations of a loop it is the stack.
    """

    number: int
    nbytes: int
    of_cotangent: int
    made: int
    last: int
    times: int = 1


def planned(
    schedule: Schedule,
    num_microbatches: int,
    of_step: Callable[[], int],
    limit: int | None,
) -> Schedule:
    """The schedule with what to keep.

    Args:
      schedule: one without.
      num_microbatches: those of one device.
      of_step: the bytes that are taken anyway, for one micro-batch's step.
      limit: the bytes that kept values and their cotangents may take at a time; None
        for as many as leave, of a whole step's bytes, room for that of a level. If
        segments need more, they get what they need: about 2·√L borders.
    """
    counter = Counter(schedule.copy())
    kept.keep_marks(counter)
    ends = range(schedule.end - 1)
    marked = counter.schedule.copy()
    kept.keep(counter, num_microbatches, ends)
    full = counter.schedule
    lives = list(_lives(full, num_microbatches))
    if not lives:
        return full
    full.peak = peak(lives, (), full.end)
    most = of_step() - largest_step(full) if limit is None else limit
    best = _segments(lives, full.end, most)
    # Segments make no less of the stack of a loop: it stays, or the loop runs again.
    stacks = (x.nbytes for x in lives if x.times > 1)
    bounded = limit is not None or max(stacks, default=0) > most
    if not bounded or peak(lives, best, full.end) <= most:
        return _dropping(full, lives, best)
    return dataclasses.replace(_less(marked, num_microbatches, most), full=full)


# -- Lives -----------------------------------------------------------------------------


def _lives(schedule: Schedule, num_microbatches: int) -> Iterator[Life]:
    axis = schedule.axis
    last: dict[int, int] = {}
    for level in range(1, schedule.end + 1):
        for x in schedule.needed(schedule.roots(level), level)[1]:
            if x in schedule.views:
                last[schedule.views[x].buffer] = level
    for i, buffer in enumerate(schedule.buffers):
        if buffer.kind == "own":
            x = buffer.operand
            nbytes = num_microbatches * cost.nbytes(x)
            wide = num_microbatches * cost.nbytes_of_sum(x)
            made = int(buffer.level)
            by = ir.made_by(schedule.jaxpr, x)
            marked = by is not None and is_mark(by, axis)
            end = schedule.end if marked else last.get(i, made)
            times = 1 if by is None else _times(by, x)
            yield Life(i, nbytes, wide * buffer.has_cotangent, made, end, times)


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
    always = staying(lives, stays)
    dropped: dict[int, list[int]] = {}
    if len(always) == len(lives):
        return schedule
    for x in lives:
        if x.number not in always:
            dropped.setdefault(x.last, []).append(x.number)
    taken = peak(lives, stays, schedule.end)
    return dataclasses.replace(
        schedule, stays=stays, dropped=dropped, peak=taken, full=schedule
    )


def staying(lives: Iterable[Life], stays: Sequence[int]) -> set[int]:
    """The buffers that are not filled again, if segments end after levels `stays`."""
    whole = max(stays, default=0)  # after it nothing is dropped
    return {
        x.number
        for x in lives
        if x.made > whole or any(x.made <= at < x.last for at in stays)
    }


def peak(lives: Sequence[Life], stays: Sequence[int], end: int) -> int:
    """The bytes of what is kept and of its cotangents, at most at a time."""
    there, back = np.zeros(end + 2, int), np.zeros(end + 2, int)
    always = staying(lives, stays)

    def during(at: np.ndarray, start: int, stop: int, nbytes: int) -> None:
        at[start] += nbytes
        at[stop + 1] -= nbytes

    for x in lives:
        if x.number in always:
            during(there, x.made, end, x.nbytes)
            during(back, x.made + 1, end, x.nbytes)
        else:
            segment = min((at for at in stays if at >= x.made), default=end)
            during(there, x.made, x.last, x.nbytes)
            during(back, x.made + 1, segment, x.nbytes)
        during(back, x.made, x.last, x.of_cotangent)
    return int(max(np.cumsum(there).max(), np.cumsum(back).max()))


def largest_step(schedule: Schedule) -> int:
    """About the bytes that a micro-batch's step takes at a level, at most."""
    steps = [0]
    for level in range(1, schedule.end + 1):
        found, read = schedule.needed(schedule.smooth_roots(level), level)
        moving = [x for x in read if schedule.fact(x).smooth]
        grads = sum(cost.nbytes(x) for x in moving if x in schedule.given)
        steps.append(cost.residuals(found, moving, read) + grads)
    return max(steps)


# -- What stays ------------------------------------------------------------------------


def _segments(lives: Sequence[Life], end: int, most: int) -> tuple[int, ...]:
    """The levels after which segments end: least is filled again, in `most` bytes.

    If there is no room for any, those that take least.
    """
    ways = {()} | {_cut_at(lives, n) for n in _numbers(len(lives))}

    def again(stays: Sequence[int]) -> int:
        always = staying(lives, stays)
        return sum(x.nbytes for x in lives if x.number not in always)

    sizes = {stays: peak(lives, stays, end) for stays in ways}
    fits = [stays for stays in ways if sizes[stays] <= most]
    if fits:
        return min(fits, key=lambda stays: (again(stays), sizes[stays]))
    return min(ways, key=lambda stays: (sizes[stays], again(stays)))


def _numbers(n: int) -> list[int]:
    """Of how many segments to try it: about √n is best if borders are alike."""
    return sorted(
        {*range(2, min(n, 12) + 1), *(int(2**i) for i in range(4, n.bit_length()))}
    )


def _cut_at(lives: Sequence[Life], number: int) -> tuple[int, ...]:
    """The ends of so many segments, each with about as many bytes."""
    total, so_far, stays = sum(x.nbytes for x in lives), 0, []
    levels = itertools.groupby(sorted(lives, key=lambda x: x.made), lambda x: x.made)
    for level, group in levels:
        so_far += sum(x.nbytes for x in group)
        if so_far * number >= total * (len(stays) + 1) and len(stays) < number - 1:
            stays.append(level)
    return tuple(stays)


def _less(schedule: Schedule, num_microbatches: int, most: int) -> Schedule:
    """The schedule that keeps something after some levels alone, as many as fit."""
    works = list(itertools.accumulate(_works(schedule)))
    few, many, best = 0, schedule.end - 1, schedule
    while few < many:
        number = (few + many + 1) // 2
        ends = _spread(works, number)
        counter = Counter(schedule.copy())
        kept.keep(counter, num_microbatches, ends)
        trial = counter.schedule
        lives = list(_lives(trial, num_microbatches))
        trial.peak = peak(lives, (), trial.end)
        if trial.peak <= most:
            few, best = number, trial
        else:
            many = number - 1
    return best


def _works(schedule: Schedule) -> list[float]:
    """The work of the equations of each level, but for the last."""
    works = [0.0] * (schedule.end - 1)
    for e in schedule.jaxpr.eqns:
        level = max((schedule.facts[x].level for x in e.outvars), default=0)
        if level < len(works):
            works[level] += cost.work(e)
    return works


def _spread(works: Sequence[float], number: int) -> list[int]:
    """So many levels, with about as much work before each."""
    total = works[-1]
    due = [total * (i + 1) / (number + 1) for i in range(number)]
    return sorted({int(np.searchsorted(works, x)) for x in due})
