"""Values of the undivided program, as a micro-batch holds them.

    whole    all of it
    rows     its rows [s, n / k, ...] of [s, n, ...]
    partial  a term of a sum over the micro-batches

The axis of the micro-batches, layouts and values; facts that follow from the equations
that made a value; labels and notes, which reports read.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core, source_info_util

from .._passes import effects, jaxprs
from .._passes.places import labelled, place_of, type_in_words
from .._passes.primitives import CAST, entry_of, factors_of

# == Values and layouts ================================================================


class Rows(NamedTuple):
    """A dimension that is split over micro-batches.

    Globally it is `[segments, k, rest]`, and a micro-batch holds `[segments, rest]`.
    There are several segments after `concatenate([x, y])`, or in time-major data. Rows
    that k does not divide, as after `x[1:]`, are whole.
    """

    dim: int
    segments: int = 1

    def at(self, dim: int) -> "Rows":
        return self._replace(dim=dim)


# All micro-batches hold all of it; or it is the sum of what they hold.
WHOLE, PARTIAL = "whole", "partial"

Layout = str | Rows


class Uneven(NamedTuple):
    """The size of micro-batches that do not divide the batch: the last is smaller.

    Attributes:
      total: how many rows the batch has.
      rows: how many of them one of these micro-batches has.
      before: how many micro-batches come before these: 0, or all but the last.
    """

    total: int
    rows: int
    before: int = 0


Parts = int | Uneven  # how many micro-batches there are, if they are alike


class RowsMeet(effects.IndivisibleError):
    """A collective where none can be: in a loop, a branch or a rule of the user's.

    Attributes:
      source: where the equation is from that needs it, if one does.
    """

    source: Any = None


@dataclasses.dataclass(eq=False)
class Value:
    """A value of the program of the whole batch.

    Attributes:
      x: the part of the value that a micro-batch holds; parts of a sum may have more
        digits than the sum.
      aval: the type in the whole batch.
      layout: how `x` makes the whole.
      level: the number of collectives on the longest way from the parameters.
      params: True if the value depends on the parameters.
      smooth: True if it may have a derivative with respect to the parameters.
      scaled: True for a sum times, or over, a number that may be 0 or infinite. Parts
        may add up to NaN then, although the whole is no NaN.
      made: the equation that computes the value, the operands, the number of the
        result.
      copies: the value in other layouts, as far as they were needed.
      sources: by dimension, the value whose rows these are, see `moves`.
    """

    x: Any
    aval: Any
    layout: Layout = WHOLE
    level: int = 0
    params: bool = False
    smooth: bool = False
    scaled: bool = False
    made: tuple[core.JaxprEqn, list["Value"], int] | None = None
    copies: dict[Any, Any] = dataclasses.field(default_factory=dict)
    sources: dict[int, Any] = dataclasses.field(default_factory=dict)

    def with_layout(self, x: Any, layout: Layout) -> "Value":
        """The same value, of which micro-batches hold another part."""
        return dataclasses.replace(self, x=x, layout=layout, copies={})

    def alone(self, x: Any, layout: Layout | None = None, aval: Any = None) -> "Value":
        """The value in another program, which does not know how it was made."""
        layout, aval = layout or self.layout, aval or self.aval
        return Value(x, aval, layout, self.level, self.params, self.smooth)

    @property
    def rows(self) -> Any:  # Rows, or None
        return self.layout if isinstance(self.layout, Rows) else None

    @property
    def dim(self) -> Any:
        return self.layout.dim if isinstance(self.layout, Rows) else None

    @functools.cached_property
    def origin(self) -> tuple[int, int] | None:
        """Along which axis it has rows, and how many a segment has.

        They may be gathered since, and shifted along the same axis.
        """
        if self.rows:
            return self.dim, self.shape[self.dim] // self.rows.segments
        if self.made is None or not entry_of(self.made[0]).shifts:
            return None
        return next(filter(None, (v.origin for v in self.made[1])), None)

    @property
    def is_whole(self) -> bool:
        return self.layout == WHOLE

    @property
    def is_partial(self) -> bool:
        return self.layout == PARTIAL

    @property
    def is_known(self) -> bool:
        """True for a whole value, and for a sum that is complete already."""
        return self.is_whole or (self.is_partial and WHOLE in self.copies)

    @property
    def is_wide(self) -> bool:
        """True for a sum that is rounded when it is complete: its parts are not."""
        return self.is_partial and self.x.dtype != self.aval.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def size(self) -> int:
        """The number of numbers that all micro-batches hold together."""
        return jaxprs.numbers(self.shape)


Result = tuple[Any, Layout]  # what a rule returns for each result: array and layout

Results = list[Result] | None  # None if a rule does not apply


def unit(parts: Parts) -> int:
    """The number that divides the length of each segment of rows."""
    return parts.total if isinstance(parts, Uneven) else parts


def length_of(n: int, parts: Parts) -> int:
    """The count of those numbers, of n along rows, that a micro-batch holds."""
    return n * parts.rows // parts.total if isinstance(parts, Uneven) else n // parts


def start_of(n: int, index: Any, parts: Parts) -> Any:
    """The first of them in a segment of n numbers."""
    length = length_of(n, parts)
    start = jax.lax.mul(index.astype(jnp.int32), np.int32(length))
    if isinstance(parts, Uneven):  # the last is the end of what the others leave
        skipped = n - length * (parts.before + 1) if parts.before else 0
        start = jax.lax.add(start, np.int32(skipped))
    return start


def can_split(shape: tuple[int, ...], rows: Rows, parts: Parts) -> bool:
    """True if an array can have such rows."""
    n = shape[rows.dim]
    return n > 0 and n % (rows.segments * unit(parts)) == 0


def local_shape(
    shape: tuple[int, ...], layout: Layout, parts: Parts
) -> tuple[int, ...]:
    """The shape of what a micro-batch holds."""
    if not isinstance(layout, Rows):
        return tuple(shape)
    d = layout.dim
    return (*shape[:d], length_of(shape[d], parts), *shape[d + 1 :])


def rows_of(x: Any, rows: Rows, index: Any, parts: Parts) -> Any:
    """The rows that a micro-batch has of an array that all hold."""
    d, shape = rows.dim, jnp.shape(x)
    if isinstance(parts, Uneven):
        n = shape[d] // rows.segments
        x = jnp.reshape(x, (*shape[:d], rows.segments, n, *shape[d + 1 :]))
        start, length = start_of(n, index, parts), length_of(n, parts)
        x = jax.lax.dynamic_slice_in_dim(x, start, length, d + 1)
        return jnp.reshape(x, local_shape(shape, rows, parts))
    rest = shape[d] // (rows.segments * parts)
    x = jnp.reshape(x, (*shape[:d], rows.segments, parts, rest, *shape[d + 1 :]))
    x = jax.lax.dynamic_index_in_dim(x, index, d + 1, keepdims=False)
    return jnp.reshape(x, local_shape(shape, Rows(d), parts))


def varies(aval: Any) -> frozenset[Any]:
    """Over which axes devices hold different values, where a mesh keeps track."""
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else frozenset()


def varying(xs: Sequence[Any], axes: Iterable[Any] = ()) -> list[Any]:
    """Operands that vary over some axes, and over all axes of any operand."""
    each = [varies(jax.typeof(x)) for x in xs]
    every = frozenset(axes).union(*each)
    return [
        jax.lax.pcast(x, tuple(every - its), to="varying") if its != every else x
        for x, its in zip(xs, each, strict=True)
    ]


def type_here(aval: Any, shape: tuple[int, ...], like: Any) -> Any:
    """A type of another shape, which varies over devices as it or `like` does.

    Along explicit axes it is sharded as they are, for JAX compares types.
    """
    here = jax.typeof(like) if isinstance(like, jax.Array) else like
    for of in (here, aval):
        if of is not None and varies(of):
            return of.update(shape=shape, dtype=aval.dtype, weak_type=False)
    sharding = getattr(aval if here is None else here, "sharding", None)
    told = sharding and not sharding.mesh.empty and len(sharding.spec) == len(shape)
    sharding = sharding if told else None
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return aval.update(shape=shape, sharding=sharding, weak_type=False)
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=sharding)


def types_of(equation: core.JaxprEqn) -> list[Any]:
    """The types of its results, which have a shape and a dtype."""
    return [x.aval for x in equation.outvars]


def taken(equation: core.JaxprEqn, vs: list[Value]) -> jaxprs.Program | None:
    """The branch of a conditional that is taken, if that is known.

    JAX has branches for the kernels of an accelerator, where none of ours is written.
    """
    made = vs[0].made if jaxprs.kind(equation) == "cond" else None
    platforms: Any = made[0].params.get("platforms") if made else None
    if platforms is None:
        return None
    pairs = zip(jaxprs.inner(equation), platforms, strict=True)
    left = [branch for branch, names in pairs if set(names or ("",)) - {"mosaic"}]
    return left[0] if len(left) == 1 else None


# == The axis ==========================================================================


class Axis(NamedTuple):
    """The axis of the micro-batches.

    Attributes:
      name: the name of the axis.
      parts: the number of micro-batches, on all devices together; or their size, if
        the last one is smaller. Then rows must not meet, but for counts.
      longest: the length of the longest scan in which rows may meet; longer scans are
        computed whole.
      is_checked: True if the axis is in a region of a mesh that has no types for it.
        Then a `name` equation of the operand stands for a collective.
      labels: True if equations are to say what a micro-batch holds of their results.
      turns: True if functions of pairs may be split along columns.
    """

    name: str
    parts: Parts
    longest: int
    is_checked: bool = False
    labels: bool = False
    turns: bool = True

    @property
    def is_even(self) -> bool:
        """True if all micro-batches have as many rows."""
        return not isinstance(self.parts, Uneven)

    @property
    def size(self) -> int:
        """The number of micro-batches, for rules that know of nothing else."""
        if isinstance(self.parts, Uneven):
            raise RowsMeet
        return self.parts

    @property
    def env(self) -> list[tuple[str, int]]:
        """The axes that are bound where programs of micro-batches are traced."""
        if isinstance(parts := self.parts, Uneven):
            number = parts.before + 1 if parts.before else -(-parts.total // parts.rows)
            return [(self.name, number)]
        return [(self.name, parts)]

    def is_meeting(self, e: core.JaxprEqn) -> bool:
        """True if an equation is a collective over the axis, in which rows meet."""
        return self.name in jaxprs.axes_of(e) or meeting_of(e) is not None

    def meets(self, e: core.JaxprEqn) -> bool:
        """True if rows meet in an equation, or in a program inside of it."""
        return any(map(self.is_meeting, jaxprs.within(e)))

    def sum(self, x: Any) -> Any:
        return self._over("psum", x)

    def extremum(self, x: Any, is_max: bool) -> Any:
        return self._over("pmax" if is_max else "pmin", x)

    def gather(self, x: Any, dim: int = 0, tiled: bool = False) -> Any:
        """The arrays of all micro-batches, stacked along a new axis, or joined."""
        if self.is_checked or 0 in x.shape:
            x = self._over("all_gather", x)
            each = [x] * self.size
            return jnp.concatenate(each, dim) if tiled else jnp.stack(each, dim)
        return jax.lax.all_gather(x, self.name, axis=dim, tiled=tiled)

    def stack(self, x: Any, index: Any) -> Any:
        """The same of uneven micro-batches: each adds its own array to zeros."""
        [(_, number)] = self.env
        wide = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        zeros = jnp.zeros((number, *x.shape), wide.dtype)
        return self.sum(zeros.at[index].set(wide)).astype(x.dtype)

    def _over(self, collective: str, x: Any) -> Any:
        if 0 in x.shape:
            return x  # without numbers nothing meets
        if self.is_checked:
            return checkpoint_name(x, MEETS + collective)
        return getattr(jax.lax, collective)(x, self.name)


MEETS = "rows meet: "


def meeting_of(e: core.JaxprEqn) -> str | None:
    """The collective that a `name` equation stands for in a region that checks."""
    name = str(e.params.get("name", "")) if e.primitive.name == "name" else ""
    return name.removeprefix(MEETS) if name.startswith(MEETS) else None


# == How a value was made ==============================================================


def computed_by(v: Value) -> tuple[core.JaxprEqn, list[Value]] | None:
    """The equation that computes a value of no rows, unless it only moves numbers."""
    if v.made is None or not all(u.is_whole for u in v.made[1]):
        return None
    e, vs, _ = v.made
    moves = entry_of(e).is_exact or e.primitive.name.startswith("scatter")
    return None if moves else (e, vs)


def known_number(v: Value) -> Any:
    """The number that all of a value is for certain, or None."""
    if v.made is None:
        is_number = v.shape == () and not isinstance(v.x, jax.core.Tracer)
        return np.asarray(v.x).item() if is_number else None
    e, vs, _ = v.made
    name, moves = e.primitive.name, entry_of(e).moves
    number = known_number(vs[0]) if moves or name in (CAST, "pvary") else None
    if name != CAST or number is None or not np.isfinite(number):
        return number
    with jax.ensure_compile_time_eval():  # it may become another number
        x = np.asarray(number, vs[0].aval.dtype)
        return np.asarray(jax.lax.convert_element_type(x, v.aval.dtype)).item()


def unmoved(v: Value) -> tuple[Value, dict[int, int]]:
    """The value that a value was before it was moved, and spread along new axes.

    With it comes, for each of its axes that is longer than 1, the axis of `v` that it
    became.
    """
    axes = {d: d for d, n in enumerate(v.shape) if n != 1}
    while v.made is not None and (back := _axes_before(v.made[0])) is not None:
        axes = {back[d]: place for d, place in axes.items() if d in back}
        v = v.made[1][0]
    return v, axes


def _axes_before(e: core.JaxprEqn) -> dict[int | None, int] | None:
    """For axes of the result, the axis of the operand that each was.

    None if the equation does more than move numbers, or takes axes apart.
    """
    if not entry_of(e).moves and e.primitive.name != "stop_gradient":
        return None
    if e.primitive.name != "reshape":
        ways = factors_of(entry_of(e), e)
        return {x.outs[0]: x.ins[0] for x in ways if x.ins[0] is not None}
    both: list[Any] = [*e.invars[:1], *e.outvars]
    shapes = [x.aval.shape for x in both]
    before, after = ([d for d, n in enumerate(x) if n != 1] for x in shapes)
    same = [shapes[0][d] for d in before] == [shapes[1][d] for d in after]
    return dict(zip(after, before, strict=True)) if same else None


def ancestors(values: Iterable[Value]) -> Iterator[Value]:
    """Values, and all that they are computed of, each once."""
    todo, seen = list(values), set[Value]()
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        yield v
        if v.made is not None:
            todo += v.made[1]


def is_of_rows(v: Value) -> bool:
    """True if a whole value was computed of values with rows, which met."""
    return v.is_whole and any(u.rows or u.is_partial for u in ancestors([v]))


def is_reshaped(v: Value) -> bool:
    """True if a value is rows in another shape: they are kept once for both shapes."""
    if v.made is None or not entry_of(v.made[0]).moves:
        return False
    of = v.made[1][0]
    return of.size == v.size and not of.is_whole


def is_scaled(e: core.JaxprEqn, vs: Sequence[Value], size: int) -> bool:
    """True if the parts of a result may add up to NaN, see `Value`.

    Then the operand is summed instead, unless that is much larger.
    """
    name = e.primitive.name
    summed, factors = [v for v in vs if v.is_partial], []
    if name == "div":
        summed, factors = vs[:1], vs[1:]
    elif name == "mul":
        factors = [v for v in vs if not v.is_partial]
    if jaxprs.inner_programs(e) or sum(v.size for v in summed) > max(size, _FEW):
        return False
    numbers = map(known_number, factors)
    finite = all(x is not None and np.isfinite(x) and x != 0 for x in numbers)
    return any(v.scaled for v in vs) or not finite


_FEW = 16  # numbers: so many more may be summed


# == Labels for reports ================================================================
# Labels on equations: the part of each result that a micro-batch holds.
#
# Reports read the labels, see `places.label_of`. A label stays with an equation while
# passes rewrite the program.


def labelled_values(axis: Axis, results: Sequence[Value]) -> list[Value]:
    """All values of a program that results are computed of; none without labels."""
    every = ancestors(results) if axis.labels else ()
    return [v for v in every if v.made is not None]


def value_in_words(v: Value) -> str:
    """The part of a value that a micro-batch holds, and the type of the whole value."""
    holds = f"rows {v.dim}" if v.rows else "part" if v.is_partial else "all"
    return f"{holds} of {type_in_words(v.aval)}"


def labelled_program(closed: Any, labels: Sequence[str]) -> Any:
    """A program whose last results have these labels, without these results."""
    jaxpr = closed.jaxpr
    number = len(jaxpr.outvars) - len(labels)
    pairs = zip(jaxpr.outvars[number:], labels, strict=True)
    texts = {x: text for x, text in pairs if jaxprs.is_variable(x)}

    def with_label(e: core.JaxprEqn) -> core.JaxprEqn:
        of_results = [texts[x] for x in e.outvars if x in texts]
        return labelled(e, ", ".join(of_results)) if of_results else e

    eqns = list(map(with_label, jaxpr.eqns))
    return closed.replace(
        jaxpr=jaxpr.replace(eqns=eqns, outvars=jaxpr.outvars[:number])
    )


# == Results that come late ============================================================


class Late(NamedTuple):
    """Results that are linear in sums, computed when the sums are complete.

        Σ xₖ / n  =  (Σ xₖ) / n        and no inf - inf on the left, where n is 0

    Attributes:
      places: by the number of the result, the step that computes it.
      steps: an equation, the steps of its operands, and the number of its result; or
        None, the number of an operand, and the dtype of the complete sum.
    """

    places: Mapping[int, int]
    steps: Sequence[tuple[core.JaxprEqn | None, list[int], Any]]

    def put(self, results: Sequence[Any]) -> list[Any]:
        """The results, from those of the loops, after which the operands come."""
        operands = sum(e is None for e, *_ in self.steps)
        first, values = len(results) - operands, list[Any]()
        for e, of, which in self.steps:
            if e is None:
                values.append(results[first + of[0]].astype(which))
            else:
                out = e.primitive.bind(*(values[i] for i in of), **e.params)
                values.append(out[which] if e.primitive.multiple_results else out)
        its = [values[i] for i in self.places.values()]
        return jaxprs.put(results[:first], self.places, its)


def late_of(out: Sequence[Value]) -> tuple[Late | None, list[Value]]:
    """The `Late` part of a program with these results, if any, and its operands."""
    steps, operands, places = list[Any](), list[Value](), dict[Value, int]()

    def place(v: Value) -> int:
        if v not in places:
            if v.scaled and v.made is not None:
                e, vs, i = v.made
                steps.append((e, list(map(place, vs)), i))
            else:
                steps.append((None, [len(operands)], v.aval.dtype))
                operands.append(v)
            places[v] = len(steps) - 1
        return places[v]

    late = {i: place(v) for i, v in enumerate(out) if v.scaled}
    return (Late(late, steps) if late else None), operands


# == Notes =============================================================================


class Note(NamedTuple):
    """An equation that is computed whole, or that the user made a promise of."""

    name: str
    line: str
    nbytes: int  # of what the equation computes, or reads of all rows


@dataclasses.dataclass
class Records:
    """The records that all writers of one partition share.

    Attributes:
      notes: equations that are computed whole.
      promised: equations that are split because the user says so.
      programs: programs that are written once, see `Writer.once`.
      turns: True if functions of pairs are split along columns.
    """

    notes: list[Note] = dataclasses.field(default_factory=list)
    promised: list[Note] = dataclasses.field(default_factory=list)
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    turns: bool = False


def note_of(e: core.JaxprEqn, size: int, name: str | None) -> Note:
    """The note of an equation that computes, or reads, `size` numbers."""
    reads = f"what {jaxprs.name_of(e)} reads"
    name = name or effects.hides(e) or (jaxprs.name_of(e) if e.outvars else reads)
    around = source_info_util.current_name_stack()
    types = [x.aval.dtype for x in e.outvars or e.invars if hasattr(x.aval, "dtype")]
    widest = max((x.itemsize for x in types), default=0)
    return Note(name, place_of(e.source_info, around), size * widest)
