"""The rows of each micro-batch, and the results for the rows of the whole batch.

A micro-batch holds neighbouring rows, unless the compiler is known to distribute the
batch and rows do not meet: then it holds every k-th row, and no row moves between
devices. If the compiler decides later, when the program is lowered, the choice stays
open, provided that the program is the same in both cases.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import config
from ga_optax._calls.call import Call
from ga_optax._calls.devices import Devices
from ga_optax._devices import membership, meshes
from ga_optax._loop.folds import FOLDS
from ga_optax._loop.run import Outcome
from ga_optax._partition import (
    PARTIAL,
    WHOLE,
    Argument,
    Axis,
    Layout,
    Partitioned,
    Rows,
    Uneven,
    is_inexact,
    partition,
)
from ga_optax._partition.values import type_here
from ga_optax._passes import read
from ga_optax._window.flat import LONGEST

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


def split(
    call: Call, jaxpr: Any, like: Partitioned | None = None
) -> tuple[Partitioned, bool | None]:
    """The program of a micro-batch, with results in the layouts of `like`, if given.

    Returns: the program; True if a micro-batch holds every k-th row, False if it holds
    neighbours, None if the program is the same in both cases.
    """
    if call.rest:
        return of_neighbours(call, jaxpr, parts_of(call)), False
    size, axes, devices = call.size, call.split_axes, call.devices
    n = len(jax.tree.leaves(call.params))
    axis = Axis(
        AXIS, size, LONGEST, devices.is_checked, config.whole_draws, bool(call.sees)
    )

    def of(segments: Callable[[Any, int], int]) -> Partitioned:
        batch = jaxpr.invars[n:]
        rows = [Rows(d, segments(x, d)) for x, d in zip(batch, axes, strict=True)]
        # Each micro-batch adds its part of the loss.
        arguments = _arguments(call, jaxpr, rows)
        return partition(jaxpr, arguments, axis, PARTIAL, like)

    merged, mesh = devices.compiled
    if merged:
        return of(lambda x, d: meshes.num_devices(merged, mesh)), False
    strided = False if is_open(jaxpr) else devices.distributed
    far = None if strided is False else of(lambda x, d: x.aval.shape[d] // size)
    if strided and far and (far.in_gradient is None or split_by_type(call)):
        return far, True
    near = of(lambda x, d: 1)
    same = strided is None and far and _is_same(jaxpr, near, far, size)
    return near, None if same else False


def parts_of(call: Call, is_last: bool = False) -> Uneven:
    """The size of micro-batches of which the last is smaller: of others, or of it."""
    total = jnp.shape(call.batch[0])[call.split_axes[0]]
    if is_last:
        return Uneven(total, call.rest, call.size)
    return Uneven(total, (total - call.rest) // call.size)


def of_neighbours(
    call: Call, jaxpr: Any, parts: int | Uneven, like: Partitioned | None = None
) -> Partitioned:
    """The program of a micro-batch of neighbouring rows, `like` another one."""
    labels, draws = bool(call.sees), config.whole_draws
    axis = Axis(AXIS, parts, LONGEST, draws_whole=draws, labels=labels)
    arguments = _arguments(call, jaxpr, list(map(Rows, call.split_axes)))
    return partition(jaxpr, arguments, axis, PARTIAL, like)


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


def _is_same(jaxpr: Any, near: Partitioned, far: Partitioned, size: int) -> bool:
    """True if a program is the same of neighbours and of every k-th row."""
    if far.in_gradient is not None or read.form(near.jaxpr) != read.form(far.jaxpr):
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
    any_argument = not (call.sums or any(read.num_readers(jaxpr, x) for x in params))

    def smooth(x: Any) -> bool:
        return any_argument and is_inexact(x.aval)

    of_batch = enumerate(zip(batch, rows, strict=True), -call.rows)
    return [
        *(Argument(x.aval, WHOLE, smooth(x)) for x in jaxpr.constvars),
        *(Argument(x.aval, WHOLE, True) for x in params),
        *(Argument(x.aval, r, i < 0 or smooth(x)) for i, (x, r) in of_batch),
    ]


# -- Results ---------------------------------------------------------------------------


def returned(
    call: Call,
    part: Partitioned,
    jaxpr: Any,
    results: Sequence[Any],
    strided: bool | None,
) -> list[Any]:
    """The results of `fun`, whose program is `jaxpr`, for the whole batch.

    `results` are the results of micro-batches, stacked if they have rows.
    """
    leaves = [
        _joined(call.devices, x, layout, strided) if isinstance(layout, Rows) else x
        for x, layout in zip(results, part.layouts, strict=True)
    ]
    if len(leaves) > len(jaxpr.outvars):  # the loss once more, whole
        leaves[0] = leaves.pop()
    for y in read.roundings(jaxpr, jaxpr.outvars[0]):
        leaves[0] = leaves[0].astype(y.aval.dtype)
    return [_of_type(x, v.aval) for x, v in zip(leaves, jaxpr.outvars, strict=True)]


def merged(
    call: Call, layouts: Sequence[Layout], some: Outcome, last: Outcome
) -> Outcome:
    """The outcome of micro-batches, and of the last one, which is smaller.

    What has rows comes like that of one micro-batch with all of them.
    """

    def rows_of_all(rows: Rows, *stacks: jax.Array) -> jax.Array:
        d, segments = rows.dim, rows.segments
        parts = [_joined(Devices(), x, rows, False) for x in stacks]
        apart = [
            x.reshape(*x.shape[:d], segments, -1, *x.shape[d + 1 :]) for x in parts
        ]
        whole = jnp.concatenate(apart, d + 1)
        shape = *whole.shape[:d], -1, *whole.shape[d + 2 :]
        return whole.reshape(1, *shape)

    results = [
        rows_of_all(layout, x, y)
        if isinstance(layout, Rows)
        else FOLDS[FOLD_OF_LAYOUT[layout]].join(x, y)
        for layout, x, y in zip(layouts, some.results, last.results, strict=True)
    ]
    triples = zip(call.split_axes, some.rows, last.rows, strict=False)
    grads = [rows_of_all(Rows(d), x, y) for d, x, y in triples]
    return last._replace(results=results, rows=grads)


def gradients(
    call: Call, stacks: Sequence[jax.Array], strided: bool | None
) -> list[jax.Array]:
    """Gradients of leaves of the batch, from those of each micro-batch along axis 0."""
    triples = zip(stacks, types_of_all(call), call.split_axes, strict=False)
    return [
        _joined(call.devices, x, _rows(call, aval, d, strided), strided)
        for x, aval, d in triples
    ]


def axes_of_results(
    call: Call, part: Partitioned, types: Sequence[Any], strided: bool | None
) -> list[int | None]:
    """The axis of each result along which it has the rows of the batch, or None."""
    pairs = zip(types, part.layouts, strict=False)
    return [
        layout.dim
        if isinstance(layout, Rows) and layout == _rows(call, x, layout.dim, strided)
        else None
        for x, layout in pairs
    ]


def _rows(call: Call, x: Any, d: int, strided: bool | None) -> Rows:
    """The layout of a value with the rows of the batch along an axis."""
    return Rows(d, x.shape[d] // call.size if strided else 1)


def _of_type(x: jax.Array, aval: Any) -> jax.Array:
    """The result without padding, in the dtype that `fun` returns."""
    if x.shape != aval.shape:  # a device in a region of the user has fewer rows
        x = jax.lax.slice(x, [0] * x.ndim, list(map(min, x.shape, aval.shape)))
    return x if x.dtype == aval.dtype else x.astype(aval.dtype)


def _joined(
    devices: Devices, x: jax.Array, rows: Rows, strided: bool | None
) -> jax.Array:
    """The rows in their order, from the rows of each micro-batch along axis 0.

    In a region of the user a device holds neighbours as they are.
    """
    d, segments = rows.dim, rows.segments
    if devices.bound and segments > 1:
        x = jax.lax.all_gather(x, devices.bound, tiled=True)
    if strided is None or segments == 1:
        return membership.join(x, d, None if strided is None else False)
    x = jnp.moveaxis(x, 0, d)
    before, (parts, n), after = x.shape[:d], x.shape[d : d + 2], x.shape[d + 2 :]
    shape, spec = (*before, parts * n, *after), meshes.spec_of_type(x)
    x = x.reshape(*before, parts, segments, n // segments, *after).swapaxes(d, d + 1)
    if not any(spec):
        return x.reshape(shape)
    spec = *spec[: d + 1], *spec[d + 2 :]
    return jax.lax.reshape(x, shape, out_sharding=meshes.on_mesh_of(x, spec))
