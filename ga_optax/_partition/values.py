"""Values of the whole batch, and how a micro-batch holds them."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._passes import read
from ga_optax._passes.primitives import entry_of


class Rows(NamedTuple):
    """A dimension that is split over micro-batches.

    Globally it is `[segments, k, rest]`, and a micro-batch holds `[segments, rest]`.
    There are several segments after `concatenate([x, y])`, or in time-major data. Rows
    that k does not divide, as after `x[1:]`, are whole.
    """

    dim: int
    segments: int = 1

    def at(self, dim: int) -> "Rows":
        return self._replace(dim=dim)


# All micro-batches hold all of it; or it is the sum of what they hold.
WHOLE, PARTIAL = "whole", "partial"
Layout = str | Rows


class Uneven(NamedTuple):
    """The size of micro-batches that do not divide the batch: the last is smaller.

    Attributes:
      total: how many rows the batch has.
      rows: how many of them one of these micro-batches has.
      before: how many micro-batches come before these: 0, or all but the last.
    """

    total: int
    rows: int
    before: int = 0


Parts = int | Uneven  # how many micro-batches there are, if they are alike


class RowsMeet(Exception):  # noqa: N818
    """A collective where none can be: in a loop, a branch or a rule of the user's."""


@dataclasses.dataclass(eq=False)
class Value:
    """A value of the program of the whole batch.

    Attributes:
      x: the part of the value that a micro-batch holds; parts of a sum may have more
        digits than the sum.
      aval: the type in the whole batch.
      layout: how `x` makes the whole.
      level: the number of collectives on the longest way from the parameters.
      params: True if the value depends on the parameters.
      smooth: True if it may have a derivative with respect to the parameters.
      scaled: True for a sum times, or over, a number that may be 0 or infinite. Parts
        may add up to NaN then, although the whole is no NaN.
      made: the equation that computes the value, the operands, the number of the
        result.
      copies: the value in other layouts, as far as they were needed.
      sources: by dimension, the value whose rows these are, see `moves`.
    """

    x: Any
    aval: Any
    layout: Layout = WHOLE
    level: int = 0
    params: bool = False
    smooth: bool = False
    scaled: bool = False
    made: tuple[core.JaxprEqn, list["Value"], int] | None = None
    copies: dict[Any, Any] = dataclasses.field(default_factory=dict)
    sources: dict[int, Any] = dataclasses.field(default_factory=dict)

    def with_layout(self, x: Any, layout: Layout) -> "Value":
        """The same value, of which micro-batches hold another part."""
        return dataclasses.replace(self, x=x, layout=layout, copies={})

    def alone(self, x: Any, layout: Layout | None = None, aval: Any = None) -> "Value":
        """The value in another program, which does not know how it was made."""
        layout, aval = layout or self.layout, aval or self.aval
        return Value(x, aval, layout, self.level, self.params, self.smooth)

    @property
    def rows(self) -> Any:  # Rows, or None
        return self.layout if isinstance(self.layout, Rows) else None

    @property
    def dim(self) -> Any:
        return self.layout.dim if isinstance(self.layout, Rows) else None

    @functools.cached_property
    def origin(self) -> tuple[int, int] | None:
        """Along which axis it has rows, and how many a segment has.

        They may be gathered since, and shifted along the same axis.
        """
        if self.rows:
            return self.dim, self.shape[self.dim] // self.rows.segments
        if self.made is None or not entry_of(self.made[0]).shifts:
            return None
        return next(filter(None, (v.origin for v in self.made[1])), None)

    @property
    def is_whole(self) -> bool:
        return self.layout == WHOLE

    @property
    def is_partial(self) -> bool:
        return self.layout == PARTIAL

    @property
    def is_wide(self) -> bool:
        """True for a sum that is rounded when it is complete: its parts are not."""
        return self.is_partial and self.x.dtype != self.aval.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def size(self) -> int:
        """The number of numbers that all micro-batches hold together."""
        return read.numbers(self.shape)


