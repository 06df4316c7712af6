"""A loss traced once, at all rows, and its program partitioned over micro-batches.

Which rows are neighbours is part of the program. So micro-batches hold neighbouring
rows, unless the compiler is known to distribute the batch and rows do not meet: then
they hold every k-th row, and no row moves. What is not known before the program is
lowered is left open if the program is the same both ways.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import config
from ga_optax._calls.call import Call, DoesNotFitError
from ga_optax._calls.region import check_not_reduced, explained
from ga_optax._devices import membership, meshes
from ga_optax._partition import (
    PARTIAL,
    WHOLE,
    Argument,
    Axis,
    Layout,
    Partitioned,
    Rows,
    is_inexact,
    meeting_of,
    partition,
)
from ga_optax._partition.values import type_here
from ga_optax._passes import constraints, ir, places, references, rowwise
from ga_optax._window.read import LONGEST

# The axis of the micro-batches, which no user names.
AXIS = "rows of the whole batch"


class Traced(NamedTuple):
    """The program of `fun` at all rows.

    Attributes:
      closed: the program, of the leaves of the parameters and of the batch.
      out: the tree of what it returns: the loss and the aux.
      part: the program of a micro-batch, or the exception for which there is none.
      num_params: how many leaves the parameters have.
      strided: whether a micro-batch holds every k-th row, and not neighbours; None if
        that is open, and all the same.
    """

    closed: Any
    out: Any
    part: Any
    num_params: int
    strided: bool | None

    @property
    def loss_has_gradients(self) -> bool:
        """Whether the loss depends on the parameters."""
        n, jaxpr = len(self.closed.consts), self.part.jaxpr
        params = jaxpr.invars[n : n + self.num_params]
        [loss, *_] = jaxpr.outvars
        return ir.is_variable(loss) and loss in ir.following(jaxpr, params)

    @property
    def program(self) -> ir.Program:
        """What a micro-batch computes of the parameters, its rows, and its index."""
        consts, part = self.closed.consts, self.part
        jaxpr = ir.with_constants(part.jaxpr, len(consts))
        return ir.Program(jaxpr, [*part.consts, *consts])


def num_parts(call: Call) -> int:
    """Into how many micro-batches all devices together split the rows."""
    if call.by_compiler:
        return call.num_parts
    return call.num_parts * meshes.num_devices(call.options.axes, call.mesh)


def traced(call: Call, due: Sequence[Layout] = ()) -> Traced:
    """Traces `fun` once, for all rows, and partitions it, with results as are due.

    Whatever the partitioner raises, `part` is an exception then.
    """
    leaves = call.leaves("argnums")
    numbers = [*leaves, *call.leaves("batch_argnums")]

    def run(params: Sequence[Any], batch: Sequence[Any]) -> Any:
        new = zip(numbers, [*params, *batch], strict=True)
        one = call.with_leaves(dict(new))
        return call.options.fun(*one.args, **one.kwargs)

    env = meshes.of_all_rows(() if call.by_compiler else call.options.axes)
    run = places.in_name_of(call.options.fun, run)
    trace = jax.make_jaxpr(run, axis_env=[*rowwise.READ, *env], return_shape=True)
    of_params = list(leaves.values())
    if call.maps:
        of_params = list(map(type_of, of_params))
    with explained(call):
        closed, out = trace(of_params, _whole_batch(call))
    check_not_reduced(call, closed.out_avals[0])
    # A loss that is rounded does not add up; before that it has the same gradient.
    jaxpr = ir.unrounded(constraints.without_axes(closed.jaxpr, call.axes), [0])
    references.check_own(jaxpr, "value_and_grad")
    try:
        part, strided = _split(call, jaxpr, due)
    except Exception as error:  # Any: what JAX will change is not known.
        part, strided = error, False
    return Traced(closed, out, part, len(leaves), strided)


def _split(
    call: Call, jaxpr: Any, due: Sequence[Layout]
) -> tuple[Partitioned, bool | None]:
    """The program of a micro-batch, and which rows that has."""
    size, axes = num_parts(call), call.split_axes
    n = len(jax.tree.leaves(call.params))
    checks = meshes.checks_varying()
    axis = Axis(AXIS, size, LONGEST, checks, config.whole_draws)

    def of(segments: Callable[[Any, int], int]) -> Partitioned:
        batch = jaxpr.invars[n:]
        rows = [Rows(d, segments(x, d)) for x, d in zip(batch, axes, strict=True)]
        # Each micro-batch adds its part of the loss.
        arguments = _arguments(call, jaxpr, rows)
        return partition(jaxpr, arguments, axis, due or (PARTIAL,))

    def strides(x: Any, d: int) -> int:
        return x.aval.shape[d] // size

    if call.by_compiler:
        devices = meshes.num_devices(call.options.axes, call.mesh)
        return of(lambda x, d: devices), False
    strided = False if is_open(jaxpr) else call.distributed
    far = None if strided is False else of(strides)
    if strided and far and (far.in_gradient is None or _split_by_type(call)):
        return far, True
    near = of(lambda x, d: 1)
    same = strided is None and far and _is_same(jaxpr, near, far, size)
    return near, None if same else False


def is_open(jaxpr: Any) -> bool:
    """Whether sizes are left open, as by `jax.export`."""
    sizes = [n for x in jaxpr.invars for n in getattr(x.aval, "shape", ())]
    return not all(isinstance(n, int) for n in sizes)


def _is_same(jaxpr: Any, near: Partitioned, far: Partitioned, size: int) -> bool:
    """Whether a program is the same of neighbours and of every k-th row."""
    if far.in_gradient is not None or ir.form(near.jaxpr) != ir.form(far.jaxpr):
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
    """Constants, parameters, and the batch with its rows.

    If nothing depends on the parameters, as in `microbatch`, nobody knows what somebody
    may differentiate with respect to: then it may be anything.
    """
    n = len(jaxpr.invars) - len(rows)
    params, batch = jaxpr.invars[:n], jaxpr.invars[n:]
    any_of_them = not (call.sums or any(ir.num_readers(jaxpr, x) for x in params))

    def smooth(x: Any) -> bool:
        return any_of_them and is_inexact(x.aval)

    of_batch = enumerate(zip(batch, rows, strict=True), -call.rows)
    return [
        *(Argument(x.aval, WHOLE, smooth(x)) for x in jaxpr.constvars),
        *(Argument(x.aval, WHOLE, True) for x in params),
        *(Argument(x.aval, r, i < 0 or smooth(x)) for i, (x, r) in of_batch),
    ]


def type_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _whole_batch(call: Call) -> list[Any]:
    """The types of the batch's leaves with the rows of all devices."""
    devices, types = meshes.num_devices(call.axes), []
    for x, axis in zip(call.batch, call.split_axes, strict=True):
        shape = list(jnp.shape(x))
        shape[axis] *= devices
        apart = (call.maps or call.axes) and not meshes.varying(x)
        of = type_of(x) if apart else jax.typeof(x)
        types.append(type_here(of, tuple(shape), None))
    return types


