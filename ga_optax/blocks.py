"""View by block: one tree of parameters, its layers by name.

A partition says which leaves of a tree make up which block,

    leaves(tree)  =  leaves(block 1)  ∪  ...  ∪  leaves(block n),     disjoint,

so that `replace(p, tree, name, select(p, tree, name)) == tree` for every block. Layers
that are scanned over lie behind one another in stacked leaves `[layers, ...]`; there a
block is one index of the leading axis.

`add` is `accumulator.add`, one block at a time, for a backward pass that produces the
gradient of one layer after the other and has no room for two of them. A micro-step is
whole when every block has been added once: only then is there an `Accumulator` again,
and only then do its `weight` and `count` advance.
"""

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from ga_optax import _checks, accumulator
from ga_optax.accumulator import Accumulator

__all__ = [
    "Block",
    "OpenMicroStep",
    "Partition",
    "Report",
    "Row",
    "Spec",
    "Stacked",
    "add",
    "flatten",
    "norms",
    "not_finite",
    "partition",
    "replace",
    "report",
    "select",
    "unflatten",
]

_Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Stacked:
    """As a rule of `partition`: layers that lie along the leading axis of leaves.

    Attributes:
      name: the path prefix of the stacked leaves, or the name that a function gives
        them. Layer i becomes the block `name/i`.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a `Partition`.

    Attributes:
      name: its name.
      leaves: the positions of its leaves among the leaves of the whole tree.
      index: its position along their leading axis where they are stacked, else `None`.
      structure: the tree structure of its gradient: see `select`.
      shapes: the shapes of its leaves, without the axis along which they are stacked.
    """

    name: str
    leaves: tuple[int, ...]
    index: int | None
    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each leaf."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def elements(self) -> int:
        """Elements of all leaves."""
        return sum(self.sizes)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Partition:
    """The blocks of a tree; `partition` makes it. Iterating over it gives the names.

    It holds no arrays: it is hashable, a static argument of `jax.jit`, and a pytree
    without leaves.

    Attributes:
      structure: the tree structure of the whole tree.
      shapes: the shapes of its leaves.
      dtypes: the dtypes of its leaves. Only `report` reads them.
      blocks: the blocks, in their order.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    blocks: tuple[Block, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks, in their order."""
        return tuple(block.name for block in self.blocks)

    @functools.cached_property
    def _by_name(self) -> dict[str, Block]:
        return {block.name: block for block in self.blocks}

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self.names)

    def __getitem__(self, name: str) -> Block:
        """The block of that name, or a `ValueError` that lists the names."""
        if name not in self._by_name:
            raise ValueError(
                f"The block must be one of the partition's {len(self)} blocks, but it "
                f"is {name!r}. Use {_listed(self.names)}."
            )
        return self._by_name[name]


