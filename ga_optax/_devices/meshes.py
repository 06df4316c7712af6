"""Which mesh axes split the batch, where parameters lie, and what varies over devices.

Only questions and checks stand here. What communicates is in `_collectives`.
"""

import contextlib
import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import pxla
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ga_optax._checks import brief, leaf_name, named_leaves

OWN_COPY = (
    "differentiate with respect to the device's own copy of the parameters: "
    "jax.lax.pcast(params, axis, to='varying')."
)

Axes = tuple[str, ...]
AnyMesh = Mesh | AbstractMesh


# -- Names -----------------------------------------------------------------------------


def split_spec(axes: Axes, dim: int = 0) -> PartitionSpec:
    """The spec that splits dimension `dim` over the data axes."""
    return PartitionSpec(*[None] * dim, as_entry(axes))


def as_entry(names: Axes) -> Any:
    """The entry of a spec that splits a dimension over `names`."""
    return names if len(names) > 1 else names[0] if names else None


def names_in(entry: Any) -> Axes:
    """The axes over which an entry of a spec splits its dimension."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def explicit_names(mesh: AnyMesh) -> Axes:
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
            f"but it is {brief(data_axis)}. "
            'Pass "data", for example, or None. (A DataAxis goes to value_and_grad or '
            "accumulate; MultiSteps takes what those return at top level, without a "
            "data_axis.)"
        )
    return tuple(names)


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Where programs are traced that know of no mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def of_all_rows(axes: Axes) -> list[tuple[str, int]]:
    """What a program is traced under that sees the rows of all devices along axes."""
    return [(f"all rows along {name}", 1) for name in axes]


def sees_all_rows(axes: Axes) -> bool:
    """Whether what is traced sees the rows of all devices along axes already."""
    try:
        return all(jax.lax.axis_size(name) for name, _ in of_all_rows(axes))
    except NameError:
        return False


def context_mesh() -> AnyMesh:
    """The mesh of `jax.set_mesh`, or else that of a `with mesh:` block; may be empty.

    JAX puts only the first into types and programs, and calls the second deprecated.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        blocks = getattr(pxla, "thread_resources", None)
    env = getattr(blocks, "env", None)
    return getattr(env, "physical_mesh", mesh)


def find_mesh(axes: Axes, mesh: AnyMesh | None, batch: Any = ()) -> Any:
    """The mesh that is yet to bind `axes`; None inside a `shard_map` that does.

    That is what None means wherever a mesh is handed on. Here alone, where `mesh` is
    the user's option, None looks for one: that of the context, of `jax.set_mesh` or of
    a `with mesh:` block, or else the one that `batch` lies on.

    Raises:
      ValueError: if there is no mesh, or if it lacks an axis.
    """
    context = jax.sharding.get_abstract_mesh()
    here = [name for name in axes if name in context.manual_axes]
    if len(here) == len(axes):
        return None
    if here:
        raise ValueError(
            f"data_axis must be all bound or all unbound, but of {axes} this shard_map "
            f"binds only {tuple(here)}. Name the others in its axis_names, too."
        )
    if mesh is None or context.manual_axes:  # inside a shard_map over other axes
        mesh = context if context.manual_axes else context_mesh()
    if mesh.empty:
        meshes = map(_mesh_of, jax.tree.leaves(batch))
        mesh = next((its for its in meshes if not its.empty), mesh)
    if mesh.empty:
        raise ValueError(
            f"data_axis={in_words(axes)} must be an axis of a mesh, but there is none. "
            "Call inside jax.set_mesh(mesh) or jax.shard_map, or pass DataAxis(mesh=), "
            "or a batch that lies on a mesh."
        )
    missing = [name for name in axes if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"data_axis={in_words(axes)} must be an axis of the mesh, but the mesh has "
            f"{in_words(mesh.axis_names)}. Name the axis that splits the batch."
        )
    return mesh


def _mesh_of(x: Any) -> AnyMesh:
    """The mesh that an array lies on, traced or not; an empty mesh if it has none.

    Or that on which an array of this type is to lie.
    """
    none = AbstractMesh((), ())
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return none
    tracer = isinstance(x, jax.core.Tracer)
    return getattr(jax.typeof(x).sharding if tracer else x.sharding, "mesh", none)


