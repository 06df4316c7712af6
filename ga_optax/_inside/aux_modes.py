"""How the aux of the micro-batches is put together: one mode for each leaf.

A mode is a class, and works on all leaves of that mode at once. The loss is one more
leaf of mode "mean". A new mode is one more class in `MODES`. "auto" is none: it chooses
one for each leaf, the one that gives what the undivided batch would have given.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ga_optax import accumulator
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives, logical, meshes
from ga_optax._devices.meshes import Axes
from ga_optax.accumulator import Accumulator

Leaves = list[Any]
Vary = Callable[[Any, Any], Any]
Weight = jax.Array | None
Zero = jax.Array | None


class Mode:
    """What every mode can be asked; `kept` is what it carries through the loop.

    The defaults are those of a mode that carries nothing, and collects.

    Attributes:
      adds: whether it adds leaves up. They have to be numbers, which the loop rounds
        before, and not those of different examples.
      collects: whether it keeps the leaves of every micro-batch, along a new axis 0,
        which the loop does. What it has `kept` after the loop is those.
    """

    adds = False
    collects = False

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
        terms = [_inexact(x) for x in blank(leaves)]
        kept: Any = accumulator.init(terms)
        total = [
            vary(-zero, term) for zero, term in zip(kept.total, terms, strict=True)
        ]
        return kept._replace(total=total, weight=vary(kept.weight, kept.weight))

    def step(self, kept: Any, leaves: Leaves, weight: Weight, zero: Zero) -> Any:
        terms = list(map(_inexact, leaves))
        one = jnp.ones_like(kept.weight) if weight is None else weight
        if weight is not None:
            dtypes = [t.dtype for t in kept.total]
            pairs = zip(terms, dtypes, strict=True)
            terms = [accumulator.weighted(x, weight, d, zero) for x, d in pairs]
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
    """Σ x, unweighted: counts as counts, and never in less than 32 bits."""

    adds = True

    def init(self, leaves: Leaves, vary: Vary) -> Leaves:
        return [vary(jnp.zeros(x.shape, _sum_dtype(x.dtype)), x) for x in leaves]

    def step(self, kept: Any, leaves: Leaves, weight: Weight, zero: Zero) -> Leaves:
        return [s + x.astype(s.dtype) for s, x in zip(kept, leaves, strict=True)]

    def join(self, a: Leaves, b: Leaves) -> Leaves:
        return list(map(logical.plus, a, b))

    def addends(self, kept: Leaves) -> Leaves:
        return kept

    def merge(self, kept: Any, sums: Leaves, weight: jax.Array, axes: Axes) -> Leaves:
        return sums


class Last(Mode):
    """The last micro-batch's; of several devices, the last device's."""

    def init(self, leaves: Leaves, vary: Vary) -> Leaves:
        return blank(leaves)

    def step(self, kept: Any, leaves: Leaves, weight: Weight, zero: Zero) -> Leaves:
        return list(map(strong, leaves))

    def merge(self, kept: Any, sums: Leaves, weight: jax.Array, axes: Axes) -> Leaves:
        is_last = jax.lax.axis_index(axes) == meshes.num_devices(axes, None) - 1

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


class Concat(Stack):
    """As "stack", and then joined along the axis of the leaf that has the rows."""


MODES = {
    "mean": Mean(),
    "sum": Sum(),
    "last": Last(),
    "stack": Stack(),
    "concat": Concat(),
}


# -- The option ------------------------------------------------------------------------


def check_option(option: Any) -> None:
    """Raises unless the option `aux` is a tree of names of modes."""
    names = ("auto", *MODES)
    for name in jax.tree.leaves(option, is_leaf=lambda x: x is None):
        if not isinstance(name, str) or name not in names:
            raise ValueError(
                f"aux must be one of {', '.join(map(repr, names))}, or a tree of those "
                f"that is a prefix of the aux tree, but it holds {name!r}. Pass those."
            )


def resolved(
    option: Any, aux: Any, rows: int, factor: int, grown: Callable[[], Any]
) -> list[tuple[str, int]]:
    """The mode of each leaf of `aux`, and the axis along which "concat" joins it.

    Args:
      option: names of modes, a prefix of the tree of `aux`.
      aux: the types of the aux of one micro-batch.
      rows: how many rows a micro-batch has.
      factor: how many times as many there are in `grown`; 1 if it is the only one.
      grown: returns the types of the aux of so many rows. It is called only if a leaf
        may have rows.
    """
    try:
        modes = jax.tree.leaves(jax.tree.broadcast(option, aux))
    except ValueError as error:
        raise ValueError(
            f"aux must be a tree that is a prefix of the aux tree, but it is {option!r}"
            f" and fun returned {jax.tree.structure(aux)}: {error}. Name the same "
            "keys, or use one word for all of them."
        ) from None
    found = list(zip(named_leaves(aux), modes, strict=True))
    unclear = [x.ndim > 0 and mode not in ("last", "stack") for (_, x), mode in found]
    axes: list[Any] = [() if factor == 1 or not x else None for x in unclear]
    cause = None
    if None in axes:
        try:
            pairs = zip(jax.tree.leaves(aux), jax.tree.leaves(grown()), strict=True)
            axes = [_axes_of_rows(x.shape, y.shape, factor) for x, y in pairs]
        except Exception as error:  # whatever fun raises
            cause = error
    result = []
    for ((name, leaf), mode), its_axes in zip(found, axes, strict=True):
        if factor == 1 and leaf.ndim and mode in ("auto", "concat"):
            mode = "last"  # joined, one part is itself
        result.append(_choice(mode, name, leaf, its_axes, rows, cause))
    return result


def _axes_of_rows(
    shape: tuple[int, ...], grown: tuple[int, ...], factor: int
) -> tuple[int, ...] | None:
    """The axis that is `factor` times as long in `grown`; None if that is not all."""
    if len(shape) != len(grown):
        return None
    axes = tuple(i for i, n in enumerate(shape) if grown[i] != n)
    expected = tuple(factor * n if i in axes else n for i, n in enumerate(shape))
    return axes if len(axes) < 2 and grown == expected else None


def _choice(
    mode: str,
    name: str,
    leaf: Any,
    axes: tuple[int, ...] | None,
    rows: int,
    cause: Exception | None,
) -> tuple[str, int]:
    """What `resolved` returns for one leaf; `axes` are those that have the rows."""
    asked, shape, dtype = mode, leaf.shape, leaf.dtype
    came = f"{name} of the aux has shape {shape} for {rows} rows"
    if axes is None and mode == "auto":
        raise ValueError(
            f'aux="auto" must know which axis of a leaf has the rows, but {came}, and '
            "for more rows another one or none. Name what to do with it in aux: "
            '"concat", "stack", "last" or "mean".'
        ) from cause
    if axes is None and mode == "concat":
        axes = tuple(i for i, n in enumerate(shape) if n == rows)
    if mode == "concat" and len(axes or ()) != 1:
        raise ValueError(
            'aux="concat" must have a leaf with one axis that has the rows, but '
            f'{came}. Use "stack", "last", "sum" or "mean" there.'
        ) from cause
    if mode == "auto" and dtype == jnp.bool_ and not axes:
        raise TypeError(
            f'aux="auto" must have numbers to work on, but {name} of the aux has dtype '
            'bool. Name what to do with it in aux: "sum" counts the micro-batches in '
            'which it holds, "last" and "stack" keep it.'
        )
    if mode == "auto":
        counts = jnp.issubdtype(dtype, jnp.integer)
        mode = "concat" if axes else "sum" if counts else "mean"
    if MODES[mode].adds:
        if not (jnp.issubdtype(dtype, np.number) or dtype == jnp.bool_):
            raise TypeError(
                f'aux="{asked}" must have numbers to work on, but {name} of the aux '
                f'has dtype {dtype.name}. Use "last" or "stack" there.'
            )
        if axes:
            raise ValueError(
                f'aux="{mode}" must not add up different examples, but {came}, one for '
                'each of them. Use "concat" to join the micro-batches along axis '
                f'{axes[0]}, or "stack".'
            )
    return mode, axes[0] if axes and mode == "concat" else 0


def by_mode(leaves: Sequence[Any], modes: Sequence[str]) -> list[Leaves]:
    """The leaves of each mode, in the order of `MODES`."""
    pairs = list(zip(leaves, modes, strict=True))
    return [[x for x, mode in pairs if mode == name] for name in MODES]


def in_order(groups: Sequence[Leaves], modes: Sequence[str]) -> Leaves:
    """The reverse of `by_mode`."""
    remaining = dict(zip(MODES, map(iter, groups), strict=True))
    return [next(remaining[mode]) for mode in modes]


# -- Leaves ----------------------------------------------------------------------------


def blank(types: Sequence[Any]) -> Leaves:
    """Zeros of these types: placed, and varying over devices, as they say."""
    return [like(collectives.zeros(x), x) for x in types]


def like(x: jax.Array, other: Any) -> jax.Array:
    """`x`, marked as varying over devices as `other` does."""
    return collectives.vary(x, tuple(meshes.varying(other)))


def strong(x: ArrayLike) -> jax.Array:
    """`x` without a weak type, which the carry of a loop has to keep."""
    x = jnp.asarray(x)
    weak = jax.typeof(x).weak_type  # an array of PRNG keys has no such attribute
    return jax.lax.convert_element_type(x, x.dtype) if weak else x


def _inexact(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Where "sum" adds up: counts as counts, and never in less than 32 bits."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return accumulator.accumulator_dtype(np.zeros([], dtype), np.dtype(np.float32))
    if dtype == jnp.bool_:
        return np.dtype(np.int32)
    kind = np.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int32
    return np.promote_types(dtype, kind)
