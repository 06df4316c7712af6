"""The program of a micro-batch while it is written: changes of layout, equations."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core, source_info_util

from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Layout,
    Result,
    Results,
    Rows,
    RowsMeet,
    Value,
    local_shape,
    own,
    types_of,
    varying,
)
from ga_optax._passes import ir, known, places, references
from ga_optax._passes.ir import is_inexact
from ga_optax._passes.primitives import CAST, row_of


class Axis(NamedTuple):
    """The axis of the micro-batches.

    Attributes:
      name: its name.
      size: how many micro-batches there are, on all devices.
      longest: the longest scan in which rows may meet; longer ones are computed whole.
      is_checked: whether it is in a region of a mesh that has no types for it. Then
        what stands for a collective is a name of its operand.
      draws_whole: whether all that XLA's generator draws is that of the whole batch.
    """

    name: str
    size: int
    longest: int
    is_checked: bool = False
    draws_whole: bool = False

    def is_meeting(self, e: core.JaxprEqn) -> bool:
        """Whether rows meet in an equation."""
        return self.name in ir.axes_of(e) or meeting_of(e) is not None

    def meets(self, e: core.JaxprEqn) -> bool:
        """Whether rows meet in it, or inside of it."""
        return any(map(self.is_meeting, ir.within(e)))

    def sum(self, x: Any) -> Any:
        return self._over("psum", x)

    def extremum(self, x: Any, is_max: bool) -> Any:
        return self._over("pmax" if is_max else "pmin", x)

    def gather(self, x: Any, dim: int = 0, tiled: bool = False) -> Any:
        """What all hold, stacked along a new dimension, or joined along one."""
        if self.is_checked or 0 in x.shape:
            x = self._over("all_gather", x)
            each = [x] * self.size
            return jnp.concatenate(each, dim) if tiled else jnp.stack(each, dim)
        return jax.lax.all_gather(x, self.name, axis=dim, tiled=tiled)

    def _over(self, collective: str, x: Any) -> Any:
        if 0 in x.shape:
            return x  # without numbers nothing meets
        if self.is_checked:
            return checkpoint_name(x, _MEETS + collective)
        return getattr(jax.lax, collective)(x, self.name)


_MEETS = "rows meet: "


def meeting_of(e: core.JaxprEqn) -> str | None:
    """The collective that an equation stands for in a region that checks."""
    name = str(e.params.get("name", "")) if e.primitive.name == "name" else ""
    return name.removeprefix(_MEETS) if name.startswith(_MEETS) else None


class Note(NamedTuple):
    """An equation that was computed whole, or that the user made a promise of."""

    name: str
    line: str
    nbytes: int  # that it computes, or reads of all rows


class Drawn(Note):
    """One that draws, in each micro-batch by itself where a platform has no better."""


@dataclasses.dataclass
class Writer:
    """What rules write a program with, at one place of it.

    Elsewhere is another, `within`; what is noted and made once is one list for all.

    Attributes:
      axis: the axis of the micro-batches.
      index: which micro-batch it is, traced.
      rules: the rule of each primitive.
      created: the operands of an equation, of which those that the program created with
        an axis as long as the batch may have rows; None if they stay as they are.
      draws: which random numbers micro-batches may draw, each by itself.
      jaxpr: the program at hand.
      source: where the equation at hand is from, or the one whose program it is in.
      level: the level of what the equation at hand reads, see `Value`.
      apart: whether rows must not meet here.
      shares: whether what is whole may be shared out among addends.
      in_rule: whether it writes a rule, which is not derived once more.
      again: whether what it writes will be partitioned once more.
      notes: what was computed whole.
      promised: what was split because the user says so.
      failures: of rules, each of which is a fault of ours.
      objects: what was made once, see `once`.
    """

    axis: Axis
    index: Any
    rules: "Rules"
    created: Callable[["Writer", core.JaxprEqn, list[Value]], list[Value]] | None
    draws: Any
    jaxpr: Any = None
    source: Any = None
    level: int = 0
    apart: bool = False
    shares: bool = True
    in_rule: bool = False
    again: bool = False
    notes: list[Note] = dataclasses.field(default_factory=list)
    promised: list[Note] = dataclasses.field(default_factory=list)
    failures: list[Exception] = dataclasses.field(default_factory=list)
    objects: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def within(self, **other: Any) -> "Writer":
        """The writer of a place where some of this is otherwise."""
        return dataclasses.replace(self, **other)

    # -- What is made once -------------------------------------------------------------

    def once(
        self,
        make: Callable[[], Any],
        its: Sequence[Any],
        facts: Any,
        serves: Callable[[Any], bool] = lambda made: True,
    ) -> Any:
        """What `make` returns: the same object for the same things and facts.

        The layers of a model are alike. A program in them is partitioned once, and JAX
        traces a function once, if it is the same function.

        Args:
          make: what makes it.
          its: what it is made of, that is equal to itself alone.
          facts: what it is, and what else it depends on.
          serves: whether the others may have it, too.
        """
        where = self.apart, self.shares, self.in_rule, self.again
        key = facts, tuple(map(id, its)), where
        if key in self.objects:
            return self.objects[key][0]
        said = len(self.notes), len(self.failures)
        new = make()
        # What is said has lines: it is said for each.
        if said == (len(self.notes), len(self.failures)) and serves(new):
            self.objects[key] = new, its  # kept, so that nothing else gets their ids
        return new

    # -- Layouts -----------------------------------------------------------------------

    def to(self, v: Value, layout: Layout) -> Any:
        """The value in a layout; it remembers those that it was in."""
        x, level = v.x, v.level
        if layout == PARTIAL and not v.is_partial:
            if not is_inexact(v.aval):
                raise RowsMeet
            return self.addend(self.reduced(v))
        if layout != v.layout:
            if layout not in v.copies:
                here = self.within(level=0)
                is_rows = isinstance(layout, Rows)
                made = here._cut(v, layout) if is_rows else here._all_of(v)
                v.copies[layout] = made, here.level
            x, level = v.copies[layout]
        self.level = max(self.level, level)
        return x

    def whole(self, v: Value) -> Any:
        """All of a value: a sum or a stack over micro-batches, unless it is whole."""
        return self.to(v, WHOLE)

    def part(self, v: Value, rows: Rows) -> Any:
        """This micro-batch's rows of a value."""
        return self.to(v, rows)

    def _all_of(self, v: Value) -> Any:
        self.meet()
        if v.made is not None and (v.scaled or _is_reshaped(v)):
            e, vs, i = v.made  # of what it is made of, whole
            xs = [jnp.asarray(self.whole(u), u.aval.dtype) for u in vs]
            return self.results(e, xs)[i]
        self.level = v.level + v.params
        return self.sum(v.x) if v.is_partial else self.joined(v)

    def _cut(self, v: Value, rows: Rows) -> Any:
        if v.is_whole and (x := self.rules.recut(self, v, rows)) is not None:
            return x
        x = self.own(self.whole(v), rows)
        if found := _computed(v):
            e, vs = found
            self.note(e, max(u.size for u in (v, *vs)))  # for these rows alone
        return x

    def reduced(self, v: Value) -> Value:
        """The value, whole."""
        level = v.level if v.is_whole else v.level + v.params
        new = v.held(self.whole(v), WHOLE)
        return dataclasses.replace(new, level=level, scaled=False)

    def summed(self, vs: Sequence[Value]) -> list[Value]:
        """Values, of which those that are partial are whole."""
        return [self.reduced(v) if v.is_partial else v for v in vs]

    def parts(self, vs: list[Value], rows: Rows, dims: Sequence[int | None]) -> Any:
        """The operands of a call, which have such rows along a dimension of each."""
        pairs = zip(vs, dims, strict=True)
        return [
            self.whole(v) if d is None else self.part(v, rows.at(d)) for v, d in pairs
        ]

    def addend(self, v: Value) -> Any:
        """What this micro-batch adds to a value; of a whole one, its share."""
        if v.is_partial:
            return v.x
        number = number_of(v)
        if not self.shares and number != 0:
            raise RowsMeet
        if number == 0:  # made here: it is nothing that waits for other loops
            return jnp.zeros_like(v.x, v.aval.dtype)
        size = jnp.asarray(self.axis.size, v.aval.dtype)
        return jax.lax.div(
            jnp.asarray(v.x, v.aval.dtype), jnp.broadcast_to(size, v.shape)
        )

    def own(self, x: Any, rows: Rows) -> Any:
        """This micro-batch's rows of an array that all hold."""
        return own(x, rows, self.index, self.axis.size)

    def held(self, v: Value, row: Any) -> tuple[Any, Any]:
        """Where a micro-batch has rows of a value, and whether it has them.

        The first one has what lies outside, so that it comes out once.
        """
        rest, parts = v.x.shape[v.dim] // v.rows.segments, self.axis.size
        inside = (row >= 0) & (row < v.shape[v.dim])
        owner = jnp.where(inside, row // rest % parts, 0)
        place = row // (rest * parts) * rest + row % rest
        return jnp.where(inside, place, v.shape[v.dim]), owner == self.index

    def meet(self, v: Value | None = None) -> None:
        """Rows meet, those of a value; not where they must not."""
        if self.apart:
            raise RowsMeet
        if v is not None:
            self.level = max(self.level, v.level + v.params)

    def sum(self, x: Any) -> Any:
        """The sum over micro-batches."""
        self.meet()
        return self.axis.sum(x)

    def gather(self, x: Any) -> Any:
        """What all micro-batches hold, stacked along a new axis 0."""
        self.meet()
        return self.axis.gather(x)

    def joined(self, v: Value) -> Any:
        """All rows, in their order."""
        self.meet()
        x, d, segments = v.x, v.dim, v.rows.segments
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = self.joined(v.held(jax.random.key_data(x), v.layout))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        shape = *v.shape[: d + 1], *x.shape[d + 1 :]  # the data of a key has more
        if segments == 1:
            return self.axis.gather(x, d, tiled=True)
        # Of x itself: what is kept of it for others serves here as well.
        x = self.axis.gather(x, d)
        rest = shape[d] // (segments * self.axis.size)
        x = x.reshape(*shape[:d], self.axis.size, segments, rest, *shape[d + 1 :])
        return x.swapaxes(d, d + 1).reshape(shape)

    # -- Equations ---------------------------------------------------------------------

    def run(self, e: core.JaxprEqn, xs: Sequence[Any], **params: Any) -> Any:
        """The result of an equation, or a list of them, with other parameters."""
        if self.axis.is_checked:
            if e.primitive.name == "pvary":  # some of it may vary already
                return varying(xs, e.params["axes"])[0]
            xs = varying(xs)
        return e.primitive.bind(*xs, **(e.params | params))

    def results(self, e: core.JaxprEqn, xs: Sequence[Any], **params: Any) -> list[Any]:
        out = self.run(e, xs, **params)
        return list(out) if e.primitive.multiple_results else [out]

    def all_whole(self, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
        """The results of an equation, computed whole."""
        if ir.inner_programs(e) or ir.acts(e):
            out = self.rules.passed_on(self, e, vs)
        else:
            out = self.bound(e, [self.whole(v) for v in vs])
        return [(x, WHOLE) for x in out]

    def bound(self, e: core.JaxprEqn, xs: Sequence[Any]) -> list[Any]:
        """The results of an equation of the whole batch, as it is."""
        if e.primitive.name == "pvary":
            return self.results(e, xs)
        xs, names = list(xs), source_info_util.new_name_stack()  # those around it do
        e = e.replace(source_info=e.source_info.replace(name_stack=names))
        if e.primitive.name == "dynamic_update_slice":
            # In a loop XLA:CPU (of jax 0.10 to 0.12) writes an update in place while it
            # still reads it from the same array.
            xs[1] = jax.lax.optimization_barrier(xs[1])
        return ir.bind(self.jaxpr, [e], e.invars, e.outvars, xs)

    def interpret(
        self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value]
    ) -> list[Value]:
        """The results of a program of the whole batch."""
        jaxpr = references.grouped(jaxpr)
        constants = [
            Value(x, var.aval) for x, var in zip(consts, jaxpr.constvars, strict=True)
        ]
        names = [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(names, [*constants, *args], strict=True))

        def value(x: Any) -> Value:
            return Value(x.val, x.aval) if isinstance(x, core.Literal) else env[x]

        here, outer = self.within(jaxpr=jaxpr), source_info_util.current_name_stack()
        for e in jaxpr.eqns:
            e = places.placed(e, self.source)
            info = here.source = e.source_info
            with source_info_util.user_context(
                info.traceback, name_stack=outer + info.name_stack
            ):
                out = here._equation(e, [value(x) for x in e.invars])
            env.update(zip(e.outvars, out, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def _equation(self, e: core.JaxprEqn, vs: list[Value]) -> list[Value]:
        if ir.kind(e) == "call" and not self._stays(e, vs):
            [program] = ir.inner(e)
            return self.interpret(program.jaxpr, program.consts, vs)
        if (program := ir.in_two(e)) is not None:
            return self.interpret(program.jaxpr, program.consts, vs)
        self.level = max((v.level for v in vs), default=0)
        vs = self.created(self, e, vs) if self.created else vs
        results = self._applied(e, vs)
        params, smooth = (any(getattr(v, a) for v in vs) for a in ("params", "smooth"))
        smooth = smooth and e.primitive.name != "stop_gradient"
        return [
            Value(
                x,
                var.aval,
                layout,
                self.level,
                params,
                smooth and is_inexact(var.aval),
                layout == PARTIAL and _is_scaled(e, vs, ir.numbers(x.shape)),
                (e, vs, i),
            )
            for i, ((x, layout), var) in enumerate(zip(results, e.outvars, strict=True))
        ]

    def _stays(self, e: core.JaxprEqn, vs: list[Value]) -> bool:
        """Whether a jitted function stays one, which JAX lowers once."""
        whole = all(v.is_whole for v in vs)
        return references.is_group(e) or (whole and self.rules.draws(self, e))

    def _applied(self, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
        name = e.primitive.name
        kind, shifts = ir.kind(e) or name, row_of(e).shifts
        notes, rules = len(self.notes), self.rules
        opens = kind in rules.nested and bool(e.outvars) and ir.acts(e)
        if all(v.is_whole for v in vs) and not opens and not shifts:
            return self.all_whole(e, vs)
        with self.may_fail(e) as out:
            if kind in rules.nested and e.outvars:
                out += rules.nested[kind](self, e, vs) or ()
            else:
                if any(v.is_partial for v in vs):
                    out += rules.linear(self, e, vs) or ()
                if not out:
                    vs = self.summed(vs)
                    if any(v.rows for v in vs) or shifts:
                        rule = rules.known.get(name, rules.others)
                        out += rule(self, e, vs) or ()
        if self._fits(e, out):
            return out
        del self.notes[notes:]
        if all(v.is_whole for v in vs):
            return self.all_whole(e, vs)
        return self.noted(None, e, vs)

    def noted(
        self, name: str | None, e: core.JaxprEqn, vs: list[Value]
    ) -> list[Result]:
        """The results of an equation, computed whole, which is said under a name."""
        read = sum(ir.numbers(v.shape) for v in vs if v.rows)
        self.note(e, max(ir.computed(e), read), name)
        return self.all_whole(e, vs)

    def note(
        self,
        e: core.JaxprEqn,
        size: int,
        name: str | None = None,
        kind: type[Note] = Note,
    ) -> None:
        """Notes that an equation is computed whole, or by another kind."""
        if name is None:
            name = "new_ref" if references.is_group(e) else known.hides(e)
        its = ir.name_of(e) if e.outvars else f"what {ir.name_of(e)} reads"
        self.notes.append(self.about(e, size, name or its, kind))

    def about(
        self, e: core.JaxprEqn, size: int, name: str, kind: type[Note] = Note
    ) -> Note:
        """What is said of an equation that computes, or reads, so many numbers."""
        names = source_info_util.current_name_stack()
        types = [
            x.aval.dtype for x in e.outvars or e.invars if hasattr(x.aval, "dtype")
        ]
        widest = max((x.itemsize for x in types), default=0)
        return kind(name, places.place_of(e.source_info, names), size * widest)

    @contextlib.contextmanager
    def may_fail(self, e: core.JaxprEqn, last: bool = True) -> Iterator[list[Any]]:
        """A list that is empty at the end if rows met where they cannot.

        So it is if the rule of an equation fails, which is said: computed whole, the
        result is right all the same. Where nothing can be computed whole, it raises,
        unless something else is tried, after which this is not the `last`.
        """
        found: list[Any] = []
        level, notes = self.level, len(self.notes)
        try:
            yield found
        except Exception as error:
            if isinstance(error, RowsMeet) and self.apart and last:
                raise
            self.level = level
            found.clear()
            del self.notes[notes:]
            if not isinstance(error, RowsMeet):
                self.failures.append(error)
                _warn(e, error)

    def _fits(self, e: core.JaxprEqn, out: list[Result]) -> bool:
        """Whether a rule gave every result in the shape of its layout."""
        pairs = zip(out, types_of(e), strict=False)
        return len(out) == len(e.outvars) > 0 and all(
            jnp.shape(x) == local_shape(due.shape, layout, self.axis.size)
            for (x, layout), due in pairs
        )


def _computed(v: Value) -> tuple[core.JaxprEqn, list[Value]] | None:
    """What computes a value of no rows, unless that only moves numbers."""
    if v.made is None or not all(u.is_whole for u in v.made[1]):
        return None
    e, vs, _ = v.made
    moves = row_of(e).is_exact or e.primitive.name.startswith("scatter")
    return None if moves else (e, vs)


_failed: set[str] = set()


def _warn(e: core.JaxprEqn, error: Exception) -> None:
    """Once for the rule of each primitive: a fault of ours, or new in JAX."""
    name = e.primitive.name
    if name in _failed:
        return
    _failed.add(name)
    warnings.warn(
        f"The rule of ga_optax for {name} failed with jax {jax.__version__}: "
        f"{type(error).__name__}: {error}. {name} at {places.line_of(e.source_info)} "
        "is computed whole in each micro-batch instead: the result is right, but takes "
        "more memory. Use a newer ga_optax.",
        stacklevel=2,
    )


def number_of(v: Value) -> Any:
    """The number that all of it is for certain, or None."""
    if v.made is None:
        is_number = v.shape == () and not isinstance(v.x, jax.core.Tracer)
        return np.asarray(v.x).item() if is_number else None
    e, vs, _ = v.made
    spreads = row_of(e).moves or e.primitive.name == CAST
    return number_of(vs[0]) if spreads else None


def _is_reshaped(v: Value) -> bool:
    """Whether it is something in another shape: it is kept once for both."""
    if v.made is None or not row_of(v.made[0]).moves:
        return False
    of = v.made[1][0]
    return of.size == v.size and not of.is_whole


def _is_scaled(e: core.JaxprEqn, vs: Sequence[Value], size: int) -> bool:
    """Whether parts may add up to NaN here, see `Value`.

    If so the sum of something else is taken, unless that is much larger.
    """
    name = e.primitive.name
    summed, factors = [v for v in vs if v.is_partial], []
    if name == "div":
        summed, factors = vs[:1], vs[1:]
    elif name == "mul":
        factors = [v for v in vs if not v.is_partial]
    if ir.inner_programs(e) or sum(v.size for v in summed) > max(size, _FEW):
        return False
    numbers = map(number_of, factors)
    finite = all(x is not None and np.isfinite(x) and x != 0 for x in numbers)
    return any(v.scaled for v in vs) or not finite


_FEW = 16  # numbers: so many more may be summed

Rule = Callable[[Writer, core.JaxprEqn, list[Value]], Results]


class Rules(NamedTuple):
    """The rules of primitives.

    Attributes:
      known: for operands with rows.
      others: for those of primitives that are not known.
      linear: for those that are partial; None where the equation is not linear in them.
      nested: for equations with programs inside, by their kind or their name, for
        operands of all layouts.
      passed_on: what an equation gives, computed whole, that has programs inside or
        calls back.
      recut: the rows of a value, from those of its operands.
      draws: whether a jitted function draws random numbers, of which `recut` has rows.
    """

    known: dict[str, Rule]
    others: Rule
    linear: Rule
    nested: dict[str, Rule]
    passed_on: Callable[[Writer, core.JaxprEqn, list[Value]], list[Any]]
    recut: Callable[[Writer, Value, Rows], Any]
    draws: Callable[[Writer, core.JaxprEqn], bool]
