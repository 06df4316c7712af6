"""A window, run: a chain of levels, the loss, the way back.

    forward, level by level  ->  the loss  ->  backward, last level first

Buffers and cotangents are dictionaries by the number of the buffer, which levels take
and return. A layer of batch normalization, `standard(x @ w)`, has two levels: one
adds up a mean, one a variance, which needs the mean. On the way back the level of the
variance takes the cotangent of the variance to `w` and to the mean, and the level of
the mean takes that to `w`.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._devices import collectives
from .._devices.record import Devices
from .._loop.folds import of_last_device
from .._loop.loop import Outcome, all_reduced, run_loop
from .._loop.micro_step import Operands, Replay
from .._passes import alive, jaxprs
from .._passes.effects import IndivisibleError
from . import kept, levels
from .costs import bytes_of_step
from .levels import Arrays, Buffers, Evaluation, MeetingLoss, Wanted
from .report import peak_of
from .room import LITTLE, planned, share
from .schedule import Level, Schedule
from .stages import stages


def plan_window(
    loss: MeetingLoss,
    operands: Operands,
    devices: Devices,
    residual_bytes: int | None,
) -> Evaluation:
    """The plan of a window. Nothing is computed but values of no argument.

    Of plans with less and less room it is the first that takes less memory than the
    undivided batch. Raises if there is none, and the undivided batch may run.
    """
    values = Evaluation(loss, operands, devices, residual_bytes)
    bare = values.schedule
    values.schedule = full = _planned(values, bare, residual_bytes)
    jaxpr, ours = loss.whole, peak_of(full)
    if jaxpr is None or ours <= LITTLE:
        return values
    smooth = jaxpr.invars[: len(operands.params) + operands.rows]
    # At top level the compiler distributes the rows of the undivided batch.
    devices_of_all = loss.size // len(operands.indices)
    about_whole = bytes_of_step(jaxprs.live(jaxpr), smooth) // devices_of_all
    if _CLEAR * ours <= about_whole:
        return values
    whole = alive.most_alive(_differentiated(jaxpr, smooth)) // devices_of_all
    if _CLEAR * ours <= whole:
        return values
    taken: dict[int, int] = {}  # by the bytes of residuals at a time
    for room in _rooms(full.peak):
        values.schedule = full if room is None else _planned(values, bare, room)
        if (peak := values.schedule.peak) in taken:
            continue
        values.written = _written(values)
        taken[peak] = alive.most_alive(jaxprs.live(values.written.program.jaxpr))
        if _takes_less(taken[peak], whole):
            return values
    raise TakesMoreError(
        f"the undivided batch takes less: about {whole:,} bytes, and the "
        f"micro-batches, whose rows meet, {min(taken.values()):,} of a device, counted "
        "from the programs of both."
    )


_CLEAR = 4  # times less, by what is stored, that need no count of programs


def _rooms(peak: int) -> tuple[int | None, ...]:
    """The bytes of residuals that plans get, one after the other; None by default."""
    return None, peak // 2, peak // 8, 0


def _takes_less(ours: int, whole: int) -> bool:
    """True if micro-batches take less memory than the undivided batch.

    Of two that take as much the undivided batch is better, with fewer products.
    """
    return ours <= 0.95 * whole


def _differentiated(jaxpr: core.Jaxpr, smooth: Sequence[Any]) -> core.Jaxpr:
    """The program of the loss of all rows, and of its gradient."""
    names = [*jaxpr.constvars, *jaxpr.invars]
    places = [i for i, x in enumerate(names) if jaxprs.is_among(x, smooth)]

    def both(*xs: Any) -> list[Any]:
        def loss(*some: Any) -> tuple[Any, list[Any]]:
            given, first = jaxprs.put(xs, places, some), len(jaxpr.constvars)
            out = jax.core.eval_jaxpr(jaxpr, given[:first], *given[first:])
            return out[0], out[1:]

        value, pull, rest = jax.vjp(loss, *(xs[i] for i in places), has_aux=True)
        return [value, *rest, *pull(collectives.one_like(value))]

    return jaxprs.live(jaxprs.program_of(both, *(x.aval for x in names)).jaxpr)


def _written(values: Evaluation) -> Replay:
    """A window, traced."""
    trial = copy.copy(values)
    trial.schedule, trial.functions = values.schedule.copy(), {}
    return Replay.of(functools.partial(_run, trial))


def is_small(values: Evaluation) -> bool:
    """True if what the plan stores has the room that residuals have."""
    most, jaxpr = values.residual_bytes, values.program.jaxpr
    if most is None:
        step = bytes_of_step(jaxpr, jaxpr.invars[: len(values.of_params)])
        most = max(step, LITTLE)
    buffers = values.schedule.buffers
    return 0 < sum(b.nbytes + b.of_cotangent for b in buffers) <= most


def run_window(values: Evaluation) -> Outcome:
    """The results of a window, the loss first, and the sums of the gradients."""
    return _run(values) if values.written is None else values.written()


def _run(values: Evaluation) -> Outcome:
    """It runs the `stages` that reports show, but what comes after all of them."""
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
            state = all_reduced(loop, state, values.devices, values.devices.placements)
    results = _with_epilogue(values, buffers, loop.results(state))
    of_rows = [cotangents.get(j, jnp.zeros_like(buffers[j])) for j in values.rows]
    return Outcome(results, [], state.acc._replace(count=count), of_rows)


def _planned(values: Evaluation, schedule: Schedule, limit: int | None) -> Schedule:
    """The schedule with residuals, of `limit` bytes, and with shared values."""
    jaxpr = values.program.jaxpr

    def of_step() -> int:
        params = jaxpr.invars[: len(values.of_params)]
        stacks = [b.operand for b in schedule.buffers if b.kind == "stack"]
        gathered = schedule.num_values["residual"] * sum(map(jaxprs.nbytes, stacks))
        return max(bytes_of_step(jaxpr, params), gathered)

    if not any(schedule.trait(x).smooth for x in schedule.roots(schedule.end)):
        most = LITTLE if limit is None else limit
        return share(kept.planned(schedule, most, is_bound=limit is not None))
    return share(planned(schedule, of_step, limit))


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
    schedule, folds = values.schedule, values.folds
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


class TakesMoreError(IndivisibleError):
    """A window takes more memory than the undivided batch, in words."""
