"""Rows that a program makes itself: draws, counts, indices in another order."""

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.random import threefry2x32_p

from .._passes import jaxprs, places, primitives
from .._passes.primitives import TABLE
from . import factors, held, indexing, moves, nested
from .held import Layout, Result, Rows, Value
from .writer import Writer

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
        found = dict[int, Rows]()
        if vs and all(v.is_whole for v in vs):
            found = {i: self._rows_of(v) for i, v in enumerate(vs) if self._is_one(v)}
        elif e.primitive.name == "gather" and indexing.reorders(w, e, *vs):
            rows = self.rows.at(0)  # such as two for each row of the batch
            found = {1: rows} if held.can_split(vs[1].shape, rows, w.axis.parts) else {}
        size = max([jaxprs.computed(e), *(vs[i].size for i in found)])
        if not found or size < _LARGE * jaxprs.numbers([self.length]):
            return vs
        i, rows = max(found.items(), key=lambda pair: vs[pair[0]].size)
        way: Any = self._way(vs[i])
        root = e.primitive.name, places.line_of(e.source_info), way
        self.roots[root] = size
        if root not in self.cut:
            return vs
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


# == Random draws ======================================================================
# Random numbers: each micro-batch computes its own part of what the whole batch draws.
#
# Threefry computes number i of an array from the key and i alone. So a part of an array
# is drawn from the indices of the part, with the bits of the whole. With any other
# generator each micro-batch draws all, and takes its own.


def recut_bits(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The rows of random bits; None where that is not known."""
    [v], shape, width = vs, e.params["shape"], e.params["bit_width"]
    if v.shape:
        return _of_each_key(w, e, vs, rows)
    partitionable = getattr(jax.config, "jax_threefry_partitionable", False)
    if not v.is_whole or not (partitionable and primitives.is_threefry(v.aval)):
        return None
    if math.prod(shape) >= 2**32:
        return None
    key = "count", shape, rows, jaxprs.Same(w.index)
    count = w.once(key, lambda: _count(w, shape, rows))
    k1, k2 = jax.random.key_data(v.x)
    zeros = jax.lax.bitwise_xor(count, count)  # batched as it is, under jax.vmap
    high, low = threefry2x32_p.bind(k1, k2, zeros, count)
    dtype = held.types_of(e)[0].dtype
    if width == 64:
        high = jax.lax.shift_left(high.astype(dtype), jnp.full_like(high, 32, dtype))
        return high | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _of_each_key(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The draws of each key, or the keys split off it; None if one key is for all."""
    [v] = vs
    is_own = rows.dim < len(v.shape) and primitives.is_threefry(v.aval)
    return w.run(e, [w.part(v, rows)]) if is_own else None


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
    if not all(v.is_known for v in vs):
        return None
    rule = _OPEN.get(e.primitive.name) or indexing.WANTED.get(e.primitive.name)
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
    return w.once(("bits", rows, *map(jaxprs.Same, xs)), lambda: w.results(e, xs))


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
    call = w.once(("call", jaxprs.Same(run.closed)), lambda: jax.jit(run.__call__))
    [x] = call(nested.index_for(w, run), [w.whole(v) for v in vs])
    w.level = max(w.level, *run.levels)
    return x


def draws_rows(w: Writer, e: core.JaxprEqn) -> bool:
    """True if a jitted function draws random numbers, and its rows can be cut."""
    [program] = jaxprs.inner(e)

    def found() -> bool:
        names = [x.primitive.name for x in jaxprs.equations(program.jaxpr)]
        return "random_bits" in names and OPEN.issuperset(names)

    return len(e.outvars) == 1 and w.once(("draws", jaxprs.Same(program.jaxpr)), found)


# Equations that are gone back through wherever rows of what they compute are wanted.
_OPEN: dict[str, Any] = {
    **{name: factors.from_rows for name, row in TABLE.items() if row.is_open},
    "iota": _iota,
    "reshape": moves.reshape_wanted,
    "random_bits": recut_bits,
    "random_split": _of_each_key,  # few numbers for each row: cut if of one key
    **{name: _jitted for name, row in TABLE.items() if row.kind == "call"},
}

OPEN = frozenset(_OPEN)


def cuts_operands(e: core.JaxprEqn) -> bool:
    """True if rows of the result are computed from rows of the operands."""
    return e.primitive.name in OPEN
