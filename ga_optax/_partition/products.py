"""Products: those over rows are sums over micro-batches."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from ga_optax._partition.values import PARTIAL, Result, Rows, Value
from ga_optax._partition.writer import Writer

Results = list[Result] | None


def place(side: int, d: int, numbers: Any, ranks: Sequence[int]) -> int:
    """The axis of the result of a product that is axis `d` of one of its factors."""
    contracted, batched = numbers
    if d in batched[side]:
        return list(batched[side]).index(d)
    gone = (*contracted[side], *batched[side])
    rest = [i for i in range(ranks[side]) if i not in gone]
    start = len(batched[0])
    if side:
        start += ranks[0] - len(contracted[0]) - len(batched[0])
    return start + rest.index(d)


def dot_general(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    numbers = e.params["dimension_numbers"]
    contracted, batched = numbers
    ranks = [len(v.shape) for v in vs]
    for side, v in enumerate(vs):  # one product for each row
        if v.rows and v.dim in batched[side]:
            i = list(batched[side]).index(v.dim)
            rows = v.rows.at(batched[1 - side][i])
            xs = [v.x, v.x]
            xs[1 - side] = w.part(vs[1 - side], rows)
            return [(w.run(e, xs), v.rows.at(i))]
    free = [
        side for side, v in enumerate(vs) if v.rows and v.dim not in contracted[side]
    ]
    if free:
        side = max(free, key=lambda side: (vs[side].size, -side))
        xs = [w.whole(v) if i != side else v.x for i, v in enumerate(vs)]
        at = place(side, vs[side].dim, numbers, ranks)
        return [(w.run(e, xs), vs[side].rows.at(at))]
    side = 0 if vs[0].rows else 1
    i = list(contracted[side]).index(vs[side].dim)
    axes = [of_side[i] for of_side in contracted]
    return [(w.run(e, _split(w, vs, axes)), PARTIAL)]


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
    return [(w.run(e, _split(w, vs, (channels, summed))), PARTIAL)]


def _split(w: Writer, vs: list[Value], axes: Sequence[int]) -> list[Any]:
    """Both factors' rows, along what is summed over; zeros beyond the last."""
    rows = next(v.rows for v, d in zip(vs, axes, strict=True) if v.dim == d)
    parts = (w.part(v, rows.at(d)) for v, d in zip(vs, axes, strict=True))
    return [
        w.filled(dataclasses.replace(v, x=x, layout=rows.at(d)), 0)
        for v, x, d in zip(vs, parts, axes, strict=True)
    ]


def recut_dot(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The rows of a product along another axis of its result, or None."""
    numbers = e.params["dimension_numbers"]
    ranks = [len(v.shape) for v in vs]
    for side, v in enumerate(vs):
        for d in range(ranks[side]):
            if d in numbers[0][side] or place(side, d, numbers, ranks) != rows.dim:
                continue
            if d in numbers[1][side]:
                d0, d1 = (list(numbers[1][i])[rows.dim] for i in (0, 1))
                return w.run(
                    e, [w.part(vs[0], rows.at(d0)), w.part(vs[1], rows.at(d1))]
                )
            if v.layout != rows.at(d):
                return None  # to split the columns of a matrix is another thing
            xs = [w.part(v, rows.at(d))] * 2
            xs[1 - side] = w.whole(vs[1 - side])
            return w.run(e, xs)
    return None


def batched(num_core: int) -> Any:
    """A rule for what works on the last axes alone, such as a decomposition."""

    def rule(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
        v = max((v for v in vs if v.rows), key=lambda v: len(v.shape))
        if v.dim >= len(v.shape) - num_core:
            return None
        xs = [w.part(u, v.rows) for u in vs]
        return [(x, v.rows) for x in w.results(e, xs)]

    return rule


def triangular_solve(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """For each row a system, or a right side."""
    matrix, side = vs
    rank = len(side.shape)
    if matrix.is_whole and side.dim == rank - (1 if e.params["left_side"] else 2):
        return [(w.run(e, [matrix.x, side.x]), side.rows)]
    return batched(2)(w, e, vs)


def fourier(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    return batched(len(e.params["fft_lengths"]))(w, e, vs)
