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
from ga_optax._window.schedule import Level


def fill(values: Evaluation, level: int) -> None:
    """Fills the buffers of a level, and drops residuals that no later level reads."""
    schedule = values.schedule
    if members := schedule.filled_at(Level(level)):
        _add(values, _filled(values, members, level), _ACROSS)
    values.drop(schedule.drops.get(level, ()))


def fill_again(values: Evaluation, level: int) -> None:
    """Fills the residuals that were dropped of the segment that ends with a level."""
    if members := values.schedule.refills.get(level):
        values.buffers |= _filled(values, members, level + 1)


def fill_shared(values: Evaluation, level: int) -> None:
    """Computes once the values of a level that all micro-batches share."""
    schedule, when = values.schedule, Level(level, in_loop=False)
    if members := schedule.filled_at(when):
        with jax.named_scope("forward"):
            new = values.evaluate(schedule.operands(when), when)
        values.buffers |= zip(members, new, strict=True)


def fill_last(values: Evaluation, results: Arrays) -> None:
    """Fills the buffers of the level of the loss with results of its loop."""
    members = values.schedule.filled_at(Level(values.schedule.end))
    _add(values, dict(zip(members, results, strict=True)), ["stack"])


def _filled(values: Evaluation, members: Sequence[int], level: int) -> Buffers:
    """The buffers that one loop fills from the buffers of earlier levels."""
    buffers = dict(enumerate(values.schedule.buffers[j] for j in members))
    folds = {i: FOLDS[b.kind] for i, b in buffers.items() if b.is_folded}
    operands = [b.operand for b in buffers.values()]
    start: dict[int, Any] = {
        i: folds[i].init(x.aval, lambda x, term: vary(x, values.varying))
        if i in folds
        else values.stack(zeros(x.aval))
        for i, x in enumerate(operands)
        if not jnp.issubdtype(x.aval.dtype, jax.dtypes.extended)
    }
    for i in [i for i in start if members[i] in values.filled_before][:1]:
        # A segment is filled again over arrays that were just read: it waits for them.
        start[i] = values.after_latest(start[i])
    values.filled_before.update(members)

    def micro_batch(x: Any) -> Arrays:
        return values.evaluate(operands, Level(level), x)

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
        key = read.form(closed.jaxpr), tuple(b.kind for b in buffers.values())
        new = values.run(key, run, start, values.xs, closed.consts)
    values.note_latest(new[i] for i in start)
    return {j: new[i] for i, j in enumerate(members)}


def _add(values: Evaluation, new: Buffers, kinds: Iterable[str]) -> None:
    """Stores the buffers of a level; some kinds are put together over all devices."""
    axes, buffers = values.axes, values.schedule.buffers
    for kind in kinds if axes else ():
        group = [j for j in new if buffers[j].kind == kind]
        whole = _ACROSS[kind]([new[j] for j in group], axes)
        new |= zip(group, whole, strict=True)
    for j, x in new.items():
        dtype: Any = buffers[j].operand.aval.dtype
        x = x if x.dtype == dtype else x.astype(dtype)
        values.buffers[j] = vary(x, axes)


# How each kind of buffer is put together over devices.
_ACROSS: dict[str, Any] = {
    "sum": jax.lax.psum,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
    "stack": functools.partial(jax.lax.all_gather, tiled=True),
}
