"""How the aux of the micro-batches is put together: one mode for each leaf.

A mode is a class, and works on all leaves of that mode at once. The loss is one more
leaf of mode "mean". A new mode is one more class in `MODES`. "auto" is none: it chooses
one for each leaf, the one that gives what the undivided batch would have given.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives, logical, meshes
from ga_optax._devices.meshes import Axes
from ga_optax._inside import trees
from ga_optax.accumulator import Accumulator

Leaves = list[Any]
Vary = Callable[[Any, Any], Any]
Weight = jax.Array | None
Zero = jax.Array | None
Reducer = Callable[[Any, Any], Any]
Name = str | Reducer  # of a mode, or a function of two


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
    name = "stack"


class Concat(Stack):
    """As "stack", and then joined along the axis of the leaf that has the rows."""

    name = "concat"


class Fold(Mode):
    """`fun(so far, x)`, from the first micro-batch on; unweighted.

    Of several devices: `across`, or `fun` in their order.
    """

    adds = True

    def __init__(self, fun: Reducer, across: Any = None) -> None:
        self.fun, self.across = fun, across

    def init(self, leaves: Leaves, vary: Vary) -> Any:
        return trees.blank(leaves), jnp.zeros([], jnp.int32)

    def step(self, kept: Any, leaves: Leaves, weight: Weight, zero: Zero) -> Any:
        return self.join(kept, (list(map(trees.strong, leaves)), jnp.int32(1)))

    def join(self, a: Any, b: Any) -> Any:
        (xs, m), (ys, n) = a, b
        new = [
            trees.like(jnp.where(m == 0, y, jnp.where(n == 0, x, self.fun(x, y))), x)
            for x, y in zip(xs, ys, strict=True)
        ]
        return new, m + n

    def merge(self, kept: Any, sums: Leaves, weight: jax.Array, axes: Axes) -> Any:
        leaves, count = kept
        leaves = collectives.vary(leaves, axes)
        if self.across is not None:
            return [self.across(x, axes) for x in leaves], count
        gather = functools.partial(jax.lax.all_gather, axis_name=axes, to="invarying")
        number = meshes.num_devices(axes, None)
        each = [[y[i] for i in range(number)] for y in map(gather, leaves)]
        return [functools.reduce(self.fun, parts) for parts in each], count

    def finish(self, kept: Any) -> Leaves:
        return kept[0]


MODES = {
    "mean": Mean(),
    "sum": Sum(),
    "last": Last(),
    "stack": Stack(),
    "concat": Concat(),
    "max": Fold(jnp.maximum, jax.lax.pmax),
    "min": Fold(jnp.minimum, jax.lax.pmin),
}


def find(mode: Name) -> Mode:
    """The mode of a name, or of a function of two."""
    return MODES[mode] if isinstance(mode, str) else Fold(mode)


def kinds(modes: Sequence[Name]) -> list[Mode]:
    """The modes that there are, in the order in which they come first."""
    return list(map(find, dict.fromkeys(modes)))


# -- The option ------------------------------------------------------------------------


def check_option(option: Any) -> None:
    """Raises unless the option `aux` is a tree of modes."""
    names = ("auto", *MODES)
    for name in jax.tree.leaves(option, is_leaf=lambda x: x is None):
        if not callable(name) and (not isinstance(name, str) or name not in names):
            raise ValueError(
                f"aux must be one of {', '.join(map(repr, names))}, a function of two "
                "leaves, or a tree of those that is a prefix of the aux tree, but it "
                f"holds {name!r}. Pass those."
            )


def resolved(
    option: Any, aux: Any, rows: int, factor: int, grown: Callable[[], Any]
) -> list[tuple[Name, int]]:
    """The mode of each leaf of `aux`, and the axis along which "concat" joins it.

    Args:
      option: modes, a prefix of the tree of `aux`.
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
        result.append(_choice(mode, _Leaf(name, leaf, rows, its_axes, cause)))
    return result


