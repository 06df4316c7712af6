"""The program of a micro-batch while it is written: changes of layout, equations.

    rule(writer, equation, values)  ->  values

What a rule writes with; and facts that follow from the equations that made a value.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from .._passes import about, jaxprs
from .._passes.jaxprs import is_inexact
from .._passes.primitives import CAST, entry_of, factors_of
from . import held
from .held import (
    PARTIAL,
    WHOLE,
    Axis,
    Failure,
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
      may_count: True if rows meet all the same in sums and extrema of no parameters,
        such as counts: between the equations of a program of uneven micro-batches.
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
            if not is_inexact(v.aval):
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
        if v.made is not None and (v.scaled or is_reshaped(v)):
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
        if made := computed_by(v):
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
        number = known_number(v)
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
        owner = jnp.where(inside, row // rest % parts, 0)
        place = row // (rest * parts) * rest + row % rest
        return jnp.where(inside, place, v.shape[v.dim]), owner == self.index

    def meet(self, v: Value | None = None) -> None:
        """Notes that rows of a value meet; raises where they must not."""
        self._check_meeting(v)
        if v is not None:
            self.level = max(self.level, v.level + v.params)

    def _check_meeting(self, v: Value | None) -> None:
        counts = self.scope.may_count and v is not None and not v.params
        if self.scope.forbids_collectives and not counts:
            raise RowsMeet

    def sum(self, x: Any) -> Any:
        """The sum over micro-batches."""
        self.meet()
        return self.axis.sum(x)

    def gather(self, x: Any) -> Any:
        """The arrays of all micro-batches, stacked along a new axis 0."""
        self.meet()
        return self.axis.gather(x)

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
        jaxpr = about.references_grouped(jaxpr)
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
            e = about.better_placed(e, self.source)
            info = here.source = e.source_info
            with source_info_util.user_context(
                info.traceback, name_stack=outer + info.name_stack
            ):
                out = here._equation(e, [value(x) for x in e.invars])
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
                smooth and is_inexact(var.aval),
                layout == PARTIAL and is_scaled(e, vs, jaxprs.numbers(x.shape)),
                (e, vs, i),
            )
            for i, ((x, layout), var) in enumerate(zip(results, e.outvars, strict=True))
        ]

    def _stays(self, e: core.JaxprEqn, vs: list[Value]) -> bool:
        """True if a jitted function stays one, which JAX lowers once."""
        whole = all(v.is_whole for v in vs)
        return about.is_reference_group(e) or (whole and self.rules.draws(self, e))

    def _applied(self, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
        name = e.primitive.name
        kind, shifts = jaxprs.kind(e) or name, entry_of(e).shifts
        rules, notes = self.rules, self.records.notes
        before = len(notes)
        opens = kind in rules.nested and bool(e.outvars) and jaxprs.acts(e)
        if all(v.is_whole for v in vs) and not opens and not shifts:
            return self.all_whole(e, vs)
        with self.may_fail(e) as out:
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
    def may_fail(self, e: core.JaxprEqn, last: bool = True) -> Iterator[list[Any]]:
        """A list for results, which is empty at the end if they cannot be had so.

        That is if rows meet where they must not, or if the rule of the equation fails,
        which is recorded. Computed whole the result is right all the same. Where
        nothing can be computed whole it raises `RowsMeet`, unless another way is tried
        next, so that this is not the `last` one. Errors of the user's code come out.
        """
        results: list[Any] = []
        level, notes = self.level, self.records.notes
        before = len(notes)
        try:
            yield results
        except Exception as error:
            meets = isinstance(error, RowsMeet)
            forbidden = meets and last and self.scope.forbids_collectives
            if forbidden or (not meets and about.is_of_user(error)):
                raise
            self.level = level
            results.clear()
            del notes[before:]
            if not meets:
                self.records.failures.append(Failure(e, error))

    def _fits(self, e: core.JaxprEqn, out: list[Result]) -> bool:
        """True if a rule gave every result in the shape of its layout."""
        pairs = zip(out, held.types_of(e), strict=False)
        return len(out) == len(e.outvars) > 0 and all(
            jnp.shape(x) == held.local_shape(aval.shape, layout, self.axis.parts)
            for (x, layout), aval in pairs
        )


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
    order = equation.params.get("dimensions")
    if equation.primitive.name != "reshape" or order is None:
        return None

    shape = equation.params["new_sizes"]

    def computed(x: jax.Array) -> jax.Array:
        return jax.lax.reshape(jax.lax.transpose(x, order), shape)

    return jaxprs.program_of(computed, equation.invars[0].aval)


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
    moves, casts = entry_of(e).moves, e.primitive.name == CAST
    number = known_number(vs[0]) if moves or casts else None
    if not casts or number is None or not np.isfinite(number):
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


def is_of_rows(v: Value) -> bool:
    """True if a whole value was computed of values with rows, which met."""
    todo, seen = ([v] if v.is_whole else []), set()
    while todo:
        u = todo.pop()
        if u.rows or u.is_partial:
            return True
        if id(u) not in seen and u.made is not None:
            seen.add(id(u))
            todo += u.made[1]
    return False


Step = tuple[core.JaxprEqn, list[Value], int]  # the operand that is the way


class Shifted(NamedTuple):
    """A value that is linear in `of` less all `shifts`, or in `exp` of the difference.

    Attributes:
      exp: the equation of the exponential; None if there is none.
      of: the value with rows that is shifted.
      shifts: what is subtracted: values of all rows, known later than `of`.
      masks: what keeps numbers on the way, and which of two choices keeps them.
      steps: the equations on the way; without masks, if there is an exponential.
      varies: the axes along which the shifts vary.
    """

    exp: core.JaxprEqn | None
    of: Value
    shifts: list[Value]
    masks: list[tuple[Value, int]]
    steps: list[Step]
    varies: set[int]


def shifted(v: Value) -> Shifted | None:
    """A value as `Shifted`, by shifts that are the same for all rows."""
    path = _path_to_shift(v)
    if path is None:
        return None
    exp, of, shifts = None, v, list[Value]()
    if path:
        (first, vs, i), *others = path
        of = vs[i]
        exp, path = (first, others) if first.primitive.name == "exp" else (None, path)
    while (pair := _late_shift(of)) is not None:
        of, shift = pair
        shifts.append(shift)
    varies = {d for x in shifts for d in unmoved(x)[1].values()}
    beside = [u for _, vs, i in path for j, u in enumerate(vs) if j != i]
    is_known = not of.params or all(u.level <= of.level for u in beside)
    is_real = jnp.issubdtype(of.aval.dtype, jnp.floating)
    if of.shape != v.shape or v.dim in varies or not (is_known and is_real):
        return None
    # Without exp it is a log_softmax, less a maximum and the logarithm of a sum.
    if exp is None and not (len(shifts) > 1 and _is_maximum(shifts[-1])):
        return None
    masks = [(vs[0], i) for e, vs, i in path if e.primitive.name == "select_n"]
    if exp is not None:
        path = [x for x in path if x[0].primitive.name != "select_n"]
    return Shifted(exp, of, shifts, masks, path, varies)


def _path_to_shift(v: Value, most: int = 4) -> list[Step] | None:
    """The steps from a shifted value to a value that is linear in it, or in its `exp`.

    The nearest to the shifted value, which may be `exp`, comes first.
    """
    if _late_shift(v) is not None:
        return []
    if v.made is None or not most:
        return None
    e, vs, _ = v.made
    if e.primitive.name == "exp":
        return [(e, vs, 0)] if _late_shift(vs[0]) is not None else None
    for i in _linear_in(e, vs):
        if (path := _path_to_shift(vs[i], most - 1)) is not None:
            return [*path, (e, vs, i)]
    return None


def _linear_in(e: core.JaxprEqn, vs: Sequence[Value]) -> Sequence[int]:
    """The operands, of the shape of the result, in each of which `e` is linear."""
    name, [aval] = e.primitive.name, held.types_of(e)[:1]
    same = [v.shape == aval.shape for v in vs]
    if name == "mul":
        return [i for i in (0, 1) if same[i]]
    if name == "neg":
        return [0]
    if name == CAST and all(map(is_inexact, (vs[0].aval, aval))):
        return [0] * (jnp.finfo(aval.dtype).bits >= jnp.finfo(vs[0].aval.dtype).bits)
    if name == "select_n" and all(same) and len(vs) == 3:
        return [i for i in (1, 2) if known_number(vs[3 - i]) == 0]
    return []


def _late_shift(v: Value) -> tuple[Value, Value] | None:
    """The operands of a difference, if the second is of all rows, and known later."""
    if v.made is None or v.made[0].primitive.name != "sub":
        return None
    of, shift = v.made[1]
    # Levels are counted from the parameters, and any function may have none.
    is_late = shift.level > of.level or not of.params
    return (of, shift) if is_late and is_of_rows(shift) else None


def _is_maximum(v: Value) -> bool:
    """True for a maximum, which may be another number if it is not finite."""
    e, vs, _ = unmoved(v)[0].made or (None, [], 0)
    name = e.primitive.name if e is not None else ""
    found = name in ("max", "select_n") and any(map(_is_maximum, vs))
    return found or name == "reduce_max"


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
