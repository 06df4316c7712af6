"""The partition: the program of a micro-batch, from that of the whole batch.

    program of fun, [n, ...]  ->  program of a micro-batch, [n / k, ...], + collectives

Rows that the program creates itself, such as noise; `partition`, which runs the rule of
each equation; then rules for whole values of which a micro-batch needs some rows, drawn
or cut; and last the table that names all rules.
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util
from jax.extend.random import threefry2x32_p

from .._passes import about, equation, jaxprs, primitives
from .._passes.primitives import ROWWISE, SCAN, TABLE
from . import custom, factors, held, indexing, moves, nested, splits
from .held import (
    WHOLE,
    Axis,
    Drawn,
    Failure,
    Layout,
    Note,
    Records,
    Result,
    Rows,
    Uneven,
    Value,
)
from .writer import Rule, Rules, Same, Scope, Writer

# == Created rows ======================================================================
# Rows of arrays that a program creates, with an axis as long as the batch.
#
#     z = random.normal(key, (n, 64));  fake = generator(params, z)
#
# What comes from no leaf of the batch is whole, and cut where it meets rows (`recut`).
# Here it meets none. Then the first equation that `recut` cannot go back through, a
# *root*, may get rows of it, and what follows has rows as if `z` were in the batch.
#
# The same goes for an index that takes rows in another order, such as by their experts:
# its own rows may be taken by each micro-batch, or all by all.
#
# An axis may be as long as the batch by chance, like that of a table of positions: then
# rows would be gathered again. So the program is partitioned both ways, and the way
# counts in which a micro-batch computes less.


class Made:
    """A way to make a value: one object for all values that were made alike."""


Root = tuple[str, str, Made]  # a primitive, its line, how an operand of it was made

# By a primitive, a shape, and how the operands were made; as long as a `Made` is used.
_made: Any = weakref.WeakValueDictionary()

_LARGE = 2  # numbers for each row: less is not worth a second look
_FEW = 3  # roots that are looked at one by one


@dataclasses.dataclass
class Created:
    """The arrays that one program creates.

    Attributes:
      rows: the rows of the batch, as in a leaf of the batch.
      length: the number of rows of the batch.
      cut: the roots that get rows.
      roots: the roots that might get rows, and the count of numbers in each.
    """

    rows: Rows
    length: Any
    cut: frozenset[Root] = frozenset()
    roots: dict[Root, int] = dataclasses.field(default_factory=dict)
    _ways: dict[Value, Made | None] = dataclasses.field(default_factory=dict)

    def __call__(self, w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Value]:
        """The operands of an equation; one has rows if it is a root to cut."""
        if cuts_operands(e) or w.scope.in_rule:
            return vs
        found = []
        if vs and all(v.is_whole for v in vs):
            found = [i for i, v in enumerate(vs) if self._is_one(v)]
        elif e.primitive.name == "gather" and indexing.reorders(w, e, *vs):
            found = [1] if vs[1].shape[0] == self.length else []
        size = max([jaxprs.computed(e), *(vs[i].size for i in found)])
        if not found or size < _LARGE * jaxprs.numbers([self.length]):
            return vs
        i = max(found, key=lambda i: vs[i].size)
        line = about.line_of(e.source_info)
        way: Any = self._way(vs[i])
        root = e.primitive.name, line, way
        self.roots[root] = size
        if root not in self.cut:
            return vs
        rows = self._rows_of(vs[i])
        return jaxprs.put(vs, [i], [vs[i].with_layout(w.part(vs[i], rows), rows)])

    def layout(self, v: Value) -> Layout:
        """The layout of a result, which has rows if it is created and large."""
        is_large = v.size >= _LARGE * jaxprs.numbers([self.length])
        return self._rows_of(v) if is_large and self._is_one(v) else v.layout

    def _rows_of(self, v: Value) -> Rows:
        return self.rows.at(v.shape.index(self.length))

    def _is_one(self, v: Value) -> bool:
        """True if a value has the axis, and `cutting` knows all that created it."""
        return v.is_whole and self.length in v.shape and self._way(v) is not None

    def _way(self, v: Value) -> Made | None:
        """The way a value was made, if rows of all that made it can be cut."""
        if self.length not in v.shape:
            return _made_by(v.shape)
        if v not in self._ways:
            self._ways[v] = None
            if v.made is not None and cuts_operands(v.made[0]):
                ways = [self._way(u) for u in v.made[1]]
                if None not in ways:
                    name = v.made[0].primitive.name
                    self._ways[v] = _made_by(name, v.shape, *ways)
        return self._ways[v]


def _made_by(*key: Any) -> Made:
    """The object of such a key."""
    return _made.setdefault(key, Made())


def best_with_created(
    run: Callable[[Created | None], Any],
    cost: Callable[[Any], tuple[int, int]],
    created: Created | None,
) -> Any:
    """The partitioned program in which a micro-batch computes less.

    Args:
      run: partitions the program, with rows of `created`.
      cost: the count of numbers that a micro-batch computes, and of meetings.
      created: without roots that are cut; None if nothing has rows.
    """
    chosen = run(created)
    if created is None:
        return chosen
    roots = sorted(created.roots, key=created.roots.__getitem__, reverse=True)
    each = [[root] for root in roots[:_FEW]]
    cut: frozenset[Root] = frozenset()
    for more in [*each, roots[_FEW:]]:
        if not more:
            continue
        trial = run(Created(created.rows, created.length, cut.union(more)))
        (numbers, met), (before, meetings) = cost(trial), cost(chosen)
        if numbers * (1 + (met > meetings)) < before:  # a meeting is one more pass
            chosen, cut = trial, cut.union(more)
    return chosen


# == The partition =====================================================================


class Partitioned(NamedTuple):
    """A program of a micro-batch.

    Attributes:
      jaxpr: the program, with collectives over the axis. Its last argument is the index
        of the micro-batch.
      consts: the values of the constants.
      layouts: of each result: rows along a dimension, a part of a sum, or all. The
        first may come once more, whole, if its parts may add up to NaN, see `Value`.
      whole: equations without a rule, which are computed whole.
      drawn: random draws of each micro-batch: on some platforms other draws of the same
        distribution than those of the whole batch.
      promised: equations that are split because of a promise of the user.
      failures: errors of rules; the equations are computed whole.
      cut: the arrays that the program creates and that have rows, see `created`.
      turns: True if functions of pairs are split along columns.
      meets: True if rows meet, in a collective over the axis.
      in_gradient: the first meeting on the way from the parameters to the loss; None if
        rows meet in numbers without parameters alone, such as counts.
      reads_index: True if the program reads the index of the micro-batch.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    layouts: list[Layout]
    whole: list[Note]
    drawn: list[Note]
    promised: list[Note]
    meets: bool
    in_gradient: core.JaxprEqn | None
    reads_index: bool
    failures: list[Failure]
    cut: frozenset[Root] = frozenset()
    turns: bool = False


