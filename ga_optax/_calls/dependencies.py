"""The report of the plan of a call: the meetings of rows, their cost, the levels."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._calls import advice, batches, engine, equation
from ga_optax._calls.call import Call
from ga_optax._calls.devices import DoesNotFitError
from ga_optax._calls.engine import Scheduled
from ga_optax._calls.options import Options
from ga_optax._calls.results import returning_pair
from ga_optax._calls.undivided import AllRows
from ga_optax._calls.words import explains_keywords
from ga_optax._checks import named_leaves
from ga_optax._devices.data_axis import DataAxis
from ga_optax._partition import Note
from ga_optax._passes import places, read
from ga_optax._passes.divided import Divided
from ga_optax._text import ruled, wrap
from ga_optax._window import describe
from ga_optax._window.describe import DescribedLoop
from ga_optax._window.report import Stored, WindowReport, report_of, room_sentence


@dataclasses.dataclass(frozen=True)
class BatchDependencies:
    """The plan of a call: where rows of the batch meet, the cost, and the loops.

    `str` is a table of the meetings. `details` is the whole plan, level by level, value
    by value.

    Attributes:
      num_microbatches: how many micro-batches there are, on all devices.
      stages: the loops of a device, in the order in which they run. Each has a `name`,
        a text `loop` that says how it runs, the values that it `computes`, those that
        cotangents go back through (`goes_back`), and what it `fills` for later stages.
        A value has the primitive's `name`, its `line`, and what a micro-batch `holds`
        of it: rows along a dimension, all, or a part that is added up; with the dtype
        and shape of the value in the whole batch.
      meetings: what rows need of each other: its `kind` ("sum", "max", "min", or
        "stack" for what each micro-batch has), its `type` in one micro-batch, the
        `line` of the code (beside it the module or function of a package inside),
        the `nbytes` that a device keeps of it, and how often what
        it is computed of runs `forward` and `backward` over all rows.
      kept: what else a window keeps, so that less runs again: activations of the
        micro-batches ("residual"), and what they share ("shared").
      whole: `(name, line, nbytes)` of what is computed whole in each micro-batch, as
        nothing better is known of it: the bytes that it computes, in all iterations of
        a loop, or that it reads of all rows.
      drawn: the same of random numbers that each micro-batch draws from a key of its
        own, as their generator is not threefry: another draw of the same distribution.
      promised: the same of what `rowwise` says that its rows do not need each other.
      forward_passes: how often any part of the loss runs forward, at most. Elementwise
        functions cost little, and are not counted where there is anything else.
      backward_passes: how often any part runs backward.
      peak_bytes: about how many bytes a device needs at a time, beside arguments and
        results: what is stored between the passes, its cotangents, and one
        micro-batch's step. 0 where there is no pass but those of a plain loop.
      more_room: `(residual_bytes, forward, backward)`: with how much room everything
        stays, and how many passes that takes; None if more room changes nothing.
      rows: the bytes of each leaf of the batch that has rows, by name.
      given_whole: those of what goes whole to each micro-batch, beside the parameters.
      pieces: `(name, number, rows)` of each `ga_optax.microbatch` inside: how many
        pieces it makes of the rows of one micro-batch on one device, and how many rows
        each has. One whose rows meet is computed as if it stood there itself.
      undivided: why the call computes all rows at once; "" if it runs micro-batches.
    """

    num_microbatches: int
    stages: list[DescribedLoop]
    meetings: list[Stored]
    kept: list[Stored]
    whole: list[Note]
    drawn: list[Note]
    promised: list[Note]
    forward_passes: int
    backward_passes: int
    peak_bytes: int
    more_room: tuple[int, int, int] | None
    rows: dict[str, int]
    given_whole: dict[str, int]
    pieces: list[tuple[str, int, int]]
    undivided: str = ""

    @property
    def kept_bytes(self) -> int:
        """The bytes that a device keeps between passes."""
        return sum(x.nbytes for x in (*self.meetings, *self.kept))

    def __str__(self) -> str:
        passes = self._passes
        if self.undivided:
            text = f"All rows run at once, in the memory that this takes: {passes}."
            text = f"{text} {self._layout} That is because {self.undivided}"
            return "\n".join(wrap(f"{text.rstrip('.')}."))
        if not (self.meetings or any(self._notes.values())):
            return "\n".join(wrap(f"No row needs another: {passes}. {self._layout}"))
        rows = list(_rows((*self.meetings, *self.kept)))
        rows += [
            (f"{name}, {how}: {nbytes:,} bytes", "", "", "", places.short(line))
            for how, notes in self._notes.items()
            for name, line, nbytes in dict.fromkeys(notes)
        ]
        lines = ruled([("what meets", *_HEADER, "line"), *rows], left=(0, 4))
        room = f", in about {self.peak_bytes:,} bytes" if self.peak_bytes else ""
        end = f"In all: {passes}{room}."
        if self.more_room:
            end += " " + room_sentence(self.more_room)
        todo = [*advice.of_primitives(self.whole), *[_DRAWN] * bool(self.drawn)]
        runs = self.forward_passes or self.backward_passes
        end = f"{end} {self._layout}" if runs else self._layout
        texts = filter(None, (_LEGEND, *todo, end, advice.of_hidden(self.whole)))
        below = (line for text in texts for line in wrap(text))
        return "\n".join([*lines, "", *below])

    @property
    def details(self) -> str:
        """The plan in full, to find a wrong number: each loop, with its values."""
        head = str(self) if self.undivided else _HOLDS
        texts = [head, *map(str, self.stages)]
        room = f", in about {self.peak_bytes:,} bytes" if self.peak_bytes else ""
        return "\n\n".join([*texts, f"In all: {self._passes}{room}."])

    @property
    def _passes(self) -> str:
        return (
            f"{_times(self.forward_passes, 'forward pass')} and "
            f"{_times(self.backward_passes, 'backward pass')}"
        )

    @property
    def _notes(self) -> dict[str, list[Note]]:
        return {
            "computed whole": self.whole,
            "drawn by each micro-batch": self.drawn,
            "promised": self.promised,
        }

    @property
    def _layout(self) -> str:
        """The leaves that have rows, and the leaves that go whole, in words."""
        number = f"{len(self.rows)} lea{'f' if len(self.rows) == 1 else 'ves'}"
        text = f"Rows: {number}, {sum(self.rows.values()):,} bytes."
        whole = sorted(self.given_whole.items(), key=lambda x: -x[1])
        if whole:
            names = ", ".join(f"{name} {nbytes:,}" for name, nbytes in whole[:4])
            text += f" Whole: {names}{', ...' if len(whole) > 4 else ''} bytes."
        for name, pieces, rows in self.pieces:
            text += f" Inside, {name} runs in {pieces} pieces of {_times(rows, 'row')}."
        return text


_HEADER = ("bytes", "forward", "backward")
_LEGEND = (
    "forward, backward: how many times the code before the line runs over all rows. "
    "Elementwise functions cost little, and may run more often."
)


_HOLDS = "\n".join(
    wrap(
        "A micro-batch holds its rows along an axis of a value, all of it, or a part, "
        "of which the sum over micro-batches is the value. Shapes are those of the "
        "whole batch; of a step of the library's own, those of a micro-batch."
    )
)
_DRAWN = (
    "Drawn by each micro-batch: another draw of the same distribution than that of all "
    'rows. With ga_optax.config.update("whole_draws", True) each draws all rows, in '
    "the memory that this takes."
)


def _rows(stored: Sequence[Stored]) -> Iterator[tuple[str, ...]]:
    """The rows of the table; equal values of several layers share one."""
    groups: dict[tuple[str, str], list[Stored]] = {}
    for x in stored:
        groups.setdefault((x.line, x.what), []).append(x)
    for (line, what), group in groups.items():
        runs = max(x.forward for x in group), max(x.backward for x in group)
        yield (
            _of_several(len(group), what),
            f"{sum(x.nbytes for x in group):,}",
            *map(str, runs),
            places.short(line),
        )


def _of_several(number: int, what: str) -> str:
    """Values of several layers that are alike, such as "3 sums of 16 numbers"."""
    if number == 1:
        return what
    rest = what.removeprefix("a sum of ")
    return f"{number} sums of {rest}" if what != rest else f"{number} times {what}"


def _times(number: int, what: str) -> str:
    ending = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else ending}"


@explains_keywords
def batch_dependencies(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    residual_bytes: int | None = None,
) -> Callable[..., BatchDependencies]:
    """Reports the lines where rows of the batch meet, with the passes and the memory.

    >>> import jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.sqrt(jnp.mean((x @ w) ** 2))
    >>> report = ga.batch_dependencies(loss, 2)(jnp.ones(3), jnp.ones((4, 3)))
    >>> print(report.forward_passes, report.backward_passes, report.kept_bytes)
    2 1 8
    >>> [mean] = report.meetings
    >>> print(mean.kind, mean.type.shape, mean.nbytes)
    sum () 4

    `str` of the result is a table of the lines of code where rows meet: the kind of
    meeting, the bytes that a device keeps, and the forward and backward passes over all
    rows of the code that leads to the line. A loss whose rows do not meet takes one
    forward and one backward pass. Nothing is computed or compiled.

    **Exactness.** Bytes and passes are those of `value_and_grad` with the same options,
    from its program.

    Args:
      fun: a loss, as for `value_and_grad`.
      num_microbatches: as there; so are the others.
      microbatch_size: in its place, how many rows one of them has.
      argnums: the positional arguments to differentiate with respect to.
      has_aux: True if `fun` returns `(loss, aux)`.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: along which axis.
      data_axis: the mesh axes that split the batch.
      residual_bytes: as for `value_and_grad`.

    Returns:
      A function of `fun`'s arguments, or of their types.

    Raises:
      TypeError, ValueError: as `value_and_grad`; or if it computes all rows at once.
    """
    options = Options(**locals(), accumulator_dtype=jnp.float32).checked()
    options = returning_pair(options)

    @functools.wraps(fun)
    def dependencies(*args: Any, **kwargs: Any) -> BatchDependencies:
        call = Call.of(options, args, kwargs, hint=True, types=True)
        plan, closed = _seen(call)
        notes, why, number, last = ([], [], []), "", 0, WindowReport(0, 1, 0, ())
        if isinstance(plan, AllRows):
            jaxpr, why = closed.jaxpr, plan.why
            order = describe.of_all_rows(jaxpr, len(call.leaves("argnums")))
        else:
            (micro_batch, program, operands, _), window = plan
            part, number = micro_batch.part, len(operands.batch[-1])
            jaxpr, notes = part.jaxpr, (part.whole, part.drawn, part.promised)
            order = describe.of_loop(program, operands)
            if window is not None:
                order, last = window.schedule, report_of(window.schedule)
        stages = describe.listed(order, last.stored, number, call.size)
        if not last.levels:
            last = last._replace(backward=int(bool(stages[-1].goes_back)))
        kept = [x for x in last.stored if x.kind in ("residual", "shared")]
        meetings = [x for x in last.stored if x not in kept]
        passes = last.forward, last.backward, last.peak, last.room
        pieces = list(dict.fromkeys(_pieces(jaxpr)))
        ends = *_bytes_by_layout(call), pieces, why
        return BatchDependencies(
            call.size, stages, meetings, kept, *notes, *passes, *ends
        )

    return dependencies


def _pieces(jaxpr: core.Jaxpr) -> Iterator[tuple[str, int, int]]:
    """Each `microbatch` in a micro-batch: name, number of pieces, rows of a piece."""
    for e in read.equations(jaxpr):
        if isinstance(inner := e.params.get("function"), Divided):
            pairs = zip(inner.types, inner.axes, strict=True)
            rows = next(x.shape[d] for x, d in pairs if d is not None)
            yield inner.name, inner.number, rows // inner.number
            yield from _pieces(inner.program.jaxpr)


def _bytes_by_layout(call: Call) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of leaves with rows, and of leaves that go whole, by name.

    Parameters, and leaves that are no arrays, are left out.
    """
    rows: dict[str, int] = {}
    whole: dict[str, int] = {}
    for (name, x), axis in zip(batches.named_batch(call), call.batch_axes, strict=True):
        (whole if axis is None else rows)[name] = batches.nbytes(x)
    for place in call.without_role:
        for name, x in named_leaves(call.at(place)):
            prefix = "" if x is call.at(place) else f"{name} of "
            whole[prefix + batches.argument(place)] = batches.nbytes(x)
    return rows, {name: n for name, n in whole.items() if n}


def _seen(call: Call) -> tuple[Scheduled | AllRows, Any]:
    """The plan that a call runs, to the end; of `AllRows` their program, too.

    Nothing is computed. The plan comes also if an option does not fit it.
    """
    arrays = {n: x for n, x in call.leaves().items() if batches.is_array(x)}
    plans: list[Scheduled | AllRows] = []
    programs: list[Any] = [None]

    def run(values: dict[int, Any]) -> None:
        new = call.with_leaves(values)._replace(sees=plans.append)
        engine.value_and_grad(new, equation.of_micro_batch)
        if isinstance(plans[-1], AllRows):
            programs.append(engine.trace(new.on_device()).closed)

    try:
        jax.eval_shape(run, arrays)
    except DoesNotFitError:
        if not plans:
            raise
    return plans[-1], programs[-1]
