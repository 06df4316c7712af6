"""What is compared: a loss, its arguments, and how its batch is divided.

It evaluates the loss and its gradient in float64, if it can, and shows the progress.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import _checks
from ga_optax._verify.gradients import Leaves, real
from ga_optax._verify.wide import Wide

# Half of the binary digits of float32, in which weights are counted.
_WEIGHT = 2.0**-12


class Progress:
    """A line on stderr, if stderr is a terminal and it takes more than two seconds."""

    def __init__(self) -> None:
        self.start, self.done, self.shown = time.monotonic(), 0, False

    def tick(self) -> None:
        """One more gradient was evaluated."""
        self.done += 1
        seconds = time.monotonic() - self.start
        if seconds > 2 and sys.stderr.isatty():
            self.shown = True
            text = f"\rga_optax.verify: {self.done} gradients, {seconds:.0f} s "
            print(text, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


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
      progress: what is shown while it is evaluated.
    """

    fun: Callable[..., Any]
    params: Any
    batch: Any
    key: tuple[Any, ...]
    k: int
    weight: Callable[..., jax.Array] | None
    x64: bool
    axes: Sequence[int | None]
    progress: Progress = dataclasses.field(default_factory=Progress)

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
        weigh, args = self.of_part(self.weight), list(map(self.args, range(self.k)))
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

    def args(self, part: int | None, **other: Any) -> tuple[Any, ...]:
        """What the function of `of_part` takes, for a micro-batch, or all for None."""
        own = {"params": self.params, "batch": self.batch, "rows": self.rows(part)}
        return tuple((own | {"keys": self.keys(part or 0)} | other).values())

    def of_part(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun` of params, batch, rows and keys; a new function each time."""
        return lambda params, batch, rows, keys: fun(
            params, self.take(batch, rows), *keys
        )

    # -- The gradient, as float64 leaves -----------------------------------------------

    @functools.cached_property
    def _evaluated(self) -> tuple[Callable[..., Any], np.dtype, str]:
        """The gradient, the coarsest floating dtype in it, and what to know of that."""
        note = ""
        try:
            run, low = self._compiled(as_is=False)
            if low != np.float64:
                note = f"The loss calls code that computes in {low.name}"
        except Exception as error:
            # Any: the code is the user's, and it was traced in its own dtypes before.
            run, low = self._compiled(as_is=True)
            reason = f"{type(error).__name__}: {error}".strip().split("\n")[0][:120]
            note = f"The loss does not run in float64 ({reason})"
        if note:
            note += f""", so the diagnosis cannot see effects that are as small as the
                rounding of {low.name}."""
        return run, low, note

    def _compiled(self, *, as_is: bool) -> tuple[Callable[..., Any], np.dtype]:
        # A new function each time, so that JAX traces the loss again.
        gradient = jax.value_and_grad(self.of_part(self.fun))
        wide = Wide(gradient, x64=self.x64, as_is=as_is)
        run = jax.jit(wide)
        run.lower(*self.args(None))
        dtypes = {np.dtype(np.float64), *wide.low}
        return run, max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))

    @property
    def low(self) -> np.dtype:
        """The floating dtype of the lowest precision in it."""
        return self._evaluated[1]

    @property
    def note(self) -> str:
        """What a reader has to know about that, if anything."""
        return self._evaluated[2]

    def evaluate(self, part: int | None, **other: Any) -> tuple[float, Leaves]:
        """Loss and gradient of a micro-batch, or of all rows for None.

        Of `other` parameters, rows or keys if they are given.
        """
        value, grads = self._evaluated[0](*self.args(part, **other))
        self.progress.tick()
        grads = jax.tree.leaves(grads)[::-1]
        # One leaf after the other, so that there are never two copies of all.
        return float(value), [real(grads.pop()) for _ in range(len(grads))]

    def gradient(self, part: int | None = None, **other: Any) -> Leaves:
        """The gradient alone."""
        return self.evaluate(part, **other)[1]
