"""Primitives that move numbers without changing them: where the rows are afterwards."""

import math
from typing import Any

import jax
from jax.extend import core

from ga_optax._partition.values import Result, Rows, Value, local_shape, types_of
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
    if rows is None or e.params.get("dimensions") is not None:
        return None
    return [(v.x.reshape(local_shape(shape, rows, w.axis.size)), rows)]


def reshaped(
    old: tuple[int, ...], new: tuple[int, ...], rows: Rows, parts: int
) -> Rows | None:
    """Where rows are after a reshape: `[before, k, rest]` of the same numbers."""
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
    lengths = {v.shape[d] // v.rows.segments if v.rows else None for v in vs}
    if None in lengths or len(lengths) > 1:
        return None
    rows = Rows(d, sum(v.rows.segments for v in vs if v.rows))
    return [(w.run(e, [v.x for v in vs]), rows)]


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
    d, sizes = e.params["axis"], e.params["sizes"]
    if d != v.dim:
        return [(x, v.rows) for x in w.run(e, [v.x])]
    segment = v.shape[d] // v.rows.segments
    if any(n % segment for n in sizes):
        return None
    local = tuple(n // w.axis.size for n in sizes)
    found = w.run(e, [v.x], sizes=local)
    return [(x, Rows(d, n // segment)) for x, n in zip(found, sizes, strict=True)]


def slice_(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    d, parts = v.dim, w.axis.size
    strides = e.params["strides"] or (1,) * len(v.shape)
    starts, limits = (list(e.params[k]) for k in ("start_indices", "limit_indices"))
    start, limit, stride = starts[d], limits[d], strides[d]
    segment = v.shape[d] // v.rows.segments
    if stride == 1 and start % segment == 0 and limit % segment == 0:
        rows = Rows(d, (limit - start) // segment)
        starts[d], limits[d] = start // parts, limit // parts
    elif start < stride and v.rows.segments == 1 and segment // parts % stride == 0:
        if limit <= segment - stride + start:
            return None  # it leaves out the last rows
        rows, limits[d] = v.rows, segment // parts
    else:
        return None
    return [(jax.lax.slice(v.x, starts, limits, strides), rows)]


def pad(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    v, fill = vs
    if v.rows is None or e.params["padding_config"][v.dim] != (0, 0, 0):
        return None
    return [(w.run(e, [v.x, w.whole(fill)]), v.rows)]


def reverse(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    if v.dim in e.params["dimensions"]:
        return None
    return [(w.run(e, [v.x]), v.rows)]


def tile(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    if e.params["reps"][v.dim] != 1:
        return None
    return [(w.run(e, [v.x]), v.rows)]


def dynamic_slice(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    v, *starts = vs
    sizes = list(e.params["slice_sizes"])
    if v.rows is None or sizes[v.dim] != v.shape[v.dim]:
        return None
    sizes[v.dim] //= w.axis.size
    return [(w.run(e, [v.x, *map(w.whole, starts)], slice_sizes=tuple(sizes)), v.rows)]


def dynamic_update_slice(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    v, update, *starts = vs
    rows = v.rows or update.rows
    if update.shape[rows.dim] != v.shape[rows.dim]:
        return None
    xs = [w.part(v, rows), w.part(update, rows), *map(w.whole, starts)]
    return [(w.run(e, xs), rows)]
