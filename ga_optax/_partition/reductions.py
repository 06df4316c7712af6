"""Reductions where rows meet: sums, extrema, places of extrema, running sums."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from .._passes import primitives
from .._passes.jaxprs import is_inexact
from . import extrema, held, shifted
from .factors import along_factor, along_rows, into_sums, operand_layouts, ways_to_split
from .held import PARTIAL, WHOLE, Results, Rows, Value
from .writer import Writer

# == Reductions ========================================================================


def compared(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Compares values that may be computed in different passes.

    Computed again, a value may round otherwise, and no row would equal an extremum of
    the rows. A comparison with the extremum of the operand itself, as in JAX's
    derivative of a maximum, says for each micro-batch whether it attains the extremum,
    and compares only within the micro-batch. The operand of another comparison whose
    other operand is known only later is stored.
    """
    forbidden = w.scope.forbids_collectives
    if found := None if forbidden else _own_extremum(e, vs):
        v, extremum = found
        w.meet(v)
        return [(_attaining_all(w, extremum, v.x), v.layout)]
    last = max(v.level for v in vs)
    # Levels are counted from the parameters, and any function may have none.
    later = not any(v.params for v in vs) and any(map(held.is_of_rows, vs))
    for v in vs:
        behind = v.level < last if v.params else later and v.made is not None
        if behind and v.rows and is_inexact(v.aval) and not forbidden:
            v.x = checkpoint_name(v.x, w.axis.name)
    return along_rows(w, e, vs)


def _own_extremum(
    e: core.JaxprEqn, vs: list[Value]
) -> tuple[Value, core.JaxprEqn] | None:
    """The operand of `eq` whose extremum over all rows is the other operand.

    Each row must be compared with the extremum along the axes over which it was taken.
    """
    if e.primitive.name != "eq":
        return None
    for v, other in (vs, vs[::-1]):
        found, axes = held.unmoved(other)
        if found.made is None or found.made[0].primitive.name not in extrema.EXTREMA:
            continue
        extremum, [of], _ = found.made
        # Another value may be the same numbers here: those of other rows.
        is_own = of.x is v.x and (of.shape, of.layout) == (v.shape, v.layout)
        is_own &= v.dim in extremum.params["axes"] and found.is_whole
        if is_own and shifted.is_along(extremum, of, axes) and is_inexact(v.aval):
            return v, extremum
    return None


def _attaining_all(w: Writer, e: core.JaxprEqn, x: Any) -> Any:
    """Marks the rows of a micro-batch that attain the extremum of all rows."""
    axes, is_max = tuple(e.params["axes"]), e.primitive.name == "reduce_max"
    x = jax.lax.stop_gradient(x)
    # Stored: computed again, it might round otherwise as well.
    here = checkpoint_name(w.run(e, [x]), w.axis.name)
    mine = here == w.axis.extremum(here, is_max)
    return extrema.attaining(is_max, axes, x, here) & jnp.expand_dims(mine, axes)


