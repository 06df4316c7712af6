"""Primitives that move numbers without changing them: where the rows are afterwards."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._partition import moves
from ga_optax._partition.values import (
    PARTIAL,
    Result,
    Rows,
    Value,
    is_inexact,
    local_shape,
    types_of,
)
from ga_optax._partition.writer import Writer

Results = list[Result] | None


def transpose(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    return [(w.run(e, [v.x]), v.rows.at(e.params["permutation"].index(v.dim)))]


def squeeze(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    gone = sum(d < v.dim for d in e.params["dimensions"])
    return [(w.run(e, [v.x]), v.rows.at(v.dim - gone))]


def broadcast_in_dim(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    v = vs[0]
    rows = v.rows.at(e.params["broadcast_dimensions"][v.dim])
    return [(_broadcast(w, e, v.x, rows), rows)]


def _broadcast(w: Writer, e: core.JaxprEqn, x: Any, rows: Rows) -> Any:
    shape = local_shape(e.params["shape"], rows, w.axis.size)
    return jax.lax.broadcast_in_dim(x, shape, e.params["broadcast_dimensions"])


def reshape(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    v = vs[0]
    shape = types_of(e)[0].shape
    rows = reshaped(v.shape, shape, v.rows, w.axis.size)
    if rows is None:
        return None
    return [(v.x.reshape(local_shape(shape, rows, w.axis.size)), rows)]


def reshaped(
    old: tuple[int, ...], new: tuple[int, ...], rows: Rows, parts: int
) -> Rows | None:
    """Where rows are after a reshape: `[before, k, rest]` of the same numbers."""
    if rows.extra:  # as an axis of its own
        found = [d for d, n in enumerate(new) if n == old[rows.dim]]
        before = math.prod(old[: rows.dim])
        found = [d for d in found if math.prod(new[:d]) == before]
        return rows.at(found[0]) if found else None
    before = math.prod(old[: rows.dim]) * rows.segments
    outer = 1
    for d, size in enumerate(new):
        if outer > before or not size:
            return None
        if before % outer == 0 and size % (before // outer * parts) == 0:
            return Rows(d, before // outer)
        outer *= size
    return None


def concatenate(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    d = e.params["dimension"]
    others = [v for v in vs if v.rows and v.dim != d]
    if others:
        rows = max(others, key=lambda v: v.size).rows
        return [(w.run(e, [w.part(v, rows) for v in vs]), rows)]
    return moves.moved(w, e, vs, d)


def stack(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    rows, axis = max((v for v in vs if v.rows), key=lambda v: v.size).rows, _axis(e)
    xs = [w.part(v, rows) for v in vs]
    return [(w.run(e, xs), rows.at(rows.dim + (rows.dim >= axis)))]


def unstack(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    if v.dim == _axis(e):
        return None
    rows = v.rows.at(v.dim - (v.dim > _axis(e)))
    return [(x, rows) for x in w.run(e, [v.x])]


def _axis(e: core.JaxprEqn) -> int:
    return e.params["axis"]


def split(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    if _axis(e) == v.dim:
        return moves.moved(w, e, vs, v.dim)
    return [(x, v.rows) for x in w.run(e, [v.x])]


def tile(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    times = e.params["reps"][v.dim]
    if v.extra and times > 1:
        return None
    rows = v.rows._replace(segments=v.rows.segments * times)
    return [(w.run(e, [v.x]), rows)]


def dynamic_slice(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    v, *starts = vs
    sizes = list(e.params["slice_sizes"])
    if v.rows is None or sizes[v.dim] not in (1, v.shape[v.dim]):
        return None
    xs = [w.whole(start) for start in starts]
    if sizes[v.dim] == v.shape[v.dim]:
        sizes[v.dim] = v.x.shape[v.dim]
        return [(w.run(e, [v.x, *xs], slice_sizes=tuple(sizes)), v.rows)]
    if not is_inexact(v.aval):
        return None
    row = jnp.clip(xs[v.dim], 0, v.shape[v.dim] - 1)
    xs[v.dim], mine = w.held(v, row)
    x = w.run(e, [v.x, *xs])
    return [(jnp.where(mine, x, jnp.zeros_like(x)), PARTIAL)]


def dynamic_update_slice(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    v, update, *starts = vs
    rows = v.rows or update.rows
    if update.shape[rows.dim] != v.shape[rows.dim]:
        return None
    xs = [w.part(v, rows), w.part(update, rows), *map(w.whole, starts)]
    return [(w.run(e, xs), rows)]