def first_meetings(part: Partitioned, axis: str) -> list[core.JaxprEqn]:
    """The collectives over the axis, all of them in the open, that need no other."""
    jaxpr = part.jaxpr
    every = [e for e in jaxpr.eqns if axis in jaxprs.axes_of(e)]
    later = jaxprs.following(jaxpr, [x for e in every for x in e.outvars])
    return [e for e in every if later.isdisjoint(jaxprs.variables(e.invars))]


def without_meetings(
    part: Partitioned, meetings: Sequence[core.JaxprEqn], values: Sequence[Any]
) -> Partitioned:
    """The program with constants in place of what these collectives compute."""
    jaxpr, gone = part.jaxpr, set(map(id, meetings))
    eqns = [e for e in jaxpr.eqns if id(e) not in gone]
    effects = frozenset().union(*(e.effects for e in eqns))
    names = [*jaxpr.constvars, *(x for e in meetings for x in e.outvars)]
    consts = [*part.consts, *values]
    jaxpr = jaxpr.replace(eqns=eqns, effects=effects)
    jaxpr = jaxprs.closing_over(jaxpr, names, consts, jaxpr.invars)
    return part._replace(jaxpr=jaxpr, consts=consts)


class Argument(NamedTuple):
    """An argument: the type, the layout, and True if it is differentiated."""

    aval: Any
    layout: Layout
    smooth: bool = False


