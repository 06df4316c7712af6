"""Rules that follow from dimensions: factors, columns, linear equations, reductions.

    a factor of operands and results    rows in, rows out
    a factor that no result has         each micro-batch has a term of a sum

A rule takes a writer, an equation and values, and returns values.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from .._passes import jaxprs, primitives
from .._passes.jaxprs import is_inexact
from .._passes.primitives import CAST, Axes, Factor
from . import held
from .held import PARTIAL, WHOLE, Axis, Layout, Result, Results, Rows, Value
from .writer import Rule, Writer, is_of_rows, shifted, unmoved

# == Rules by factors ==================================================================
# Rules that follow from a row of the table of primitives.
#
# A factor is a dimension that operands and results share (`_passes.primitives`).
#
#     along_rows  rows along a factor of an operand are rows of each result that has it
#     into_sums   if no result has it: each micro-batch has a part of a sum
#     from_rows   rows of a result, from the rows of the operands that have its factor
#
# Sums that wait pass through equations that are linear by the row, see `linear`.


def ways_to_split(e: core.JaxprEqn) -> list[Factor]:
    """The ways to split an equation, by the row of the primitive."""
    return primitives.factors_of(primitives.entry_of(e), e)


def chosen_way(
    vs: Sequence[Value], some: Callable[[Rows], Iterable[Factor]]
) -> tuple[Rows, Factor] | None:
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

    def gathered(x: tuple[Rows, Factor, int]) -> tuple[int, int]:
        due = zip(vs, operand_layouts(x[0], x[1].ins), strict=True)
        moved = (u.size for u, layout in due if u.layout not in (WHOLE, layout))
        return sum(moved), -x[2]

    if not found:
        return None
    rows, way, _ = min(found, key=gathered) if len(found) > 1 else found[0]
    return rows, way


def operand_layouts(rows: Rows, dims: Axes) -> list[Layout]:
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
    found = [
        (v.rows, way.ins)
        for i, v in enumerate(vs)
        for way in ways_to_split(e)
        if v.rows and way.ins[i] == v.dim
    ]
    if not found:
        return None
    return [(x, PARTIAL) for x in w.results(e, w.parts(vs, *found[0]))]


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
    w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows, way: Factor
) -> list[Any]:
    """The results of a micro-batch's part along a factor."""
    xs = w.parts(vs, rows, way.ins)
    if not (key := primitives.entry_of(e).shape):
        return w.results(e, xs)
    shape, of, [d] = list(e.params[key]), held.types_of(e)[0].shape, way.outs
    assert d is not None
    place = d if key == "shape" else way.ins[0]
    if place is not None and shape[place] == of[d]:
        shape[place] = held.length_of(of[d], w.axis.parts)
    return w.results(e, xs, **{key: tuple(shape)})


# == Sums of shifted values ============================================================
# Sums over rows of values whose shift is known later, as in a softmax over rows.
#
#     Σ exp(a - g)  =  Σₖ exp(hₖ - g) · Σ exp(a - hₖ)       hₖ = max a of micro-batch k
#     Σ c · (a - g)  =  Σₖ Σ c · (a - hₖ) + (hₖ - g) · Σ c
#
# The shift g is the maximum of all rows. Each micro-batch shifts by its own maximum, in
# the pass that finds g, and keeps the sum and the maximum of each column. So no pass
# computes rows once more for the sum. Flash attention does so with blocks of keys (Dao,
# Fu, Ermon, Rudra, Ré, 2022), Inf-CL with rows of a contrastive loss (Cheng et al.,
# 2024).
#
# Both hold for any h, which is constant. They lose no digits, for exp(x) has an error
# of about |x| ULPs, and |a - hₖ| + |hₖ - g| = |a - g|.


