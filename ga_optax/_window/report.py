"""The report of a window: what it stores, what runs, how often.

The report goes to the log, to `plan`, and to `batch_dependencies`. A loss whose rows do
not meet has the schedule of one level. The partition wrote on each equation which part
of the value a micro-batch holds.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from .._passes import jaxprs
from .._passes.places import (
    better_placed,
    is_heard,
    label_of,
    line_of,
    log_sentence,
    place_of,
    short_line,
    type_in_words,
)
from .._text import columns, warn_once
from .meetings import is_collective
from .room import LITTLE, largest_step
from .schedule import Level, Schedule, Traits, traits_of
from .stages import Runs, most_runs, runs_of_equations, stages


class Stored(NamedTuple):
    """A value that a window stores.

    Attributes:
      number: the number of its buffer.
      line: the line of the user's code that computes it, or where rows meet.
      kind: "residual" (of each micro-batch), "shared" (by all of them), or what a
        collective carries: "sum", "max", "min" or "stack".
      type: the shape and dtype, of one micro-batch.
      nbytes: the bytes that a device stores.
      shape: the shape that is read: of all rows, if they are gathered.
      forward: how often anything on the way to the value runs forward, at most.
      backward: how often it runs backward.
    """

    number: int
    line: str
    kind: str
    type: Any
    nbytes: int
    shape: tuple[int, ...]
    forward: int
    backward: int

    @property
    def what(self) -> str:
        """The value in words."""
        shape = list(self.type.shape) or "a number"
        if self.kind == "stack":
            is_tiled = len(self.shape) == len(self.type.shape)
            tiled = f"all rows of {list(self.shape)}"
            return tiled if is_tiled else f"{shape} of each micro-batch"
        if self.kind == "residual":
            return f"kept: {shape} of each micro-batch"
        if self.kind == "shared":
            return f"kept: {shape} for all rows"
        size, kind = self.type.size, "sum" if self.kind == "sum" else "extremum"
        article, plural = "a" if kind == "sum" else "an", "s" * (size != 1)
        return f"{article} {kind} of {size:,} number{plural}"


class WindowReport(NamedTuple):
    """The values that a window stores, and the runs of its equations.

    Attributes:
      levels: the number of levels before the loss.
      forward: how often any costly equation runs forward, at most.
      backward: how often any costly equation runs backward, at most.
      stored: the values stored between levels.
      peak: about how many bytes a device needs at a time, beside arguments and results:
        stored values and their cotangents, and the residuals and gradients of the step
        of one micro-batch; not what XLA holds between two residuals.
      room: the `residual_bytes` with which all residuals stay, and how often costly
        equations run forward and backward then; None if all stay now.
    """

    levels: int
    forward: int
    backward: int
    stored: tuple[Stored, ...]
    peak: int = 0
    room: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        residuals = [x.line for x in self.stored if x.kind == "residual"]
        lines = ", ".join(dict.fromkeys(residuals))
        text = (
            "Where rows meet, activations are kept between passes: "
            f"{f'values of {lines}' if residuals else 'none'}. Each part of fun "
            f"runs forward at most {self.forward} times and backward {self.backward}, "
            f"in about {float(f'{self.peak / 2**20:.2g}'):g} MiB of a device, counted "
            "from the program. XLA takes 0.6 to 1.3 times that, and up to 4 times for "
            "products of all pairs of rows, of which it holds several at a time."
        )
        return f"{text} {room_sentence(self.room)}" if self.room else text


def room_sentence(room: tuple[int, int, int]) -> str:
    """The `residual_bytes` with which all residuals stay, and the runs then."""
    nbytes, forward, backward = room
    return f"With residual_bytes={nbytes:_}: {forward} and {backward}."


def log_report(schedule: Schedule, limit_is_ours: bool) -> None:
    """Logs the report of a window, before it runs.

    Warns if any equation runs more often than it should, if the limit of residuals is
    ours and not the user's, and more than little is at stake.
    """
    _, forward, backward = most_runs(runs_of_equations(schedule).values())
    runs_often = forward > _FORWARD or backward > _BACKWARD
    if limit_is_ours and runs_often and peak_of(schedule) > LITTLE:
        _warn(report_of(schedule))
    if is_heard(logging.INFO):
        log_sentence(str(report_of(schedule)), logging.INFO)


def report_of(schedule: Schedule) -> WindowReport:
    """The report of a window."""
    runs = runs_of_equations(schedule)
    forward, backward = most_runs(runs.values())[1:]
    stored = tuple(_stored(schedule, runs))
    room = None
    if (full := schedule.unlimited) is not None:
        room = (full.peak, *most_runs(runs_of_equations(full).values())[1:])
    levels, peak = schedule.end - 1, peak_of(schedule)
    return WindowReport(levels, forward, backward, stored, peak, room)


def peak_of(schedule: Schedule) -> int:
    carried = (b for b in schedule.buffers if b.kind != "residual")
    stored = sum(b.nbytes + b.of_cotangent for b in carried)
    return stored + schedule.peak + largest_step(schedule)


def _stored(schedule: Schedule, runs: dict[int, Runs]) -> Iterator[Stored]:
    """The values that a window stores; `runs` as `counted`."""
    runs_to = _runs_to(schedule, runs)
    results: dict[int, Any] = {}  # the result of the first collective of each buffer
    for e in schedule.jaxpr.eqns:
        for x in e.outvars if is_collective(e, schedule.axis) else ():
            results.setdefault(schedule.views[x].buffer, x)
    for i, b in enumerate(schedule.buffers):
        if b.level == Level(0) or (b.level == Level(schedule.end) and b.is_folded):
            continue  # an argument; or no level reads it: it is a result, as the loss
        x = results.get(i, b.operand)
        line, shape = _line(schedule, x), tuple(x.aval.shape)
        is_variable = jaxprs.is_variable(b.operand)
        some = runs_to.get(b.operand, Runs()) if is_variable else Runs()
        yield Stored(i, line, b.kind, b.operand.aval, b.nbytes, shape, *some[1:])


def _runs_to(schedule: Schedule, runs: dict[int, Runs]) -> dict[Any, Runs]:
    """For each variable, the most runs of any equation on the way to it."""
    runs_to: dict[Any, Runs] = {}
    for e in schedule.jaxpr.eqns:
        some = [runs_to[x] for x in jaxprs.variables(e.invars) if x in runs_to]
        some += [runs[id(e)]] if id(e) in runs else []
        if some:
            runs_to |= dict.fromkeys(e.outvars, most_runs(some))
    return runs_to


ALONE = (
    "If rows need not meet there, as in the forces of each structure, write it for one "
    "row, under jax.vmap."
)

_FORWARD, _BACKWARD = 3, 1  # the runs of segments, however many levels there are


def _warn(report: WindowReport) -> None:
    room = (
        room_sentence(report.room) if report.room else f"More room helps not. {ALONE}"
    )
    warn_once(
        f"No part of fun should run forward more than {_FORWARD} times and backward "
        f"{_BACKWARD}, but in {report.levels} levels where rows meet some run forward "
        f"{report.forward} times and backward {report.backward}, since what they need "
        f"of each other takes more room than a micro-batch's step. {room} "
        "ga_optax.batch_dependencies shows the lines."
    )


def _line(schedule: Schedule, x: Any) -> str:
    equation = jaxprs.made_by(schedule.jaxpr, x)
    return "an argument" if equation is None else place_of(equation.source_info)


_MOST = 8  # primitives that are named of one loop or function


class DescribedValue(NamedTuple):
    """A value that a loop computes, or takes cotangents back through.

    Attributes:
      holds: the part that a micro-batch holds: "rows 0 of float32[16,3]", "all of ...",
        or "part of ...": the sum of the parts is the value. "own of ..." for a step of
        the library, in the shape of a micro-batch.
      name: the primitive, or the loop or function with the primitives inside.
      line: the line of the user's code.
    """

    holds: str
    name: str
    line: str


class DescribedLoop(NamedTuple):
    """A loop over the micro-batches, or a computation of what they share, in words.

    Attributes:
      name: the name: "level 1", "the loss", "level 1, back".
      loop: "once", or a loop over so many micro-batches.
      computes: the values that the stage computes.
      goes_back: the values through which cotangents go back, in order.
      fills: the values that the stage stores for later stages.
    """

    name: str
    loop: str
    computes: list[DescribedValue]
    goes_back: list[DescribedValue]
    fills: list[Stored]

    def __str__(self) -> str:
        pairs = ("computes", self.computes), ("goes back", self.goes_back)
        rows = [
            (f"  {verb}", *x.holds.split(" of ", 1), x.name, short_line(x.line))
            for verb, values in pairs
            for x in dict.fromkeys(values)
        ]
        fills = [
            f"  fills      {x.what}, {x.nbytes:,} bytes, at {short_line(x.line)}"
            for x in self.fills
        ]
        head = f"{self.name}: {self.loop}"
        return "\n".join([head, *columns(rows, range(5)), *fills])


def one_level(
    jaxpr: core.Jaxpr, smooth: Sequence[Any], rows: Sequence[Any] = ()
) -> Schedule:
    """The schedule of a loss whose rows do not meet, or of all rows at once.

    Args:
      jaxpr: the program.
      smooth: the arguments that are differentiated.
      rows: the arguments that differ between micro-batches.
    """
    return Schedule(jaxpr, "", traits_of(jaxpr, "", smooth, rows))


def described_stages(
    schedule: Schedule, stored: Sequence[Stored], number: int, size: int
) -> list[DescribedLoop]:
    """The stages of a schedule, in the order in which they run.

    Args:
      schedule: the schedule.
      stored: the values that it stores.
      number: how many micro-batches a device has; 0 if all rows run at once.
      size: how many all devices have.
    """
    devices = f" on each of {size // number} devices" if size > number > 0 else ""
    fills = {x.number: x for x in stored}
    in_words = []
    for x in stages(schedule):
        back = [e for e in reversed(x.back) if schedule.is_smooth(e)]
        loop = f"a loop over {number} micro-batches{devices}"
        if not number:
            loop = "once, all rows"
        if not x.level.in_loop:
            loop = "once, in no loop"
        elif x.level == Level(schedule.end):
            loop += f", forward{' and backward' * bool(back)}"
        of_level = [fills[j] for j in x.fills if j in fills]
        computes, goes_back = (
            [_described(e, schedule) for e in equations]
            for equations in (x.forward, back)
        )
        in_words.append(DescribedLoop(x.name, loop, computes, goes_back, of_level))
    return in_words


def _described(e: core.JaxprEqn, schedule: Schedule) -> DescribedValue:
    """The value of an equation."""
    inside = [
        jaxprs.name_of(x) for x in jaxprs.within(e) if not jaxprs.inner_programs(x)
    ]
    inside = list(dict.fromkeys(inside)) if jaxprs.inner_programs(e) else []
    more = ", ..." if len(inside) > _MOST else ""
    name = jaxprs.name_of(e)
    name += f" ({', '.join(inside[:_MOST])}{more})" if inside else ""
    if not (holds := label_of(e)):
        traits = [schedule.traits.get(x, Traits()) for x in e.outvars]
        shared = is_collective(e, schedule.axis) or not any(x.of_rows for x in traits)
        types = ", ".join(type_in_words(x.aval) for x in e.outvars)
        holds = f"{'all' if shared else 'own'} of {types}"
    source = better_placed(e, None).source_info
    return DescribedValue(holds, name, line_of(source))
