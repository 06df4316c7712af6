"""Merge across devices, if axes of a mesh split the batch.

    Σ w·g over the window  =  psum over devices of Σ w·g over the device's micro-batches

Every device folds one part of the batch, and the sums are all-reduced once a window.
Inside `jax.shard_map` the axes are bound, and the functions here run collectives over
them. At top level `over_mesh` makes that region, over the data axes alone, so that the
compiler still distributes the other axes of the mesh.

A parameter that is sharded over a data axis is gathered before the window, and its
gradient scattered afterwards, along the dimension that `Placement` names.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ga_optax._checks import check_type, named_leaves, on_host
from ga_optax._devices import membership, meshes
from ga_optax._devices.meshes import AnyMesh, Axes, Placement
from ga_optax.accumulator import Accumulator

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
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x


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
    """`membership.split` of an array whose `axis` is sharded over the data axes.

    Micro-batch i holds the i-th block of rows of every device, so no data moves.
    """

    def local(x: jax.Array) -> jax.Array:
        return membership.split(x, num_microbatches, axis, strided=False)

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
