"""Everything that communicates, or keeps rows where they are.

    Σ w·g over the window  =  psum over devices of Σ w·g over the device's micro-batches

Collectives of one window come first; then the split of a batch into micro-batches, so
that no row moves; then sums in one order on any number of devices.
"""

import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.flatten_util import ravel_pytree
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from .. import accumulator
from .._checks import check_type, is_on_host, named_leaves
from ..accumulator import Accumulator
from . import meshes
from .meshes import AnyMesh, Axes, Placement

# == Collectives =======================================================================
# Merge across devices, if axes of a mesh split the batch.
#
#   Σ w·g over the window  =  psum over devices of Σ w·g over the device's micro-batches
#
# Every device folds one part of the batch, and the sums are all-reduced once a window.
# Inside `jax.shard_map` the axes are bound, and the functions here run collectives over
# them. At top level `over_mesh` makes that region, over the data axes alone, so that
# the compiler still distributes the other axes of the mesh.
#
# A parameter that is sharded over a data axis is gathered before the window, and its
# gradient scattered afterwards, along the dimension that `Placement` names.

# -- Inside a shard_map ----------------------------------------------------------------


def vary(tree: Any, axes: Axes) -> Any:
    """Marks every leaf as varying over `axes`, so that no transpose sums over `axes`.

    With respect to a value that is the same on all devices, JAX returns a gradient that
    is summed over devices already: one all-reduce in every micro-step.
    """

    def mark(x: Any) -> Any:
        missing = tuple(name for name in axes if name not in meshes.varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else jnp.asarray(x)

    return jax.tree.map(mark, tree)


def gather(leaves: list[Any], where: Sequence[Placement]) -> list[Any]:
    """All-gathers sharded leaves."""

    def whole(x: Any, placement: Placement) -> Any:
        for dim, axes in placement.dims:
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
        return x

    return [whole(x, place) for x, place in zip(leaves, where, strict=True)]


def part(x: jax.Array, placement: Placement, zero: float = 0.0) -> jax.Array:
    """Zeros (`zero` may be -0.0) of the shape of one device's part of `x`."""
    shape, sizes = list(x.shape), jax.sharding.get_abstract_mesh().shape
    for dim, axes in placement.dims:
        shape[dim] //= math.prod(sizes[name] for name in axes)
    return jnp.full(shape, zero, x.dtype)


def scatter(x: jax.Array, placement: Placement, ndim: int) -> jax.Array:
    """One device's part of the sum of `x`, a slice of a leaf with `ndim` dimensions."""
    for dim, names in placement.dims:
        dim += x.ndim - ndim
        x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
    return x


def reduce(leaves: list[Any], where: Sequence[Placement], axes: Axes) -> list[Any]:
    """The sum over devices: an all-reduce, or a reduce-scatter of a sharded leaf."""
    result, groups = [], {}
    for i, (x, placement) in enumerate(zip(leaves, where, strict=True)):
        result.append(scatter(x, placement, x.ndim))
        done = placement.axes + placement.summed
        other_axes = tuple(name for name in axes if name not in done)
        groups.setdefault(other_axes, []).append(i)
    # XLA makes one collective of one psum, so leaves with the same axes share a psum.
    for other_axes, members in groups.items():
        if other_axes:
            sums = jax.lax.psum([result[i] for i in members], other_axes)
            for i, x in zip(members, sums, strict=True):
                result[i] = x
    return result


def merge_across(acc: Accumulator, data_axis: str | Sequence[str]) -> Accumulator:
    """Adds the accumulators of all devices along `data_axis`, inside `jax.shard_map`.

    This is the one communication of a window that `accumulate` filled device by device.
    Merge once, at the end of the window, and start the next window from
    `accumulator.init`. Merged twice, an accumulator counts once for every device.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> import ga_optax as ga
    >>> auto = jax.sharding.AxisType.Auto
    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(auto,))
    >>> def window(w, x):
    ...     add = ga.accumulate(lambda w, x: jnp.mean(x * w), data_axis="data")
    ...     acc = ga.accumulator.init(w)
    ...     for i in range(2):
    ...         _, acc = add(acc, w, x[i::2])
    ...     return ga.accumulator.mean(ga.merge_across(acc, "data"))
    >>> step = jax.jit(
    ...     jax.shard_map(window, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    >>> rows = 2 * jax.device_count()
    >>> print(step(jnp.float32(1.0), jnp.ones(rows)))
    1.0

    **Exactness.** The backend's all-reduce adds the sums, in its order. The result is
    the same on every device, and in every run on the same devices.

    Args:
      acc: this device's accumulator.
      data_axis: the axis, or the axes, to add over; bound by `jax.shard_map`.

    Returns:
      The accumulator of all devices, the same on each: `total` and `weight` are sums;
      `count` is the count of one device, since all devices step at the same time. If
      the accumulator is empty on one device, it must be empty on all.

    Raises:
      TypeError: if `acc` is no accumulator.
      ValueError: if `data_axis` is not bound, or if `acc` is summed over it already.
    """
    axes = meshes.check_data_axis(data_axis)
    todo = "The order is merge_across(acc, data_axis): pass the accumulator first."
    check_type("acc", acc, Accumulator, todo)
    if meshes.find_mesh(axes, None) is not None:
        raise ValueError(
            f"merge_across must be called inside a jax.shard_map over data_axis={axes},"
            " but this call is outside. At top level accumulate(data_axis=) returns an "
            "accumulator that is merged already."
        )
    for name, leaf in named_leaves(acc.total):
        equal_axes = tuple(axis for axis in axes if axis not in meshes.varying(leaf))
        if equal_axes and meshes.checks_varying():
            raise ValueError(
                f"merge_across needs the accumulator of one device, but {name} of "
                f"acc.total is the same along {equal_axes}: it is summed over them "
                f"already. Accumulate with data_axis=, or {meshes.OWN_COPY}"
            )
    empty = acc.count == 0
    total = jax.tree.map(lambda x: jnp.where(empty, jnp.zeros_like(x), x), acc.total)
    total, weight = jax.lax.psum(vary((total, acc.weight), axes), axes)
    return Accumulator(total, weight, acc.count)


# -- At top level ----------------------------------------------------------------------


def is_operand(x: Any) -> bool:
    """True if `x` must be an argument of `over_mesh`, and not a closed-over value."""
    if isinstance(x, jax.core.Tracer):
        return True
    return isinstance(x, jax.Array) and len(x.sharding.device_set) > 1


def over_mesh(
    fun: Callable[..., Any],
    mesh: AnyMesh,
    axes: Axes,
    specs: tuple[tuple[Any, ...], Any],
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Runs `fun` in a `shard_map` over the data axes alone.

    `specs` are `in_specs` and `out_specs`, which may be prefixes.
    """
    in_specs, out_specs = specs
    mapped = jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=check_vma,
    )

    def resharded(*args: Any) -> Any:
        specs = jax.tree.broadcast(
            in_specs, args, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        return mapped(
            *jax.tree.map(lambda x, spec: _resharded(x, spec, axes, mesh), args, specs)
        )

    return resharded


def one_like(x: jax.Array) -> jax.Array:
    """The cotangent 1 of a scalar, which varies over devices as the scalar does."""
    return vary(jnp.ones_like(x), tuple(meshes.varying(x)))


def on_device(x: jax.Array) -> jax.Array:
    """`x` in the memory of the device.

    JAX moves the gradient of what was in the host's memory back to there.
    """
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def zeros(aval: Any) -> jax.Array:
    """Zeros of a type, sharded along the type's explicit axes.

    Outside of a program and of `jax.set_mesh`, no array has a sharding in its type.
    """
    x = jnp.zeros(aval.shape, aval.dtype)
    spec = getattr(aval.sharding, "spec", PartitionSpec())
    known = isinstance(x, jax.core.Tracer) or not jax.sharding.get_abstract_mesh().empty
    return jax.reshard(x, aval.sharding) if any(spec) and known else x


def _resharded(x: Any, spec: PartitionSpec, axes: Axes, mesh: AnyMesh) -> Any:
    """Reshards `x` along explicit data axes, so that its type has `spec` for them."""
    explicit = meshes.explicit_names(mesh)
    if not set(axes) & set(explicit):
        return x
    entries, old_spec = [], meshes.spec_of_type(x)
    for _, old, new in itertools.zip_longest(range(jnp.ndim(x)), old_spec, spec):
        other_names = (name for name in meshes.names_in(old) if name not in axes)
        data_names = (name for name in meshes.names_in(new) if name in explicit)
        entries.append(meshes.as_entry((*data_names, *other_names)))
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))


def split_shards(
    x: Any, num_microbatches: int, axes: Axes, mesh: AnyMesh, axis: int = 0
) -> jax.Array:
    """`split_rows` of an array whose `axis` is sharded over the data axes.

    Micro-batch i holds the i-th block of rows of every device, so no data moves.
    """

    def local(x: jax.Array) -> jax.Array:
        return split_rows(x, num_microbatches, axis, Membership.NEIGHBOURS)

    specs = (meshes.split_spec(axes, axis),), meshes.split_spec(axes, axis + 1)
    return over_mesh(local, mesh, axes, specs)(x)


def constrain(tree: Any, specs: Any, mesh: AnyMesh) -> Any:
    """Tells the compiler how to shard `tree` over automatic axes."""
    if meshes.explicit_names(mesh):
        return tree  # the types have the sharding
    leaves, structure = jax.tree.flatten(tree)
    for i, spec in enumerate(meshes.broadcast_specs(specs, tree)):
        if spec is not None:
            sharding = NamedSharding(mesh, spec)
            leaves[i] = jax.lax.with_sharding_constraint(leaves[i], sharding)
    return jax.tree.unflatten(structure, leaves)


# == Membership ========================================================================
# Splits a batch into micro-batches, and joins them again.
#
# On one device a micro-batch holds neighbours: of B rows in k micro-batches,
# micro-batch i holds the rows from `i·B/k` up to `(i + 1)·B/k`. On several devices the
# split is strided: micro-batch i holds the rows i, i + k, i + 2k, ... So it has as many
# rows of every device, however the compiler distributes the batch, and no row moves.
#
# If no mesh is named, the number of devices is unknown until a program is lowered: one
# traced program may run on one device and on eight. The split is then a primitive, and
# its lowering rule chooses.


class Membership(enum.Enum):
    """The rows that micro-batch i of k holds, of B rows."""

    NEIGHBOURS = "i·B/k, i·B/k + 1, ..."
    STRIDED = "i, i + k, i + 2k, ..."
    EITHER = "the lowering chooses: the program is the same in both cases"


def split_rows(
    x: ArrayLike, num_microbatches: int, axis: int, membership: Membership
) -> jax.Array:
    """`[..., batch, ...]` as `[num_microbatches, ..., micro-batch, ...]`."""
    x = jnp.asarray(x)
    if membership is Membership.EITHER:
        return _operations()[0].bind(x, num_microbatches=num_microbatches, axis=axis)
    return _split(x, num_microbatches, axis, membership is Membership.STRIDED)


def join_rows(x: jax.Array, axis: int, membership: Membership) -> jax.Array:
    """The inverse of `split_rows`: the rows of the batch, in their order."""
    if membership is Membership.EITHER:
        return _operations()[1].bind(x, num_microbatches=x.shape[0], axis=axis)
    return _join(x, x.shape[0], axis, membership is Membership.STRIDED)


def _split(x: jax.Array, num_microbatches: int, axis: int, strided: bool) -> jax.Array:
    parts = num_microbatches, x.shape[axis] // num_microbatches
    parts = parts[::-1] if strided else parts
    x = jnp.reshape(x, (*x.shape[:axis], *parts, *x.shape[axis + 1 :]))
    return jnp.moveaxis(x, axis + strided, 0)


def _join(x: jax.Array, num_microbatches: int, axis: int, strided: bool) -> jax.Array:
    x = jnp.moveaxis(x, 0, axis + strided)
    rows = num_microbatches * x.shape[axis + 1 - strided]
    return jnp.reshape(x, (*x.shape[:axis], rows, *x.shape[axis + 2 :]))


# -- Splits chosen by the lowering -----------------------------------------------------


@functools.cache
def _operations() -> tuple[core.Primitive, core.Primitive]:
    """`split_rows` and `join_rows` as primitives: each is the other's transpose."""
    split = _primitive("ga_optax_split", _split)
    join = _primitive("ga_optax_join", _join)
    _add_transformations(split, transpose=join)
    _add_transformations(join, transpose=split)
    return split, join


def _primitive(name: str, fun: Callable[..., jax.Array]) -> core.Primitive:
    def types(x: Any, **params: Any) -> Any:
        out = jax.eval_shape(functools.partial(fun, strided=False, **params), x)
        return jax.core.ShapedArray(out.shape, out.dtype)

    def lowered(context: Any, x: Any, **params: Any) -> Any:
        devices = getattr(context.module_context, "axis_context", None)
        strided = getattr(devices, "num_devices", 1) > 1
        chosen = functools.partial(fun, strided=strided, **params)
        return mlir.lower_fun(chosen, multiple_results=False)(context, x)

    def evaluated(x: Any, **params: Any) -> jax.Array:
        return fun(x, strided=len(jnp.asarray(x).devices()) > 1, **params)

    primitive = core.Primitive(name)
    primitive.def_impl(evaluated)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, lowered)
    return primitive


def _add_transformations(primitive: core.Primitive, transpose: core.Primitive) -> None:
    def transposed(cotangent: Any, x: Any, **params: Any) -> list[Any]:
        return [transpose.bind(cotangent, **params)]

    def batched(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
        [x], [dim] = args, dims
        out = primitive.bind(jnp.moveaxis(x, dim, -1), **params)
        return out, out.ndim - 1

    ad.deflinear2(primitive, transposed)
    batching.primitive_batchers[primitive] = batched


# == Logical devices ===================================================================
# The sum of logical devices: one order of additions, on any number of devices.
#
#     s₀   s₁   s₂   s₃      the sums of the logical devices
#       s₀₁       s₂₃        neighbours first
#           s₀₁₂₃
#
# There are 2ⁱ logical devices, and 2ʲ devices hold 2ⁱ⁻ʲ neighbours each. So a device
# adds up a whole subtree, and sends one sum, as without logical devices.

T = TypeVar("T")
# Smaller leaves share a message: copying them takes less time than a message each.
_SMALL = 2**14


def rounded_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x + y` of numbers of any kind, rounded as an accumulator rounds."""
    return accumulator.plus(x, y) if jnp.issubdtype(x.dtype, jnp.inexact) else x + y


def sum_of_neighbours(
    sum_one: Callable[[Any, T], tuple[T, Any]],
    xs: Any,
    number: int,
    buffers: list[T],
    join: Callable[[T, T], T],
) -> tuple[list[T], Any]:
    """The sum of `number` neighbours on this device, with a buffer for each level.

    Args:
      sum_one: `(part of xs, buffer) -> (sum, stacked)` of one logical device.
      xs: the arguments of all, `[number, ...]`.
      number: the number of logical devices, a power of two.
      buffers: one for the sum of each level, `log2(number) + 1`. Their values are not
        read: the loops overwrite the same few buffers.
      join: adds the sums of two neighbours.

    Returns:
      The buffers, the sum last, and the stacks, `[number, ...]`.
    """
    *lower, top = buffers
    if number == 1:
        out, stacked = sum_one(jax.tree.map(lambda x: x[0], xs), top)
        return [out], jax.tree.map(lambda x: x[None], stacked)

    def half(carry: tuple[list[T], T], inputs: Any) -> tuple[tuple[list[T], T], Any]:
        (lower, total), (is_first, part) = carry, inputs
        lower, stacked = sum_of_neighbours(sum_one, part, number // 2, lower, join)
        both = join(total, lower[-1])
        total = jax.tree.map(functools.partial(jnp.where, is_first), lower[-1], both)
        return (lower, total), stacked

    halves = jax.tree.map(lambda x: jnp.reshape(x, (2, number // 2, *x.shape[1:])), xs)
    inputs = jnp.array([True, False]), halves
    (lower, top), stacked = jax.lax.scan(half, (lower, top), inputs)
    stacked = jax.tree.map(lambda x: jnp.reshape(x, (number, *x.shape[2:])), stacked)
    return [*lower, top], stacked


def _added(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The sum over axis 0, whose length is a power of two."""
    while x.shape[0] > 1:
        x = rounded_sum(x[0::2], x[1::2])
        if jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).bits < 32:
            x = accumulator.rounded(x, zero)  # or XLA would skip the rounding
    return x[0]


def reduce_in_order(
    leaves: list[jax.Array],
    where: Sequence[Placement],
    axes: Axes,
    zero: jax.Array,
) -> list[jax.Array]:
    """`reduce_in_order` with additions in the order of the tree.

    Every device gets one share of all sums, adds up the share, and, unless the result
    is sharded, sends it to the other devices: the bytes of a ring's all-reduce.
    """
    number = meshes.num_devices(axes)
    if number == 1:
        return reduce(leaves, where, axes)
    result: list[Any] = list(leaves)
    packs: dict[Any, list[int]] = {}
    for i, (x, placement) in enumerate(zip(leaves, where, strict=True)):
        if placement.dims or x.size >= _SMALL:
            result[i] = _reduce_leaf(x, placement, axes, zero)
        else:
            packs.setdefault(x.dtype, []).append(i)
    for members in packs.values():
        flat, unravel = ravel_pytree([leaves[i] for i in members])
        sums = unravel(_reduce_leaf(flat, Placement(), axes, zero))
        for i, x in zip(members, sums, strict=True):
            result[i] = x
    return result


def _reduce_leaf(
    x: jax.Array, placement: Placement, axes: Axes, zero: jax.Array
) -> jax.Array:
    sizes, axes_of_dim = jax.sharding.get_abstract_mesh().shape, dict(placement.dims)
    # Splits a sharded dimension into one for each mesh axis, and one for the rest.
    shape: list[int] = []
    dims: dict[str, int] = {}
    for dim, size in enumerate(x.shape):
        for name in axes_of_dim.get(dim, ()):
            dims[name] = len(shape)
            shape.append(sizes[name])
            size //= sizes[name]
        shape.append(size)
    x = jnp.reshape(x, shape)
    sharded = set(dims)
    # The last axes, whose devices are neighbours, come first.
    for is_sharded, names in itertools.groupby(reversed(axes), lambda n: n in sharded):
        if not is_sharded:
            x = _all_reduce(x, tuple(names)[::-1], zero)
            continue
        for name in names:
            dim = dims[name]
            x = _added(jax.lax.all_to_all(x, name, dim, 0), zero)
            dims = {other: i - (i > dim) for other, i in dims.items()}
    return x


def _all_reduce(x: jax.Array, axes: Axes, zero: jax.Array) -> jax.Array:
    """The sum over `axes`, on all of their devices."""
    number = meshes.num_devices(axes)
    shape, size = x.shape, x.size
    dim = next((i for i in range(x.ndim) if shape[i] % number == 0), None)
    if dim is None:
        x, dim = jnp.pad(jnp.ravel(x), (0, -size % number)), 0
    parts = number, x.shape[dim] // number
    x = jnp.reshape(x, (*x.shape[:dim], *parts, *x.shape[dim + 1 :]))
    share = _added(jax.lax.all_to_all(x, axes, dim, 0), zero)
    whole = jax.lax.all_gather(share, axes, axis=dim, tiled=True, to="invarying")
    return whole if whole.shape == shape else jnp.reshape(whole[:size], shape)
