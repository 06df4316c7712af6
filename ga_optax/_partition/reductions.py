"""Primitives that reduce or scan along axes: here first, then over micro-batches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Result,
    Rows,
    RowsMeet,
    Value,
    can_split,
    is_inexact,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes import ir

Results = list[Result] | None


def _left(v: Value, axes: tuple[int, ...]) -> Rows:
    """The rows after a reduction of other axes."""
    return v.rows.at(v.dim - sum(a < v.dim for a in axes))


def reduce_(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [v] = vs
    name, axes = e.primitive.name, tuple(e.params["axes"])
    if v.dim not in axes:
        return [(w.run(e, [v.x]), _left(v, axes))]
    if found := turned(w, v, axes):
        rows, x = found
        left = rows.at(rows.dim - sum(a < rows.dim for a in axes))
        return [(w.run(e, [x]), left)]
    if v.extra:
        v = dataclasses.replace(v, x=w.filled(v, _neutral(name, v)))
    if name in ("reduce_max", "reduce_min"):
        return [(_extremum(w, e, v), WHOLE)]
    here = w.run(e, [v.x])
    if name == "reduce_sum":
        return [(here, PARTIAL)]
    parts = _gathered(w, v, here)
    return [(w.run(e, [parts], axes=(0,)), WHOLE)]


def _neutral(name: str, v: Value) -> Any:
    """What changes no sum, maximum or minimum."""
    if name == "reduce_sum":
        return 0
    ends = jnp.finfo if is_inexact(v.aval) else jnp.iinfo
    if v.aval.dtype == jnp.bool_:
        return name == "reduce_min"
    if is_inexact(v.aval):
        return -jnp.inf if name == "reduce_max" else jnp.inf
    return ends(v.aval.dtype).min if name == "reduce_max" else ends(v.aval.dtype).max


def _gathered(w: Writer, v: Value, here: Any) -> Any:
    """What all micro-batches found, along a new axis 0."""
    w.level = max(w.level, v.level + v.params)
    return w.gather(here)


def _extremum(w: Writer, e: core.JaxprEqn, v: Value) -> Any:
    """The largest or the smallest of all rows.

    Its derivative is JAX's: equal parts for all that attain it. So what each micro-
    batch found is kept, and how many attain it there. Comparing once more with the
    extremum would not do: values that are computed again may round otherwise. For that
    reason they are computed once for both, and not fused with either.
    """
    is_max = e.primitive.name == "reduce_max"
    if not v.smooth or not is_inexact(v.aval) or _only_stopped(w.jaxpr, e.outvars[0]):
        return _stopped_extremum(w, is_max, v, w.run(e, [v.x]))
    x, axes = jax.lax.optimization_barrier(v.x), tuple(e.params["axes"])
    here = w.run(e, [x])
    attain = jax.lax.stop_gradient(x == jnp.expand_dims(here, axes))
    count = jnp.sum(attain, axes, dtype=here.dtype)
    found, counts = _gathered(w, v, here), w.gather(jax.lax.stop_gradient(count))
    return _of_parts(is_max, found, counts)


def _stopped_extremum(w: Writer, is_max: bool, v: Value, here: Any) -> Any:
    """The same where it has no derivative."""
    w.level = max(w.level, v.level + v.params)
    if w.apart:
        raise RowsMeet
    x = jax.lax.stop_gradient(here)
    as_int = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    return w.axis.extremum(as_int, is_max).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_parts(is_max: bool, found: jax.Array, counts: jax.Array) -> jax.Array:
    """The extremum of those of all micro-batches, each attained so many times."""
    return found.max(0) if is_max else found.min(0)


@_of_parts.defjvp
def _of_parts_jvp(is_max: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found, counts = primals
    out = _of_parts(is_max, found, counts)
    share = jnp.where(found == out[None], counts, jnp.zeros_like(counts))
    return out, (tangents[0] * (share / share.sum(0)[None])).sum(0)


def _only_stopped(jaxpr: core.Jaxpr, variable: Any) -> bool:
    """Whether no derivative goes through a variable, as in a `logsumexp`."""
    uses = ir.uses(jaxpr, variable)
    through = ("max", "broadcast_in_dim", "reshape", "select_n", "is_finite", "squeeze")
    return 0 < ir.num_readers(jaxpr, variable) == len(uses) and all(
        e.primitive.name == "stop_gradient"
        or (e.primitive.name in through and _only_stopped(jaxpr, e.outvars[0]))
        or not any(is_inexact(x.aval) for x in e.outvars)
        for e, _ in uses
    )


def turned(w: Writer, v: Value, axes: tuple[int, ...]) -> tuple[Rows, Any] | None:
    """`v` with the rows along an axis that stays, if it is a product of rows with rows.

    All rows of the smaller factor are needed anyway; with all rows of the other one,
    each column is complete here, and a reduction over rows needs no collective.
    """
    if w.apart or w.limit is not None or len(v.shape) < 2 or not v.params:
        return None
    for d in range(len(v.shape)):
        rows = Rows(d)
        if d in axes or not can_split(v.shape, rows, w.axis.size):
            continue
        w.limit, w.matched, level, w.level = v.size - 1, False, w.level, 0
        try:
            x = w.recut(w, v, rows)
        except RowsMeet:
            x = None
        finally:
            w.limit = None
        if x is not None and w.matched:
            return rows, x
        w.level = level
    return None


def argument(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """`argmax` and `argmin`: the first micro-batch that attains it says where."""
    [v] = vs
    axes = tuple(e.params["axes"])
    if v.dim not in axes:
        return [(w.run(e, [v.x]), _left(v, axes))]
    if v.rows.segments > 1 or len(axes) > 1:
        return None
    [axis], x = axes, jax.lax.stop_gradient(v.x)
    at = w.run(e, [x])
    best = jnp.take_along_axis(x, jnp.expand_dims(at, axis), axis).squeeze(axis)
    rows = v.x.shape[axis]
    first = w.index.astype(at.dtype) * jnp.asarray(rows, at.dtype)
    places, values = w.gather(at + first), _gathered(w, v, best)
    which = w.run(e, [values], axes=(0,))
    return [(jnp.take_along_axis(places, which[None], 0)[0], WHOLE)]


def collective(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """`psum`, `pmax` and `pmin` over axes of the user's.

    Those of a `jax.vmap` that has an `axis_name` are numbers here: axes of the array.
    """
    if e.params.get("axis_index_groups") is not None:
        return None
    axes = tuple(a for a in e.params["axes"] if isinstance(a, int))
    out: list[Result] = []
    for v in vs:
        [here] = w.results(e, [v.x])
        if v.rows is None:
            out.append((here, WHOLE))
        elif v.dim not in axes:
            out.append((here, _left(v, axes)))
        elif e.primitive.name.startswith("psum"):
            out.append((here, PARTIAL))
        else:  # JAX has no derivative of them
            is_max = e.primitive.name == "pmax"
            out.append((_stopped_extremum(w, is_max, v, here), WHOLE))
    return out


def cumulative(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Sums from the first row on: those here, after the totals of those before."""
    [v] = vs
    axis, reverse = e.params["axis"], e.params["reverse"]
    if axis != v.dim:
        return [(w.run(e, [v.x]), v.rows)]
    name = e.primitive.name
    # At ties JAX has a derivative that depends on where in the whole batch they are.
    is_extremum = name in ("cummax", "cummin")
    if v.rows.segments > 1 or (is_extremum and v.smooth) or (v.extra and reverse):
        return None
    here = w.run(e, [w.filled(v, 0)])
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


def along(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """`sort`, `top_k` and others along an axis without rows."""
    params = e.params
    axis = params.get("dimension", params.get("axis", len(vs[0].shape) - 1))
    rows = max((v for v in vs if v.rows), key=lambda v: v.size).rows
    if axis == rows.dim:
        return None
    return [(x, rows) for x in w.results(e, [w.part(v, rows) for v in vs])]


def windows(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Pooling over axes without rows."""
    v = next(v for v in vs if v.rows)
    d, p = v.dim, e.params
    padding = p.get("padding") or ((0, 0),) * len(v.shape)
    size = p["window_dimensions"][d] * (p["window_strides"] or [1] * (d + 1))[d]
    if size != 1 or tuple(padding[d]) != (0, 0):
        return None
    xs = [w.part(u, v.rows) if u.shape else w.whole(u) for u in vs]
    return [(x, v.rows) for x in w.results(e, xs)]
