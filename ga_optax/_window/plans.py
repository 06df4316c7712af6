"""What a call does, loop by loop, for who asks to see it: `testing.describe`.

It is read off the schedule that the window runs by, so it cannot say anything else. A
loss whose rows do not meet has the schedule of one level.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._loop.step import Operands, Step
from ga_optax._passes import ir, notes, places
from ga_optax._text import wrap
from ga_optax._window import schedule as scheduling
from ga_optax._window.counts import Counter, refilling
from ga_optax._window.levels import Levels
from ga_optax._window.schedule import Fact, Level, Phase, Schedule

_MOST = 12  # primitives that are named of one line
_Lines = dict[str, list[str]]  # the primitives of each line of the user's code


class Stage(NamedTuple):
    """One loop over the micro-batches, or what they share, once.

    Attributes:
      name: when it runs.
      how: which loop runs it, and how often.
      forward: the lines that it computes, and what of each.
      backward: those that it takes the cotangents of back through.
      fills: what it leaves for later stages.
    """

    name: str
    how: str
    forward: _Lines
    backward: _Lines
    fills: Sequence[str] = ()

    def __str__(self) -> str:
        said = [f"{self.name}: {self.how}"]
        for verb, lines in (("computes", self.forward), ("goes back", self.backward)):
            for line, names in lines.items():
                more = f", {len(names) - _MOST} more" if len(names) > _MOST else ""
                what = ", ".join(names[:_MOST]) + more
                said += wrap(f"  {verb:<9}  {line}: {what}")
        return "\n".join([*said, *(f"  fills      {x}" for x in self.fills)])


def of_loop(step: Step, operands: Operands, size: int = 0) -> None:
    """Describes a call whose rows do not meet, of `size` micro-batches on all devices.

    0 if those of each are told alone.
    """
    if (found := notes.plans()) is None:
        return
    given, count = iter(step.jaxpr.invars), len(operands.params)
    params = [next(given) for _ in range(count)]
    own = list(given)
    facts = scheduling.facts_of(step.jaxpr, "", [*params, *own[: operands.rows]], own)
    schedule = Schedule(step.jaxpr, "", facts, after=frozenset())
    [loss] = _stages(schedule, {}, _loop(len(operands.batch[0]), size))
    found.append(f"Rows do not meet: one loop.\n\n{loss}")


def of_window(schedule: Schedule, report: Levels) -> None:
    """Describes one whose rows meet."""
    if (found := notes.plans()) is None:
        return
    fills = {
        x.number: f"{x.what}, {x.nbytes:,} bytes, at {places.short(x.line)}"
        for x in report.stored
    }
    loop = _loop(schedule.times["own"], schedule.times["stack"])
    stages = "\n\n".join(map(str, _stages(schedule, fills, loop)))
    found.append(
        f"Rows meet: {report.levels} level{'s' * (report.levels != 1)} before the "
        f"loss.\n\n{stages}\n\nIn all: at most {report.forward} forward and "
        f"{report.backward} backward, in about {report.peak:,} bytes."
    )


def _loop(num: int, size: int) -> str:
    devices = f" on each of {size // num} devices" if size > num else ""
    return f"a loop over {num} micro-batches{devices}"


def _stages(schedule: Schedule, fills: dict[int, str], loop: str) -> list[Stage]:
    """Those of a window, in the order in which they run."""
    once = "once, in no loop"
    found, end, again = [], schedule.end, Counter(schedule).again()

    def filled(members: Iterable[int]) -> list[str]:
        return [fills[j] for j in members if j in fills]

    def add(name: str, level: Level, how: str = loop) -> None:
        if members := schedule.at(*level):
            lines = _lines(schedule.needed(schedule.operands(*level), level)[0])
            found.append(Stage(name, how, lines, {}, filled(members)))

    def back(name: str, level: Level, how: str = loop) -> None:
        roots = schedule.operands(*level, smooth=True)
        runs = schedule.needed(roots, level)[0]
        loops = level.phase == Phase.ROWS
        here = [e for e in runs if again[id(e)] >> level.number & 1 or not loops]
        if roots:
            found.append(Stage(name, how, _lines(here), _back(schedule, runs)))

    for n in range(end):
        add(f"level {n}", Level(n))
        add(f"level {n}, shared", Level(n, Phase.ONCE), once)
    runs = schedule.needed(schedule.roots(end), Level(end))[0]
    smooth = schedule.needed(schedule.smooth_roots(end), Level(end))[0]
    lines, fill = _back(schedule, smooth), filled(schedule.at(end))
    both = f"{loop}, forward{' and backward' * bool(lines)}"
    found.append(Stage("the loss", both, _lines(runs), lines, fill))
    for n in reversed(range(end)):
        if members := schedule.again.get(n):
            lines = _lines(refilling(schedule, n))
            name = f"level {n}, filled again"
            found.append(Stage(name, loop, lines, {}, filled(members)))
        back(f"level {n}, shared, back", Level(n, Phase.ONCE), once)
        back(f"level {n}, back", Level(n))
    if schedule.after:
        roots = [schedule.jaxpr.outvars[i] for i in sorted(schedule.after)]
        runs = schedule.needed(roots, Level(end, Phase.ONCE))[0]
        if runs:
            found.append(Stage("after the loops", once, _lines(runs), {}))
    return found


def _back(schedule: Schedule, equations: Iterable[core.JaxprEqn]) -> _Lines:
    """Those of equations that the loss is differentiated through; the last first."""
    found = [y for e in equations for y in _through(e, schedule.facts)]
    return _lines(reversed(found))


def _through(e: core.JaxprEqn, facts: dict[Any, Fact]) -> list[core.JaxprEqn]:
    """What cotangents go through: the equation, or some of the function inside it."""
    if not any(facts[x].smooth for x in e.outvars):
        return []
    if not ir.is_inline(e):
        return [e]

    def smooth(names: Sequence[Any], outside: Sequence[Any]) -> list[Any]:
        pairs = zip(names, outside, strict=True)
        return [x for x, v in pairs if ir.is_variable(v) and facts[v].smooth]

    [inner] = ir.inner_programs(e)
    params, loss = smooth(inner.invars, e.invars), smooth(inner.outvars, e.outvars)
    inside = scheduling.facts_of(inner, "", params, (), loss)
    placed = (places.placed(x, e.source_info) for x in inner.eqns)
    return [y for x in placed for y in _through(x, inside)]


def _lines(equations: Iterable[core.JaxprEqn]) -> _Lines:
    """The primitives of each line of the user's code, in order, each once."""
    found: dict[str, dict[str, None]] = {}
    for outer in equations:
        for e in ir.within(outer):
            if not ir.inner_programs(e):
                source = places.placed(e, outer.source_info).source_info
                line = places.short(places.line_of(source))
                found.setdefault(line, {})[ir.name_of(e)] = None
    return {line: list(names) for line, names in found.items()}