def sum_of_shifted(w: Writer, e: core.JaxprEqn, v: Value) -> Any:
    """The part of a micro-batch in such a sum; None if it is another sum."""
    rows, axes = v.rows, e.params["axes"]
    found = shifted(v) if v.dim in axes else None
    if found is None:
        return None
    gone = tuple(d for d in axes if d not in found.varies)
    rest = tuple(d - sum(x < d for x in gone) for d in axes if d not in gone)
    whole = x = w.part(found.of, rows)
    kept = None
    for mask, side in found.masks:
        keeps = w.part(mask, rows) == (side == 2)
        x = jnp.where(keeps, x, jnp.full_like(x, -jnp.inf))
        kept = keeps if kept is None else kept & keeps
    most = jax.lax.stop_gradient(jnp.max(x, gone, keepdims=True))
    own = jnp.where(jnp.isfinite(most), most, jnp.zeros_like(most))
    terms = (whole if found.exp is None else x) - own

    def total(terms: Any) -> Any:
        """The sum of the terms after all steps."""
        for step, vs, i in found.steps:
            given = jaxprs.put(vs, [i], [vs[i].with_layout(terms, rows)])
            way = next(way for way in ways_to_split(step) if way.outs == (rows.dim,))
            [terms] = along_factor(w, step, given, rows, way)
        return w.run(e, [terms], axes=gone)

    part = total(terms if found.exp is None else w.run(found.exp, [terms]))
    is_none = (most == -jnp.inf) & (found.exp is not None)
    late = jnp.where(is_none, most, own).astype(part.dtype)
    for shift in found.shifts:
        once = w.whole(shift)
        for d in gone if once.shape else ():
            once = jax.lax.slice_in_dim(once, 0, 1, axis=d)
        late = late - once.astype(part.dtype)
    # Where all are -inf, a term is exp(-inf - g): 0, or NaN if g is -inf as well. But
    # what a mask takes out is 0.
    if kept is not None:
        is_out = ~kept.any(gone, keepdims=True)
        late = jnp.where(is_out, jnp.zeros_like(late), late)
    if found.exp is None:
        part += total(jnp.ones_like(terms)) * jnp.squeeze(late, gone)
        return w.run(e, [part], axes=rest) if rest else part
    part *= jnp.squeeze(jnp.exp(late), gone)
    return w.run(e, [part], axes=rest) if rest else part


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
    w: Writer, rows: Rows, e: core.JaxprEqn, vs: list[Value], way: Factor
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


def work_of_loops(jaxpr: core.Jaxpr, axis: Axis) -> float:
    """About the operations of a micro-batch in all loops, there and back.

    Each loop computes what it reads, but for sums and other values that are smaller
    than what they are computed of: these are kept for later loops.
    """
    meets = [axis.meets(e) for e in jaxpr.eqns]
    level: dict[Any, int] = {}
    for e, its in zip(jaxpr.eqns, meets, strict=True):
        reads = (level.get(x, 0) for x in jaxprs.variables(e.invars))
        level |= dict.fromkeys(e.outvars, max(reads, default=0) + its)
    end = max(level.values(), default=0)
    loops = dict.fromkeys(jaxprs.variables(jaxpr.outvars), 1 << end)
    total = 0.0
    for e, its in zip(jaxpr.eqns[::-1], meets[::-1], strict=True):
        runs = functools.reduce(operator.or_, (loops.get(x, 0) for x in e.outvars), 0)
        if runs and (its or _is_less(e)):
            runs = 1 << level[e.outvars[0]] - its
        again = _THERE_AND_BACK * runs.bit_count() + (runs not in (0, 1 << end))
        total += jaxprs.work(e) * again
        for x in jaxprs.variables(e.invars):
            loops[x] = loops.get(x, 0) | runs
    return total


def _is_less(e: core.JaxprEqn) -> bool:
    """True if the results have half the numbers of an operand, or fewer."""
    ins: list[Any] = [x.aval for x in e.invars]
    results = sum(jaxprs.numbers(getattr(x.aval, "shape", ())) for x in e.outvars)
    largest = max((jaxprs.numbers(getattr(x, "shape", ())) for x in ins), default=0)
    return 2 * results <= largest


# == Sums that wait ====================================================================
# Equations that are linear in partial operands: the sum over micro-batches waits.
#
# `f(Σ xᵢ) = Σ f(xᵢ)`, so a sum is reduced where something that is not linear reads it,
# and a gradient that contracts over rows is one sum at the very end. (Shardy calls this
# `unreduced`.) A whole operand of an addition is shared out: `Σ xᵢ + y = Σ (xᵢ + y/k)`.


