"""How results of the micro-batches are put together: one way for each leaf.

A mode is a class, and works on all leaves of that mode at once. The loss is one more
leaf of mode "mean". A new mode is one more class in `WAYS`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives, logical, meshes
from ga_optax._devices.meshes import Axes
from ga_optax._loop import trees
from ga_optax.accumulator import Accumulator

Leaves = list[Any]
Vary = Callable[[Any, Any], Any]
Weight = jax.Array | None
Zero = jax.Array | None


class Mode:
    """What every mode can be asked; `kept` is what it carries through the loop.

    The defaults are those of a mode that carries nothing, and collects.

    Attributes:
      adds: whether it adds leaves up. They have to be numbers, and not those of
        different examples.
      collects: whether it keeps the leaves of every micro-batch, along a new axis 0,
        which the loop does. What it has `kept` after the loop is those.
      name: how the loop names what it collects.
    """

    adds = False
    collects = False
    name = ""

    def init(self, leaves: Leaves, vary: Vary) -> Any:
        """What is kept before the first micro-batch.

        Args:
          leaves: the types of the leaves.
          vary: marks a sum as varying over devices as one of its terms does.
        """
        return []

    def step(self, kept: Any, leaves: Leaves, weight: Weight, zero: Zero) -> Any:
        """What is kept after one more micro-batch; `zero` is that of `rounded`."""
        return kept

    def join(self, a: Any, b: Any) -> Any:
        """What is kept of two logical devices, neighbours."""
        return b

    def addends(self, kept: Any) -> Leaves:
        """What is summed over devices, in one communication with the gradients."""
        return []

    def merge(self, kept: Any, sums: Leaves, weight: jax.Array, axes: Axes) -> Any:
        """What is kept of all devices.

        Args:
          kept: what this device kept.
          sums: the `addends`, summed over devices.
          weight: Σ w over all devices.
          axes: the data axes, bound.
        """
        return kept

    def finish(self, kept: Any) -> Leaves:
        """The leaves of the result."""
        return kept


class Mean(Mode):
    """Σ w·x / Σ w, weighted as the loss is. The mean of integers is float32."""

    adds = True

    def init(self, leaves: Leaves, vary: Vary) -> Accumulator:
        terms = [_inexact(x) for x in trees.blank(leaves)]
        kept: Any = accumulator.init(terms)
        total = [
            vary(-zero, term) for zero, term in zip(kept.total, terms, strict=True)
        ]
        return kept._replace(total=total, weight=vary(kept.weight, kept.weight))

    def step(self, kept: Any, leaves: Leaves, weight: Weight, zero: Zero) -> Any:
        terms = list(map(_inexact, _rounded(leaves, zero)))
        one = jnp.ones_like(kept.weight) if weight is None else weight
        if weight is not None:
            dtypes = [t.dtype for t in kept.total]
            pairs = zip(terms, dtypes, strict=True)
            # Of this counter: with the loop's own zero XLA on CPUs (jaxlib 0.12) orders
            # the loop so that a weighted model of unrolled layers holds one more leaf.
            own = None if zero is None else accumulator.unknown_zero(kept.count)
            terms = [accumulator.weighted(x, weight, d, own) for x, d in pairs]
        total: Any = accumulator.add_terms(kept.total, terms, weight)
        return Accumulator(total, kept.weight + one, accumulator.increment(kept.count))

    def join(self, a: Any, b: Any) -> Accumulator:
        total: Any = list(map(logical.plus, a.total, b.total))
        return Accumulator(total, a.weight + b.weight, b.count)

    def addends(self, kept: Any) -> Leaves:
        return kept.total

    def merge(self, kept: Any, sums: Leaves, weight: jax.Array, axes: Axes) -> Any:
        return Accumulator(sums, weight, kept.count)

    def finish(self, kept: Accumulator) -> Any:
        return accumulator.mean(kept)


class Sum(Mode):
    """Σ x, unweighted: counts as counts, and added up in 32 bits at least."""

    adds = True

    def init(self, leaves: Leaves, vary: Vary) -> Leaves:
        return [vary(jnp.zeros(x.shape, _sum_dtype(x.dtype)), x) for x in leaves]

    def step(self, kept: Any, leaves: Leaves, weight: Weight, zero: Zero) -> Leaves:
        pairs = zip(kept, _rounded(leaves, zero), strict=True)
        return [s + x.astype(s.dtype) for s, x in pairs]

    def join(self, a: Leaves, b: Leaves) -> Leaves:
        return list(map(logical.plus, a, b))

    def addends(self, kept: Leaves) -> Leaves:
        return kept

    def merge(self, kept: Any, sums: Leaves, weight: jax.Array, axes: Axes) -> Leaves:
        return sums


class Last(Mode):
    """The last micro-batch's; of several devices, the last device's."""

    def init(self, leaves: Leaves, vary: Vary) -> Leaves:
        return trees.blank(leaves)

    def step(self, kept: Any, leaves: Leaves, weight: Weight, zero: Zero) -> Leaves:
        return list(map(trees.strong, leaves))

    def merge(self, kept: Any, sums: Leaves, weight: jax.Array, axes: Axes) -> Leaves:
        is_last = jax.lax.axis_index(axes) == meshes.num_devices(axes) - 1

        def last(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                data = last(jax.random.key_data(x))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
            count = x.astype(_sum_dtype(x.dtype))
            here = jnp.where(is_last, count, -jnp.zeros_like(count))  # -0.0 + x is x
            return jax.lax.psum(here, axes).astype(x.dtype)

        return list(map(last, collectives.vary(kept, axes)))


class Stack(Mode):
    """Every micro-batch's, along a new axis 0; of several devices, in their order."""

    collects = True
    name = "stack"


