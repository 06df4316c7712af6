"""What a call does, loop by loop, for who asks to see it: `testing.describe`.

It is read off the schedule that the window runs by, so it cannot say anything else. A
loss whose rows do not meet has the schedule of one level.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from ga_optax._loop.step import Operands, Step
from ga_optax._passes import ir, notes, places
from ga_optax._text import wrap
from ga_optax._window import schedule as scheduling
from ga_optax._window.levels import Levels
from ga_optax._window.passes import Stage, stages
from ga_optax._window.schedule import Fact, Level, Schedule

_MOST = 12  # primitives that are named of one line


def of_loop(step: Step, operands: Operands, size: int = 0) -> None:
    """Describes a call whose rows do not meet, of `size` micro-batches on all devices.

    0 if those of each are told alone.
    """
    if (found := notes.plans()) is None:
        return
    count = len(operands.params)
    params, own = step.jaxpr.invars[:count], step.jaxpr.invars[count:]
    facts = scheduling.facts_of(step.jaxpr, "", [*params, *own[: operands.rows]], own)
    schedule = Schedule(step.jaxpr, "", facts, after=frozenset())
    loss = _in_words(schedule, _loop(len(operands.batch[0]), size), {})
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
    told = _in_words(schedule, loop, fills)
    found.append(
        f"Rows meet: {report.levels} level{'s' * (report.levels != 1)} before the "
        f"loss.\n\n{told}\n\nIn all: at most {report.forward} forward and "
        f"{report.backward} backward, in about {report.peak:,} bytes."
    )


def _loop(num: int, size: int) -> str:
    devices = f" on each of {size // num} devices" if size > num else ""
    return f"a loop over {num} micro-batches{devices}"


def _in_words(schedule: Schedule, loop: str, fills: dict[int, str]) -> str:
    """Its stages, of which `loop` says how they run, and `fills` what they fill."""
    return "\n\n".join(_told(x, schedule, loop, fills) for x in stages(schedule))


def _told(stage: Stage, schedule: Schedule, loop: str, fills: dict[int, str]) -> str:
    back = [y for e in stage.back for y in _through(e, schedule.facts)]
    how = "once, in no loop" if stage.level.once else loop
    if stage.level == Level(schedule.end):
        how += f", forward{' and backward' * bool(back)}"
    said = [f"{stage.name}: {how}"]
    for verb, its in (("computes", stage.forward), ("goes back", reversed(back))):
        for line, names in _lines(its).items():
            more = f", {len(names) - _MOST} more" if len(names) > _MOST else ""
            what = ", ".join(names[:_MOST]) + more
            said += wrap(f"  {verb:<9}  {line}: {what}")
    said += [f"  fills      {fills[j]}" for j in stage.fills if j in fills]
    return "\n".join(said)


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


def _lines(equations: Iterable[core.JaxprEqn]) -> dict[str, list[str]]:
    """The primitives of each line of the user's code, in order, each once."""
    found: dict[str, dict[str, None]] = {}
    for outer in equations:
        for e in ir.within(outer):
            if not ir.inner_programs(e):
                source = places.placed(e, outer.source_info).source_info
                line = places.short(places.line_of(source))
                found.setdefault(line, {})[ir.name_of(e)] = None
    return {line: list(names) for line, names in found.items()}
