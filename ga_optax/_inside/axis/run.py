"""Runs a window: forward level by level, the loss, and back."""

from typing import Any

import jax

from ga_optax._checks import named_leaves
from ga_optax._inside.axis import after, cost, forward, room
from ga_optax._inside.axis.backward import Backward, Task
from ga_optax._inside.axis.report import report
from ga_optax._inside.axis.schedule import Schedule, differing
from ga_optax._inside.axis.shared import share
from ga_optax._inside.axis.values import Arrays, Values, is_inexact
from ga_optax._inside.call import Call
from ga_optax._inside.loop import Flat, Operands
from ga_optax._inside.program import Program
from ga_optax._passes.ir import following, is_variable


def fold(
    call: Call, program: Program, operands: Operands
) -> tuple[Arrays, Arrays, Flat]:
    """The loss and aux of a window, its carry, and its accumulator, which starts empty.

    Every micro-batch sees the carry as it came, as devices do, and the new carry is the
    mean of theirs.
    """
    axis = call.options.axis_name
    try:
        return _run(call, program, operands)
    except NameError as error:
        if f"axis name: {axis}" not in str(error):
            raise
        raise NotImplementedError(
            f"Collectives over axis_name={axis!r} must be seen one by one, but a rule "
            "of a custom_vjp or custom_jvp in fun calls one. Take it out of the rule."
        ) from error


def _run(
    call: Call, program: Program, operands: Operands
) -> tuple[Arrays, Arrays, Flat]:
    values = Values(call, program, operands)
    _check_auto(call, program, values.schedule)
    values.schedule = _planned(call, program, operands, values.schedule)
    schedule = values.schedule
    room_is_ours = call.options.residual_bytes is None
    report(schedule, values.size, call.options.num_microbatches, room_is_ours)
    for level in range(schedule.end):
        forward.fill(values, level)
        forward.fill_once(values, level)
    back = Backward(call, program, values, operands.acc)
    value, leaves, acc = _gradients(back, _wanted(program, schedule, operands.carry))
    new = [
        (x / values.size).astype(old.dtype) if is_inexact(old) else x
        for x, old in zip(leaves, operands.carry, strict=False)
    ]
    count = operands.acc.count + call.options.num_microbatches
    aux = leaves[len(operands.carry) :]
    return [value, *aux], new, acc._replace(count=count)


def _planned(
    call: Call, program: Program, operands: Operands, schedule: Schedule
) -> Schedule:
    """The schedule with what is kept, and what is computed once."""
    k, given = call.options.num_microbatches, call.options.residual_bytes

    def of_step() -> int:
        params = program.jaxpr.invars[: len(operands.params)]
        carried = [b.operand for b in schedule.buffers if b.kind == "stack"]
        taken = cost.of_a_step(program.jaxpr, params)
        return max(taken, k * sum(map(cost.nbytes, carried)))

    return share(room.planned(schedule, k, of_step, given))


def _wanted(
    program: Program, schedule: Schedule, carry: Arrays
) -> dict[int, tuple[Any, Any]]:
    """The results but for the loss, and how those of micro-batches are put together.

    By number, without those that come after the loops.
    """
    modes = ["sum" if is_inexact(x) else "last" for x in carry]
    first = 1 + program.weighted
    pairs = zip(
        schedule.jaxpr.outvars[first:], [*modes, *program.modes[1:]], strict=True
    )
    return {i: pair for i, pair in enumerate(pairs, first) if i not in schedule.after}


def _gradients(
    back: Backward, wanted: dict[int, tuple[Any, str]]
) -> tuple[jax.Array, Arrays, Flat]:
    """The loss, the other results and the accumulator: the loss's loop, and back."""
    values, program, axes = back.values, back.program, back.values.axes
    schedule = values.schedule
    members = [schedule.buffers[j] for j in schedule.at(schedule.end)]
    every = [*wanted.values(), *((b.operand, b.kind) for b in members)]
    outcome = back.run(Task(schedule.end, schedule.jaxpr.outvars[:1], every))
    if program.multiplies:
        weight = outcome.state.acc.weight
        back.weight = jax.lax.psum(weight, axes) if axes else weight
    for level in reversed(range(schedule.end)):
        back.values.drop(j for j in schedule.at(level) if back.is_own(j))
        forward.fill_again(back.values, level)
        back.take_once(level)
        back.take(level)
    loss, rest, acc = back.finished(outcome, back.call, back.totals)
    results = dict(zip(wanted, rest, strict=False))
    forward.fill_last(values, rest[len(wanted) :])
    results |= zip(sorted(schedule.after), after.results(values), strict=True)
    return loss, [results[i] for i in sorted(results)], acc


def _check_auto(call: Call, program: Program, schedule: Schedule) -> None:
    """Raises if "auto" would add or join what all micro-batches share."""
    tree = program.aux
    aux = schedule.jaxpr.outvars[-tree.num_leaves :] if tree.num_leaves else []
    of_leaves = jax.tree.broadcast(call.options.aux, tree.unflatten(aux))
    gathered = following(schedule.jaxpr, schedule.views)
    differ = differing(schedule)
    leaves = zip(jax.tree.leaves(of_leaves), program.modes[1:], aux, strict=True)
    for i, (asked, mode, x) in enumerate(leaves):
        shared = is_variable(x) and x in gathered and x not in differ
        if asked == "auto" and mode in ("sum", "concat") and shared:
            name, _ = named_leaves(tree.unflatten(range(tree.num_leaves)))[i]
            raise ValueError(
                'aux="auto" must have the results of single micro-batches, but '
                f"{name} of the aux is a collective over axis_name, the same in "
                'all of them. Name "last" in aux for it.'
            )
