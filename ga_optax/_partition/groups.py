"""Products that know groups of rows: ragged products, convolutions."""

from typing import Any

import jax.numpy as jnp
from jax.extend import core

from .held import PARTIAL, Results, Value
from .writer import Writer


def ragged_dot(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Products of groups of rows, one after the other, as of tokens sorted by expert.

    A micro-batch has rows of some groups: of each group the rows that it holds.
    """
    left, right, sizes = vs
    numbers = e.params["ragged_dot_dimension_numbers"]
    [ragged], dots = numbers.lhs_ragged_dimensions, numbers.dot_dimension_numbers
    pairs = [pair for axes in dots for pair in zip(*axes, strict=True)]
    back = {b: a for a, b in pairs}
    rows = left.rows or (right.dim in back and right.rows.at(back[right.dim]))
    contracted, batched = dots[0][0], dots[1][0]
    if not rows or ragged in batched or e.params["group_offset"] is not None:
        return None
    of_sizes = w.whole(sizes)
    if rows.dim == ragged:
        if rows.segments > 1:
            return None
        of_sizes = _sizes_here(of_sizes, w.index, left.shape[ragged] // w.axis.size)
    elif len(sizes.shape) > 1:
        if rows.dim not in batched:
            return None
        of_sizes = w.part(sizes, rows.at(list(batched).index(rows.dim)))
    at = dict(pairs).get(rows.dim)
    other = w.whole(right) if at is None else w.part(right, rows.at(at))
    x = w.run(e, [w.part(left, rows), other, of_sizes])
    if rows.dim in contracted:
        return [(x, PARTIAL)]
    groups_first = ragged in contracted  # they are a new dimension
    kept = [d for d in range(len(left.shape)) if d not in (*contracted, *batched)]
    d = [*batched, *kept].index(rows.dim)
    return [(x, rows.at(d + groups_first))]


def _sizes_here(sizes: Any, index: Any, length: int) -> Any:
    """The number of rows of each group that a micro-batch has."""
    first = index.astype(sizes.dtype) * jnp.asarray(length, sizes.dtype)
    ends = jnp.cumsum(sizes, -1, dtype=sizes.dtype)
    here = [jnp.clip(x - first, 0, length) for x in (ends - sizes, ends)]
    return here[1] - here[0]


def convolution(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Rows are images, filters or groups of both, or what is summed over.

    Of a gradient for each row, `jax.vmap` makes a group for each row.
    """
    left, right = vs
    p, numbers = e.params, e.params["dimension_numbers"]
    (images, channels, *_), (filters, summed, *_) = numbers[:2]
    out_images, out_filters = numbers.out_spec[:2]
    features, batches = p["feature_group_count"], p["batch_group_count"]
    groups = features * batches  # one of them is 1
    if left.dim == images and right.is_whole and left.rows.segments % batches == 0:
        rows = left.rows.at(out_images)
        rows = rows._replace(segments=rows.segments // batches)
        return [(w.run(e, [left.x, right.x]), rows)]
    grouped = channels if features > 1 else images
    rows = left.rows if left.dim == grouped else right.rows
    is_axis = left.dim == grouped or right.dim == filters
    if is_axis and groups % (rows.segments * w.axis.size) == 0:
        xs = [w.part(left, rows.at(grouped)), w.part(right, rows.at(filters))]
        names = ("feature_group_count", "batch_group_count")
        fewer = {name: max(1, p[name] // w.axis.size) for name in names}
        return [(w.run(e, xs, **fewer), rows.at(out_filters))]
    if right.dim == filters and right.rows.segments % groups == 0:
        return [(w.run(e, [w.whole(left), right.x]), right.rows.at(out_filters))]
    if features > 1 or (left.dim != channels and right.dim != summed):
        return None
    axes = channels, summed
    rows = next(v.rows for v, d in zip(vs, axes, strict=True) if v.dim == d)
    return [(w.run(e, w.parts(vs, rows, axes)), PARTIAL)]
