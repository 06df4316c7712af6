"""How the aux of the micro-batches is put together: "mean", "sum", "last", "stack".

A mode is a class, and works on all leaves of that mode at once. The loss is one more
leaf of mode "mean". A new mode is one more class in `MODES`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ga_optax import _collectives, _mesh, accumulator
from ga_optax._checks import leaf_name
from ga_optax._mesh import Axes
from ga_optax.accumulator import Accumulator

Leaves = list[Any]


class Mode:
    """What every mode can be asked; `kept` is what it carries through the loop."""

    numbers_only = True

    def init(self, leaves: Leaves, vary: Callable[[Any, Any], Any]) -> Any:
        """What is kept before the first micro-batch.

        Args:
          leaves: the types of the leaves.
          vary: marks a sum as varying over devices as one of its terms does.
        """
        del leaves, vary
        return []

    def step(
        self, kept: Any, leaves: Leaves, weight: jax.Array | None
    ) -> tuple[Any, Leaves]:
        """What is kept after one more micro-batch, and what is stacked of it."""
        raise NotImplementedError

    def addends(self, kept: Any) -> Leaves:
        """What is summed over devices, in one communication with the gradients."""
        del kept
        return []

    def merge(self, kept: Any, sums: Leaves, weight: jax.Array, axes: Axes) -> Any:
        """What is kept of all devices.

        Args:
          kept: what this device kept.
          sums: the `addends`, summed over devices.
          weight: Σ w over all devices.
          axes: the data axes, bound.
        """
        del sums, weight, axes
        return kept

    def finish(self, kept: Any, stacked: Leaves) -> Sequence[jax.Array]:
        """The leaves of the result."""
        del stacked
        return kept

    def spec(self, axes: Axes) -> PartitionSpec:
        """How the result crosses the `shard_map` over the data axes."""
        del axes
        return PartitionSpec()


class Mean(Mode):
    """Σ w·x / Σ w, weighted as the loss is. The mean of integers is float32."""

    def init(self, leaves: Leaves, vary: Callable[[Any, Any], Any]) -> Accumulator:
        terms = [_inexact(x) for x in blank(leaves)]
        kept = accumulator.init(terms)
        return kept._replace(
            total=vary(kept.total, terms), weight=vary(kept.weight, kept.weight)
        )

    def step(
        self, kept: Accumulator, leaves: Leaves, weight: jax.Array | None
    ) -> tuple[Accumulator, Leaves]:
        return accumulator.add(kept, [_inexact(x) for x in leaves], weight), []

    def addends(self, kept: Accumulator) -> Leaves:
        return kept.total

    def merge(
        self, kept: Accumulator, sums: Leaves, weight: jax.Array, axes: Axes
    ) -> Accumulator:
        return Accumulator(sums, weight, kept.count)

    def finish(self, kept: Accumulator, stacked: Leaves) -> Sequence[jax.Array]:
        means: Any = accumulator.mean(kept)
        return means


class Sum(Mode):
    """Σ x, unweighted: counts as counts, and never in less than float32."""

    def init(self, leaves: Leaves, vary: Callable[[Any, Any], Any]) -> Leaves:
        return [vary(jnp.zeros(x.shape, _sum_dtype(x.dtype)), x) for x in leaves]

    def step(
        self, kept: Leaves, leaves: Leaves, weight: jax.Array | None
    ) -> tuple[Leaves, Leaves]:
        return [s + x.astype(s.dtype) for s, x in zip(kept, leaves, strict=True)], []

    def addends(self, kept: Leaves) -> Leaves:
        return kept

    def merge(
        self, kept: Leaves, sums: Leaves, weight: jax.Array, axes: Axes
    ) -> Leaves:
        return sums


class Last(Mode):
    """The last micro-batch's; of several devices, the last device's."""

    numbers_only = False

    def init(self, leaves: Leaves, vary: Callable[[Any, Any], Any]) -> Leaves:
        return blank(leaves)

    def step(
        self, kept: Leaves, leaves: Leaves, weight: jax.Array | None
    ) -> tuple[Leaves, Leaves]:
        return [strong(x) for x in leaves], []

    def merge(
        self, kept: Leaves, sums: Leaves, weight: jax.Array, axes: Axes
    ) -> Leaves:
        is_last = jax.lax.axis_index(axes) == _mesh.num_devices(axes, None) - 1

        def last(x: jax.Array) -> jax.Array:
            count = x.astype(_sum_dtype(x.dtype))
            here = jnp.where(is_last, count, jnp.zeros_like(count))
            return jax.lax.psum(here, axes).astype(x.dtype)

        return [last(x) for x in _collectives.vary(kept, axes)]


class Stack(Mode):
    """Every micro-batch's, along a new axis 0; of several devices, in their order."""

    numbers_only = False

    def step(
        self, kept: Leaves, leaves: Leaves, weight: jax.Array | None
    ) -> tuple[Leaves, Leaves]:
        return kept, leaves

    def finish(self, kept: Leaves, stacked: Leaves) -> Sequence[jax.Array]:
        return stacked

    def spec(self, axes: Axes) -> PartitionSpec:
        return _mesh.split_spec(axes)


