"""What is compared: a loss, its arguments, and how its batch is divided."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
      axes: along which axis each leaf of the batch is split; None if it stays whole.
      axis_name: the axis over which micro-batches communicate, or None.
      whole_batch: whether the loss is partitioned, so that there are no gradients of
        micro-batches, but one of the window.
      plain: `accumulated` without passes, which float64 can evaluate.
    """

    fun: Callable[..., Any]
    params: Any
    batch: Any
    key: tuple[Any, ...]
    k: int
    weight_fn: Callable[..., ArrayLike] | None
    accumulated: Callable[..., Any]
    x64: bool
    axes: Sequence[int | None]
    axis_name: str | None
    whole_batch: bool
    plain: Callable[..., Any]

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
        weight_fn, batch, whole = self.weight_fn, self.batch, self.rows(None)
        if self.whole_batch:
            return np.ones(1)
        if weight_fn is None:
            return np.ones(self.k)
        weigh = self.member(lambda batch, *_: weight_fn(batch))
        parts = [self.window(whole, 0, self.k, i) for i in range(self.k)]
        with jax.enable_x64(self.x64):
            used = [float(_checks.check_weight(weigh(batch, *x))) for x in parts]
        exactly = jax.jit(Wide(weigh, x64=self.x64))
        exact = np.array([float(exactly(batch, *x)) for x in parts])
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
        if self.whole_batch:
            return "accumulated over the micro-batches"
        rows = self.rows(part)
        return f"of micro-batch {part} (rows {rows[0]} to {rows[-1]})"

    def keys(self, part: int) -> tuple[Any, ...]:
        """What a micro-batch gets after the batch: its key, or nothing."""
        if self.whole_batch:
            return self.key
        return jax.tree.map(lambda key: jax.random.fold_in(key, part), self.key)

    def window(
        self, rows: np.ndarray, first: int = 0, parts: int = 1, member: int = 0
    ) -> tuple[Any, Any, Any]:
        """A micro-batch of a window, as a `member` function takes it after the batch.

        Args:
          rows: those of the window.
          first: the number of its first micro-batch, for the keys.
          parts: how many it has.
          member: which of them.
        """
        rows = rows.reshape(parts, -1)
        if self.axis_name is None:
            # Micro-batches know nothing of each other.
            return rows[member], self.keys(first + member), np.int32(0)
        keys = [self.keys(first + i) for i in range(parts)]
        return rows, jax.tree.map(lambda *x: jnp.stack(x), *keys), np.int32(member)

    def member(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun` of a micro-batch and its key, as a function of the batch and `window`.

        Collectives over the axis see the window, as under `jax.vmap`.
        """

        def of_window(batch: Any, rows: Any, keys: Any, member: Any) -> Any:
            def one(rows: Any, keys: Any) -> Any:
                return fun(self.take(batch, rows), *keys)

            if self.axis_name is None:
                return one(rows, keys)
            return jax.vmap(one, axis_name=self.axis_name)(rows, keys)[member]

        return of_window

    @property
    def undivided(self) -> Callable[..., Any]:
        """The loss of the undivided batch, of the arguments of `fun`."""
        if self.axis_name is None:
            return self.fun
        names = {"axis_name": self.axis_name, "axis_size": 1}
        one = jax.vmap(self.fun, in_axes=None, **names)
        return lambda *args: one(*args)[0]

    def of_window(self) -> Callable[..., Any]:
        """Loss and gradient of the window, of the same arguments as `gradient`."""
        return lambda params, batch, *_: self.plain(params, batch, *self.key)

    def gradient(self) -> Callable[..., Any]:
        """A function of params, batch and `window`: the loss and its gradient.

        It is a new function each time, so JAX traces the loss again.
        """

        def loss(params: Any, *window: Any) -> Any:
            return self.member(functools.partial(self.fun, params))(*window)

        return jax.value_and_grad(loss)
