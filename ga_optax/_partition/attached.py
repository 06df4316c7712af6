"""Functions with custom rules in which rows meet, forward or backward.

    v = stage 1 (args);  s = Σ v;  results = stage 0 (args, s)      there
    cotangents go through the rule of the user, stage by stage      and back

First the derivative that JAX makes of a function, as a program; then the stages of it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from .._passes import jaxprs
from .._passes.jaxprs import Same, is_inexact
from . import held, nested
from .held import PARTIAL, WHOLE, Layout, Result, Rows, RowsMeet, Value
from .writer import Writer

# == The derivative as a program =======================================================


class Derived(NamedTuple):
    """A function and the rule of the function, in the whole batch.

    Attributes:
      program: from the arguments of the function, and the cotangents of `given`, to
        the results of the function that are read, the residuals, and the cotangents of
        the `moving` arguments.
      num_results: the number of results of the function that are read.
      num_residuals: the number of residuals.
      given: the results that have a cotangent, by number among the results read.
      moving: the arguments that have a cotangent, by number.
    """

    program: jaxprs.Program
    num_results: int
    num_residuals: int
    given: list[int]
    moving: list[int]

    def split(self, xs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Results of the program as `(results, residuals, cotangents)`."""
        n, m = self.num_results, self.num_results + self.num_residuals
        return list(xs[:n]), list(xs[n:m]), list(xs[m:])

    @property
    def cotangents(self) -> list[Any]:
        """The arguments of the program that are cotangents of results."""
        invars = self.program.jaxpr.invars
        return invars[len(invars) - len(self.given) :]

    @property
    def backward(self) -> jaxprs.Program:
        """The backward program: of residuals and arguments, and then of cotangents."""
        jaxpr, cts = self.program.jaxpr, self.cotangents
        results, residuals, grads = self.split(jaxpr.outvars)
        variables = jaxprs.variables([*results, *residuals])
        known = {*jaxpr.constvars, *jaxpr.invars, *variables}
        eqns, inputs = jaxprs.needed_for(jaxpr, grads, known.__contains__)
        invars = [*(x for x in inputs if x not in cts), *cts]
        program = jaxpr.replace(eqns=eqns, outvars=grads)
        return jaxprs.Program(jaxprs.closing_over(program, [], [], invars))


def derived(
    w: Writer, e: core.JaxprEqn, vs: Sequence[Value], inputs: Sequence[bool]
) -> Derived:
    """The program that JAX derives of an equation; `inputs` says of which results."""
    outs: list[Any] = [x for x, reads in zip(e.outvars, inputs, strict=True) if reads]
    given = [i for i, x in enumerate(outs) if x in w.given]
    # JAX refuses cotangents of what a rule closes over: its constants, in a loop.
    args = range(e.params["num_consts"], len(vs))
    moving = [i for i in args if vs[i].smooth and is_inexact(vs[i].aval)]

    def results(*xs: Any) -> list[Any]:
        return [x for x, reads in zip(given_of(w, e, xs), inputs, strict=True) if reads]

    def derivative(xs: list[Any], cts: list[Any]) -> Any:
        of_moving = jaxprs.of_some(results, xs, moving)
        out, pullback = jax.vjp(of_moving, *(xs[i] for i in moving))
        every = jaxprs.put(list(map(zero_tangent, out)), given, cts)
        return out, jax.tree.leaves(pullback), pullback(every)

    types = [held.type_here(v.aval, v.shape, None) for v in vs]
    cts = [held.type_here(outs[i].aval, outs[i].aval.shape, None) for i in given]
    closed: Any
    closed, shapes = jax.make_jaxpr(derivative, return_shape=True)(types, cts)
    program = jaxprs.Program(closed.jaxpr, closed.consts)
    return Derived(program, len(outs), len(shapes[1]), given, moving)


def rule_of(w: Writer, e: core.JaxprEqn, vs: Sequence[Value]) -> Derived:
    """The same, of the results that are read; once for equal equations."""
    inputs = [jaxprs.num_readers(w.jaxpr, x) > 0 for x in e.outvars]
    key = "derived", Same(e), *inputs, *w.gives(e), *(v.smooth for v in vs)
    return w.once(key, lambda: derived(w, e, vs, inputs))


