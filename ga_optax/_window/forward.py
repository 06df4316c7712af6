"""Forward: the buffers of a level, in one pass over the micro-batches."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._devices.collectives import vary, zeros
from ga_optax._partition import is_inexact
from ga_optax._passes import ir
from ga_optax._window.schedule import Level
from ga_optax._window.values import (
    Arrays,
    Buffers,
    Values,
    placed,
    wide,
)


def fill(values: Values, level: int) -> None:
    """Fills the buffers of a level, and drops what no later one reads."""
    schedule = values.schedule
    if members := schedule.at(Level(level)):
        _add(values, _filled(values, members, level), _ACROSS)
    values.drop(schedule.dropped.get(level, ()))


def fill_again(values: Values, level: int) -> None:
    """Fills what was dropped of the levels up to one, since the last that stays."""
    members = values.schedule.again.get(level, ())
    if members:
        values.buffers |= _filled(values, members, level + 1)


def _filled(values: Values, members: Sequence[int], level: int) -> Buffers:
    """Some buffers, from what is known at a level: one loop."""
    buffers = [values.schedule.buffers[j] for j in members]
    kinds = [buffer.kind for buffer in buffers]
    operands = [buffer.operand for buffer in buffers]
    start = {
        i: vary(_start(buffer.operand.aval, buffer.kind), values.varying)
        if buffer.kind in FOLDS
        else values.room(zeros(buffer.operand.aval))
        for i, buffer in enumerate(buffers)
        if not jnp.issubdtype(buffer.operand.aval.dtype, jax.dtypes.extended)
    }
    for i in [i for i in start if members[i] in values.seen][:1]:
        # It takes arrays that were read before, so it must not begin until then.
        start[i] = values.after_all(start[i])
    values.seen.update(members)

    first = [x[0] for x in values.xs]

    def micro_batch(x: Any) -> Arrays:
        return values.evaluate(operands, Level(level), x)

    closed: Any = jax.make_jaxpr(micro_batch)(first)

    def run(start: Any, xs: Arrays, consts: Arrays) -> Any:
        def step(so_far: Any, x: Arrays) -> tuple[Any, Any]:
            out = ir.results(ir.Program(closed.jaxpr, consts), x)
            given = dict(enumerate(out))
            is_first = x[-1] == xs[-1][0]
            new = {
                i: _folded(kinds[i], old, given[i], is_first)
                if kinds[i] in FOLDS
                else placed(old, given[i], x[-1])
                for i, old in so_far.items()
            }
            return new, {i: x for i, x in given.items() if i not in so_far}

        return jax.lax.scan(step, start, xs)

    with jax.named_scope("forward"):
        key = ir.form(closed.jaxpr), tuple(kinds)
        filled, keys = values.run(key, run, start, values.xs, closed.consts)
    values.came(filled.values())
    found = [(filled | keys)[i] for i in range(len(members))]
    return dict(zip(members, found, strict=True))


def fill_last(values: Values, results: Arrays) -> None:
    """Fills the buffers of the loss's level, of what its loop put together."""
    members = values.schedule.at(Level(values.schedule.end))
    _add(values, dict(zip(members, results, strict=True)), ["stack"])


def fill_once(values: Values, level: int) -> None:
    """Computes what follows from the buffers up to a level, and from no rows."""
    due = Level(level, once=True)
    if members := values.schedule.at(due):
        with jax.named_scope("forward"):
            new = values.evaluate(values.schedule.operands(due), due)
        values.buffers |= zip(members, new, strict=True)


def _add(values: Values, new: Buffers, kinds: Iterable[str]) -> None:
    """Adds the buffers of a level, those of some kinds of all devices."""
    axes, buffers = values.axes, values.schedule.buffers
    for kind in kinds if axes else ():
        group = [j for j in new if buffers[j].kind == kind]
        whole = _ACROSS[kind]([new[j] for j in group], axes)
        new |= zip(group, whole, strict=True)
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
