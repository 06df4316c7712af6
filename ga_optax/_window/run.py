"""A window, run and reported: a chain of levels, the loss, and the way back.

    forward, level by level  ->  the loss  ->  backward, last level first

Stages are the one list that runs, that reports count, and that `batch_dependencies`
prints.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._devices.meshes import DeviceContext
from .._loop.loop import Outcome, all_reduced, run_loop
from .._loop.micro_step import LossProgram, Operands, of_last_device
from .._passes import about, jaxprs
from .._text import columns, warn_once
from . import levels
from .levels import Arrays, Buffers, Evaluation, MeetingLoss, Wanted
from .room import LITTLE, has_room, largest_step, planned, share
from .schedule import (
    Level,
    Runs,
    Schedule,
    Traits,
    bytes_of,
    bytes_of_step,
    is_collective,
    most_runs,
    runs_of_equations,
    stages,
    traits_of,
)

# == The chain of levels ===============================================================
# Runs a window, a chain of levels: forward, the loss, and back.
#
#   buffers     = parameters, rows              filled from the start
#   buffers    += level n of buffers            one loop over the micro-batches each
#   cotangents  = the loop of the loss          with the gradients of all that it reads
#   cotangents += level n of its cotangents     one loop each, last level first
#
# Buffers and cotangents are dictionaries by the number of the buffer, which levels take
# and return. A layer of batch normalization, `standard(x @ w)`, has two levels: one
# adds up a mean, one a variance, which needs the mean. On the way back the level of the
# variance takes the cotangent of the variance to `w` and to the mean, and the level of
# the mean takes that to `w`.


def plan_window(
    loss: MeetingLoss,
    operands: Operands,
    devices: DeviceContext,
    residual_bytes: int | None,
) -> Evaluation:
    """The plan of a window. Nothing is computed but values of no argument.

    Raises if the undivided batch takes less memory, and may run.
    """
    values = Evaluation(loss, operands, devices, residual_bytes)
    values.schedule = _planned(values)
    if loss.whole is not None:
        smooth = loss.whole.invars[: len(operands.params) + operands.rows]
        _check_takes_less(values.schedule, loss.whole, smooth)
    return values


def is_small(values: Evaluation) -> bool:
    """True if what the plan stores has the room that residuals have."""
    jaxpr = values.program.jaxpr

    def of_step() -> int:
        return bytes_of_step(jaxpr, jaxpr.invars[: len(values.of_params)])

    return has_room(values.schedule, of_step, values.residual_bytes)


def run_window(values: Evaluation) -> Outcome:
    """The results of a window, the loss first, and the sums of the gradients.

    It runs the `stages` that reports show, but what comes after all of them.
    """
    schedule, operands, axes = values.schedule, values.operands, values.axes
    # What the loop of the loss fills, results read that have no derivative.
    earlier = [b for b in schedule.buffers if b.level < Level(schedule.end)]
    goes_back = any(b.has_cotangent for b in earlier)
    order, buffers = list(stages(schedule)), values.arguments()
    cotangents = dict(zip(values.params, operands.acc.total, strict=True))
    wanted = _wanted(values)
    loop: Any = None
    state: Any = None
    for stage in order:
        if stage.kind == "fill":
            buffers = levels.fill(values, stage.level, buffers)
        elif stage.kind == "the loss":
            if not goes_back:
                return _in_one_loop(values, buffers)
            some = values, buffers, cotangents, wanted
            cotangents, loop, state = levels.loss_back(*some)
        elif stage.kind == "fill again":
            buffers = levels.fill_again(values, stage, buffers, cotangents)
        elif stage.kind == "back":
            buffers = levels.before(values, stage.level, buffers)
            cotangents = levels.level_back(values, stage.level, buffers, cotangents)
    count = operands.acc.count + schedule.num_values["residual"]
    acc = state.acc._replace(total=[cotangents[j] for j in values.params])
    state = state._replace(acc=acc, carry=[])
    if axes:
        with jax.named_scope("merge"):
            state = all_reduced(loop, state, values.devices)
    results = _with_epilogue(values, buffers, loop.results(state))
    of_rows = [cotangents.get(j, jnp.zeros_like(buffers[j])) for j in values.rows]
    return Outcome(results, [], state.acc._replace(count=count), of_rows)


def _planned(values: Evaluation) -> Schedule:
    """The schedule with residuals, and with shared values."""
    schedule, jaxpr = values.schedule, values.program.jaxpr

    def of_step() -> int:
        params = jaxpr.invars[: len(values.of_params)]
        stacks = [b.operand for b in schedule.buffers if b.kind == "stack"]
        gathered = schedule.num_values["residual"] * sum(map(bytes_of, stacks))
        return max(bytes_of_step(jaxpr, params), gathered)

    return share(planned(schedule, of_step, values.residual_bytes))


def _in_one_loop(values: Evaluation, buffers: Buffers) -> Outcome:
    """The results if no cotangent goes back to a buffer, such as a token count.

    Then a plain loop reads the buffers, with all that a plain loop can do on devices.
    """
    schedule, wanted, operands = values.schedule, _wanted(values), values.operands
    roots = [schedule.jaxpr.outvars[0], *(x for x, _ in wanted)]

    def micro_batch(params: Any, x: Any) -> Any:
        known = buffers | dict(zip(values.params, params, strict=True))
        return values.evaluate(roots, Level(schedule.end), known, x, acts=True)

    closed = values.traced(micro_batch, operands.params, operands.batch)
    program = levels.program_back(
        values.program, closed.jaxpr, len(operands.params), wanted
    )
    operands = operands._replace(consts=closed.consts)
    out = run_loop(program, operands, values.devices, begins=True, merges=True)
    return out._replace(results=_with_epilogue(values, buffers, out.results))


def _wanted(values: Evaluation) -> Wanted:
    """The results that the loop of the loss computes beside the loss, and their folds.

    They are results of `fun`, and operands of the buffers that this loop fills.
    """
    schedule, folds = values.schedule, values.program.folds
    pairs = enumerate(zip(schedule.jaxpr.outvars, folds, strict=True))
    results = [pair for i, pair in pairs if i and i not in schedule.shared_results]
    last = [schedule.buffers[j] for j in schedule.filled_at(Level(schedule.end))]
    return [*results, *((b.operand, b.kind) for b in last)]


def _with_epilogue(values: Evaluation, buffers: Buffers, results: Arrays) -> Arrays:
    """All results of `fun`, in order, from the results of the loop of the loss.

    A metric such as the root of a mean, a perplexity or an accuracy is the same in all
    micro-batches: it is computed once, from the buffers that this loop fills.
    """
    schedule, level = values.schedule, values.schedule.epilogue
    number = len(schedule.results)
    buffers = levels.fill_last(values, buffers, results[number:])

    def acts(_: None, x: Any) -> tuple[None, None]:
        values.evaluate([], level, buffers, x, acts=True)
        return None, None

    with jax.named_scope("epilogue"):
        if schedule.needed([], level, acts=True)[0]:
            jax.lax.scan(acts, None, values.xs)  # prints once for each micro-batch
        shared = values.evaluate(schedule.epilogue_results, level, buffers)
    if values.axes:  # they are the same on all devices
        shared = of_last_device(shared, values.axes)
    of_loop, of_epilogue = iter(results[:number]), iter(shared)
    numbers = range(len(schedule.jaxpr.outvars))
    is_shared = schedule.shared_results.__contains__
    return [next(of_epilogue if is_shared(i) else of_loop) for i in numbers]


# == The report ========================================================================
# The report of a window: what it stores, and how often equations run.
#
# The report goes to the log, to `plan`, and to `batch_dependencies`.


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
    ours and not the user's.
    """
    _, forward, backward = most_runs(runs_of_equations(schedule).values())
    if limit_is_ours and (forward > _FORWARD or backward > _BACKWARD):
        _warn(report_of(schedule))
    if about.is_heard(logging.INFO):
        about.log_sentence(str(report_of(schedule)), logging.INFO)


