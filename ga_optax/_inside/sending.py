"""Gradients that meet inside the backward pass, as soon as each of them is final.

A gradient that the backward pass adds to a reference, slice by slice if the model scans
over its layers, is sent to the other devices there, slice by slice. To that end the
program of the backward pass is run equation by equation, and what it would add to a
reference is handed to a function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from ga_optax._devices import collectives, meshes
from ga_optax._devices.meshes import Axes, Placement
from ga_optax._inside import aux_modes
from ga_optax._passes.ir import bind

# What to do with a gradient, or a slice of it, and what `run` was given for it.
Write = Callable[[Any, jax.Array], None]


def empty(x: jax.Array, placement: Placement, axes: Axes) -> Any:
    """A reference for the sum of `x` over devices, of its type."""
    varies = (meshes.varying(x) - set(axes)) | set(placement.axes)
    part = collectives.part(x, placement)
    return jax.new_ref(collectives.vary(part, tuple(sorted(varies))))


def run(
    backward: Callable[..., list[jax.Array]],
    types: Sequence[Any],
    refs: Sequence[Any],
    writes: Sequence[Write],
) -> list[jax.Array]:
    """`backward(*references)`, with `writes` in place of its additions to those.

    Args:
      backward: adds a gradient to each reference, and does nothing else with it.
      types: the types of those gradients.
      refs: what each of `writes` is given: a reference, or a tree of them. In a scan
        over slices of the gradient, that is their slices.
      writes: what to do with each gradient.
    """
    trace = jax.make_jaxpr(lambda: backward(*map(jax.new_ref, aux_modes.blank(types))))
    closed: Any = trace()
    equations = closed.jaxpr.eqns
    made = [e for e in equations if e.primitive.name == "new_ref"][: len(types)]
    rest = [e for e in equations if e not in made]
    invars = [e.outvars[0] for e in made]
    closed = closed.replace(jaxpr=closed.jaxpr.replace(invars=invars, eqns=rest))
    return _run(closed, writes, refs)


def _run(closed: Any, writes: Sequence[Write | None], args: Sequence[Any]) -> list[Any]:
    """The results of a program; `writes` has None for what is no such reference."""
    jaxpr = closed.jaxpr
    held = dict(zip(jaxpr.invars, writes, strict=True))
    env = dict(zip(jaxpr.invars, args, strict=True))
    env |= zip(jaxpr.constvars, closed.consts, strict=True)

    def value(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else env[x]

    for equation in jaxpr.eqns:
        ins, name = equation.invars, equation.primitive.name
        values = list(map(value, ins))
        here = [None if isinstance(x, core.Literal) else held.get(x) for x in ins]
        out: Sequence[Any] = ()
        if not any(here):
            out = bind(jaxpr, [equation], ins, equation.outvars, values)
        elif name == "addupdate":
            here[0](*values)  # pyrefly: ignore[not-callable]
        else:  # a jitted function, or a scan: see `is_cut`
            inside = functools.partial(_run, equation.params["jaxpr"], here)
            out = _scan(equation, inside, values) if name == "scan" else inside(values)
        env.update(zip(equation.outvars, out, strict=True))
    return list(map(value, jaxpr.outvars))


def _scan(
    equation: core.JaxprEqn, body: Callable[[list[Any]], list[Any]], values: list[Any]
) -> list[Any]:
    """The results of a scan, whose body is `body`."""
    inner, params = equation.params["jaxpr"].jaxpr, equation.params

    def whole(x: Any, outer: Any) -> bool:  # or it is a slice
        return len(x.aval.shape) == len(outer.aval.shape)

    num_carry = sum(map(whole, inner.outvars, equation.outvars))
    stop = sum(map(whole, inner.invars, equation.invars))
    start = stop - num_carry

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body([*values[:start], *carry, *slices])
        return out[:num_carry], out[num_carry:]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(step, values[start:stop], values[stop:], **how)
    return [*carry, *stacked]
