"""Merge across devices: where axes of a mesh split the batch.

    Σ w·g over the window  =  psum over devices of Σ w·g over the device's micro-batches

Every device folds its own part of the batch, and the sums meet once a window. Inside
`jax.shard_map` the axes are bound, and everything here is a collective on them; at top
level `over_mesh` makes that region, over the data axes alone, so that the other axes of
the mesh stay with the compiler.

A parameter that is sharded over a data axis is gathered before the window, and its
gradient scattered after it: `Placement` says along which dimension.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ga_optax._checks import leaf_name
from ga_optax.accumulator import Accumulator

Axes = tuple[str, ...]


class Placement(NamedTuple):
    """Where the data axes shard one leaf: pairs of a dimension and the axes along it.

    `()` is a leaf that every device holds whole. `summed` are the axes over which the
    backward pass has summed the leaf's gradient already.
    """

    dims: tuple[tuple[int, Axes], ...] = ()
    summed: Axes = ()

    @property
    def spec(self) -> PartitionSpec:
        names: list[Any] = [None] * (1 + max((dim for dim, _ in self.dims), default=-1))
        for dim, axes in self.dims:
            names[dim] = _entry(axes)
        return PartitionSpec(*names)

    @property
    def axes(self) -> Axes:
        return tuple(name for _, axes in self.dims for name in axes)


def split_spec(axes: Axes, dim: int = 0) -> PartitionSpec:
    """The spec that splits dimension `dim` over the data axes."""
    return PartitionSpec(*[None] * dim, _entry(axes))


def _entry(names: Axes) -> Any:
    """The entry of a spec that splits a dimension over `names`."""
    return names if len(names) > 1 else names[0] if names else None


def _names(entry: Any) -> Axes:
    """The axes over which an entry of a spec splits its dimension."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _explicit(mesh: Mesh | AbstractMesh) -> Axes:
    """The explicit axes of a mesh."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


# -- The mesh --------------------------------------------------------------------------


def check_data_axis(data_axis: Any) -> Axes:
    """Returns the names of the data axes, `()` for None; or raises."""
    if data_axis is None:
        return ()
    names = (data_axis,) if isinstance(data_axis, str) else data_axis
    if (
        not isinstance(names, (tuple, list))
        or not names
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) < len(names)
    ):
        raise TypeError(
            "data_axis must be the name of a mesh axis, or a tuple of different names, "
            f'but it is {data_axis!r}. Pass "data", for example, or None.'
        )
    if not hasattr(jax.lax, "pcast"):
        raise ValueError(
            "data_axis needs jax >= 0.9, for jax.lax.pcast, but this is jax "
            f"{jax.__version__}. Install a newer one, or leave data_axis out: the "
            "gradient is then reduced in every micro-step."
        )
    return tuple(names)


def find_mesh(axes: Axes, mesh: Mesh | AbstractMesh | None, batch: Any = ()) -> Any:
    """The mesh whose `axes` are still to be bound; None inside their `shard_map`.

    Without `mesh` it is that of the context, or else the one that `batch` lies on.

    Raises:
      ValueError: where there is no mesh, or it lacks an axis.
    """
    context = jax.sharding.get_abstract_mesh()
    here = [name for name in axes if name in context.manual_axes]
    if len(here) == len(axes):
        return None
    if here:
        raise ValueError(
            f"data_axis must be all bound or all unbound, but of {axes} this "
            f"shard_map binds {tuple(here)} alone. Name the others in its axis_names, "
            "too."
        )
    if mesh is None or context.manual_axes:  # inside a shard_map over other axes
        mesh = context
    if mesh.empty:
        found = [m for m in map(_mesh_of, jax.tree.leaves(batch)) if not m.empty]
        mesh = found[0] if found else mesh
    if mesh.empty:
        raise ValueError(
            f"data_axis={_words(axes)} must be an axis of a mesh, but there is none. "
            "Call inside jax.set_mesh(mesh), pass mesh= or a batch that lies on one, "
            "or call inside jax.shard_map over that axis."
        )
    missing = [name for name in axes if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"data_axis={_words(axes)} must be an axis of the mesh, but the mesh has "
            f"{_words(mesh.axis_names)}. Name the axis that splits the batch."
        )
    return mesh


def _mesh_of(x: Any) -> Mesh | AbstractMesh:
    """The mesh that an array lies on, traced or not; an empty one where it has none."""
    none = AbstractMesh((), ())
    if not isinstance(x, jax.Array):
        return none
    tracer = isinstance(x, jax.core.Tracer)
    return getattr(jax.typeof(x).sharding if tracer else x.sharding, "mesh", none)


def num_devices(axes: Axes, mesh: Mesh | AbstractMesh | None) -> int:
    """Into how many parts `axes` split a batch; `mesh` as `find_mesh` returns it."""
    shape = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    return math.prod(shape[name] for name in axes)


def _words(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))


# -- Which axes a value varies over ----------------------------------------------------


def varying(x: Any) -> frozenset[str]:
    """The bound axes over which devices hold different values, as far as JAX knows."""
    aval = jax.typeof(x) if isinstance(x, (jax.Array, np.ndarray)) else x
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def vary(tree: Any, axes: Axes) -> Any:
    """Marks every leaf as the device's own, so that no transpose sums it over `axes`.

    With respect to a value that all devices share, JAX returns a gradient that is
    summed over them already: one all-reduce in every micro-step.
    """

    def mark(x: Any) -> Any:
        missing = tuple(name for name in axes if name not in varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else jnp.asarray(x)

    return jax.tree.map(mark, tree)


def checks_varying() -> bool:
    """Whether this `shard_map` keeps track of what varies (`check_vma`)."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return bool(axes) and bool(varying(jax.lax.axis_index(axes[0])))