def partition(
    jaxpr: core.Jaxpr,
    arguments: Sequence[Argument],
    axis: Axis,
    first: Layout | None = None,
    like: Partitioned | None = None,
) -> Partitioned:
    """Partitions a program, of which the constants are the first arguments.

    Args:
      jaxpr: the program.
      arguments: its arguments.
      axis: the axis of the micro-batches.
      first: the layout of the first result; None for the one in which it is computed.
      like: a program whose results have the same layouts. If rows are uneven, what it
        creates has rows in the same places. If None, each result but the first stays
        in the layout in which it is computed, and those are whole whose parts may add
        up to NaN.
    """
    split = ((a.layout, a.aval) for a in arguments if isinstance(a.layout, Rows))
    some = next((Created(x, of.shape[x.dim]) for x, of in split), None)
    layouts = None if like is None else like.layouts
    whole = _Whole(jaxpr, arguments, axis, first, layouts)
    if like is not None and some is not None and not axis.is_even:
        return whole.partitioned(dataclasses.replace(some, cut=like.cut))
    best = best_with_created(whole.partitioned, lambda x: _cost(x.jaxpr, axis), some)
    if not best.turns:
        return best
    some = some and dataclasses.replace(some, cut=best.cut)
    by_rows = whole._replace(axis=axis._replace(turns=False)).partitioned(some)
    return min(best, by_rows, key=lambda x: factors.work_of_loops(x.jaxpr, axis))


class _Whole(NamedTuple):
    """A program of the whole batch, see `partition`."""

    jaxpr: core.Jaxpr
    arguments: Sequence[Argument]
    axis: Axis
    first: Layout | None
    layouts: Sequence[Layout] | None

    def partitioned(self, some: Created | None) -> Partitioned:
        """The program, with rows of some of what it creates.

        All random numbers are drawn whole if not all readers would read the same.
        """
        closed, found = self._traced(some)
        part = _live(closed, found, self.axis, [a.smooth for a in self.arguments])
        if draws_differ(found["records"].notes, part.jaxpr):
            whole = self._replace(axis=self.axis._replace(draws_whole=True))
            return whole.partitioned(some)
        return part._replace(cut=frozenset() if some is None else some.cut)

    def _traced(self, some: Created | None) -> tuple[Any, dict[str, Any]]:
        """The program, and what was recorded; `some` of what it creates has rows."""
        jaxpr, axis, found = self.jaxpr, self.axis, {}

        def micro_batch(xs: Sequence[Any], index: Any) -> list[Any]:
            rules = RULES._replace(operands=some) if some else RULES
            if isinstance(axis.parts, Uneven):
                index = index + axis.parts.before
            is_uneven = not axis.is_even
            scope = Scope(forbids_collectives=is_uneven, may_count=is_uneven)
            w = Writer(axis, index, rules, Records(), scope)
            given = [
                Value(x, a.aval, a.layout, 0, a.smooth, a.smooth)
                for x, a in zip(xs, self.arguments, strict=True)
            ]
            out = w.interpret(jaxprs.without_constants(jaxpr), (), given)
            layouts, scaled = self.layouts, list[int]()
            if layouts is None:
                own = [v.layout if some is None else some.layout(v) for v in out]
                layouts = [self.first or own[0], *own[1:]]
                scaled = [i for i, v in enumerate(out) if v.scaled and axis.is_even]
            # Not the writer, which holds what is traced.
            found.update(layouts=layouts, scaled=scaled, records=w.records)
            pairs = zip([*out, *out[:1]], layouts, strict=False)
            put = [_put(w, v, layout) for v, layout in pairs]
            values = held.labelled_values(axis, out)
            found.update(labels=list(map(held.value_in_words, values)))
            return [*put, *(w.whole(out[i]) for i in scaled), *(v.x for v in values)]

        types = [
            held.type_here(
                a.aval, held.local_shape(a.aval.shape, a.layout, axis.parts), None
            )
            for a in self.arguments
        ]
        number = jax.ShapeDtypeStruct((), jnp.int32)
        for x in types:
            number = held.type_here(number, (), x)
        closed = jax.make_jaxpr(micro_batch, axis_env=axis.env)(types, number)
        return held.labelled_program(closed, found["labels"]), found


