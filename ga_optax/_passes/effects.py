"""Side effects: which equations a pass may move.

A pass changes equations of known primitives alone, and leaves the others where they
are. An unknown primitive may have any backward rule: so it is differentiated by
itself to see if the rule prints, calls back or communicates.
"""

import functools
import operator
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from . import jaxprs, primitives
from .places import line_of, looked_at

_CUSTOM_JVP = "custom_jvp_call"  # JAX runs the rule when it differentiates

_READ = ("", "open", *primitives.PROGRAM_KINDS)


def hidden_kind(name: str) -> str | None:
    """The kind of code that a primitive hides; None for code that can be read."""
    kind = primitives.TABLE.get(name, primitives.UNKNOWN).kind
    return None if kind in _READ or not name.isidentifier() else kind


def hides(equation: core.JaxprEqn) -> str | None:
    """The name of a primitive in an equation that hides its code, or None.

    An equation without results, such as a check, does not count: nothing depends on it.
    """
    names = (e.primitive.name for e in jaxprs.within(equation) if e.outvars)
    return next(filter(hidden_kind, names), None)


def has_rule(equation: core.JaxprEqn) -> bool:
    """True if an equation, or one inside it, has a backward rule of the user's."""
    rules = ("custom_vjp_call", "linear_call")
    return any(e.primitive.name in rules for e in jaxprs.within(equation))


def has_rules(jaxpr: core.Jaxpr) -> bool:
    """True if functions in a program have rules of their own."""
    rules = ("custom_vjp_call", _CUSTOM_JVP)
    return any(e.primitive.name in rules for e in jaxprs.equations(jaxpr))


def is_of_jax(e: core.JaxprEqn, name: str = "") -> bool:
    """True if a function and its rule belong to JAX, and it has this name, if given."""
    [program] = jaxprs.inner_programs(e)
    function, _, place = str(program.debug_info.func_src_info).partition(" at ")
    rule = str(e.params["jvp_jaxpr_fun"].debug_info.func_src_info).partition(" at ")[2]
    are_of_jax = place.startswith(_JAX) and rule.startswith(_JAX)
    return are_of_jax and name in ("", function)


_JAX = os.path.dirname(jax.__file__) + os.sep  # other names begin with it, too


def rule_in(
    jaxpr: core.Jaxpr, is_true: Callable[[core.JaxprEqn], bool] = is_of_jax
) -> core.JaxprEqn | None:
    """The first call in a program whose rule may not be the true derivative.

    `is_true` says it of a `jax.custom_jvp`: by default of those of JAX.
    """
    for e in jaxprs.equations(jaxpr):
        name = e.primitive.name
        inside: Any = getattr(e.params.get("function"), "program", None)  # `equation`
        if (
            name == "custom_vjp_call"
            or (name == _CUSTOM_JVP and not is_true(e))
            or (inside is not None and rule_in(inside.jaxpr, is_true) is not None)
        ):
            return e
    return None


def is_known(equation: core.JaxprEqn) -> bool:
    """True if a pass may move an equation: it and all equations inside are known."""
    return all(
        not e.effects
        and (is_built_in(e) or jaxprs.kind(e) or e.primitive.name == _CUSTOM_JVP)
        for e in jaxprs.within(equation)
    )


def is_built_in(equation: core.JaxprEqn) -> bool:
    """True for a primitive of `jax.lax` that does nothing but compute."""
    return not (equation.effects or primitives.entry_of(equation).kind)


# -- Side effects ----------------------------------------------------------------------


class Reason(NamedTuple):
    """The reason why a program is not changed, and the line of the user's code."""

    why: str
    line: str = ""


class SideEffects(NamedTuple):
    """Reasons why a program may do more than compute results and gradients.

    Attributes:
      reordering: why effects could come in another order; None if they cannot.
      nonlinear_backward: why the gradient may not scale with the cotangent, or None.
      of_rules: the effects of backward rules of the user's.
    """

    reordering: Reason | None = None
    nonlinear_backward: Reason | None = None
    of_rules: frozenset[Any] = frozenset()

    def __or__(self, other: Any) -> "SideEffects":
        return SideEffects(
            self.reordering or other.reordering,
            self.nonlinear_backward or other.nonlinear_backward,
            self.of_rules | other.of_rules,
        )


_side_effects: Any = weakref.WeakKeyDictionary()  # by program, then by operands


def side_effects(jaxpr: core.Jaxpr, start: frozenset[Any] | None = None) -> SideEffects:
    """The side effects of a program and of its backward pass.

    Operands in `start` can have a tangent; all, if it is None.
    """
    known = _side_effects.setdefault(jaxpr, {})
    if start not in known:
        can_move = functools.cache(lambda: moving(jaxpr, start))
        own = (e for e in jaxpr.eqns if not is_built_in(e))
        effects = (_effects_of(jaxpr, e, can_move) for e in own)
        known[start] = functools.reduce(operator.or_, effects, SideEffects())
    return known[start]


