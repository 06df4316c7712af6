"""Runs a window: forward level by level, the loss, and back."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ga_optax._loop import run as loop
from ga_optax._loop.run import Outcome
from ga_optax._loop.step import Operands, Step, Where
from ga_optax._window import after, cost, forward, plans, room
from ga_optax._window.backward import Backward, step_of
from ga_optax._window.levels import report
from ga_optax._window.schedule import Level, Schedule
from ga_optax._window.shared import share
from ga_optax._window.values import Loss, Values


def run(
    loss: Loss,
    operands: Operands,
    where: Where,
    *,
    residual_bytes: int | None,
) -> Outcome:
    """The results of a window, the loss first, and its accumulator, which starts empty.

    Args:
      loss: what a micro-batch does.
      operands: the arrays; the last leaf of the batch is the index.
      where: the devices.
      residual_bytes: how many bytes of activations may be kept between levels.
    """
    values = Values(loss, operands, where.axes)
    schedule = _planned(loss, operands, values.schedule, residual_bytes)
    done = report(schedule, residual_bytes is None)
    plans.of_window(schedule, done)
    goes_back = any(b.has_cotangent for b in schedule.buffers)
    values.begin(schedule, operands.params)
    for level in range(schedule.end):
        forward.fill(values, level)
        forward.fill_once(values, level)
    if not goes_back:
        return _counted(loss.step, values, operands, where)._replace(report=done)
    back = Backward(loss.step, values, operands, where)
    results, acc = _gradients(back)
    acc = acc._replace(count=operands.acc.count + schedule.times["own"])
    return Outcome(results, [], acc, done, back.of_rows())


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
    schedule, wanted = values.schedule, _wanted(step, values)
    pairs = [*wanted.values(), *_of_last(values)]
    roots = [schedule.jaxpr.outvars[0], *(x for x, _ in pairs)]

    def micro_batch(params: Any, x: Any) -> Any:
        known = values.buffers | dict(zip(values.params, params, strict=True))
        return values.evaluate(roots, Level(schedule.end), x, known, acts=True)

    first = [x[0] for x in operands.batch]
    closed: Any = jax.make_jaxpr(micro_batch)(operands.params, first)
    step = step_of(step, closed.jaxpr, len(operands.params), pairs)
    operands = operands._replace(consts=closed.consts)
    out = loop.run(step, operands, where, begins=True, merges=True)
    return out._replace(results=_put_together(values, wanted, out.results))


def _wanted(step: Step, values: Values) -> dict[int, tuple[Any, str]]:
    """The results but for the loss, and how those of micro-batches are put together.

    By number, without those that come after the loops.
    """
    schedule = values.schedule
    pairs = zip(schedule.jaxpr.outvars, step.ways, strict=True)
    return {i: pair for i, pair in enumerate(pairs) if i and i not in schedule.after}


def _of_last(values: Values) -> list[tuple[Any, str]]:
    """What the loop of the loss fills of buffers."""
    schedule = values.schedule
    members = [schedule.buffers[j] for j in schedule.at(Level(schedule.end))]
    return [(b.operand, b.kind) for b in members]


def _put_together(
    values: Values, wanted: Iterable[int], found: Sequence[jax.Array]
) -> list[jax.Array]:
    """All results, in order, from those of the loop of the loss; that is the first."""
    loss, *rest = found
    results = dict(zip(wanted, rest, strict=False)) | {0: loss}
    forward.fill_last(values, rest[len(results) - 1 :])
    after_it = sorted(values.schedule.after)
    results |= zip(after_it, after.results(values), strict=True)
    return [results[i] for i in sorted(results)]


def _gradients(back: Backward) -> tuple[list[jax.Array], Any]:
    """The results, and the accumulator: the loss's loop, and back."""
    values, wanted = back.values, _wanted(back.step, back.values)
    schedule = values.schedule
    every = [*wanted.values(), *_of_last(values)]
    outcome = back.run(Level(schedule.end), schedule.jaxpr.outvars[:1], every)
    for level in reversed(range(schedule.end)):
        values.drop(j for j in schedule.at(Level(level)) if back.is_own(j))
        forward.fill_again(values, level)
        back.take_once(level)
        back.take(level)
    results, acc = back.finished(*outcome)
    return _put_together(values, wanted, results), acc
