"""Runs a window: forward level by level, the loss, and back."""

from typing import Any, NamedTuple

import jax

from ga_optax._loop import run as loop
from ga_optax._loop.run import Outcome
from ga_optax._loop.step import Operands, Step, Where
from ga_optax._window import after, cost, forward, room
from ga_optax._window.backward import Backward, Wanted, step_of
from ga_optax._window.levels import report
from ga_optax._window.schedule import Level, Schedule
from ga_optax._window.shared import share
from ga_optax._window.values import Loss, Values


class Plan(NamedTuple):
    """What a window computes at which level.

    Attributes:
      loss: what a micro-batch does.
      operands: the arrays; the last leaf of the batch is the index.
      where: the devices.
      values: what is computed so far: nothing yet.
      schedule: the schedule.
      residual_bytes: how many bytes of activations may be kept between levels.
    """

    loss: Loss
    operands: Operands
    where: Where
    values: Values
    schedule: Schedule
    residual_bytes: int | None


def plan(
    loss: Loss, operands: Operands, where: Where, residual_bytes: int | None
) -> Plan:
    """The plan of a window. Nothing is computed, but for what reads no argument."""
    values = Values(loss, operands, where.axes)
    schedule = _planned(loss, operands, values.schedule, residual_bytes)
    return Plan(loss, operands, where, values, schedule, residual_bytes)


def run(given: Plan) -> Outcome:
    """The results of a window, the loss first, and its accumulator, which starts empty.

    Logs what the window does; warns if it runs more often than it should.
    """
    loss, operands, where, values, schedule, residual_bytes = given
    report(schedule, residual_bytes is None)
    goes_back = any(b.has_cotangent for b in schedule.buffers)
    values.begin(schedule, operands.params)
    for level in range(schedule.end):
        forward.fill(values, level)
        forward.fill_once(values, level)
    if not goes_back:
        return _counted(loss.step, values, operands, where)
    back = Backward(loss.step, values, operands, where)
    last, wanted = Level(schedule.end), _wanted(loss.step, schedule)
    outcome = back.run(last, schedule.jaxpr.outvars[:1], wanted)
    for level in reversed(range(schedule.end)):
        values.drop(j for j in schedule.at(Level(level)) if back.is_own(j))
        forward.fill_again(values, level)
        back.take_once(level)
        back.take(level)
    found, acc = back.finished(*outcome)
    acc = acc._replace(count=operands.acc.count + schedule.times["own"])
    results = _put_together(values, found)
    return Outcome(results, [], acc, back.of_rows())


def _planned(
    loss: Loss, operands: Operands, schedule: Schedule, given: int | None
) -> Schedule:
    """The schedule with what is kept, and what is computed once."""

    def of_step() -> int:
        jaxpr = loss.step.jaxpr
        params = jaxpr.invars[: len(operands.params)]
        carried = [b.operand for b in schedule.buffers if b.kind == "stack"]
        taken = cost.of_a_step(jaxpr, params)
        return max(taken, schedule.times["own"] * sum(map(cost.nbytes, carried)))

    return share(room.planned(schedule, of_step, given))


def _counted(step: Step, values: Values, operands: Operands, where: Where) -> Outcome:
    """The same if rows meet in numbers alone, which are there: the loop has no levels.

    So it has all that a loop has of devices.
    """
    schedule, wanted = values.schedule, _wanted(step, values.schedule)
    roots = [schedule.jaxpr.outvars[0], *(x for x, _ in wanted)]

    def micro_batch(params: Any, x: Any) -> Any:
        known = values.buffers | dict(zip(values.params, params, strict=True))
        return values.evaluate(roots, Level(schedule.end), x, known, acts=True)

    first = [x[0] for x in operands.batch]
    closed: Any = jax.make_jaxpr(micro_batch)(operands.params, first)
    step = step_of(step, closed.jaxpr, len(operands.params), wanted)
    operands = operands._replace(consts=closed.consts)
    out = loop.run(step, operands, where, begins=True, merges=True)
    return out._replace(results=_put_together(values, out.results))


def _wanted(step: Step, schedule: Schedule) -> Wanted:
    """What the loop of the loss computes beside it, and how that is put together.

    Results, without those that come after the loops; and what fills buffers.
    """
    pairs = enumerate(zip(schedule.jaxpr.outvars, step.ways, strict=True))
    results = [pair for i, pair in pairs if i and i not in schedule.after]
    last = [schedule.buffers[j] for j in schedule.at(Level(schedule.end))]
    return [*results, *((b.operand, b.kind) for b in last)]


def _put_together(values: Values, found: list[jax.Array]) -> list[jax.Array]:
    """All results, in order, from those of the loop of the loss; that is the first."""
    schedule = values.schedule
    number = len(schedule.results)
    forward.fill_last(values, found[number:])
    own, late = iter(found[:number]), iter(after.results(values))
    every = range(len(schedule.jaxpr.outvars))
    return [next(late if i in schedule.after else own) for i in every]