Result = tuple[Any, Layout]  # what a rule returns for each result: array and layout
Results = list[Result] | None  # None if a rule does not apply


def unit(parts: Parts) -> int:
    """The number that divides the length of each segment of rows."""
    return parts.total if isinstance(parts, Uneven) else parts


def length_of(n: int, parts: Parts) -> int:
    """The count of those numbers, of n along rows, that a micro-batch holds."""
    return n * parts.rows // parts.total if isinstance(parts, Uneven) else n // parts


def start_of(n: int, index: Any, parts: Parts) -> Any:
    """The first of them in a segment of n numbers."""
    length = length_of(n, parts)
    start = jax.lax.mul(index.astype(jnp.int32), np.int32(length))
    if isinstance(parts, Uneven):  # the last is the end of what the others leave
        skipped = n - length * (parts.before + 1) if parts.before else 0
        start = jax.lax.add(start, np.int32(skipped))
    return start


def can_split(shape: tuple[int, ...], rows: Rows, parts: Parts) -> bool:
    """True if an array can have such rows."""
    n = shape[rows.dim]
    return n > 0 and n % (rows.segments * unit(parts)) == 0


def local_shape(
    shape: tuple[int, ...], layout: Layout, parts: Parts
) -> tuple[int, ...]:
    """The shape of what a micro-batch holds."""
    if not isinstance(layout, Rows):
        return tuple(shape)
    d = layout.dim
    return (*shape[:d], length_of(shape[d], parts), *shape[d + 1 :])


def rows_of(x: Any, rows: Rows, index: Any, parts: Parts) -> Any:
    """The rows that a micro-batch has of an array that all hold."""
    d, shape = rows.dim, jnp.shape(x)
    if isinstance(parts, Uneven):
        n = shape[d] // rows.segments
        x = jnp.reshape(x, (*shape[:d], rows.segments, n, *shape[d + 1 :]))
        start, length = start_of(n, index, parts), length_of(n, parts)
        x = jax.lax.dynamic_slice_in_dim(x, start, length, d + 1)
        return jnp.reshape(x, local_shape(shape, rows, parts))
    rest = shape[d] // (rows.segments * parts)
    x = jnp.reshape(x, (*shape[:d], rows.segments, parts, rest, *shape[d + 1 :]))
    x = jax.lax.dynamic_index_in_dim(x, index, d + 1, keepdims=False)
    return jnp.reshape(x, local_shape(shape, Rows(d), parts))


def varies(aval: Any) -> frozenset[Any]:
    """Over which axes devices hold different values, where a mesh keeps track."""
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else frozenset()


def varying(xs: Sequence[Any], axes: Iterable[Any] = ()) -> list[Any]:
    """Operands that vary over some axes, and over all axes of any operand."""
    each = [varies(jax.typeof(x)) for x in xs]
    every = frozenset(axes).union(*each)
    return [
        jax.lax.pcast(x, tuple(every - its), to="varying") if its != every else x
        for x, its in zip(xs, each, strict=True)
    ]


def type_here(aval: Any, shape: tuple[int, ...], like: Any) -> Any:
    """A type of another shape, which varies over devices as it or `like` does.

    Along explicit axes it is sharded as they are, for JAX compares types.
    """
    here = jax.typeof(like) if isinstance(like, jax.Array) else like
    for of in (here, aval):
        if of is not None and varies(of):
            return of.update(shape=shape, dtype=aval.dtype, weak_type=False)
    sharding = getattr(aval if here is None else here, "sharding", None)
    told = sharding and not sharding.mesh.empty and len(sharding.spec) == len(shape)
    sharding = sharding if told else None
    if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
        return aval.update(shape=shape, sharding=sharding, weak_type=False)
    return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=sharding)


def types_of(equation: core.JaxprEqn) -> list[Any]:
    """The types of its results, which have a shape and a dtype."""
    return [x.aval for x in equation.outvars]
