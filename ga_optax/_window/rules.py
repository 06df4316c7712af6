"""The collectives: what a window keeps for each, and how to read its result there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._partition import meeting_of
from ga_optax._passes import ir

# The result of a collective, from its buffer and the index of the micro-batch.
Evaluate = Callable[[jax.Array, jax.Array], jax.Array]


def collective(equation: core.JaxprEqn, axis: str) -> str | None:
    """Which of `RULES` it is over the axis, if any."""
    name = equation.primitive.name
    if name in RULES and axis in ir.axes_of(equation):
        return name
    return meeting_of(equation)


def is_collective(equation: core.JaxprEqn, axis: str) -> bool:
    """Whether it is one of `RULES` over the axis."""
    return collective(equation, axis) is not None


def whole(buffer: jax.Array, index: jax.Array) -> jax.Array:
    """All of it."""
    return buffer


def own_part(buffer: jax.Array, index: jax.Array) -> jax.Array:
    """The part of one micro-batch of a stack, of this device or of all of them."""
    return jax.lax.dynamic_index_in_dim(buffer, index % len(buffer), keepdims=False)


def _gathered(params: dict[str, Any]) -> Evaluate:
    dim, tiled = params["all_gather_dimension"], params["tiled"]

    def of(stack: jax.Array, index: jax.Array) -> jax.Array:
        out = jnp.moveaxis(stack, 0, dim)
        shape = out.shape
        return out.reshape(*shape[:dim], -1, *shape[dim + 2 :]) if tiled else out

    return of


# For each: the kind of its buffer, and its view.
RULES: dict[str, tuple[str, Callable[[dict[str, Any]], Evaluate]]] = {
    "psum": ("sum", lambda params: whole),
    "pmax": ("max", lambda params: whole),
    "pmin": ("min", lambda params: whole),
    "all_gather": ("stack", _gathered),
}
