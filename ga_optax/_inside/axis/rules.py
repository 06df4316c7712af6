"""The collectives: what a window keeps for each, and how to read its result there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._passes import ir

# The result of a collective, from its buffer and the index of the micro-batch.
Evaluate = Callable[[jax.Array, jax.Array], jax.Array]


def is_collective(equation: core.JaxprEqn, axis: str) -> bool:
    """Whether it is one of `RULES` over the axis."""
    return equation.primitive.name in RULES and axis in ir.axes_of(equation)


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
RULES: dict[str, tuple[str, Callable[[dict[str, Any]], Evaluate], bool]] = {
    "psum": ("sum", lambda params: whole, False),
    "pmax": ("max", lambda params: whole, False),
    "pmin": ("min", lambda params: whole, False),
    "all_gather": ("stack", _gathered, False),
    "reduce_scatter": ("sum", _scattered, True),
    "all_to_all": ("stack", _exchanged, True),
    "ppermute": ("stack", _permuted, True),
}