# -- Where parameters are --------------------------------------------------------------


def placements(
    params: Any, specs: Any, axes: Axes, mesh: Mesh | AbstractMesh | None
) -> list[Placement]:
    """How the data axes shard each leaf of `params`.

    Args:
      params: the parameters.
      specs: a tree of `PartitionSpec` or `NamedSharding` that is a prefix of `params`;
        None reads what the leaves tell: explicit axes, and arrays outside of `jit`.
      axes: the data axes.
      mesh: as `find_mesh` returns it.
    """
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    if not axes:
        return [Placement() for _ in paths]
    if specs is None:
        found = [None if mesh is None else _known_spec(leaf) for _, leaf in paths]
    else:
        found = _broadcast(specs, params)
    shape = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    result = []
    for (path, leaf), spec in zip(paths, found, strict=True):
        names = [] if spec is None else list(spec)
        dims = []
        for dim, entry in enumerate(names):
            here = tuple(name for name in _names(entry) if name in axes)
            if here:
                dims.append((dim, here))
        placement = Placement(tuple(dims))
        # Inside a shard_map a leaf is one device's part already.
        for dim, here in placement.dims if specs is not None else ():
            size = math.prod(shape[name] for name in here) if mesh is not None else 1
            if dim >= jnp.ndim(leaf) or jnp.shape(leaf)[dim] % size:
                raise ValueError(
                    f"param_specs must fit the parameters, but {spec} splits dimension "
                    f"{dim} of {leaf_name(path)} into {size} parts, and its shape is "
                    f"{jnp.shape(leaf)}. Pass the spec with which it is sharded."
                )
        result.append(placement)
    return result


def _known_spec(leaf: Any) -> PartitionSpec | None:
    if isinstance(leaf, jax.core.Tracer):
        sharding = jax.typeof(leaf).sharding
        if not _explicit(sharding.mesh):
            return None
    else:
        sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def explicit_axes(x: Any, dim: int) -> Axes:
    """The explicit mesh axes over which the type of `x` splits a dimension."""
    if not isinstance(x, jax.Array):
        return ()
    sharding = jax.typeof(x).sharding
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= dim:
        return ()
    explicit = _explicit(sharding.mesh)
    return tuple(name for name in _names(sharding.spec[dim]) if name in explicit)


