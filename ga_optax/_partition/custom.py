"""Derivative rules of users and of JAX: `jax.custom_jvp` and `jax.custom_vjp`.

A `jax.custom_jvp` stays one: its function and rule are partitioned like any program,
with the tangents in the layouts of the primals. Where rows meet in it, and of a
`jax.custom_vjp`, the function and its backward program stand in the open, see
`attached`.

A backward rule may not be linear in the cotangent: it may clip or quantise it. Then the
cotangent must be complete when it gets there. So a whole result is passed on by one
micro-batch alone, which gets the sum of the cotangents of all; and a result with rows
is kept for later levels, which otherwise would come back to it one by one.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .._passes import about, jaxprs
from .._passes.jaxprs import Same, is_inexact
from . import nested
from .attached import attached, derived, given_of, stopped, zero_tangent
from .held import PARTIAL, WHOLE, Layout, Result, Results, RowsMeet, Value, types_of
from .writer import Writer


def custom_jvp(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [program] = jaxprs.inner(e)
    vs = w.summed(vs)
    if all(v.is_whole for v in vs):
        return w.all_whole(e, vs)
    if w.scope.in_rule or not any(_moving(e, vs)):
        return nested.inlined(w, program, vs)
    with w.may_fail(e, last=False) as out:
        out += _kept(w.within(forbids_collectives=True), e, vs)
    if not out and not w.scope.forbids_collectives and is_of_jax(e, "_softmax"):
        # Its rule only saves time. Others are not the derivative of their program.
        return nested.inlined(w, program, vs)
    return out or _in_the_open(w, e, vs)


def custom_vjp(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    vs = w.summed(vs)
    if all(v.is_whole for v in vs):
        return None
    if w.scope.in_rule:
        return nested.inlined(w, jaxprs.inner(e)[0], vs)
    return _in_the_open(w, e, vs)


def is_of_jax(e: core.JaxprEqn, name: str = "") -> bool:
    """True if a function with a rule belongs to JAX, and has this name, if given."""
    [program] = jaxprs.inner_programs(e)
    function, _, place = str(program.debug_info.func_src_info).partition(" at ")
    return place.startswith(_JAX) and name in ("", function)


_JAX = os.path.dirname(jax.__file__) + os.sep  # other names begin with it, too


def _in_the_open(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    """The results of a function that no longer stands for itself."""
    vs = _of_no_level(vs)
    if not any(w.gives(e)):
        vs = list(map(_without_derivative, vs))
    if not any(v.smooth and is_inexact(v.aval) for v in vs):
        return nested.inlined(w, jaxprs.inner(e)[0], vs)
    apart, linear = w.within(forbids_collectives=True), functools.partial(_is_linear, w)
    try:
        with w.may_fail(e, last=False) as out:
            out += attached(apart, e, vs, linear)
            w.level = apart.level
        if not out:
            with w.may_fail(e) as out:
                out += attached(w, e, vs, linear)
    except Exception as error:
        return _as_it_raises(w, e, vs, error)
    return out


def _as_it_raises(
    w: Writer, e: core.JaxprEqn, vs: list[Value], error: Exception
) -> list[Result]:
    """The results of a function whose rule raises, as the user wrote it.

    JAX calls a rule only if a cotangent comes, as none may come to a metric: the error
    is raised there, and nowhere else.
    """
    if not about.is_of_user(error):
        raise error
    same = jax.custom_vjp(lambda x: x)

    def back(_: None, ct: Any) -> Any:
        raise error

    same.defvjp(lambda x: (x, None), back)
    out = nested.inlined(w, jaxprs.inner(e)[0], vs)
    return [(same(x) if is_inexact(x) else x, layout) for x, layout in out]


def _without_derivative(v: Value) -> Value:
    return dataclasses.replace(v, x=stopped(v.x), smooth=False, copies={})


def _of_no_level(vs: list[Value]) -> list[Value]:
    """Operands without levels, so that equal calls are equal at all levels."""
    return [dataclasses.replace(v, level=0) for v in vs]


# -- Forward rules ---------------------------------------------------------------------


def _kept(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    """The results of a `jax.custom_jvp` that works on the rows of a micro-batch."""
    vs, n = _of_no_level(vs), e.params["num_consts"]
    function = nested.inner(w, jaxprs.inner(e)[0], vs)
    moving = _moving(e, vs)
    try:
        jvp, results_move = _rule_of(e, moving)
    except Exception as error:  # of the rule: JAX raises it, too, if it differentiates
        return _underived(w, function, vs, error)
    calls, jvp = _without_call(jvp, e)
    tangents = [_of_layout(v.aval, v.layout) for v in compress(vs[n:], moving)]
    results = map(_of_layout, types_of(e), function.layouts) if calls else ()
    wanted = [*function.layouts, *compress(function.layouts, results_move)]
    rule = _in_rule(w, jvp, [*vs[n:], *tangents, *results], wanted)

    def make() -> Any:
        call = jax.custom_jvp(lambda index, *xs: tuple(function(index, xs)))

        @call.defjvp
        def _(primals: Any, dots: Any) -> Any:
            index, *xs = primals
            results = call(*primals) if calls else ()
            out = rule(index, [*xs[n:], *compress(dots[1 + n :], moving), *results])
            values, tangents = out[: len(results_move)], iter(out[len(results_move) :])
            pairs = zip(values, results_move, strict=True)
            return tuple(values), tuple(
                next(tangents) if moves else zero_tangent(x) for x, moves in pairs
            )

        return jax.jit(call)

    programs = Same(function.closed), Same(rule.closed)
    call = w.once(("custom_jvp", *programs, calls, n, *moving, *results_move), make)
    out = call(nested.index_for(w, function, rule), *(v.x for v in vs))
    return list(zip(out, function.layouts, strict=True))


def _moving(e: core.JaxprEqn, vs: list[Value]) -> list[bool]:
    """True for each argument of a `jax.custom_jvp` of which the rule gets a tangent."""
    its, asks = vs[e.params["num_consts"] :], e.params["symbolic_zeros"]
    return [is_inexact(v.aval) and (v.smooth or not asks) for v in its]


def _underived(
    w: Writer, function: nested.Inner, vs: list[Value], error: Exception
) -> list[Result]:
    """The results of a function whose rule fails, as for integers in some of JAX's."""
    call = jax.custom_jvp(lambda index, *xs: tuple(function(index, xs)))

    @call.defjvp
    def _(primals: Any, dots: Any) -> Any:
        raise error

    out = call(nested.index_for(w, function), *(v.x for v in vs))
    return list(zip(out, function.layouts, strict=True))


