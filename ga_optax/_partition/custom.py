"""Derivative rules of users and of JAX: `jax.custom_jvp` and `jax.custom_vjp`.

A `jax.custom_jvp` stays one: its function and rule are partitioned like any program,
with the tangents in the layouts of the primals. Where rows meet in it, and of a
`jax.custom_vjp`, the function and its backward program stand in the open, see
`attached`.
"""

import dataclasses
from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax
from jax.extend import core

from .._passes import effects, jaxprs
from .._passes.places import looked_at
from . import nested
from .attached import attached, derived, is_linear, rule_of, stopped, zero_tangent
from .held import Layout, Result, Results, Value, types_of
from .writer import Writer


def custom_jvp(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [program] = jaxprs.inner(e)
    vs = w.summed(vs)
    if all(v.is_whole for v in vs):
        return w.all_whole(e, vs)
    if w.scope.in_rule or not any(_moving(e, vs)):
        return nested.inlined(w, program, vs)
    with w.may_meet(last=False) as out:
        out += _kept(w.within(forbids_collectives=True), e, vs)
    if not out and not w.scope.forbids_collectives and effects.is_of_jax(e, "_softmax"):
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


def _in_the_open(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    """The results of a function that no longer stands for itself."""
    vs = _of_no_level(vs)
    if not any(w.gives(e)):
        vs = list(map(_without_derivative, vs))
    if not any(v.smooth and jaxprs.is_inexact(v.aval) for v in vs):
        return nested.inlined(w, jaxprs.inner(e)[0], vs)
    apart = w.within(forbids_collectives=True)
    rule, error = looked_at(rule_of, w, e, vs)
    if error is not None:
        return _as_it_raises(w, e, vs, error)
    with w.may_meet(last=False) as out:
        out += attached(apart, e, vs, rule)
        w.level = apart.level
    if not out:
        with w.may_meet() as out:
            out += attached(w, e, vs, rule)
    return out


def _as_it_raises(
    w: Writer, e: core.JaxprEqn, vs: list[Value], error: Exception
) -> list[Result]:
    """The results of a function whose rule raises, as the user wrote it.

    JAX calls a rule only if a cotangent comes, as none may come to a metric: the error
    is raised there, and nowhere else.
    """
    same = jax.custom_vjp(lambda x: x)

    def back(_: None, ct: Any) -> Any:
        raise error

    same.defvjp(lambda x: (x, None), back)
    out = nested.inlined(w, jaxprs.inner(e)[0], vs)
    return [(same(x) if jaxprs.is_inexact(x) else x, layout) for x, layout in out]


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
    rule, error = looked_at(_rule_of, e, moving)
    if error is not None:  # as for integers in some of JAX's: see `_in_the_open`
        return []
    jvp, results_move = rule
    calls, jvp = _without_call(jvp, e)
    tangents = [_of_layout(v.aval, v.layout) for v in compress(vs[n:], moving)]
    results = map(_of_layout, types_of(e), function.layouts) if calls else ()
    wanted = [*function.layouts, *compress(function.layouts, results_move)]
    args = [*vs[n:], *tangents, *results]
    rule = nested.inner(w.within(in_rule=True), jvp, args, wanted)

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

    programs = jaxprs.Same(function.closed), jaxprs.Same(rule.closed)
    call = w.once(("custom_jvp", *programs, calls, n, *moving, *results_move), make)
    out = call(nested.index_for(w, function, rule), *(v.x for v in vs))
    return list(zip(out, function.layouts, strict=True))


def _moving(e: core.JaxprEqn, vs: list[Value]) -> list[bool]:
    """True for each argument of a `jax.custom_jvp` of which the rule gets a tangent."""
    its, asks = vs[e.params["num_consts"] :], e.params["symbolic_zeros"]
    return [jaxprs.is_inexact(v.aval) and (v.smooth or not asks) for v in its]


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
    moving = [jaxprs.is_inexact(x.aval) for x in e.invars[e.params["num_consts"] :]]
    _, jvp = _without_call(_rule_of(e, moving)[0], e)
    names = {x.primitive.name for x in jaxprs.equations(jvp.jaxpr)}
    return not names.isdisjoint(("custom_jvp_call", "custom_vjp_call"))


def _of_layout(aval: Any, layout: Layout) -> Value:
    return Value(None, aval, layout, 0, True, True)


# -- Backward rules --------------------------------------------------------------------


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
        every = [True] * len(e.outvars)
        rule, error = looked_at(derived, w, e, operands, every)
        if error is not None:
            return True  # nothing is known of it
        prints = bool(rule.program.jaxpr.effects)  # such as the cotangent
        return prints or not is_linear(w, rule.backward, len(rule.given))
    for p in filter(effects.has_rules, jaxprs.inner_programs(e)):
        here = w.at(jaxpr=p, given=jaxprs.moved_by(p, p.outvars))
        inside = effects.moving(p, effects.moving_inside(e, p, moving))
        if any(_is_nonlinear(here, x, inside) for x in p.eqns):
            return True
    return False


def _traced_before(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> jaxprs.Program:
    """A program that JAX traced and keeps, such as that of a rule, and its constants.

    In newer JAX the constants are the first arguments.
    """
    number = len(consts) - len(jaxpr.constvars)
    return jaxprs.Program(
        jaxprs.with_constants(jaxpr, number) if number else jaxpr, consts
    )