def same_mesh(x: jax.Array, y: jax.Array) -> bool:
    """Whether the types of `x` and `y` agree on the mesh, where axes are explicit."""
    a, b = (jax.typeof(z).sharding.mesh for z in (x, y))
    return a == b or not (_explicit(a) or _explicit(b))


def _broadcast(specs: Any, params: Any) -> list[PartitionSpec | None]:
    """One spec for each leaf of `params`."""

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, (PartitionSpec, NamedSharding))

    given, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    todo = "Pass jax.tree.map(lambda p: p.sharding.spec, params), for example."
    for spec in given:
        if not is_spec(spec):
            raise TypeError(
                "param_specs must be a tree of PartitionSpec that is a prefix of the "
                f"parameters' tree, but it holds {spec!r}. {todo}"
            )
    try:
        parts = structure.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(
            "param_specs must be a prefix of the parameters' tree, but it is "
            f"{structure}: {error}. {todo}"
        ) from None
    return [
        spec.spec if isinstance(spec, NamedSharding) else spec
        for spec, part in zip(given, parts, strict=True)
        for _ in jax.tree.leaves(part)
    ]


def gather(leaves: list[Any], where: Sequence[Placement]) -> list[Any]:
    """Puts sharded leaves together, on every device."""

    def whole(x: Any, placement: Placement) -> Any:
        for dim, axes in placement.dims:
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
        return x

    return [whole(x, place) for x, place in zip(leaves, where, strict=True)]


def reduce(leaves: list[Any], where: Sequence[Placement], axes: Axes) -> list[Any]:
    """The sum over devices: an all-reduce, or a reduce-scatter of a sharded leaf."""
    scattered = []
    for x, placement in zip(leaves, where, strict=True):
        for dim, names in placement.dims:
            x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
        scattered.append(x)
    # One psum of the leaves with the same axes left is one collective to XLA.
    result = list(scattered)
    groups: dict[Axes, list[int]] = {}
    for i, placement in enumerate(where):
        done = placement.axes + placement.summed
        left = tuple(name for name in axes if name not in done)
        groups.setdefault(left, []).append(i)
    for left, members in groups.items():
        if left:
            sums = jax.lax.psum([scattered[i] for i in members], left)
            for i, x in zip(members, sums, strict=True):
                result[i] = x
    return result


def check_scatter(
    params: Any, where: Sequence[Placement], axes: Axes, mesh: Mesh | AbstractMesh
) -> None:
    """Raises where JAX (up to 0.12) cannot lower a reduce-scatter."""
    explicit = tuple(name for name in _explicit(mesh) if name not in axes)
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    for (path, _), placement in zip(paths, where, strict=True):
        if explicit and placement.dims:
            raise ValueError(
                'Parameters that are sharded over the data axis need sync="each", or '
                "the other axes of the mesh to be automatic, but "
                f"{leaf_name(path)} is sharded over {placement.axes}, and {explicit} "
                'explicit. Use AxisType.Auto for the latter, or sync="each".'
            )


