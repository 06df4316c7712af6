"""A block as one contiguous vector, and back."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ga_optax.blocks._partition import Partition, shown
from ga_optax.blocks._select import select


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Spec:
    """What a flat vector holds; see `flatten`.

    Attributes:
      name: the block.
      shapes: the shapes of its leaves, in the order of the vector.
      dtype: their dtype.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each leaf."""
        return tuple(map(math.prod, self.shapes))


def flatten(partition: Partition, tree: Any, name: str) -> tuple[jax.Array, Spec]:
    """Returns a block as one contiguous vector, for a bucketed all-reduce or a wire.

    >>> import jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> grads = {"a": {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}, "c": jnp.ones(1)}
    >>> p = blocks.partition(grads, 1)
    >>> vector, spec = blocks.flatten(p, grads, "a")
    >>> vector, spec.sizes
    (Array([0., 0., 1., 1., 1., 1.], dtype=float32), (2, 4))
    >>> blocks.unflatten(p, vector, spec)["b"]
    Array([0., 0.], dtype=float32)

    **Exactness.** Nothing is computed or cast: `unflatten` gives back the bits of
    `select(partition, tree, name)`. The leaves follow one another in the order of
    `jax.tree.leaves`, each in row-major order.

    Args:
      partition: the partition.
      tree: a tree with its structure and shapes.
      name: the block.

    Returns:
      The vector `[elements of the block]`, and the `Spec` that `unflatten` takes.

    Raises:
      ValueError: if the tree does not fit the partition, or there is no such block.
      TypeError: if the leaves of the block have more than one dtype.
    """
    leaves = jax.tree.leaves(select(partition, tree, name))
    dtypes = sorted({jnp.result_type(leaf).name for leaf in leaves})
    if len(dtypes) > 1:
        raise TypeError(
            f"The leaves of block {name!r} must have one dtype to fit into one vector, "
            f"but they have {' and '.join(dtypes)}. Cast the tree first, or partition "
            "it by dtype too."
        )
    spec = Spec(name, partition[name].shapes, jnp.result_type(leaves[0]))
    return _concatenate(leaves), spec


def unflatten(partition: Partition, vector: ArrayLike, spec: Spec) -> Any:
    """Returns the block's tree from a vector: the inverse of `flatten`; see there.

    **Exactness.** Nothing is computed or cast. Put the block back with `replace`.

    Args:
      partition: the partition.
      vector: the vector, with the size and dtype that `spec` says.
      spec: what `flatten` returned.

    Returns:
      The tree of `select(partition, tree, spec.name)`.

    Raises:
      ValueError: if the vector's size or the block's shapes are not those of `spec`;
        the message names the block and both sizes.
      TypeError: if the vector's dtype is not that of `spec`.
    """
    block, size = partition[spec.name], sum(spec.sizes)
    if block.shapes != spec.shapes:
        raise ValueError(
            f"The spec must be of the partition's block {spec.name!r}, which has "
            f"{block.elements} elements in {shown(block.shapes)}, but it has "
            f"{size} in {shown(spec.shapes)}. Pass the partition that was given to "
            "blocks.flatten."
        )
    for error, what, want, got in (
        (ValueError, "shape", (size,), jnp.shape(vector)),
        (TypeError, "dtype", spec.dtype.name, jnp.result_type(vector).name),
    ):
        if got != want:
            raise error(
                f"The vector of block {spec.name!r} must have {what} {want}, but it "
                f"has {what} {got}. Pass a vector like the one of blocks.flatten."
            )
    return jax.tree.unflatten(block.structure, _split(vector, spec))


@jax.jit
def _concatenate(leaves: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


@functools.partial(jax.jit, static_argnums=1)
def _split(vector: jax.Array, spec: Spec) -> list[jax.Array]:
    parts = jnp.split(vector, np.cumsum(spec.sizes)[:-1])
    return [part.reshape(s) for part, s in zip(parts, spec.shapes, strict=True)]