MODES: dict[str, Mode] = {
    "mean": Mean(),
    "sum": Sum(),
    "last": Last(),
    "stack": Stack(),
}


# -- The option ------------------------------------------------------------------------


def check_option(option: Any) -> None:
    """Raises unless the option `aux` is a tree of names of modes."""
    for name in jax.tree.leaves(option, is_leaf=lambda x: x is None):
        if not isinstance(name, str) or name not in MODES:
            raise ValueError(
                f"aux must be one of {', '.join(map(repr, MODES))}, or a tree of those "
                f"that is a prefix of the aux tree, but it holds {name!r}. Use "
                '"stack" to see the aux of every micro-batch.'
            )


def modes_of(option: Any, aux: Any) -> list[str]:
    """The mode of each leaf of `aux`; `option` is a prefix of its tree."""
    try:
        names = jax.tree.leaves(jax.tree.broadcast(option, aux))
    except ValueError as error:
        raise ValueError(
            f"aux must be a tree that is a prefix of the aux tree, but it is {option!r}"
            f" and fun returned an aux of structure {jax.tree.structure(aux)}: "
            f"{error}. Name the same keys, or use one word for all of them."
        ) from None
    paths = jax.tree_util.tree_flatten_with_path(aux)[0]
    for (path, leaf), name in zip(paths, names, strict=True):
        a_number = jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == jnp.bool_
        if MODES[name].numbers_only and not a_number:
            raise TypeError(
                f'aux="{name}" must have numbers to work on, but {leaf_name(path)} of '
                f'the aux has dtype {leaf.dtype.name}. Use "last" or "stack" there.'
            )
    return names


def by_mode(leaves: Sequence[Any], modes: Sequence[str]) -> list[Leaves]:
    """The leaves of each mode, in the order of `MODES`."""
    return [
        [x for x, mode in zip(leaves, modes, strict=True) if mode == name]
        for name in MODES
    ]


def in_order(groups: Sequence[Sequence[Any]], modes: Sequence[str]) -> Leaves:
    """The reverse of `by_mode`."""
    remaining = dict(zip(MODES, map(iter, groups), strict=True))
    return [next(remaining[mode]) for mode in modes]


# -- Leaves ----------------------------------------------------------------------------


def blank(tree: Any) -> Any:
    """Zeros of the types in `tree`: placed, and varying over devices, as they say."""

    def zeros(x: Any) -> jax.Array:
        aval = jax.typeof(x) if isinstance(x, jax.Array) else x
        return _collectives.vary(_collectives.zeros(aval), tuple(_mesh.varying(aval)))

    return jax.tree.map(zeros, tree)


def strong(x: ArrayLike) -> jax.Array:
    """`x` without a weak type, which the carry of a loop has to keep."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x


def _inexact(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Where "sum" adds up: counts as counts, and never below float32."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return accumulator.accumulator_dtype(np.zeros([], dtype), np.dtype(np.float32))
    return np.dtype(np.int32) if dtype == jnp.bool_ else dtype
