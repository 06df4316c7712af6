"""Gradients that are scattered over devices inside of the backward pass.

The backward pass adds a gradient to a reference, slice by slice if the model scans over
layers. Here each slice is scattered first: the program of the backward pass runs
equation by equation, and a function gets each gradient in place of the reference.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from ga_optax._loop import trees
from ga_optax._passes import interpret, read
from ga_optax._passes.primitives import ADD_TO, NEW_REF

# Adds a gradient, or a slice of the gradient, to the reference that `run` was given.
Write = Callable[[Any, jax.Array], None]


def run(
    backward: Callable[..., list[jax.Array]],
    types: Sequence[Any],
    refs: Sequence[Any],
    writes: Sequence[Write],
) -> list[jax.Array]:
    """`backward(*references)`, with `writes` in place of the additions to references.

    Args:
      backward: adds a gradient to each reference, and does nothing else with it.
      types: the types of these gradients.
      refs: a reference for each of `writes`; in a scan over slices of the gradient,
        `writes` get the slices of the reference.
      writes: a function of the reference and of the gradient.
    """
    program = interpret.program_of(
        lambda: backward(*map(jax.new_ref, trees.blank(types)))
    )
    equations = program.jaxpr.eqns
    new_refs = [e for e in equations if e.primitive.name == NEW_REF][: len(types)]
    rest = [e for e in equations if e not in new_refs]
    invars = [e.outvars[0] for e in new_refs]
    jaxpr = program.jaxpr.replace(invars=invars, eqns=rest)
    return _run(program._replace(jaxpr=jaxpr), writes, refs)


def _run(
    program: read.Program, writes: Sequence[Write | None], args: Sequence[Any]
) -> list[Any]:
    """The results of a program. `writes` is None for an argument of another kind."""
    write_of: Any = dict(zip(program.jaxpr.invars, writes, strict=True))

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
        ins = equation.invars
        inner = [write_of.get(x) if read.is_variable(x) else None for x in ins]
        if not any(inner):
            return None
        if equation.primitive.name == ADD_TO:
            inner[0](*values)  # pyrefly: ignore[not-callable]
            return ()
        # A jitted function, or a scan: see `is_cut`.
        [body] = read.inner(equation)
        inside = functools.partial(_run, body, inner)
        if read.kind(equation) == "scan":
            return interpret.scan(read.scan_of(equation), inside, values)
        return inside(values)

    return interpret.evaluate(program, args, rule)
