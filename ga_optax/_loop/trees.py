"""Arrays of given types. Both branches, and all iterations, have the same types."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ga_optax._devices import collectives, meshes


def blank(types: Sequence[Any]) -> list[jax.Array]:
    """Zeros of these types, sharded and varying over devices as the types say."""
    return [like(collectives.zeros(x), x) for x in types]


def like(x: jax.Array, other: Any) -> jax.Array:
    """`x`, marked as varying over devices as `other` does."""
    return collectives.vary(x, tuple(meshes.varying(other)))


def strong(x: ArrayLike) -> jax.Array:
    """`x` without a weak type, which the carry of a loop has to keep."""
    x = jnp.asarray(x)
    weak = jax.typeof(x).weak_type  # an array of PRNG keys has no such attribute
    return jax.lax.convert_element_type(x, x.dtype) if weak else x
