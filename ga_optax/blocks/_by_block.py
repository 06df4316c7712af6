"""A tree, block by block.

A block is a tree or one vector. A micro-step adds one block after another.
"""

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import _checks, _text, accumulator
from .._checks import check_arrays, check_dtypes, check_leaves, check_type
from ..accumulator import Accumulator
from ._partition import Block, Partition, block_of, leaves_of, shown

# == A tree and a block ================================================================


def select(partition: Partition, tree: Any, name: str) -> Any:
    """Returns the tree of one block, as its gradient has it and as `add` takes it.

    If the name of the block is a path, the result is the tree at that path. For stacked
    layers the leaves have no leading axis. If a function gave the block a name that is
    no path, the result is the whole tree, with `None` for the leaves of other blocks.

    >>> import jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> params = {"head": jnp.ones(1), "layers": {"w": jnp.arange(6.0).reshape(3, 2)}}
    >>> p = blocks.partition(params, ["head", blocks.Stacked("layers")])
    >>> blocks.select(p, params, "layers/1")
    {'w': Array([2., 3.], dtype=float32)}

    **Exactness.** No bit changes. Stacked leaves are sliced, which copies the slice;
    other leaves are passed on.

    Args:
      partition: the partition.
      tree: a tree with the partition's structure and shapes: parameters, gradients, or
        a `total`.
      name: the block.

    Returns:
      The block's tree.

    Raises:
      ValueError: if the tree does not fit the partition, or there is no such block.
    """
    block = block_of(partition, name)
    leaves = take(block, leaves_of(partition, tree))
    if block.index is not None:
        leaves = slices(leaves, on_device(block.index))
    return jax.tree.unflatten(block.structure, leaves)


def replace(partition: Partition, tree: Any, name: str, block: Any) -> Any:
    """Puts a block's tree into the whole tree: the inverse of `select`.

    >>> import jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> params = {"a": jnp.zeros(1), "b": jnp.zeros(2)}
    >>> p = blocks.partition(params, 1)
    >>> blocks.replace(p, params, "b", jnp.ones(2))["b"]
    Array([1., 1.], dtype=float32)

    **Exactness.** No bit changes. Stacked leaves are copied, other leaves are passed
    on. Nothing is donated.

    Args:
      partition: the partition.
      tree: the tree.
      name: the block.
      block: the new tree of the block, with the structure, shapes and dtypes of
        `select(partition, tree, name)`.

    Returns:
      A tree with the new block.

    Raises:
      ValueError: if `tree` or `block` does not fit; the message names the leaf.
    """
    place = block_of(partition, name)
    leaves = leaves_of(partition, tree)
    old, new = take(place, leaves), jax.tree.leaves(block)
    required, todo = like(place, old), "Pass a tree like the one of blocks.select."
    texts = {"name": "the new tree", "expected": f"block {name!r}", "todo": todo}
    check_leaves(required, block, **texts)
    check_dtypes(required, block, **texts)
    if place.index is not None:
        new = with_slices(old, on_device(place.index), new)
    return put(partition, place, leaves, new)


# -- As one vector ---------------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Spec:
    """The contents of a flat vector; see `flatten`.

    Attributes:
      name: the block.
      shapes: the shapes of the block's leaves, in the order of the vector.
      dtype: the dtype of the leaves.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each leaf."""
        return tuple(map(math.prod, self.shapes))