def reduce_(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    name = e.primitive.name
    if turned := pairs_by_columns(w, v, tuple(e.params["axes"])):
        w.level = turned.level
        return along_rows(w, e, [turned])
    if name == "reduce_sum":
        part = shifted.sum_of_shifted(w, e, v)
        return into_sums(w, e, vs) if part is None else [(part, PARTIAL)]
    if name in extrema.EXTREMA:
        return [(_extremum(w, e, v), WHOLE)]
    here = w.run(e, [v.x])
    parts = w.gather(here, v)
    return [(w.run(e, [parts], axes=(0,)), WHOLE)]


def _extremum(w: Writer, e: core.JaxprEqn, v: Value) -> Any:
    """The largest or the smallest of all rows.

    Its derivative is JAX's: equal parts for all that attain it. So what each micro-
    batch found is kept, and how many attain it there. Comparing once more with the
    extremum would not do: values that are computed again may round otherwise. For that
    reason they are computed once for both, and not fused with either.
    """
    is_max = e.primitive.name == "reduce_max"
    if not w.is_compared(e, v):
        w.meet(v)
        here = jax.lax.stop_gradient(w.run(e, [v.x]))
        as_int = here.astype(jnp.int32) if here.dtype == jnp.bool_ else here
        return w.axis.extremum(as_int, is_max).astype(here.dtype)
    x, axes = jax.lax.optimization_barrier(v.x), tuple(e.params["axes"])
    here = extrema.extremum_here(is_max, axes, x)
    attain = extrema.attaining(is_max, axes, *map(jax.lax.stop_gradient, (x, here)))
    count = jnp.sum(attain, axes, dtype=here.dtype)
    found, counts = w.gather(here, v), w.gather(jax.lax.stop_gradient(count))
    return extrema.of_parts(is_max, found, counts)


def place_of_extremum(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """`argmax` and `argmin`: the first micro-batch that attains it says where."""
    [v] = vs
    if v.rows.segments > 1:
        return None
    [axis], x = e.params["axes"], jax.lax.stop_gradient(v.x)
    at = w.run(e, [x])
    best = jnp.take_along_axis(x, jnp.expand_dims(at, axis), axis).squeeze(axis)
    first = held.start_of(v.shape[axis], w.index, w.axis.parts).astype(at.dtype)
    places, values = w.gather(at + first, v), w.gather(best, v)
    which = w.run(e, [values], axes=(0,))
    return [(jnp.take_along_axis(places, which[None], 0)[0], WHOLE)]


def cumulative(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Sums from the first row on: local sums, plus the totals of earlier rows."""
    [v] = vs
    axis, reverse = e.params["axis"], e.params["reverse"]
    if v.rows.segments > 1:
        return None
    here = w.run(e, [v.x])
    edge = 0 if reverse else here.shape[axis] - 1
    total = jax.lax.index_in_dim(here, edge, axis, keepdims=True)
    totals = w.gather(total, v)
    places = jnp.arange(len(totals), dtype=w.index.dtype)
    places = places.reshape(-1, *[1] * here.ndim)
    is_before = places > w.index if reverse else places < w.index
    before = jnp.where(is_before, totals, jnp.zeros_like(totals))
    return [(here + before.sum(0, dtype=here.dtype), v.rows)]


# == Columns ===========================================================================
# Functions of pairs of rows, such as products of rows with rows, split along columns.
#
#     logits = images @ texts.T;  log_softmax(logits, 1);  log_softmax(logits, 0)
#
# A product of rows with rows can be split along its columns instead: all rows of one
# factor are needed here anyway; with the rows of the other factor each column is
# complete, and a reduction over rows needs no collective.

# By a value and rows of it: the equation, operands and factor that compute these; None
# if they are here already, or are gathered.
Steps = dict[tuple[Value, Rows], Any]


def pairs_by_columns(w: Writer, v: Value, gone: tuple[int, ...]) -> Value | None:
    """A function of pairs of rows, split along an axis that a reduction leaves.

    It is None unless it is computed of such rows that are here already, and of others
    that have fewer numbers than it has itself. The reduction takes the axes `gone`.
    """
    if not v.params:
        return None
    for rows in map(Rows, range(len(v.shape))):
        if rows.dim not in gone and (turned := turned_to(w, v, rows)) is not None:
            x, level = turned
            return dataclasses.replace(v.with_layout(x, rows), level=level)
    return None


def turned_to(w: Writer, v: Value, rows: Rows) -> tuple[Any, int] | None:
    """Such a function with the rows of another axis, and its level; or None."""
    stays = v.dim is None or v.dim == rows.dim
    if w.scope.forbids_collectives or stays or not w.axis.turns:
        return None
    fits = held.can_split(v.shape, rows, w.axis.parts)
    steps = _steps(v, rows) if fits else {}
    if not any(_is_here(u, its) for u, its in steps):
        return None
    for (u, its), step in steps.items():
        if step is not None:
            here = w.at(level=0)
            u.copies[its] = _taken(here, its, *step), here.level
    w.records.turns = True
    return v.copies[rows]


def _steps(v: Value, rows: Rows) -> Steps:
    """The steps to rows of a value, in order; none if one gathers as many numbers."""
    steps, todo = Steps(), [(v, rows)]
    while todo:
        u, its = todo[-1]
        step, due, gathered = None, [], []
        if not (u.is_whole or _is_here(u, its)):
            step, gathered = _step(u, its), [u]
        if step is not None:
            pairs = list(zip(step[1], step[2].ins, strict=True))
            due = [(x, its.at(d)) for x, d in pairs if d is not None]
            gathered = [x for x, d in pairs if d is None and not x.is_whole]
        if any(x.size >= v.size for x in gathered):
            return {}
        if due := [x for x in due if x not in steps]:
            todo += due
        else:
            steps[todo.pop()] = step
    return steps


def _step(v: Value, rows: Rows) -> Any:
    """The step to rows of a value; a product takes none but rows that are here."""
    if v.made is None:
        return None
    e, vs, _ = v.made
    ways = [*ways_to_split(e), *primitives.places_of_updates(e)]
    way = next((x for x in ways if x.outs == (rows.dim,)), None)
    if way is None:
        return None
    pairs = zip(vs, way.ins, strict=True)
    is_here = all(d is None or u.layout == rows.at(d) for u, d in pairs)
    return (e, vs, way) if is_here or not primitives.entry_of(e).is_dear else None


def _taken(
    w: Writer, rows: Rows, e: core.JaxprEqn, vs: list[Value], way: primitives.Factor
) -> Any:
    """The rows of a result by a step; updates by their rule, to which rows they go."""
    if way in ways_to_split(e):
        [x] = along_factor(w, e, vs, rows, way)
        return x
    layouts, xs = operand_layouts(rows, way.ins), w.parts(vs, rows, way.ins)
    triples = zip(vs, xs, layouts, strict=True)
    given = [v.with_layout(x, layout) for v, x, layout in triples]
    out = w.rules.known[e.primitive.name](w, e, given)
    assert out is not None  # see `places_of_updates`
    return out[0][0]


def _is_here(v: Value, rows: Rows) -> bool:
    """True if a value has such rows, and they need not be cut from all of it."""
    return not v.is_whole and rows in (v.layout, *v.copies)