class Extremum(Mode):
    """The largest or the smallest of all: of numbers that rows need of each other."""

    adds = True

    def __init__(self, fun: Any, across: Any) -> None:
        self.fun, self.across = fun, across

    def init(self, leaves: Leaves, vary: Vary) -> Any:
        return trees.blank(leaves), jnp.zeros([], jnp.int32)

    def step(self, kept: Any, leaves: Leaves, weight: Weight, zero: Zero) -> Any:
        return self.join(kept, (list(map(trees.strong, leaves)), jnp.int32(1)))

    def join(self, a: Any, b: Any) -> Any:
        (xs, m), (ys, n) = a, b
        new = [
            trees.like(jnp.where(m == 0, y, self.fun(x, y)), x)
            for x, y in zip(xs, ys, strict=True)
        ]
        return new, m + n

    def merge(self, kept: Any, sums: Leaves, weight: jax.Array, axes: Axes) -> Any:
        leaves, count = kept
        leaves = collectives.vary(leaves, axes)
        return [self.across(x, axes) for x in leaves], count

    def finish(self, kept: Any) -> Leaves:
        return kept[0]


# Those of the option `aux`, and two that only a window needs.
OPTIONS = ("mean", "sum", "last", "stack")
WAYS = {
    "mean": Mean(),
    "sum": Sum(),
    "last": Last(),
    "stack": Stack(),
    "max": Extremum(jnp.maximum, jax.lax.pmax),
    "min": Extremum(jnp.minimum, jax.lax.pmin),
}


def kinds(modes: Sequence[str]) -> list[Mode]:
    """The modes that there are, in the order in which they come first."""
    return [WAYS[name] for name in dict.fromkeys(modes)]


# -- The option ------------------------------------------------------------------------


def check_option(option: Any) -> None:
    """Raises unless the option `aux` is a tree of modes."""
    for name in jax.tree.leaves(option, is_leaf=lambda x: x is None):
        if not isinstance(name, str) or name not in OPTIONS:
            raise ValueError(
                f"aux must be one of {', '.join(map(repr, OPTIONS))}, or a tree of "
                "those that is a prefix of the aux tree, but it holds "
                f"{name!r}. Pass those."
            )


def of_leaves(option: Any, aux: Any, rows: int, grown: Callable[[], Any]) -> list[str]:
    """The mode of each leaf of `aux`.

    Args:
      option: modes, a prefix of the tree of `aux`.
      aux: the types of the aux of one micro-batch.
      rows: how many rows a micro-batch has.
      grown: returns the types of the aux of twice as many. It is called only if a leaf
        that is added up may have rows.
    """
    try:
        modes = jax.tree.leaves(jax.tree.broadcast(option, aux))
    except ValueError as error:
        raise ValueError(
            f"aux must be a tree that is a prefix of the aux tree, but it is {option!r}"
            f" and fun returned {jax.tree.structure(aux)}: {error}. Name the same "
            "keys, or use one word for all of them."
        ) from None
    longer: Any = None
    for i, ((name, x), mode) in enumerate(zip(named_leaves(aux), modes, strict=True)):
        if not WAYS[mode].adds:
            continue
        if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == jnp.bool_):
            raise TypeError(
                f'aux="{mode}" must have numbers to work on, but {name} of the '
                f'aux has dtype {x.dtype.name}. Use "last" or "stack" there.'
            )
        if rows in x.shape:
            longer = longer or jax.tree.leaves(grown())
            if longer[i].shape != x.shape:
                raise ValueError(
                    f'aux="{mode}" must not add up different examples, but {name} of '
                    f"the aux has shape {x.shape} for {rows} rows, one for each of "
                    'them. Use "stack" to keep those of every micro-batch.'
                )
    return modes


def by_mode(leaves: Sequence[Any], modes: Sequence[str]) -> list[Leaves]:
    """The leaves of each mode, in the order of `kinds`."""
    pairs = list(zip(leaves, modes, strict=True))
    return [[x for x, mode in pairs if mode == name] for name in dict.fromkeys(modes)]


def in_order(groups: Sequence[Leaves], modes: Sequence[str]) -> Leaves:
    """The reverse of `by_mode`."""
    remaining = dict(zip(dict.fromkeys(modes), map(iter, groups), strict=True))
    return [next(remaining[mode]) for mode in modes]


# -- Leaves ----------------------------------------------------------------------------


def _inexact(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _rounded(leaves: Leaves, zero: Zero) -> Leaves:
    """The leaves, rounded before they are added, if there is a zero for that."""
    if zero is None:
        return leaves
    return [accumulator.rounded(jnp.asarray(x), zero) for x in leaves]


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Where "sum" adds up: counts as counts, and never in less than 32 bits."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return accumulator.accumulator_dtype(np.zeros([], dtype), np.dtype(np.float32))
    if dtype == jnp.bool_:
        return np.dtype(np.int32)
    kind = np.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int32
    return np.promote_types(dtype, kind)