def partition(
    params: optax.Params,
    by: int | str | Stacked | Sequence[str | Stacked] | Callable[[str], str | Stacked],
) -> Partition:
    """Names the blocks of a parameter tree.

    >>> import jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> layer = {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}
    >>> params = {"embed": jnp.zeros((9, 8)), "layers": [layer, layer]}
    >>> blocks.partition(params, 1).names
    ('embed', 'layers')
    >>> blocks.partition(params, ["embed", "layers/0", "layers/1"]).names
    ('embed', 'layers/0', 'layers/1')
    >>> blocks.partition(params, lambda path: path.split("/")[-1]).names
    ('embed', 'b', 'w')
    >>> stacked = {"embed": jnp.zeros((9, 8)), "layers": {"w": jnp.zeros((3, 8, 8))}}
    >>> blocks.partition(stacked, ["embed", blocks.Stacked("layers")]).names
    ('embed', 'layers/0', 'layers/1', 'layers/2')

    Nothing is computed: `params` may be a tree of `jax.ShapeDtypeStruct`.

    A path is written as its keys joined by "/": `layers/0/w`. A prefix ends at a "/" or
    at the end, so `layers/1` does not take the leaves of `layers/10`.

    Args:
      params: the tree; only structure, shapes and dtypes are read.
      by: which leaf belongs to which block:
        an int n: the first n keys of the path name the block;
        prefixes of paths, a string or a `Stacked` each, in the order of the blocks;
        a function of the path, a string, that returns the name or a `Stacked(name)`.

    Returns:
      The `Partition`.

    Raises:
      ValueError: where a leaf belongs to no block or to two, where stacked leaves
        have no common leading axis, or where a prefix has no leaf; names it.
      TypeError: where `by` is none of the above.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [path for path, _ in flat]
    shapes = tuple(jnp.shape(leaf) for _, leaf in flat)
    rules = _rules(paths, by)

    groups: dict[str, list[int]] = {}
    if isinstance(by, (str, Stacked, Sequence)):  # in the order of the prefixes
        groups = {_rule_name(rule): [] for rule in _as_prefixes(by)}
    for i, rule in enumerate(rules):
        group = groups.setdefault(_rule_name(rule), [])
        if group and rules[group[0]] != rule:
            raise ValueError(
                "A name must belong to a block or to stacked layers, but "
                f"{_checks.leaf_name(paths[i])} has {rule!r}, and "
                f"{_checks.leaf_name(paths[group[0]])} has {rules[group[0]]!r}. "
                "Give them different names."
            )
        group.append(i)
    for name, group in groups.items():
        if not group:
            raise ValueError(
                f"Every prefix must have a leaf, but {name!r} has none. The leaves "
                f"are {_listed([_string(path) for path in paths])}."
            )

    found: dict[str, Block] = {}
    for name, group in groups.items():
        made = _blocks_of(params, name, group, rules[group[0]], paths, shapes)
        for block in made:
            if block.name in found:
                raise ValueError(
                    f"Two blocks must not have one name, but {block.name!r} is the "
                    f"block of {_checks.leaf_name(paths[block.leaves[0]])} and of "
                    f"{_checks.leaf_name(paths[found[block.name].leaves[0]])}. "
                    "Give the stacked layers another name."
                )
            found[block.name] = block
    dtypes = tuple(jnp.result_type(leaf) for _, leaf in flat)
    return Partition(structure, shapes, dtypes, tuple(found.values()))


def select(partition: Partition, tree: Any, name: str) -> Any:
    """The block's own tree: what its gradient looks like, and what `add` takes.

    Where the name of the block is a path, that is the tree at that path; of stacked
    layers, the tree at that path without the leading axis. For a block named by a
    function, where the name is no path, it is the whole tree. The leaves of other
    blocks are `None` there.

    >>> import jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> params = {"head": jnp.ones(1), "layers": {"w": jnp.arange(6.0).reshape(3, 2)}}
    >>> p = blocks.partition(params, ["head", blocks.Stacked("layers")])
    >>> blocks.select(p, params, "layers/1")
    {'w': Array([2., 3.], dtype=float32)}

    **Exactness.** No bit changes. A leaf that is not stacked is passed on; of a stacked
    one its slice is copied.

    Args:
      partition: the partition.
      tree: a tree with its structure and shapes: parameters, gradients, or a
        `total`.
      name: the block.

    Returns:
      The block's tree.

    Raises:
      ValueError: where the tree does not fit the partition, or there is no such block.
    """
    block = partition[name]
    leaves = _take(block, _leaves(partition, tree, "tree"))
    if block.index is not None:
        leaves = _slices(leaves, _on_device(block.index))
    return jax.tree.unflatten(block.structure, leaves)


def replace(partition: Partition, tree: Any, name: str, block: Any) -> Any:
    """Puts a block's tree into the tree: the inverse of `select`.

    >>> import jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> params = {"a": jnp.zeros(1), "b": jnp.zeros(2)}
    >>> p = blocks.partition(params, 1)
    >>> blocks.replace(p, params, "b", jnp.ones(2))["b"]
    Array([1., 1.], dtype=float32)

    **Exactness.** No bit changes. A stacked leaf is copied, the others are passed on;
    nothing is donated.

    Args:
      partition: the partition.
      tree: the tree.
      name: the block.
      block: what to put there, with the structure, shapes and dtypes of
        `select(partition, tree, name)`.

    Returns:
      A tree with the block in it.

    Raises:
      ValueError: where something does not fit; names the leaf.
    """
    known = partition[name]
    leaves = _leaves(partition, tree, "tree")
    old, new = _take(known, leaves), jax.tree.leaves(block)
    what = f"block {name!r}"
    _checks.check_structure(
        _like(known, old),
        block,
        name="The new tree",
        expected=what,
        todo="Pass a tree like the one that blocks.select returns.",
    )
    for position, was, now, shape in zip(
        known.leaves, old, new, known.shapes, strict=True
    ):
        want, got = _printed(shape, was), _printed(jnp.shape(now), now)
        if want != got:
            path = _paths(partition)[position]
            raise ValueError(
                f"{_checks.leaf_name(path)} of {what} must be {want}, as in the "
                f"tree, but it is {got}. Pass a tree like the one that blocks.select "
                "returns."
            )
    if known.index is not None:
        new = _with_slices(old, _on_device(known.index), new)
    return _put(partition, known, leaves, new)


# -- One block of a micro-step ---------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("_before", "_weight"),
    meta_fields=("partition", "added", "_host_weight"),
)
@dataclasses.dataclass(frozen=True)
class OpenMicroStep:
    """A micro-step that still lacks blocks: what `add` returns until the last one.

    It has no `total`, no `weight` and no `count`, so that no mean can be taken of it:
    asking for them raises and names the blocks that are missing.

    Attributes:
      partition: the partition.
      added: the names of the blocks that are in.
    """

    _before: Accumulator
    _weight: jax.Array | None
    partition: Partition
    added: tuple[str, ...]
    _host_weight: float | None

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the blocks that are to come."""
        return tuple(name for name in self.partition if name not in self.added)

    def __getattr__(self, name: str) -> Any:
        if name in Accumulator._fields:
            raise AttributeError(
                "The accumulator must hold whole micro-steps before it is read, but "
                f"the open one lacks {_listed(self.missing)}. Add every block of the "
                "micro-batch with blocks.add."
            )
        raise AttributeError(f"OpenMicroStep has no attribute {name!r}.")


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
    partition once, in any order. The last one returns an `Accumulator`; until then it
    is an `OpenMicroStep`, which cannot be read. To begin a window, set `count` to 0
    (`acc._replace(count=jnp.zeros([], jnp.int32))`): the first micro-step overwrites,
    and never reads what the buffers hold.

    **Cost.** One jitted kernel, in which the block's buffers of `acc` are donated; so
    use `acc` no more afterwards. It reads `grads`, and reads and writes those buffers.
    The buffers of other blocks are passed on as they are. Stacked layers are updated in
    place, at the price of a temporary of the size of the block. It compiles once for
    all blocks of the same shapes, and never transfers anything to the host. Under
    `jax.jit` it becomes part of the caller's program.

    **Exactness.** The bits of `accumulator.add` with the gradients of all blocks.

    Args:
      partition: the partition of the parameters.
      acc: the accumulator, or what `add` returned for the block before.
      name: the block.
      grads: its gradient, with the tree of `select(partition, acc.total, name)`.
      weight: how much this micro-batch counts, a non-negative scalar; `None` counts 1.
        Every block of a micro-batch must get the same: an equal number, or the very
        same array. The value of an array is not looked at, as that would wait for it.

    Returns:
      The accumulator, open while blocks are missing.

    Raises:
      ValueError: where the block was added already in this micro-step, where its
        gradient does not fit (names the leaf), where the weight is not that of the
        blocks before, or where `acc` belongs to another partition.
      TypeError: where `acc`, `weight` or a leaf of `grads` has the wrong type.
    """
    block = partition[name]
    if isinstance(acc, OpenMicroStep):
        _check_open(partition, acc, name, weight)
        leaves = jax.tree.leaves(acc._before.total)  # checked when it was opened
    elif isinstance(acc, Accumulator):
        leaves = _leaves(partition, acc.total, "acc.total")
        acc = OpenMicroStep(acc, _checked(weight), partition, (), _host_number(weight))
    else:
        raise TypeError(
            "acc must be an Accumulator, or what blocks.add returned for the block "
            f"before, but it is a {type(acc).__name__}. Make one with "
            "accumulator.init(params)."
        )
    before = acc._before
    old = _take(block, leaves)
    _checks.check_gradients(
        _like(block, old),
        grads,
        name=f"the gradient of block {name!r}",
        expected="the partition",
    )
    new = jax.tree.leaves(grads)
    if block.index is None:
        new = _add(old, before.weight, before.count, new, acc._weight)
    else:
        index = _on_device(block.index, before.count)
        new = _add_stacked(old, before.weight, before.count, index, new, acc._weight)

    before = before._replace(total=_put(partition, block, leaves, new))
    added = (*acc.added, name)
    if len(added) < len(partition):
        return dataclasses.replace(acc, _before=before, added=added)
    weight, count = _advance(before.weight, before.count, acc._weight)
    return Accumulator(before.total, weight, count)


@functools.partial(jax.jit, donate_argnums=0)
def _add(
    total: list[jax.Array],
    weight: jax.Array,
    count: jax.Array,
    grads: list[jax.Array],
    step_weight: jax.Array | None,
) -> optax.Updates:
    """Lists, and no names in them, so that equal blocks share one program."""
    with jax.named_scope("ga_optax.accumulate"):
        acc = Accumulator(total, weight, count)
        return accumulator.add(acc, grads, step_weight).total


@functools.partial(jax.jit, donate_argnums=0)
def _add_stacked(
    total: list[jax.Array],
    weight: jax.Array,
    count: jax.Array,
    index: jax.Array,
    grads: list[jax.Array],
    step_weight: jax.Array | None,
) -> list[jax.Array]:
    """The index is traced, so that all layers share one program."""
    with jax.named_scope("ga_optax.accumulate"):
        acc = Accumulator(_slices(total, index), weight, count)
        new = accumulator.add(acc, grads, step_weight).total
        return _with_slices(total, index, new)


@jax.jit
def _advance(
    weight: jax.Array, count: jax.Array, step_weight: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    acc = accumulator.add(Accumulator((), weight, count), (), step_weight)
    return acc.weight, acc.count


@jax.jit
def _slices(stacks: list[jax.Array], index: jax.Array) -> list[jax.Array]:
    return [
        jax.lax.dynamic_index_in_dim(stack, index, keepdims=False) for stack in stacks
    ]


@jax.jit
def _with_slices(
    stacks: list[jax.Array], index: jax.Array, slices: list[jax.Array]
) -> list[jax.Array]:
    return [
        jax.lax.dynamic_update_index_in_dim(stack, new, index, 0)
        for stack, new in zip(stacks, slices, strict=True)
    ]


def _check_open(
    partition: Partition, acc: OpenMicroStep, name: str, weight: ArrayLike | None
) -> None:
    if partition != acc.partition:
        raise ValueError(
            f"All blocks of a micro-step must be of one partition, but {name!r} comes "
            f"with a partition of {len(partition)} blocks, and the open micro-step has "
            f"one of {len(acc.partition)}. Pass the partition that it was begun with."
        )
    if name in acc.added:
        raise ValueError(
            f"Every block must be added once in a micro-step, but {name!r} is in it "
            f"already, and {_listed(acc.missing)} not. Add those first."
        )
    known = acc._weight if acc._host_weight is None else acc._host_weight
    same = weight is known or (
        acc._host_weight is not None and _host_number(weight) == acc._host_weight
    )
    if not same:
        raise ValueError(
            "Every block of a micro-batch must get the same weight, but block "
            f"{name!r} gets {weight!r}, and {_listed(acc.added)} got {known!r}. Pass "
            "an equal number, or the very same array, to each of them."
        )


def _host_number(weight: ArrayLike | None) -> float | None:
    """The value of a weight where it is known without waiting for a device."""
    known = isinstance(weight, (numbers.Real, np.ndarray)) and np.ndim(weight) == 0
    return float(weight) if known else None


def _checked(weight: ArrayLike | None) -> jax.Array | None:
    if weight is None:
        return None
    if isinstance(weight, jax.Array):
        # Abstractly: looking at its value would wait for the device.
        jax.eval_shape(_checks.check_weight, weight)
        return weight
    with jax.transfer_guard_host_to_device("allow"):  # this one number
        return _checks.check_weight(weight)


def _on_device(index: int, like: jax.Array | None = None) -> jax.Array:
    """An explicit transfer, to the devices that hold `like`, if it may not leave them.

    Explicit, so that it is allowed where implicit transfers are not.
    """
    known = isinstance(like, jax.Array) and not isinstance(like, jax.core.Tracer)
    sharding = like.sharding if known and like.committed else None
    return jax.device_put(np.int32(index), sharding)


# -- Per block, on the device ----------------------------------------------------------


def norms(partition: Partition, tree: Any) -> jax.Array:
    """The L2 norm of every block: one computation, one vector, so one transfer.

    >>> import jax, jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([5.0, 12.0])}
    >>> p = blocks.partition(grads, 1)
    >>> dict(zip(p, jax.device_get(blocks.norms(p, grads)).tolist()))
    {'a': 5.0, 'b': 13.0}

    **Exactness.** The squares are summed in float32, or float64 where the tree has
    it: for n elements the relative error is at most about (n/2 + 2)·eps, and less in
    practice. As in `optax.global_norm` the squares overflow above 1.8e19 and vanish
    below 1e-19, in float32.

    Args:
      partition: the partition.
      tree: a tree with its structure and shapes.

    Returns:
      The norms `[blocks]`, in the order of `partition.names`, on the device.

    Raises:
      ValueError: where the tree does not fit the partition; names the leaf.
    """
    return _norms(partition, _leaves(partition, tree, "tree"))


@functools.partial(jax.jit, static_argnums=0)
def _norms(partition: Partition, leaves: list[ArrayLike]) -> jax.Array:
    def real(dtype: np.dtype) -> np.dtype:
        wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits == 64
        return np.dtype(np.float64 if wide else np.float32)

    dtypes = [real(jnp.result_type(leaf)) for leaf in leaves]
    dtype = max(dtypes, key=lambda d: d.itemsize, default=np.dtype(np.float32))

    def squares(leaf: ArrayLike) -> jax.Array:
        x = jnp.asarray(leaf)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return _square(x.real, dtype) + _square(x.imag, dtype)
        return _square(x, dtype)

    return jnp.sqrt(_per_block(partition, leaves, squares, jnp.sum, jnp.add, dtype))


def _square(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return jnp.square(x.astype(dtype))


def not_finite(partition: Partition, tree: Any) -> jax.Array:
    """Whether a block holds an inf or a NaN: one computation, one vector.

    >>> import jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> grads = {"a": jnp.array([3.0, jnp.nan]), "b": jnp.array([5.0, 12.0])}
    >>> blocks.not_finite(blocks.partition(grads, 1), grads)
    Array([ True, False], dtype=bool)

    Args:
      partition: the partition.
      tree: a tree with its structure and shapes.

    Returns:
      bool `[blocks]`, in the order of `partition.names`, on the device.

    Raises:
      ValueError: where the tree does not fit the partition; names the leaf.
    """
    return _not_finite(partition, _leaves(partition, tree, "tree"))


@functools.partial(jax.jit, static_argnums=0)
def _not_finite(partition: Partition, leaves: list[ArrayLike]) -> jax.Array:
    return _per_block(
        partition,
        leaves,
        lambda leaf: ~jnp.isfinite(leaf),
        jnp.any,
        jnp.logical_or,
        np.dtype(bool),
    )


def _per_block(
    partition: Partition,
    leaves: list[ArrayLike],
    each: Callable[[ArrayLike], jax.Array],
    reduce: Callable[..., jax.Array],
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    dtype: np.dtype,
) -> jax.Array:
    """Reduces every block to a number; the layers of a stack in one reduction."""
    parts = [jnp.zeros(0, dtype)]
    for indices, group in itertools.groupby(partition.blocks, lambda b: b.leaves):
        first = 0 if next(group).index is None else 1
        values = [
            reduce(each(leaves[i]), axis=tuple(range(first, jnp.ndim(leaves[i]))))
            for i in indices
        ]
        value = functools.reduce(combine, values)
        parts.append(value if first else value[None])
    return jnp.concatenate(parts)


# -- One contiguous vector -------------------------------------------------------------


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
        """Elements of each leaf."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return sum(self.sizes)


