"""The plan of a window: what is computed at which level, and what is kept for it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._axis.read import is_mark

Evaluate = Callable[[jax.Array, jax.Array], jax.Array]


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
      kind: "sum", "max", "min", or "stack".
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


# -- Collectives -----------------------------------------------------------------------


def _whole(buffer: jax.Array, index: jax.Array) -> jax.Array:
    return buffer


def own_part(buffer: jax.Array, index: jax.Array) -> jax.Array:
    """The part of one micro-batch of a stack."""
    return jax.lax.dynamic_index_in_dim(buffer, index, keepdims=False)


def _gathered(params: dict[str, Any]) -> Evaluate:
    dim, tiled = params["all_gather_dimension"], params["tiled"]

    def of(stack: jax.Array, index: jax.Array) -> jax.Array:
        out = jnp.moveaxis(stack, 0, dim)
        shape = out.shape
        return out.reshape(*shape[:dim], -1, *shape[dim + 2 :]) if tiled else out

    return of


def _scattered(params: dict[str, Any]) -> Evaluate:
    dim, tiled, size = params["scatter_dimension"], params["tiled"], params["axis_size"]

    def of(total: jax.Array, index: jax.Array) -> jax.Array:
        if not tiled:
            return jax.lax.dynamic_index_in_dim(total, index, dim, keepdims=False)
        part = total.shape[dim] // size
        return jax.lax.dynamic_slice_in_dim(total, index * part, part, dim)

    return of


def _exchanged(params: dict[str, Any]) -> Evaluate:
    split, concat = params["split_axis"], params["concat_axis"]

    def of(stack: jax.Array, index: jax.Array) -> jax.Array:
        part = stack.shape[1 + split] // len(stack)
        mine = jax.lax.dynamic_slice_in_dim(stack, index * part, part, 1 + split)
        return jnp.concatenate(list(mine), concat)

    return of


def _permuted(params: dict[str, Any]) -> Evaluate:
    def of(stack: jax.Array, index: jax.Array) -> jax.Array:
        source = {to: start for start, to in params["perm"]}
        sources = jnp.asarray([source.get(i, -1) for i in range(len(stack))])
        start = sources[index]
        got = own_part(stack, jnp.maximum(start, 0))
        return jnp.where(start < 0, jnp.zeros_like(got), got)

    return of


# For each: the kind of its buffer, its view, and whether results differ by micro-batch.
_RULES: dict[str, tuple[str, Callable[[dict[str, Any]], Evaluate], bool]] = {
    "psum": ("sum", lambda params: _whole, False),
    "pmax": ("max", lambda params: _whole, False),
    "pmin": ("min", lambda params: _whole, False),
    "all_gather": ("stack", _gathered, False),
    "reduce_scatter": ("sum", _scattered, True),
    "all_to_all": ("stack", _exchanged, True),
    "ppermute": ("stack", _permuted, True),
}


# -- Facts -----------------------------------------------------------------------------


def _collective(equation: core.JaxprEqn, axis: str) -> bool:
    params = equation.params
    names = params.get("axes", params.get("axis_name", ()))
    names = names if isinstance(names, tuple) else (names,)
    return equation.primitive.name in _RULES and axis in names


def _facts(jaxpr: core.Jaxpr, axis: str, start: dict[Any, Fact]) -> dict[Any, Fact]:
    """The facts of every variable, from those of the arguments."""
    facts = dict(start)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        given = [facts.get(x, Fact()) for x in variables(equation.invars)]
        fact = Fact(*map(max, zip(Fact(), *given, strict=True)))
        if _collective(equation, axis):
            fact = fact._replace(level=fact.level + 1, own=_RULES[name][2])
        elif name == "axis_index":
            fact = fact._replace(own=True)
        for out in equation.outvars:
            dtype = getattr(out.aval, "dtype", np.dtype(bool))
            rigid = name == "stop_gradient" or not jnp.issubdtype(dtype, jnp.inexact)
            facts[out] = fact._replace(smooth=fact.smooth and not rigid)
    return facts


def _reaches(jaxpr: core.Jaxpr, facts: dict[Any, Fact], loss: Any) -> set[Any]:
    """The variables through which the loss may be differentiated."""
    reached = set(variables([loss]))
    for equation in reversed(jaxpr.eqns):
        if any(out in reached and facts[out].smooth for out in equation.outvars):
            inputs = variables(equation.invars)
            reached.update(x for x in inputs if facts.get(x, Fact()).smooth)
    return reached


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those that are no literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


# -- The plan --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to compute when.

    Attributes:
      jaxpr: the flat program.
      facts: what is known of its variables.
      first: the last level of what does not depend on the parameters.
      last: the last level of all.
      buffers: what the window keeps.
      views: how variables are read from it.
      index: the variables that are the index of the micro-batch.
      merged: whether the last level is filled in the loop that takes the gradients.
    """

    jaxpr: core.Jaxpr
    facts: dict[Any, Fact]
    first: int
    last: int
    buffers: list[Buffer]
    views: dict[Any, View]
    index: list[Any]
    merged: bool

    def fact(self, atom: Any) -> Fact:
        return Fact() if isinstance(atom, core.Literal) else self.facts[atom]

    def is_last(self, atom: Any) -> bool:
        """Whether a value is of the last level."""
        return self.fact(atom).level == self.last

    def at(self, level: int) -> list[int]:
        """The buffers that are filled at a level."""
        return [i for i, b in enumerate(self.buffers) if b.level == level]


