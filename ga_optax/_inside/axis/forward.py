"""Forward: the buffers of a level, in one pass over the micro-batches."""

from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._devices.collectives import vary, zeros
from ga_optax._inside.axis.values import Arrays, Buffers, Values, is_inexact, wide


def fill(values: Values, level: float) -> None:
    """Fills the buffers of a level."""
    schedule = values.schedule
    members = {j: schedule.buffers[j] for j in schedule.at(level)}
    operands = [buffer.operand for buffer in members.values()]
    start = {
        j: vary(_start(buffer.operand.aval, buffer.kind), values.axes)
        for j, buffer in members.items()
        if buffer.kind in FOLDS
    }

    def step(folded: Any, x: Arrays) -> tuple[Any, Any]:
        given = dict(zip(members, values.evaluate(operands, level, x), strict=True))
        is_first = x[0] == values.xs[0][0]
        new = {
            j: _folded(members[j].kind, old, given[j], is_first)
            for j, old in folded.items()
        }
        return new, {j: x for j, x in given.items() if j not in folded}

    if members:
        with jax.named_scope("forward"):
            folded, stacked = jax.lax.scan(step, start, values.xs)
        _add(values, folded | stacked)


def fill_last(values: Values, results: Arrays) -> None:
    """Fills the buffers of the loss's level, of what its loop put together."""
    schedule = values.schedule
    for j, x in zip(schedule.at(schedule.end), results, strict=True):
        buffer = schedule.buffers[j]
        if values.axes and buffer.kind == "stack":
            [x] = _gather([x], values.axes)
        values.buffers[j] = vary(x.astype(buffer.operand.aval.dtype), values.axes)


def fill_once(values: Values, level: int) -> None:
    """Computes what follows from the buffers up to a level, and from no rows."""
    schedule = values.schedule
    members = schedule.at(level + 0.5)
    operands = [schedule.buffers[j].operand for j in members]
    if members:
        with jax.named_scope("forward"):
            new = values.evaluate(operands, level + 0.5)
        values.buffers |= zip(members, new, strict=True)


def _add(values: Values, new: Buffers) -> None:
    """Adds the buffers of a level, of all devices, in the dtypes of values."""
    axes, buffers = values.axes, values.schedule.buffers
    if axes:
        for kind, across in _ACROSS.items():
            group = [j for j in new if buffers[j].kind == kind]
            new |= zip(group, across([new[j] for j in group], axes), strict=True)
    for j, x in new.items():
        dtype: Any = buffers[j].operand.aval.dtype
        x = x if x.dtype == dtype else x.astype(dtype)
        values.buffers[j] = vary(x, axes)


# -- Kinds of buffers ------------------------------------------------------------------


def _gather(stacks: Arrays, axes: Any) -> Arrays:
    return [jax.lax.all_gather(x, axes, tiled=True) for x in stacks]


FOLDS = {
    "sum": lambda total, x: total + x.astype(total.dtype),
    "max": jnp.maximum,
    "min": jnp.minimum,
}
_ACROSS = {
    "sum": jax.lax.psum,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
    "stack": _gather,
}


def _start(aval: Any, kind: str) -> jax.Array:
    """Zeros, in the dtype of sums if they are to be one."""
    start = zeros(aval)
    return wide(start) if kind == "sum" and is_inexact(start) else start


def _folded(kind: str, so_far: jax.Array, x: jax.Array, is_first: Any) -> jax.Array:
    """An extremum starts with its first value: infinities would stop `debug_infs`."""
    new = FOLDS[kind](so_far, x)
    return new if kind == "sum" else jnp.where(is_first, x, new)
