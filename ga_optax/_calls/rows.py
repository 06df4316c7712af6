"""Rows of micro-batches and of results; regions of a mesh.

    row i of micro-batch j  <->  row of the batch        one to one

Which rows a micro-batch holds, and the results for all rows. Then a call at top level
with a data axis.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .. import config
from .._devices import collectives, meshes
from .._devices.collectives import Membership
from .._loop.loop import Outcome
from .._loop.micro_step import FOLDS, Fold, Weighting
from .._partition import held, partitioned
from .._partition.held import PARTIAL, WHOLE, Axis, Layout, Rows, Uneven, type_here
from .._partition.partitioned import Argument, Partitioned, in_any_order, partition
from .._passes import jaxprs, primitives
from .._passes.jaxprs import is_inexact
from .._passes.shards import Shard, either
from .._text import warn
from .._window.flat import LONGEST
from .._window.schedule import MEETINGS
from .batches import Devices, DoesNotFitError
from .call import Call

# == Rows ==============================================================================
# The rows of each micro-batch, and the results for the rows of the whole batch.
#
# A micro-batch holds neighbouring rows, unless the compiler is known to distribute the
# batch and rows do not meet: then it holds every k-th row, and no row moves between
# devices. If the compiler decides later, when the program is lowered, the choice stays
# open, provided that the program is the same in both cases.

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
    checked, draws = call.devices.is_checked, config.whole_draws
    axis = Axis(AXIS, size, LONGEST, checked, draws, bool(call.sees))
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
    labels, draws = bool(call.sees), config.whole_draws
    axis = Axis(AXIS, parts, LONGEST, draws_whole=draws, labels=labels)
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
        return any_argument and is_inexact(x.aval)

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

    Counts are sums and extrema of no parameters: all are known before the loop.

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
            carry = jax.lax.scan(run, carry, xs)[0]
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

    `results` are the results of micro-batches, stacked if they have rows. Now that all
    worked, it is told what failed and was computed whole.
    """
    for text in held.unsaid(part.failures):
        warn(text)
    leaves = [
        _joined(call.devices, x, layout, membership) if isinstance(layout, Rows) else x
        for x, layout in zip(results, part.layouts, strict=True)
    ]
    if len(leaves) > len(jaxpr.outvars):  # the loss once more, whole
        leaves[0] = leaves.pop()
    for y in _roundings(jaxpr, jaxpr.outvars[0]):
        leaves[0] = leaves[0].astype(y.aval.dtype)
    return [_of_type(x, v.aval) for x, v in zip(leaves, jaxpr.outvars, strict=True)]


def _roundings(jaxpr: Any, result: Any) -> list[Any]:
    """A scalar before the first cast that rounds it, and after each of these casts.

    The last one is the result. A cast to a wider type may follow a rounding, as for a
    mean in bfloat16 in a float32 loss.
    """
    casts, first = [result], 0
    is_scalar = result.aval.shape == ()
    # They are at the end, so no index of all equations is made for them.
    for e in reversed(jaxpr.eqns) if is_scalar else ():
        if casts[-1] not in e.outvars:
            continue
        is_cast = e.primitive.name == primitives.CAST
        if not is_cast or not _bits(e.invars[0]) or not _bits(casts[-1]):
            break
        casts.append(e.invars[0])
        if _bits(casts[-1]) > _bits(casts[-2]):
            first = len(casts) - 1
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
        d, segments = rows.dim, rows.segments
        near = Membership.NEIGHBOURS
        parts = [_joined(Devices(), x, rows, near) for x in stacks]
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

    def axis(x: Any, layout: Layout) -> int | None:
        if not isinstance(layout, Rows):
            return None
        d = layout.dim
        return d if layout == _rows(call, x, d, membership) else None

    return [axis(x, layout) for x, layout in zip(types, part.layouts, strict=False)]


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


# == Regions ===========================================================================

REPLICATED: Any = PartitionSpec()


class ManualAxisError(DoesNotFitError):
    """`fun` shards something over a data axis that is bound, or over its mesh."""


