"""Evaluates the loss and its gradient in float64, if it can, and shows the progress."""

import copy
import dataclasses
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ga_optax._verify.gradients import Evaluated, Leaves, real
from ga_optax._verify.problem import Problem
from ga_optax._verify.wide import Wide


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


class Loss:
    """The loss of some rows of the batch, and its gradient as float64 leaves.

    Attributes:
      problem: whose loss it is.
      dtype: the floating dtype of the lowest precision in it.
      eps: its precision.
      note: what a reader has to know about that, if anything.
    """

    def __init__(self, problem: Problem, progress: Progress) -> None:
        self.problem, self.progress, self.note = problem, progress, ""
        try:
            low = self._compile(as_is=False)
            if low != np.float64:
                self.note = f"The loss calls code that computes in {low.name}"
        except Exception as error:
            # Any: the code is the user's, and it was traced in its own dtypes before.
            low = self._compile(as_is=True)
            reason = f"{type(error).__name__}: {error}".strip().split("\n")[0][:120]
            self.note = f"The loss does not run in float64 ({reason})"
        if self.note:
            self.note += f""", so the diagnosis cannot see effects that are as small as
                the rounding of {low.name}."""
        self.dtype, self.eps = low.name, float(jnp.finfo(low).eps)

    def _compile(self, *, as_is: bool) -> np.dtype:
        """Makes the program; returns the coarsest floating dtype in it."""
        self._as_is = as_is
        problem = self.problem
        # A new function each time, so that JAX traces the loss again.
        gradient = jax.value_and_grad(problem.of_part(problem.fun))
        wide = Wide(gradient, x64=problem.x64, as_is=as_is)
        self._compiled = jax.jit(wide)
        self._compiled.lower(problem.params, problem.batch, *problem.part(None))
        dtypes = {np.dtype(np.float64), *wide.low}
        return max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps))

    def traced_again(self) -> "Loss":
        """The same loss, to be traced once more."""
        other = copy.copy(self)
        other._compile(as_is=self._as_is)
        return other

    def of_part(self, part: int | None, params: Any = None) -> Evaluated:
        """Loss and gradient of a micro-batch; of the undivided batch for None."""
        return self.of_rows(self.problem.rows(part), part or 0, params)

    def of_rows(self, rows: np.ndarray, key: int = 0, params: Any = None) -> Evaluated:
        """Loss and gradient of these rows, with the key of micro-batch `key`."""
        params = self.problem.params if params is None else params
        keys = self.problem.keys(key)
        value, grads = self._compiled(params, self.problem.batch, rows, keys)
        self.progress.tick()
        grads = jax.tree.leaves(grads)[::-1]
        # One leaf after the other, so that there are never two copies of all.
        return float(value), [real(grads.pop()) for _ in range(len(grads))]


@jax.jit
def moved(params: Any, size: ArrayLike) -> Any:
    """The parameters, each moved by a random part of itself, at most `size`."""

    def move(x: jax.Array, i: int) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(1), i)
        part = jax.random.uniform(key, x.shape, jnp.float32)
        part = (size * (2 * part - 1)).astype(x.dtype)
        # A zero does not move by a part of itself.
        return jnp.where(x == 0, part, x * (1 + part))

    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, map(move, leaves, range(len(leaves))))


# -- What cannot be compared -----------------------------------------------------------


@dataclasses.dataclass(eq=False)
class NotFiniteError(Exception):
    """There is an inf or a NaN, so that nothing can be compared.

    Attributes:
      first: which the first one is, in words.
      losses: the undivided batch's loss, and the accumulated one, as far as known.
      only_part: whether the undivided batch has none.
      low_precision: whether float64 has none.
    """

    first: str
    losses: tuple[float, float] = (math.nan, math.nan)
    only_part: bool = False
    low_precision: bool = False


def first_not_finite(
    problem: Problem, place: str, value: float, grads: Leaves
) -> str | None:
    """Names the first inf or NaN of the gradient, else of the loss, if there is one."""
    finite = [bool(jnp.isfinite(x).all()) for x in grads]
    if all(finite):
        return None if math.isfinite(value) else f"the loss {place}: {value}"
    leaf = finite.index(False)
    array = np.asarray(grads[leaf])
    index = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
    found = array[index]
    # Without the part of a complex number.
    index = index[array.ndim - jnp.ndim(jax.tree.leaves(problem.params)[leaf]) :]
    at = f" at index {index}" if index else ""
    loss = "" if math.isfinite(value) else f", and the loss there is {value}"
    return f"the gradient {place}, {problem.names[leaf]}{at}: {found}{loss}"
