"""The sum of logical devices: one order of additions, on any number of devices.

    s₀   s₁   s₂   s₃      the sums of the logical devices
      s₀₁       s₂₃        neighbours first
          s₀₁₂₃

There are 2ⁱ logical devices, and 2ʲ devices hold 2ⁱ⁻ʲ neighbours each. So a device adds
up a whole subtree, and sends one sum, as without logical devices.
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
# Smaller leaves share a message: copying them takes less time than a message each.
_SMALL = 2**14


def plus(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x + y` of numbers of any kind, rounded as an accumulator rounds."""
    return accumulator.plus(x, y) if jnp.issubdtype(x.dtype, jnp.inexact) else x + y


def run_loop(
    sum_one: Callable[[Any, T], tuple[T, Any]],
    xs: Any,
    number: int,
    buffers: list[T],
    join: Callable[[T, T], T],
) -> tuple[list[T], Any]:
    """The sum of `number` neighbours on this device, with a buffer for each level.

    Args:
      sum_one: `(part of xs, buffer) -> (sum, stacked)` of one logical device.
      xs: the arguments of all, `[number, ...]`.
      number: the number of logical devices, a power of two.
      buffers: one for the sum of each level, `log2(number) + 1`. Their values are not
        read: the loops overwrite the same few buffers.
      join: adds the sums of two neighbours.

    Returns:
      The buffers, the sum last, and the stacks, `[number, ...]`.
    """
    *lower, top = buffers
    if number == 1:
        out, stacked = sum_one(jax.tree.map(lambda x: x[0], xs), top)
        return [out], jax.tree.map(lambda x: x[None], stacked)

    def half(carry: tuple[list[T], T], inputs: Any) -> tuple[tuple[list[T], T], Any]:
        (lower, total), (is_first, part) = carry, inputs
        lower, stacked = run_loop(sum_one, part, number // 2, lower, join)
        both = join(total, lower[-1])
        total = jax.tree.map(functools.partial(jnp.where, is_first), lower[-1], both)
        return (lower, total), stacked

    halves = jax.tree.map(lambda x: jnp.reshape(x, (2, number // 2, *x.shape[1:])), xs)
    inputs = jnp.array([True, False]), halves
    (lower, top), stacked = jax.lax.scan(half, (lower, top), inputs)
    stacked = jax.tree.map(lambda x: jnp.reshape(x, (number, *x.shape[2:])), stacked)
    return [*lower, top], stacked


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
    """`collectives.reduce` with additions in the order of the tree.

    Every device gets one share of all sums, adds up the share, and, unless the result
    is sharded, sends it to the other devices: the bytes of a ring's all-reduce.
    """
    number = meshes.num_devices(axes)
    if number == 1:
        return collectives.reduce(leaves, where, axes)
    result: list[Any] = list(leaves)
    packs: dict[Any, list[int]] = {}
    for i, (x, placement) in enumerate(zip(leaves, where, strict=True)):
        if placement.dims or x.size >= _SMALL:
            result[i] = _reduce_leaf(x, placement, axes, zero)
        else:
            packs.setdefault(x.dtype, []).append(i)
    for members in packs.values():
        flat, unravel = ravel_pytree([leaves[i] for i in members])
        sums = unravel(_reduce_leaf(flat, Placement(), axes, zero))
        for i, x in zip(members, sums, strict=True):
            result[i] = x
    return result


def _reduce_leaf(
    x: jax.Array, placement: Placement, axes: Axes, zero: jax.Array
) -> jax.Array:
    sizes, axes_of_dim = jax.sharding.get_abstract_mesh().shape, dict(placement.dims)
    # Splits a sharded dimension into one for each mesh axis, and one for the rest.
    shape: list[int] = []
    dims: dict[str, int] = {}
    for dim, size in enumerate(x.shape):
        for name in axes_of_dim.get(dim, ()):
            dims[name] = len(shape)
            shape.append(sizes[name])
            size //= sizes[name]
        shape.append(size)
    x = jnp.reshape(x, shape)
    sharded = set(dims)
    # The last axes, whose devices are neighbours, come first.
    for is_sharded, names in itertools.groupby(reversed(axes), lambda n: n in sharded):
        if not is_sharded:
            x = _all_reduce(x, tuple(names)[::-1], zero)
            continue
        for name in names:
            dim = dims[name]
            x = _added(jax.lax.all_to_all(x, name, dim, 0), zero)
            dims = {other: i - (i > dim) for other, i in dims.items()}
    return x


def _all_reduce(x: jax.Array, axes: Axes, zero: jax.Array) -> jax.Array:
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
