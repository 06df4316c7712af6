"""Gradients that are scattered over devices inside of the backward pass.

A gradient that the backward pass adds to a reference, slice by slice if the model scans
over its layers, is scattered there, slice by slice. To that end the
program of the backward pass is run equation by equation, and what it would add to a
reference is handed to a function.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from ga_optax._loop import trees
from ga_optax._passes import ir
from ga_optax._passes.primitives import ADD_TO, NEW_REF

# What to do with a gradient, or a slice of it, and what `run` was given for it.
Write = Callable[[Any, jax.Array], None]


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
    program = ir.program_of(lambda: backward(*map(jax.new_ref, trees.blank(types))))
    equations = program.jaxpr.eqns
    made = [e for e in equations if e.primitive.name == NEW_REF][: len(types)]
    rest = [e for e in equations if e not in made]
    invars = [e.outvars[0] for e in made]
    jaxpr = program.jaxpr.replace(invars=invars, eqns=rest)
    return _run(program._replace(jaxpr=jaxpr), writes, refs)


def _run(
    program: ir.Program, writes: Sequence[Write | None], args: Sequence[Any]
) -> list[Any]:
    """The results of a program; `writes` has None for what is no such reference."""
    held: Any = dict(zip(program.jaxpr.invars, writes, strict=True))

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
        ins = equation.invars
        here = [held.get(x) if ir.is_variable(x) else None for x in ins]
        if not any(here):
            return None
        if equation.primitive.name == ADD_TO:
            here[0](*values)  # pyrefly: ignore[not-callable]
            return ()
        # A jitted function, or a scan: see `is_cut`.
        [body] = ir.inner(equation)
        inside = functools.partial(_run, body, here)
        if ir.kind(equation) == "scan":
            return ir.scan(ir.scan_of(equation), inside, values)
        return inside(values)

    return ir.evaluate(program, args, rule)