def _live(
    closed: Any, found: dict[str, Any], axis: Axis, smooth: list[bool]
) -> Partitioned:
    """Such a program without what nobody reads."""
    layouts, outvars = found["layouts"], closed.jaxpr.outvars
    records: Records = found["records"]
    live = jaxprs.live(closed.jaxpr.replace(outvars=outvars[: len(layouts)]))
    meets = _meets(live, axis)
    if meets and found["scaled"]:
        outvars, layouts = _exact(outvars, layouts, found["scaled"])
        live = jaxprs.live(closed.jaxpr.replace(outvars=outvars))
    return Partitioned(
        live,
        closed.consts,
        layouts,
        [x for x in records.notes if not isinstance(x, Drawn)],
        [Note(*x[:3]) for x in records.notes if isinstance(x, Drawn)],
        records.promised,
        meets,
        _in_gradient(live, axis, smooth) if meets else None,
        jaxprs.num_readers(live, live.invars[-1]) > 0,
        records.failures,
        turns=records.turns,
    )


def _put(w: Writer, v: Value, layout: Layout) -> Any:
    """A result in a layout; equations for the change have the line of the result."""
    if v.made is None:
        return w.to(v, layout)
    with jaxprs.as_of(v.made[0], source_info_util.current_name_stack()):
        return w.to(v, layout)


def _cost(jaxpr: core.Jaxpr, axis: Axis) -> tuple[int, int]:
    """The number of numbers that a micro-batch computes, and of collectives."""
    meetings = sum(map(axis.is_meeting, jaxprs.equations(jaxpr)))
    return sum(map(jaxprs.computed, jaxpr.eqns)), meetings


def _exact(
    outvars: list[Any], layouts: list[Layout], scaled: list[int]
) -> tuple[list[Any], list[Layout]]:
    """The results with those whole whose parts may add up to NaN, see `Partitioned`.

    `outvars` ends in those.
    """
    exact = dict(zip(scaled, outvars[len(layouts) :], strict=True))
    chosen = [
        (exact[i], WHOLE) if i and i in exact else pair
        for i, pair in enumerate(zip(outvars, layouts, strict=False))
    ]
    if 0 in exact:  # It has a derivative, so micro-batches add to it, too.
        chosen.append((exact[0], WHOLE))
    return [x for x, _ in chosen], [layout for _, layout in chosen]


def _in_gradient(jaxpr: core.Jaxpr, axis: Axis, smooth: Sequence[bool]) -> Any:
    loss = jaxprs.live(jaxpr.replace(outvars=jaxpr.outvars[:1]))
    params = [x for x, its in zip(loss.invars, smooth, strict=False) if its]
    found = jaxprs.following(loss, params)
    for e in loss.eqns:
        if axis.meets(e) and not found.isdisjoint(jaxprs.variables(e.invars)):
            return next(filter(axis.is_meeting, jaxprs.within(e)))
    return None


def _meets(jaxpr: core.Jaxpr, axis: Axis) -> bool:
    """True if there is a collective over the axis, or what stands for one."""
    return any(axis.is_meeting(e) for e in jaxprs.equations(jaxpr))


# == Random draws ======================================================================
# Random numbers: each micro-batch computes its own part of what the whole batch draws.
#
# Threefry computes number i of an array from the key and i alone. So a part of an array
# is drawn from the indices of the part, with the bits of the whole. Any other generator
# draws for each micro-batch from a key of its own: another draw of the same
# distribution.

