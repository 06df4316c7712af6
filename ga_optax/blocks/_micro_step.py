"""One micro-step, block by block."""

import dataclasses
import functools
import numbers
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from .. import _checks, _text, accumulator
from ..accumulator import Accumulator
from ._partition import Partition, block_of, leaves_of
from ._select import like, on_device, put, slices, take, with_slices


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
    if weight is None:
        return None
    if isinstance(weight, jax.Array):
        # Checks the type alone: reading the value would wait for the device.
        jax.eval_shape(_checks.check_weight, weight)
        return weight
    with jax.transfer_guard_host_to_device("allow"):  # this one number
        return _checks.check_weight(weight)