def make(
    jaxpr: core.Jaxpr,
    axis: str,
    params: Sequence[Any],
    own: Sequence[Any],
    mergeable: Callable[["Plan"], bool],
) -> Plan:
    """Plans a flat program.

    Args:
      jaxpr: the program; its first result is the loss.
      axis: the name of the axis.
      params: the variables to differentiate with respect to.
      own: those that differ between micro-batches.
      mergeable: whether the last level of a plan need not be a level.
    """
    start = dict.fromkeys(own, Fact(own=True))
    for x in params:
        smooth = jnp.issubdtype(x.aval.dtype, jnp.inexact)
        start[x] = Fact(params=True, smooth=bool(smooth))
    facts = {x: Fact() for x in [*jaxpr.constvars, *jaxpr.invars]} | start
    before = [f.level for f in _facts(jaxpr, axis, facts).values() if not f.params]
    first = max(before, default=0)
    facts |= {x: facts[x]._replace(level=first) for x in params}
    facts = _facts(jaxpr, axis, facts)

    reached = _reaches(jaxpr, facts, jaxpr.outvars[0])
    buffers: list[Buffer] = []
    views: dict[Any, View] = {}
    places: dict[Any, int] = {}

    def buffer(operand: Any, kind: str, level: int) -> int:
        key = (id(operand), kind)
        if key not in places:
            places[key] = len(buffers)
            smooth = not isinstance(operand, core.Literal) and facts[operand].smooth
            buffers.append(Buffer(operand, kind, level, smooth and operand in reached))
            if kind == "stack" and not isinstance(operand, core.Literal):
                views[operand] = View(places[key], own_part)
        return places[key]

    index = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "axis_index":
            index += equation.outvars
        elif _collective(equation, axis):
            kind, rule, _ = _RULES[equation.primitive.name]
            for x, out in zip(equation.invars, equation.outvars, strict=True):
                place = buffer(x, kind, facts[out].level)
                views[out] = View(place, rule(equation.params))
                if kind in ("max", "min") and buffers[place].has_cotangent:
                    raise NotImplementedError(
                        f"The loss must not be differentiated through a p{kind}, as "
                        f"everywhere in JAX, but fun does so over {axis!r}. Put "
                        "jax.lax.stop_gradient around its argument, or gather."
                    )
    last = max((b.level for b in buffers), default=0)
    plan = Plan(jaxpr, facts, first, last, buffers, views, index, False)
    if last > first and mergeable(plan):
        plan = dataclasses.replace(plan, merged=True)
    for x in _worth_keeping(plan, axis):
        buffer(x, "stack", facts[x].level + 1)
    return plan


def _worth_keeping(plan: Plan, axis: str) -> list[Any]:
    """What later levels read and is marked, or no larger than what they gather."""
    levels = range(plan.first, plan.last - plan.merged)
    operands = {i: [plan.buffers[j].operand for j in plan.at(i + 1)] for i in levels}
    bound = {i: max(_nbytes(x) for x in operands[i]) for i in levels}
    kept: dict[Any, None] = {}

    def consider(atoms: Sequence[Any], level: int) -> None:
        for x in variables(atoms):
            its = plan.facts[x]
            later = its.params and its.own and its.level < level
            if later and _nbytes(x) <= bound.get(its.level, -1):
                kept[x] = None

    for equation in plan.jaxpr.eqns:
        if is_mark(equation, axis):
            outs = {x: plan.facts[x] for x in equation.outvars}
            kept |= dict.fromkeys(
                x for x in outs if outs[x].own and outs[x].level in bound
            )
        level = max((plan.facts[out].level for out in equation.outvars), default=0)
        if not _collective(equation, axis):
            consider(equation.invars, level)
    consider(plan.jaxpr.outvars, plan.last + 1)
    return [x for x in kept if x not in plan.views and x not in plan.index]


def _nbytes(atom: Any) -> int:
    return atom.aval.size * atom.aval.dtype.itemsize


# -- What a value takes ----------------------------------------------------------------


def needed(
    jaxpr: core.Jaxpr,
    wanted: Iterable[Any],
    known: Callable[[Any], bool],
    effects: Callable[[core.JaxprEqn], bool] = lambda equation: False,
) -> tuple[list[core.JaxprEqn], list[Any]]:
    """The equations that compute `wanted`, and the known variables that they read.

    `effects` says which equations to add for what they do, such as printing.
    """
    due = dict.fromkeys(variables(wanted))
    equations = []
    for equation in reversed(jaxpr.eqns):
        outs = [out for out in equation.outvars if out in due]
        if any(not known(out) for out in outs) or effects(equation):
            equations.append(equation)
            due |= dict.fromkeys(variables(equation.invars))
    return equations[::-1], [x for x in due if known(x)]


def depends(jaxpr: core.Jaxpr) -> bool:
    """Whether a result depends on an argument."""
    tainted = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(x in tainted for x in variables(equation.invars)):
            tainted.update(equation.outvars)
    return any(x in tainted for x in variables(jaxpr.outvars))
