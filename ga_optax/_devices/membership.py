"""Which rows of a batch are in which micro-batch.

On one device they are neighbours: of B rows in k micro-batches, number i holds those
from `i·B/k` up to `(i + 1)·B/k`. On several devices it is strided, and holds the rows
i, i + k, i + 2k, ... So it has as many rows of every device, however the compiler
distributes the batch, which nobody else can see; and no row moves.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def split(x: ArrayLike, num_microbatches: int, axis: int, strided: bool) -> jax.Array:
    """`[..., batch, ...]` as `[num_microbatches, ..., micro-batch, ...]`."""
    x = jnp.asarray(x)
    parts = num_microbatches, x.shape[axis] // num_microbatches
    parts = parts[::-1] if strided else parts
    x = jnp.reshape(x, (*x.shape[:axis], *parts, *x.shape[axis + 1 :]))
    return jnp.moveaxis(x, axis + strided, 0)


def join(x: jax.Array, axis: int, strided: bool) -> jax.Array:
    """The reverse of `split`: the rows of all micro-batches, in the batch's order."""
    x = jnp.moveaxis(x, 0, axis + strided)
    rows = x.shape[axis] * x.shape[axis + 1]
    return jnp.reshape(x, (*x.shape[:axis], rows, *x.shape[axis + 2 :]))