def given_of(w: Writer, e: core.JaxprEqn, xs: Sequence[Any]) -> list[Any]:
    """The results of an equation; the cotangent of some is zero, and JAX knows it.

    To a rule such a zero is not what an array of zeros is: under `jax.vmap` JAX refuses
    arrays for what examples share.
    """
    pairs = zip(w.bound(e, xs), w.gives(e), strict=True)
    return [x if gives or not is_inexact(x) else stopped(x) for x, gives in pairs]


def stopped(x: Any) -> Any:
    """A value without derivatives."""
    return jax.lax.stop_gradient(x) if is_inexact(x) else x


def zero_tangent(x: Any) -> Any:
    """The tangent, or the cotangent, of what does not move."""
    if is_inexact(x):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


# == Stages, attached ==================================================================
# Functions with custom rules in which rows meet, forward or backward.
#
# What JAX derives of such a function is a program of its arguments and of the
# cotangents of its results. It is partitioned as any other. What the results need is
# written in the open, with its collectives, and the cotangents of the arguments are
# attached to it by functions that compute nothing on the way there:
#
#     v = stage 1 (args)            zeros
#     s = the sum of v over all     zeros
#     results = stage 0 (args, s)   what was computed in the open
#
# Backwards, stage 0 computes the cotangents of arguments that need no other rows, and
# as the cotangent of `s` what a micro-batch adds to a sum, or lays beside others for an
# extremum. The sum of that is the cotangent of `v`, and stage 1 goes on from there. So
# a collective on the way back is one on the way there, of zeros, and a level of the
# window.
#
# A rule that is not linear must see complete cotangents. So results with rows are kept
# for later levels, as elsewhere (see `custom`), and whole ones come through such a sum.
# Then what is only computed for cotangents of whole arguments, such as the largest
# number of all rows, is put together on the way back, too, and needs no level on the
# way there.


def attached(
    w: Writer, e: core.JaxprEqn, vs: list[Value], rule: Derived
) -> list[Result]:
    """The results of an equation with a custom derivative rule.

    Args:
      w: the writer.
      e: the equation.
      vs: the operands, none of which is partial.
      rule: what `rule_of` returns of them.

    Raises:
      RowsMeet: if rows meet where they cannot.
    """
    if rule.program.jaxpr.effects:
        raise RowsMeet  # what prints does so once, with all rows
    local = _partitioned(w, rule, vs)
    out = iter(local.attached([vs[i] for i in rule.moving]))
    return [
        next(out) if jaxprs.num_readers(w.jaxpr, y) else (_zeros(x), WHOLE)
        for x, y in zip(held.types_of(e), e.outvars, strict=True)
    ]


# -- What a micro-batch computes -------------------------------------------------------


def is_linear(w: Writer, program: jaxprs.Program, number: int) -> bool:
    """True if a program is known to be linear in a number of the last arguments."""
    types = [x.aval for x in program.jaxpr.invars]

    def is_partial() -> bool:
        layouts = [WHOLE] * (len(types) - number) + [PARTIAL] * number
        pairs = zip(types, layouts, strict=True)
        args = [Value(None, x, layout, 0, True, True) for x, layout in pairs]
        here = w.within(in_rule=True, forbids_shares=True, forbids_collectives=True)
        try:
            nested.inner(here, program, args, [PARTIAL] * len(program.jaxpr.outvars))
        except RowsMeet:
            return False
        return True

    return w.once(("linear", number, nested.key_of(w, program)), is_partial)


