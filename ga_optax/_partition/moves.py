"""Primitives that move rows: slices, reversals, padding and concatenations.

Each row of the result is a row of an operand, and which one is known beforehand. If a
micro-batch holds all of its rows itself, as after `concatenate([x, y])[:n]`, they stay
where they are. A few rows are a sum over micro-batches, of which one has each. For all
else, such as a shift, all rows are gathered, and cut again if k divides them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Result,
    Results,
    Rows,
    Value,
    can_split,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes.ir import is_inexact


def move(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """The results of what moves rows; None if its operands never had any."""
    origin = next(filter(None, (v.origin for v in vs)), None)
    if origin is None:
        return None
    if any(v.rows for v in vs) and (found := _here(w, e, vs, *origin)):
        return found

    def cut(x: Any) -> Result:
        rows = _splits(w, x.shape[origin[0]], *origin)
        return (w.own(x, rows[-1]), rows[-1]) if rows else (x, WHOLE)

    return [cut(x) for x, _ in w.all_whole(e, vs)]


def _splits(w: Writer, n: int, d: int, length: int) -> list[Rows]:
    """How so many rows may be split: as neighbours, or in segments of such a length."""
    some = [Rows(d), *([Rows(d, n // length)] if n % length == 0 else [])]
    shape = (1,) * d + (n,)
    # A single row is nobody's, even of one micro-batch.
    return [rows for rows in some if n > 1 and can_split(shape, rows, w.axis.size)]


def _here(w: Writer, e: core.JaxprEqn, vs: list[Value], d: int, length: int) -> Results:
    """The results, if a micro-batch has its rows of them, or if they are few."""
    held, start, xs = [], 0, []
    for v in vs if e.primitive.name != "pad" else ():
        # What comes from no row may be split like what does.
        rows = v.rows or next(reversed(_splits(w, v.shape[d], d, length)), None)
        if rows is None:
            return None
        held.append(start + _order(v.shape[d], rows, w.axis.size))
        xs.append(w.part(v, rows))
        start += v.shape[d]
    if not xs:
        return None
    here = np.concatenate(held, 1)  # the numbers of the rows that each has
    owner, place = np.divmod(here.argsort(None), here.shape[1])
    x = jax.lax.concatenate(xs, d) if len(xs) > 1 else _along_others(w, e, xs[0], d)
    found: list[Result] = []
    for numbers in _numbers(e, d, start):
        if len(numbers) < max(w.axis.size, 2) and is_inexact(x):
            few, shape = _at(x, place[numbers], d), [1] * x.ndim
            shape[d] = len(numbers)
            is_own = jnp.asarray(owner[numbers], jnp.int32).reshape(shape) == w.index
            found.append((jnp.where(is_own, few, jnp.zeros_like(few)), PARTIAL))
        for rows in _splits(w, len(numbers), d, length):
            order = numbers[_order(len(numbers), rows, w.axis.size)]
            is_own = owner[order] == np.arange(w.axis.size)[:, None]
            if is_own.all() and (place[order] == place[order[0]]).all():
                found.append((_at(x, place[order[0]], d), rows))
                break
    return found if len(found) == len(e.outvars) else None


def _order(n: int, rows: Rows, k: int) -> np.ndarray:
    """The numbers of the rows that each micro-batch holds, `[k, n / k]`."""
    return np.arange(n).reshape(rows.segments, k, -1).swapaxes(0, 1).reshape(k, -1)


def _numbers(e: core.JaxprEqn, d: int, n: int) -> list[np.ndarray]:
    """For each result, which of the `n` rows of all operands it has."""
    p, rows = e.params, np.arange(n)
    if e.primitive.name == "rev":
        return [rows[::-1]]
    if e.primitive.name == "slice":
        stride = p["strides"][d] if p["strides"] else 1
        return [rows[p["start_indices"][d] : p["limit_indices"][d] : stride]]
    return np.split(rows, np.cumsum(p.get("sizes", n))[:-1])


def _along_others(w: Writer, e: core.JaxprEqn, x: Any, d: int) -> Any:
    """What an equation makes of an array along the axes other than `d`."""
    p, name = e.params, e.primitive.name
    if name == "rev" and len(p["dimensions"]) > 1:
        return w.run(e, [x], dimensions=tuple(i for i in p["dimensions"] if i != d))
    if name != "slice":
        return x

    def at(key: str, new: int) -> Any:
        return p[key] and (*p[key][:d], new, *p[key][d + 1 :])

    ends = {"start_indices": at("start_indices", 0), "strides": at("strides", 1)}
    ends["limit_indices"] = at("limit_indices", x.shape[d])
    whole = (0,) * x.ndim, x.shape
    is_all = (ends["start_indices"], ends["limit_indices"]) == whole
    return x if is_all and not p["strides"] else w.run(e, [x], **ends)


def _at(x: Any, places: np.ndarray, d: int) -> Any:
    """The rows of an array at some places; a slice if they are evenly spaced."""
    steps = np.unique(np.diff(places))
    if len(places) == x.shape[d] and (steps == 1).all():
        return x
    if len(places) and len(steps) < 2 and (steps > 0).all():
        step = steps[0] if len(steps) else 1
        return jax.lax.slice_in_dim(x, places[0], places[-1] + 1, step, d)
    return x.at[(slice(None),) * d + (places,)].get(mode="promise_in_bounds")