def over_mesh(
    call: Call,
    run: Callable[..., Any],
    *others: tuple[Any, Any],
    results: Any,
    check_vma: bool,
    closed_over: Sequence[Any] = (),
) -> Any:
    """`run(call, *others)` in a `shard_map` over the data axes.

    Args:
      call: the call at top level.
      run: the function that each device runs on its part of the call.
      others: further arguments, each with its specs.
      results: the specs of the results; `gradients(call)` are those of gradients.
      check_vma: as for `jax.shard_map`. JAX has no types for an axis beside the mesh,
        nor for a constraint over all of it.
      closed_over: the arrays that `fun` closes over, as far as they are known.
    """
    options, mesh, axes = call.options, call.devices.mesh, call.devices.axes
    operands, specs = call.others, dict.fromkeys(call.others, REPLICATED)
    for role in call.roles:
        operands |= call.leaves(role)
        specs |= dict.fromkeys(call.leaves(role), REPLICATED)
    of_params = [place.spec for place in call.devices.params]
    specs |= zip(call.leaves("argnums"), of_params, strict=True)
    of_batch = [meshes.split_spec(axes, axis) for axis in call.split_axes]
    specs |= zip(call.leaves("batch_argnums"), of_batch, strict=True)
    by = meshes.By.COMPILER if call.devices.inner else meshes.By.US
    inside = call.devices._replace(mesh=None, is_checked=check_vma, by=by, mapped=True)
    values, of_others = [x for x, _ in others], [spec for _, spec in others]
    given = {id(x) for x in operands.values()}
    more = {
        -1 - i: x
        for i, x in enumerate(closed_over)
        if collectives.is_operand(x) and id(x) not in given
    }
    known, perhaps = _dims_of_shards(call, call.others | more)
    operands |= {n: x for n, x in more.items() if n in known or n in perhaps}
    specs |= dict.fromkeys(operands.keys() & more.keys(), REPLICATED)

    def mapped(dims: Mapping[int, int]) -> Callable[[Any], Any]:
        """The function, to which some operands come split along a dimension."""

        def local(leaves: Any, num_real: Any, *others: Any) -> Any:
            shards = {n: Shard(leaves[n], d, axes) for n, d in dims.items()}
            whole = {n: x.whole() for n, x in shards.items()}
            # What fun closes over it sees as it is outside.
            by_id = {id(more.get(n, whole[n])): x for n, x in shards.items()}
            here = call.with_leaves(leaves | whole)._replace(
                options=options._replace(num_real_microbatches=num_real),
                devices=inside._replace(shards=by_id),
            )
            return run(here, *others)

        of_shards = {n: meshes.split_spec(axes, d) for n, d in dims.items()}
        in_and_out = (specs | of_shards, REPLICATED, *of_others), results
        region = collectives.over_mesh(local, mesh, axes, in_and_out, check_vma)
        return lambda args: region(*args)

    args = operands, options.num_real_microbatches, *values
    if not perhaps:
        return mapped(known)(args)
    watched = [operands[n] for n in perhaps]
    return either(mapped(known), mapped(known | perhaps), args, watched, axes)


def _dims_of_shards(
    call: Call, arrays: Mapping[int, Any]
) -> tuple[dict[int, int], dict[int, int]]:
    """The dimensions along which the data axes shard arrays without rows or gradients.

    Returns: the dimensions of arrays that are sharded, and of arrays that may be.
    """
    known: dict[int, int] = {}
    perhaps: dict[int, int] = {}
    axes, devices = call.devices.axes, call.devices.number
    for n, x in arrays.items() if call.options.optimize and devices > 1 else ():
        dims = meshes.dims_that_split(x, devices)
        if not dims or jaxprs.numbers(x.shape) * x.dtype.itemsize < _SMALL:
            continue
        spec = meshes.known_spec(x)
        named = [bool({*meshes.names_in(x)} & {*axes}) for x in spec or ()]
        if any(named):
            known[n] = next((d for d in dims if any(named[d : d + 1])), dims[0])
        elif spec is None:
            perhaps[n] = dims[0]
    return known, perhaps


_SMALL = 2**16  # bytes: what has fewer is gathered once, for a message takes longer


def specs_of_gradients(call: Call) -> Any:
    """The specs of gradients, which come back from the region."""
    specs = [place.spec for place in call.devices.gradients]
    return jax.tree.structure(call.params).unflatten(specs) if specs else ()