def _rule_of(e: core.JaxprEqn, moving: list[bool]) -> tuple[jaxprs.Program, list[bool]]:
    """The rule of a `jax.custom_jvp`, and which results have a tangent.

    The rule takes the arguments, and the tangents of those that move. Only a rule that
    asks for it is told that others do not move.
    """
    fixed = [e.params["symbolic_zeros"] and not moves for moves in moving]
    *rule, without_tangent = e.params["jvp_jaxpr_fun"].call_wrapped(*fixed)
    jaxpr, consts = _traced_before(*rule)
    dots: list[Any] = jaxpr.invars[len(moving) :]
    nothing = [x for x in dots if x.aval.dtype == jax.dtypes.float0]  # of an integer
    invars = [x for x in jaxpr.invars if x not in nothing]
    constants = [*jaxpr.constvars, *nothing]
    jaxpr = jaxprs.closing_over(jaxpr, constants, [None] * len(constants), invars)
    program = jaxprs.Program(jaxpr, [*consts, *(zero_tangent(x.aval) for x in nothing)])
    return program, [not x for x in without_tangent]


def _without_call(jvp: jaxprs.Program, e: core.JaxprEqn) -> tuple[bool, jaxprs.Program]:
    """True if a rule calls the function of the rule; results become operands then.

    Most rules compute the result so, as in `return f(x), t`. A call without the rule
    would have another second derivative.
    """
    [program], jaxpr = jaxprs.inner(e), jvp.jaxpr
    args = [*jaxpr.constvars, *jaxpr.invars]
    for call in jaxpr.eqns:
        if call.primitive is e.primitive and call.invars == args[: len(call.invars)]:
            [called] = jaxprs.inner(call)
            if not called.consts and jaxprs.form(called.jaxpr) == jaxprs.form(
                program.jaxpr
            ):
                invars = [*jaxpr.invars, *call.outvars]
                eqns = [x for x in jaxpr.eqns if x is not call]
                jaxpr = jaxpr.replace(invars=invars, eqns=eqns)
                return True, jaxprs.Program(jaxpr, jvp.consts)
    return False, jvp


