"""The plan of a window: what is computed at which level, and what is kept for it."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._inside.axis.read import is_mark, variables
from ga_optax._inside.axis.rules import RULES, Evaluate, is_collective, own_part
from ga_optax._passes.ir import inner_programs


class Fact(NamedTuple):
    """What is known of a value; that of a result is the largest of its arguments'.

    Attributes:
      level: how many collectives are on the longest way to it, after those that come
        before all parameters.
      params: whether it depends on the parameters.
      smooth: whether it may have a derivative with respect to them.
      own: whether it may differ between micro-batches.
    """

    level: int = 0
    params: bool = False
    smooth: bool = False
    own: bool = False


class Buffer(NamedTuple):
    """What a window keeps of one value of its micro-batches.

    Attributes:
      operand: the value.
      kind: "sum", "max", "min", "stack", or "own": a stack of this device's alone.
      level: from which level on it is there.
      has_cotangent: whether the loss differentiates through it.
    """

    operand: Any
    kind: str
    level: int
    has_cotangent: bool


class View(NamedTuple):
    """How a value is read from a buffer: `of(buffer, index of the micro-batch)`."""

    buffer: int
    of: Evaluate


# -- Facts -----------------------------------------------------------------------------


def _facts(jaxpr: core.Jaxpr, axis: str, start: dict[Any, Fact]) -> dict[Any, Fact]:
    """The facts of every variable, from those of the arguments."""
    facts = dict(start)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        given = [facts.get(x, Fact()) for x in variables(equation.invars)]
        fact = Fact(*map(max, zip(Fact(), *given, strict=True)))
        if is_collective(equation, axis):
            fact = fact._replace(level=fact.level + 1, own=RULES[name][2])
        elif name == "axis_index":
            fact = fact._replace(own=True)
        for out in equation.outvars:
            dtype = getattr(out.aval, "dtype", np.dtype(bool))
            rigid = name == "stop_gradient" or not jnp.issubdtype(dtype, jnp.inexact)
            facts[out] = fact._replace(smooth=fact.smooth and not rigid)
    return facts


def _reached(jaxpr: core.Jaxpr, facts: dict[Any, Fact]) -> set[Any]:
    """The variables through which the loss may be differentiated."""
    reached = set(variables(jaxpr.outvars[:1]))
    for equation in reversed(jaxpr.eqns):
        if any(out in reached and facts[out].smooth for out in equation.outvars):
            inputs = variables(equation.invars)
            reached.update(x for x in inputs if facts.get(x, Fact()).smooth)
    return reached


# -- The plan --------------------------------------------------------------------------


@dataclasses.dataclass
class Plan:
    """What to compute when.

    Attributes:
      jaxpr: the flat program; its first result is the loss.
      axis: the name of the axis.
      facts: what is known of its variables.
      reached: through which of them the loss may be differentiated.
      first: the last level of what does not depend on the parameters.
      last: the last level of all.
      buffers: what the window keeps.
      views: how variables are read from it.
      index: the variables that are the index of the micro-batch.
      merged: whether the last level is filled in the loop that takes the gradients.
    """

    jaxpr: core.Jaxpr
    axis: str
    facts: dict[Any, Fact]
    reached: set[Any]
    first: int
    last: int = 0
    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    views: dict[Any, View] = dataclasses.field(default_factory=dict)
    index: list[Any] = dataclasses.field(default_factory=list)
    merged: bool = False

    def fact(self, atom: Any) -> Fact:
        return Fact() if isinstance(atom, core.Literal) else self.facts[atom]

    def is_last(self, atom: Any) -> bool:
        """Whether a value is of the last level."""
        return self.fact(atom).level == self.last

    def at(self, level: int) -> list[int]:
        """The buffers that are filled at a level."""
        return [i for i, b in enumerate(self.buffers) if b.level == level]

    def is_known(self, variable: Any, level: int) -> bool:
        """Whether it can be read from a buffer below a level."""
        view = self.views.get(variable)
        return view is not None and self.buffers[view.buffer].level < level

    def buffer(self, operand: Any, kind: str, level: int) -> int:
        """The buffer of a value, a new one if there is none."""
        for i, old in enumerate(self.buffers):
            if old.operand is operand and old.kind == kind and old.level <= level:
                return i
        smooth = self.fact(operand).smooth and operand in self.reached
        self.buffers.append(Buffer(operand, kind, level, smooth))
        if kind in ("stack", "own") and not isinstance(operand, core.Literal):
            self.views.setdefault(operand, View(len(self.buffers) - 1, own_part))
        return len(self.buffers) - 1

    def keep(self, merged: bool) -> None:
        """Plans what else to stack; `merged` as the attribute."""
        self.merged = merged
        for x in _worth_keeping(self):
            self.buffer(x, "own", self.facts[x].level + 1)


def make(jaxpr: core.Jaxpr, axis: str, params: list[Any], own: list[Any]) -> Plan:
    """Plans a flat program, but for what is kept beside what its collectives carry.

    Args:
      jaxpr: the program.
      axis: the name of the axis.
      params: the variables to differentiate with respect to.
      own: those that differ between micro-batches.
    """
    start = dict.fromkeys([*jaxpr.constvars, *jaxpr.invars], Fact())
    start |= dict.fromkeys(own, Fact(own=True))
    start |= dict.fromkeys(params, Fact(params=True, smooth=True))
    before = [f.level for f in _facts(jaxpr, axis, start).values() if not f.params]
    first = max(before, default=0)
    start |= dict.fromkeys(params, Fact(level=first, params=True, smooth=True))
    facts = _facts(jaxpr, axis, start)
    plan = Plan(jaxpr, axis, facts, _reached(jaxpr, facts), first)
    for equation in jaxpr.eqns:
        if equation.primitive.name == "axis_index":
            plan.index += equation.outvars
        elif is_collective(equation, axis):
            kind, rule, _ = RULES[equation.primitive.name]
            for x, out in zip(equation.invars, equation.outvars, strict=True):
                place = plan.buffer(x, kind, facts[out].level)
                plan.views[out] = View(place, rule(equation.params))
                if kind in ("max", "min") and plan.buffers[place].has_cotangent:
                    raise NotImplementedError(
                        f"The loss must not be differentiated through a p{kind}, as "
                        f"everywhere in JAX, but fun does so over {axis!r}. Put "
                        "jax.lax.stop_gradient around its argument, or gather."
                    )
        elif _has_state(equation):
            raise NotImplementedError(
                f"With axis_name={axis!r} micro-batches run more than once, so nothing "
                "in fun must have a state, but it calls io_callback for a result. Call "
                "jax.pure_callback, or call back before value_and_grad."
            )
    plan.last = max((b.level for b in plan.buffers), default=0)
    return plan


def _has_state(equation: core.JaxprEqn) -> bool:
    """Whether another run of it may have other results."""
    if equation.primitive.name == "io_callback":
        return bool(equation.outvars)
    return any(map(_has_state, (e for p in inner_programs(equation) for e in p.eqns)))


def _worth_keeping(plan: Plan) -> list[Any]:
    """What is marked, or read by later levels and no larger than what they carry.

    But what the loss alone reads is computed there, once, if the way back to the
    operands does not run it again anyway: an encoder that is not gathered runs once.
    """
    levels = range(plan.first, plan.last - plan.merged)
    operands = {i: [plan.buffers[j].operand for j in plan.at(i + 1)] for i in levels}
    bound = {i: max(map(_nbytes, group)) for i, group in operands.items()}
    again = {i: _made_for(plan, group, i + 1) for i, group in operands.items()}
    readers = [
        (e.invars, max((plan.facts[x].level for x in e.outvars), default=0))
        for e in plan.jaxpr.eqns
        if not is_collective(e, plan.axis)
    ]
    marks = [x for e in plan.jaxpr.eqns if is_mark(e, plan.axis) for x in e.outvars]
    made: dict[Any, set[Any]] = {}
    for read, level in [*readers, (plan.jaxpr.outvars, plan.last + 1)]:
        for x in variables(read):
            i, its = plan.facts[x].level, plan.facts[x]
            later = its.params and its.own and i < level and i in bound
            if later and (x in marks or _nbytes(x) <= bound[i]):
                if x not in made:
                    made[x] = _made_for(plan, [x], i + 2)
                if x in marks or level < plan.last - plan.merged:
                    again[i] |= made[x]
    kept: list[Any] = []
    while (found := [x for x in made if made[x] & again[plan.facts[x].level]]) != kept:
        kept = found
        for x in kept:
            again[plan.facts[x].level] |= made[x]
    return [x for x in kept if x not in plan.views and x not in plan.index]


def _made_for(plan: Plan, wanted: list[Any], level: int) -> set[Any]:
    """What is computed of parameters and rows for `wanted`, at a level."""
    equations, _ = needed(
        plan.jaxpr, wanted, lambda x: plan.is_known(x, level), lambda _: False
    )
    made = {x for e in equations for x in e.outvars}
    return {x for x in made if plan.facts[x].params and plan.facts[x].own}


def _nbytes(atom: Any) -> int:
    return atom.aval.size * atom.aval.dtype.itemsize


# -- What a value takes ----------------------------------------------------------------


def needed(
    jaxpr: core.Jaxpr,
    wanted: Iterable[Any],
    known: Callable[[Any], bool],
    runs: Callable[[core.JaxprEqn], bool],
) -> tuple[list[core.JaxprEqn], list[Any]]:
    """The equations that compute `wanted`, and the known variables that they read.

    Those that `runs` names are among them for what they do, such as printing.
    """
    due = dict.fromkeys(variables(wanted))
    equations = []
    for equation in reversed(jaxpr.eqns):
        outs = [out for out in equation.outvars if out in due]
        if any(not known(out) for out in outs) or runs(equation):
            equations.append(equation)
            due |= dict.fromkeys(variables(equation.invars))
    return equations[::-1], [x for x in due if known(x)]


def following(jaxpr: core.Jaxpr, start: Iterable[Any]) -> set[Any]:
    """The variables that depend on some of `start`, and those."""
    found = set(start)
    for equation in jaxpr.eqns:
        if not found.isdisjoint(variables(equation.invars)):
            found.update(equation.outvars)
    return found
