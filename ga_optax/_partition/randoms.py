"""Random numbers: each micro-batch computes its own part of what the whole batch draws.

A counter-based generator has number i of an array from the key and i alone. So a part
of an array is drawn from the indices of the part, with the bits of the whole.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend import random as generators

from ga_optax._partition.values import Result, Rows, Value, local_shape, types_of
from ga_optax._partition.writer import Writer


def recut_bits(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """The rows of random bits that come from one key; None where that is not known."""
    [v] = vs
    shape, width = e.params["shape"], e.params["bit_width"]
    partitionable = getattr(jax.config, "jax_threefry_partitionable", False)
    if not v.is_whole or v.shape or not (partitionable and _is_threefry(v)):
        return None
    if math.prod(shape) >= 2**32:
        return None
    count = jnp.zeros(local_shape(shape, rows, w.axis.size), jnp.uint32)
    stride = 1
    for d in reversed(range(len(shape))):
        at = positions(w, shape, d, rows).astype(jnp.uint32)
        count = count + at * jnp.asarray(stride, jnp.uint32)
        stride *= shape[d]
    k1, k2 = jax.random.key_data(v.x)
    zeros = count ^ count  # batched as it is, under jax.vmap
    high, low = generators.threefry2x32_p.bind(k1, k2, zeros, count)
    dtype = types_of(e)[0].dtype
    if width == 64:
        high = jax.lax.shift_left(high.astype(dtype), jnp.full_like(count, 32, dtype))
        return high | low.astype(dtype)
    return (high ^ low).astype(dtype)


def _is_threefry(v: Value) -> bool:
    """Whether keys are those of `threefry2x32`, which draws for each key by itself.

    Under `jax.vmap` the others draw for all rows from the key of the first.
    """
    return str(jax.random.key_impl(v.x)) == "threefry2x32"


def positions(w: Writer, shape: tuple[int, ...], d: int, rows: Rows) -> jax.Array:
    """The index along axis `d`, in the whole batch, of the numbers of a part."""
    local = local_shape(shape, rows, w.axis.size)
    here = jax.lax.broadcasted_iota(jnp.int32, local, d)
    if d != rows.dim:
        return here
    length = (shape[d] + rows.extra) // rows.segments
    rest = length // w.axis.size
    segment, within = here // rest, here % rest
    at = segment * length + w.index.astype(jnp.int32) * rest + within
    return jnp.minimum(at, shape[d] - 1) if rows.extra else at


def random_bits(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result] | None:
    """Bits from a key for each row."""
    [v] = vs
    if not _is_threefry(v):
        return None
    return [(w.run(e, [v.x]), v.rows)]


def keys(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result] | None:
    """Keys from data for each row, and the reverse."""
    v = next(v for v in vs if v.rows)
    wraps = e.primitive.name == "random_wrap" and v.dim == len(v.shape) - 1
    if wraps or (e.primitive.name == "random_seed" and v.dim >= len(v.shape)):
        return None
    derives = e.primitive.name in ("random_fold_in", "random_split")
    if derives and not _is_threefry(vs[0]):
        return None
    xs = [w.part(u, v.rows) if u.shape else w.whole(u) for u in vs]
    if any(u.shape and u.shape != v.shape for u in vs):
        return None
    return [(w.run(e, xs), v.rows)]