_FAR = 2**31  # folded into a key: far from the small numbers that users fold in


def recut_bits(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The rows of random bits; None where that is not known."""
    [v], width = vs, e.params["bit_width"]
    if not primitives.is_threefry(v.aval):
        return None if w.axis.draws_whole else _of_own_key(w, e, v, rows)
    if v.shape:
        return _of_each_key(w, e, v, rows)
    if (drawn := _drawn(w, v, e.params["shape"], rows)) is None:
        return None
    high, low = drawn
    dtype = held.types_of(e)[0].dtype
    if width == 64:
        high = jax.lax.shift_left(high.astype(dtype), jnp.full_like(high, 32, dtype))
        return high | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _of_own_key(w: Writer, e: core.JaxprEqn, v: Value, rows: Rows) -> Any:
    """The rows of bits, drawn from the key with the micro-batch's index in it."""
    shape = held.types_of(e)[0].shape
    note = held.note_of(e, jaxprs.numbers(shape), jaxprs.name_of(e))
    w.records.notes.append(Drawn(*note, _draw(e), rows))
    far = w.index.astype(jnp.uint32) + np.uint32(_FAR)
    fold = functools.partial(jax.random.fold_in, data=far)
    for _ in v.shape:
        fold = jax.vmap(fold)
    keys = w.part(v, rows) if rows.dim < len(v.shape) else w.whole(v)
    part = held.local_shape(shape, rows, w.axis.parts)
    return w.run(e, [fold(keys)], shape=part[len(v.shape) :])


def _draw(e: core.JaxprEqn) -> Any:
    return held.types_of(e)[0].shape, e.params["bit_width"]


def draws_differ(notes: Sequence[Any], jaxpr: core.Jaxpr) -> bool:
    """True if the rows of a draw of micro-batches are read by others, or whole."""
    reads = {(x.draw, x.rows) for x in notes if isinstance(x, Drawn)}
    draws = {draw for draw, _ in reads}
    every = (e for e in jaxprs.equations(jaxpr) if e.primitive.name == "random_bits")
    return len(draws) < len(reads) or not draws.isdisjoint(map(_draw, every))


def recut_split(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The rows of keys that are split off a key: as bits, two words for each."""
    [v] = vs
    if v.shape:
        return _of_each_key(w, e, v, rows)
    drawn = _drawn(w, v, e.params["shape"], rows)
    if drawn is None:
        return None
    return jax.random.wrap_key_data(jnp.stack(drawn, -1), impl="threefry2x32")


def _of_each_key(w: Writer, e: core.JaxprEqn, v: Value, rows: Rows) -> Any:
    """The draw of each key by itself."""
    is_own = rows.dim < len(v.shape) and primitives.is_threefry(v.aval)
    return w.run(e, [w.part(v, rows)]) if is_own else None


def _drawn(w: Writer, v: Value, shape: tuple[int, ...], rows: Rows) -> Any:
    """A pair of words for each number of the rows of a shape, from one key."""
    partitionable = getattr(jax.config, "jax_threefry_partitionable", False)
    if not v.is_whole or not (partitionable and primitives.is_threefry(v.aval)):
        return None
    if math.prod(shape) >= 2**32:
        return None
    key = "count", shape, rows, Same(w.index)
    count = w.once(key, lambda: _count(w, shape, rows))
    k1, k2 = jax.random.key_data(v.x)
    zeros = jax.lax.bitwise_xor(count, count)  # batched as it is, under jax.vmap
    return threefry2x32_p.bind(k1, k2, zeros, count)


def _count(w: Writer, shape: tuple[int, ...], rows: Rows) -> jax.Array:
    """For each element of a part, the index of the element in the whole, flattened."""
    count = jnp.zeros(held.local_shape(shape, rows, w.axis.parts), jnp.uint32)
    stride = 1
    for d in reversed(range(len(shape))):
        at = positions(w, shape, d, rows).astype(jnp.uint32)
        count = count + at * jnp.asarray(stride, jnp.uint32)
        stride *= shape[d]
    return count


def positions(w: Writer, shape: tuple[int, ...], d: int, rows: Rows) -> jax.Array:
    """The index along axis `d`, in the whole batch, of the numbers of a part."""
    local = held.local_shape(shape, rows, w.axis.parts)
    here = jax.lax.broadcasted_iota(jnp.int32, local, d)
    if d != rows.dim:
        return here
    length = shape[d] // rows.segments
    rest = held.length_of(length, w.axis.parts)
    at = jax.lax.add(here, held.start_of(length, w.index, w.axis.parts))
    if rows.segments > 1:  # those of others are in between
        between = jax.lax.div(here, jax.lax.full_like(here, rest))
        at = at + between * (length - rest)
    return at


def random_bits(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result] | None:
    """Bits from a key for each row."""
    [v] = vs
    drawn = recut_bits(w, e, vs, v.rows)
    return None if drawn is None else [(drawn, v.rows)]


# == Cut values ========================================================================
# The rows of a whole value, computed from rows of the operands.
#
# A value that depends on no leaf of the batch is whole: `eye(n)`, `arange(n)`, a
# dropout mask. In an equation with rows a micro-batch computes the part that it needs.


def recut(w: Writer, v: Value, rows: Rows) -> Any:
    """The rows of a value, or None if nothing better is known than to cut it."""
    if v.made is None or not held.can_split(v.shape, rows, w.axis.parts):
        return None
    e, vs, i = v.made
    if about.is_reference_group(e) or not all(operand.is_whole for operand in vs):
        return None
    rule = _OPEN.get(e.primitive.name)
    x = rule(w, e, vs, rows) if rule and i == 0 else None
    if e.primitive is threefry2x32_p:
        x = _bits(w, e, vs, rows)[i]
    due = held.local_shape(v.shape, rows, w.axis.parts)
    return x if x is None or jnp.shape(x) == due else None


def _bits(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> list[Any]:
    """Pairs of words for pairs of counts, as a draw is that was cut before."""
    ways = primitives.factors_of(primitives.Entry("..."), e)
    way = next(x for x in ways if x.outs[0] == rows.dim)
    xs = w.parts(vs, rows, way.ins)
    return w.once(("bits", rows, *map(Same, xs)), lambda: w.results(e, xs))


def _iota(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    aval: Any = held.types_of(e)[0]
    return positions(w, aval.shape, e.params["dimension"], rows).astype(aval.dtype)


def _jitted(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """Of a jitted function that draws: as another one, the same for equal calls."""
    [program], notes = jaxprs.inner(e), w.records.notes
    here, before = w.at(source=e.source_info), len(notes)
    run = nested.inner(here, program, vs, [rows])
    if len(notes) > before:  # Notes need the names of the program around it.
        del notes[before:]
        [v] = here.interpret(program.jaxpr, program.consts, vs)
        return w.part(v, rows)
    call = w.once(("call", Same(run.closed)), lambda: jax.jit(run.__call__))
    [x] = call(nested.index_for(w, run), [w.whole(v) for v in vs])
    w.level = max(w.level, *run.levels)
    return x


def draws_rows(w: Writer, e: core.JaxprEqn) -> bool:
    """True if a jitted function draws random numbers, and its rows can be cut."""
    [program] = jaxprs.inner(e)

    def found() -> bool:
        names = [x.primitive.name for x in jaxprs.equations(program.jaxpr)]
        return "random_bits" in names and OPEN.issuperset(names)

    return len(e.outvars) == 1 and w.once(("draws", Same(program.jaxpr)), found)


# Equations that are gone back through wherever rows of what they compute are wanted.
_OPEN: dict[str, Any] = {
    **{name: factors.from_rows for name, row in TABLE.items() if row.is_open},
    "iota": _iota,
    "reshape": moves.reshape_wanted,
    "random_bits": recut_bits,
    "random_split": recut_split,
    **{name: _jitted for name, row in TABLE.items() if row.kind == "call"},
}
OPEN = frozenset(_OPEN)


def cuts_operands(e: core.JaxprEqn) -> bool:
    """True if rows of the result are computed from rows of the operands."""
    return e.primitive.name in OPEN and not about.is_reference_group(e)


# == The table of rules ================================================================
# The rule of each primitive. A primitive without a rule is computed whole.
#
# A primitive with a row of dimensions needs no more (`_passes.primitives`). The rules
# here are for what a row cannot say; where it says something, they come after it.

_OWN: dict[Rule, str] = {
    factors.reduce_: "reduce_sum reduce_max reduce_min reduce_prod reduce_and "
    "reduce_or reduce_xor",
    factors.place_of_extremum: "argmax argmin",
    factors.cumulative: "cumsum cumprod cummax cummin cumlogsumexp",
    factors.user_collective: "psum psum_invariant pmax pmin",
    factors.barrier: "optimization_barrier",
    moves.reshape: "reshape",
    moves.tile: "tile",
    moves.move: " ".join(name for name, row in TABLE.items() if row.shifts),
    moves.dynamic_slice: "dynamic_slice",
    factors.into_sums: "dot_general",
    moves.convolution: "conv_general_dilated",
    moves.ragged_dot: "ragged_dot_general",
    indexing.scatter: "scatter scatter-add scatter-sub scatter-mul scatter-max "
    "scatter-min",
    splits.rowwise: ROWWISE,
    random_bits: "random_bits",
    partial(splits.split_call, splits.pallas_call): "pallas_call",
    partial(splits.split_call, splits.custom_partitioning): "custom_partitioning",
    partial(
        splits.split_call, splits.cudnn_attention
    ): "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper",
}

_NESTED: dict[str, Rule] = {
    "checkpoint": nested.checkpoint,
    "scan": nested.scan,
    "while": nested.while_,
    "cond": nested.cond,
    "custom_linear_solve": nested.linear_solve,
    "shard_map": nested.shard_map,
    "call_hi_primitive": nested.expanded,
    "custom_jvp_call": custom.custom_jvp,
    "custom_vjp_call": custom.custom_vjp,
    equation.NAME: nested.divided,
    equation.WRITTEN: nested.written_gradient,
    SCAN: splits.associative_scan,
}


_ROWS = {name for name, row in TABLE.items() if row.dims is not None}
_KNOWN: dict[str, Rule] = {
    **dict.fromkeys(sorted(_ROWS), factors.along_rows),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), factors.compared),
    **{
        name: factors.before_factors(rule) if name in _ROWS else rule
        for rule, names in _OWN.items()
        for name in names.split()
    },
    "gather": indexing.gather,  # which follows its row by itself
}

# Each number of a result needs those at the same place along rows, or their sum: it is
# the same whatever rows are next to each other.
_BY_FACTORS = factors.along_rows, factors.compared
_IN_ANY_ORDER = {x for x, rule in _KNOWN.items() if rule in _BY_FACTORS}
_IN_ANY_ORDER |= {*_OWN[factors.reduce_].split(), "dot_general", "iota"}


def in_any_order(jaxpr: core.Jaxpr, part: Partitioned) -> bool:
    """True if `part`, made of `jaxpr`, is surely the same for rows in any order."""
    every = (e for e in jaxprs.equations(jaxpr) if jaxprs.kind(e) != "call")
    by_place = part.meets or part.reads_index or part.whole or part.failures or part.cut
    has_rows = any(isinstance(x, Rows) for x in part.layouts)
    return not (by_place or has_rows) and all(
        e.primitive.name in _IN_ANY_ORDER for e in every
    )


RULES = Rules(
    lambda w, e, vs: vs,
    _KNOWN,
    factors.linear,
    _NESTED,
    custom.passed_on,
    recut,
    factors.turned_to,
    draws_rows,
)
