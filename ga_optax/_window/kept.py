"""Residuals of a window that goes forward alone: how long each stays.

    kept after a level  =  what later levels read and must not compute again

Such a window is that of a function, or of a gradient that is one program: there a value
is read near its own level, and again at the mirrored level of the way back.
"""

import collections
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._passes import jaxprs
from .cuts import smallest_cut
from .room import roots_of
from .schedule import Level, Schedule

# == The plan ==========================================================================
# A plan says what is kept after each level. It follows what each level computes: its
# roots and what is newly kept, from what was kept before. So any plan is right, and its
# work and its bytes can be counted.
#
#   full       minimum cuts between each level and all later ones: nothing that is not
#              cheap runs twice
#   segments   after the end of a segment of levels there stays what the next levels
#              read. What the way back reads is computed again by the first level that
#              reads some of it, with all of the segment, and is kept from then on
#   less       what is cheapest to compute again, for its bytes, is dropped between two
#              levels that read it, until all fits: the scores of a contrastive loss
#              are computed again with their product, and never kept

MOST = (
    1.34  # times the work of the full plan: as if all that a gradient needs ran twice
)

_TRIALS = 8  # sizes of segments

Kept = Sequence[frozenset[Any]]  # the residuals after each level, from 0 on


class Plan(NamedTuple):
    """The residuals that are kept after each level.

    Attributes:
      work: the scalar operations of what is not cheap, of one micro-batch.
      peak: the bytes of residuals, at most at a time.
      kept: the residuals after each level.
    """

    work: float
    peak: int
    kept: Kept


def planned(schedule: Schedule, limit: int, *, is_bound: bool) -> Schedule:
    """The schedule with residuals.

    Args:
      schedule: a schedule without residuals, of a window without cotangents.
      limit: the bytes that residuals may take at a time.
      is_bound: False if they may take more, rather than that the work is more than
        `MOST` times that of the full plan.
    """
    values = _Lives(schedule)
    cuts = _cuts(values, schedule.end)
    full = values.followed(_first(cuts))
    if full.peak <= limit:
        return _with_residuals(values, full)
    most = float("inf") if is_bound else MOST * full.work
    trials = [full, *_segmented(values, full, _first(cuts))]
    trials = [_less(values, x, limit, most) for x in trials]
    fit = [x for x in trials if x.peak <= limit]
    if fit:
        plan = min(fit, key=lambda x: x.work)
    else:
        plan = min(trials, key=lambda x: (x.work > most, x.peak))
    chosen = _with_residuals(values, plan)
    chosen.unlimited = _with_residuals(values, full)
    return chosen


def _with_residuals(values: "_Lives", plan: Plan) -> Schedule:
    """The schedule that keeps what a plan keeps."""
    schedule, kept = values.schedule.copy(), plan.kept
    numbers: dict[Any, int] = {}
    for t, (before, after) in enumerate(itertools.pairwise(kept), 1):
        for x in values.in_order(after - before):
            if x in numbers:
                schedule.by_level.setdefault(Level(t), []).append(numbers[x])
            else:
                numbers[x] = schedule.buffer(x, "residual", t)
        schedule.drops[t] = [numbers[x] for x in values.in_order(before - after)]
    each = (frozenset(map(numbers.__getitem__, some)) for some in kept)
    schedule.kept = [frozenset(), *each]
    schedule.peak = plan.peak
    return schedule


def written_over(
    schedule: Schedule, members: Sequence[int], level: Level, known: Container[int]
) -> dict[int, int]:
    """For places of new stacks, dropped stacks of the same type that they replace."""
    over = dict[int, int]()
    if schedule.kept is None:
        return over
    left = [j for j in schedule.drops.get(level.number, ()) if j in known]
    for i, j in enumerate(members):
        _, kind, *_ = new = schedule.buffers[j]
        aval = new.operand.aval
        is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        same = (old for old in left if schedule.buffers[old].operand.aval == aval)
        is_stack = kind == "residual" and not is_key
        if is_stack and (old := next(same, None)) is not None:
            over[i] = old
            left.remove(old)
    return over


# == Values ============================================================================


