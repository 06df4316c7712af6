"""Primitives that move rows: slices, reversals, padding and concatenations.

Each row of the result is a row of an operand, and which one is known beforehand. So
there is a table; a chain of such primitives has one, too: `roll` is a concatenation of
two slices. What a micro-batch holds itself stays there. Of the other rows it gathers
those places in a micro-batch that any other one needs: after a shift by one row, one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Result,
    Rows,
    Value,
    can_split,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes.ir import is_inexact


class Table(NamedTuple):
    """Where the rows of a result are from.

    Attributes:
      sources: values that have the same shape but for the number of rows.
      which: for each row, the number of its source.
      row: for each row, the number that it has there.
    """

    sources: list[Value]
    which: np.ndarray
    row: np.ndarray


def move(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result] | None:
    """`slice`, `rev` and `pad`: along other axes first, then along that of the rows."""
    v, *fill = vs
    d, axes = v.dim, _axes(e, v.shape)
    if d is None:
        return None
    if axes != [d]:
        local = _along_others(e, d, v.x.shape[d])
        x = w.run(e, [v.x, *map(w.whole, fill)], **local)
        if d not in axes:
            return [(x, v.rows)]
        shape = (*x.shape[:d], v.shape[d], *x.shape[d + 1 :])
        aval = jax.ShapeDtypeStruct(shape, x.dtype)
        v = dataclasses.replace(v, x=x, aval=aval, made=None, copies={})
    return _moved(w, e, [v, *fill], d)


def join(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    """`concatenate` and `split`: along the one axis that they have."""
    [d] = _axes(e, vs[0].shape)
    return _moved(w, e, vs, d)


def _moved(w: Writer, e: core.JaxprEqn, vs: list[Value], d: int) -> list[Result]:
    """The results of an equation, whose rows move along axis `d`."""
    tables = [_table(w, e, vs, d, i) for i in range(len(e.outvars))]
    return [_picked(w, _composed(w, x, d), d) for x in tables]


# -- What an equation does along an axis -----------------------------------------------


def _axes(e: core.JaxprEqn, shape: tuple[int, ...]) -> list[int]:
    """The axes along which an equation moves numbers; none if it is of another kind."""
    name, p = e.primitive.name, e.params
    if name in ("concatenate", "split"):
        return [p["dimension" if name == "concatenate" else "axis"]]
    if name == "rev":
        return sorted(p["dimensions"])
    if name == "pad":
        return [i for i, x in enumerate(p["padding_config"]) if tuple(x) != (0, 0, 0)]
    if name == "slice":
        strides = p["strides"] or (1,) * len(shape)
        cut = zip(p["start_indices"], p["limit_indices"], strides, shape, strict=True)
        return [i for i, (*cut, n) in enumerate(cut) if cut != [0, n, 1]]
    return []


def _along_others(e: core.JaxprEqn, d: int, n: int) -> dict[str, Any]:
    """The parameters of the same equation with nothing along `d`, of length `n`."""
    name, p = e.primitive.name, e.params

    def at(key: str, new: Any) -> tuple[Any, ...]:
        return (*p[key][:d], new, *p[key][d + 1 :])

    if name == "rev":
        return {"dimensions": tuple(i for i in p["dimensions"] if i != d)}
    if name == "pad":
        return {"padding_config": at("padding_config", (0, 0, 0))}
    strides = p["strides"] and at("strides", 1)
    cut = {"start_indices": at("start_indices", 0), "strides": strides}
    return {"limit_indices": at("limit_indices", n), **cut}


def _table(w: Writer, e: core.JaxprEqn, vs: list[Value], d: int, i: int) -> Table:
    """Where the rows of result `i` of an equation are from."""
    name, p = e.primitive.name, e.params
    n = vs[0].shape[d]
    if name == "concatenate":
        return _joined([(v, np.arange(v.shape[d])) for v in vs])
    if name == "rev":
        return _joined([(vs[0], np.arange(n)[::-1])])
    if name == "split":
        start = sum(p["sizes"][:i])
        return _joined([(vs[0], np.arange(start, start + p["sizes"][i]))])
    if name == "slice":
        stride = p["strides"][d] if p["strides"] else 1
        rows = np.arange(p["start_indices"][d], p["limit_indices"][d], stride)
        return _joined([(vs[0], rows)])
    row = _padded(n, *p["padding_config"][d])
    one = (*vs[0].shape[:d], 1, *vs[0].shape[d + 1 :])
    fill = jnp.broadcast_to(w.whole(vs[1]), one)
    filler = dataclasses.replace(vs[1], x=fill, layout=WHOLE, made=None, copies={})
    filler.aval = jax.ShapeDtypeStruct(one, fill.dtype)
    return Table([vs[0], filler], (row < 0).astype(int), np.maximum(row, 0))


def _padded(n: int, low: int, high: int, interior: int) -> np.ndarray:
    """For each row after padding, its number before that; -1 for a new one."""
    rows = np.full(n + max(n - 1, 0) * interior, -1)
    rows[:: interior + 1] = np.arange(n)
    rows = np.pad(rows, (max(low, 0), max(high, 0)), constant_values=-1)
    return rows[max(-low, 0) : len(rows) - max(-high, 0)]


def _joined(pieces: list[tuple[Value, np.ndarray]]) -> Table:
    which = [np.full(len(rows), i) for i, (_, rows) in enumerate(pieces)]
    rows = np.concatenate([rows for _, rows in pieces])
    return Table([v for v, _ in pieces], np.concatenate(which), rows)


def _composed(w: Writer, table: Table, d: int) -> Table:
    """The same rows, from sources that no such equation has made."""
    sources: list[Value] = []
    which, row = np.zeros_like(table.which), table.row.copy()
    for i, v in enumerate(table.sources):
        here = table.which == i
        inner = _made(w, v, d) or Table([v], np.zeros(v.shape[d], int), row)
        for u in inner.sources:
            if not any(u is s for s in sources):
                sources.append(u)
        places = [[u is s for s in sources].index(True) for u in inner.sources]
        which[here] = np.array(places)[inner.which[table.row[here]]]
        if inner.sources != [v]:
            row[here] = inner.row[table.row[here]]
    used = np.unique(which) if len(which) else np.zeros(1, int)  # no rows, but a type
    return Table([sources[i] for i in used], np.searchsorted(used, which), row)


def _made(w: Writer, v: Value, d: int) -> Table | None:
    """How such an equation has made a value from rows; the value remembers it."""
    if v.made is None or not any(u.rows for u in v.made[1]):
        return None
    e, vs, i = v.made
    if d not in v.origins:
        moves_rows = _axes(e, vs[0].shape) == [d]
        table = _composed(w, _table(w, e, vs, d, i), d) if moves_rows else None
        v.origins[d] = table
    return v.origins[d]


# -- What a micro-batch has of them ----------------------------------------------------


def _picked(w: Writer, table: Table, d: int) -> Result:
    """A micro-batch's rows of the result; all of them if they are few."""
    w.level = max(v.level for v in table.sources)
    n, k = len(table.row), w.axis.size
    if n < max(k, 2):  # a single row is nobody's, even of one micro-batch
        return _few(w, table, d)
    lengths = {v.shape[d] // v.rows.segments for v in table.sources if v.dim == d}
    fit = [Rows(d, n // m) for m in sorted(lengths) if n % m == 0]
    choices = [Rows(d, 1, -n % k), *fit]
    shape = (1,) * d + (n,)
    orders = {x: _order(n, x, k) for x in choices if can_split(shape, x, k)}
    own = np.arange(k)[:, None]

    def cost(rows: Rows) -> int:
        return sum(map(len, _needed(w, table, d, orders[rows], own)))

    rows = min(orders, key=cost)
    pool, places = _pool(w, table, d, orders[rows], own)
    return _taken(w, pool, places, d), rows


def _order(n: int, rows: Rows, k: int) -> np.ndarray:
    """The numbers of the rows that each micro-batch holds, `[k, n / k]`."""
    every = np.minimum(np.arange(n + rows.extra), n - 1)
    return every.reshape(rows.segments, k, -1).swapaxes(0, 1).reshape(k, -1)


def _place(v: Value, k: int, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which micro-batches hold rows, and where they have them."""
    length = (v.shape[v.dim] + v.rows.extra) // v.rows.segments
    segment, within = np.divmod(row, length)
    owner, rest = np.divmod(within, length // k)
    return owner, segment * (length // k) + rest


def _needed(
    w: Writer, table: Table, d: int, order: np.ndarray, own: np.ndarray
) -> list[np.ndarray]:
    """The places in a micro-batch that another one needs, of each source."""
    which, row = table.which[order], table.row[order]
    found = []
    for i, v in enumerate(table.sources):
        away = np.array([], int)
        if v.dim == d:
            owner, place = _place(v, w.axis.size, row)
            away = np.unique(place[(which == i) & (owner != own)])
        found.append(away)
    return found


def _pool(
    w: Writer, table: Table, d: int, order: np.ndarray, own: np.ndarray
) -> tuple[Any, np.ndarray]:
    """An array with all rows that a micro-batch may need, and where they are in it."""
    arrays: list[Any] = []
    which, row = table.which[order], table.row[order]
    places, needed = np.zeros_like(row), _needed(w, table, d, order, own)
    for i, (v, away) in enumerate(zip(table.sources, needed, strict=True)):
        start, at = sum(x.shape[d] for x in arrays), row
        # Two slices that need most of the rows share all of them.
        if v.dim != d or 2 * len(away) > v.x.shape[d]:
            arrays.append(w.whole(v))
        else:
            owner, at = _place(v, w.axis.size, np.where(which == i, row, 0))
            arrays.append(v.x)
            if len(away):
                arrays.append(_gathered(w, v, away, d))
                theirs = owner * len(away) + np.searchsorted(away, at)
                at = np.where(owner == own, at, theirs + v.x.shape[d])
        places = np.where(which == i, at + start, places)
    return jax.lax.concatenate(arrays, d) if len(arrays) > 1 else arrays[0], places


def _gathered(w: Writer, v: Value, places: np.ndarray, d: int) -> Any:
    """The rows at some places of every micro-batch."""
    w.level = max(w.level, v.level + v.params)
    return w.joined(Value(_at(v.x, places, d), v.aval, Rows(d)))


def _taken(w: Writer, pool: Any, places: np.ndarray, d: int) -> Any:
    """The rows of an array at a micro-batch's places."""
    if (places == places[0]).all():
        return _at(pool, places[0], d)
    if (np.diff(places, axis=1) == 1).all():
        start = jnp.asarray(places[:, 0], jnp.int32)[w.index]
        return jax.lax.dynamic_slice_in_dim(pool, start, places.shape[1], d)
    return _at(pool, jnp.asarray(places, jnp.int32)[w.index], d)


def _at(x: Any, places: Any, d: int) -> Any:
    """Rows at some places; a slice if they are evenly spaced."""
    if isinstance(places, np.ndarray) and len(places):
        step = places[1] - places[0] if len(places) > 1 else 1
        if step < 0 and (np.diff(places) == step).all():
            return jax.lax.rev(_at(x, places[::-1], d), (d,))
        if step > 0 and (np.diff(places) == step).all():
            return jax.lax.slice_in_dim(x, places[0], places[-1] + 1, step, d)
    return x.at[(slice(None),) * d + (places,)].get(mode="promise_in_bounds")


def _few(w: Writer, table: Table, d: int) -> Result:
    """Fewer rows than micro-batches: all of them, from those that have them."""
    v, row = table.sources[0], table.row
    if len(table.sources) == 1 and v.dim == d and is_inexact(v.aval):
        owner, place = _place(v, w.axis.size, row)
        where = [1] * d + [-1] + [1] * (len(v.shape) - d - 1)
        is_own = (jnp.asarray(owner, jnp.int32) == w.index).reshape(where)
        x = _at(v.x, place, d)
        return jnp.where(is_own, x, jnp.zeros_like(x)), PARTIAL
    pool, places = _pool(w, table, d, np.arange(len(row))[None], np.array([[-1]]))
    return _at(pool, places[0], d), WHOLE