def calls_rules(e: core.JaxprEqn) -> bool:
    """True if the rule of a `jax.custom_jvp` calls other functions with rules.

    It runs without these, so it has other derivatives than JAX gives it.
    """
    moving = [is_inexact(x.aval) for x in e.invars[e.params["num_consts"] :]]
    _, jvp = _without_call(_rule_of(e, moving)[0], e)
    names = {x.primitive.name for x in jaxprs.equations(jvp.jaxpr)}
    return not names.isdisjoint(("custom_jvp_call", "custom_vjp_call"))


def _in_rule(
    w: Writer, program: jaxprs.Program, args: list[Value], wanted: list[Layout]
) -> nested.Inner:
    """The program of a rule. Functions with rules of their own run without them."""
    return nested.inner(w.within(in_rule=True), program, args, wanted)


def _of_layout(aval: Any, layout: Layout) -> Value:
    return Value(None, aval, layout, 0, True, True)


# -- Backward rules --------------------------------------------------------------------


def _is_linear(w: Writer, program: jaxprs.Program, number: int) -> bool:
    """True if a program is known to be linear in a number of the last arguments."""
    types = [x.aval for x in program.jaxpr.invars]

    def is_linear() -> bool:
        layouts = [WHOLE] * (len(types) - number) + [PARTIAL] * number
        args = list(map(_of_layout, types, layouts))
        here = w.within(forbids_shares=True, forbids_collectives=True)
        try:
            _in_rule(here, program, args, [PARTIAL] * len(program.jaxpr.outvars))
        except RowsMeet:
            return False
        return True

    return w.once(("linear", number, nested.key_of(w, program)), is_linear)


