"""The micro-batches of a call, added to an accumulator, on this device and on all."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ga_optax._devices.meshes import Placement
from ga_optax._loop import additions, in_place
from ga_optax._loop.loop import Loop
from ga_optax._loop.over_devices import all_reduced, of_logical
from ga_optax._loop.step import Flat, Operands, Step, Where


class Outcome(NamedTuple):
    """What comes of a loop.

    Attributes:
      results: the loss, and the others.
      carry: the carry.
      acc: the accumulator.
      rows: the gradients of leaves of the batch, of each micro-batch along axis 0.
    """

    results: list[jax.Array]
    carry: list[jax.Array]
    acc: Flat
    rows: Sequence[jax.Array] = ()


def run(
    step: Step,
    operands: Operands,
    where: Where,
    *,
    begins: bool,
    merges: bool,
) -> Outcome:
    """Adds the micro-batches; `merges` over the bound data axes.

    Args:
      step: what one of them does.
      operands: the arrays.
      where: the devices.
      begins: whether the accumulator is known to be empty.
      merges: whether the sums of devices are added up at the end.
    """
    num_microbatches = len(operands.batch[0]) // (where.logical or 1)
    off = "" if step.optimize else "optimize=False"
    if off and begins and num_microbatches == 1:
        off = "one micro-batch adds to nothing"
    whys = in_place.reasons(off, step, operands, where.sent)
    in_place.report(where.names, whys)
    if where.sums_already and step.multiplies:
        raise ValueError(
            'sync="each" must scale the loss by the weight, but fun has custom_vjp, '
            'float16 or a loss of low precision in it. Use sync="last", or a float32 '
            "loss."
        )
    adds = additions.choose(step, operands.acc.total, whys, where.sent)
    own = operands.batch[: operands.rows]
    stacks = list(map(additions.placed, own))
    # What the compiler reduces over devices in each micro-step would be twice as large.
    once = not (where.sums_already or where.gathered or where.split_by_compiler)
    loop = Loop(
        step,
        where,
        num_microbatches,
        [*adds, *stacks],
        begins=begins,
        rounds_once=step.low_precision and once,
        rows=operands.rows,
        index=len(operands.batch) - 1,
    )
    sums, acc = len(operands.acc.total), operands.acc
    acc = acc._replace(total=[*acc.total, *map(jnp.zeros_like, own)])
    operands = operands._replace(acc=acc)
    state = of_logical(loop, operands, where) if where.logical else loop(operands)
    stacks = state.acc.total[sums:]
    state = state._replace(acc=state.acc._replace(total=state.acc.total[:sums]))
    if merges and where.axes:
        with jax.named_scope("merge"):
            done = {i: Placement(summed=x.axes) for i, x in where.sent.items()}
            places = [done.get(i, x) for i, x in enumerate(where.placements)]
            state = all_reduced(loop, state, where._replace(placements=places))
    return Outcome(loop.results(state), state.carry, state.acc, rows=stacks)
