"""What is compared: a loss, its arguments, and how its batch is divided."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ga_optax._checks import leaf_name


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of `verify`, checked, as arrays in their own dtypes.

    Attributes:
      fun: the loss, without aux.
      params: the parameters.
      batch: the undivided batch.
      key: the key, as a tuple of one; empty if there is none.
      weights: the weight of each micro-batch.
      accumulated: loss and gradient over micro-batches, with the arguments of `fun`.
      x64: whether the caller works under `jax_enable_x64`.
    """

    fun: Callable[..., Any]
    params: Any
    batch: Any
    key: tuple[Any, ...]
    weights: np.ndarray
    accumulated: Callable[..., Any]
    x64: bool

    @property
    def k(self) -> int:
        return len(self.weights)

    @property
    def batch_size(self) -> int:
        return jax.tree.leaves(self.batch)[0].shape[0]

    @property
    def names(self) -> list[str]:
        """The leaves of the parameters, as messages name them."""
        return [leaf_name(path) for path, _ in jax.tree.leaves_with_path(self.params)]

    def rows(self, part: int | None) -> np.ndarray:
        """The rows of a micro-batch; those of the undivided batch for None."""
        rows = np.arange(self.batch_size, dtype=np.int32)
        return rows if part is None else rows.reshape(self.k, -1)[part]

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
            return self.fun(params, jax.tree.map(lambda x: x[rows], batch), *keys)

        return jax.value_and_grad(loss)


def split(batch: Any, k: int) -> Any:
    """The batch with an axis of micro-batches before the rows."""
    return jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch)