def report_of(schedule: Schedule) -> WindowReport:
    """The report of a window."""
    runs = runs_of_equations(schedule)
    forward, backward = most_runs(runs.values())[1:]
    stored = tuple(_stored(schedule, runs))
    room = None
    if (full := schedule.unlimited) is not None:
        room = (full.peak, *most_runs(runs_of_equations(full).values())[1:])
    levels, peak = schedule.end - 1, _peak(schedule)
    return WindowReport(levels, forward, backward, stored, peak, room)


def _peak(schedule: Schedule) -> int:
    carried = (b for b in schedule.buffers if b.kind != "residual")
    stored = sum(b.nbytes + b.of_cotangent for b in carried)
    return stored + schedule.peak + largest_step(schedule)


class TakesMoreError(Exception):
    """A window takes more memory than the undivided batch, in words."""


def _check_takes_less(
    schedule: Schedule, jaxpr: core.Jaxpr, smooth: Sequence[Any]
) -> None:
    """Raises if a window takes more memory than the undivided batch.

    Both are counted alike from their programs, and XLA's bytes differ by up to a third.
    Of two that take as much the undivided batch is better, with fewer products. So the
    window has to take less, unless it takes little. No share of all bytes is asked for:
    gradients are in both, and may be most of them. `smooth` are the arguments of the
    program of all rows that are differentiated.
    """
    if (ours := _peak(schedule)) <= LITTLE:
        return
    if ours > (whole := bytes_of_step(jaxprs.live(jaxpr), smooth)):
        raise TakesMoreError(
            f"the undivided batch takes less: about {whole:,} bytes, and the "
            f"micro-batches, whose rows meet, {ours:,} of a device, counted from the "
            "program."
        )


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


