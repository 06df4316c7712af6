"""What a window keeps, and how often it runs what: for logs, `plan`, and reports."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ga_optax._passes import ir, places
from ga_optax._passes.notes import note
from ga_optax._text import warn
from ga_optax._window.forward import FOLDS
from ga_optax._window.passes import Passes, counted, most
from ga_optax._window.room import largest_step
from ga_optax._window.rules import is_collective
from ga_optax._window.schedule import Schedule


class Stored(NamedTuple):
    """A value that a window stores.

    Attributes:
      number: of its buffer.
      line: the line of the user's code that computes it, or where rows meet.
      kind: "kept" (of each micro-batch), "once" (what they share), or what a collective
        carries: "sum", "max", "min" or "stack".
      type: its shape and dtype, of one micro-batch.
      nbytes: what a device stores of it.
      shape: that of what is read of it: of all rows, if they are gathered.
      forward: how often what it is computed of runs forward, at most.
      backward: how often that runs backward.
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
        """What it is, in words."""
        size, is_tiled = self.type.size, len(self.shape) == len(self.type.shape)
        if self.kind == "stack" and is_tiled:
            return f"all rows of {list(self.shape)}"
        own = list(self.type.shape) or "a number"
        if self.kind == "stack":
            return f"{own} of each micro-batch"
        if self.kind in ("kept", "once"):
            whose = "of each micro-batch" if self.kind == "kept" else "for all rows"
            return f"kept: {own} {whose}"
        kind = "a sum" if self.kind == "sum" else "an extremum"
        return f"{kind} of {size:,} number{'' if size == 1 else 's'}"


class Levels(NamedTuple):
    """What a window does.

    Attributes:
      levels: the passes over the micro-batches that fill buffers.
      forward: how often what costs something runs forward, at most.
      backward: how often it runs backward, at most.
      stored: what it stores between the levels.
      peak: about how many bytes a device needs at a time, beside arguments and results:
        what is stored and its cotangents, and one micro-batch's step.
      kept: the bytes of what is kept and of its cotangents, at most at a time.
      room: for which `residual_bytes` everything would stay, and how often it would run
        forward and backward then; None if it does stay.
    """

    levels: int
    forward: int
    backward: int
    stored: tuple[Stored, ...]
    peak: int = 0
    kept: int = 0
    room: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        kept = [x for x in self.stored if x.kind == "kept"]
        lines = ", ".join(dict.fromkeys(x.line for x in kept))
        of_kept = f"values of {lines}" if kept else "none"
        said = (
            f"Activations kept between the collectives: {of_kept}. Each part of fun "
            f"runs forward at most {self.forward} times and backward {self.backward}, "
            f"in about {self.peak / 2**20:.1f} MiB."
        )
        return f"{said} {said_of(self.room)}" if self.room else said


def said_of(room: tuple[int, int, int]) -> str:
    """What more room would buy."""
    nbytes, forward, backward = room
    return f"With residual_bytes={nbytes:_}: {forward} and {backward}."


def report(schedule: Schedule, room_is_ours: bool) -> None:
    """Logs what a window does.

    Warns if it runs more often than it should, in the room that nobody asked for.
    """
    new = levels(schedule)
    if room_is_ours and (new.forward > _FORWARD or new.backward > _BACKWARD):
        _warn(new)
    note(str(new))


def levels(schedule: Schedule) -> Levels:
    """What a window does."""
    runs = counted(schedule)
    passes, its = most(runs.values())[1:], tuple(_stored(schedule, runs))
    new = Levels(schedule.end - 1, *passes, its, _peak(schedule), schedule.peak)
    if (full := schedule.full) is not None:
        new = new._replace(room=(full.peak, *most(counted(full).values())[1:]))
    return new


def _stored(schedule: Schedule, runs: dict[int, Passes]) -> Iterator[Stored]:
    """What a window stores; `runs` as `counted`."""
    leading = _leading(schedule, runs)
    read: dict[int, Any] = {}  # what the first collective of a buffer returns
    for e in schedule.jaxpr.eqns:
        for x in e.outvars if is_collective(e, schedule.axis) else ():
            read.setdefault(schedule.views[x].buffer, x)
    for i, buffer in enumerate(schedule.buffers):
        operand, kind = buffer.operand, buffer.kind
        if buffer.level == schedule.end and kind in FOLDS:
            continue  # no level reads it: it is a result, as the loss is
        name, x = ("kept", operand) if kind == "own" else (kind, read.get(i, operand))
        line, shape = _line(schedule, x), tuple(x.aval.shape)
        own = leading.get(operand, Passes()) if ir.is_variable(operand) else Passes()
        yield Stored(i, line, name, operand.aval, buffer.nbytes, shape, *own[1:])


_FORWARD, _BACKWARD = 3, 1  # passes that segments take, however many levels there are


@functools.cache  # once
def _warn(report: Levels) -> None:
    more = said_of(report.room) if report.room else ""
    warn(
        f"No part of fun should run forward more than {_FORWARD} times and backward "
        f"{_BACKWARD}, but in {report.levels} levels where rows meet some run forward "
        f"{report.forward} times and backward {report.backward}, since what they need "
        f"of each other takes more room than a micro-batch's step. {more} "
        "ga_optax.batch_dependencies shows the lines."
    )


def _peak(schedule: Schedule) -> int:
    """About how many bytes a device needs at a time."""
    carried = (b.nbytes + b.of_cotangent for b in schedule.buffers if b.kind != "own")
    return schedule.peak + sum(carried) + largest_step(schedule)


def _leading(schedule: Schedule, runs: dict[int, Passes]) -> dict[Any, Passes]:
    """How often what each value is computed of runs, at most."""
    found: dict[Any, Passes] = {}
    for e in schedule.jaxpr.eqns:
        its = [found[x] for x in ir.variables(e.invars) if x in found]
        if its := [*its, *([runs[id(e)]] if id(e) in runs else [])]:
            found.update(dict.fromkeys(e.outvars, most(its)))
    return found


def _line(schedule: Schedule, x: Any) -> str:
    equation = ir.made_by(schedule.jaxpr, x)
    return "an argument" if equation is None else places.place_of(equation.source_info)
