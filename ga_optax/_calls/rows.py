"""Rows of micro-batches, and of the results.

    row i of micro-batch j  <->  row of the batch        one to one

A micro-batch holds neighbouring rows, unless the compiler is known to distribute the
batch and rows do not meet: then it holds every k-th row, and no row moves between
devices. If the compiler decides later, when the program is lowered, the choice stays
open, provided that the program is the same in both cases.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._devices import collectives, meshes
from .._devices.collectives import Membership
from .._devices.record import Devices
from .._loop.folds import FOLDS, Fold, Weighting
from .._loop.loop import Outcome
from .._loop.micro_step import scan
from .._partition import partitioned
from .._partition.held import PARTIAL, WHOLE, Axis, Layout, Rows, Uneven, type_here
from .._partition.partitioned import Argument, Partitioned, in_any_order, partition
from .._passes import jaxprs, primitives
from .._window.flat import LONGEST
from .._window.meetings import MEETINGS
from .call import Call

# The folds of results without rows, by layout.
FOLD_OF_LAYOUT = {"whole": "last", "partial": "sum"}

# The axis of the micro-batches, which no user names.
AXIS = "rows of the whole batch"


def types_of_all(call: Call) -> list[Any]:
    """The types of the leaves of the batch, with the rows of all devices."""
    devices, types = call.devices, []
    for x, axis in zip(call.batch, call.split_axes, strict=True):
        shape = list(jnp.shape(x))
        shape[axis] *= devices.number if devices.bound else 1
        no_mesh = (devices.maps or devices.bound) and not meshes.varying(x)
        aval = meshes.type_without_mesh(x) if no_mesh else jax.typeof(x)
        types.append(type_here(aval, tuple(shape), None))
    return types


# -- Which rows a micro-batch has ------------------------------------------------------


def of_micro_batch(
    call: Call, jaxpr: Any, like: Partitioned | None = None
) -> tuple[Partitioned, Membership]:
    """The program of a micro-batch, and which rows it holds.

    Its results have the layouts of those of `like`, if given.
    """
    if call.rest:
        near = of_neighbours(call, jaxpr, parts_of(call))
        return near, Membership.NEIGHBOURS
    membership = call.devices.membership
    if membership is Membership.NEIGHBOURS or is_open(jaxpr):
        return _of_rows(call, jaxpr, like), Membership.NEIGHBOURS
    if membership is Membership.STRIDED:
        far = _of_rows(call, jaxpr, like, strided=True)
        if far.in_gradient is None or split_by_type(call):
            return far, membership
    near = _of_rows(call, jaxpr, like)
    # Where rows meet, it matters which rows are together.
    if membership is Membership.EITHER and near.in_gradient is None:
        if in_any_order(jaxpr, near):
            return near, membership
        far = _of_rows(call, jaxpr, like, strided=True)
        if _is_same(jaxpr, near, far, call.num_of_all):
            return near, membership
    return near, Membership.NEIGHBOURS


def _of_rows(
    call: Call, jaxpr: Any, like: Partitioned | None, strided: bool = False
) -> Partitioned:
    """The program of a micro-batch of neighbouring rows, or of every k-th row.

    If the compiler merges over devices, neighbours are those of each device.
    """
    size, (merged, mesh) = call.num_of_all, call.devices.compiled
    parts = meshes.num_devices(merged, mesh) if merged else 1
    batch = jaxpr.invars[len(jaxpr.invars) - len(call.split_axes) :]
    rows = [
        Rows(d, x.aval.shape[d] // size if strided else parts)
        for x, d in zip(batch, call.split_axes, strict=True)
    ]
    axis = Axis(AXIS, size, LONGEST, call.devices.is_checked, bool(call.sees))
    # Each micro-batch adds its part of the loss.
    return partition(jaxpr, _arguments(call, jaxpr, rows), axis, PARTIAL, like)


def parts_of(call: Call, is_last: bool = False) -> Uneven:
    """The size of micro-batches of which the last is smaller: of others, or of it."""
    total = jnp.shape(call.batch[0])[call.split_axes[0]]
    if is_last:
        return Uneven(total, call.rest, call.num_of_all)
    return Uneven(total, (total - call.rest) // call.num_of_all)


def of_neighbours(
    call: Call, jaxpr: Any, parts: int | Uneven, like: Partitioned | None = None
) -> Partitioned:
    """The program of a micro-batch of neighbouring rows, `like` another one."""
    axis = Axis(AXIS, parts, LONGEST, labels=bool(call.sees))
    arguments = _arguments(call, jaxpr, list(map(Rows, call.split_axes)))
    return partition(jaxpr, arguments, axis, PARTIAL, like)


def are_alike(some: Partitioned, last: Partitioned) -> bool:
    """True if two programs are the same but for the number of rows."""
    names = [
        [e.primitive.name for e in jaxprs.equations(x.jaxpr)] for x in (some, last)
    ]
    return some.layouts == last.layouts and names[0] == names[1]


def is_open(jaxpr: Any) -> bool:
    """True if sizes are left open, as by `jax.export`."""
    sizes = [n for x in jaxpr.invars for n in getattr(x.aval, "shape", ())]
    return not all(isinstance(n, int) for n in sizes)


def split_by_type(call: Call) -> tuple[Any, int] | None:
    """The spec and the axis of a leaf whose rows a mesh axis of explicit type shards.

    None with `data_axis=`. One device has neighbouring rows, so they cannot be a
    micro-batch.
    """
    for x, axis in zip(call.batch, call.split_axes, strict=True):
        spec = meshes.spec_of_type(x)
        if not call.devices.axes and any(spec[axis : axis + 1]):
            return spec, axis
    return None


def shares_much(jaxpr: Any, rows: Iterable[Any]) -> bool:
    """True if more than a little of the work of a program needs no rows.

    `rows` are the arguments that have rows.
    """
    shared, of_rows = _shared_and_other(jaxpr, set(rows))
    return shared > jaxprs.LITTLE * of_rows


def _shared_and_other(jaxpr: Any, of_rows: set[Any]) -> tuple[float, float]:
    """The work of equations that are not cheap and read no rows; and of the others."""
    shared = other = 0.0
    for e in jaxpr.eqns:
        its = [jaxprs.is_among(x, of_rows) for x in e.invars]
        if not any(its):
            shared += 0.0 if jaxprs.is_cheap(e) else jaxprs.work(e)
        elif jaxprs.is_inline(e):
            [inside] = jaxprs.inner_programs(e)
            some = set(itertools.compress(inside.invars, its))
            both = _shared_and_other(inside, some)
            shared, other = shared + both[0], other + both[1]
        else:
            other += jaxprs.work(e)
        of_rows.update(e.outvars if any(its) else ())
    return shared, other


def _is_same(jaxpr: Any, near: Partitioned, far: Partitioned, size: int) -> bool:
    """True if a program is the same of neighbours and of every k-th row."""
    if far.in_gradient is not None or jaxprs.form(near.jaxpr) != jaxprs.form(far.jaxpr):
        return False
    # Which micro-batch has a row may stand in a constant alone.
    for x, y in zip(near.consts, far.consts, strict=True):
        traced = isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer)
        if x is not y and (traced or not np.array_equal(x, y)):
            return False

    def strided(layout: Layout, x: Any) -> Any:
        if not isinstance(layout, Rows):
            return layout
        d, is_plain = layout.dim, layout == Rows(layout.dim)
        return Rows(d, x.aval.shape[d] // size) if is_plain else None

    pairs = zip(near.layouts, far.layouts, jaxpr.outvars, strict=False)
    return all(b == strided(a, x) for a, b, x in pairs)


def _arguments(call: Call, jaxpr: Any, rows: Sequence[Rows]) -> list[Argument]:
    """Constants, parameters, and the leaves of the batch with their rows.

    If the program reads no parameter, as in `microbatch`, a caller may differentiate
    with respect to any argument.
    """
    n = len(jaxpr.invars) - len(rows)
    params, batch = jaxpr.invars[:n], jaxpr.invars[n:]
    any_argument = not (call.sums or any(jaxprs.num_readers(jaxpr, x) for x in params))

    def smooth(x: Any) -> bool:
        return any_argument and jaxprs.is_inexact(x.aval)

    of_batch = enumerate(zip(batch, rows, strict=True), -call.rows)
    return [
        *(Argument(x.aval, WHOLE, smooth(x)) for x in jaxpr.constvars),
        *(Argument(x.aval, WHOLE, True) for x in params),
        *(Argument(x.aval, r, i < 0 or smooth(x)) for i, (x, r) in of_batch),
    ]


# -- Counts of uneven micro-batches ----------------------------------------------------


def without_counts(
    pairs: Sequence[tuple[Partitioned, list[jax.Array]]], fixed: Sequence[Any]
) -> list[Partitioned]:
    """The programs, of all micro-batches together, with their counts as constants.

    Counts are sums and extrema that the loss is not differentiated through: all are
    known before the loop.

    Args:
      pairs: programs of micro-batches that are alike, and these micro-batches.
      fixed: the arguments before them.
    """
    parts, batches = zip(*pairs, strict=True)
    while any(meetings := [partitioned.first_meetings(x, AXIS) for x in parts]):
        triples = list(zip(parts, meetings, batches, strict=True))
        values = _counts(triples, fixed)
        parts = [partitioned.without_meetings(x, its, values) for x, its, _ in triples]
    return [x._replace(meets=False) for x in parts]


def _counts(triples: Sequence[Any], fixed: Sequence[Any]) -> list[jax.Array]:
    """The results of collectives: `triples` has programs, collectives, and batches."""
    pairs = [(MEETINGS[e.primitive.name], x) for e in triples[0][1] for x in e.outvars]
    folds, names = [FOLDS[kind] for (kind, _), _ in pairs], [x for _, x in pairs]
    carry = [f.init(x.aval, ()) for f, x in zip(folds, names, strict=True)]
    for part, meetings, xs in triples:
        jaxpr = jaxprs.silent(part.jaxpr)
        terms = jaxpr.replace(outvars=[x for e in meetings for x in e.invars])
        program = jaxprs.Program(jaxprs.live(terms), part.consts)
        run = functools.partial(_folded, folds, program, fixed)
        with jax.named_scope("counts"):
            carry = scan()(run, carry, xs)[0]
    each = zip(folds, carry, names, strict=True)
    return [f.finish(x, None).astype(name.aval.dtype) for f, x, name in each]


def _folded(
    folds: Sequence[Fold], program: Any, fixed: Sequence[Any], carry: Any, x: Any
) -> tuple[list[Any], None]:
    """The carry of folds after the results of one micro-batch."""
    terms = jaxprs.results(program, [*fixed, *x])
    triples = zip(folds, carry, terms, strict=True)
    return [fold.step(old, new, Weighting()) for fold, old, new in triples], None


# -- Results ---------------------------------------------------------------------------


def returned(
    call: Call,
    part: Partitioned,
    jaxpr: Any,
    results: Sequence[Any],
    membership: Membership,
) -> list[Any]:
    """The results of `fun`, whose program is `jaxpr`, for the whole batch.

    `results` are the results of micro-batches, stacked if they have rows.
    """
    leaves = [
        _joined(call.devices, x, layout, membership) if isinstance(layout, Rows) else x
        for x, layout in zip(results, part.layouts, strict=True)
    ]
    if part.late is not None:
        leaves = part.late.put(leaves)
    for y in _roundings(jaxpr, jaxpr.outvars[0]):
        leaves[0] = leaves[0].astype(y.aval.dtype)
    return [_of_type(x, v.aval) for x, v in zip(leaves, jaxpr.outvars, strict=True)]


def _roundings(jaxpr: Any, result: Any) -> list[Any]:
    """A scalar before the first cast that rounds it, and after each of these casts.

    The last one is the result. A cast to a wider type may follow a rounding, as for a
    mean in bfloat16 in a float32 loss.
    """
    casts, first = [result], 0
    e = jaxprs.made_by(jaxpr, result) if result.aval.shape == () else None
    while e is not None and e.primitive.name == primitives.CAST:
        before, after = map(_bits, (e.invars[0], casts[-1]))
        if not before or not after:
            break
        casts.append(e.invars[0])
        first = len(casts) - 1 if before > after else first
        e = jaxprs.made_by(jaxpr, casts[-1])
    return casts[first::-1]


def _bits(x: Any) -> int:
    """The bits of a floating-point number; 0 for other types."""
    dtype = x.aval.dtype
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 0


def unrounded(jaxpr: Any, results: Iterable[int]) -> Any:
    """The program, some results of which come before they are rounded."""
    outvars = list(jaxpr.outvars)
    for i in results:
        outvars[i] = _roundings(jaxpr, outvars[i])[0]
    return jaxpr.replace(outvars=outvars)


def merged(
    call: Call, layouts: Sequence[Layout], some: Outcome, last: Outcome
) -> Outcome:
    """The outcome of micro-batches, and of the last one, which is smaller.

    What has rows comes like that of one micro-batch with all of them.
    """

    def rows_of_all(rows: Rows, *stacks: jax.Array) -> jax.Array:
        near = Membership.NEIGHBOURS
        parts = [_joined(Devices(), x, rows, near) for x in stacks]
        apart = [jnp.split(x, rows.segments, rows.dim) for x in parts]
        segments = zip(*apart, strict=True)
        return jnp.concatenate([x for pair in segments for x in pair], rows.dim)[None]

    results = [
        rows_of_all(layout, x, y)
        if isinstance(layout, Rows)
        else FOLDS[FOLD_OF_LAYOUT[layout]].join(x, y)
        for layout, x, y in zip(layouts, some.results, last.results, strict=True)
    ]
    triples = zip(call.split_axes, some.rows, last.rows, strict=False)
    grads = [rows_of_all(Rows(d), x, y) for d, x, y in triples]
    return last._replace(results=results, rows=grads)


def gradients_of_rows(
    call: Call, stacks: Sequence[jax.Array], membership: Membership
) -> list[jax.Array]:
    """Gradients of leaves of the batch, from those of each micro-batch along axis 0."""
    triples = zip(stacks, types_of_all(call), call.split_axes, strict=False)
    return [
        _joined(call.devices, x, _rows(call, aval, d, membership), membership)
        for x, aval, d in triples
    ]


def axes_of_results(
    call: Call, part: Partitioned, types: Sequence[Any], membership: Membership
) -> list[int | None]:
    """The axis of each result along which it has the rows of the batch, or None."""
    pairs = zip(types, part.layouts, strict=False)
    return [
        of.dim
        if isinstance(of, Rows) and of == _rows(call, x, of.dim, membership)
        else None
        for x, of in pairs
    ]


def _rows(call: Call, x: Any, d: int, membership: Membership) -> Rows:
    """The layout of a value with the rows of the batch along an axis."""
    strided = membership is Membership.STRIDED
    return Rows(d, x.shape[d] // call.num_of_all if strided else 1)


def _of_type(x: jax.Array, aval: Any) -> jax.Array:
    """The result without padding, in the dtype that `fun` returns."""
    if x.shape != aval.shape:  # a device in a region of the user has fewer rows
        x = jax.lax.slice(x, [0] * x.ndim, list(map(min, x.shape, aval.shape)))
    return x if x.dtype == aval.dtype else x.astype(aval.dtype)


def _joined(
    devices: Devices, x: jax.Array, rows: Rows, membership: Membership
) -> jax.Array:
    """The rows in their order, from the rows of each micro-batch along axis 0.

    In a region of the user a device holds neighbours as they are.
    """
    d, segments = rows.dim, rows.segments
    if devices.bound and segments > 1:
        x = jax.lax.all_gather(x, devices.bound, tiled=True)
    if membership is Membership.EITHER:
        return collectives.join_rows(x, d, membership)
    if segments == 1:
        return collectives.join_rows(x, d, Membership.NEIGHBOURS)
    x = jnp.moveaxis(x, 0, d)
    before, (parts, n), after = x.shape[:d], x.shape[d : d + 2], x.shape[d + 2 :]
    shape, spec = (*before, parts * n, *after), meshes.spec_of_type(x)
    x = x.reshape(*before, parts, segments, n // segments, *after).swapaxes(d, d + 1)
    if not any(spec):
        return x.reshape(shape)
    spec = *spec[: d + 1], *spec[d + 2 :]
    return jax.lax.reshape(x, shape, out_sharding=meshes.on_mesh_of(x, spec))
