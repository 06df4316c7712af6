"""How large an accumulator is, block by block."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from ga_optax._checks import check_dtype
from ga_optax._text import columns
from ga_optax.accumulator import accumulator_dtype
from ga_optax.blocks._partition import Partition, partition, shown


@dataclasses.dataclass(frozen=True)
class BlockRow:
    """One block of a `BlockReport`: its name, shapes of leaves, elements and bytes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class BlockReport:
    """How large an accumulator is, block by block; `str` of it is a table.

    Attributes:
      rows: a `BlockRow` for each block.
      dtype: the accumulator's dtype, or `None` for that of each leaf.
    """

    rows: tuple[BlockRow, ...]
    dtype: np.dtype | None

    @property
    def elements(self) -> int:
        """The number of elements of all blocks."""
        return sum(row.elements for row in self.rows)

    @property
    def bytes(self) -> int:
        """The bytes of all blocks."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        dtype = "own dtypes" if self.dtype is None else self.dtype.name
        table = [("block", "shapes", "elements", "MiB")]
        for row in (*self.rows, BlockRow("total", (), self.elements, self.bytes)):
            shapes, mib = shown(row.shapes) or dtype, f"{row.bytes / 2**20:,.3f}"
            table.append((row.name, shapes, f"{row.elements:,}", mib))
        return "\n".join(columns(table, left=(0, 1)))


def report(
    params: optax.Params | Partition, dtype: DTypeLike | None = jnp.float32
) -> BlockReport:
    """Says how large the accumulator is, block by block, from shapes alone.

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
        tree may hold `jax.ShapeDtypeStruct`, as `jax.eval_shape` returns it.
      dtype: the accumulator's dtype; see `accumulator.init`.

    Returns:
      The `BlockReport`; its `bytes` are those of `accumulator.init(params, dtype)
      .total`.

    Raises:
      TypeError: if `dtype` cannot hold gradients.
    """
    wide = check_dtype(dtype)
    blocks = params if isinstance(params, Partition) else partition(params, 1)
    dtypes = [accumulator_dtype(np.empty((), own), wide) for own in blocks.dtypes]
    rows = []
    for block in blocks.blocks:
        each = zip(block.shapes, block.leaves, strict=True)
        size = sum(math.prod(shape) * dtypes[i].itemsize for shape, i in each)
        rows.append(BlockRow(block.name, block.shapes, block.elements, size))
    return BlockReport(tuple(rows), wide)
