"""Updates that take over the buffer of the accumulator.

A call that returns updates has two results of the size of the parameters: the sum
inside a window, and the updates after a step, when no one reads the sum. So both
branches of the conditional return one tree, sums or updates, in the accumulator's
buffer. Two trees would cost `tx.update` and `optax.apply_updates` a copy of the
parameters in temporaries, on every backend.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ga_optax._across import choices
from ga_optax._across.request import Request
from ga_optax._across.storage import Buffer


def reused(request: Request) -> list[bool]:
    """Whether an update fits into the buffer of its accumulator, leaf by leaf."""
    trees = request.state.total, request.bare
    (total, held), (bare, returned) = map(jax.tree.flatten, trees)
    reuses = request.config.storage.reuses
    if request.applies or not reuses or held != returned:
        return []
    pairs = zip(total, bare, strict=True)
    return [(x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs]


class Reuse(NamedTuple):
    """The leaves whose updates take over a buffer; by default there are none.

    Attributes:
      leaves: which.
      recomputed: the buffer inside of a branch, given the buffer outside and whether
        the window closes.
    """

    leaves: Sequence[bool] = ()
    recomputed: Callable[[Buffer, bool], Buffer] | None = None

    def within(self, buffer: Buffer, closes: bool) -> Buffer:
        """The buffer as a branch of the conditional reads it."""
        if self.recomputed is None or not any(self.leaves):
            return buffer
        grads, args = buffer.values
        inside, _ = self.recomputed(buffer, closes).values
        values = choices.by_leaf(self.leaves, inside, grads), args
        return buffer._replace(values=values)

    def unchanged(self, buffer: Buffer, out: Any) -> Any:
        """What a branch without a step returns: sums in the place of zero updates."""
        if not any(self.leaves):
            return out
        return choices.by_leaf(self.leaves, buffer.values[0], out)

    def taken_apart(
        self, out: Any, emitted: jax.Array, total: Any
    ) -> tuple[Any, optax.Updates]:
        """What a branch returned as what the call returns, and the accumulators."""
        if not any(self.leaves):
            return out, total
        zeros = jax.tree.map(jnp.zeros_like, out)
        updates = choices.select(emitted, out, zeros)
        return (
            choices.by_leaf(self.leaves, updates, out),
            choices.by_leaf(self.leaves, out, total),
        )
