"""Gathers and scatters: `logits[arange(n), labels]`, `x[ids]`, `segment_sum`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._passes import jaxprs
from . import factors, held, reductions
from .held import PARTIAL, WHOLE, Results, Rows, Value, can_split, types_of
from .writer import Writer

# What an index may go through and stay the same. For casts there is `_holds`.
_SAME = ("convert_element_type", "squeeze", "copy")


def gather(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """A gather: each row picks numbers of the same row, or of other rows."""
    operand, indices = vs
    if found := _of_operands(w, e, operand, indices):
        return found
    if operand.dim in e.params["dimension_numbers"].collapsed_slice_dims:
        if found := _own(w, e, operand, indices):
            return found
        turned = reductions.pairs_by_columns(w, operand, (operand.dim,))
        if turned and (found := _own(w, e, turned, indices)):
            w.level = max(turned.level, indices.level)
            return found
        if (picked := _picked(w, e, operand, indices)) is not None:
            return [(picked, PARTIAL)]
    return factors.along_rows(w, e, vs)


# Functions, number by number, that make NaN of NaN, which stands for what lies outside.
_BY_NUMBER = ("add", "sub", "mul", "div", "neg", "exp", "log")


def _of_operands(w: Writer, e: core.JaxprEqn, v: Value, indices: Value) -> Results:
    """The function of picked operands, if some of these are known before the value.

    The diagonal of `log_softmax(logits, 0)` so needs that of the logits, which is kept,
    and not all logits once more when the sums over rows are known.
    """
    f, us, _ = v.made or (None, [], 0)
    size = jaxprs.numbers(types_of(e)[0].shape)
    if f is None or f.primitive.name not in _BY_NUMBER or 2 * size > v.size:
        return None
    is_early = any(u.rows and u.params and u.level < v.level for u in us)
    if not v.rows or not is_early or e.params["fill_value"] is not None:
        return None
    xs, layouts = [], set()
    for u in us:
        if not u.shape:
            xs.append(u.x)
            continue
        picked = gather(w, e, [_as_rows(w, u, v), indices])
        if picked is None:
            return None
        xs.append(picked[0][0])
        layouts.add(picked[0][1])
    if len(layouts) > 1 or PARTIAL in layouts:
        return None
    return [(x, layout) for x in w.results(f, xs) for layout in layouts]


def _as_rows(w: Writer, u: Value, like: Value) -> Value:
    """An operand as rows; if it is broadcast, of the type of the result."""
    if u.shape == like.shape:
        return u.with_layout(w.part(u, like.rows), like.rows)
    d, shape = like.dim, held.local_shape(like.shape, like.layout, w.axis.parts)
    x = w.part(u, like.rows) if u.shape[d] == like.shape[d] else w.whole(u)
    x = jnp.broadcast_to(x, shape)
    return u.alone(x, like.rows, u.aval.update(shape=like.shape))


def _own(w: Writer, e: core.JaxprEqn, operand: Value, indices: Value) -> Results:
    """The numbers of each row, if it picks numbers of its own."""
    numbers = e.params["dimension_numbers"]
    if operand.dim in numbers.collapsed_slice_dims:
        own = rows_in_order(w, operand, indices, numbers.start_index_map)
        if own is None or numbers.operand_batching_dims:
            return None
        [d, *_] = _batch(types_of(e)[0], numbers.offset_dims)
        return [(w.run(e, [operand.x, own]), operand.rows.at(d))]
    return factors.along_rows(w, e, [operand, indices])


def reorders(w: Writer, e: core.JaxprEqn, operand: Value, indices: Value) -> bool:
    """True if a whole index takes other rows, as many as there are."""
    numbers, picks = e.params["dimension_numbers"], e.params["slice_sizes"]
    if not operand.rows or not indices.is_whole or numbers.operand_batching_dims:
        return False
    own = operand.dim in numbers.start_index_map and picks[operand.dim] == 1
    as_many = jaxprs.numbers(types_of(e)[0].shape) >= operand.size
    index_map = numbers.start_index_map
    return own and as_many and rows_in_order(w, operand, indices, index_map) is None


def _batch(picked: Any, window: Sequence[int]) -> list[int]:
    """The axes of a result, or of updates, that come from the indices."""
    return [d for d in range(len(picked.shape)) if d not in window]


def _picked(w: Writer, e: core.JaxprEqn, operand: Value, indices: Value) -> Any:
    """The numbers that an index picks of the rows here, or zero: parts of a sum.

    It is None if that sum takes more than the operand: the diagonal of a similarity is
    little beside all of its rows, but rows in another order are not.
    """
    numbers, d, parts = e.params["dimension_numbers"], operand.dim, w.axis.size
    aval: Any = types_of(e)[0]
    if (
        not jaxprs.is_inexact(aval)
        or d not in numbers.start_index_map
        or jaxprs.numbers(aval.shape) * parts > operand.size
    ):
        return None
    at = w.whole(indices)
    at = at.astype(jnp.promote_types(at.dtype, jnp.int32))
    column = list(numbers.start_index_map).index(d)
    asked, modes, mode = at[..., column], jax.lax.GatherScatterMode, e.params["mode"]
    clipped = jnp.clip(asked, 0, operand.shape[d] - 1)
    row = asked if mode == modes.FILL_OR_DROP else clipped
    here, mine = w.place_of(operand, row)
    at, batch = at.at[..., column].set(here), _batch(aval, numbers.offset_dims)
    # Indices of other micro-batches become 0: neither unique nor sorted any more.
    at = jnp.where(mine[..., None], at, 0)
    broken = {"unique_indices": False, "indices_are_sorted": False}
    picked = w.run(e, [operand.x, at], **broken)
    if mode == modes.PROMISE_IN_BOUNDS:
        # XLA clips an index that is out of bounds, and drops the cotangent of it.
        is_out = jax.lax.broadcast_in_dim(asked != clipped, aval.shape, batch)
        picked = jnp.where(is_out, jax.lax.stop_gradient(picked), picked)
    mine = jax.lax.broadcast_in_dim(mine, aval.shape, batch)
    return jnp.where(mine, picked, jnp.zeros_like(picked))


def rows_in_order(
    w: Writer, operand: Value, indices: Value, index_map: tuple[int, ...]
) -> Any:
    """Local indices, if indices into the rows are 0, 1, ..., n - 1; None otherwise.

    An index may repeat, one after the other: 0, 0, 1, 1, ... Then the indices of a
    segment are those of its rows, so a micro-batch counts its own rows.
    """
    rows = operand.rows
    if rows is None or operand.dim not in index_map:
        return None
    if len(indices.shape) < 2:  # the place of one number
        return None
    n, column = operand.shape[operand.dim], list(index_map).index(operand.dim)
    if not indices.shape[0] or indices.shape[0] % n or not _counts(indices, column, n):
        return None
    times = indices.shape[0] // n
    x = w.part(indices, rows.at(0))
    # XLA knows what an iota is, and keeps less for it than for a quotient.
    here = jnp.arange(x.shape[0], dtype=x.dtype)
    here = here // jnp.asarray(times, x.dtype) if times > 1 else here
    here = here.reshape(-1, *[1] * (x.ndim - 2))
    return x.at[..., column].set(jnp.broadcast_to(here, x.shape[:-1]))


def _counts(v: Value, column: int | None, n: int) -> bool:
    """True if an index, or a column of indices, counts n rows along axis 0.

    If that is longer, each row comes equally often, one after the other.
    """
    if v.made is None or not v.shape or v.shape[0] % n or not _holds(v.aval.dtype, n):
        return False
    e, vs, _ = v.made
    name = e.primitive.name
    if v.shape[-1] == 1 and name != "concatenate":
        column = None
    if name == "concatenate":
        is_last = e.params["dimension"] == len(v.shape) - 1 > 0
        if column is None or not is_last or any(u.shape[-1] != 1 for u in vs):
            return False
        return _counts(vs[column], None, n)
    if name == "iota":
        return e.params["dimension"] == 0 and v.shape[0] == n
    if name == "select_n":  # select(i < 0, i, i + n)
        return (
            e.params.get("which") is None and _wraps(vs) and _counts(vs[1], column, n)
        )
    if name == "reshape":
        same = column is None or vs[0].shape[-1:] == v.shape[-1:]
        return same and _counts(vs[0], column, n)
    keeps = name in _SAME
    if name == "broadcast_in_dim":
        axes = e.params["broadcast_dimensions"]
        keeps = axes[:1] == (0,)
        if axes[-1:] != (len(v.shape) - 1,):  # the columns are all alike, and new
            column = None
    return keeps and vs[0].shape[:1] == v.shape[:1] and _counts(vs[0], column, n)


def _holds(dtype: Any, n: Any) -> bool:
    """True if a dtype has all of 0, 1, ..., n - 1, so that a cast keeps them."""
    if not isinstance(n, int):  # left open by `jax.export`
        return np.issubdtype(dtype, np.integer) and np.dtype(dtype).itemsize >= 4
    ends = np.array([0, max(n - 2, 0), n - 1])
    with np.errstate(all="ignore"):
        return np.array_equal(ends.astype(dtype).astype(np.int64), ends)


def _wraps(vs: list[Value]) -> bool:
    """True if a select chooses `i`, unless `i < 0`."""
    made = vs[0].made
    if made is None or made[0].primitive.name != "lt" or made[1][0] is not vs[1]:
        return False
    zero = made[1][1].x
    return not isinstance(zero, jax.core.Tracer) and not np.any(np.asarray(zero))


def scatter(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Updates of each row itself, of some rows, or of what has no rows."""
    for rule in (_scattered_own, _scattered_into, _scattered_over):
        if (found := rule(w, e, vs)) is not None:
            return found
    return None


