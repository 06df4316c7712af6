"""The program of a micro-batch while it is written: changes of layout, equations.

    rule(writer, equation, values)  ->  values

What a rule writes with.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from .._passes import jaxprs
from .._passes.places import better_placed
from .._passes.primitives import entry_of
from . import extrema, held
from .held import (
    PARTIAL,
    WHOLE,
    Axis,
    Layout,
    Records,
    Result,
    Results,
    Rows,
    RowsMeet,
    Uneven,
    Value,
)

# == The writer ========================================================================


class Scope(NamedTuple):
    """Facts of the programs around an equation.

    Attributes:
      forbids_collectives: True if rows must not meet: in a loop, a branch, or a rule.
      forbids_shares: True if a whole addend must not be shared out among micro-batches:
        where a program is tested for being linear.
      in_rule: True in the program of a derivative rule, where functions with custom
        rules run without the rules.
      partitioned_again: True in a nested `microbatch`, which partitions what is written
        once more.
      may_count: True if rows meet all the same in counts, which the loss is not
        differentiated through: between the equations of a program of uneven
        micro-batches.
      is_inner: True in a program inside of an equation. The results have types, so sums
        are rounded at once.
    """

    forbids_collectives: bool = False
    forbids_shares: bool = False
    in_rule: bool = False
    partitioned_again: bool = False
    is_inner: bool = False
    may_count: bool = False


@dataclasses.dataclass
class Writer:
    """Writes the program of a micro-batch, at one place of the whole batch's program.

    Attributes:
      axis: the axis of the micro-batches.
      index: the number of the micro-batch, traced.
      rules: the rules of primitives.
      records: what all writers of the partition have in common.
      scope: facts of the programs around the equation at hand.
      jaxpr: the program that is read.
      given: the variables of `jaxpr` that may have a cotangent.
      source: where the equation at hand is from, or else the one around it.
      level: the level of what the equation at hand reads, see `Value`.
      moves: True if a result of the equation at hand may have a cotangent.
    """

    axis: Axis
    index: Any
    rules: "Rules"
    records: Records
    scope: Scope
    jaxpr: Any = None
    given: Collection[Any] = ()
    source: Any = None
    level: int = 0
    moves: bool = True

    def at(self, **other: Any) -> "Writer":
        """The writer of another place."""
        return dataclasses.replace(self, **other)

    def within(self, **scope: bool) -> "Writer":
        """The writer inside of an equation, where more of `Scope` holds."""
        return self.at(scope=self.scope._replace(**scope, may_count=False))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned when this key came first.

        So JAX traces equal layers of a model once, for they share one function.
        """
        programs = self.records.programs
        if key not in programs:
            programs[key] = make()
        return programs[key]

    # -- Layouts -----------------------------------------------------------------------

    def to(self, v: Value, layout: Layout) -> Any:
        """The value in a layout; `Value.copies` keeps each layout for later."""
        x, level = v.x, v.level
        if layout == PARTIAL and not v.is_partial:
            if not jaxprs.is_inexact(v.aval):
                raise RowsMeet
            return self.addend(self.reduced(v))
        if layout != v.layout:
            if layout not in v.copies:
                here = self.at(level=0)
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
        self._check_meeting(v if v.is_partial else None)
        if v.made is not None and (v.scaled or held.is_reshaped(v)):
            e, vs, i = v.made  # of what it is made of, whole
            xs = [jnp.asarray(self.whole(u), u.aval.dtype) for u in vs]
            return self.results(e, xs)[i]
        self.level = v.level + v.params
        if v.is_partial:
            return self.axis.sum(v.x).astype(v.aval.dtype)
        return self.joined(v)

    def _cut(self, v: Value, rows: Rows) -> Any:
        if v.is_whole and (x := self.rules.recut(self, v, rows)) is not None:
            return x
        if (turned := self.rules.turned(self, v, rows)) is not None:
            x, self.level = turned
            return x
        x = self.rows_of(self.whole(v), rows)
        if made := held.computed_by(v):
            e, vs = made
            self.note(e, max(u.size for u in (v, *vs)))  # for these rows alone
        elif v.rows and v.dim != rows.dim and v.made is not None:
            self.note(v.made[0], v.size)  # gathered for rows along another axis
        return x

    def reduced(self, v: Value) -> Value:
        """The value, whole."""
        level = v.level if v.is_whole else v.level + v.params
        new = v.with_layout(self.whole(v), WHOLE)
        return dataclasses.replace(new, level=level, scaled=False)

    def summed(self, vs: Sequence[Value]) -> list[Value]:
        """The values, with partial values added up to whole ones."""
        return [self.reduced(v) if v.is_partial else v for v in vs]

    def rounded(self, vs: Sequence[Value]) -> list[Value]:
        """The values, without sums that are yet to be rounded."""
        return [self.reduced(v) if v.is_wide else v for v in vs]

    def parts(self, vs: list[Value], rows: Rows, dims: Sequence[int | None]) -> Any:
        """The operands of a call, which have such rows along a dimension of each."""
        pairs = zip(vs, dims, strict=True)
        return [
            self.whole(v) if d is None else self.part(v, rows.at(d)) for v, d in pairs
        ]

    def addend(self, v: Value) -> Any:
        """The part of a sum that this micro-batch has; of a whole value, its share."""
        if v.is_partial:
            return v.x
        number = held.known_number(v)
        if self.scope.forbids_shares and number != 0:
            raise RowsMeet
        if number == 0:  # made here: it is nothing that waits for other loops
            return jnp.zeros_like(v.x, v.aval.dtype)
        parts = self.axis.parts
        size = parts.total / parts.rows if isinstance(parts, Uneven) else parts
        size = jnp.asarray(size, v.aval.dtype)
        return jax.lax.div(
            jnp.asarray(v.x, v.aval.dtype), jnp.broadcast_to(size, v.shape)
        )

    def rows_of(self, x: Any, rows: Rows) -> Any:
        """This micro-batch's rows of an array that all hold."""
        return held.rows_of(x, rows, self.index, self.axis.parts)

    def place_of(self, v: Value, row: Any) -> tuple[Any, Any]:
        """The places here of rows of a value, and True for each row that is here.

        The first one has what lies outside, so that it comes out once.
        """
        rest, parts = v.x.shape[v.dim] // v.rows.segments, self.axis.size
        inside = (row >= 0) & (row < v.shape[v.dim])
        owner = jnp.where(inside, row // rest % parts, 0).astype(self.index.dtype)
        place = row // (rest * parts) * rest + row % rest
        return jnp.where(inside, place, v.shape[v.dim]), owner == self.index

    def meet(self, v: Value | None = None) -> None:
        """Notes that rows of a value meet; raises where they must not."""
        self._check_meeting(v)
        if v is not None:
            self.level = max(self.level, v.level + v.params)

    def _check_meeting(self, v: Value | None) -> None:
        is_count = v is not None and not (v.params and self.moves)
        counts = self.scope.may_count and is_count
        if self.scope.forbids_collectives and not counts:
            raise RowsMeet

    def sum(self, x: Any, vs: Sequence[Value | None] = (None,)) -> Any:
        """The sum over micro-batches of what is made of values."""
        for v in vs:
            self.meet(v)
        return self.axis.sum(x)

    def gather(self, x: Any, v: Value | None = None) -> Any:
        """The arrays of all micro-batches, made of `v`, stacked along a new axis 0."""
        self.meet(v)
        axis = self.axis
        return axis.gather(x) if axis.is_even else axis.stack(x, self.index)

    def joined(self, v: Value) -> Any:
        """All rows, in their order."""
        self.meet()
        x, d, segments = v.x, v.dim, v.rows.segments
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = self.joined(v.with_layout(jax.random.key_data(x), v.layout))
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
                return held.varying(xs, e.params["axes"])[0]
            xs = held.varying(xs)
        return e.primitive.bind(*xs, **(e.params | params))

    def is_compared(self, e: core.JaxprEqn, v: Value) -> bool:
        """True for an extremum of `v` whose derivative compares it with `v`."""
        is_extremum = e.primitive.name in extrema.EXTREMA
        return is_extremum and v.smooth and e.outvars[0] in self.given

    def extremum(self, e: core.JaxprEqn, x: Any) -> Any:
        """The extremum that an equation takes of an array, which is computed once."""
        x = jax.lax.optimization_barrier(x)
        if jax.__version_info__ >= (0, 11):
            return self.run(e, [x])
        # XLA's CPU backend drops barriers, before it rounds a small loop otherwise.
        is_max, axes = e.primitive.name == "reduce_max", tuple(e.params["axes"])
        return extrema.extremum_here(is_max, axes, x)

    def results(self, e: core.JaxprEqn, xs: Sequence[Any], **params: Any) -> list[Any]:
        out = self.run(e, xs, **params)
        return list(out) if e.primitive.multiple_results else [out]

    def all_whole(self, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
        """The results of an equation, computed whole."""
        if jaxprs.inner_programs(e) or jaxprs.acts(e):
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
        return jaxprs.bind(self.jaxpr, [e], e.invars, e.outvars, xs)

    def interpret(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Value],
        given: Sequence[bool] = (),
    ) -> list[Value]:
        """The results of a program of the whole batch.

        `given` is True for those that may have a cotangent; () if all may.
        """
        moving = itertools.compress(jaxpr.outvars, given) if given else jaxpr.outvars
        constants = [
            Value(x, var.aval) for x, var in zip(consts, jaxpr.constvars, strict=True)
        ]
        names = [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(names, [*constants, *args], strict=True))

        def value(x: Any) -> Value:
            return Value(x.val, x.aval) if isinstance(x, core.Literal) else env[x]

        here = self.at(jaxpr=jaxpr, given=jaxprs.moved_by(jaxpr, moving))
        outer = source_info_util.current_name_stack()
        for e in jaxpr.eqns:
            e = better_placed(e, self.source)
            info = here.source = e.source_info
            here.moves = True in here.gives(e)
            with source_info_util.user_context(
                info.traceback, name_stack=outer + info.name_stack
            ):
                try:
                    out = here._equation(e, [value(x) for x in e.invars])
                except RowsMeet as error:
                    error.source = error.source or info
                    raise
            env.update(zip(e.outvars, out, strict=True))
        return [value(x) for x in jaxpr.outvars]

    def gives(self, e: core.JaxprEqn) -> list[bool]:
        """True for each result of an equation that may have a cotangent."""
        return [x in self.given for x in e.outvars]

    def _equation(self, e: core.JaxprEqn, vs: list[Value]) -> list[Value]:
        if jaxprs.kind(e) == "call" and not self._stays(e, vs):
            [program] = jaxprs.inner(e)
            return self.interpret(program.jaxpr, program.consts, vs, self.gives(e))
        if (program := _in_two(e)) is not None:
            return self.interpret(program.jaxpr, program.consts, vs)
        if (branch := held.taken(e, vs)) is not None:
            return self.interpret(branch.jaxpr, branch.consts, vs[1:], self.gives(e))
        self.level = max([v.level for v in vs], default=0)
        vs = self.rules.operands(self, e, vs)
        results = self._applied(e, vs)
        params, smooth = True in [v.params for v in vs], True in [v.smooth for v in vs]
        smooth = smooth and e.primitive.name != "stop_gradient"
        return [
            Value(
                x,
                var.aval,
                layout,
                self.level,
                params,
                smooth and jaxprs.is_inexact(var.aval),
                layout == PARTIAL and held.is_scaled(e, vs, jaxprs.numbers(x.shape)),
                (e, vs, i),
            )
            for i, ((x, layout), var) in enumerate(zip(results, e.outvars, strict=True))
        ]

    def _stays(self, e: core.JaxprEqn, vs: list[Value]) -> bool:
        """True if a jitted function stays one, which JAX lowers once."""
        return all(v.is_whole for v in vs) and self.rules.draws(self, e)

    def _applied(self, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
        name = e.primitive.name
        kind, shifts = jaxprs.kind(e) or name, entry_of(e).shifts
        rules, notes = self.rules, self.records.notes
        before = len(notes)
        opens = kind in rules.nested and bool(e.outvars) and jaxprs.acts(e)
        if all(v.is_whole for v in vs) and not opens and not shifts:
            return self.all_whole(e, vs)
        with self.may_meet() as out:
            if kind in rules.nested and e.outvars:
                vs = self.rounded(vs)
                out += rules.nested[kind](self, e, vs) or ()
            else:
                if any(v.is_partial for v in vs):
                    out += rules.linear(self, e, vs) or ()
                if not out:
                    vs = self.summed(vs)
                    if any(v.rows for v in vs) or shifts:
                        rule = rules.known.get(name)
                        out += (rule(self, e, vs) if rule else None) or ()
        if self._fits(e, out):
            return out
        del notes[before:]
        if all(v.is_whole for v in vs):
            return self.all_whole(e, vs)
        return self.noted(None, e, vs)

    def noted(
        self, name: str | None, e: core.JaxprEqn, vs: list[Value]
    ) -> list[Result]:
        """The results of an equation, computed whole, which is said under a name."""
        reads = sum(jaxprs.numbers(v.shape) for v in vs if v.rows)
        self.note(e, max(jaxprs.computed(e), reads), name)
        return self.all_whole(e, vs)

    def note(self, e: core.JaxprEqn, size: int, name: str | None = None) -> None:
        """Notes that an equation is computed whole."""
        self.records.notes.append(held.note_of(e, size, name))

    @contextlib.contextmanager
    def may_meet(self, last: bool = True) -> Iterator[list[Any]]:
        """A list for results, which is empty at the end if rows meet and must not.

        Computed whole the result is right all the same. Where nothing can be computed
        whole it raises `RowsMeet`, unless another way is tried next, so that this is
        not the `last` one.
        """
        results: list[Any] = []
        level, notes = self.level, self.records.notes
        before = len(notes)
        try:
            yield results
        except RowsMeet:
            if last and self.scope.forbids_collectives:
                raise
            self.level = level
            results.clear()
            del notes[before:]

    def _fits(self, e: core.JaxprEqn, out: list[Result]) -> bool:
        """True if a rule gave every result in the shape of its layout."""
        pairs = zip(out, held.types_of(e), strict=False)
        return len(out) == len(e.outvars) > 0 and all(
            jnp.shape(x) == held.local_shape(aval.shape, layout, self.axis.parts)
            for (x, layout), aval in pairs
        )


# == Rules =============================================================================

Rule = Callable[[Writer, core.JaxprEqn, list[Value]], Results]


class Rules(NamedTuple):
    """The rules of primitives.

    Attributes:
      operands: the operands of an equation, see `created`.
      known: for operands with rows.
      linear: for partial operands; it returns None if the equation is not linear.
      nested: for equations with programs inside, by their kind or their name, for
        operands of all layouts.
      passed_on: for an equation that is computed whole, and has programs inside or
        calls back.
      recut: the rows of a whole value, from those of its operands.
      turned: the rows of a value that has rows along another axis, likewise, and the
        level of what they are computed of.
      draws: True if a jitted function draws random numbers, of which `recut` has rows.
    """

    operands: Callable[[Writer, core.JaxprEqn, list[Value]], list[Value]]
    known: dict[str, Rule]
    linear: Rule
    nested: dict[str, Rule]
    passed_on: Callable[[Writer, core.JaxprEqn, list[Value]], list[Any]]
    recut: Callable[[Writer, Value, Rows], Any]
    turned: Callable[[Writer, Value, Rows], tuple[Any, int] | None]
    draws: Callable[[Writer, core.JaxprEqn], bool]


def _in_two(equation: core.JaxprEqn) -> jaxprs.Program | None:
    """A reshape with `dimensions` (order="F") as two equations; None for others."""
    p = equation.params
    if equation.primitive.name != "reshape" or p["dimensions"] is None:
        return None
    return jaxprs.program_of(
        lambda x: jax.lax.reshape(
            jax.lax.transpose(x, p["dimensions"]), p["new_sizes"]
        ),
        equation.invars[0].aval,
    )
