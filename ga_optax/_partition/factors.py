"""Rules by factors: dimensions that operands and results share.

    along_rows  rows along a factor of an operand are rows of each result that has it
    into_sums   if no result has it: each micro-batch has a part of a sum
    from_rows   rows of a result, from the rows of the operands that have its factor

The table of primitives names the factors (`_passes.primitives`). Sums that wait pass
through equations that are linear by its row, see `linear`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core

from .._passes import primitives
from . import held
from .held import PARTIAL, WHOLE, Layout, Results, Rows, Value
from .writer import Rule, Writer


def ways_to_split(e: core.JaxprEqn) -> list[primitives.Factor]:
    """The ways to split an equation, by the row of the primitive."""
    return primitives.factors_of(primitives.entry_of(e), e)


def chosen_way(
    vs: Sequence[Value], some: Callable[[Rows], Iterable[primitives.Factor]]
) -> tuple[Rows, primitives.Factor] | None:
    """The rows of an operand, and the way along them that gathers least.

    `some` returns the ways to split along rows.
    """
    found = [
        (v.rows, way, v.size)
        for i, v in enumerate(vs)
        if v.rows
        for way in some(v.rows)
        if way.ins[i] == v.dim
    ]

    def gathered(x: tuple[Rows, primitives.Factor, int]) -> tuple[int, int]:
        due = zip(vs, operand_layouts(x[0], x[1].ins), strict=True)
        moved = (u.size for u, layout in due if u.layout not in (WHOLE, layout))
        return sum(moved), -x[2]

    if not found:
        return None
    rows, way, _ = min(found, key=gathered) if len(found) > 1 else found[0]
    return rows, way


def operand_layouts(rows: Rows, dims: primitives.Axes) -> list[Layout]:
    """The layouts of operands that have rows along a dimension, or are whole."""
    return [WHOLE if d is None else rows.at(d) for d in dims]


def along_rows(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Rows of results, from rows of operands; None if there are none."""
    kept = [way for way in ways_to_split(e) if None not in way.outs]
    if (found := chosen_way(vs, lambda _: kept)) is None:
        return None
    rows, way = found
    out = along_factor(w, e, vs, rows, way)
    return list(zip(out, operand_layouts(rows, way.outs), strict=True))


def into_sums(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Parts of sums over rows."""
    sums = [way for way in ways_to_split(e) if set(way.outs) == {None}]
    if (found := chosen_way(vs, lambda _: sums)) is None:
        return None
    rows, way = found
    return [(x, PARTIAL) for x in w.results(e, w.parts(vs, rows, way.ins))]


@functools.cache
def before_factors(rule: Rule) -> Rule:
    """A rule for rows that do not stay rows by the row of the primitive."""

    def both(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
        return along_rows(w, e, vs) or rule(w, e, vs)

    return both


def from_rows(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The rows of the one result; None if they need more than rows of the operands."""
    if len(e.outvars) > 1:
        return None
    way = next((x for x in ways_to_split(e) if x.outs == (rows.dim,)), None)
    return None if way is None else along_factor(w, e, vs, rows, way)[0]


def along_factor(
    w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows, way: primitives.Factor
) -> list[Any]:
    """The results of a micro-batch's part along a factor."""
    xs = w.parts(vs, rows, way.ins)
    if w.is_compared(e, vs[0]):
        return [w.extremum(e, xs[0])]
    if not (key := primitives.entry_of(e).shape):
        return w.results(e, xs)
    shape, of, [d] = list(e.params[key]), held.types_of(e)[0].shape, way.outs
    assert d is not None
    place = d if key == "shape" else way.ins[0]
    if place is not None and shape[place] == of[d]:
        shape[place] = held.length_of(of[d], w.axis.parts)
    return w.results(e, xs, **{key: tuple(shape)})
