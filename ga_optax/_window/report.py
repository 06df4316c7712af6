"""The report of a window: what it stores, and how often equations run.

The report goes to the log, to `plan`, and to `batch_dependencies`.
"""

import functools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from ga_optax._passes import log, places, read
from ga_optax._text import warn
from ga_optax._window.meetings import is_collective
from ga_optax._window.room import largest_step
from ga_optax._window.runs import Runs, counted, most
from ga_optax._window.schedule import Level, Schedule


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
        stored values and their cotangents, and the step of one micro-batch.
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
            f"in about {self.peak / 2**20:.1f} MiB of a device."
        )
        return f"{text} {room_sentence(self.room)}" if self.room else text


def room_sentence(room: tuple[int, int, int]) -> str:
    """The `residual_bytes` with which all residuals stay, and the runs then."""
    nbytes, forward, backward = room
    return f"With residual_bytes={nbytes:_}: {forward} and {backward}."


def report(schedule: Schedule, limit_is_ours: bool) -> None:
    """Logs the report of a window, before it runs.

    Warns if any equation runs more often than it should, if the limit of residuals is
    ours and not the user's.
    """
    new = report_of(schedule)
    if limit_is_ours and (new.forward > _FORWARD or new.backward > _BACKWARD):
        _warn(new)
    log.write(str(new), logging.INFO)


def report_of(schedule: Schedule) -> WindowReport:
    """The report of a window."""
    runs = counted(schedule)
    forward, backward = most(runs.values())[1:]
    stored = tuple(_stored(schedule, runs))
    carried = (b for b in schedule.buffers if b.kind != "residual")
    peak = sum(b.nbytes + b.of_cotangent for b in carried)
    peak += schedule.peak + largest_step(schedule)
    room = None
    if (full := schedule.unlimited) is not None:
        room = (full.peak, *most(counted(full).values())[1:])
    return WindowReport(schedule.end - 1, forward, backward, stored, peak, room)


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
        is_variable = read.is_variable(b.operand)
        some = runs_to.get(b.operand, Runs()) if is_variable else Runs()
        yield Stored(i, line, b.kind, b.operand.aval, b.nbytes, shape, *some[1:])


def _runs_to(schedule: Schedule, runs: dict[int, Runs]) -> dict[Any, Runs]:
    """For each variable, the most runs of any equation on the way to it."""
    runs_to: dict[Any, Runs] = {}
    for e in schedule.jaxpr.eqns:
        some = [runs_to[x] for x in read.variables(e.invars) if x in runs_to]
        some += [runs[id(e)]] if id(e) in runs else []
        if some:
            runs_to |= dict.fromkeys(e.outvars, most(some))
    return runs_to


_FORWARD, _BACKWARD = 3, 1  # the runs of segments, however many levels there are


@functools.cache  # once
def _warn(report: WindowReport) -> None:
    room = room_sentence(report.room) if report.room else ""
    warn(
        f"No part of fun should run forward more than {_FORWARD} times and backward "
        f"{_BACKWARD}, but in {report.levels} levels where rows meet some run forward "
        f"{report.forward} times and backward {report.backward}, since what they need "
        f"of each other takes more room than a micro-batch's step. {room} "
        "ga_optax.batch_dependencies shows the lines."
    )


def _line(schedule: Schedule, x: Any) -> str:
    equation = read.made_by(schedule.jaxpr, x)
    return "an argument" if equation is None else places.place_of(equation.source_info)