def linear(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result] | None:
    """The partial results; None if the equation is not linear in partial operands."""
    name = e.primitive.name
    if name == "div" and vs[0].is_partial and vs[0].params and not vs[1].params:
        # What does not depend on the parameters, such as a count of tokens, is known
        # before all that does.
        vs = [vs[0], *w.summed(vs[1:])]
    if any(v.rows for v in vs) or not all(is_inexact(x.aval) for x in e.outvars):
        return None
    places = slots(e, [i for i, v in enumerate(vs) if v.is_partial])
    if places is None:
        return None
    if any(v.is_wide for v in vs) and (
        jaxprs.inner_programs(e) or not jaxprs.is_cheap(e)
    ):
        return None
    if name == CAST and not _is_of_reals(e):
        return None
    if name == CAST and _bits(e.outvars[0].aval) < _bits(vs[0].x):
        # The sum must be rounded, and not the terms: it is when it is complete.
        forbids = w.scope.forbids_collectives and not w.scope.may_count
        rounds = forbids or w.scope.is_inner
        return None if rounds else [(vs[0].x, PARTIAL)]
    if name == "gather" and e.params["fill_value"]:
        return None  # it is added once, and not by each micro-batch
    if any(_is_late(v, vs) for v in vs) or is_summed_first(w, e, vs):
        return None
    if name == "optimization_barrier":
        return barrier(w, e, vs)
    xs = [w.addend(v) if i in places else v.x for i, v in enumerate(vs)]
    if any(v.is_wide for v in vs):
        xs = _alike(xs)
    return [(x, PARTIAL) for x in w.results(e, xs)]


