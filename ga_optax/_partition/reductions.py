"""Primitives that reduce or scan along axes: here first, then over micro-batches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from ga_optax._partition import columns, factors
from ga_optax._partition.made import unmoved
from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Result,
    Results,
    Value,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes.read import is_inexact


def compared(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Compares values that may be computed in different passes.

    Computed again, a value may round otherwise, and no row would equal an extremum of
    the rows. A comparison with the extremum of the operand itself, as in JAX's
    derivative of a maximum, says for each micro-batch whether it attains the extremum,
    and compares only within the micro-batch. The operand of another comparison whose
    other operand is known only later is stored.
    """
    forbidden = w.scope.forbids_collectives
    if found := None if forbidden else _own_extremum(e, vs):
        v, extremum = found
        w.meet(v)
        return [(_attaining_all(w, extremum, v.x), v.layout)]
    last = max(v.level for v in vs)
    # Levels are counted from the parameters, and any function may have none.
    later = not any(v.params for v in vs) and any(map(_is_of_rows, vs))
    for v in vs:
        behind = v.level < last if v.params else later and v.made is not None
        if behind and v.rows and is_inexact(v.aval) and not forbidden:
            v.x = checkpoint_name(v.x, w.axis.name)
    return factors.forward(w, e, vs)


def _own_extremum(
    e: core.JaxprEqn, vs: list[Value]
) -> tuple[Value, core.JaxprEqn] | None:
    """The operand of `eq` whose extremum over all rows is the other operand.

    Each row must be compared with the extremum along the axes over which it was taken.
    """
    if e.primitive.name != "eq":
        return None
    for v, other in (vs, vs[::-1]):
        found, axes = unmoved(other)
        if found.made is None or found.made[0].primitive.name not in _EXTREMA:
            continue
        extremum, [of], _ = found.made
        gone = extremum.params["axes"]
        kept = [d for d in range(len(of.shape)) if d not in gone]
        # Another value may be the same numbers here: those of other rows.
        is_own = of.x is v.x and (of.shape, of.layout) == (v.shape, v.layout)
        is_own &= all(kept[d] == place for d, place in axes.items())
        if is_own and v.dim in gone and is_inexact(v.aval) and found.is_whole:
            return v, extremum
    return None


_EXTREMA = ("reduce_max", "reduce_min")


def _attaining_all(w: Writer, e: core.JaxprEqn, x: Any) -> Any:
    """Marks the rows of a micro-batch that attain the extremum of all rows."""
    axes, is_max = tuple(e.params["axes"]), e.primitive.name == "reduce_max"
    x = jax.lax.stop_gradient(x)
    # Stored: computed again, it might round otherwise as well.
    here = checkpoint_name(w.run(e, [x]), w.axis.name)
    mine = here == w.axis.extremum(here, is_max)
    return attaining(is_max, axes, x, here) & jnp.expand_dims(mine, axes)