def has_nonlinear_rule(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> bool:
    """True if an equation has a backward rule that is not linear, or calls one."""
    pairs = zip(e.invars, vs, strict=True)
    moving = {x for x, v in pairs if v.smooth and jaxprs.is_variable(x)}
    return bool(moving) and _is_nonlinear(w, e, moving)


def _is_nonlinear(w: Writer, e: core.JaxprEqn, moving: set[Any]) -> bool:
    """The same, if variables in `moving` can have a tangent."""
    if e.primitive.name == "custom_vjp_call":
        if e.params["symbolic_zeros"]:
            return True
        moves = (jaxprs.is_among(x, moving) for x in e.invars)
        pairs = zip(e.invars, moves, strict=True)
        operands = [Value(None, x.aval, smooth=m, params=True) for x, m in pairs]
        try:
            rule = derived(w, e, operands, [True] * len(e.outvars))
        except Exception as error:  # Any: nothing is known of the rule.
            return not about.is_of_user(error)  # JAX calls that one, if it is needed
        prints = bool(rule.program.jaxpr.effects)  # such as the cotangent
        return prints or not _is_linear(w, rule.backward, len(rule.given))
    for p in filter(about.has_rules, jaxprs.inner_programs(e)):
        here = w.at(jaxpr=p, given=jaxprs.moved_by(p, p.outvars))
        inside = about.moving(p, about.moving_inside(e, p, moving))
        if any(_is_nonlinear(here, x, inside) for x in p.eqns):
            return True
    return False


# -- Computed whole --------------------------------------------------------------------


def passed_on(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Any]:
    """The results of an equation that is computed whole.

    If it calls back, or a rule in there is not linear, one micro-batch runs it, and
    passes the results on.
    """
    xs, types = [w.whole(v) for v in vs], types_of(e)
    is_key = (jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in types)
    calls_back = jaxprs.acts(e) and not any(is_key)
    if calls_back and not types:
        _run_once(w, e, xs)
        return []
    bends = has_nonlinear_rule(w, e, vs)
    passed = [i for i, x in enumerate(types) if calls_back or (bends and is_inexact(x))]
    if not passed:
        return w.bound(e, xs)
    if bends and w.axis.is_checked:
        raise NotImplementedError(
            "A derivative rule that is not linear in its cotangent, of what has no "
            "rows, must see what comes from all rows: for that a jax.shard_map must "
            f"have check_vma=False, but this one checks, and {e.primitive.name} is at "
            f"{about.place_of(e.source_info)}. Pass check_vma=False, or call at top "
            "level with data_axis=."
        )

    def computed() -> list[jax.Array]:
        # The zeros of a rule that returns None have the types of its own arguments,
        # and JAX compares those of the branches.
        own = [jax.lax.copy_p.bind(x) if is_inexact(x) else x for x in xs]
        some = map(given_of(w, e, own).__getitem__, passed)
        return [x.astype(jnp.int32) if x.dtype == jnp.bool_ else x for x in some]

    # The others do not run it: a rule may make something of no cotangent.
    nothing = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(computed)]
    found = jax.lax.cond(w.index == 0, computed, lambda: nothing)
    w.level += 1
    out = w.bound(e, xs) if len(passed) < len(types) else [None] * len(types)
    for i, x in zip(passed, found, strict=True):
        out[i] = w.sum(x).astype(types[i].dtype)
    return out


def _run_once(w: Writer, e: core.JaxprEqn, xs: list[Any]) -> None:
    """Runs what only calls back in one micro-batch.

    It is a loop of one iteration or of none: a conditional without results is lost in a
    scan that is differentiated (jax 0.10 to 0.12).
    """
    xs = [jax.lax.stop_gradient(x) if is_inexact(x) else x for x in xs]

    def body(_: jax.Array) -> jax.Array:
        w.bound(e, xs)
        return jnp.zeros((), bool)

    jax.lax.while_loop(lambda due: due, body, w.index == 0)


