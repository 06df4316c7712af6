"""Primitives that passes know, and the side effects of programs.

A pass changes equations of known primitives alone, and leaves the others where they
are. An unknown primitive may have any backward rule: so it is differentiated by itself
to see if the rule prints, calls back or communicates.
"""

import functools
import operator
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._passes import interpret, places, primitives, read

_CUSTOM_JVP = "custom_jvp_call"  # JAX runs the rule when it differentiates
_READ = ("", "open", *primitives.PROGRAM_KINDS)


def hidden(name: str) -> str | None:
    """The kind of code that a primitive hides; None for code that can be read."""
    kind = primitives.TABLE.get(name, primitives.UNKNOWN).kind
    return None if kind in _READ or not name.isidentifier() else kind


def hides(equation: core.JaxprEqn) -> str | None:
    """The name of a primitive in an equation that hides its code, or None.

    An equation without results, such as a check, does not count: nothing depends on it.
    """
    names = (e.primitive.name for e in read.within(equation) if e.outvars)
    return next(filter(hidden, names), None)


def constrained_to(equation: core.JaxprEqn) -> Any:
    """The sharding that a constraint asks for; None for other equations."""
    is_constraint = equation.primitive.name == primitives.CONSTRAINT
    return equation.params.get("sharding") if is_constraint else None


def has_rule(equation: core.JaxprEqn) -> bool:
    """True if an equation, or one inside it, has a backward rule of the user's."""
    rules = ("custom_vjp_call", "linear_call")
    return any(e.primitive.name in rules for e in read.within(equation))


def is_known(equation: core.JaxprEqn) -> bool:
    """True if a pass may move an equation: it and all equations inside are known."""
    return all(
        not e.effects
        and (is_built_in(e) or read.kind(e) or e.primitive.name == _CUSTOM_JVP)
        for e in read.within(equation)
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


_side_effects: Any = weakref.WeakKeyDictionary()  # by program


def side_effects(jaxpr: core.Jaxpr) -> SideEffects:
    """The side effects of a program and of its backward pass."""
    if jaxpr not in _side_effects:
        effects = (_effects_of(jaxpr, e) for e in jaxpr.eqns if not is_built_in(e))
        _side_effects[jaxpr] = functools.reduce(operator.or_, effects, SideEffects())
    return _side_effects[jaxpr]


def _effects_of(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> SideEffects:
    name, line = equation.primitive.name, places.line_of(equation.source_info)
    if (is_program := read.kind(equation) is not None) or equation.effects:
        effects = SideEffects()
        for program in read.inner_programs(equation) if is_program else ():
            effects |= side_effects(program)
        if equation.effects:
            why = "fun prints, calls back or communicates"
            effects |= SideEffects(Reason(why, line))
        return effects
    nonlinear = None
    if name != _CUSTOM_JVP:
        nonlinear = Reason(f"{name} may have a rule of its own", line)
    try:
        effects = backward(jaxpr, equation).effects
    except Exception as error:  # Any: the rule is the user's.
        why = f"{name} raises {type(error).__name__} if it is differentiated alone"
        return SideEffects(Reason(why, line), nonlinear)
    why = f"the rule of {name} prints, calls back or communicates"
    reordering = Reason(why, line) if effects else None
    return SideEffects(reordering, nonlinear, frozenset(effects))


def backward(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> core.Jaxpr:
    """The program that computes an equation and takes a cotangent back through it."""
    ins = list(dict.fromkeys(read.variables(equation.invars)))
    smooth = [i for i, x in enumerate(ins) if read.is_inexact(x)]
    outs = [x for x in equation.outvars if read.is_inexact(x)]

    def forward(*values: Any) -> list[Any]:
        return interpret.bind(jaxpr, [equation], ins, outs, values)

    def run(*values: Any) -> Any:
        of_smooth = interpret.of_some(forward, values, smooth)
        out, pullback = jax.vjp(of_smooth, *(values[i] for i in smooth))
        return pullback(list(map(jnp.ones_like, out)))

    return interpret.program_of(run, *(x.aval for x in ins)).jaxpr