def _partitioned(w: Writer, rule: Derived, vs: Sequence[Value]) -> "_Local":
    """The program of a micro-batch, and where it is cut."""
    adds_up = is_linear(w, rule.backward, len(rule.given))
    inside = w.within(in_rule=True)
    operands = [dataclasses.replace(v, level=0, smooth=False) for v in vs]
    layouts = _of_results(inside, rule, operands)
    if not adds_up:
        layouts = [WHOLE if x == PARTIAL else x for x in layouts]
    # Without collectives, cotangents of whole results stay in parts.
    in_parts = adds_up and w.scope.forbids_collectives
    of_cts = [_dual(layouts[i], in_parts) for i in rule.given]
    args = [*operands, *_with(rule.cotangents, of_cts)]

    def with_cotangents(of_grads: Sequence[Layout | None]) -> nested.Inner:
        wanted = [*layouts, *[None] * rule.num_residuals, *of_grads]
        return nested.inner(inside, rule.program, args, wanted)

    wanted: list[Layout | None] = [vs[i].rows for i in rule.moving]
    local = with_cotangents(wanted)
    pairs = list(zip(wanted, rule.split(local.layouts)[2], strict=True))
    # What has no rows gets no cotangent with rows.
    if new := [i for i, (a, b) in enumerate(pairs) if not a and isinstance(b, Rows)]:
        local = with_cotangents(jaxprs.put(wanted, new, [PARTIAL] * len(new)))
    *_, of_grads = rule.split(local.layouts)
    jaxpr, consts = jaxprs.without_constants(local.closed.jaxpr), local.closed.consts
    ours = jaxpr.invars[len(consts) :]  # the index, and the arguments
    waits = [in_parts or layouts[i] == PARTIAL for i in rule.given]
    differ = [v.rows is not None for v in operands]
    differ += [v.rows or x for v, x in zip(args[len(vs) :], waits, strict=True)]
    cts = ours[1 + len(vs) :]
    w.level = max(local.levels[: rule.num_results], default=0)
    return _Local(
        w,
        jaxpr,
        *rule.split(jaxpr.outvars),
        layouts,
        of_grads,
        dict(zip(rule.given, cts, strict=True)),
        dict(
            zip(
                jaxpr.invars,
                [*consts, w.index, *(stopped(v.x) for v in vs)],
                strict=False,
            )
        ),
        frozenset(compress(ours, [True, *differ])),
        not adds_up,
    )


def _of_results(w: Writer, rule: Derived, operands: list[Value]) -> list[Layout]:
    """The layouts of the results, which need no cotangents."""
    jaxpr = rule.program.jaxpr
    results, *_ = rule.split(jaxpr.outvars)
    alone = rule.program._replace(jaxpr=jaxprs.live(jaxpr.replace(outvars=results)))
    unrecorded = w.at(records=dataclasses.replace(w.records, notes=[]))
    cts = _with(rule.cotangents, [WHOLE] * len(rule.given))
    return nested.inner(unrecorded, alone, [*operands, *cts]).layouts


def _with(variables: list[Any], layouts: Sequence[Layout]) -> list[Value]:
    """Values of variables in some layouts."""
    pairs = zip(variables, layouts, strict=True)
    return [Value(None, x.aval, layout) for x, layout in pairs]


def _dual(layout: Layout, in_parts: bool) -> Layout:
    """The layout of the cotangent of a result; of a whole one it may be in parts."""
    if isinstance(layout, Rows):
        return layout
    return PARTIAL if in_parts and layout == WHOLE else WHOLE


class _Sum(NamedTuple):
    """A sum over micro-batches of cotangents.

    Attributes:
      result: the variable of the sum.
      operand: the variable of the part of each micro-batch.
      of: the collective; None if the variable is equal in all micro-batches, and the
        part of one counts.
    """

    result: Any
    operand: Any
    of: Any


class _Phase(NamedTuple):
    """The part of a backward program between two collectives.

    Attributes:
      grads: the cotangents of arguments that it computes, by number.
      equations: the equations that it runs.
      reads: the variables that it reads which are known in the forward pass.
      own: the cotangents that it gets of this micro-batch.
      sums: the sums over micro-batches that it gets.
    """

    grads: list[int]
    equations: Sequence[core.JaxprEqn]
    reads: list[Any]
    own: list[Any]
    sums: list[_Sum]