# -- Where rows meet -------------------------------------------------------------------


def check_options(call: Call, part: Partitioned) -> None:
    """Raises if an option cannot be had because rows meet; it names the line.

    If they meet in numbers alone, these are added up first, and nothing is refused.
    """
    options = call.options
    gathered = [e for e in ir.equations(part.jaxpr) if meeting_of(e) == "all_gather"]
    if gathered:
        part = part._replace(in_gradient=gathered[0])
    if part.in_gradient is None:
        return
    where = f"rows meet at {places.place_of(part.in_gradient.source_info)}"
    if options.each or options.scatters:
        raise DoesNotFitError(
            f'If rows meet, data_axis must have sync="last", but {where}, and it is '
            f"{options.data_axis}. Leave sync out, or write the loss so that its rows "
            "do not need each other; ga_optax.batch_dependencies shows all lines."
        )
    if meshes.checks_varying():
        raise DoesNotFitError(
            "If rows meet, a jax.shard_map must have check_vma=False, but this one "
            f"checks, and {where}: JAX has no types for an axis beside its mesh. Pass "
            "that, or call at top level with data_axis=."
        )
    if found := _split_by_type(call):
        spec, axis = found
        raise DoesNotFitError(
            "If rows meet, those along a mesh axis of explicit type need "
            f"data_axis=, but {where}, and the batch is sharded as {spec} along "
            f"axis {axis}. Pass data_axis={spec[axis]!r}."
        )