_FORWARD, _BACKWARD = 3, 1  # the runs of segments, however many levels there are


def _warn(report: WindowReport) -> None:
    room = room_sentence(report.room) if report.room else ""
    warn_once(
        f"No part of fun should run forward more than {_FORWARD} times and backward "
        f"{_BACKWARD}, but in {report.levels} levels where rows meet some run forward "
        f"{report.forward} times and backward {report.backward}, since what they need "
        f"of each other takes more room than a micro-batch's step. {room} "
        "ga_optax.batch_dependencies shows the lines."
    )


def _line(schedule: Schedule, x: Any) -> str:
    equation = jaxprs.made_by(schedule.jaxpr, x)
    return "an argument" if equation is None else about.place_of(equation.source_info)


# == The schedule in words =============================================================
# A schedule in words: each stage, and the part of each value in a micro-batch.
#
# The window runs by the same schedule. A loss whose rows do not meet has the schedule
# of one level. The partition wrote on each equation which part of the value a
# micro-batch holds.

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
            (f"  {verb}", *x.holds.split(" of ", 1), x.name, about.short_line(x.line))
            for verb, values in pairs
            for x in dict.fromkeys(values)
        ]
        fills = [
            f"  fills      {x.what}, {x.nbytes:,} bytes, at {about.short_line(x.line)}"
            for x in self.fills
        ]
        head = f"{self.name}: {self.loop}"
        return "\n".join([head, *columns(rows, range(5)), *fills])


def stages_of_loop(program: LossProgram, operands: Operands) -> Schedule:
    """The schedule of a loss whose rows do not meet."""
    jaxpr, count = program.jaxpr, len(operands.params)
    params, rows = jaxpr.invars[:count], jaxpr.invars[count:]
    smooth = [*params, *rows[: operands.rows]]
    return Schedule(jaxpr, "", traits_of(jaxpr, "", smooth, rows))


def of_all_rows(jaxpr: core.Jaxpr, number: int) -> Schedule:
    """The schedule of a program of all rows, of which the first are parameters."""
    return Schedule(jaxpr, "", traits_of(jaxpr, "", jaxpr.invars[:number], ()))


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
        back = [y for e in x.back for y in _smooth_inside(e, schedule.traits)][::-1]
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
    if not (holds := about.label_of(e)):
        traits = [schedule.traits.get(x, Traits()) for x in e.outvars]
        shared = is_collective(e, schedule.axis) or not any(x.of_rows for x in traits)
        types = ", ".join(about.type_in_words(x.aval) for x in e.outvars)
        holds = f"{'all' if shared else 'own'} of {types}"
    source = about.better_placed(e, None).source_info
    return DescribedValue(holds, name, about.line_of(source))


def _smooth_inside(e: core.JaxprEqn, traits: dict[Any, Traits]) -> list[core.JaxprEqn]:
    """The equations of a call through which cotangents go; others by themselves."""
    if not any(traits[x].smooth for x in e.outvars):
        return []
    if not jaxprs.is_inline(e):
        return [e]

    def smooth(names: Sequence[Any], outside: Sequence[Any]) -> list[Any]:
        pairs = zip(names, outside, strict=True)
        return [x for x, v in pairs if jaxprs.is_variable(v) and traits[v].smooth]

    [inner] = jaxprs.inner_programs(e)
    params, loss = smooth(inner.invars, e.invars), smooth(inner.outvars, e.outvars)
    inside = traits_of(inner, "", params, (), loss)
    equations = (about.better_placed(x, e.source_info) for x in inner.eqns)
    return [y for x in equations for y in _smooth_inside(x, inside)]