def flatten(partition: Partition, tree: Any, name: str) -> tuple[jax.Array, Spec]:
    """Returns a block as one contiguous vector, for a bucketed all-reduce for example.

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
      tree: a tree with the partition's structure and shapes.
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
    """Returns the block's tree from a vector: the inverse of `flatten`.

    **Exactness.** Nothing is computed or cast. Put the block back with `replace`.

    Args:
      partition: the partition.
      vector: the vector, with the size and dtype of `spec`.
      spec: the spec that `flatten` returned.

    Returns:
      The tree of `select(partition, tree, spec.name)`.

    Raises:
      ValueError: if the vector's size or the block's shapes do not match `spec`; the
        message names the block and both sizes.
      TypeError: if the vector's dtype does not match `spec`.
    """
    todo = "Pass the spec that blocks.flatten returned with the vector."
    check_type("spec", spec, Spec, todo)
    check_arrays("vector", vector, "Pass a vector like the one of blocks.flatten.")
    block, size = block_of(partition, spec.name), sum(spec.sizes)
    if block.shapes != spec.shapes:
        raise ValueError(
            f"The spec must be of block {spec.name!r}, which has {block.elements} "
            f"elements in {shown(block.shapes)}, but it has {size} in "
            f"{shown(spec.shapes)}. Pass the partition given to blocks.flatten."
        )
    for error, kind, required, actual in (
        (ValueError, "shape", (size,), jnp.shape(vector)),
        (TypeError, "dtype", spec.dtype.name, jnp.result_type(vector).name),
    ):
        if actual != required:
            raise error(
                f"The vector of block {spec.name!r} must have {kind} {required}, but "
                f"it has {kind} {actual}. Pass a vector like the one of blocks.flatten."
            )
    return jax.tree.unflatten(block.structure, _split(vector, spec))


@jax.jit
def _concatenate(leaves: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


@functools.partial(jax.jit, static_argnums=1)
def _split(vector: jax.Array, spec: Spec) -> list[jax.Array]:
    parts = jnp.split(vector, np.cumsum(spec.sizes)[:-1])
    return [part.reshape(s) for part, s in zip(parts, spec.shapes, strict=True)]


# -- Leaves ----------------------------------------------------------------------------


def take(block: Block, leaves: list[Any]) -> list[Any]:
    """The leaves of a block; whole stacks for a block that is one layer."""
    return [leaves[i] for i in block.leaves]


def put(
    partition: Partition, block: Block, leaves: list[Any], new: list[jax.Array]
) -> Any:
    """The whole tree of `leaves`, with `new` for the leaves of a block."""
    merged = dict(enumerate(leaves)) | dict(zip(block.leaves, new, strict=True))
    return jax.tree.unflatten(partition.structure, merged.values())


def like(block: Block, leaves: list[Any]) -> Any:
    """The tree of a block, with shapes and dtypes as leaves."""
    kinds = map(jax.ShapeDtypeStruct, block.shapes, map(jnp.result_type, leaves))
    return jax.tree.unflatten(block.structure, kinds)


@jax.jit
def slices(stacks: list[jax.Array], index: jax.Array) -> list[jax.Array]:
    """One layer of each stack; the traced index lets one program serve all layers."""
    return [jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in stacks]


@jax.jit
def with_slices(
    stacks: list[jax.Array], index: jax.Array, new: list[jax.Array]
) -> list[jax.Array]:
    """The stacks with one layer of each replaced."""
    pairs = zip(stacks, new, strict=True)
    return [jax.lax.dynamic_update_index_in_dim(x, y, index, 0) for x, y in pairs]


def on_device(index: int, beside: jax.Array | None = None) -> jax.Array:
    """The index as an array, on the devices of `beside` if `beside` is committed.

    The transfer is explicit, so a guard against implicit transfers allows it.
    """
    known = isinstance(beside, jax.Array) and not isinstance(beside, jax.core.Tracer)
    sharding = beside.sharding if known and beside.committed else None
    return jax.device_put(np.int32(index), sharding)


# == One micro-step ====================================================================


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("_acc", "_weight"),
    meta_fields=("partition", "added", "_host_weight"),
)
@dataclasses.dataclass(frozen=True)
class OpenMicroStep:
    """A micro-step with missing blocks: the result of `add` before the last block.

    An open micro-step has no `total`, `weight` or `count`, so nobody can take the mean.
    Reading these attributes raises an error that names the missing blocks.

    Attributes:
      partition: the partition.
      added: the names of the added blocks.
    """

    _acc: Accumulator
    _weight: jax.Array | None
    partition: Partition
    added: tuple[str, ...]
    _host_weight: float | None

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the blocks that are not added yet."""
        return tuple(name for name in self.partition if name not in self.added)

    def __getattr__(self, name: str) -> Any:
        if name in Accumulator._fields:
            raise AttributeError(
                f"All blocks of a micro-step must be added before {name} is read, but "
                f"{_text.listed(self.missing)} are missing. Add every block of the "
                "micro-batch with blocks.add."
            )
        raise AttributeError(f"OpenMicroStep has no attribute {name!r}.")

    def _check(self, partition: Partition, name: str, weight: ArrayLike | None) -> None:
        if partition != self.partition:
            raise ValueError(
                f"All blocks of a micro-step must be of one partition, but {name!r} "
                "has another partition. Pass the partition of the first block."
            )
        if name in self.added:
            raise ValueError(
                f"Every block must be added once in a micro-step, but {name!r} was "
                f"added already. First add {_text.listed(self.missing)}."
            )
        known = self._weight if self._host_weight is None else self._host_weight
        same = self._host_weight is not None and _host_number(weight) == known
        if not same and weight is not known:
            raise ValueError(
                "Every block of a micro-batch must get the same weight, but block "
                f"{name!r} gets {weight!r}, and {_text.listed(self.added)} got "
                f"{known!r}. Pass equal numbers, or one array object, to all blocks."
            )


