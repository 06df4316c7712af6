"""The sum of logical devices: one order of additions, on any number of devices.

    s₀   s₁   s₂   s₃      the sums of the logical devices
      s₀₁       s₂₃        neighbours first
          s₀₁₂₃

There are 2ⁱ logical devices, and 2ʲ devices hold 2ⁱ⁻ʲ neighbours each. So what a device
adds up is a whole subtree, and one sum leaves it, as without logical devices.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ga_optax import accumulator
from ga_optax._devices import collectives, meshes
from ga_optax._devices.meshes import Axes, Placement

T = TypeVar("T")
# Leaves with fewer elements travel together: to copy them takes less time than to send
# a message.
_SMALL = 2**14


def plus(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x + y` of numbers of any kind, rounded as an accumulator rounds."""
    return accumulator.plus(x, y) if jnp.issubdtype(x.dtype, jnp.inexact) else x + y


def fold(
    run: Callable[[Any, T], tuple[T, Any]],
    xs: Any,
    number: int,
    buffers: list[T],
    join: Callable[[T, T], T],
) -> tuple[list[T], Any]:
    """The sum of `number` neighbours on this device, with a buffer for each level.

    Args:
      run: what one of them does with its part of `xs`, and a buffer to overwrite: its
        sum, and what to collect.
      xs: their arguments, `[number, ...]`.
      number: how many there are, a power of two.
      buffers: one for the sum of each level, `log2(number) + 1`. What they hold is not
        read. So the loops write to the same few buffers all along.
      join: adds the sums of two neighbours.

    Returns:
      The buffers, the sum last, and what was collected, `[number, ...]`.
    """
    *lower, top = buffers
    if number == 1:
        out, collected = run(jax.tree.map(lambda x: x[0], xs), top)
        return [out], jax.tree.map(lambda x: x[None], collected)

    def half(carry: tuple[list[T], T], inputs: Any) -> tuple[tuple[list[T], T], Any]:
        (lower, total), (is_first, part) = carry, inputs
        lower, collected = fold(run, part, number // 2, lower, join)
        both = join(total, lower[-1])
        total = jax.tree.map(functools.partial(jnp.where, is_first), lower[-1], both)
        return (lower, total), collected

    halves = jax.tree.map(lambda x: jnp.reshape(x, (2, number // 2, *x.shape[1:])), xs)
    inputs = jnp.array([True, False]), halves
    (lower, top), collected = jax.lax.scan(half, (lower, top), inputs)
    joined = jax.tree.map(lambda x: jnp.reshape(x, (number, *x.shape[2:])), collected)
    return [*lower, top], joined


def _added(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The sum over axis 0, whose length is a power of two."""
    while x.shape[0] > 1:
        x = plus(x[0::2], x[1::2])
        if jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).bits < 32:
            x = accumulator.rounded(x, zero)  # or XLA would skip the rounding
    return x[0]


def reduce(
    leaves: list[jax.Array],
    where: Sequence[Placement],
    axes: Axes,
    zero: jax.Array,
) -> list[jax.Array]:
    """The sum over devices: as `collectives.reduce`, but added in the tree's order.

    Every device gets its share of all sums, adds them up, and sends the total to the
    others, if it is not to keep it: as many bytes as a ring's all-reduce.
    """
    number = meshes.num_devices(axes)
    if number == 1:
        return collectives.reduce(leaves, where, axes)
    result: list[Any] = list(leaves)
    packs: dict[Any, list[int]] = {}
    for i, (x, placement) in enumerate(zip(leaves, where, strict=True)):
        if placement.dims or x.size >= _SMALL:
            result[i] = _of_leaf(x, placement, axes, zero)
        else:
            packs.setdefault(x.dtype, []).append(i)
    for members in packs.values():
        flat, apart = ravel_pytree([leaves[i] for i in members])
        sums = apart(_of_leaf(flat, Placement(), axes, zero))
        for i, x in zip(members, sums, strict=True):
            result[i] = x
    return result


def _of_leaf(
    x: jax.Array, placement: Placement, axes: Axes, zero: jax.Array
) -> jax.Array:
    sizes, of_dim = jax.sharding.get_abstract_mesh().shape, dict(placement.dims)
    # A dimension for each axis that shards one, and one for what is left of that.
    shape: list[int] = []
    at: dict[str, int] = {}
    for dim, size in enumerate(x.shape):
        for name in of_dim.get(dim, ()):
            at[name] = len(shape)
            shape.append(sizes[name])
            size //= sizes[name]
        shape.append(size)
    x = jnp.reshape(x, shape)
    sharded = set(at)
    # Neighbours first.
    for shards, names in itertools.groupby(reversed(axes), lambda n: n in sharded):
        if not shards:
            x = _everywhere(x, tuple(names)[::-1], zero)
            continue
        for name in names:
            dim = at[name]
            x = _added(jax.lax.all_to_all(x, name, dim, 0), zero)
            at = {other: i - (i > dim) for other, i in at.items()}
    return x


def _everywhere(x: jax.Array, axes: Axes, zero: jax.Array) -> jax.Array:
    """The sum over `axes`, on all of their devices."""
    number = meshes.num_devices(axes)
    shape, size = x.shape, x.size
    dim = next((i for i in range(x.ndim) if shape[i] % number == 0), None)
    if dim is None:
        x, dim = jnp.pad(jnp.ravel(x), (0, -size % number)), 0
    parts = number, x.shape[dim] // number
    x = jnp.reshape(x, (*x.shape[:dim], *parts, *x.shape[dim + 1 :]))
    share = _added(jax.lax.all_to_all(x, axes, dim, 0), zero)
    whole = jax.lax.all_gather(share, axes, axis=dim, tiled=True, to="invarying")
    return whole if whole.shape == shape else jnp.reshape(whole[:size], shape)