def flatten(partition: Partition, tree: Any, name: str) -> tuple[jax.Array, Spec]:
    """A block as one contiguous vector: for a bucketed all-reduce, or a wire.

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
    `select(partition, tree, name)`. The leaves lie in the order of `jax.tree.leaves`,
    each row by row.

    Args:
      partition: the partition.
      tree: a tree with its structure and shapes.
      name: the block.

    Returns:
      The vector `[elements of the block]`, and the `Spec` that `unflatten` takes.

    Raises:
      ValueError: where the tree does not fit the partition, or there is no such block.
      TypeError: where the leaves of the block have more than one dtype.
    """
    leaves = jax.tree.leaves(select(partition, tree, name))
    dtypes = sorted({jnp.result_type(leaf).name for leaf in leaves})
    if len(dtypes) > 1:
        raise TypeError(
            f"The leaves of block {name!r} must have one dtype to lie in one vector, "
            f"but they have {' and '.join(dtypes)}. Cast the tree first, or partition "
            "it by dtype too."
        )
    block = partition[name]
    spec = Spec(name, block.shapes, jnp.result_type(leaves[0]))
    return _concatenate(leaves), spec


def unflatten(partition: Partition, vector: ArrayLike, spec: Spec) -> Any:
    """The block's tree of a vector: the inverse of `flatten`, which has an example.

    **Exactness.** Nothing is computed or cast. Put the block back with `replace`.

    Args:
      partition: the partition.
      vector: the vector, with the size and dtype that `spec` says.
      spec: what `flatten` returned.

    Returns:
      The tree of `select(partition, tree, spec.name)`.

    Raises:
      ValueError: where the vector's size, or the block's shapes, are not those of
        `spec`: names the block and both sizes.
      TypeError: where the vector's dtype is not that of `spec`.
    """
    block = partition[spec.name]
    if block.shapes != spec.shapes:
        raise ValueError(
            f"The spec must be of the partition's block {spec.name!r}, which has "
            f"{block.elements} elements in {_shapes(block.shapes)}, but it has "
            f"{spec.size} in {_shapes(spec.shapes)}. Pass the partition that it was "
            "made with."
        )
    if jnp.shape(vector) != (spec.size,):
        raise ValueError(
            f"The vector of block {spec.name!r} must have shape {(spec.size,)}, but it "
            f"has shape {jnp.shape(vector)}. Pass a vector like the one that "
            "blocks.flatten returned."
        )
    if jnp.result_type(vector) != spec.dtype:
        raise TypeError(
            f"The vector of block {spec.name!r} must have dtype {spec.dtype.name}, but "
            f"it has {jnp.result_type(vector).name}. Cast it to the one that you mean."
        )
    return jax.tree.unflatten(block.structure, _split(vector, spec.shapes))