def _effects_of(
    jaxpr: core.Jaxpr, equation: core.JaxprEqn, can_move: Callable[[], set[Any]]
) -> SideEffects:
    name, line = equation.primitive.name, line_of(equation.source_info)
    if (is_program := jaxprs.kind(equation) is not None) or equation.effects:
        effects = SideEffects()
        for program in jaxprs.inner_programs(equation) if is_program else ():
            asks = has_rules(program)
            start = moving_inside(equation, program, can_move()) if asks else None
            effects |= side_effects(program, start)
        if equation.effects:
            why = "fun prints, calls back or communicates"
            effects |= SideEffects(Reason(why, line))
        return effects
    nonlinear = None
    if name != _CUSTOM_JVP:
        nonlinear = Reason(f"{name} may have a rule of its own", line)
    way, error = looked_at(backward, jaxpr, equation, can_move())
    if error is not None:
        why = f"{name} raises {type(error).__name__} if it is differentiated alone"
        return SideEffects(Reason(why, line), nonlinear)
    effects = way.jaxpr.effects
    why = f"the rule of {name} prints, calls back or communicates"
    reordering = Reason(why, line) if effects else None
    return SideEffects(reordering, nonlinear, frozenset(effects))


def backward(
    jaxpr: core.Jaxpr, equation: core.JaxprEqn, can_move: Collection[Any]
) -> jaxprs.Program:
    """The program that computes an equation and takes a cotangent back through it.

    It goes back to operands in `can_move` alone: a rule may refuse the others, and if a
    rule raises, JAX forgets the trees of an earlier trace of the rule.
    """
    ins = list(dict.fromkeys(jaxprs.variables(equation.invars)))
    smooth = [i for i, x in enumerate(ins) if x in can_move]
    outs = [x for x in equation.outvars if jaxprs.is_inexact(x)]

    def forward(*values: Any) -> list[Any]:
        return jaxprs.bind(jaxpr, [equation], ins, outs, values)

    def pulled_back(*values: Any) -> Any:
        of_smooth = jaxprs.of_some(forward, values, smooth)
        out, pullback = jax.vjp(of_smooth, *(values[i] for i in smooth))
        return pullback(list(map(jnp.ones_like, out)))

    return jaxprs.program_of(pulled_back, *(x.aval for x in ins))


def moving(jaxpr: core.Jaxpr, start: Iterable[Any] | None = None) -> set[Any]:
    """The variables of a program that can have a tangent, if operands in `start` can.

    Without `start` all operands can.
    """
    every = [*jaxpr.constvars, *jaxpr.invars] if start is None else start
    found = {x for x in every if jaxprs.is_inexact(x)}
    for e in jaxpr.eqns:
        ins = jaxprs.variables(e.invars)
        if e.primitive.name != "stop_gradient" and not found.isdisjoint(ins):
            found |= {x for x in e.outvars if jaxprs.is_inexact(x)}
    return found


def moving_inside(
    equation: core.JaxprEqn, program: core.Jaxpr, can_move: set[Any]
) -> frozenset[Any] | None:
    """The operands of a program inside that can have a tangent; None in a loop.

    `can_move` are the variables around the equation that can have one.
    """
    if jaxprs.kind(equation) not in (*jaxprs.INLINE, "cond"):
        return None
    pairs = zip(jaxprs.operands(equation, program), program.invars, strict=True)
    return frozenset(x for outer, x in pairs if jaxprs.is_among(outer, can_move))


class IndivisibleError(Exception):
    """A program, or a part of one, cannot be divided, or should not be."""


def check_divisible(equations: Iterable[core.JaxprEqn]) -> None:
    """Raises if equations make references."""
    for e in equations:
        if any(map(jaxprs.is_reference, e.outvars)):
            line = line_of(e.source_info)
            raise IndivisibleError(
                f"fun makes a reference (jax.new_ref), at {line}, and what reads and "
                "writes it must stay in order."
            )


def check_own_references(jaxpr: core.Jaxpr) -> None:
    """Raises if a program reads or writes a reference from outside."""
    if any(map(jaxprs.is_reference, (*jaxpr.constvars, *jaxpr.invars))):
        raise TypeError(
            "With value_and_grad micro-batches run more than once, so fun must not "
            "read or write a reference (jax.new_ref) from outside of it, but it does. "
            "Pass the value of the reference, ref[...], return what is new as aux, and "
            "write it after the call. A reference that fun makes itself is fine."
        )
