"""Random numbers: each micro-batch computes its own part of what the whole batch draws.

Threefry computes number i of an array from the key and i alone. So a part of an array
is drawn from the indices of the part, with the bits of the whole. Any other generator
draws for each micro-batch from a key of its own: another draw of the same distribution.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.random import threefry2x32_p

from ga_optax._partition.notes import Drawn, note_of
from ga_optax._partition.values import (
    Result,
    Rows,
    Value,
    length_of,
    local_shape,
    start_of,
    types_of,
)
from ga_optax._partition.writer import Same, Writer
from ga_optax._passes import primitives, read

_FAR = 2**31  # folded into a key: far from the small numbers that users fold in


def recut_bits(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The rows of random bits; None where that is not known."""
    [v], width = vs, e.params["bit_width"]
    if not primitives.is_threefry(v.aval):
        return None if w.axis.draws_whole else _of_own_key(w, e, v, rows)
    if v.shape:
        return _of_each_key(w, e, v, rows)
    if (drawn := _drawn(w, v, e.params["shape"], rows)) is None:
        return None
    high, low = drawn
    dtype = types_of(e)[0].dtype
    if width == 64:
        high = jax.lax.shift_left(high.astype(dtype), jnp.full_like(high, 32, dtype))
        return high | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _of_own_key(w: Writer, e: core.JaxprEqn, v: Value, rows: Rows) -> Any:
    """The rows of bits, drawn from the key with the micro-batch's index in it."""
    shape = types_of(e)[0].shape
    note = note_of(e, read.numbers(shape), read.name_of(e))
    w.records.notes.append(Drawn(*note, _draw(e), rows))
    far = w.index.astype(jnp.uint32) + np.uint32(_FAR)
    fold = functools.partial(jax.random.fold_in, data=far)
    for _ in v.shape:
        fold = jax.vmap(fold)
    keys = w.part(v, rows) if rows.dim < len(v.shape) else w.whole(v)
    part = local_shape(shape, rows, w.axis.parts)
    return w.run(e, [fold(keys)], shape=part[len(v.shape) :])


def _draw(e: core.JaxprEqn) -> Any:
    return types_of(e)[0].shape, e.params["bit_width"]


def differ(notes: Sequence[Any], jaxpr: core.Jaxpr) -> bool:
    """True if the rows of a draw of micro-batches are read by others, or whole."""
    reads = {(x.draw, x.rows) for x in notes if isinstance(x, Drawn)}
    draws = {draw for draw, _ in reads}
    every = (e for e in read.equations(jaxpr) if e.primitive.name == "random_bits")
    return len(draws) < len(reads) or not draws.isdisjoint(map(_draw, every))


def recut_split(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The rows of keys that are split off a key: as bits, two words for each."""
    [v] = vs
    if v.shape:
        return _of_each_key(w, e, v, rows)
    drawn = _drawn(w, v, e.params["shape"], rows)
    if drawn is None:
        return None
    return jax.random.wrap_key_data(jnp.stack(drawn, -1), impl="threefry2x32")


def _of_each_key(w: Writer, e: core.JaxprEqn, v: Value, rows: Rows) -> Any:
    """The draw of each key by itself."""
    is_own = rows.dim < len(v.shape) and primitives.is_threefry(v.aval)
    return w.run(e, [w.part(v, rows)]) if is_own else None


def _drawn(w: Writer, v: Value, shape: tuple[int, ...], rows: Rows) -> Any:
    """A pair of words for each number of the rows of a shape, from one key."""
    partitionable = getattr(jax.config, "jax_threefry_partitionable", False)
    if not v.is_whole or not (partitionable and primitives.is_threefry(v.aval)):
        return None
    if math.prod(shape) >= 2**32:
        return None
    key = "count", shape, rows, Same(w.index)
    count = w.once(key, lambda: _count(w, shape, rows))
    k1, k2 = jax.random.key_data(v.x)
    zeros = jax.lax.bitwise_xor(count, count)  # batched as it is, under jax.vmap
    return threefry2x32_p.bind(k1, k2, zeros, count)


def _count(w: Writer, shape: tuple[int, ...], rows: Rows) -> jax.Array:
    """For each element of a part, the index of the element in the whole, flattened."""
    count = jnp.zeros(local_shape(shape, rows, w.axis.parts), jnp.uint32)
    stride = 1
    for d in reversed(range(len(shape))):
        at = positions(w, shape, d, rows).astype(jnp.uint32)
        count = count + at * jnp.asarray(stride, jnp.uint32)
        stride *= shape[d]
    return count


def positions(w: Writer, shape: tuple[int, ...], d: int, rows: Rows) -> jax.Array:
    """The index along axis `d`, in the whole batch, of the numbers of a part."""
    local = local_shape(shape, rows, w.axis.parts)
    here = jax.lax.broadcasted_iota(jnp.int32, local, d)
    if d != rows.dim:
        return here
    length = shape[d] // rows.segments
    rest = length_of(length, w.axis.parts)
    at = jax.lax.add(here, start_of(length, w.index, w.axis.parts))
    if rows.segments > 1:  # those of others are in between
        between = jax.lax.div(here, jax.lax.full_like(here, rest))
        at = at + between * (length - rest)
    return at


def random_bits(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result] | None:
    """Bits from a key for each row."""
    [v] = vs
    drawn = recut_bits(w, e, vs, v.rows)
    return None if drawn is None else [(drawn, v.rows)]
