"""A table of the blocks: norms, checks."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from .. import _checks, _text, accumulator
from . import _partition
from ._partition import Partition, leaves_of, shown

# -- On the device ---------------------------------------------------------------------


def norms(partition: Partition, tree: Any) -> jax.Array:
    """The L2 norm of every block: one program with one vector, so one transfer.

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
      tree: a tree with the partition's structure and shapes.

    Returns:
      The norms `[blocks]`, in the order of `partition.names`, on the device.

    Raises:
      ValueError: if the tree does not fit the partition; the message names the leaf.
      TypeError: if a leaf is no array of numbers.
    """
    leaves = leaves_of(partition, tree)
    todo = "Leave keys, and gradients of integers, out of the tree."
    _checks.check_numbers(tree, "the tree", todo)
    return _norms(partition, leaves)


@functools.partial(jax.jit, static_argnums=0)
def _norms(partition: Partition, leaves: list[ArrayLike]) -> jax.Array:
    wide = any(jnp.result_type(x) in (jnp.float64, jnp.complex128) for x in leaves)
    dtype = np.float64 if wide else np.float32

    squares = [
        functools.reduce(
            jnp.add, [jnp.square(x.astype(dtype)) for x in accumulator.parts(leaf)]
        )
        for leaf in map(jnp.asarray, leaves)
    ]
    return jnp.sqrt(_per_block(partition, squares, jnp.sum, jnp.add, dtype))


def not_finite(partition: Partition, tree: Any) -> jax.Array:
    """True for each block with an inf or a NaN: one program with one vector.

    >>> import jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> grads = {"a": jnp.array([3.0, jnp.nan]), "b": jnp.array([5.0, 12.0])}
    >>> blocks.not_finite(blocks.partition(grads, 1), grads)
    Array([ True, False], dtype=bool)

    Args:
      partition: the partition.
      tree: a tree with the partition's structure and shapes.

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
        of_block = (leaves[i] for i in positions)
        values = [reduce(x, axis=tuple(range(first, x.ndim))) for x in of_block]
        parts.append(jnp.atleast_1d(functools.reduce(combine, values)))
    return jnp.concatenate(parts)


# -- The size of an accumulator --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockRow:
    """One block of a `BlockReport`: its name, shapes of leaves, elements and bytes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class BlockReport:
    """The sizes of an accumulator's blocks; `str(report)` is a table.

    Attributes:
      rows: a `BlockRow` for each block.
      dtype: the accumulator's dtype; `None` for the dtype of each leaf, or a tree.
    """

    rows: tuple[BlockRow, ...]
    dtype: Any

    @property
    def elements(self) -> int:
        """The number of elements of all blocks."""
        return sum(row.elements for row in self.rows)

    @property
    def bytes(self) -> int:
        """The bytes of all blocks."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        dtype = getattr(self.dtype, "name", "of leaves")
        table = [("block", "shapes", "elements", "MiB")]
        for row in (*self.rows, BlockRow("total", (), self.elements, self.bytes)):
            shapes, mib = shown(row.shapes) or dtype, f"{row.bytes / 2**20:,.3f}"
            table.append((row.name, shapes, f"{row.elements:,}", mib))
        return "\n".join(_text.columns(table, left=(0, 1)))


def report(params: optax.Params | Partition, dtype: Any = jnp.float32) -> BlockReport:
    """Returns the size of the accumulator, block by block, from shapes alone.

    >>> import jax, jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> def init():
    ...     return {"embed": jnp.zeros((512, 64)), "head": {"w": jnp.zeros((64, 512))}}
    >>> print(blocks.report(jax.eval_shape(init)))
    block  shapes    elements    MiB
    embed  [512,64]    32,768  0.125
    head   [64,512]    32,768  0.125
    total  float32     65,536  0.250

    Args:
      params: a `Partition`, or a tree, which is partitioned by top-level name. The
        leaves may be `jax.ShapeDtypeStruct`, as `jax.eval_shape` returns them.
      dtype: the accumulator's dtype; see `accumulator.init`.

    Returns:
      The `BlockReport`; `bytes` is the size of `accumulator.init(params, dtype).total`.

    Raises:
      TypeError: if `dtype` cannot hold gradients.
    """
    wide = _checks.check_dtype(dtype)
    blocks = (
        params if isinstance(params, Partition) else _partition.partition(params, 1)
    )
    dtypes = accumulator.accumulator_dtypes(blocks._tree, wide)
    rows = []
    for block in blocks.blocks:
        pairs = zip(block.shapes, block.leaves, strict=True)
        size = sum(math.prod(shape) * dtypes[i].itemsize for shape, i in pairs)
        rows.append(BlockRow(block.name, block.shapes, block.elements, size))
    return BlockReport(tuple(rows), wide)
