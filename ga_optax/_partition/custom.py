"""Rules of the user's: `jax.custom_jvp` and `jax.custom_vjp` keep theirs.

What a rule computes is partitioned like any program, with the tangents in the layouts
of the primals. Cotangents have the dual ones: that of a whole value is partial, for
each micro-batch adds its own; and that of a partial one is whole. Where rows meet, the
function and its rule stand in the open, see `attached`.

A backward rule may not be linear in the cotangent: it may clip or quantise it. Then the
cotangent must be complete when it gets there. So a whole result is passed on by one
micro-batch alone, which gets the sum of the cotangents of all; and a result with rows
is kept for later levels, which otherwise would come back to it one by one.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from ga_optax._partition import nested
from ga_optax._partition.attached import attached, zero
from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Layout,
    Result,
    Results,
    Rows,
    RowsMeet,
    Value,
    type_here,
    types_of,
)
from ga_optax._partition.writer import Same, Writer
from ga_optax._passes import ir, places
from ga_optax._passes.ir import is_inexact

_JAX = os.path.dirname(jax.__file__)


def _value(aval: Any, layout: Layout) -> Value:
    return Value(None, aval, layout, 0, True, True)


# -- Forward rules ---------------------------------------------------------------------


def custom_jvp(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [program] = ir.inner(e)
    vs = w.summed(vs)
    if all(v.is_whole for v in vs):
        return w.all_whole(e, vs)
    if w.scope.in_rule or not any(is_inexact(v.aval) for v in vs):
        return nested.inlined(w, program, vs)
    apart = w.within(forbids_collectives=True)
    with w.may_fail(e, last=False) as out:
        out += _with_jvp(apart, e, program, vs)
    may_meet = not w.scope.forbids_collectives
    if not out and may_meet and _rule_only_saves_time(program.jaxpr):
        return nested.inlined(w, program, vs)
    return out or _in_the_open(w, e, vs)


def _rule(
    w: Writer, program: ir.Program, args: list[Value], due: Sequence[Layout | None]
) -> nested.Inner:
    """The program of a rule. Functions with rules of their own run without them."""
    return nested.inner(w.within(in_rule=True), program, args, due)


def _rule_only_saves_time(jaxpr: core.Jaxpr) -> bool:
    """Whether it is a function of JAX's whose rule is the derivative of its program.

    Most have a rule because it is not: `xlogy` at 0, `relu` at 0, `sinc`.
    """
    name, _, place = str(jaxpr.debug_info.func_src_info).partition(" at ")
    return name == "_softmax" and place.startswith(_JAX)


def _with_jvp(
    w: Writer, e: core.JaxprEqn, program: ir.Program, vs: list[Value]
) -> list[Result]:
    vs, n = _level(vs), e.params["num_consts"]
    primal = nested.inner(w, program, vs)
    moving = [is_inexact(v.aval) for v in vs[n:]]
    fixed = [not moves for moves in moving]
    *rule, still = e.params["jvp_jaxpr_fun"].call_wrapped(*fixed)
    calls, rule = _without_call(ir.traced_before(*rule), e)
    tangents = [_value(v.aval, v.layout) for v in compress(vs[n:], moving)]
    answers = map(_value, types_of(e), primal.layouts) if calls else ()
    moved = [not zero for zero in still]
    due = [*primal.layouts, *compress(primal.layouts, moved)]
    both = _rule(w, rule, [*vs[n:], *tangents, *answers], due)

    def make() -> Any:
        call = jax.custom_jvp(lambda index, *xs: tuple(primal(index, xs)))

        @call.defjvp
        def _(primals: Any, dots: Any) -> Any:
            index, *xs = primals
            answers = call(*primals) if calls else ()
            out = both(index, [*xs[n:], *compress(dots[1 + n :], moving), *answers])
            values, rest = out[: len(moved)], iter(out[len(moved) :])
            pairs = zip(values, moved, strict=True)
            return tuple(values), tuple(
                next(rest) if moves else zero(x) for x, moves in pairs
            )

        return call

    facts = "custom_jvp", calls, n, *moving, *moved
    return _called(w, make, vs, [primal, both], facts)


def _without_call(rule: ir.Program, its: core.JaxprEqn) -> tuple[bool, ir.Program]:
    """Whether a rule calls its own function; then its results come as operands.

    So most rules have the result, as in `return f(x), t`. Run without its rule there it
    would have another derivative, when the gradient is differentiated once more.
    """
    [own], jaxpr = ir.inner(its), rule.jaxpr
    given = [*jaxpr.constvars, *jaxpr.invars]
    for e in jaxpr.eqns:
        if e.primitive is its.primitive and e.invars == given[: len(e.invars)]:
            [inner] = ir.inner(e)
            if not inner.consts and ir.form(inner.jaxpr) == ir.form(own.jaxpr):
                invars = [*jaxpr.invars, *e.outvars]
                eqns = [x for x in jaxpr.eqns if x is not e]
                jaxpr = jaxpr.replace(invars=invars, eqns=eqns)
                return True, ir.Program(jaxpr, rule.consts)
    return False, rule


def calls_rules(e: core.JaxprEqn) -> bool:
    """True if the rule of a `jax.custom_jvp` calls other functions with rules.

    It runs without these, so it has other derivatives than JAX gives it.
    """
    fixed = [not is_inexact(x.aval) for x in e.invars[e.params["num_consts"] :]]
    *rule, _ = e.params["jvp_jaxpr_fun"].call_wrapped(*fixed)
    _, rule = _without_call(ir.traced_before(*rule), e)
    names = {x.primitive.name for x in ir.equations(rule.jaxpr)}
    return not names.isdisjoint(("custom_jvp_call", "custom_vjp_call"))


def _called(
    w: Writer,
    make: Callable[[], Any],
    vs: Sequence[Value],
    runs: Sequence[nested.Inner],
    facts: Any,
) -> list[Result]:
    """The results of a function with a rule that is made of programs, its own first."""
    key = facts, *(Same(run.closed) for run in runs)
    call = w.once(key, lambda: jax.jit(make()))
    out = call(nested.index_for(w, *runs), *(v.x for v in vs))
    return list(zip(out, runs[0].layouts, strict=True))


def _level(vs: list[Value]) -> list[Value]:
    """Values for a rule, in which rows do not meet: it is the same at all levels."""
    return [dataclasses.replace(v, level=0) for v in vs]


# -- Backward rules --------------------------------------------------------------------


class _Vjp(NamedTuple):
    """A call of a function with a backward rule, in the whole batch.

    Attributes:
      num_consts: how many of its arguments have no cotangent.
      calls: whether `fwd` is given the results last, which it would call for.
      fwd: its forward program.
      bwd: its backward program, of residuals and cotangents.
      forwarded: for each residual, which argument it is, or None.
      wanted: which of its other arguments have a cotangent.
      given: which of its results have one.
    """

    num_consts: int
    calls: bool
    fwd: ir.Program
    bwd: ir.Program
    forwarded: Sequence[int | None]
    wanted: list[bool]
    given: list[bool]

    @property
    def num_kept(self) -> int:
        """How many residuals are results of the forward program."""
        return len([i for i in self.forwarded if i is None])


def _read(e: core.JaxprEqn, vs: Sequence[Value]) -> _Vjp:
    p, args = e.params, vs[e.params["num_consts"] :]
    # JAX refuses cotangents of what a rule closes over: its constants, under a vmap.
    wanted = [v.smooth and is_inexact(v.aval) for v in args]
    fwd = ir.traced_before(*p["fwd_jaxpr_thunk"].call_wrapped(*wanted))
    _, _, forwarded = p["out_trees"]()
    kept: Any = (x.aval for x in fwd.jaxpr.outvars)
    residuals = [next(kept) if i is None else vs[i].aval for i in forwarded]
    given = [is_inexact(x.aval) for x in e.outvars]

    def backward(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        arriving, pairs = iter(cotangents), zip(types_of(e), given, strict=True)
        every = [next(arriving) if has else zero(x) for x, has in pairs]
        out = p["bwd"].call_wrapped(*residuals, *every)
        if len(out) == 2 and isinstance(out[0], list | tuple):
            out = out[0]  # beside logs, in newer versions of jax
        return [
            x if isinstance(x, jax.Array) else jnp.zeros(v.aval.shape, v.aval.dtype)
            for x, v in compress(zip(out, args, strict=True), wanted)
        ]

    types = [type_here(x, x.shape, None) for x in residuals]
    cts = [type_here(x, x.shape, None) for x in compress(types_of(e), given)]
    bwd, (calls, fwd) = ir.program_of(backward, types, cts), _without_call(fwd, e)
    return _Vjp(p["num_consts"], calls, fwd, bwd, forwarded, wanted, given)


def custom_vjp(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    vs = w.summed(vs)
    if e.params["symbolic_zeros"] or all(v.is_whole for v in vs):
        return None
    if w.scope.in_rule:
        return nested.inlined(w, ir.inner(e)[0], vs)
    with w.may_fail(e, last=False) as out:
        out += _with_vjp(w.within(forbids_collectives=True), e, vs)
    return out or _in_the_open(w, e, vs)


def _in_the_open(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    """The results if rows meet in the function or in its rule."""
    vs = _level(vs)
    with w.may_fail(e) as out:
        if any(v.smooth and is_inexact(v.aval) for v in vs):
            out += attached(w, e, vs, functools.partial(_seems_linear, w))
        else:
            out += nested.inlined(w, ir.inner(e)[0], vs)
    return out


def _with_vjp(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    vs = _level(vs)
    rules = Same(e.params["fwd_jaxpr_thunk"]), Same(e.params["bwd"])
    types = ((v.aval, v.smooth) for v in vs)
    rule = w.once(("read", *rules, *types), lambda: _read(e, vs))
    primal = nested.inner(w, ir.inner(e)[0], vs)
    fwd, bwd, linear = _rule_here(w, rule, vs, primal.layouts)
    n, kept = rule.num_consts, rule.num_kept

    def forward(call: Any, index: Any, *xs: Any) -> Any:
        answers = call(index, *xs) if rule.calls else ()
        out = fwd(index, [*xs[n:], *answers])
        saved = iter(out[:kept])
        residuals = [next(saved) if i is None else xs[i] for i in rule.forwarded]
        return tuple(out[kept:]), (index, residuals)

    def backward(saved: Any, cotangents: Any) -> Any:
        index, residuals = saved
        found = iter(bwd(index, [*residuals, *compress(cotangents, rule.given)]))
        of_args = [next(found) if has else None for has in rule.wanted]
        return (None, *[None] * n, *of_args)

    def make() -> Any:
        call = jax.custom_vjp(lambda index, *xs: tuple(primal(index, xs)))
        call.defvjp(functools.partial(forward, call), backward)
        return call

    facts = "custom_vjp", n, rule.calls, *rule.forwarded, *rule.wanted, *rule.given
    out = _called(w, make, vs, [primal, fwd, bwd], facts)
    if linear:
        return out
    return [(checkpoint_name(x, w.axis.name), layout) for x, layout in out]


def _rule_here(
    w: Writer, rule: _Vjp, vs: list[Value], layouts: list[Layout]
) -> tuple[nested.Inner, nested.Inner, bool]:
    """The rule of a micro-batch, and whether it is linear in the cotangents."""
    args = vs[rule.num_consts :]
    results = rule.fwd.jaxpr.invars[len(args) :]
    given = [*args, *map(_value, (x.aval for x in results), layouts)]
    fwd = _rule(w, rule.fwd, given, [*[None] * rule.num_kept, *layouts])
    saved = iter(fwd.layouts)
    of_residuals = [next(saved) if i is None else vs[i].layout for i in rule.forwarded]
    linear = _is_linear(w, rule)
    of_cts = [_dual(x) for x in compress(layouts, rule.given)]
    if not linear and not all(isinstance(x, Rows) for x in of_cts):
        raise RowsMeet
    types = [x.aval for x in rule.bwd.jaxpr.invars]
    given = list(map(_value, types, [*of_residuals, *of_cts]))
    wanted = [_dual(v.layout) for v in compress(args, rule.wanted)]
    return fwd, _rule(w, rule.bwd, given, wanted), linear


def _dual(layout: Layout) -> Layout:
    if isinstance(layout, Rows):
        return layout
    return PARTIAL if layout == WHOLE else WHOLE


def _is_linear(w: Writer, rule: _Vjp) -> bool:
    """Whether a backward program is linear in the cotangents, as far as is known."""
    return _seems_linear(w, rule.bwd, len(rule.bwd.jaxpr.invars) - len(rule.forwarded))


def _seems_linear(w: Writer, program: ir.Program, number: int) -> bool:
    """Whether one is linear in so many of its last arguments."""
    types = [x.aval for x in program.jaxpr.invars]

    def seems_linear() -> bool:
        layouts = [WHOLE] * (len(types) - number) + [PARTIAL] * number
        args = list(map(_value, types, layouts))
        here = w.within(forbids_shares=True, forbids_collectives=True)
        try:
            _rule(here, program, args, [PARTIAL] * len(program.jaxpr.outvars))
        except RowsMeet:
            return False
        return True

    return w.once(("linear", number, nested.key_of(w, program)), seems_linear)


# -- Computed whole --------------------------------------------------------------------


def passed_on(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Any]:
    """What an equation gives, computed whole.

    If it calls back, or a rule in there is not linear, one micro-batch runs it, and
    passes the results on.
    """
    xs, types = [w.whole(v) for v in vs], types_of(e)
    is_key = (jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in types)
    calls_back = ir.acts(e) and not any(is_key)
    if calls_back and not types:
        _run_once(w, e, xs)
        return []
    bends = any(v.smooth for v in vs) and has_nonlinear_rule(w, e)
    passed = [i for i, x in enumerate(types) if calls_back or (bends and is_inexact(x))]
    if not passed:
        return w.bound(e, xs)
    if bends and w.axis.is_checked:
        raise NotImplementedError(
            "A derivative rule that is not linear in its cotangent, of what has no "
            "rows, must see what comes from all rows: for that a jax.shard_map must "
            f"have check_vma=False, but this one checks, and {e.primitive.name} is at "
            f"{places.place_of(e.source_info)}. Pass that, or call at top level with "
            "data_axis=."
        )

    def run() -> list[jax.Array]:
        # The zeros of a rule that returns None have the types of its own arguments,
        # and JAX compares those of the branches.
        own = [jax.lax.copy_p.bind(x) if is_inexact(x) else x for x in xs]
        some = map(w.bound(e, own).__getitem__, passed)
        return [x.astype(jnp.int32) if x.dtype == jnp.bool_ else x for x in some]

    # The others do not run it: a rule may make something of no cotangent.
    nothing = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(run)]
    found = jax.lax.cond(w.index == 0, run, lambda: nothing)
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


def has_nonlinear_rule(w: Writer, e: core.JaxprEqn) -> bool:
    if e.primitive.name == "custom_vjp_call":
        if e.params["symbolic_zeros"]:
            return True
        vs = [_value(x.aval, WHOLE) for x in e.invars]
        return not _is_linear(w, _read(e, vs))
    return any(has_nonlinear_rule(w, x) for p in ir.inner_programs(e) for x in p.eqns)