@dataclasses.dataclass(eq=False)
class _Local:
    """The program of a micro-batch for a function with a rule.

    Attributes:
      w: the writer.
      jaxpr: the program of `Derived`, with collectives. Its arguments are constants,
        the index, those of the function, and cotangents.
      results, saved, grads: the results of `jaxpr`; those saved are residuals.
      layouts: the layouts of the results.
      of_grads: the layouts of the cotangents of the moving arguments.
      cts: the cotangents of results, by their number.
      given: the values of the other arguments, without derivatives.
      rows: the arguments that differ between micro-batches.
      complete: True if the rule must get complete cotangents.
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
        back = jaxprs.following(jaxpr, self.cts.values())
        self.own = set(self.rows)
        self.level: dict[Any, int] = dict.fromkeys(jaxpr.invars, 0)
        self.late: dict[int, list[_Sum]] = {}
        self.known = {*self.given, *jaxprs.variables(self.saved)}
        for e in jaxpr.eqns:
            ins = jaxprs.variables(e.invars)
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
        """True if only cotangents of whole arguments need a collective."""
        if not self.complete or not all(map(is_inexact, e.invars)):
            return False
        pairs = zip(self.grads, self.of_grads, strict=True)
        others = [x for x, layout in pairs if layout != WHOLE]
        found = jaxprs.following(self.jaxpr, e.outvars)
        return found.isdisjoint(jaxprs.variables([*self.results, *others]))

    def stages(self) -> list[_Phase]:
        """The stages of the backward pass, the last one first."""

        def level(x: Any) -> int:
            return self.level[x] if jaxprs.is_variable(x) else 0

        last = max(map(level, self.grads))
        found, due = [], _Phase([], [], [], [], [])
        late = {x.result for sums in self.late.values() for x in sums}
        every = list(self.cts.values())
        there = self.known | set(every) | late
        for number in reversed(range(last + 1)):
            mine = [i for i, x in enumerate(self.grads) if level(x) == number]
            wanted = [*(self.grads[i] for i in mine), *due.own]
            wanted += [x.operand for x in due.sums]
            equations, inputs = jaxprs.needed_for(
                self.jaxpr, wanted, there.__contains__
            )
            comes = [x for x in inputs if x not in self.known]
            sums = [x for x in self.late.get(number, ()) if x.result in comes]
            passed = [x for x in comes if x not in {x.result for x in sums}]
            if not number and not passed:  # a rule that reads none gets zeros
                passed = [x for x in every if x in self.own] or every
            own = [x for x in passed if x in self.own]
            sums += [_Sum(x, x, None) for x in passed if x not in self.own]
            reads = [x for x in inputs if x in self.known]
            due = _Phase(mine, equations, reads, own, sums)
            found.append(due)
        return found

    # -- On the way there --------------------------------------------------------------

    def attached(self, moving: Sequence[Value]) -> list[Result]:
        """The results, to which the cotangents of arguments are attached."""
        w, stages = self.w, self.stages()
        reads = dict.fromkeys(x for stage in stages for x in stage.reads)
        wanted = [*self.results, *reads]
        equations, inputs = jaxprs.needed_for(
            self.jaxpr, wanted, self.given.__contains__
        )
        values = [self.given[x] for x in inputs]
        found = jaxprs.bind(self.jaxpr, equations, inputs, wanted, values)
        results = found[: len(self.results)]
        known = dict(zip(reads, found[len(results) :], strict=True))
        of_cts = {ct: results[i] for i, ct in self.cts.items()}
        after, comes = _Phase([], [], [], [], []), []
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
        """A result, which later levels store if its cotangent must be complete."""
        return checkpoint_name(x, self.w.axis.name) if self.complete else x

    def _function(self, stage: _Phase, after: _Phase) -> Any:
        """A function that returns its first arguments; its backward pass is a stage.

        On the way back this stage runs first, and then `after`. So it hands on what
        `after` begins with: cotangents of its own values, and parts of its sums.
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
            found = jaxprs.bind(self.jaxpr, stage.equations, names, wanted, values)
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
        """The part of a sum that a micro-batch has."""
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
            return gathered(x, its.of.params)
        return x.max(0) if kind == "pmax" else x.min(0)


def _sums(e: core.JaxprEqn) -> list[_Sum]:
    """The sums of cotangents that stand for a collective."""
    if not all(map(is_inexact, e.invars)):
        raise RowsMeet
    return [_Sum(y, x, e) for x, y in zip(e.invars, e.outvars, strict=True)]


def _kind(x: _Sum) -> str:
    return "psum" if x.of is None else held.meeting_of(x.of) or x.of.primitive.name


def gathered(stack: jax.Array, params: dict[str, Any]) -> jax.Array:
    """The result of an `all_gather` with these parameters, from the stack of parts."""
    dim, tiled = params["all_gather_dimension"], params["tiled"]
    out = jnp.moveaxis(stack, 0, dim)
    shape = out.shape
    return out.reshape(*shape[:dim], -1, *shape[dim + 2 :]) if tiled else out


def _of_first(index: Any, x: Any) -> Any:
    """The array in the first micro-batch, and zeros in the others."""
    return jnp.where(index == 0, x, jnp.zeros_like(x))


def _zeros(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype)


_valued = jax.custom_vjp(lambda s, y: y)  # a sum of zeros, with that value
_valued.defvjp(lambda s, y: (y, None), lambda _, ct: (ct, None))
