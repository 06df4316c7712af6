"""What is compared: a loss, its arguments, and how its batch is divided."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

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
      weight_fn: a function of a micro-batch, or None.
      accumulated: loss and gradient over micro-batches, with the arguments of `fun`.
      x64: whether the caller works under `jax_enable_x64`.
      axis: which axis of the batch holds the rows; leaves without it stay whole.
    """

    fun: Callable[..., Any]
    params: Any
    batch: Any
    key: tuple[Any, ...]
    k: int
    weight_fn: Callable[..., ArrayLike] | None
    accumulated: Callable[..., Any]
    x64: bool
    axis: int = 0

    @property
    def batch_size(self) -> int:
        leaves = jax.tree.leaves(self.batch)
        return next(x.shape[self.axis] for x in leaves if x.ndim > self.axis)

    @property
    def names(self) -> list[str]:
        """The leaves of the parameters, as messages name them."""
        return [name for name, _ in _checks.named_leaves(self.params)]

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """The weight of each micro-batch, under `jax_enable_x64`.

        Rounding in float32 makes no weight wrong; in bfloat16 it does.
        """
        if self.weight_fn is None:
            return np.ones(self.k)
        parts = [self.take(self.batch, self.rows(i)) for i in range(self.k)]
        with jax.enable_x64(self.x64):
            used = [float(_checks.check_weight(self.weight_fn(x))) for x in parts]
        exactly = jax.jit(Wide(self.weight_fn, x64=self.x64))
        exact = np.array([float(exactly(part)) for part in parts])
        return np.where(np.abs(used - exact) <= _WEIGHT * exact, exact, used)

    def rows(self, part: int | None) -> np.ndarray:
        """The rows of a micro-batch; those of the undivided batch for None."""
        rows = np.arange(self.batch_size, dtype=np.int32)
        return rows if part is None else rows.reshape(self.k, -1)[part]

    def take(self, batch: Any, rows: Any) -> Any:
        """These rows of the batch."""
        at = (slice(None),) * self.axis + (rows,)
        return jax.tree.map(lambda x: x[at] if x.ndim > self.axis else x, batch)

    def along_axis_1(self) -> "Problem | None":
        """The same batch, split along its second axis, if it has one."""
        sizes = {x.shape[1] for x in jax.tree.leaves(self.batch) if x.ndim > 1}
        if len(sizes) != 1 or sizes <= {0, 1}:
            return None
        numbers = _checks.divisors(sizes.pop())
        k = self.k if self.k in numbers else numbers[1]
        return dataclasses.replace(self, axis=1, k=k)

    def place(self, part: int | None) -> str:
        """How messages name a micro-batch, or the undivided batch for None."""
        if part is None:
            return "of the undivided batch"
        rows = self.rows(part)
        return f"of micro-batch {part} (rows {rows[0]} to {rows[-1]})"

    def keys(self, part: int) -> tuple[Any, ...]:
        """What a micro-batch gets after the batch: its key, or nothing."""
        return jax.tree.map(lambda key: jax.random.fold_in(key, part), self.key)

    def gradient(self) -> Callable[..., Any]:
        """A function of params, batch, rows and keys: the loss and its gradient.

        It is a new function each time, so JAX traces the loss again.
        """

        def loss(params: Any, batch: Any, rows: Any, keys: Any) -> Any:
            return self.fun(params, self.take(batch, rows), *keys)

        return jax.value_and_grad(loss)