def _scattered_own(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Each row's updates go to that row, as after `logits[arange(n), labels]`."""
    operand, _, updates = vs
    numbers = e.params["dimension_numbers"]
    batch = _batch(updates, numbers.update_window_dims)
    index_map = numbers.scatter_dims_to_operand_dims
    for d in set(index_map).intersection(numbers.inserted_window_dims):
        due = zip(vs, (d, 0, *batch[:1]), strict=False)
        rows = next((v.rows.at(d) for v, own in due if v.rows and v.dim == own), None)
        if rows and can_split(operand.shape, rows, w.axis.parts):
            x = scatter_wanted(w, e, vs, rows)
            if x is not None:
                return [(x, rows)]
    return None


def scatter_wanted(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The rows of what updates of each row itself make; None of other updates."""
    operand, indices, updates = vs
    numbers = e.params["dimension_numbers"]
    index_map = numbers.scatter_dims_to_operand_dims
    batch = _batch(updates, numbers.update_window_dims)
    is_own = {*index_map}.intersection(numbers.inserted_window_dims)
    if not batch or numbers.operand_batching_dims or rows.dim not in is_own:
        return None
    own = rows_in_order(w, Value(None, operand.aval, rows), indices, index_map)
    if own is None:
        return None
    xs = w.part(operand, rows), own, w.part(updates, rows.at(batch[0]))
    return w.run(e, xs)


# The gradient of numbers that each row picks of its own: `diagonal(logits)`.
WANTED = dict.fromkeys(("scatter", "scatter-add"), scatter_wanted)


def _scattered_into(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Updates of some rows, as by `x.at[0]`: of the rows of this micro-batch."""
    operand, indices, updates = vs
    numbers, d = e.params["dimension_numbers"], operand.dim
    index_map = list(numbers.scatter_dims_to_operand_dims)
    if d not in index_map or d not in numbers.inserted_window_dims:
        return None
    modes, column = jax.lax.GatherScatterMode, index_map.index(d)
    if e.params["mode"] == modes.CLIP:
        return None
    at = w.whole(indices)
    at = at.astype(jnp.promote_types(at.dtype, jnp.int32))
    here, mine = w.place_of(operand, at[..., column])
    # The others come after all rows, each at a place of its own: as unique as before.
    after = jnp.arange(mine.size, dtype=at.dtype).reshape(mine.shape)
    is_here = mine & (here < operand.shape[d])
    row = jnp.where(is_here, here, operand.shape[d] + after)
    xs = operand.x, at.at[..., column].set(row), w.whole(updates)
    broken = {"indices_are_sorted": False}
    x = w.run(e, xs, mode=modes.FILL_OR_DROP, **broken)
    return [(x, operand.rows)]


# -- Updates of what has no rows -------------------------------------------------------


def _scattered_over(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Rows of updates go to places of what has no rows: what each does, put together.

    So rows are sent to the buffers of experts, and counted.
    """
    operand, *others = vs
    name, ways = e.primitive.name, factors.ways_to_split(e)
    along = [
        (v.rows, way.ins[1:])
        for way in ways
        for v, d in zip(others, way.ins[1:], strict=True)
        if v.rows and v.dim == d and way.outs == (None,)
    ]
    if operand.rows or not along:
        return None
    indices, updates = w.parts(others, *along[0])
    if name in ("scatter-add", "scatter-sub"):
        if jaxprs.is_inexact(operand.aval):
            return [(w.run(e, [w.addend(operand), indices, updates]), PARTIAL)]
        new = w.run(e, [jnp.zeros_like(operand.x), indices, updates])
        return [(operand.x + w.sum(new, others), WHOLE)]
    if name != "scatter":
        return None
    return _written(w, e, vs, _Updates(indices, updates, along[0][0]))


class _Updates(NamedTuple):
    """The updates of a micro-batch, where they go, and the rows that they are of."""

    indices: Any
    updates: Any
    rows: Rows


def _written(w: Writer, e: core.JaxprEqn, vs: list[Value], here: _Updates) -> Results:
    """Updates that are written over something: those that stay are added up.

    No place gets more than one then. Where several go to one the last stays, as on
    CPUs; JAX leaves open which. None if to find that out takes more than all updates.
    """
    operand, *others = vs
    numbers, p = e.params["dimension_numbers"], e.params
    is_one = p["unique_indices"] and p["mode"] != jax.lax.GatherScatterMode.CLIP
    is_empty = held.known_number(operand) == 0
    how = {key: p[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
    updates, top = here.updates, None
    if not is_one or not is_empty:
        order, shape = _order(w, e, vs, here)
        if jaxprs.numbers(shape) >= vs[2].size:
            return None  # all updates take no more
        start = jnp.zeros(shape, jnp.int32)
        top = jax.lax.scatter_max(start, here.indices, order, numbers, **how)
        for v in others:
            w.meet(v)
        top = w.axis.extremum(top, True)
        if not is_one:
            stays = _read(top, here.indices, order.shape, e) == order
            updates = jnp.where(stays, updates, jnp.zeros_like(updates))
    dtype = jnp.int32 if updates.dtype == jnp.bool_ else updates.dtype
    start, updates = jnp.zeros(operand.shape, dtype), updates.astype(dtype)
    new = jax.lax.scatter_add(start, here.indices, updates, numbers, **how)
    if is_empty and jaxprs.is_inexact(new):
        return [(new, PARTIAL)]
    new = w.sum(new, others).astype(operand.aval.dtype)
    return [(new if top is None else jnp.where(top > 0, new, operand.x), WHOLE)]


def _order(
    w: Writer, e: core.JaxprEqn, vs: list[Value], here: _Updates
) -> tuple[Any, tuple[int, ...]]:
    """The numbers of updates among all, from 1 on, and the shape of what they go to.

    Along axes of which an update has all, one number stands for all.
    """
    operand, indices, updates = vs
    numbers = e.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(operand.shape)) if d not in gone]
    shape, own = list(operand.shape), list(here.updates.shape)
    for d, at in zip(kept, numbers.update_window_dims, strict=True):
        chosen = d in numbers.scatter_dims_to_operand_dims
        if not chosen and operand.shape[d] == updates.shape[at]:
            shape[d] = own[at] = 1
    order = jnp.zeros([], jnp.int32)
    batch = _batch(updates, numbers.update_window_dims)
    for n, d in zip(indices.shape, batch, strict=False):
        each = jnp.arange(n, dtype=jnp.int32)
        each = each if own[d] == n else w.rows_of(each, here.rows.at(0))
        order = order[..., None] * n + each
    return jax.lax.broadcast_in_dim(order + 1, own, batch), tuple(shape)


def _read(x: Any, indices: Any, shape: tuple[int, ...], e: core.JaxprEqn) -> Any:
    """The numbers of an array at the places where updates go."""
    numbers = e.params["dimension_numbers"]
    window = iter(numbers.update_window_dims)
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = [1 if d in gone else shape[next(window)] for d in range(x.ndim)]
    reverse = jax.lax.GatherDimensionNumbers(
        offset_dims=numbers.update_window_dims,
        collapsed_slice_dims=numbers.inserted_window_dims,
        start_index_map=numbers.scatter_dims_to_operand_dims,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    return jax.lax.gather(x, indices, reverse, sizes, mode=e.params["mode"])
