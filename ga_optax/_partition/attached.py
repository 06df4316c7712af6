"""Functions with rules of their own in which rows meet, there or on the way back.

What JAX derives of such a function is a program of its arguments and of the cotangents
of its results. It is partitioned as any other. What the results need is written in the
open, with its collectives, and the cotangents of the arguments are attached to it by
functions that compute nothing on the way there:

    v = stage 1 (args)            zeros
    s = the sum of v over all     zeros
    results = stage 0 (args, s)   what was computed in the open

Backwards, stage 0 computes the cotangents of arguments that need no other rows, and as
the cotangent of `s` what a micro-batch adds to a sum, or lays beside others for an
extremum. The sum of that is the cotangent of `v`, and stage 1 goes on from there. So a
collective on the way back is one on the way there, of zeros, and a level of the window.

A rule that is not linear must see complete cotangents. So results with rows are kept
for later levels, as elsewhere (see `custom`), and whole ones come through such a sum.
Then what is only computed for cotangents of whole arguments, such as the largest number
of all rows, is put together on the way back, too, and needs no level on the way there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from ga_optax._partition import nested
from ga_optax._partition.axis import meeting_of
from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Layout,
    Result,
    Rows,
    RowsMeet,
    Value,
    type_here,
    types_of,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes import ir
from ga_optax._passes.ir import is_inexact

Linear = Callable[[ir.Program, int], bool]


def attached(
    w: Writer, e: core.JaxprEqn, vs: list[Value], linear: Linear
) -> list[Result]:
    """The results of an equation with a rule of its own.

    Args:
      w: the writer.
      e: the equation.
      vs: its operands, none of which is partial.
      linear: tells of a program if it is linear in so many of its last arguments.

    Raises:
      RowsMeet: if rows meet where they cannot.
    """
    rule = _derived(w, e, vs)
    its = _partitioned(w, rule, vs, linear)
    out = iter(its.attached([vs[i] for i in rule.moving]))
    return [
        next(out) if reads else (jnp.zeros(x.shape, x.dtype), WHOLE)
        for x, reads in zip(types_of(e), rule.read, strict=True)
    ]


# -- What JAX derives ------------------------------------------------------------------


class _Derived(NamedTuple):
    """A function and its rule, in the whole batch.

    Attributes:
      program: its arguments are those of the function, and the cotangents of `given`;
        its results are those of the function that are read, what is saved for the way
        back, and the cotangents of the `moving` arguments.
      read: which results something reads.
      given: which of those have a cotangent, by number among those that are read.
      moving: which arguments have one, by number.
      saved: how many values are saved.
    """

    program: ir.Program
    read: list[bool]
    given: list[int]
    moving: list[int]
    saved: int

    def split(self, xs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """What is of each of its results, as `(results, saved, cotangents)`."""
        n = sum(self.read)
        return list(xs[:n]), list(xs[n : n + self.saved]), list(xs[n + self.saved :])

    @property
    def cts(self) -> list[Any]:
        invars = self.program.jaxpr.invars
        return invars[len(invars) - len(self.given) :]


def _derived(w: Writer, e: core.JaxprEqn, vs: Sequence[Value]) -> _Derived:
    read = [ir.num_readers(w.jaxpr, x) > 0 for x in e.outvars]
    outs = [x for x, reads in zip(e.outvars, read, strict=True) if reads]
    given = [i for i, x in enumerate(outs) if is_inexact(x)]
    moving = [i for i, v in enumerate(vs) if v.smooth and is_inexact(v.aval)]

    def results(*xs: Any) -> list[Any]:
        return [x for x, reads in zip(w.bound(e, xs), read, strict=True) if reads]

    def run(xs: list[Any], cts: list[Any]) -> Any:
        of_moving = ir.of_some(results, xs, moving)
        out, pullback = jax.vjp(of_moving, *(xs[i] for i in moving))
        every = ir.put(list(map(zero, out)), given, cts)
        return out, jax.tree.leaves(pullback), pullback(every)

    types = [type_here(v.aval, v.shape, None) for v in vs]
    avals: list[Any] = [outs[i].aval for i in given]
    cts = [type_here(x, x.shape, None) for x in avals]
    closed: Any
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(types, cts)
    if closed.jaxpr.effects:
        raise RowsMeet  # what prints does so once, with all rows
    program = ir.Program(closed.jaxpr, closed.consts)
    return _Derived(program, read, given, moving, len(shapes[1]))


def zero(x: Any) -> Any:
    """The tangent, or the cotangent, of what does not move."""
    if is_inexact(x):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _back(rule: _Derived) -> ir.Program:
    """The backward program, of what it reads beside the cotangents, and of these."""
    jaxpr = rule.program.jaxpr
    results, saved, grads = rule.split(jaxpr.outvars)
    there = {*jaxpr.constvars, *jaxpr.invars, *ir.variables([*results, *saved])}
    eqns, read = ir.needed(jaxpr, grads, there.__contains__)
    others = [x for x in read if x not in rule.cts]
    program = jaxpr.replace(eqns=eqns, outvars=grads)
    return ir.Program(ir.closing_over(program, [], [], [*others, *rule.cts]))


# -- What a micro-batch computes -------------------------------------------------------


def _partitioned(
    w: Writer, rule: _Derived, vs: Sequence[Value], linear: Linear
) -> "_Local":
    """The program of a micro-batch, and where it is cut."""
    program, n = rule.program, len(rule.given)
    results, *_ = rule.split(program.jaxpr.outvars)
    there = w.within(in_rule=True)
    args = [dataclasses.replace(v, level=0, smooth=False) for v in vs]

    def given(layouts: Sequence[Layout]) -> list[Value]:
        pairs = zip(rule.cts, layouts, strict=True)
        return [*args, *(Value(None, x.aval, layout) for x, layout in pairs)]

    alone = program._replace(jaxpr=ir.live(program.jaxpr.replace(outvars=results)))
    unrecorded = there.at(records=dataclasses.replace(w.records, notes=[]))
    layouts = nested.inner(unrecorded, alone, given([WHOLE] * n)).layouts
    is_linear = linear(_back(rule), n)
    if not is_linear:
        layouts = [WHOLE if x == PARTIAL else x for x in layouts]
    of_cts = [x if isinstance(x, Rows) else WHOLE for x in layouts]
    args = given([of_cts[i] for i in rule.given])
    due: list[Layout | None] = [vs[i].rows for i in rule.moving]
    while True:
        every = [*layouts, *[None] * rule.saved, *due]
        run = nested.inner(there, program, args, every)
        *_, found = rule.split(run.layouts)
        pairs = list(zip(due, found, strict=True))
        if not any(a is None and isinstance(b, Rows) for a, b in pairs):
            break
        due = [PARTIAL if isinstance(b, Rows) and a is None else a for a, b in pairs]
    jaxpr, consts = ir.without_constants(run.closed.jaxpr), run.closed.consts
    index = len(consts)
    places = [index, *(index + 1 + i for i, v in enumerate(args) if v.rows)]
    partial = [n for n, i in enumerate(rule.given) if layouts[i] == PARTIAL]
    places += [index + 1 + len(vs) + n for n in partial]
    w.level = max(run.levels[: len(results)], default=0)
    return _Local(
        w,
        jaxpr,
        *rule.split(jaxpr.outvars),
        run.layouts[: len(results)],
        found,
        dict(zip(rule.given, jaxpr.invars[len(jaxpr.invars) - n :], strict=True)),
        dict(zip(jaxpr.invars, [*consts, w.index, *map(_stopped, vs)], strict=False)),
        frozenset(jaxpr.invars[i] for i in places),
        not is_linear,
    )


def _stopped(v: Value) -> Any:
    return jax.lax.stop_gradient(v.x) if is_inexact(v.aval) else v.x


class _Sum(NamedTuple):
    """What comes back as a sum over micro-batches.

    Attributes:
      result: the variable that is known then.
      operand: what a micro-batch has of it.
      of: the collective; None for what all of them have, of which one is taken.
    """

    result: Any
    operand: Any
    of: core.JaxprEqn | None


class _Stage(NamedTuple):
    """What runs on the way back between two collectives.

    Attributes:
      grads: the cotangents of arguments that are computed here, by number.
      equations: what runs.
      reads: what it reads that is known on the way there.
      own: what comes back to it of this micro-batch.
      sums: what comes back to it of all.
    """

    grads: list[int]
    equations: Sequence[core.JaxprEqn]
    reads: list[Any]
    own: list[Any]
    sums: list[_Sum]


@dataclasses.dataclass(eq=False)
class _Local:
    """What a micro-batch computes of a function with a rule.

    Attributes:
      w: what writes it.
      jaxpr: the program, as that of `_Derived`, with collectives. Its constants, the
        index and the arguments come first.
      results, saved, grads: its results.
      layouts: those of the results.
      of_grads: those of the cotangents of the moving arguments.
      cts: the cotangents of results, by their number.
      given: the values of its other arguments, without derivatives.
      rows: which of its arguments differ between micro-batches.
      complete: whether the cotangents must be.
    """

    w: Writer
    jaxpr: core.Jaxpr
    results: list[Any]
    saved: list[Any]
    grads: list[Any]
    layouts: list[Layout]
    of_grads: list[Layout]
    cts: dict[int, Any]
    given: dict[Any, Any]
    rows: frozenset[Any]
    complete: bool

    def __post_init__(self) -> None:
        meets, jaxpr = self.w.axis.is_meeting, self.jaxpr
        back = ir.following(jaxpr, self.cts.values())
        self.own = set(self.rows)
        self.level: dict[Any, int] = dict.fromkeys(jaxpr.invars, 0)
        self.late: dict[int, list[_Sum]] = {}
        self.known = {*self.given, *ir.variables(self.saved)}
        for e in jaxpr.eqns:
            ins = ir.variables(e.invars)
            level = max(map(self.level.__getitem__, ins), default=0)
            is_back = not back.isdisjoint(ins) or level > 0
            if meets(e) and (is_back or self._may_wait(e)):
                level += 1
                self.late.setdefault(level, []).extend(_sums(e))
                self.known.update(() if is_back else ins)
            elif is_back and self.w.axis.meets(e):
                raise RowsMeet
            elif meets(e):
                self.known.update(e.outvars)
            elif not self.own.isdisjoint(ins):
                self.own.update(e.outvars)
            self.level.update(dict.fromkeys(e.outvars, level))
        self.known = {x for x in self.known if not self.level[x]}

    def _may_wait(self, e: core.JaxprEqn) -> bool:
        """Whether only cotangents of whole arguments need a collective."""
        if not self.complete or not all(map(is_inexact, e.invars)):
            return False
        pairs = zip(self.grads, self.of_grads, strict=True)
        others = [x for x, layout in pairs if layout != WHOLE]
        found = ir.following(self.jaxpr, e.outvars)
        return found.isdisjoint(ir.variables([*self.results, *others]))

    def stages(self) -> list[_Stage]:
        """Those on the way back, the last one first."""

        def level(x: Any) -> int:
            return self.level[x] if ir.is_variable(x) else 0

        last = max(map(level, self.grads))
        found, due = [], _Stage([], [], [], [], [])
        late = {x.result for sums in self.late.values() for x in sums}
        there = self.known | set(self.cts.values()) | late
        for number in reversed(range(last + 1)):
            mine = [i for i, x in enumerate(self.grads) if level(x) == number]
            wanted = [*(self.grads[i] for i in mine), *due.own]
            wanted += [x.operand for x in due.sums]
            equations, read = ir.needed(self.jaxpr, wanted, there.__contains__)
            comes = [x for x in read if x not in self.known]
            sums = [x for x in self.late.get(number, ()) if x.result in comes]
            passed = [x for x in comes if x not in {x.result for x in sums}]
            if not number and not passed:
                passed = self._any_results()
            own = [x for x in passed if x in self.own]
            sums += [_Sum(x, x, None) for x in passed if x not in self.own]
            reads = [x for x in read if x in self.known]
            due = _Stage(mine, equations, reads, own, sums)
            found.append(due)
        return found

    def _any_results(self) -> list[Any]:
        """Cotangents of results, of which a rule reads none."""
        every = list(self.cts.values())
        return [x for x in every if x in self.own] or every

    # -- On the way there --------------------------------------------------------------

    def attached(self, moving: Sequence[Value]) -> list[Result]:
        """The results, to which the cotangents of arguments are attached."""
        w, stages = self.w, self.stages()
        reads = dict.fromkeys(x for stage in stages for x in stage.reads)
        wanted = [*self.results, *reads]
        equations, read = ir.needed(self.jaxpr, wanted, self.given.__contains__)
        values = [self.given[x] for x in read]
        found = ir.bind(self.jaxpr, equations, read, wanted, values)
        results = found[: len(self.results)]
        known = dict(zip(reads, found[len(results) :], strict=True))
        of_cts = {ct: results[i] for i, ct in self.cts.items()}
        after, comes = _Stage([], [], [], [], []), []
        for stage in stages:
            outs = [_zeros(x.aval) for x in stage.own]
            if stage is stages[-1]:
                outs = [of_cts[x] for x in stage.own]
            outs += [_zeros(self._type_of(x)) for x in stage.sums]
            saved = [w.index, *(known[x] for x in stage.reads)]
            own = [moving[i].x for i in stage.grads]
            out = self._function(stage, after)(outs, saved, own, comes)
            n = len(stage.own)
            comes = [*map(self._whole, out[:n]), *map(w.sum, out[n:])]
            after = stage
        w.level += len(stages) - 1 + bool(after.sums)
        numbers = {ct: i for i, ct in self.cts.items()}
        for x, its in zip(after.own, comes, strict=False):
            results[numbers[x]] = its
        for x, its in zip(after.sums, comes[len(after.own) :], strict=True):
            i = numbers[x.result]
            results[i] = _valued(its, results[i])
        return list(zip(results, self.layouts, strict=True))

    def _whole(self, x: jax.Array) -> jax.Array:
        """What a later level keeps, if its cotangent must be complete."""
        return checkpoint_name(x, self.w.axis.name) if self.complete else x

    def _function(self, stage: _Stage, after: _Stage) -> Any:
        """What returns `outs`, and takes their cotangents back as a stage does.

        `after` is the stage before which this one stands, which came first on the way
        back; so far it came to it.
        """
        wanted = [*(self.grads[i] for i in stage.grads), *after.own]
        wanted += [x.operand for x in after.sums]
        names = [*stage.reads, *stage.own, *(x.result for x in stage.sums)]
        whole = [self.of_grads[i] == WHOLE for i in stage.grads]

        def forward(outs: Any, saved: Any, own: Any, comes: Any) -> Any:
            return list(outs), saved

        def backward(saved: Any, cts: Any) -> Any:
            index, *reads = saved
            n, m = len(stage.own), len(whole)
            sums = map(self._total, stage.sums, cts[n:])
            values = [*reads, *cts[:n], *sums]
            found = ir.bind(self.jaxpr, stage.equations, names, wanted, values)
            grads = [
                _of_first(index, x) if its else x
                for x, its in zip(found, whole, strict=False)
            ]
            last = m + len(after.own)
            spread = map(
                functools.partial(self._spread, index), after.sums, found[last:]
            )
            return None, None, grads, [*found[m:last], *spread]

        call = jax.custom_vjp(lambda *args: list(args[0]))
        call.defvjp(forward, backward)
        return call

    # -- Sums that come back -----------------------------------------------------------

    def _type_of(self, x: _Sum) -> Any:
        aval = x.operand.aval
        is_stack = _kind(x) != "psum"
        return aval.update(shape=(self.w.axis.size, *aval.shape)) if is_stack else aval

    def _spread(self, index: Any, its: _Sum, x: Any) -> Any:
        """What a micro-batch adds to a sum."""
        if its.of is None:
            return _of_first(index, x)
        if _kind(its) == "psum":
            return x
        stack = _zeros(self._type_of(its))
        return jax.lax.dynamic_update_index_in_dim(stack, x, index, 0)

    def _total(self, its: _Sum, x: Any) -> Any:
        """The result of a collective, from such a sum."""
        kind = _kind(its)
        if kind == "psum":
            return x
        if self.w.axis.is_checked:
            return x[0]
        if kind == "all_gather":
            return _gathered(its.of, x)
        return x.max(0) if kind == "pmax" else x.min(0)


def _sums(e: core.JaxprEqn) -> list[_Sum]:
    """What comes back in place of a collective."""
    if not all(map(is_inexact, e.invars)):
        raise RowsMeet
    return [_Sum(y, x, e) for x, y in zip(e.invars, e.outvars, strict=True)]


def _kind(x: _Sum) -> str:
    return "psum" if x.of is None else meeting_of(x.of) or x.of.primitive.name


def _gathered(e: Any, stack: Any) -> Any:
    dim, tiled = e.params["all_gather_dimension"], e.params["tiled"]
    out = jnp.moveaxis(stack, 0, dim)
    shape = out.shape
    return out.reshape(*shape[:dim], -1, *shape[dim + 2 :]) if tiled else out


def _of_first(index: Any, x: Any) -> Any:
    """What the first micro-batch has, and zeros in the others."""
    return jnp.where(index == 0, x, jnp.zeros_like(x))


def _zeros(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype)


_valued = jax.custom_vjp(lambda s, y: y)  # a sum of zeros, with that value
_valued.defvjp(lambda s, y: (y, None), lambda _, ct: (ct, None))
