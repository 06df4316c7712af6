"""The states of several devices are put together after the loop."""

from typing import Any

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._devices import collectives, logical, meshes
from ga_optax._devices.meshes import Placement
from ga_optax._loop import fences
from ga_optax._loop.folds import FOLDS
from ga_optax._loop.loop import Loop, State, with_collected
from ga_optax._loop.loss import DeviceContext, Operands
from ga_optax.accumulator import Accumulator


def of_logical(loop: Loop, operands: Operands, devices: DeviceContext) -> State:
    """The state of all logical devices of this device. Each runs the loop by itself."""
    number, axes = devices.logical, devices.axes
    indices = number * jax.lax.axis_index(axes) + jnp.arange(number, dtype=jnp.int32)
    batch = [jnp.reshape(x, (number, -1, *x.shape[1:])) for x in operands.batch]

    def run(part: Any, buffer: State) -> tuple[State, dict[int, Any]]:
        index, batch = part
        keys = [jax.random.fold_in(key, index) for key in operands.keys]
        # If XLA knew that this is empty, it would write zeros to one more buffer. The
        # index changes, so its sort stays in the loop; the counter's may be dropped.
        is_empty = fences.next_count(index) > index
        empty, count = fences.fusion_barrier((is_empty, operands.acc.count))
        total = [accumulator.cleared(x, empty) for x in buffer.acc.total]
        acc = operands.acc._replace(total=total, count=count)
        state = loop(operands._replace(batch=batch, keys=keys, acc=acc))
        collected = loop.collected(state.results)
        return with_collected(state, dict.fromkeys(collected, ())), collected

    def join(a: State, b: State) -> State:
        total = list(map(logical.plus, a.acc.total, b.acc.total))
        acc = Accumulator(total, a.acc.weight + b.acc.weight, b.acc.count)
        carry = [
            logical.plus(x, y) if _averages(x) else jnp.maximum(x, y)
            for x, y in zip(a.carry, b.carry, strict=True)
        ]
        triples = zip(loop.program.folds, a.results, b.results, strict=True)
        results = [FOLDS[name].join(x, y) for name, x, y in triples]
        weights = [a.weights[0] + b.weights[0], b.weights[1]]
        return State(acc, carry, results, weights)

    buffers = [loop.start(operands)] * number.bit_length()  # one for each level
    (*_, state), collected = logical.run_loop(
        run, (indices, batch), number, buffers, join
    )
    collected = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), collected)
    return with_collected(state, collected)


def _averages(x: jax.Array) -> bool:
    """True if the carry of all devices is the mean, and False if it is the largest."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def all_reduced(loop: Loop, state: State, devices: DeviceContext) -> State:
    """The state of all devices: one all-reduce, and one collective a sharded leaf."""
    axes = devices.axes
    merges = [FOLDS[name].merge for name in loop.program.folds]
    results = list(zip(merges, state.results, strict=True))
    addends = [x for merge, x in results if merge is None]
    # Σ w is reduced without weights, too: were the processes of a run to disagree on
    # the number of micro-batches, they would still all divide by the same number.
    weights = [state.acc.weight] if "mean" in loop.program.folds else []
    means = [x for x in state.carry if _averages(x)]
    small, structure = jax.tree.flatten((addends, weights, means))
    leaves = [*state.acc.total, *collectives.vary(small, axes)]
    places = [*devices.placements, *[Placement()] * len(small)]
    number = meshes.num_devices(axes)
    if devices.logical:
        number *= devices.logical
        zero = accumulator.unknown_zero(state.acc.count)
        # What follows is the same program on any number of devices.
        out = fences.fusion_barrier(logical.reduce(leaves, places, axes, zero))
    else:
        out = collectives.reduce(leaves, places, axes)
    total = out[: len(devices.placements)]
    sums, weight, means = jax.tree.unflatten(structure, out[len(total) :])
    [weight] = weight or [state.acc.weight]
    means, sums = iter(means), iter(sums)
    carry = [
        next(means) / number if _averages(x) else jax.lax.pmax(x, axes)
        for x in state.carry
    ]
    merged = [merge(x, axes) if merge else next(sums) for merge, x in results]
    weights = state.weights and [weight, state.weights[1]]
    return State(Accumulator(total, weight, state.acc.count), carry, merged, weights)