def is_open(tree: Any) -> bool:
    """Whether what is traced of `tree` may be compiled for one device or for several.

    Neither the context nor an array names a mesh, and there are several devices.
    """
    leaves = jax.tree.leaves(tree)
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    named = not all(mesh.empty for mesh in (context_mesh(), *map(_mesh_of, leaves)))
    return traced and not named and jax.device_count() > 1


def is_distributed(tree: Any) -> bool:
    """Whether the compiler distributes what is computed from `tree`, if that is known.

    The context has a mesh, or else the arrays do. Inside of `jit` their types name it,
    but not how its automatic axes split them.
    """
    context, leaves = context_mesh(), jax.tree.leaves(tree)
    for mesh in map(_mesh_of, leaves) if context.empty else [context]:
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True):
            if kind == AxisType.Explicit or (kind == AxisType.Auto and size > 1):
                return True
    return False


def num_devices(axes: Axes, mesh: AnyMesh | None = None) -> int:
    """Into how many parts `axes` split a batch; `mesh` as `find_mesh` returns it."""
    return math.prod(_sizes(mesh)[name] for name in axes)


def _sizes(mesh: AnyMesh | None) -> Any:
    """The size of each axis, of those that are bound as well."""
    return (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape


def in_words(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))


# -- Which axes a value varies over ----------------------------------------------------


def varying(x: Any) -> frozenset[str]:
    """The bound axes over which devices hold different values, as far as JAX knows."""
    aval = jax.typeof(x) if isinstance(x, (jax.Array, np.ndarray)) else x
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else frozenset()


def checks_varying() -> bool:
    """Whether this `shard_map` keeps track of what varies (`check_vma`)."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return bool(axes) and bool(varying(jax.lax.axis_index(axes[0])))


# -- Where parameters lie ------------------------------------------------------------


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
            names[dim] = as_entry(axes)
        return PartitionSpec(*names)

    @property
    def axes(self) -> Axes:
        return tuple(name for _, axes in self.dims for name in axes)


def placements(
    params: Any,
    specs: Any,
    axes: Axes,
    mesh: AnyMesh | None,
    option: str = "param_specs",
) -> list[Placement]:
    """How the data axes shard each leaf of `params`.

    Args:
      params: the parameters.
      specs: a tree of `PartitionSpec` or `NamedSharding` that is a prefix of `params`;
        None reads what the leaves tell: explicit axes, and arrays outside of `jit`.
      axes: the data axes.
      mesh: as `find_mesh` returns it.
      option: whose specs they are; "grad_specs" are those of whole parameters.
    """
    leaves = named_leaves(params)
    if specs is None:
        found = [None if mesh is None else known_spec(leaf) for _, leaf in leaves]
    else:
        _check_names(specs, tuple(_sizes(mesh)), option)
        found = broadcast_specs(specs, params, option)
    shape, result = _sizes(mesh), []
    for (name, leaf), spec in zip(leaves, found, strict=True):
        split = enumerate([] if spec is None else list(spec))
        dims = ((dim, tuple(n for n in names_in(x) if n in axes)) for dim, x in split)
        placement = Placement(tuple((dim, here) for dim, here in dims if here))
        # Inside a shard_map a sharded leaf is one device's part already.
        whole = mesh is not None or option == "grad_specs"
        for dim, here in placement.dims if specs is not None else ():
            size = math.prod(shape[name] for name in here) if whole else 1
            if dim >= jnp.ndim(leaf) or jnp.shape(leaf)[dim] % size:
                raise ValueError(
                    f"{option} must fit the parameters, but {spec} splits dimension "
                    f"{dim} of {name} into {size} parts, and its shape is "
                    f"{jnp.shape(leaf)}. Pass a spec that divides it."
                )
        result.append(placement)
    return result


def dims_that_split(x: Any, number: int) -> list[int]:
    """Along which dimensions so many devices can share an array, the largest first.

    Not along the first one of a stack of matrices, over which a model may scan.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return []
    dims = range(jnp.ndim(x) > 2, jnp.ndim(x))
    known = [
        d for d in dims if isinstance(x.shape[d], int) and x.shape[d] % number == 0
    ]
    return sorted(known, key=lambda d: -x.shape[d])