def _traced_before(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> jaxprs.Program:
    """A program that JAX traced and keeps, such as that of a rule, and its constants.

    In newer JAX the constants are the first arguments.
    """
    number = len(consts) - len(jaxpr.constvars)
    return jaxprs.Program(
        jaxprs.with_constants(jaxpr, number) if number else jaxpr, consts
    )


# -- Derivatives that are refused ------------------------------------------------------


class NoDerivativeError(NotImplementedError):
    """A derivative that cannot be had."""


def not_differentiable(x: Any, error: Exception) -> Any:
    """The same array, which raises `error` if it is differentiated."""
    if not is_inexact(x):
        return x
    same = jax.custom_jvp(lambda x: x)

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise error

    return same(x)


# -- What rules close over -------------------------------------------------------------
# A rule may close over an array that the function around it computes. JAX leaves the
# tracer of that array in the rule, and so the rule runs only while JAX traces the
# function around it.


def without_closures(
    closed: Any, axis_env: Sequence[Any], smooth: int | None = None
) -> Any:
    """A traced program, whose rules take what they close over as operands.

    Args:
      closed: the program.
      axis_env: the names of axes in it.
      smooth: the number of operands that have a derivative, which is that of the first
        result; None if all have, and all results.
    """
    jaxpr = closed.jaxpr
    start, results = jaxpr.invars[:smooth], jaxpr.outvars[:1]
    if smooth is None:
        start, results = None, jaxpr.outvars
    taken = _closed_over(jaxpr, start, results)
    if not taken:
        return closed

    def fun(*args: Any) -> list[Any]:
        return _evaluated(closed, args, taken, {})

    new: Any = jax.make_jaxpr(fun, axis_env=list(axis_env))(*closed.in_avals)
    return new.replace(jaxpr=new.jaxpr.replace(debug_info=jaxpr.debug_info))


def _evaluated(
    program: Any, args: Sequence[Any], taken: "_Taken", outer: Mapping[Any, Any]
) -> list[Any]:
    """The results of a program, some of whose rules take what they close over.

    `outer` has values of variables of programs around it.
    """
    jaxpr = program.jaxpr
    names = [*jaxpr.constvars, *jaxpr.invars]
    known = dict(outer) | dict(zip(names, [*program.consts, *args], strict=True))

    def rule(e: core.JaxprEqn, values: list[Any]) -> list[Any]:
        out = inside(e, values)
        if out is None:
            out = jaxprs.bind(jaxpr, [e], e.invars, e.outvars, values)
        known.update(zip(e.outvars, out, strict=True))
        return out

    def inside(e: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
        if not any(id(x) in taken for x in jaxprs.within(e)):
            return None
        runs = [_run_by(x, rule) for x in jaxprs.inner(e)]
        if id(e) in taken:
            (ruled, tracers), error = taken[id(e)], _closes_over(e)
            kept = {key: known.get(key, x) for key, x in tracers.items()}
            kept = {key: not_differentiable(x, error) for key, x in kept.items()}
            return _taking(ruled, list(kept), runs[0])(list(kept.values()), *values)
        return _with_programs(e, runs, values)

    return jaxprs.evaluate(program, args, rule)


def _closes_over(e: core.JaxprEqn) -> Exception:
    return NoDerivativeError(
        f"The rule of the function at {about.place_of(e.source_info)} must not close "
        "over an array that depends on what is differentiated, but it does. Make that "
        "array an argument of the function and of the rule."
    )


def _run_by(program: jaxprs.Program, rule: jaxprs.Override) -> Callable[..., list[Any]]:
    return lambda *xs: jaxprs.evaluate(program, xs, rule)


def _with_programs(
    e: core.JaxprEqn, runs: Sequence[Callable[..., Any]], values: list[Any]
) -> list[Any] | None:
    """The results of an equation with other programs inside; None of a `while`."""
    kind, run = jaxprs.kind(e), runs[0]
    if kind == "scan":
        return jaxprs.scan(jaxprs.scan_of(e), lambda xs: run(*xs), values)
    if kind == "cond":
        return jax.lax.switch(values[0], runs, *values[1:])
    if kind == "checkpoint":
        return jaxprs.checkpointed(e, run)(*values)
    return run(*values) if kind == "call" else None


class _Ruled(NamedTuple):
    """A function with a rule: an equation of a program.

    Attributes:
      equation: the equation.
      program: the program around it.
      places: the operands that can have a tangent; a rule may refuse others.
    """

    equation: core.JaxprEqn
    program: core.Jaxpr
    places: list[int]

    @property
    def has_jvp(self) -> bool:
        return self.equation.primitive.name == "custom_jvp_call"

    def results(self, *xs: Any) -> list[Any]:
        """The results, for these operands."""
        e = self.equation
        e = e.replace(invars=[core.Var(x.aval) for x in e.invars])  # may be one, twice
        return jaxprs.bind(self.program, [e], e.invars, e.outvars, xs)

    def of_moving(self, xs: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The results as a function of the operands that can move, and these."""
        some = [xs[i] for i in self.places]
        return jaxprs.of_some(self.results, xs, self.places), some

    def constants(self) -> Sequence[Any]:
        """The constants of the rule."""

        def derivative(*xs: Any) -> Any:
            fun, some = self.of_moving(xs)
            if self.has_jvp:
                return jax.jvp(fun, some, some)
            out, pullback = jax.vjp(fun, *some)
            return pullback(list(map(zero_tangent, out)))

        types = [x.aval for x in self.equation.invars]
        try:
            return jaxprs.program_of(derivative, *types).consts
        except Exception:  # Any: of the rule, which JAX runs only if it is needed.
            return ()


def _ruled(
    jaxpr: core.Jaxpr, start: Collection[Any] | None, results: Sequence[Any]
) -> Iterator[_Ruled]:
    """The functions whose rules the derivative of `results` needs, if `start` moves."""
    if not about.has_rules(jaxpr):
        return
    moving, given = about.moving(jaxpr, start), jaxprs.moved_by(jaxpr, results)
    for e in jaxpr.eqns:
        if given.isdisjoint(e.outvars):
            continue
        is_jvp = e.primitive.name == "custom_jvp_call"
        if is_jvp or e.primitive.name == "custom_vjp_call":
            # JAX refuses tangents of what a function closes over: its constants.
            every = range(e.params["num_consts"], len(e.invars))
            moves = [i for i in every if jaxprs.is_among(e.invars[i], moving)]
            # A `jax.custom_gradient` is a function of JAX, with a rule of the user's.
            if moves and not (is_jvp and is_of_jax(e)):
                yield _Ruled(e, jaxpr, moves)
            continue
        for program in jaxprs.inner_programs(e):
            inside = about.moving_inside(e, program, moving)
            yield from _ruled(program, inside, program.outvars)


_Taken = dict[int, tuple[_Ruled, dict[Any, Any]]]  # by the `id` of an equation


def _closed_over(
    jaxpr: core.Jaxpr, start: Collection[Any] | None, results: Sequence[Any]
) -> _Taken:
    """Functions whose rules close over tracers, and these by a key."""
    found: _Taken = {}
    for ruled in _ruled(jaxpr, start, results):
        its = [x for x in ruled.constants() if isinstance(x, jax.core.Tracer)]
        if its:
            found[id(ruled.equation)] = ruled, {_key(x): x for x in its}
    return found


def _key(x: Any) -> Any:
    """The variable of a tracer of a program; the identity of all else."""
    variable = getattr(x, "val", None) if isinstance(x, jax.core.Tracer) else None
    return variable if isinstance(variable, core.Var) else id(x)


def _taking(
    ruled: _Ruled, keys: Sequence[Any], run: Callable[..., Any]
) -> Callable[..., list[Any]]:
    """A function whose rule takes what it closes over: a list, the first argument.

    `keys` tell what is in that list, `run` is the function without the rule.
    """

    def with_values(values: Sequence[Any], fun: Callable[..., Any], *args: Any) -> Any:
        """`fun(*args)`, where `fun` closes over variables with these values."""
        known = dict(zip(keys, values, strict=True))
        closed: Any
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        consts = [known.get(_key(x), x) for x in closed.consts]
        program = jaxprs.Program(closed.jaxpr, consts)
        # A rule may call the function again, which closes over the same.
        taken = _closed_over(closed.jaxpr, closed.jaxpr.invars, closed.jaxpr.outvars)
        out = _evaluated(program, jax.tree.leaves(args), taken, known)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    def jvp(primals: Any, tangents: Any) -> Any:
        (values, *xs), (_, *dots) = primals, tangents
        fun, some = ruled.of_moving(xs)
        dots = [dots[i] for i in ruled.places]
        return with_values(values, lambda *pair: jax.jvp(fun, *pair), some, dots)

    def forward(values: Any, *xs: Any) -> Any:
        fun, some = ruled.of_moving(xs)
        out, pullback = with_values(values, lambda *some: jax.vjp(fun, *some), *some)
        return out, (values, pullback)

    def backward(kept: Any, cts: Any) -> Any:
        values, pullback = kept
        grads = with_values(values, lambda f, cts: f(cts), pullback, cts)
        nothing = [None] * len(ruled.equation.invars)
        return None, *jaxprs.put(nothing, ruled.places, grads)

    if ruled.has_jvp:
        call: Any = jax.custom_jvp(lambda _, *xs: run(*xs))
        call.defjvp(jvp)
    else:
        call = jax.custom_vjp(lambda _, *xs: run(*xs))
        call.defvjp(forward, backward)
    return call
