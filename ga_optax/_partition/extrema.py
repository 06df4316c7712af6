"""Extrema, whose derivative goes to what attains them.

JAX's derivative compares an extremum with its operand. XLA may compute the operand
twice, and round it in two ways: then no number attains the extremum, or another one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

EXTREMA = ("reduce_max", "reduce_min")


def attaining(is_max: bool, axes: tuple[int, ...], x: Any, extremum: Any) -> Any:
    """Marks the numbers that attain their extremum along axes: one at least.

    The operand and the extremum may have been rounded in different ways, and none would
    equal it. As in JAX, none attains NaN.
    """
    first, rest = True, x
    worst = -jnp.inf if is_max else jnp.inf
    for axis in axes:
        at = (jnp.argmax if is_max else jnp.argmin)(rest, axis, keepdims=True)
        # On a mesh with types: no gather, and `here` is sharded as `rest` is.
        places = jnp.zeros_like(rest, at.dtype)
        here = places + jax.lax.broadcasted_iota(at.dtype, rest.shape, axis) == at
        first &= here
        rest = jnp.where(here, rest, jnp.full_like(rest, worst))
        rest = (jnp.max if is_max else jnp.min)(rest, axis, keepdims=True)
    extremum = jnp.expand_dims(extremum, axes)
    return (x == extremum) | (first & (extremum == extremum))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def extremum_here(is_max: bool, axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    """The extremum of one micro-batch along axes, with a derivative that is finite."""
    return x.max(axes) if is_max else x.min(axes)


@extremum_here.defjvp
def extremum_here_jvp(
    is_max: bool, axes: tuple[int, ...], primals: Any, tangents: Any
) -> tuple[Any, Any]:
    [x], [t] = primals, tangents
    here = extremum_here(is_max, axes, x)
    share = jax.lax.stop_gradient(attaining(is_max, axes, x, here)).astype(t.dtype)
    return here, (t * share).sum(axes) / share.sum(axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def of_parts(is_max: bool, found: jax.Array, counts: jax.Array) -> jax.Array:
    """The extremum over micro-batches, from extrema and how often each is attained."""
    return found.max(0) if is_max else found.min(0)


@of_parts.defjvp
def _of_parts_jvp(is_max: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found, counts = primals
    out = of_parts(is_max, found, counts)
    share = jnp.where(found == out[None], counts, jnp.zeros_like(counts))
    return out, (tangents[0] * (share / share.sum(0)[None])).sum(0)
