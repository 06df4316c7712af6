"""What is compared: a loss, its arguments, and how its batch is divided."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ga_optax import _checks
from ga_optax._verify.wide import Wide

# Half of the binary digits of float32, in which weights are counted.
_WEIGHT = 2.0**-12


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of `verify`, checked, as arrays in their own dtypes.

    Attributes:
      fun: the loss, without aux.
      params: the parameters.
      batch: the undivided batch.
      key: the key, as a tuple of one; empty if there is none.
      k: the number of micro-batches.
      weight: the weight of a micro-batch, with the arguments of `fun`, or None.
      x64: whether the caller works under `jax_enable_x64`.
      axes: along which axis each leaf of the batch is split; None if it stays whole.
    """

    fun: Callable[..., Any]
    params: Any
    batch: Any
    key: tuple[Any, ...]
    k: int
    weight: Callable[..., jax.Array] | None
    x64: bool
    axes: Sequence[int | None]

    @property
    def batch_size(self) -> int:
        pairs = zip(jax.tree.leaves(self.batch), self.axes, strict=True)
        return next(x.shape[axis] for x, axis in pairs if axis is not None)

    @property
    def batch_axes(self) -> Any:
        """The axes as a user writes them."""
        if len(set(self.axes)) == 1:
            return self.axes[0]
        return jax.tree.unflatten(jax.tree.structure(self.batch), self.axes)

    @property
    def names(self) -> list[str]:
        """The leaves of the parameters, as messages name them."""
        return [name for name, _ in _checks.named_leaves(self.params)]

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """The weight of each micro-batch, under `jax_enable_x64`.

        Rounding in float32 makes no weight wrong; in bfloat16 it does.
        """
        if self.weight is None:
            return np.ones(self.k)
        weigh = self.of_part(self.weight)
        args = [(self.params, self.batch, *self.part(i)) for i in range(self.k)]
        with jax.enable_x64(self.x64):
            used = np.array([float(weigh(*x)) for x in args])
        exactly = jax.jit(Wide(weigh, x64=self.x64))
        exact = np.array([float(exactly(*x)) for x in args])
        return np.where(np.abs(used - exact) <= _WEIGHT * exact, exact, used)

    def rows(self, part: int | None) -> np.ndarray:
        """The rows of a micro-batch; those of the undivided batch for None."""
        rows = np.arange(self.batch_size, dtype=np.int32)
        return rows if part is None else rows.reshape(self.k, -1)[part]

    def take(self, batch: Any, rows: Any) -> Any:
        """These rows of the batch."""
        leaves, structure = jax.tree.flatten(batch)
        pairs = zip(leaves, self.axes, strict=True)
        return structure.unflatten(
            x if axis is None else x[(slice(None),) * axis + (rows,)]
            for x, axis in pairs
        )

    def along_another_axis(self) -> "Problem | None":
        """The same batch, split along axis 1 instead of 0, or 0 of 1, if it has it."""
        leaves = jax.tree.leaves(self.batch)
        axes = [
            1 - axis if axis in (0, 1) and x.ndim > 1 else None
            for x, axis in zip(leaves, self.axes, strict=True)
        ]
        pairs = zip(leaves, axes, strict=True)
        sizes = {x.shape[axis] for x, axis in pairs if axis is not None}
        if len(sizes) != 1 or sizes <= {0, 1}:
            return None
        numbers = _checks.divisors(sizes.pop())
        k = self.k if self.k in numbers else numbers[1]
        return dataclasses.replace(self, axes=axes, k=k)

    def place(self, part: int | None) -> str:
        """How messages name a micro-batch, or the undivided batch for None."""
        if part is None:
            return "of the undivided batch"
        rows = self.rows(part)
        return f"of micro-batch {part} (rows {rows[0]} to {rows[-1]})"

    def keys(self, part: int) -> tuple[Any, ...]:
        """What a micro-batch gets after the batch: its key, or nothing."""
        return jax.tree.map(lambda key: jax.random.fold_in(key, part), self.key)

    def part(self, part: int | None) -> tuple[np.ndarray, tuple[Any, ...]]:
        """The rows of a micro-batch, or all for None, and its keys."""
        return self.rows(part), self.keys(part or 0)

    def of_part(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun` of params, batch, and what `part` returns; a new function each time."""
        return lambda params, batch, rows, keys: fun(
            params, self.take(batch, rows), *keys
        )
