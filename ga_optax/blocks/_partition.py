"""`partition`: assigns every leaf of a tree to a named block."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import _checks, _text

_Key = tuple[Any, ...]
_Shapes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Stacked:
    """A rule of `partition`: layers that are stacked along the leading axis of leaves.

    Attributes:
      name: the path prefix of the stacked leaves, or a name chosen by a function. Layer
        i becomes the block `name/i`.
    """

    name: str


_Choice = str | Stacked


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a `Partition`.

    Attributes:
      name: the name of the block.
      leaves: the positions of the block's leaves in the whole tree's leaves.
      index: the position along the leading axis if the leaves are stacked, else `None`.
      structure: the tree structure of the block's gradient: see `select`.
      shapes: the shapes of the leaves, without the axis of the stack.
    """

    name: str
    leaves: tuple[int, ...]
    index: int | None
    structure: Any
    shapes: _Shapes

    @property
    def elements(self) -> int:
        """The number of elements of all leaves."""
        return sum(map(math.prod, self.shapes))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Partition:
    """The blocks of a tree, made by `partition`. Iteration yields the names.

    A partition holds no arrays. It is hashable, so it can be a static argument of
    `jax.jit`, and it is a pytree without leaves.

    Attributes:
      structure: the tree structure of the whole tree.
      shapes: the shapes of the tree's leaves.
      dtypes: the dtypes of the tree's leaves. Only `report` reads them.
      blocks: the blocks, in order.
    """

    structure: Any
    shapes: _Shapes
    dtypes: tuple[np.dtype, ...]
    blocks: tuple[Block, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks, in order."""
        return tuple(block.name for block in self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self.names)

    def __getitem__(self, name: str) -> Block:
        """The block with this name, or a `ValueError` that lists the names."""
        for block in self.blocks:
            if block.name == name:
                return block
        raise ValueError(
            f"The block must be one of the partition's {len(self)} blocks, but it is "
            f"{_checks.brief(name)}. Use {_text.listed(self.names)}."
        )

    @functools.cached_property
    def _tree(self) -> Any:
        """The whole tree, with shapes and dtypes as leaves."""
        kinds = map(jax.ShapeDtypeStruct, self.shapes, self.dtypes)
        return jax.tree.unflatten(self.structure, kinds)


def partition(
    params: optax.Params,
    by: int | str | Stacked | Sequence[str | Stacked] | Callable[[str], str | Stacked],
) -> Partition:
    """Splits a parameter tree into named blocks.

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

    The path of a leaf is its keys joined by "/", such as `layers/0/w`. A prefix matches
    whole keys: `layers/1` does not take the leaves of `layers/10`.

    Args:
      params: the tree; only structure, shapes and dtypes are read.
      by: the rule that assigns leaves to blocks:
        an int n: the first n keys of a leaf's path are the name of the block;
        prefixes of paths, each a string or a `Stacked`, in the order of the blocks;
        a function that takes the path, a string, and returns the name or a
        `Stacked(name)`.

    Returns:
      The `Partition`.

    Raises:
      ValueError: if a leaf belongs to no block or to two (the message names the leaf),
        if stacked leaves have no common leading axis, if a prefix has no leaf, or if
        two blocks have one name.
      TypeError: if `by` is none of the above, or a leaf of `params` is no array.
    """
    _checks.check_arrays("params", params)
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [path for path, _ in flat]
    shapes = tuple(jnp.shape(leaf) for _, leaf in flat)
    by = _checked_rules(by)
    prefixes = by if isinstance(by, tuple) else ()
    groups: dict[_Choice, list[int]] = {prefix: [] for prefix in prefixes}
    for i, path in enumerate(paths):
        groups.setdefault(_choice(by, path), []).append(i)

    blocks: list[Block] = []
    for rule, group in groups.items():
        if not group:
            raise ValueError(
                f"Every prefix must have a leaf, but {rule!r} has none. The leaves "
                f"are {_text.listed([_string(path) for path in paths])}."
            )
        blocks += _blocks(rule, group, structure, paths, shapes)
    for name, number in collections.Counter(block.name for block in blocks).items():
        if number > 1:
            raise ValueError(
                f"Blocks must have different names, but {name!r} is the name of "
                f"{number}. Name one of the blocks differently."
            )
    dtypes = tuple(jnp.result_type(leaf) for _, leaf in flat)
    return Partition(structure, shapes, dtypes, tuple(blocks))


def check_partition(partition: Any) -> None:
    """Raises unless `partition` is a `Partition`."""
    todo = "Make one with blocks.partition(params, 1), for example."
    _checks.check_type("partition", partition, Partition, todo)


def block_of(partition: Partition, name: str) -> Block:
    """The block with this name; raises if there is none."""
    check_partition(partition)
    return partition[name]


def leaves_of(partition: Partition, tree: Any, name: str = "tree") -> list[Any]:
    """The leaves of a tree; raises if the tree does not fit the partition."""
    check_partition(partition)
    todo = "Make the partition from a tree of this structure and these shapes."
    expected = "the partition"
    _checks.check_leaves(partition._tree, tree, name=name, expected=expected, todo=todo)
    return jax.tree.leaves(tree)


def shown(shapes: _Shapes) -> str:
    """The different shapes in words, with their numbers: `2×[8,8] [8]`."""
    counts = {shape: shapes.count(shape) for shape in shapes}
    return " ".join(
        (f"{n}×" if n > 1 else "") + f"[{','.join(map(str, shape))}]"
        for shape, n in counts.items()
    )


# -- Rules: the name of a leaf's block, or of the leaf's stack -------------------------


def _checked_rules(by: Any) -> Any:
    """Returns an int, a function or a tuple of prefixes; or raises."""
    if callable(by):
        return by
    if isinstance(by, (str, Stacked, Sequence)):
        prefixes = (by,) if isinstance(by, (str, Stacked)) else tuple(by)
        for prefix in prefixes:
            _check_rule(prefix, "A prefix")
        return prefixes
    todo = (
        "Use 1 for the top-level names, prefixes of paths, or a function of the path."
    )
    return _checks.check_int("by", by, todo)


def _choice(by: Any, path: _Key) -> _Choice:
    """The rule of a leaf."""
    if isinstance(by, int):
        return _string(path[:by])
    string = _string(path)
    leaf = f"{_checks.leaf_name(path)} ({string!r})"
    if callable(by):
        rule = by(string)
        _check_rule(rule, f"The result of the function for {leaf}")
        return rule
    rules = [p for p in by if not _name(p) or f"{string}/".startswith(f"{_name(p)}/")]
    if len(rules) != 1:
        prefixes = f"the prefixes {_text.listed(rules)}" if rules else "no prefix"
        raise ValueError(
            f"Every leaf must belong to one block, but {leaf} matches {prefixes}. Pass "
            f"one prefix for this leaf; by has {_text.listed(by)}."
        )
    return rules[0]


def _check_rule(rule: Any, name: str) -> None:
    if not isinstance(rule, (str, Stacked)):
        error = ValueError if rule is None else TypeError  # a leaf without a block
        raise error(
            f"{name} must be a string or a blocks.Stacked, but it is {rule!r} of type "
            f"{type(rule).__name__}. Name a block, such as 'layers/0'."
        )


def _name(rule: _Choice) -> str:
    return rule.name if isinstance(rule, Stacked) else rule


def _string(path: _Key) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


# -- The blocks of a rule --------------------------------------------------------------


def _blocks(
    rule: _Choice, group: list[int], whole: Any, paths: list[_Key], shapes: _Shapes
) -> list[Block]:
    """The block of a group of leaves, or one block for each layer of stacks."""
    name, leaves = _name(rule), tuple(group)
    structure = _structure(name, leaves, whole, paths[leaves[0]])
    of_leaves = tuple(shapes[i] for i in leaves)
    if isinstance(rule, str):
        return [Block(name, leaves, None, structure, of_leaves)]
    for i, shape in zip(leaves, of_leaves, strict=True):
        if not shape or not shape[0] or shape[0] != of_leaves[0][0]:
            raise ValueError(
                f"The leaves of {rule!r} must have one leading axis, the layers, but "
                f"{_checks.leaf_name(paths[i])} has shape {shape}, and the first leaf "
                f"has {of_leaves[0]}. Put leaves that are not stacked into another "
                "block."
            )
    prefix = f"{name}/" if name else ""
    layer = tuple(shape[1:] for shape in of_leaves)
    layers = range(of_leaves[0][0])
    return [Block(f"{prefix}{i}", leaves, i, structure, layer) for i in layers]


def _structure(name: str, leaves: tuple[int, ...], whole: Any, path: _Key) -> Any:
    """The structure at the path `name`, with `None` for the leaves of other blocks.

    Returns the whole structure if `name` is no common path of `leaves`.
    """
    block = frozenset(leaves)
    masked = (i if i in block else None for i in range(whole.num_leaves))
    node = whole = jax.tree.structure(jax.tree.unflatten(whole, masked))
    for depth in range(len(path) + 1):
        if _string(path[:depth]) == name:
            return node
        inner = [child for child in node.children() if child.num_leaves]
        if len(inner) != 1:
            break
        node = inner[0]
    return whole