class _Leaf(NamedTuple):
    """What is known of a leaf of the aux.

    Attributes:
      name: how messages name it.
      type: its type for one micro-batch.
      rows: how many rows that has.
      axes: those of its axes that have the rows; None if that is not clear.
      cause: the error for which it is not clear.
    """

    name: str
    type: Any
    rows: int
    axes: tuple[int, ...] | None
    cause: Exception | None

    @property
    def came(self) -> str:
        shape = self.type.shape
        return f"{self.name} of the aux has shape {shape} for {self.rows} rows"


def _axes_of_rows(
    shape: tuple[int, ...], grown: tuple[int, ...], factor: int
) -> tuple[int, ...] | None:
    """The axis that is `factor` times as long in `grown`; None if that is not all."""
    if len(shape) != len(grown):
        return None
    axes = tuple(i for i, n in enumerate(shape) if grown[i] != n)
    expected = tuple(factor * n if i in axes else n for i, n in enumerate(shape))
    return axes if len(axes) < 2 and grown == expected else None


def _choice(asked: Name, leaf: _Leaf) -> tuple[Name, int]:
    """What `resolved` returns for one leaf."""
    if not isinstance(asked, str):
        _check_fold(asked, leaf)
        return asked, 0
    mode, axes = asked, leaf.axes
    if mode == "auto":
        mode = _automatic(leaf)
    if mode == "concat":
        if axes is None:
            axes = tuple(i for i, n in enumerate(leaf.type.shape) if n == leaf.rows)
        if len(axes) != 1:
            raise ValueError(
                'aux="concat" must have a leaf with one axis that has the rows, but '
                f'{leaf.came}. Use "stack", "last", "sum" or "mean" there.'
            ) from leaf.cause
        return mode, axes[0]
    if find(mode).adds:
        dtype = leaf.type.dtype
        if not (jnp.issubdtype(dtype, np.number) or dtype == jnp.bool_):
            raise TypeError(
                f'aux="{asked}" must have numbers to work on, but {leaf.name} of the '
                f'aux has dtype {dtype.name}. Use "last" or "stack" there.'
            )
        _check_no_rows(f'aux="{mode}"', leaf)
    return mode, 0


def _automatic(leaf: _Leaf) -> str:
    """What gives the leaf that the undivided batch would have given."""
    if leaf.axes is None:
        raise ValueError(
            'aux="auto" must know which axis of a leaf has the rows, but '
            f"{leaf.came}, and for more rows another one or none. Name what to do with "
            'it in aux: "concat", "stack", "last" or "mean".'
        ) from leaf.cause
    if leaf.type.dtype == jnp.bool_ and not leaf.axes:
        raise TypeError(
            'aux="auto" must have numbers to work on, but '
            f"{leaf.name} of the aux has dtype bool. Name what to do with it in aux: "
            '"sum" counts the micro-batches in which it holds, "last" and "stack" '
            "keep it."
        )
    counts = jnp.issubdtype(leaf.type.dtype, jnp.integer)
    return "concat" if leaf.axes else "sum" if counts else "mean"


def _check_no_rows(mode: str, leaf: _Leaf) -> None:
    if leaf.axes:
        raise ValueError(
            f"{mode} must not add up different examples, but {leaf.came}, one for each "
            'of them. Use "concat" to join the micro-batches along axis '
            f'{leaf.axes[0]}, or "stack".'
        )


def _check_fold(fun: Reducer, leaf: _Leaf) -> None:
    """Raises unless a function of two leaves returns one like them."""
    _check_no_rows("A function in aux", leaf)
    like = jax.ShapeDtypeStruct(leaf.type.shape, leaf.type.dtype)
    out = jax.eval_shape(fun, like, like)
    if getattr(out, "shape", None) != like.shape or out.dtype != like.dtype:
        raise TypeError(
            f"A function in aux must return a leaf like the two that it takes, but for "
            f"{leaf.name}, of shape {like.shape} and dtype {like.dtype.name}, it "
            f"returned {out}. Cast its result, or use another mode."
        )


def by_mode(leaves: Sequence[Any], modes: Sequence[Name]) -> list[Leaves]:
    """The leaves of each mode, in the order of `kinds`."""
    pairs = list(zip(leaves, modes, strict=True))
    return [[x for x, mode in pairs if mode == name] for name in dict.fromkeys(modes)]


def in_order(groups: Sequence[Leaves], modes: Sequence[Name]) -> Leaves:
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
