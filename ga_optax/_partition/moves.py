"""Moves of rows: slices, reversals, padding, concatenations, reshapes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._passes.jaxprs import is_inexact
from .._passes.primitives import entry_of
from . import factors, held
from .held import PARTIAL, WHOLE, Parts, Results, Rows, Value, can_split, types_of
from .writer import Writer

# == Shapes ============================================================================


def reshape(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    v = vs[0]
    shape = held.types_of(e)[0].shape
    rows = reshaped(v.shape, shape, v.rows, w.axis.parts)
    if rows is None:
        return None
    return [(v.x.reshape(held.local_shape(shape, rows, w.axis.parts)), rows)]


def reshaped(
    old: tuple[int, ...], new: tuple[int, ...], rows: Rows, parts: Parts
) -> Rows | None:
    """The rows after a reshape: `[before, k, rest]` of the same numbers."""
    before = math.prod(old[: rows.dim]) * rows.segments
    outer, found = 1, None
    for d, size in enumerate(new):
        if outer > before or not size:
            break
        if before % outer == 0 and size % (before // outer * held.unit(parts)) == 0:
            found = Rows(d, before // outer)  # of one part several fit: the last
        outer *= size
    return found


def reshape_wanted(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    v, shape, parts = vs[0], held.types_of(e)[0].shape, w.axis.parts
    before = reshaped(shape, v.shape, rows, parts)
    if before is None or reshaped(v.shape, shape, before, parts) != rows:
        return None
    return w.part(v, before).reshape(held.local_shape(shape, rows, parts))


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


# == Moves of rows =====================================================================
# Primitives that move rows: slices, reversals, padding and concatenations.
#
# Each row of the result is a row of an operand, and which one is known beforehand. If a
# micro-batch holds all of its rows itself, as after `concatenate([x, y])[:n]`, they
# stay where they are. A few rows are a sum over micro-batches, of which one has each.
# For all else, such as a shift, the rows before all moves are gathered, and a
# micro-batch picks its own of what they become if k divides these.


def move(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """The results of an equation that moves rows; None if no operand had rows."""
    origin = next(filter(None, (v.origin for v in vs)), None)
    if origin is None or not isinstance(origin[1], int):  # left open by `jax.export`
        return None
    if any(v.rows for v in vs) and (found := _here(w, e, vs, *origin)):
        return found
    d, types = origin[0], types_of(e)
    splits = [next(reversed(_splits(w, x.shape[d], *origin)), None) for x in types]
    picked = [
        _picked(w, _source_of_result(e, vs, d, i), d, rows)
        for i, rows in enumerate(splits)
    ]
    if all(picked):
        return picked
    whole = [x for x, _ in w.all_whole(e, vs)]
    return [
        (w.rows_of(x, rows), rows) if rows else (x, WHOLE)
        for x, rows in zip(whole, splits, strict=True)
    ]


# -- Out of all rows of one value ------------------------------------------------------

# A value, and for each row of the result the number of that row in the value, whose
# number of rows stands for padding.
Source = tuple[Value, np.ndarray]


def _source(v: Value, d: int) -> Source | None:
    """The source of the rows of a value along a dimension; None if it has several."""
    if v.made is None or not entry_of(v.made[0]).shifts:
        return v, np.arange(v.shape[d])
    if d not in v.sources:  # A roll reads what it moves twice.
        e, vs, i = v.made
        v.sources[d] = _source_of_result(e, vs, d, i)
    return v.sources[d]


def _source_of_result(
    e: core.JaxprEqn, vs: list[Value], d: int, i: int
) -> Source | None:
    """The source of the i-th result of an equation.

    None if the equation moves numbers along another axis too, or pads with anything
    but 0.
    """
    name, moving, by = e.primitive.name, [v for v in vs if v.shape and v.shape[d]], 0
    if name == "pad":
        moving, by = vs[:1], held.known_number(vs[1])
    kept = {way.outs[i] for way in factors.ways_to_split(e)}  # axes that stay
    stays = kept.issuperset({*range(len(vs[0].shape))} - {d})
    if by != 0 or not stays or not moving:
        return None
    found: list[Any] = [_source(v, d) for v in moving]
    if None in found or len({id(x[0]) for x in found}) > 1:
        return None
    (v, _), numbers = found[0], np.concatenate([x for _, x in found])
    if name == "pad":
        low, _, between = e.params["padding_config"][d]
        places, old = low + np.arange(len(numbers)) * (between + 1), numbers
        numbers = np.full(types_of(e)[i].shape[d], v.shape[d])
        inside = (places >= 0) & (places < len(numbers))
        numbers[places[inside]] = old[inside]
    else:
        numbers = numbers[_numbers(e, d, len(numbers))[i]]
    return v, numbers


def _picked(w: Writer, source: Source | None, d: int, rows: Rows | None) -> Any:
    """This micro-batch's rows of a result; None if they come from more than one value.

    The whole result and its cotangent are never computed, beside those of the value.
    """
    if source is None or rows is None:
        return None
    v, numbers = source
    table = numbers[_order(len(numbers), rows, w.axis.size)].astype(np.int32)
    at = jax.lax.dynamic_index_in_dim(jnp.asarray(table), w.index, keepdims=False)
    pads = (table == v.shape[d]).any()
    how = {"mode": "fill", "fill_value": 0} if pads else {"mode": "promise_in_bounds"}
    return w.whole(v).at[(slice(None),) * d + (at,)].get(**how), rows


# -- Out of the rows of a micro-batch --------------------------------------------------


# The rows of all operands, one after the other, as micro-batches hold them: those here;
# for each row the micro-batch that holds it; and its place among those there.
_Held = tuple[Any, np.ndarray, np.ndarray]


def _of_held(w: Writer, every: _Held, numbers: np.ndarray, d: int, length: int) -> Any:
    """A result that has these rows, if each micro-batch has its own, or few are."""
    (x, owners, places), n, k = every, len(numbers), w.axis.size
    if n < max(k, 2) and is_inexact(x):
        few, shape = _at(x, places[numbers], d), [1] * x.ndim
        shape[d] = n
        owner = jnp.asarray(owners[numbers], jnp.int32).reshape(shape)
        return jnp.where(owner == w.index, few, jnp.zeros_like(few)), PARTIAL
    for rows in _splits(w, n, d, length):
        order = numbers[_order(n, rows, k)]
        is_here, place = owners[order] == np.arange(k)[:, None], places[order]
        if is_here.all() and (place == place[0]).all():
            return _at(x, place[0], d), rows
    return None


def _splits(w: Writer, n: int, d: int, length: int) -> list[Rows]:
    """The layouts of `n` rows: neighbours together, or segments of such a length."""
    some = [Rows(d), *([Rows(d, n // length)] if n % length == 0 else [])]
    shape = (1,) * d + (n,)
    # One row is never split, not even by one micro-batch.
    return [rows for rows in some if n > 1 and can_split(shape, rows, w.axis.parts)]


def _here(w: Writer, e: core.JaxprEqn, vs: list[Value], d: int, length: int) -> Results:
    """The results, if each is made of rows that micro-batches hold themselves."""
    if e.primitive.name == "pad" or any(v.rows and v.dim != d for v in vs):
        return None
    orders, xs, start = [], [], 0
    for v in vs:
        if n := v.shape[d]:
            # An operand without rows may be split like those that have some.
            rows = v.rows or next(reversed(_splits(w, n, d, length)), None)
            if rows is None:
                return None
            orders.append(start + _order(n, rows, w.axis.size))
            xs.append(w.part(v, rows))
            start += n
    order = np.concatenate(orders, 1)  # the numbers of the rows of each micro-batch
    owner, place = np.divmod(order.argsort(None), order.shape[1])
    x = jax.lax.concatenate(xs, d) if len(xs) > 1 else _along_others(w, e, xs[0], d)
    mine = x, owner, place
    out = [_of_held(w, mine, numbers, d, length) for numbers in _numbers(e, d, start)]
    return out if all(out) else None


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
    """The array, moved along all axes but `d` as the equation says."""
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
