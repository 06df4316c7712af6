"""Runs a window, a chain of levels: forward, the loss, and back.

    buffers     = parameters, rows              filled from the start
    buffers    += level n of buffers            one loop over the micro-batches each
    cotangents  = the loop of the loss          with the gradients of all that it reads
    cotangents += level n of its cotangents     one loop each, last level first

Buffers and cotangents are dictionaries by the number of the buffer, which levels take
and return. A layer of batch normalization, `standard(x @ w)`, has two levels: one adds
up a mean, one a variance, which needs the mean. On the way back the level of the
variance takes the cotangent of the variance to `w` and to the mean, and the level of
the mean takes that to `w`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._loop import run as loop
from ga_optax._loop.folds import of_last_device
from ga_optax._loop.loss import DeviceContext, Operands
from ga_optax._loop.over_devices import all_reduced
from ga_optax._loop.run import Outcome
from ga_optax._window import backward, cost, forward, room
from ga_optax._window.backward import Wanted
from ga_optax._window.evaluation import Arrays, Buffers, Evaluation, MeetingLoss
from ga_optax._window.runs import stages
from ga_optax._window.schedule import Level, Schedule
from ga_optax._window.shared import share


def prepared(
    loss: MeetingLoss,
    operands: Operands,
    devices: DeviceContext,
    residual_bytes: int | None,
) -> Evaluation:
    """The plan of a window. Nothing is computed but values of no argument."""
    values = Evaluation(loss, operands, devices, residual_bytes)
    values.schedule = _planned(values)
    return values


def is_small(values: Evaluation) -> bool:
    """True if what the plan stores has the room that residuals have."""
    jaxpr = values.program.jaxpr

    def of_step() -> int:
        return cost.of_a_step(jaxpr, jaxpr.invars[: len(values.of_params)])

    return room.has_room(values.schedule, of_step, values.residual_bytes)


def run(values: Evaluation) -> Outcome:
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
            buffers = forward.fill(values, stage.level, buffers)
        elif stage.kind == "the loss":
            if not goes_back:
                return _in_one_loop(values, buffers)
            some = values, buffers, cotangents, wanted
            cotangents, loop, state = backward.of_loss(*some)
        elif stage.kind == "fill again":
            buffers = forward.fill_again(values, stage, buffers, cotangents)
        elif stage.kind == "back":
            buffers = forward.before(values, stage.level, buffers)
            cotangents = backward.of_level(values, stage.level, buffers, cotangents)
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
        gathered = schedule.num_values["residual"] * sum(map(cost.nbytes, stacks))
        return max(cost.of_a_step(jaxpr, params), gathered)

    return share(room.planned(schedule, of_step, values.residual_bytes))


def _in_one_loop(values: Evaluation, buffers: Buffers) -> Outcome:
    """The results if no cotangent goes back to a buffer, such as a token count.

    Then a plain loop reads the buffers, with all that a plain loop can do on devices.
    """
    schedule, wanted, operands = values.schedule, _wanted(values), values.operands
    roots = [schedule.jaxpr.outvars[0], *(x for x, _ in wanted)]

    def micro_batch(params: Any, x: Any) -> Any:
        known = buffers | dict(zip(values.params, params, strict=True))
        return values.evaluate(roots, Level(schedule.end), known, x, acts=True)

    first = [x[0] for x in operands.batch]
    closed: Any = jax.make_jaxpr(micro_batch)(operands.params, first)
    program = backward.program_of(
        values.program, closed.jaxpr, len(operands.params), wanted
    )
    operands = operands._replace(consts=closed.consts)
    out = loop.run(program, operands, values.devices, begins=True, merges=True)
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
    buffers = forward.fill_last(values, buffers, results[number:])

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
