"""What is known of JAX's primitives, and what a program does beyond its results.

A pass changes equations of these primitives alone, and leaves the others where they
are. What is not known may hold anything in its backward pass: so it is differentiated
by itself to see whether that prints, calls back or communicates.
"""

import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._passes import interpret, places, primitives, read

_RUNS = "custom_jvp_call"  # its rule is run as JAX differentiates it
_READ = ("", "open", *primitives.PROGRAM_KINDS)


def hidden(name: str) -> str | None:
    """The kind of code that cannot be read, by its name; None for what can be."""
    kind = primitives.TABLE.get(name, primitives.UNKNOWN).kind
    return None if kind in _READ or not name.isidentifier() else kind


def hides(equation: core.JaxprEqn) -> str | None:
    """The primitive in an equation that hides what it does; None if there is none.

    One without results, such as a check, hides nothing of those.
    """
    names = (e.primitive.name for e in read.within(equation) if e.outvars)
    return next(filter(hidden, names), None)


def constrained_to(equation: core.JaxprEqn) -> Any:
    """The sharding that an equation asks for; None if it is no such constraint."""
    is_constraint = equation.primitive.name == primitives.CONSTRAINT
    return equation.params.get("sharding") if is_constraint else None


def has_rule(equation: core.JaxprEqn) -> bool:
    """True if something in an equation has a backward rule of the user's."""
    rules = ("custom_vjp_call", "linear_call")
    return any(e.primitive.name in rules for e in read.within(equation))


def is_known(equation: core.JaxprEqn) -> bool:
    """Whether a pass may move an equation: it and all inside it are known."""
    return all(
        not e.effects and (is_built_in(e) or read.kind(e) or e.primitive.name == _RUNS)
        for e in read.within(equation)
    )


def is_built_in(equation: core.JaxprEqn) -> bool:
    """Whether it is a primitive of `jax.lax` that does nothing but compute."""
    return not (equation.effects or primitives.entry_of(equation).kind)


# -- What a program does beside its results --------------------------------------------


class Reason(NamedTuple):
    """Why something is not done to a program, and the line of the user's code."""

    why: str
    line: str = ""


class Deeds(NamedTuple):
    """What a program does that is not known to be harmless.

    Attributes:
      acts: why its effects could come in another order; None if they cannot.
      bends: why its gradient may not scale with its cotangent; None if it does.
      of_rules: the effects of rules of the user's.
    """

    acts: Reason | None = None
    bends: Reason | None = None
    of_rules: frozenset[Any] = frozenset()

    def __or__(self, other: Any) -> "Deeds":
        either = self.acts or other.acts, self.bends or other.bends
        return Deeds(*either, self.of_rules | other.of_rules)


_deeds: Any = weakref.WeakKeyDictionary()  # by program


def deeds(jaxpr: core.Jaxpr) -> Deeds:
    """What the program of a loss does, there and back."""
    if jaxpr not in _deeds:
        found = Deeds()
        for equation in jaxpr.eqns:
            if not is_built_in(equation):
                found |= _deeds_of(jaxpr, equation)
        _deeds[jaxpr] = found
    return _deeds[jaxpr]


def _deeds_of(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> Deeds:
    name, found = equation.primitive.name, Deeds()
    line = places.line_of(equation.source_info)
    calls = read.kind(equation) is not None
    for program in read.inner_programs(equation) if calls else ():
        found |= deeds(program)
    if equation.effects:
        found |= Deeds(Reason("fun prints, calls back or communicates", line))
    if calls or equation.effects:
        return found
    bends = None
    if name != _RUNS:
        bends = Reason(f"{name} may have a rule of its own", line)
    try:
        effects = backward(jaxpr, equation).effects
    except Exception as error:  # Any: the rule is the user's.
        why = f"{name} raises {type(error).__name__} if it is differentiated alone"
        return Deeds(Reason(why, line), bends)
    acts = Reason(f"the rule of {name} prints, calls back or communicates", line)
    return Deeds(acts if effects else None, bends, frozenset(effects))


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