def add(
    partition: Partition,
    acc: Accumulator | OpenMicroStep,
    name: str,
    grads: Any,
    weight: ArrayLike | None = None,
) -> Accumulator | OpenMicroStep:
    """Adds the gradient of one block of a micro-batch.

    >>> import jax.numpy as jnp
    >>> from ga_optax import accumulator, blocks
    >>> params = {"layer_0": jnp.zeros(2), "layer_1": jnp.zeros(2)}
    >>> p = blocks.partition(params, 1)
    >>> acc = accumulator.init(params)
    >>> for micro_batch in (1.0, 3.0):
    ...     for name in reversed(p):  # a backward pass goes from last to first
    ...         acc = blocks.add(p, acc, name, jnp.full(2, micro_batch))
    >>> accumulator.mean(acc)["layer_1"], int(acc.count)
    (Array([2., 2.], dtype=float32), 2)

    Start with the `Accumulator` of `accumulator.init`, and add every block of the
    partition once, in any order. The last call returns an `Accumulator`, all others an
    `OpenMicroStep`, which cannot be read. To begin a new window, set `count` to 0
    (`acc._replace(count=jnp.zeros([], jnp.int32))`): the first micro-step clears the
    buffers.

    **Cost.** One jitted kernel, which reads `grads`, and reads and writes the block's
    buffers of `acc`. The kernel donates those buffers, so do not use `acc` afterwards.
    The buffers of other blocks are passed on untouched. Stacked layers are updated in
    place, with a temporary of the size of the block. One program serves all blocks of
    the same shapes, and nothing is transferred to the host. Under `jax.jit` the kernel
    becomes part of the caller's program.

    **Exactness.** The bits of `accumulator.add` with the gradients of all blocks.

    Args:
      partition: the partition of the parameters.
      acc: the accumulator, or the result of `add` for the previous block.
      name: the block.
      grads: the gradient of the block, with the tree of
        `select(partition, acc.total, name)`.
      weight: the weight of this micro-batch, a non-negative scalar; `None` counts 1.
        Pass the same for every block of a micro-batch: an equal number, or the same
        array object. Values of arrays are not compared, as that would wait for them.

    Returns:
      The accumulator, as an `OpenMicroStep` while blocks are missing.

    Raises:
      ValueError: if the block was already added in this micro-step, if the gradient
        does not fit (the message names the leaf), if the weight differs from the weight
        of the previous blocks, or if `acc` belongs to another partition.
      TypeError: if `acc`, `weight` or a leaf of `grads` has the wrong type.
    """
    block = block_of(partition, name)
    if isinstance(acc, OpenMicroStep):
        acc._check(partition, name, weight)
        leaves = jax.tree.leaves(acc._acc.total)  # checked by the first `add`
    elif isinstance(acc, Accumulator):
        leaves = leaves_of(partition, acc.total, "acc.total")
        number = _host_number(weight)
        acc = OpenMicroStep(acc, _checked_weight(weight), partition, (), number)
    else:
        raise TypeError(
            "acc must be an Accumulator or an OpenMicroStep, but it is "
            f"{_checks.brief(acc)}. Make one with accumulator.init(params)."
        )
    whole, old = acc._acc, take(block, leaves)
    grad_name, required = f"the gradient of block {name!r}", like(block, old)
    _checks.check_gradients(required, grads, name=grad_name, expected="the partition")
    index = None if block.index is None else on_device(block.index, whole.count)
    counters = whole._replace(total=())
    new = _add(old, counters, jax.tree.leaves(grads), acc._weight, index)
    total = put(partition, block, leaves, new)
    added = (*acc.added, name)
    if len(added) == len(partition):
        return _advance(counters, acc._weight)._replace(total=total)
    return dataclasses.replace(acc, _acc=whole._replace(total=total), added=added)


@functools.partial(jax.jit, donate_argnums=0)
def _add(
    total: list[jax.Array],
    counters: Accumulator,
    grads: list[jax.Array],
    weight: jax.Array | None,
    index: jax.Array | None,
) -> Any:
    """The kernel. No argument holds a block's name, so equal blocks share a program."""
    with jax.named_scope("ga_optax.accumulate"):
        sums = total if index is None else slices(total, index)
        acc = accumulator.add(counters._replace(total=sums), grads, weight)
        return acc.total if index is None else with_slices(total, index, acc.total)


@jax.jit
def _advance(counters: Accumulator, weight: jax.Array | None) -> Accumulator:
    """Advances `weight` and `count` alone: blocks may be on different devices."""
    return accumulator.add(counters, (), weight)


def _host_number(weight: ArrayLike | None) -> float | None:
    """The value of a weight that is known without waiting for a device, or None."""
    known = isinstance(weight, (numbers.Real, np.ndarray)) and np.ndim(weight) == 0
    return float(weight) if known else None


def _checked_weight(weight: ArrayLike | None) -> jax.Array | None:
    if weight is None or isinstance(weight, jax.Array):
        return weight  # the kernel checks the type; reading the value would wait
    with jax.transfer_guard_host_to_device("allow"):  # this one number
        return _checks.check_weight(weight)