def _split_by_type(call: Call) -> tuple[Any, int] | None:
    """How a leaf is sharded along its rows by an explicit axis, without `data_axis=`.

    Neighbours of those are on one device, and do not come as a micro-batch.
    """
    for x, axis in zip(call.batch, call.split_axes, strict=True):
        spec = meshes.spec_of_type(x)
        if not call.options.axes and any(spec[axis : axis + 1]):
            return spec, axis
    return None


# -- What comes back -------------------------------------------------------------------


def returned(call: Call, trace: Traced, results: Sequence[Any]) -> Any:
    """What `fun` returns for the whole batch; of rows came those of micro-batches."""
    structure, types = jax.tree.structure(trace.out), trace.closed.out_avals
    leaves = [
        _joined(call, x, layout, trace.strided) if isinstance(layout, Rows) else x
        for x, layout in zip(results, trace.part.layouts, strict=True)
    ]
    if len(leaves) > structure.num_leaves:  # the loss once more, whole
        leaves[0] = leaves.pop()
    for x in ir.roundings(trace.closed.jaxpr, trace.closed.jaxpr.outvars[0]):
        leaves[0] = leaves[0].astype(x.aval.dtype)
    return structure.unflatten(map(_as_due, leaves, types))


def of_rows(call: Call, trace: Traced, stacks: Sequence[jax.Array]) -> list[jax.Array]:
    """Gradients of leaves of the batch, from those of each micro-batch along axis 0."""
    whole = _whole_batch(call)
    triples = zip(stacks, whole, call.split_axes, strict=False)
    return [
        _joined(call, x, _rows(call, trace, due, d), trace.strided)
        for x, due, d in triples
    ]


def axes_of_results(call: Call, trace: Traced) -> list[int | None]:
    """Along which axis results have the rows of the batch, or None."""
    pairs = zip(trace.closed.out_avals, trace.part.layouts, strict=False)
    return [
        layout.dim
        if isinstance(layout, Rows) and layout == _rows(call, trace, x, layout.dim)
        else None
        for x, layout in pairs
    ]


def _rows(call: Call, trace: Traced, x: Any, d: int) -> Rows:
    """The rows of the batch along an axis of something."""
    return Rows(d, x.shape[d] // num_parts(call) if trace.strided else 1)


def _as_due(x: jax.Array, due: Any) -> jax.Array:
    """The rows that there are, without those beyond the last; in the dtype of `fun`."""
    if x.shape != due.shape:  # in a region of the user's, a device's own are fewer
        x = jax.lax.slice(x, [0] * x.ndim, list(map(min, x.shape, due.shape)))
    return x if x.dtype == due.dtype else x.astype(due.dtype)


def _joined(call: Call, x: jax.Array, rows: Rows, strided: bool | None) -> jax.Array:
    """Rows in their order, from those of each micro-batch along axis 0.

    In a region of the user's a device has its own, if they are neighbours.
    """
    d, segments = rows.dim, rows.segments
    if call.axes and segments > 1:
        x = jax.lax.all_gather(x, call.axes, tiled=True)
    if strided is None or segments == 1:
        return membership.join(x, d, None if strided is None else False)
    x = jnp.moveaxis(x, 0, d)
    before, (parts, n), after = x.shape[:d], x.shape[d : d + 2], x.shape[d + 2 :]
    shape, spec = (*before, parts * n, *after), meshes.spec_of_type(x)
    x = x.reshape(*before, parts, segments, n // segments, *after).swapaxes(d, d + 1)
    if not any(spec):
        return x.reshape(shape)
    due = *spec[: d + 1], *spec[d + 2 :]
    return jax.lax.reshape(x, shape, out_sharding=meshes.on_mesh_of(x, due))
