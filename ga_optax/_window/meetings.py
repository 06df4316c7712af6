"""Meetings: the collectives by which rows meet."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from .._partition.attached import gathered
from .._partition.held import meeting_of
from .._passes import jaxprs

# The result of a collective, from its buffer and the index of the micro-batch.
Evaluate = Callable[[jax.Array, jax.Array], jax.Array]


def collective(equation: core.JaxprEqn, axis: str) -> str | None:
    """The name of a collective over the axis in `MEETINGS`; None for others."""
    name = equation.primitive.name
    if name in MEETINGS and axis in jaxprs.axes_of(equation):
        return name
    return meeting_of(equation)


def is_collective(equation: core.JaxprEqn, axis: str) -> bool:
    """True if `MEETINGS` has a collective over the axis for the equation."""
    return collective(equation, axis) is not None


def whole(buffer: jax.Array, index: jax.Array) -> jax.Array:
    """The whole buffer."""
    return buffer


def part_of(buffer: jax.Array, index: jax.Array) -> jax.Array:
    """The part of one micro-batch in a stack, of this device or of all."""
    return jax.lax.dynamic_index_in_dim(buffer, index % len(buffer), keepdims=False)


def _gathered(params: dict[str, Any]) -> Evaluate:
    return lambda stack, index: gathered(stack, params)


# The kind of the buffer of each collective, and the view of its result.
MEETINGS: dict[str, tuple[str, Callable[[dict[str, Any]], Evaluate]]] = {
    "psum": ("sum", lambda params: whole),
    "pmax": ("max", lambda params: whole),
    "pmin": ("min", lambda params: whole),
    "all_gather": ("stack", _gathered),
}