@jax.jit
def _concatenate(leaves: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


@functools.partial(jax.jit, static_argnums=1)
def _split(vector: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [
        vector[end - math.prod(shape) : end].reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]


# -- How large -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One block of a `Report`: its name, shapes of leaves, elements and bytes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """How large an accumulator is, block by block; `str` of it is a table.

    Attributes:
      rows: one `Row` a block.
      dtype: the accumulator's dtype, or `None` for that of each leaf.
    """

    rows: tuple[Row, ...]
    dtype: np.dtype | None

    @property
    def elements(self) -> int:
        """Elements of all blocks."""
        return sum(row.elements for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        lines = [
            (row.name, _shapes(row.shapes), f"{row.elements:,}", _mib(row.bytes))
            for row in self.rows
        ]
        dtype = "own dtypes" if self.dtype is None else self.dtype.name
        total = ("total", dtype, f"{self.elements:,}", _mib(self.bytes))
        table = [("block", "shapes", "elements", "MiB"), *lines, total]
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        return "\n".join(
            f"{name:<{widths[0]}}  {shapes:<{widths[1]}}  {elements:>{widths[2]}}  "
            f"{size:>{widths[3]}}"
            for name, shapes, elements, size in table
        )


def report(
    params: optax.Params | Partition, dtype: DTypeLike | None = jnp.float32
) -> Report:
    """How large the accumulator is, block by block, from shapes alone.

    >>> import jax, jax.numpy as jnp
    >>> from ga_optax import blocks
    >>> def init():
    ...     return {"embed": jnp.zeros((512, 64)), "head": {"w": jnp.zeros((64, 512))}}
    >>> print(blocks.report(jax.eval_shape(init)))
    block  shapes    elements    MiB
    embed  [512,64]    32,768  0.125
    head   [64,512]    32,768  0.125
    total  float32     65,536  0.250

    Args:
      params: a `Partition`, or a tree, which is partitioned by top-level name. It may
        be a tree of `jax.ShapeDtypeStruct`, such as `jax.eval_shape` returns.
      dtype: the accumulator's dtype; see `accumulator.init`.

    Returns:
      The `Report`; its `bytes` are those of `accumulator.init(params, dtype).total`.

    Raises:
      TypeError: where `dtype` cannot hold gradients.
    """
    wide = _checks.check_dtype(dtype)
    blocks = params if isinstance(params, Partition) else partition(params, 1)
    itemsizes = [
        accumulator.accumulator_dtype(np.empty((), own), wide).itemsize
        for own in blocks.dtypes
    ]
    rows = (
        Row(
            block.name,
            block.shapes,
            block.elements,
            sum(
                size * itemsizes[i]
                for size, i in zip(block.sizes, block.leaves, strict=True)
            ),
        )
        for block in blocks.blocks
    )
    return Report(tuple(rows), wide)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.3f}"


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    """The shapes in their order, each once: `2×[8,8] [8]`."""
    counts = {shape: shapes.count(shape) for shape in shapes}
    return " ".join(
        (f"{n}×" if n > 1 else "") + f"[{','.join(map(str, shape))}]"
        for shape, n in counts.items()
    )


# -- Making a partition ----------------------------------------------------------------


def _as_prefixes(by: str | Stacked | Sequence[Any]) -> list[str | Stacked]:
    prefixes = [by] if isinstance(by, (str, Stacked)) else list(by)
    for prefix in prefixes:
        if not isinstance(prefix, (str, Stacked)):
            raise TypeError(
                "A prefix must be a string or a blocks.Stacked, but it is "
                f"{prefix!r} of type {type(prefix).__name__}. Write a path as its keys "
                "joined by '/', such as 'layers/0'."
            )
    return prefixes


def _rules(paths: list[_Key], by: Any) -> list[str | Stacked]:
    """The rule that takes each leaf: the name of its block, or of its stack."""
    if isinstance(by, numbers.Integral) and not isinstance(by, (bool, np.bool_)):
        if by < 1:
            raise ValueError(
                f"by must be at least 1 where it counts keys, but it is {by}. Use 1 "
                "for the top-level names."
            )
        return [_string(path[: int(by)]) for path in paths]
    if isinstance(by, (str, Stacked, Sequence)):
        prefixes = _as_prefixes(by)
        return [_matching(path, prefixes) for path in paths]
    if callable(by):
        return [_called(path, by) for path in paths]
    raise TypeError(
        "by must be a number of keys, prefixes of paths, or a function of the path, "
        f"but it is {by!r} of type {type(by).__name__}. Use 1 for the top-level names."
    )


def _matching(path: _Key, prefixes: list[str | Stacked]) -> str | Stacked:
    string = _string(path)
    found = [
        prefix
        for prefix in prefixes
        if _rule_name(prefix) in ("", string)
        or string.startswith(_rule_name(prefix) + "/")
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            "A leaf must belong to one block, but "
            f"{_checks.leaf_name(path)} ({string!r}) belongs to {found[0]!r} and "
            f"{found[1]!r}. Leave one of them out, or name its parts."
        )
    raise ValueError(
        f"Every leaf must belong to a block, but {_checks.leaf_name(path)} "
        f"({string!r}) has none of the prefixes {_listed(prefixes)}. Add a prefix for "
        "it."
    )


def _called(path: _Key, by: Callable[[str], Any]) -> str | Stacked:
    string = _string(path)
    rule = by(string)
    if rule is None:
        raise ValueError(
            f"Every leaf must belong to a block, but for {_checks.leaf_name(path)} "
            f"({string!r}) the function returned None. Return a name for it."
        )
    if not isinstance(rule, (str, Stacked)):
        raise TypeError(
            "The function must return a string or a blocks.Stacked, but for "
            f"{_checks.leaf_name(path)} ({string!r}) it returned {rule!r} of type "
            f"{type(rule).__name__}. Return the name of the block."
        )
    return rule


def _rule_name(rule: str | Stacked) -> str:
    return rule.name if isinstance(rule, Stacked) else rule


def _blocks_of(
    params: optax.Params,
    name: str,
    group: list[int],
    rule: str | Stacked,
    paths: list[_Key],
    shapes: tuple[tuple[int, ...], ...],
) -> list[Block]:
    """The block of a group of leaves, or the blocks where they are stacked."""
    structure = _structure(params, name, group, paths)
    own = tuple(shapes[i] for i in group)
    if not isinstance(rule, Stacked):
        return [Block(name, tuple(group), None, structure, own)]
    layers = own[0][0] if own[0] else 0
    for i in group:
        if not shapes[i] or shapes[i][0] != layers or not layers:
            raise ValueError(
                f"The leaves of {rule!r} must have one leading axis, the layers, but "
                f"{_checks.leaf_name(paths[i])} has shape {shapes[i]}, and "
                f"{_checks.leaf_name(paths[group[0]])} has shape {own[0]}. Give "
                "leaves that are not stacked a block of their own."
            )
    within = tuple(shape[1:] for shape in own)
    prefix = f"{name}/" if name else ""
    return [
        Block(f"{prefix}{i}", tuple(group), i, structure, within) for i in range(layers)
    ]


def _structure(
    params: optax.Params, name: str, group: list[int], paths: list[_Key]
) -> Any:
    """The structure at the path `name`, other blocks' leaves being `None`."""
    mine = [paths[i] for i in group]
    roots = (mine[0][:n] for n in range(len(mine[0]) + 1))
    root = next(
        (
            root
            for root in roots
            if _string(root) == name and all(p[: len(root)] == root for p in mine)
        ),
        (),
    )
    node = jax.tree.unflatten(jax.tree.structure(params), range(len(paths)))
    for key in root:
        children = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda child, parent=node: child is not parent
        )[0]
        node = next(child for path, child in children if path == (key,))
    kept = frozenset(group)
    return jax.tree.structure(jax.tree.map(lambda i: i if i in kept else None, node))


def _string(path: _Key) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _listed(names: Sequence[Any]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# -- Leaves of a tree that fits a partition --------------------------------------------


def _leaves(partition: Partition, tree: Any, what: str) -> list[Any]:
    """The leaves of a tree, or an error where it does not fit the partition."""
    structure = jax.tree.structure(tree)
    if structure != partition.structure:
        reference = jax.tree.unflatten(
            partition.structure, range(len(partition.shapes))
        )
        _checks.check_structure(
            reference,
            tree,
            name=what,
            expected="the partition",
            todo="Make the partition from such a tree.",
        )
    leaves = jax.tree.leaves(tree)
    for i, (leaf, shape) in enumerate(zip(leaves, partition.shapes, strict=True)):
        if jnp.shape(leaf) != shape:
            path = _paths(partition)[i]
            raise ValueError(
                f"{_checks.leaf_name(path)} of {what} must have shape {shape}, as "
                f"in the partition, but it has shape {jnp.shape(leaf)}. Make the "
                "partition from such a tree."
            )
    return leaves


def _paths(partition: Partition) -> list[_Key]:
    numbered = jax.tree.unflatten(partition.structure, range(len(partition.shapes)))
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]


def _take(block: Block, leaves: list[Any]) -> list[Any]:
    return [leaves[i] for i in block.leaves]


def _put(
    partition: Partition, block: Block, leaves: list[Any], new: list[jax.Array]
) -> Any:
    leaves = list(leaves)
    for i, leaf in zip(block.leaves, new, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(partition.structure, leaves)


def _like(block: Block, leaves: list[Any]) -> Any:
    """Shapes and dtypes of the block's own tree."""
    return jax.tree.unflatten(
        block.structure,
        [
            jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))
            for shape, leaf in zip(block.shapes, leaves, strict=True)
        ],
    )


def _printed(shape: tuple[int, ...], leaf: Any) -> str:
    return f"{jnp.result_type(leaf).name}{list(shape)}"