class _Lives:
    """The values of rows of a window, and what plans need to know of them.

    Attributes:
      schedule: the schedule, without residuals.
      number: how many values a device stores of a residual.
      place: the place of each value in the program.
      work: the scalar operations of each equation, by its id; 0 if it is cheap.
      roots: the values that each level has to compute, from level 0 on.
      runs: the levels at which each equation runs in the full plan, as bits, by its id.
      wanted: the levels of which a value is a root, as bits.
      readers: the equations that read each value.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.number = schedule, schedule.num_values["residual"]
        equations = list(filter(schedule.is_of_rows, schedule.jaxpr.eqns))
        self.place = {x: i for i, e in enumerate(equations) for x in e.outvars}
        self.work = {
            id(e): 0.0 if jaxprs.is_cheap(e) else jaxprs.work(e) for e in equations
        }
        self._at = dict[Any, tuple[set[Any], float]]()
        self._while = dict[Any, int]()
        self.roots = [
            [x for x in jaxprs.variables(schedule.roots(t)) if t and x in self.place]
            for t in range(schedule.end + 1)
        ]
        self.wanted = roots_of(schedule, smooth=False)
        self.readers = collections.defaultdict(list)
        self.runs: dict[int, int] = {}
        read = dict(self.wanted)
        for e in reversed(equations):
            levels = 0
            for x in e.outvars:
                levels |= read.get(x, 0)
            # What is not cheap runs once, at the first level that needs it.
            self.runs[id(e)] = levels = levels & -levels if self.work[id(e)] else levels
            for x in jaxprs.variables(e.invars):
                read[x] = read.get(x, 0) | levels
                self.readers[x].append(e)

    def level(self, x: Any) -> int:
        return self.schedule.traits[x].level

    def in_order(self, xs: Iterable[Any]) -> list[Any]:
        return sorted(xs, key=self.place.__getitem__)

    def nbytes(self, x: Any) -> int:
        """The bytes of a value of each micro-batch."""
        return self.number * jaxprs.nbytes(x)

    def needed(
        self, wanted: Iterable[Any], kept: Container[Any], level: int
    ) -> tuple[list[Any], list[Any]]:
        """The equations that compute values at a level, and what they read."""

        def is_known(x: Any) -> bool:
            # Of rows that are gathered, each micro-batch finds its own in the stack.
            is_gathered = x in self.schedule.views and self.level(x) < level
            return x not in self.place or x in kept or is_gathered

        return jaxprs.needed_for(self.schedule.jaxpr, wanted, is_known)

    def at(
        self, level: int, before: frozenset[Any], after: frozenset[Any]
    ) -> tuple[set[Any], float]:
        """The values that a level reads for its roots and new values, and its work."""
        key = level, before, after
        if key not in self._at:
            wanted = [*self.roots[level], *(after - before)]
            equations, reads = self.needed(wanted, before, level)
            work = sum(self.work.get(id(e), 0.0) for e in equations)
            self._at[key] = set(reads), work
        return self._at[key]

    def bytes_while(self, before: frozenset[Any], after: frozenset[Any]) -> int:
        """The bytes while a level runs: new stacks are written over dropped ones."""
        if (before, after) in self._while:
            return self._while[before, after]
        types = [x.aval for x in after if x not in before]
        over = collections.Counter(types) & collections.Counter(
            x.aval for x in before if x not in after
        )
        sizes = {x.aval: self.nbytes(x) for x in after}
        written_over = sum(sizes[aval] * n for aval, n in over.items())
        size = sum(map(self.nbytes, before | after)) - written_over
        self._while[before, after] = size
        return size

    def followed(
        self, new: Sequence[list[Any]], ends: Mapping[int, list[Any]] | None = None
    ) -> Plan:
        """The plan that keeps new values after each level, as long as they are read.

        After the levels in `ends` only values at these borders stay. A value that was
        dropped is kept again by the first level that computes it again.
        """
        ends = ends or {}
        every = {*itertools.chain(*new), *itertools.chain(*ends.values())}
        known, stay = set[Any](), set[Any]()
        before, reads = [], [set()]
        for t in range(1, self.schedule.end + 1):
            wanted = [*self.roots[t], *(new[t] if t < len(new) else ())]
            equations, some = self.needed([*wanted, *ends.get(t, ())], known, t)
            before.append(frozenset(known))
            reads.append(known.intersection(some))
            known.update(x for e in equations for x in e.outvars if x in every)
            if t in ends:
                stay.update(ends[t])
                known &= stay
        later = set[Any]()
        kept = [frozenset[Any]()] * (self.schedule.end + 1)
        for t in range(self.schedule.end, 0, -1):
            later = (later | reads[t]) & before[t - 1]
            kept[t - 1] = frozenset(later)
        return self.counted(kept)

    def counted(self, kept: Kept) -> Plan:
        """A plan, with its work and its bytes."""
        levels = range(1, self.schedule.end + 1)
        work = sum(self.at(t, kept[t - 1], kept[t])[1] for t in levels)
        return Plan(work, max(map(self.bytes_while, kept, kept[1:])), kept)


# == Cuts ==============================================================================


def _cuts(values: _Lives, until: int) -> list[list[Any]]:
    """After each level, the smallest set of which levels up to `until` compute.

    A value of an earlier set is half as dear: in a residual network the sum so far is
    kept, and not each of its terms.
    """
    chosen: dict[Any, None] = {}
    found: list[list[Any]] = [[]]
    for level in range(1, until):
        border = _border(values, level, until)
        found.append(_cut(values, level, border, chosen) if border else [])
        chosen |= dict.fromkeys(found[-1])
    return found


def _first(cuts: Sequence[list[Any]]) -> list[list[Any]]:
    """The values that each cut is the first to have."""
    seen: set[Any] = set()
    new = []
    for cut in cuts:
        new.append([x for x in cut if x not in seen])
        seen.update(cut)
    return new


def _border(values: _Lives, level: int, until: int) -> list[Any]:
    """The values up to a level that later levels, up to `until`, read."""
    later = (1 << until + 1) - (1 << level + 1)

    def is_read(x: Any) -> bool:
        return bool(values.wanted.get(x, 0) & later) or any(
            values.runs[id(e)] & later and values.level(e.outvars[0]) > level
            for e in values.readers[x]
        )

    return [x for x in values.place if values.level(x) <= level and is_read(x)]


def _cut(
    values: _Lives, level: int, border: list[Any], chosen: Container[Any]
) -> list[Any]:
    """The smallest set after a level; none if only what is cheap would run again."""
    up_to = (1 << level + 1) - 1
    equations, reads = values.needed(border, chosen, level + 1)
    dear = (e for e in equations if values.work[id(e)] and values.runs[id(e)] & up_to)
    sources = [x for e in dear for x in e.outvars]
    sources += [x for x in reads if x in chosen]

    def size(x: Any) -> float:
        return (1 / 2 if x in chosen else 1) * values.nbytes(x) + 1

    return smallest_cut(equations, sources, set(border), size) if sources else []


# == Less ==============================================================================


def _segmented(values: _Lives, full: Plan, new: Sequence[list[Any]]) -> Iterator[Plan]:
    """Plans with segments of several sizes, before the level with the most bytes."""
    sizes = [sum(map(values.nbytes, some)) for some in full.kept]
    turn = max(range(len(sizes)), key=lambda t: (sizes[t], t))
    near = _cuts(values, turn)
    by_level = collections.Counter[int]()
    for x in itertools.chain(*new):
        by_level[values.level(x)] += values.nbytes(x)
    seen: set[tuple[int, ...]] = set()
    for n in range(1, _TRIALS + 1):
        most, inside, staying = sizes[turn] * n // _TRIALS, 0, 0
        ends = []
        for t in range(1, turn):
            inside += by_level[t]
            # Later segments are shorter: beside them stay the borders of all before.
            if near[t] and inside + by_level[t + 1] + staying > most:
                ends.append(t)
                staying += sum(map(values.nbytes, near[t]))
                inside = 0
        if tuple(ends) not in seen:
            seen.add(tuple(ends))
            yield values.followed(new, {t: near[t] for t in ends})


def _less(values: _Lives, plan: Plan, limit: int, most: float) -> Plan:
    """The plan without what is cheapest to compute again, until it fits."""
    kept, work, best = list(plan.kept), plan.work, plan
    while best.peak > limit:
        sizes = [0, *map(values.bytes_while, kept, kept[1:])]
        t = max(range(len(sizes)), key=sizes.__getitem__)
        gaps = (
            _gap(values, kept, x, t) for x in values.in_order(kept[t - 1] | kept[t])
        )
        moves = [x for x in gaps if work + x.work <= most]
        if not moves:
            break
        move = min(moves, key=lambda x: x.work / values.nbytes(x.value))
        for n in move.levels:
            kept[n] -= {move.value}
        work += move.work
        size = max(map(values.bytes_while, kept, kept[1:]))
        if size < best.peak:
            best = Plan(work, size, tuple(kept))
    return best


class _Gap(NamedTuple):
    """Levels after which a value is kept, and which do not read it.

    Attributes:
      value: the value.
      levels: the levels.
      work: the work of the level that reads it next, if it is computed again.
    """

    value: Any
    levels: range
    work: float


def _gap(values: _Lives, kept: Kept, x: Any, t: int) -> _Gap:
    """The gap of a value that is kept before or after level `t`."""

    def is_read(level: int) -> bool:
        return x in values.at(level, kept[level - 1], kept[level])[0]

    start = end = t if x in kept[t] else t - 1
    while x in kept[start - 1] and not is_read(start):
        start -= 1
    while x in kept[end + 1] and not is_read(end + 1):
        end += 1
    reader = end + 1
    before, after = kept[reader - 1], kept[reader]
    more = values.at(reader, before - {x}, after)[1]
    more -= values.at(reader, before, after)[1]
    return _Gap(x, range(start, reader), more)
