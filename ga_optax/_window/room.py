"""Residuals: the values that stay between levels, in the room that there is.

    bytes of what stays  <=  residual_bytes;   a part runs forward two times, or three

`planned` fits residuals into the room; below it the loops that compute each value, the
choice of residuals by minimum cuts, and values that all micro-batches share.
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from .._passes import alive, jaxprs
from .._passes.jaxprs import following, is_mark, variables
from .costs import bytes_of_residuals
from .cuts import smallest_cut
from .meetings import is_collective
from .schedule import Level, Schedule

# == Room ==============================================================================
# The residuals that stay, and for how long, in the bytes that there are.
#
#   everything   each residual stays until the way back: each part runs forward twice
#   segments     residuals that cross the end of a segment of levels stay. The others
#                are dropped after the last level that reads them on the way there, and
#                are filled again, segment by segment, on the way back: each part runs
#                forward three times
#   less         there are residuals after some levels alone: what lies between two of
#                these levels runs again at each level
#
# As `jax.checkpoint` over layers: the residuals of about √L levels stay, and those of
# about √L are filled again (Chen, Xu, Zhang, Guestrin, "Training deep nets with
# sublinear memory cost", 2016).

LITTLE = 2**20  # bytes of residuals that are always allowed: they are worth no pass


class Life(NamedTuple):
    """The bytes of a residual, and the levels that need them.

    Attributes:
      number: the number of its buffer.
      nbytes: the bytes that a device stores.
      of_cotangent: the bytes of the cotangent.
      first: the level that fills the buffer.
      last: the last level that reads it.
      is_stack: True if a scan stacks the residual.
      is_derived: True if the residual can be computed from other residuals of the same
        level.
    """

    number: int
    nbytes: int
    of_cotangent: int
    first: int
    last: int
    is_stack: bool = False
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
    store_marked(marked)
    full = marked.copy()
    store_residuals(full, range(1, schedule.end))
    lives = list(_lives(full))
    if not lives:
        return full
    full.peak = peak(lives, (), full.end)
    most = limit
    if most is None:
        most = max(of_step() - largest_step(share(full)), LITTLE)
    ends = _segments(lives, full.end, most)
    # Segments do not divide the stack of a scan: it stays, or the scan runs again.
    stacks = (x.nbytes for x in lives if x.is_stack)
    bounded = limit is not None or max(stacks, default=0) > most
    if not bounded or peak(lives, ends, full.end) <= most:
        return _in_segments(full, lives, ends)
    return dataclasses.replace(_less(marked, most), unlimited=full)


# -- Lives -----------------------------------------------------------------------------


def _lives(schedule: Schedule) -> Iterator[Life]:
    last: dict[int, int] = {}
    for level in range(1, schedule.end + 1):
        for x in schedule.needed(schedule.roots(level), Level(level))[1]:
            if x in schedule.views:
                last[schedule.views[x].buffer] = level
    for i, b in enumerate(schedule.buffers):
        if b.kind == "residual":
            e: Any = jaxprs.made_by(schedule.jaxpr, b.operand)
            first = b.level.number
            until = last.get(i, first)
            until = schedule.end if is_mark(e, schedule.axis) else until
            is_stack = (
                jaxprs.times(e) > 1
                and b.operand in e.outvars[jaxprs.scan_of(e).num_carry :]
            )
            more = is_stack, _is_derived(schedule, i)
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
    return int(max(np.cumsum(there).max(), np.cumsum(back).max()))


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
        grads = sum(jaxprs.nbytes(x) for x in smooth if x in schedule.arguments)
        steps.append(bytes_of_residuals(equations, smooth, reads) + grads)
    for level in range(1, schedule.end + 1) if schedule.kept is not None else ():
        roots = schedule.roots(level)
        equations, reads = schedule.needed(roots, Level(level))
        step, _ = jaxprs.between(schedule.jaxpr, equations, reads, roots, reads)
        steps.append(alive.most_alive(step))
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
        store_residuals(trial, sorted({1 + place for place in places}))
        trial.peak = peak(list(_lives(trial)), (), trial.end)
        if trial.peak <= most:
            few, best = number, trial
        else:
            many = number - 1
    return best


# == Loops of a value ==================================================================


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


def loops_of(schedule: Schedule) -> LoopSets:
    """The loops of a schedule."""
    roots, smooth = (roots_of(schedule, smooth) for smooth in (False, True))
    readers, runs = _runs(schedule, roots)
    return LoopSets(schedule, roots, readers, runs, _runs(schedule, smooth)[1])


def roots_of(schedule: Schedule, smooth: bool) -> dict[Any, int]:
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


# == Residuals =========================================================================
# The choice of the residuals, which later levels read and need not compute again.
#
# Every level is a pass over the micro-batches, forward and backward. A network that two
# levels need would run in both, unless its values are residuals: then each part of
# `fun` runs forward at the level that needs it first, once more before its backward
# pass, and backward once.
#
# After each level a minimum cut chooses the smallest set of residuals on all ways from
# costly equations to later levels. Cheap equations, such as activation functions, run
# again behind the cut. Earlier residuals may be part of the cut, at half their price:
# in a residual network the sum so far is kept, and not each of its terms, which every
# later level would have to add up. `room` chooses which residuals stay, and for how
# long.

_LONGEST = 32  # cheap equations in a row that run again behind a residual

_FORWARD = 2  # runs that every equation has, with residuals too

_EARLIER = 1 / 2  # the price of a residual that is stored already


def store_marked(schedule: Schedule) -> None:
    """Stores what `checkpoint_name(x, axis)` marks, if a later level reads it."""
    readers = loops_of(schedule).readers
    for e in schedule.jaxpr.eqns:
        for x in e.outvars if is_mark(e, schedule.axis) else ():
            traits = schedule.traits[x]
            is_read = readers.get(x, 0) >> traits.level + 1
            if is_read and traits.of_rows and x not in schedule.views:
                schedule.buffer(x, "residual", traits.level)


def store_residuals(schedule: Schedule, levels: Iterable[int]) -> None:
    """Stores residuals after each of these levels, in order."""
    loops = loops_of(schedule)
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
    readers = (e for e, _ in jaxprs.uses(schedule.jaxpr, variable))
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
        return price * loops.schedule.num_values["residual"] * jaxprs.nbytes(x) + 1

    cut_values = smallest_cut(equations, [*sources, *earlier], set(border), size)
    return [x for x in cut_values if x not in earlier]


def _behind(
    loops: LoopSets, border: Sequence[Any], level: int
) -> tuple[list[core.JaxprEqn], list[Any]]:
    """The equations that later loops run for a border, and residuals that they read."""
    schedule = loops.schedule
    jaxpr, views, buffers = schedule.jaxpr, schedule.views, schedule.buffers

    def is_known(x: Any) -> bool:
        e = jaxprs.made_by(jaxpr, x)
        if x in views or e is None:
            return True
        return not (loops.of(e) >> level + 1 and schedule.is_of_rows(e))

    equations, reads = jaxprs.needed_for(jaxpr, border, is_known)
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
        is_dear = not jaxprs.is_cheap(e) or steps % _LONGEST == 0
        if is_dear and loops.of(e) & up_to and loops.num_runs(e) > _FORWARD:
            sources += e.outvars
    return sources


# == Shared values =====================================================================
# Values that all micro-batches share are computed once.
#
# A value of parameters and of filled buffers alone, and not of rows, is the same in
# every micro-batch: the factors of a covariance, a loss of gathered rows. Such values
# become buffers that are filled without a loop. Their cotangents add up as the
# cotangents of other buffers, and go back once.
#
# A value stays in the loops if it takes little work beside the rows, or if it is cheap
# and depends on parameters alone: a stored cast of all weights would be another copy.


def share(schedule: Schedule) -> Schedule:
    """The schedule with buffers for values that are computed once."""
    loops = loops_of(schedule.copy())
    jaxpr = schedule.jaxpr
    meetings = [e.outvars for e in jaxpr.eqns if is_collective(e, schedule.axis)]
    gathered = following(jaxpr, [x for outs in meetings for x in outs])
    of_rows: dict[int, float] = collections.defaultdict(float)  # by their loops
    for e in filter(schedule.is_of_rows, jaxpr.eqns):
        of_rows[loops.of(e)] += jaxprs.work(e)
    groups: dict[int, list[core.JaxprEqn]] = {}
    for e in jaxpr.eqns:
        if _is_shared(schedule, e):
            groups.setdefault(schedule.level_of(e), []).append(e)
    for level in range(1, schedule.end + 1):
        group = [e for e in groups.get(level, ()) if loops.of(e)]
        sources = [
            x
            for e in group
            if not jaxprs.is_cheap(e)
            or (jaxprs.work(e) and not gathered.isdisjoint(e.outvars))
            for x in e.outvars
        ]
        if sources and _is_much(loops, group, of_rows):
            for x in _smallest(loops, group, sources):
                loops.schedule.buffer(x, "shared", level)
    return loops.schedule


def checkpoints_parted(jaxpr: core.Jaxpr, axis: str, rows: Sequence[Any]) -> core.Jaxpr:
    """The program with checkpoints of their own for values that micro-batches share.

    One checkpoint may hold values of parameters alone, such as weights that it casts;
    values of sums over all rows, such as the layers of experts; and values of rows that
    read both. `rows` are the arguments that differ between micro-batches.
    """
    of_rows, gathered = set(rows), set()

    def change(e: core.JaxprEqn) -> list[core.JaxprEqn]:
        is_checkpoint = jaxprs.kind(e) == "checkpoint" and not e.effects
        parts = _apart(e, of_rows, gathered) if is_checkpoint else [e]
        for x in parts:
            if is_collective(x, axis):
                gathered.update(x.outvars)
                continue
            for some in (of_rows, gathered):
                if not some.isdisjoint(variables(x.invars)):
                    some.update(x.outvars)
        return parts

    return jaxprs.changed(jaxpr, change)


def _apart(
    e: core.JaxprEqn, of_rows: set[Any], gathered: set[Any]
) -> list[core.JaxprEqn]:
    """A checkpoint of values of parameters, one of values of `gathered`, and the rest.

    The rest reads of the others what equations that are not cheap compute. What is
    cheap runs again in the rest, so that it is no residual.
    """
    [inside] = jaxprs.inner_programs(e)
    outside = dict(zip(inside.invars, e.invars, strict=True))
    rows, sums = (
        following(inside, [v for v, x in outside.items() if jaxprs.is_among(x, some)])
        for some in (of_rows, gathered)
    )
    pairs = list(zip(inside.outvars, e.outvars, strict=True))
    computed = [x for one in inside.eqns for x in one.outvars]
    shared = {*computed} - rows
    parts, known = [], outside
    for group in (shared - sums, shared & sums):
        results = [x for x in pairs if jaxprs.is_among(x[0], group)]
        rest = [x.invars for x in inside.eqns if group.isdisjoint(x.outvars)]
        reads = group & {*variables(itertools.chain(*rest))}
        dear = (x for x in computed if x in reads and _is_dear(inside, x, known))
        names = {x: dict(results).get(x, core.Var(x.aval)) for x in dear}
        results += (x for x in names.items() if x not in results)
        parts += [_part(e, results, known)] if results else []
        pairs = [x for x in pairs if x not in results]
        known = known | names
    parts += [_part(e, pairs, known)] if pairs else []
    return parts if len(parts) > 1 else [e]


def _is_dear(jaxpr: core.Jaxpr, x: Any, known: Container[Any]) -> bool:
    """True if a value takes an equation that is not cheap."""
    equations, _ = jaxprs.needed_for(jaxpr, [x], known.__contains__)
    return not all(map(jaxprs.is_cheap, equations))


def _part(
    e: core.JaxprEqn, results: Collection[tuple[Any, Any]], known: Mapping[Any, Any]
) -> core.JaxprEqn:
    """A checkpoint of some values in a checkpoint: of each the name inside and outside.

    `known` has the names outside of values that are computed before.
    """
    [inside] = jaxprs.inner_programs(e)
    wanted, outs = ([pair[i] for pair in results] for i in (0, 1))
    equations, reads = jaxprs.needed_for(inside, wanted, known.__contains__)
    ends = {"constvars": [], "invars": reads, "outvars": wanted}
    new = jaxprs.with_inner(e, lambda _: inside.replace(eqns=equations, **ends))
    return new.replace(invars=[known[x] for x in reads], outvars=outs)


def _is_shared(schedule: Schedule, equation: core.JaxprEqn) -> bool:
    """True if the equation has the same result in every micro-batch."""
    is_alone = not is_collective(equation, schedule.axis) and not equation.effects
    return bool(equation.outvars) and is_alone and not schedule.is_of_rows(equation)


def _is_much(
    loops: LoopSets, group: list[core.JaxprEqn], of_rows: Mapping[int, float]
) -> bool:
    """True if a group takes more than a little of the work of its loops."""
    group_loops = functools.reduce(operator.or_, map(loops.of, group))
    shared = sum(jaxprs.work(e) * loops.of(e).bit_count() for e in group)
    rows = sum(x * (group_loops & some).bit_count() for some, x in of_rows.items())
    return shared > jaxprs.LITTLE * rows


def _smallest(
    loops: LoopSets, group: list[core.JaxprEqn], sources: list[Any]
) -> list[Any]:
    """The smallest set of shared values from which loops can compute the others."""
    inside = {id(e) for e in group}
    sinks = set()
    for x in (x for e in group for x in e.outvars):
        readers = (r for r, _ in jaxprs.uses(loops.schedule.jaxpr, x))
        outside = (r for r in readers if id(r) not in inside)
        if loops.roots.get(x) or any(map(loops.of, outside)):
            sinks.add(x)

    def size(x: Any) -> float:
        return jaxprs.nbytes(x) + 1.0

    return smallest_cut(group, sources, sinks, size)