def merge_across(acc: Accumulator, data_axis: str | Sequence[str]) -> Accumulator:
    """Adds the accumulators of all devices along `data_axis`, inside `jax.shard_map`.

    The one communication of a window that `accumulate` filled device by device. Merge
    once, at its end, and start the next from `accumulator.init`: what is merged twice
    counts again on every device.

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

    **Exactness.** That of a sum over devices, in the order of the backend's all-reduce;
    the same on every device, and in every run on the same devices.

    Args:
      acc: this device's accumulator.
      data_axis: the axis, or the axes, to add over; bound by `jax.shard_map`.

    Returns:
      The accumulator of all micro-batches of all devices, the same on each. An
      accumulator that is empty must be empty on all.

    Raises:
      ValueError: where `data_axis` is not bound, or `acc` is summed over it already.
    """
    axes = check_data_axis(data_axis)
    if find_mesh(axes, None) is not None:
        raise ValueError(
            f"merge_across needs data_axis={_words(axes)} to be bound, but this is "
            "outside of a jax.shard_map over it. At top level accumulate(data_axis=) "
            "has merged what it returns."
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(acc.total)[0]:
        same = tuple(name for name in axes if name not in varying(leaf))
        if same and checks_varying():
            raise ValueError(
                "merge_across needs the accumulator of one device, but "
                f"{leaf_name(path)} of acc.total is the same along {same}: it is "
                "summed over them already. Accumulate with data_axis=, or "
                "differentiate with respect to the device's own copy of the "
                "parameters: jax.lax.pcast(params, axis, to='varying')."
            )
    leaves, structure = jax.tree.flatten(acc.total)
    empty = acc.count == 0
    leaves = [jnp.where(empty, jnp.zeros_like(x), x) for x in leaves]
    *leaves, weight = reduce(
        vary([*leaves, acc.weight], axes), [Placement()] * (len(leaves) + 1), axes
    )
    return Accumulator(
        jax.tree.unflatten(structure, leaves),
        weight,
        acc.count * num_devices(axes, None),
    )


# -- At top level ----------------------------------------------------------------------


def is_operand(x: Any) -> bool:
    """Whether `over_mesh` has to be given `x`, and cannot close over it."""
    if isinstance(x, jax.core.Tracer):
        return True
    return isinstance(x, jax.Array) and len(x.sharding.device_set) > 1


def over_mesh(
    run: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    axes: Axes,
    args: tuple[Any, ...],
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Any:
    """`run(*args)` in a `shard_map` over the data axes, the others left as they are.

    `in_specs` and `out_specs` may be prefixes, as for `jax.shard_map`.
    """
    leaves, structure = jax.tree.flatten(args)
    given, prefix = jax.tree.flatten(
        in_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    specs = [
        spec
        for spec, part in zip(given, prefix.flatten_up_to(args), strict=True)
        for _ in jax.tree.leaves(part)
    ]
    leaves = [_arrange(x, s, axes, mesh) for x, s in zip(leaves, specs, strict=True)]
    return jax.shard_map(
        run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes)
    )(*jax.tree.unflatten(structure, leaves))


def zeros(aval: Any) -> jax.Array:
    """Zeros of a type, sharded as it says where axes are explicit."""
    x = jnp.zeros(aval.shape, aval.dtype)
    spec = getattr(aval.sharding, "spec", PartitionSpec())
    return jax.reshard(x, aval.sharding) if any(spec) else x


def _arrange(x: Any, spec: PartitionSpec, axes: Axes, mesh: Mesh | AbstractMesh) -> Any:
    """Reshards `x` along explicit data axes, where its type has to say `spec`."""
    if not set(axes) & set(_explicit(mesh)):
        return x
    sharding = jax.typeof(x).sharding
    given = list(sharding.spec) if isinstance(sharding, NamedSharding) else []
    due: list[Any] = []
    for dim in range(jnp.ndim(x)):
        old = _names(given[dim]) if dim < len(given) else ()
        new = _names(spec[dim]) if dim < len(spec) else ()
        names = (*new, *(name for name in old if name not in axes))
        due.append(_entry(names))
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*due)))


def split_shards(
    x: Any, num_microbatches: int, axes: Axes, mesh: Mesh | AbstractMesh
) -> jax.Array:
    """`[batch, ...]` as `[num_microbatches, micro-batch, ...]`; no data moves.

    Micro-batch i holds the i-th block of rows of every device.
    """

    def local(x: jax.Array) -> jax.Array:
        return jnp.reshape(x, (num_microbatches, -1, *x.shape[1:]))

    return over_mesh(local, mesh, axes, (x,), (split_spec(axes),), split_spec(axes, 1))


def constrain(tree: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Tells the compiler where automatic axes have to shard `tree`."""
    if _explicit(mesh):
        return tree  # it is in the types
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure,
        [
            x
            if spec is None
            else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
            for x, spec in zip(leaves, _broadcast(specs, tree), strict=True)
        ],
    )
