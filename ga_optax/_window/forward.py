"""Forward: fills the buffers of a level in one pass over the micro-batches."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._devices.collectives import vary, zeros
from ga_optax._loop.folds import FOLDS, Weighting
from ga_optax._passes import interpret, read
from ga_optax._window.evaluation import Arrays, Buffers, Evaluation, placed
from ga_optax._window.runs import Stage
from ga_optax._window.schedule import Level


def fill(values: Evaluation, level: Level, buffers: Buffers) -> Buffers:
    """The buffers after a level, without residuals that no later level reads."""
    schedule = values.schedule
    if not level.in_loop:
        return fill_shared(values, level, buffers)
    new = filled(values, schedule.filled_at(level), level, buffers)
    buffers = buffers | across(values, new, _ACROSS)
    return without(buffers, schedule.drops.get(level.number, ()))


def fill_shared(values: Evaluation, level: Level, buffers: Buffers) -> Buffers:
    """The buffers after the values of a level that all micro-batches share."""
    schedule = values.schedule
    with jax.named_scope("forward"):
        new = values.evaluate(schedule.operands(level), level, buffers)
    return buffers | dict(zip(schedule.filled_at(level), new, strict=True))


def fill_again(
    values: Evaluation, stage: Stage, buffers: Buffers, cotangents: Buffers
) -> Buffers:
    """The buffers with dropped residuals of the segment that ends before a level."""
    buffers = before(values, Level(stage.level.number - 1), buffers)
    new = filled(values, stage.fills, stage.level, buffers, cotangents)
    return buffers | new


def before(values: Evaluation, level: Level, buffers: Buffers) -> Buffers:
    """The buffers without residuals that a level fills: its way back reads none."""
    members = values.schedule.filled_at(level)
    return without(buffers, filter(values.is_residual, members))


def fill_last(values: Evaluation, buffers: Buffers, results: Arrays) -> Buffers:
    """The buffers after the level of the loss, with results of its loop."""
    members = values.schedule.filled_at(Level(values.schedule.end))
    new = dict(zip(members, results, strict=True))
    return buffers | across(values, new, ["stack"])


def without(buffers: Buffers, numbers: Iterable[int]) -> Buffers:
    """The other buffers."""
    gone = set(numbers)
    return {j: x for j, x in buffers.items() if j not in gone}


def filled(
    values: Evaluation,
    members: Sequence[int],
    level: Level,
    buffers: Buffers,
    late: Buffers | None = None,
) -> Buffers:
    """The buffers that one loop fills from other buffers.

    New stacks wait for `late`, by default for these buffers.
    """
    some = [values.schedule.buffers[j] for j in members]
    operands = [b.operand for b in some]
    folds = {i: FOLDS[b.kind] for i, b in enumerate(some) if b.is_folded}
    late = buffers if late is None else late
    start: dict[int, Any] = {
        i: folds[i].init(x.aval, lambda x, term: vary(x, values.varying))
        if i in folds
        else values.stack(zeros(x.aval), late, i)
        for i, x in enumerate(operands)
        if not jnp.issubdtype(x.aval.dtype, jax.dtypes.extended)
    }

    def micro_batch(x: Any) -> Arrays:
        return values.evaluate(operands, level, buffers, x)

    closed: Any = jax.make_jaxpr(micro_batch)([x[0] for x in values.xs])

    def run(start: Any, xs: Arrays, consts: Arrays) -> Any:
        def step(carry: Any, x: Arrays) -> tuple[Any, Any]:
            out = interpret.results(read.Program(closed.jaxpr, consts), x)
            new = {
                i: folds[i].step(old, out[i], Weighting())
                if i in folds
                else placed(old, out[i], x[-1])
                for i, old in carry.items()
            }
            return new, {i: x for i, x in enumerate(out) if i not in carry}

        last, keys = jax.lax.scan(step, start, xs)
        return last | {i: folds[i].finish(last[i], None) for i in folds} | keys

    with jax.named_scope("forward"):
        key = read.form(closed.jaxpr), tuple(b.kind for b in some)
        new = values.run(key, run, start, values.xs, closed.consts)
    return {j: new[i] for i, j in enumerate(members)}


def across(values: Evaluation, new: Buffers, kinds: Iterable[str]) -> Buffers:
    """New buffers in their dtypes; some kinds are put together over all devices."""
    axes, buffers = values.axes, values.schedule.buffers
    for kind in kinds if axes else ():
        group = [j for j in new if buffers[j].kind == kind]
        whole = _ACROSS[kind]([new[j] for j in group], axes)
        new |= zip(group, whole, strict=True)
    dtypes: dict[int, Any] = {j: buffers[j].operand.aval.dtype for j in new}
    return {
        j: vary(x if x.dtype == dtypes[j] else x.astype(dtypes[j]), axes)
        for j, x in new.items()
    }


# How each kind of buffer is put together over devices.
_ACROSS: dict[str, Any] = {
    "sum": jax.lax.psum,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
    "stack": functools.partial(jax.lax.all_gather, tiled=True),
}
