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
    v, other = vs[side], vs[1 - side]
    rows = v.rows.at(contracted[1 - side][list(contracted[side]).index(v.dim)])
    other = dataclasses.replace(other, x=w.part(other, rows), layout=rows)
    xs = [w.filled(v, 0)] * 2
    xs[1 - side] = w.filled(other, 0)
    return [(w.run(e, xs), PARTIAL)]


def convolution(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    left, right = vs
    numbers, p = e.params["dimension_numbers"], e.params
    if p["batch_group_count"] != 1:
        return None
    if right.is_whole and left.dim == numbers.lhs_spec[0]:
        return [(w.run(e, [left.x, right.x]), left.rows.at(numbers.out_spec[0]))]
    over = left.dim == numbers.lhs_spec[1] and right.dim == numbers.rhs_spec[1]
    same = left.rows and right.rows and left.rows.segments == right.rows.segments
    if (
        over and same and not left.extra and p["feature_group_count"] == 1
    ):  # the gradient of a kernel
        return [(w.run(e, [left.x, right.x]), PARTIAL)]
    return None


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
