"""One number for each block, on the device."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ga_optax.blocks._partition import Partition, leaves_of


def norms(partition: Partition, tree: Any) -> jax.Array:
    """The L2 norm of every block: one program, one vector, so one transfer.

    >>> import jax, jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([5.0, 12.0])}
    >>> p = blocks.partition(grads, 1)
    >>> dict(zip(p, jax.device_get(blocks.norms(p, grads)).tolist()))
    {'a': 5.0, 'b': 13.0}

    **Exactness.** The squares are summed in float32, or in float64 if a leaf has it.
    For n elements the relative error is at most about (n/2 + 2)·eps, and less in
    practice. As in `optax.global_norm`, float32 squares overflow for elements above
    1.8e19 and vanish for elements below 1e-19.

    Args:
      partition: the partition.
      tree: a tree with its structure and shapes.

    Returns:
      The norms `[blocks]`, in the order of `partition.names`, on the device.

    Raises:
      ValueError: if the tree does not fit the partition; the message names the leaf.
    """
    return _norms(partition, leaves_of(partition, tree))


@functools.partial(jax.jit, static_argnums=0)
def _norms(partition: Partition, leaves: list[ArrayLike]) -> jax.Array:
    wide = any(jnp.result_type(x) in (jnp.float64, jnp.complex128) for x in leaves)
    dtype = np.float64 if wide else np.float32

    def square(leaf: ArrayLike) -> jax.Array:
        x = jnp.asarray(leaf)
        if jnp.iscomplexobj(x):
            return square(x.real) + square(x.imag)
        return jnp.square(x.astype(dtype))

    squares = [square(leaf) for leaf in leaves]
    return jnp.sqrt(_per_block(partition, squares, jnp.sum, jnp.add, dtype))


def not_finite(partition: Partition, tree: Any) -> jax.Array:
    """Whether each block holds an inf or a NaN: one program, one vector.

    >>> import jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> grads = {"a": jnp.array([3.0, jnp.nan]), "b": jnp.array([5.0, 12.0])}
    >>> blocks.not_finite(blocks.partition(grads, 1), grads)
    Array([ True, False], dtype=bool)

    Args:
      partition: the partition.
      tree: a tree with its structure and shapes.

    Returns:
      bool `[blocks]`, in the order of `partition.names`, on the device.

    Raises:
      ValueError: if the tree does not fit the partition; the message names the leaf.
    """
    return _not_finite(partition, leaves_of(partition, tree))


@functools.partial(jax.jit, static_argnums=0)
def _not_finite(partition: Partition, leaves: list[ArrayLike]) -> jax.Array:
    bad = [~jnp.isfinite(leaf) for leaf in leaves]
    return _per_block(partition, bad, jnp.any, jnp.logical_or, np.bool_)


def _per_block(
    partition: Partition,
    leaves: list[jax.Array],
    reduce: Callable[..., jax.Array],
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    dtype: DTypeLike,
) -> jax.Array:
    """Reduces every block to a number; all layers of a stack in one reduction."""
    parts = [jnp.zeros(0, dtype)]
    for positions, group in itertools.groupby(partition.blocks, lambda b: b.leaves):
        first = 0 if next(group).index is None else 1
        values = [
            reduce(leaves[i], axis=tuple(range(first, leaves[i].ndim)))
            for i in positions
        ]
        parts.append(jnp.atleast_1d(functools.reduce(combine, values)))
    return jnp.concatenate(parts)
