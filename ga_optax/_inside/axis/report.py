"""What a window keeps, and how often it runs what: for logs, `plan` and `recorded`."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

from ga_optax._inside import in_place
from ga_optax._inside.axis import cost
from ga_optax._inside.axis.kept import passes
from ga_optax._inside.axis.schedule import Schedule
from ga_optax._passes import ir


class Stored(NamedTuple):
    """A value that a window stores.

    Attributes:
      line: the line of the user's code that computes it.
      kind: "kept" (of each micro-batch), "once" (what they share), or what a collective
        carries: "sum", "max", "min" or "stack".
      type: its shape and dtype, of one micro-batch.
      nbytes: what a device stores of it.
    """

    line: str
    kind: str
    type: Any
    nbytes: int


class Report(NamedTuple):
    """What a window does.

    Attributes:
      levels: the passes over the micro-batches that fill buffers.
      forward: how often what costs something runs forward, at most.
      backward: how often it runs backward, at most.
      stored: what it stores between the levels.
    """

    levels: int
    forward: int
    backward: int
    stored: tuple[Stored, ...]

    def __str__(self) -> str:
        kept = [x for x in self.stored if x.kind == "kept"]
        total = sum(x.nbytes for x in kept)
        lines = ", ".join(dict.fromkeys(x.line for x in kept))
        of_kept = (
            f"{total / 2**20:.1f} MiB of activations ({lines})" if kept else "none"
        )
        return (
            f"Activations kept between the collectives: {of_kept}. Each part of fun "
            f"runs forward at most {self.forward} times and backward {self.backward}."
        )


_reports: contextvars.ContextVar[list[Report]] = contextvars.ContextVar("_reports")


@contextlib.contextmanager
def recorded() -> Iterator[list[Report]]:
    """The report of every window that is traced inside."""
    reports: list[Report] = []
    token = _reports.set(reports)
    try:
        yield reports
    finally:
        _reports.reset(token)


def report(schedule: Schedule, size: int, num_microbatches: int) -> None:
    """Logs what a window does, and hands it to `recorded`; `size` is the axis's."""
    costly = {id(e) for e in schedule.jaxpr.eqns if not cost.is_cheap(e)}
    runs = [its for key, its in passes(schedule).items() if key in costly]
    times = {"own": num_microbatches, "stack": size}
    stored = tuple(
        Stored(
            _line(schedule, buffer.operand),
            "kept" if buffer.kind == "own" else buffer.kind,
            buffer.operand.aval,
            times.get(buffer.kind, 1) * cost.nbytes(buffer.operand),
        )
        for buffer in schedule.buffers
    )
    forward = max((its.forward for its in runs), default=0)
    backward = max((its.backward for its in runs), default=0)
    new = Report(schedule.end - 1, forward, backward, stored)
    _reports.get([]).append(new)
    in_place.note(str(new))


def _line(schedule: Schedule, x: Any) -> str:
    equation = ir.made_by(schedule.jaxpr, x)
    return "an argument" if equation is None else ir.line_of(equation)
