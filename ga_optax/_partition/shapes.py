"""Primitives that move numbers without changing them: where the rows are afterwards."""

import math
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from ga_optax._partition.values import (
    PARTIAL,
    Parts,
    Results,
    Rows,
    Value,
    local_shape,
    types_of,
    unit,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes.read import is_inexact


def barrier(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    return list(zip(w.run(e, [v.x for v in vs]), (v.layout for v in vs), strict=True))


def reshape(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    v = vs[0]
    shape = types_of(e)[0].shape
    rows = reshaped(v.shape, shape, v.rows, w.axis.parts)
    if rows is None:
        return None
    return [(v.x.reshape(local_shape(shape, rows, w.axis.parts)), rows)]


def reshaped(
    old: tuple[int, ...], new: tuple[int, ...], rows: Rows, parts: Parts
) -> Rows | None:
    """The rows after a reshape: `[before, k, rest]` of the same numbers."""
    before = math.prod(old[: rows.dim]) * rows.segments
    outer, found = 1, None
    for d, size in enumerate(new):
        if outer > before or not size:
            break
        if before % outer == 0 and size % (before // outer * unit(parts)) == 0:
            found = Rows(d, before // outer)  # of one part several fit: the last
        outer *= size
    return found


def reshape_wanted(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    v, shape, parts = vs[0], types_of(e)[0].shape, w.axis.parts
    before = reshaped(shape, v.shape, rows, parts)
    if before is None or reshaped(v.shape, shape, before, parts) != rows:
        return None
    return w.part(v, before).reshape(local_shape(shape, rows, parts))


def tile(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    times = e.params["reps"][v.dim]
    rows = v.rows._replace(segments=v.rows.segments * times)
    return [(w.run(e, [v.x]), rows)]


def dynamic_slice(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """One row, of which the others have zeros."""
    v, *starts = vs
    one_row = v.rows and e.params["slice_sizes"][v.dim] == 1
    if not one_row or not is_inexact(v.aval):
        return None
    xs = [w.whole(start) for start in starts]
    row = jnp.clip(xs[v.dim], 0, v.shape[v.dim] - 1)
    xs[v.dim], mine = w.place_of(v, row)
    x = w.run(e, [v.x, *xs])
    return [(jnp.where(mine, x, jnp.zeros_like(x)), PARTIAL)]
