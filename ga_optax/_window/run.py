"""Runs a window: forward level by level, the loss, and back."""

from typing import Any, NamedTuple

import jax

from ga_optax._loop import run as loop
from ga_optax._loop.folds import of_last_device
from ga_optax._loop.loss import DeviceContext, LossProgram, Operands
from ga_optax._loop.run import Outcome
from ga_optax._window import cost, forward, room
from ga_optax._window.backward import Backward, Wanted, program_of
from ga_optax._window.evaluation import Arrays, Evaluation, MeetingLoss
from ga_optax._window.report import report
from ga_optax._window.schedule import Level, Schedule
from ga_optax._window.shared import share


class WindowRun(NamedTuple):
    """The plan of a window.

    Attributes:
      loss: the loss of a micro-batch.
      operands: the arrays; the last leaf of the batch is the index. The accumulator is
        empty.
      devices: the devices.
      values: the values that are computed so far: constants alone.
      schedule: the schedule.
      residual_bytes: the bytes that residuals may take between levels.
    """

    loss: MeetingLoss
    operands: Operands
    devices: DeviceContext
    values: Evaluation
    schedule: Schedule
    residual_bytes: int | None


def prepared(
    loss: MeetingLoss,
    operands: Operands,
    devices: DeviceContext,
    residual_bytes: int | None,
) -> WindowRun:
    """The plan of a window. Nothing is computed but values of no argument."""
    values = Evaluation(loss, operands, devices.axes)
    schedule = _planned(loss, operands, values.schedule, residual_bytes)
    return WindowRun(loss, operands, devices, values, schedule, residual_bytes)


def run(given: WindowRun) -> Outcome:
    """The results of a window, the loss first, and the sums of the gradients.

    Logs the report of the window; warns if equations run more often than they should.
    """
    loss, operands, devices, values, schedule, residual_bytes = given
    report(schedule, residual_bytes is None)
    goes_back = any(b.has_cotangent for b in schedule.buffers)
    values.begin(schedule, operands.params)
    for level in range(schedule.end):
        forward.fill(values, level)
        forward.fill_shared(values, level + 1)
    if not goes_back:
        return _in_one_loop(loss.program, values, operands, devices)
    back = Backward(loss.program, values, operands, devices)
    wanted = _wanted(loss.program, schedule)
    outcome = back.run(Level(schedule.end), schedule.jaxpr.outvars[:1], wanted)
    for level in reversed(range(schedule.end)):
        values.drop(filter(back.is_residual, schedule.filled_at(Level(level))))
        forward.fill_again(values, level)
        back.take_shared(level + 1)
        back.take(level)
    results, acc = back.finished(*outcome)
    number = schedule.num_values["residual"]
    acc = acc._replace(count=operands.acc.count + number)
    results = _with_epilogue(values, results)
    return Outcome(results, [], acc, back.gradients_of_rows())


def _planned(
    loss: MeetingLoss, operands: Operands, schedule: Schedule, limit: int | None
) -> Schedule:
    """The schedule with residuals, and with shared values."""

    def of_step() -> int:
        jaxpr = loss.program.jaxpr
        params = jaxpr.invars[: len(operands.params)]
        stacks = [b.operand for b in schedule.buffers if b.kind == "stack"]
        gathered = schedule.num_values["residual"] * sum(map(cost.nbytes, stacks))
        return max(cost.of_a_step(jaxpr, params), gathered)

    return share(room.planned(schedule, of_step, limit))


def _in_one_loop(
    loss: LossProgram, values: Evaluation, operands: Operands, devices: DeviceContext
) -> Outcome:
    """The results if no cotangent goes back to a buffer, such as a token count.

    Then a plain loop reads the buffers, with all that a plain loop can do on devices.
    """
    schedule, wanted = values.schedule, _wanted(loss, values.schedule)
    roots = [schedule.jaxpr.outvars[0], *(x for x, _ in wanted)]

    def micro_batch(params: Any, x: Any) -> Any:
        known = values.buffers | dict(zip(values.params, params, strict=True))
        return values.evaluate(roots, Level(schedule.end), x, known, acts=True)

    first = [x[0] for x in operands.batch]
    closed: Any = jax.make_jaxpr(micro_batch)(operands.params, first)
    program = program_of(loss, closed.jaxpr, len(operands.params), wanted)
    operands = operands._replace(consts=closed.consts)
    out = loop.run(program, operands, devices, begins=True, merges=True)
    return out._replace(results=_with_epilogue(values, out.results))


def _wanted(loss: LossProgram, schedule: Schedule) -> Wanted:
    """The results that the loop of the loss computes beside the loss, and their folds.

    They are results of `fun`, and operands of the buffers that this loop fills.
    """
    pairs = enumerate(zip(schedule.jaxpr.outvars, loss.folds, strict=True))
    results = [pair for i, pair in pairs if i and i not in schedule.shared_results]
    last = [schedule.buffers[j] for j in schedule.filled_at(Level(schedule.end))]
    return [*results, *((b.operand, b.kind) for b in last)]


def _with_epilogue(values: Evaluation, results: Arrays) -> Arrays:
    """All results of `fun`, in order, from the results of the loop of the loss.

    A metric such as the root of a mean, a perplexity or an accuracy is the same in all
    micro-batches: it is computed once, from the buffers that this loop fills.
    """
    schedule, level = values.schedule, values.schedule.epilogue
    number = len(schedule.results)
    forward.fill_last(values, results[number:])

    def acts(_: None, x: Any) -> tuple[None, None]:
        values.evaluate([], level, x, acts=True)
        return None, None

    with jax.named_scope("epilogue"):
        if schedule.needed([], level, acts=True)[0]:
            jax.lax.scan(acts, None, values.xs)  # prints once for each micro-batch
        shared = values.evaluate(schedule.epilogue_results, level)
    if values.axes:  # they are the same on all devices
        shared = of_last_device(shared, values.axes)
    of_loop, of_epilogue = iter(results[:number]), iter(shared)
    numbers = range(len(schedule.jaxpr.outvars))
    is_shared = schedule.shared_results.__contains__
    return [next(of_epilogue if is_shared(i) else of_loop) for i in numbers]