def barrier(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    return list(zip(w.run(e, [v.x for v in vs]), (v.layout for v in vs), strict=True))


def slots(e: core.JaxprEqn, partial: Sequence[int]) -> Sequence[int] | None:
    """The operands in which together an equation is linear, if all partial ones are."""
    row = primitives.entry_of(e)
    found = row.linear_in(len(e.invars))
    if not found and len(partial) == 1:
        found = [i for i in partial if i in row.each]
    return found if set(partial) <= set(found) else None


def _is_late(v: Value, vs: list[Value]) -> bool:
    """True if another operand is known only after a later collective.

    Then `v` is summed in that collective. Otherwise the operands of `v` would be
    computed once more where the other one is read.
    """
    return v.is_partial and any(other.level > v.level for other in vs)


def is_summed_first(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> bool:
    """True if an equation costs more than the sums of its operands: they come first.

    Otherwise each micro-batch runs the equation, forward and, for each of two operands,
    backward: a product with the weights of experts, to which an index sends rows. But a
    sum that nothing else needs is one more level, which runs the rows before it again.
    If that costs more, the equation runs with the rows, in one loop.
    """
    if jaxprs.is_cheap(e) or w.scope.forbids_collectives:
        return False
    of_rows, waiting = _work_before([v for v in vs if v.is_partial])
    more = _THERE_AND_BACK * (w.axis.size - 1) * (waiting + jaxprs.work(e))
    return 2 * more > of_rows


_THERE_AND_BACK = 3  # times the work of a product


def _work_before(vs: Iterable[Value]) -> tuple[float, float]:
    """The work of rows on the way to partial values, and of sums that wait.

    It is that of all rows, of equations that are not cheap.
    """
    of_rows = waiting = 0.0
    stack, seen = [v.made for v in vs], set()
    while stack:
        made = stack.pop()
        if made is None or id(made[1]) in seen:
            continue
        e, operands, _ = made
        seen.add(id(operands))
        stack += (v.made for v in operands)
        work = 0.0 if jaxprs.is_cheap(e) else jaxprs.work(e)
        if any(v.rows for v in operands):
            of_rows += work
        elif any(v.is_partial for v in operands):
            waiting += work
    return of_rows, waiting


def _is_of_reals(e: core.JaxprEqn) -> bool:
    """True for a cast that drops nothing but digits."""
    types: list[Any] = [x.aval for x in (*e.invars, *e.outvars)]
    old, new = (x.dtype.kind for x in types)
    return is_inexact(types[0]) and (old != "c" or new == "c")


def _bits(x: Any) -> int:
    return jnp.finfo(x.dtype).bits


def _alike(xs: Sequence[Any]) -> list[Any]:
    """Operands of which all real numbers have the digits of the widest."""
    widest = max((x for x in xs if is_inexact(x)), key=_bits).dtype
    return [jnp.asarray(x, widest) if is_inexact(x) else x for x in xs]


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
    later = not any(v.params for v in vs) and any(map(is_of_rows, vs))
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
        found, axes = unmoved(other)
        if found.made is None or found.made[0].primitive.name not in _EXTREMA:
            continue
        extremum, [of], _ = found.made
        gone = extremum.params["axes"]
        kept = [d for d in range(len(of.shape)) if d not in gone]
        # Another value may be the same numbers here: those of other rows.
        is_own = of.x is v.x and (of.shape, of.layout) == (v.shape, v.layout)
        is_own &= all(kept[d] == place for d, place in axes.items())
        if is_own and v.dim in gone and is_inexact(v.aval) and found.is_whole:
            return v, extremum
    return None


_EXTREMA = ("reduce_max", "reduce_min")


def _attaining_all(w: Writer, e: core.JaxprEqn, x: Any) -> Any:
    """Marks the rows of a micro-batch that attain the extremum of all rows."""
    axes, is_max = tuple(e.params["axes"]), e.primitive.name == "reduce_max"
    x = jax.lax.stop_gradient(x)
    # Stored: computed again, it might round otherwise as well.
    here = checkpoint_name(w.run(e, [x]), w.axis.name)
    mine = here == w.axis.extremum(here, is_max)
    return attaining(is_max, axes, x, here) & jnp.expand_dims(mine, axes)


def attaining(is_max: bool, axes: tuple[int, ...], x: Any, extremum: Any) -> Any:
    """Marks the numbers that attain their extremum along axes: one at least.

    The operand and the extremum may have been rounded in different ways, and none would
    equal it. As in JAX, none attains NaN.
    """
    first, rest = True, x
    for axis in axes:
        at = (jnp.argmax if is_max else jnp.argmin)(rest, axis, keepdims=True)
        first &= jax.lax.broadcasted_iota(at.dtype, x.shape, axis) == at
        rest = jnp.take_along_axis(rest, at, axis)
    extremum = jnp.expand_dims(extremum, axes)
    return (x == extremum) | (first & (extremum == extremum))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _extremum_here(is_max: bool, axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    """The extremum of one micro-batch along axes, with a derivative that is finite."""
    return x.max(axes) if is_max else x.min(axes)


@_extremum_here.defjvp
def _extremum_here_jvp(
    is_max: bool, axes: tuple[int, ...], primals: Any, tangents: Any
) -> tuple[Any, Any]:
    [x], [t] = primals, tangents
    here = _extremum_here(is_max, axes, x)
    share = jax.lax.stop_gradient(attaining(is_max, axes, x, here)).astype(t.dtype)
    return here, (t * share).sum(axes) / share.sum(axes)


def reduce_(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    name = e.primitive.name
    if turned := pairs_by_columns(w, v, tuple(e.params["axes"])):
        w.level = turned.level
        return along_rows(w, e, [turned])
    if name == "reduce_sum":
        part = sum_of_shifted(w, e, v)
        return into_sums(w, e, vs) if part is None else [(part, PARTIAL)]
    if name in _EXTREMA:
        return [(_extremum(w, e, v), WHOLE)]
    here = w.run(e, [v.x])
    parts = _gathered(w, v, here)
    return [(w.run(e, [parts], axes=(0,)), WHOLE)]


def _gathered(w: Writer, v: Value, here: Any) -> Any:
    """The arrays of all micro-batches, stacked along a new axis 0."""
    w.meet(v)
    return w.gather(here)


def _extremum(w: Writer, e: core.JaxprEqn, v: Value) -> Any:
    """The largest or the smallest of all rows.

    Its derivative is JAX's: equal parts for all that attain it. So what each micro-
    batch found is kept, and how many attain it there. Comparing once more with the
    extremum would not do: values that are computed again may round otherwise. For that
    reason they are computed once for both, and not fused with either.
    """
    is_max = e.primitive.name == "reduce_max"
    if not v.smooth or e.outvars[0] not in w.given:
        return _stopped_extremum(w, is_max, v, w.run(e, [v.x]))
    x, axes = jax.lax.optimization_barrier(v.x), tuple(e.params["axes"])
    here = _extremum_here(is_max, axes, x)
    attain = attaining(is_max, axes, *map(jax.lax.stop_gradient, (x, here)))
    count = jnp.sum(attain, axes, dtype=here.dtype)
    found, counts = _gathered(w, v, here), w.gather(jax.lax.stop_gradient(count))
    return _of_parts(is_max, found, counts)


def _stopped_extremum(w: Writer, is_max: bool, v: Value, here: Any) -> Any:
    """The same where it has no derivative."""
    w.meet(v)
    x = jax.lax.stop_gradient(here)
    as_int = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    return w.axis.extremum(as_int, is_max).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_parts(is_max: bool, found: jax.Array, counts: jax.Array) -> jax.Array:
    """The extremum over micro-batches, from extrema and how often each is attained."""
    return found.max(0) if is_max else found.min(0)


@_of_parts.defjvp
def _of_parts_jvp(is_max: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found, counts = primals
    out = _of_parts(is_max, found, counts)
    share = jnp.where(found == out[None], counts, jnp.zeros_like(counts))
    return out, (tangents[0] * (share / share.sum(0)[None])).sum(0)


def place_of_extremum(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """`argmax` and `argmin`: the first micro-batch that attains it says where."""
    [v] = vs
    if v.rows.segments > 1:
        return None
    [axis], x = e.params["axes"], jax.lax.stop_gradient(v.x)
    at = w.run(e, [x])
    best = jnp.take_along_axis(x, jnp.expand_dims(at, axis), axis).squeeze(axis)
    rows = v.x.shape[axis]
    first = w.index.astype(at.dtype) * jnp.asarray(rows, at.dtype)
    places, values = w.gather(at + first), _gathered(w, v, best)
    which = w.run(e, [values], axes=(0,))
    return [(jnp.take_along_axis(places, which[None], 0)[0], WHOLE)]


def user_collective(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """`psum`, `pmax` and `pmin` over axes of the user.

    The axis of a `jax.vmap` with an `axis_name` is a number here: an axis of the array.
    """
    axes = tuple(a for a in e.params["axes"] if isinstance(a, int))
    out: list[Result] = []
    for v in vs:
        [here] = w.results(e, [v.x])
        if v.rows is None:
            out.append((here, WHOLE))
        elif v.dim not in axes:
            left = v.rows.at(v.dim - sum(a < v.dim for a in axes))
            out.append((here, left))
        elif e.primitive.name.startswith("psum"):
            out.append((here, PARTIAL))
        else:  # JAX has no derivative of them
            is_max = e.primitive.name == "pmax"
            out.append((_stopped_extremum(w, is_max, v, here), WHOLE))
    return out


def cumulative(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Sums from the first row on: local sums, plus the totals of earlier rows."""
    [v] = vs
    axis, reverse = e.params["axis"], e.params["reverse"]
    name = e.primitive.name
    # At ties JAX has a derivative that depends on where in the whole batch they are.
    is_extremum = name in ("cummax", "cummin")
    if v.rows.segments > 1 or (is_extremum and v.smooth):
        return None
    here = w.run(e, [v.x])
    edge = 0 if reverse else here.shape[axis] - 1
    total = jax.lax.index_in_dim(here, edge, axis, keepdims=True)
    totals = _gathered(w, v, total)
    # Those of all micro-batches up to each, and then those before this one.
    after = w.index - 1 if not reverse else w.index + 1
    is_first = w.index == (w.axis.size - 1 if reverse else 0)
    totals = w.run(e, [totals], axis=0)
    after = jnp.where(is_first, w.index, after)
    before = jax.lax.dynamic_index_in_dim(totals, after, 0, keepdims=False)
    joined = _JOINED[name](here, before)
    return [(jnp.where(is_first, here, joined), v.rows)]


_JOINED: dict[str, Any] = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}