def on_mesh(call: Call, xs: list[Any]) -> list[Any]:
    """The leaves, constrained along rows to the mesh, if `jax.jit` must know the mesh.

    `jax.jit` does not look for a mesh inside an equation.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in xs)
    devices = call.devices
    if not (traced and isinstance(devices.mesh, Mesh)):
        return xs
    specs: list[Any] = [None] * len(xs)
    for i, (x, axis) in enumerate(zip(xs, call.split_axes, strict=False)):
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * jnp.ndim(x)
        entries[axis] = meshes.as_entry(devices.axes)
        specs[i] = PartitionSpec(*entries)
    return collectives.constrain(xs, specs, devices.mesh)


# -- The errors of JAX about axes ------------------------------------------------------


@contextlib.contextmanager
def errors_explained(call: Call) -> Iterator[None]:
    """Adds to the errors of JAX about axes what to do, in the words of the options."""
    try:
        yield
    except (NameError, NotImplementedError, ValueError) as error:
        text = str(error)
        for words, todo in _ADVICE.items():
            if words in text:
                error.add_note(todo)
        names = [name for name in call.devices.bound if f"'{name}'" in text]
        if names and "manual" in text.lower():
            todo = _SHARDS if "constraint" in text else _CLOSES
            todo = _MAPS if "shard_map" in text else todo
            todo = _MESH if "mesh passed to shard_map" in text else todo
            text = f"{todo.format(names[0])} JAX says: {error}"
            raise ManualAxisError(text) from error
        raise


_AS_ARGUMENT = "an argument without a role goes whole to every device."
_ADVICE = {
    "unbound axis name": "fun communicates over an axis that is not bound here. With "
    "value_and_grad fun needs no collectives: it sees all rows.",
    "Closing over": "In terms of ga_optax: if fun closes over an array that lies on "
    f"the mesh, pass it as an argument: {_AS_ARGUMENT}",
}

# The advice on what names a data axis that is bound: regions, shardings and arrays.
_MAPS = (
    'A jax.shard_map in fun over {!r} does not go with data_axis= and sync="last". '
    'Pass sync="each", or no data_axis, and every micro-batch is reduced; or leave the '
    "shard_map out: fun runs on one device of that axis already, with its rows."
)
_MESH = (
    "A jax.shard_map in fun must not be over {!r}, since fun runs on one device of it, "
    "with its rows. Here mesh= names it too, and rows of the region cannot be divided. "
    "Leave mesh= out, in jax.set_mesh(mesh): then it is over the other axes. "
    'Or pass sync="each", or no data_axis, and every micro-batch is reduced.'
)
_CHECKED = (
    "With a jax.shard_map in fun, the one around it, over {!r}, must have "
    "check_vma=False: JAX does not compile the gradient of one in one that checks."
)
_SHARDS = (
    "With a data_axis fun must not shard anything over it by a PartitionSpec, since it "
    "sees the rows of one device, but it names {!r}. Pass with_sharding_constraint a "
    "NamedSharding, out of which the data axis is taken, or a PartitionSpec of other "
    "axes alone (in Flax, take the name out of the logical axis rules, in Haliax out "
    "of the axis mapping). In your own jax.shard_map, pass check_vma=False, too. Or "
    'pass sync="each", or no data_axis, and every micro-batch is reduced.'
)
_CLOSES = (
    "With a data_axis fun must get arrays as arguments, since it runs on one device of "
    "{!r}, but here it closes over an array that lies on the mesh. Pass the array: "
    + _AS_ARGUMENT
)


def check_no_region(call: Call, jaxpr: Any) -> None:
    """Raises if `fun` maps over an axis of which it has the rows of one device.

    JAX itself raises from 0.12 on, and computes another number before.
    """
    for e in _regions(jaxpr):
        specs = *e.params["in_specs"], *e.params["out_specs"]
        axes = {name for spec in specs for x in spec for name in meshes.names_in(x)}
        if both := axes.intersection(call.devices.bound):
            raise ManualAxisError(_MAPS.format(min(both)))


def check_regions(call: Call, jaxpr: Any) -> None:
    """Raises if a region of `fun`, over other axes, is one of another mesh.

    `fun` was traced where the data axes were not bound. A rule takes a region over to
    here, and XLA does not compile one that is computed whole, for want of a rule.
    """
    bound, context = call.devices.bound, jax.sharding.get_abstract_mesh()
    found = _regions(jaxpr) if bound else []
    if any(e.params["mesh"] != context for e in found):
        raise ManualAxisError(_MESH.format(bound[0]))
    if found and call.devices.is_checked:  # what goes back has types of no region
        raise ManualAxisError(_CHECKED.format(bound[0]))


def _regions(jaxpr: Any) -> list[Any]:
    every = jaxprs.equations(jaxpr)
    return [e for e in every if e.primitive.name == "shard_map"]


def check_not_reduced(call: Call, loss: Any) -> None:
    """Raises if the loss is that of all devices already."""
    reduced = [name for name in call.devices.bound if name not in meshes.varying(loss)]
    if reduced and meshes.checks_varying():
        raise DoesNotFitError(
            "fun must return the loss of one device's micro-batch, but its loss is the "
            f"same on all devices along {reduced[0]!r}: it is reduced already. Take "
            "the psum or pmean out of fun: the window is reduced once, at its end."
        )