def known_spec(leaf: Any) -> PartitionSpec | None:
    """How an array is sharded, if its type or the array itself says so."""
    if isinstance(leaf, jax.core.Tracer):
        sharding = jax.typeof(leaf).sharding
        return sharding.spec if explicit_names(sharding.mesh) else None
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def spec_of_type(x: Any) -> tuple[Any, ...]:
    """Which explicit mesh axes split each dimension, by the type of `x`."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def num_parts(x: Any, dim: int) -> int:
    """Into how many parts explicit mesh axes split a dimension, by the type of `x`."""
    entries = spec_of_type(x)[dim : dim + 1]
    names = [name for entry in entries for name in names_in(entry)]
    return math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)


def on_mesh_of(x: jax.Array, spec: Sequence[Any]) -> NamedSharding:
    """A sharding on the mesh that the type of `x` names."""
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))


def same_mesh(x: Any, y: Any) -> bool:
    """Whether two types of arrays agree on the mesh, as explicit axes require."""
    a, b = x.sharding.mesh, y.sharding.mesh
    return a == b or not (explicit_names(a) or explicit_names(b))


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, NamedSharding))


def _check_names(specs: Any, axes: Axes, option: str) -> None:
    """Raises unless specs name axes of the mesh, each once."""
    for path, spec in jax.tree.leaves_with_path(specs, _is_spec):
        spec = spec.spec if isinstance(spec, NamedSharding) else spec
        entries = spec if isinstance(spec, PartitionSpec) else ()
        given = [x for x in entries if x is not PartitionSpec.UNCONSTRAINED]
        names = list(itertools.chain(*map(names_in, given)))
        for name in names:
            if name not in axes or names.count(name) > 1:
                twice = " twice" if name in axes else ""
                raise ValueError(
                    f"{option} must name axes of the mesh, each once, but {spec} at "
                    f"{leaf_name(path)} names {name!r}{twice}, and the mesh has "
                    f"{in_words(axes)}. Name one of these."
                )


def broadcast_specs(
    specs: Any, params: Any, option: str = "param_specs"
) -> list[PartitionSpec | None]:
    """One spec for each leaf of `params`; raises if `specs` is no prefix of it."""
    todo = "Pass jax.tree.map(lambda p: p.sharding.spec, params), for example."
    for spec in jax.tree.leaves(specs, is_leaf=_is_spec):
        if not _is_spec(spec):
            raise TypeError(
                f"{option} must be a tree of PartitionSpec that is a prefix of the "
                f"parameters' tree, but it holds {spec!r}. {todo}"
            )
    try:
        of_leaves = jax.tree.broadcast(specs, params, is_leaf=_is_spec)
    except ValueError:
        given = [path for path, _ in jax.tree.leaves_with_path(specs, _is_spec)]
        due = [path for path, _ in jax.tree.leaves_with_path(params)]
        lacking = [p for p in due if not any(p[: len(x)] == x for x in given)]
        beyond = [x for x in given if not any(p[: len(x)] == x for p in due)]
        if lacking:
            came = f"{leaf_name(lacking[0])} has no spec"
        elif beyond:
            came = f"the parameters have no {leaf_name(beyond[0])}, which has a spec"
        else:
            came = "its containers are others"
        raise ValueError(
            f"{option} must be a prefix of the parameters' tree, but {came}. {todo}"
        ) from None
    return [
        spec.spec if isinstance(spec, NamedSharding) else spec
        for spec in jax.tree.structure(params).flatten_up_to(of_leaves)
    ]


def check_scatter(
    params: Any, where: Sequence[Placement], axes: Axes, mesh: AnyMesh
) -> None:
    """Raises if JAX (up to 0.12) cannot lower the reduce-scatter."""
    explicit = tuple(name for name in explicit_names(mesh) if name not in axes)
    for (name, _), placement in zip(named_leaves(params), where, strict=True):
        if explicit and placement.dims:
            raise ValueError(
                f"{name} is sharded over {placement.axes}, and so needs automatic axes "
                f"beside it, but {explicit} is explicit. Use AxisType.Auto, or "
                'sync="each".'
            )
