"""The phases of a call in words, loop by loop: `testing.describe`.

The words are read off the schedule that the window runs by. A loss whose rows do not
meet has the schedule of one level.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from ga_optax._loop.loss import LossProgram, Operands
from ga_optax._passes import ir, notes, places
from ga_optax._text import wrap
from ga_optax._window.report import WindowReport
from ga_optax._window.runs import Phase, phases
from ga_optax._window.schedule import Level, Schedule, Traits, traits_of

_MOST = 12  # primitives that are named of one line


def of_loop(program: LossProgram, operands: Operands, size: int = 0) -> None:
    """Describes a call whose rows do not meet.

    `size` is the number of micro-batches on all devices; 0 if each device speaks for
    itself.
    """
    if (texts := notes.plans()) is None:
        return
    count = len(operands.params)
    params, rows = program.jaxpr.invars[:count], program.jaxpr.invars[count:]
    smooth = [*params, *rows[: operands.rows]]
    schedule = Schedule(program.jaxpr, "", traits_of(program.jaxpr, "", smooth, rows))
    loss = _in_words(schedule, _loop(len(operands.batch[0]), size), {})
    texts.append(f"Rows do not meet: one loop.\n\n{loss}")


def of_window(schedule: Schedule, report: WindowReport) -> None:
    """Describes a call whose rows meet."""
    if (texts := notes.plans()) is None:
        return
    fills = {
        x.number: f"{x.what}, {x.nbytes:,} bytes, at {places.short(x.line)}"
        for x in report.stored
    }
    loop = _loop(*(schedule.num_values[kind] for kind in ("residual", "stack")))
    texts.append(
        f"Rows meet: {report.levels} level{'s' * (report.levels != 1)} before the "
        f"loss.\n\n{_in_words(schedule, loop, fills)}\n\nIn all: at most "
        f"{report.forward} forward and {report.backward} backward, in about "
        f"{report.peak:,} bytes."
    )


def _loop(num: int, size: int) -> str:
    devices = f" on each of {size // num} devices" if size > num else ""
    return f"a loop over {num} micro-batches{devices}"


def _in_words(schedule: Schedule, loop: str, fills: dict[int, str]) -> str:
    """The phases of a schedule. `loop` and `fills` are loops and buffers in words."""
    return "\n\n".join(_phase(x, schedule, loop, fills) for x in phases(schedule))


def _phase(phase: Phase, schedule: Schedule, loop: str, fills: dict[int, str]) -> str:
    back = [y for e in phase.back for y in _smooth_inside(e, schedule.traits)]
    how = loop if phase.level.in_loop else "once, in no loop"
    if phase.level == Level(schedule.end):
        how += f", forward{' and backward' * bool(back)}"
    lines = [f"{phase.name}: {how}"]
    for verb, some in (("computes", phase.forward), ("goes back", reversed(back))):
        for line, names in _primitives(some).items():
            more = f", {len(names) - _MOST} more" if len(names) > _MOST else ""
            lines += wrap(f"  {verb:<9}  {line}: {', '.join(names[:_MOST])}{more}")
    lines += [f"  fills      {fills[j]}" for j in phase.fills if j in fills]
    return "\n".join(lines)


def _smooth_inside(e: core.JaxprEqn, traits: dict[Any, Traits]) -> list[core.JaxprEqn]:
    """The equations of a call through which cotangents go; others by themselves."""
    if not any(traits[x].smooth for x in e.outvars):
        return []
    if not ir.is_inline(e):
        return [e]

    def smooth(names: Sequence[Any], outside: Sequence[Any]) -> list[Any]:
        pairs = zip(names, outside, strict=True)
        return [x for x, v in pairs if ir.is_variable(v) and traits[v].smooth]

    [inner] = ir.inner_programs(e)
    params, loss = smooth(inner.invars, e.invars), smooth(inner.outvars, e.outvars)
    inside = traits_of(inner, "", params, (), loss)
    equations = (places.placed(x, e.source_info) for x in inner.eqns)
    return [y for x in equations for y in _smooth_inside(x, inside)]


def _primitives(equations: Iterable[core.JaxprEqn]) -> dict[str, list[str]]:
    """The primitives of each line of the user's code, in order, each once."""
    lines: dict[str, dict[str, None]] = {}
    for outer in equations:
        for e in ir.within(outer):
            if not ir.inner_programs(e):
                source = places.placed(e, outer.source_info).source_info
                line = places.short(places.line_of(source))
                lines.setdefault(line, {})[ir.name_of(e)] = None
    return {line: list(names) for line, names in lines.items()}
