"""How the gradients of one leaf are merged: over micro-batches and over devices.

Gradients are summed. The "gradient" of a scale of Flax's fp8 layers is its new value:
of those of all micro-batches and devices the largest is kept. With `whole_batch=True`
it is that of the whole batch, and one micro-batch passes it on: a sum.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives, logical
from ga_optax._devices.meshes import Axes

# Flax's name of what is to be overwritten with its gradient: `flax.linen.fp8_ops`.
_REPLACED = "_overwrite_with_gradient"


class Sum:
    """A gradient: Σ w·g, divided by Σ w."""

    is_sum = True

    def join(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Those of two logical devices, neighbours."""
        return logical.plus(x, y)

    def addend(self, x: jax.Array, axes: Axes) -> jax.Array:
        """What to sum over the devices along `axes`."""
        return x

    def result(
        self, total: jax.Array, weight: jax.Array, old: Any, divide: Callable[..., Any]
    ) -> jax.Array:
        """The leaf of the result; `divide` is how a sum is divided, `old` the leaf."""
        return divide(total)


class NewValue(Sum):
    """The leaf's new value, a number >= 0: the largest of all."""

    is_sum = False

    def join(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.maximum(x, y)

    def addend(self, x: jax.Array, axes: Axes) -> jax.Array:
        """The largest on the first device, and 0 on the others."""
        x = collectives.vary(jax.lax.pmax(x, axes), axes)
        return jnp.where(jax.lax.axis_index(axes) == 0, x, jnp.zeros_like(x))

    def result(
        self, total: jax.Array, weight: jax.Array, old: Any, divide: Callable[..., Any]
    ) -> jax.Array:
        """Without a micro-batch that counts, there is no new value."""
        return jnp.where(weight == 0, old.astype(total.dtype), total)

    def add(
        self, total: jax.Array, new: jax.Array, weight: jax.Array | None
    ) -> jax.Array:
        """The larger one; `total` if the weight is 0."""
        [kept] = accumulator.add_terms(
            [total], [new.astype(total.dtype)], weight, jnp.maximum
        )
        return kept


SUM, NEW_VALUE = Sum(), NewValue()


def of_leaves(params: Any) -> list[Sum]:
    """How each leaf of the parameters is merged."""
    names = [name for name, _ in named_leaves(params)]
    return [NEW_VALUE if _REPLACED in name else SUM for name in names]


def check_sums(params: Any, what: str, todo: str) -> None:
    """Raises if a leaf has its new value for a gradient, of which no sum is right."""
    pairs = zip(named_leaves(params), of_leaves(params), strict=True)
    for (name, _), merge in pairs:
        if not merge.is_sum:
            raise ValueError(
                f"{what} must have gradients to add up, but that of {name} is its new "
                f"value, of which the largest counts. {todo}, or do not differentiate "
                "with respect to it."
            )