def attaining(is_max: bool, axes: tuple[int, ...], x: Any, extremum: Any) -> Any:
    """Marks the numbers that attain their extremum along axes: one at least.

    The operand and the extremum may have been rounded in different ways, and none would
    equal it. As in JAX, none attains NaN.
    """
    first, rest = True, x
    for axis in axes:
        at = (jnp.argmax if is_max else jnp.argmin)(rest, axis, keepdims=True)
        first &= jax.lax.broadcasted_iota(at.dtype, x.shape, axis) == at
        rest = jnp.take_along_axis(rest, at, axis)
    extremum = jnp.expand_dims(extremum, axes)
    return (x == extremum) | (first & (extremum == extremum))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _extremum_here(is_max: bool, axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    """The extremum of one micro-batch along axes, with a derivative that is finite."""
    return x.max(axes) if is_max else x.min(axes)


@_extremum_here.defjvp
def _extremum_here_jvp(
    is_max: bool, axes: tuple[int, ...], primals: Any, tangents: Any
) -> tuple[Any, Any]:
    [x], [t] = primals, tangents
    here = _extremum_here(is_max, axes, x)
    share = jax.lax.stop_gradient(attaining(is_max, axes, x, here)).astype(t.dtype)
    return here, (t * share).sum(axes) / share.sum(axes)


def _is_of_rows(v: Value) -> bool:
    """True if a whole value was computed of values with rows, which met."""
    todo, seen = ([v] if v.is_whole else []), set()
    while todo:
        u = todo.pop()
        if u.rows or u.is_partial:
            return True
        if id(u) not in seen and u.made is not None:
            seen.add(id(u))
            todo += u.made[1]
    return False


def reduce_(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    name = e.primitive.name
    if turned := columns.of_pairs(w, v, tuple(e.params["axes"])):
        w.level = turned.level
        return factors.forward(w, e, [turned])
    if name == "reduce_sum":
        return factors.summed(w, e, vs)
    if name in _EXTREMA:
        return [(_extremum(w, e, v), WHOLE)]
    here = w.run(e, [v.x])
    parts = _gathered(w, v, here)
    return [(w.run(e, [parts], axes=(0,)), WHOLE)]


def _gathered(w: Writer, v: Value, here: Any) -> Any:
    """The arrays of all micro-batches, stacked along a new axis 0."""
    w.meet(v)
    return w.gather(here)


def _extremum(w: Writer, e: core.JaxprEqn, v: Value) -> Any:
    """The largest or the smallest of all rows.

    Its derivative is JAX's: equal parts for all that attain it. So what each micro-
    batch found is kept, and how many attain it there. Comparing once more with the
    extremum would not do: values that are computed again may round otherwise. For that
    reason they are computed once for both, and not fused with either.
    """
    is_max = e.primitive.name == "reduce_max"
    if not v.smooth or e.outvars[0] not in w.given:
        return _stopped_extremum(w, is_max, v, w.run(e, [v.x]))
    x, axes = jax.lax.optimization_barrier(v.x), tuple(e.params["axes"])
    here = _extremum_here(is_max, axes, x)
    attain = attaining(is_max, axes, *map(jax.lax.stop_gradient, (x, here)))
    count = jnp.sum(attain, axes, dtype=here.dtype)
    found, counts = _gathered(w, v, here), w.gather(jax.lax.stop_gradient(count))
    return _of_parts(is_max, found, counts)


def _stopped_extremum(w: Writer, is_max: bool, v: Value, here: Any) -> Any:
    """The same where it has no derivative."""
    w.meet(v)
    x = jax.lax.stop_gradient(here)
    as_int = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    return w.axis.extremum(as_int, is_max).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_parts(is_max: bool, found: jax.Array, counts: jax.Array) -> jax.Array:
    """The extremum over micro-batches, from extrema and how often each is attained."""
    return found.max(0) if is_max else found.min(0)


@_of_parts.defjvp
def _of_parts_jvp(is_max: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found, counts = primals
    out = _of_parts(is_max, found, counts)
    share = jnp.where(found == out[None], counts, jnp.zeros_like(counts))
    return out, (tangents[0] * (share / share.sum(0)[None])).sum(0)


def argument(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """`argmax` and `argmin`: the first micro-batch that attains it says where."""
    [v] = vs
    if v.rows.segments > 1:
        return None
    [axis], x = e.params["axes"], jax.lax.stop_gradient(v.x)
    at = w.run(e, [x])
    best = jnp.take_along_axis(x, jnp.expand_dims(at, axis), axis).squeeze(axis)
    rows = v.x.shape[axis]
    first = w.index.astype(at.dtype) * jnp.asarray(rows, at.dtype)
    places, values = w.gather(at + first), _gathered(w, v, best)
    which = w.run(e, [values], axes=(0,))
    return [(jnp.take_along_axis(places, which[None], 0)[0], WHOLE)]


def collective(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """`psum`, `pmax` and `pmin` over axes of the user.

    The axis of a `jax.vmap` with an `axis_name` is a number here: an axis of the array.
    """
    axes = tuple(a for a in e.params["axes"] if isinstance(a, int))
    out: list[Result] = []
    for v in vs:
        [here] = w.results(e, [v.x])
        if v.rows is None:
            out.append((here, WHOLE))
        elif v.dim not in axes:
            left = v.rows.at(v.dim - sum(a < v.dim for a in axes))
            out.append((here, left))
        elif e.primitive.name.startswith("psum"):
            out.append((here, PARTIAL))
        else:  # JAX has no derivative of them
            is_max = e.primitive.name == "pmax"
            out.append((_stopped_extremum(w, is_max, v, here), WHOLE))
    return out


def cumulative(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Sums from the first row on: local sums, plus the totals of earlier rows."""
    [v] = vs
    axis, reverse = e.params["axis"], e.params["reverse"]
    name = e.primitive.name
    # At ties JAX has a derivative that depends on where in the whole batch they are.
    is_extremum = name in ("cummax", "cummin")
    if v.rows.segments > 1 or (is_extremum and v.smooth):
        return None
    here = w.run(e, [v.x])
    edge = 0 if reverse else here.shape[axis] - 1
    total = jax.lax.index_in_dim(here, edge, axis, keepdims=True)
    totals = _gathered(w, v, total)
    # Those of all micro-batches up to each, and then those before this one.
    after = w.index - 1 if not reverse else w.index + 1
    is_first = w.index == (w.axis.size - 1 if reverse else 0)
    totals = w.run(e, [totals], axis=0)
    after = jnp.where(is_first, w.index, after)
    before = jax.lax.dynamic_index_in_dim(totals, after, 0, keepdims=False)
    joined = _JOINED[name](here, before)
    return [(jnp.where(is_first, here, joined), v.rows)]


_JOINED: dict[str, Any] = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}
