"""Adds the micro-batches of a call to an accumulator, on this device and on all."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ga_optax._devices.meshes import Placement
from ga_optax._loop import additions, in_place
from ga_optax._loop.loop import Loop
from ga_optax._loop.loss import DeviceContext, Flat, LossProgram, Operands
from ga_optax._loop.over_devices import all_reduced, of_logical


class Outcome(NamedTuple):
    """The results of a loop or of a window.

    Attributes:
      results: the loss, and the other results of `fun`.
      carry: the carried arguments.
      acc: the accumulator.
      rows: the gradients of leaves of the batch, of each micro-batch along axis 0.
    """

    results: list[jax.Array]
    carry: list[jax.Array]
    acc: Flat
    rows: Sequence[jax.Array]


def run(
    program: LossProgram,
    operands: Operands,
    devices: DeviceContext,
    *,
    begins: bool,
    merges: bool,
) -> Outcome:
    """Adds the micro-batches of a call.

    Args:
      program: the loss of a micro-batch.
      operands: the arrays.
      devices: the devices.
      begins: True if the accumulator is known to be empty.
      merges: True if the sums of all devices are added up at the end.
    """
    num_microbatches = len(operands.batch[0]) // (devices.logical or 1)
    off = "" if program.optimize else "optimize=False"
    whys = in_place.reasons(off, program, operands, devices.scattered)
    in_place.report(devices.names, whys)
    adds = additions.choose(program, operands.acc.total, whys, devices.scattered)
    leaves = operands.batch[: operands.rows]
    # The sums that the compiler reduces over devices in each micro-step would be twice
    # as large.
    reduces = devices.sums_already or devices.gathered or devices.split_by_compiler
    loop = Loop(
        program,
        devices,
        num_microbatches,
        [*adds, *map(additions.stacked, leaves)],
        begins=begins,
        rounds_once=program.low_precision and not reduces,
        rows=operands.rows,
        index=len(operands.batch) - 1,
    )
    sums, acc = len(operands.acc.total), operands.acc
    acc = acc._replace(total=[*acc.total, *map(jnp.zeros_like, leaves)])
    operands = operands._replace(acc=acc)
    state = of_logical(loop, operands, devices) if devices.logical else loop(operands)
    stacks = state.acc.total[sums:]
    state = state._replace(acc=state.acc._replace(total=state.acc.total[:sums]))
    if merges and devices.axes:
        with jax.named_scope("merge"):
            summed = {i: Placement(summed=x.axes) for i, x in devices.scattered.items()}
            places = [summed.get(i, x) for i, x in enumerate(devices.placements)]
            state = all_reduced(loop, state, devices._replace(placements=places))
    return Outcome(loop.results(state), state.carry, state.acc, rows=stacks)
