"""Meshes: what binds an axis, which dimensions it splits, who distributes the batch.

    batch [n, ...] over the data axes; parameters and other axes stay with the compiler

Questions have their answers here; `collectives` communicates.
"""

import contextlib
import dataclasses
import enum
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

from .. import _checks
from .._checks import brief, check_int, divisors, leaf_name, named_leaves, one_of

# == Axes and shardings ================================================================
# Questions about meshes: axes of the batch, shardings of parameters, varying values.
#
# This module only reads and checks; `collectives` communicates.

OWN_COPY = (
    "differentiate with respect to a copy of the parameters for each device: "
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
            'Pass "data", for example, or None. (Only value_and_grad and accumulate '
            "take a DataAxis; MultiSteps takes their results at top level without a "
            "data_axis.)"
        )
    return tuple(names)


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """A context without a mesh, for traces that must not depend on a mesh."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def type_without_mesh(x: Any) -> jax.ShapeDtypeStruct:
    """The type of a value, without a mesh."""
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def of_all_rows(axes: Axes) -> list[tuple[str, int]]:
    """Axis names, with sizes, that mark a trace at the rows of all devices."""
    return [(f"all rows along {name}", 1) for name in axes]


def sees_all_rows(axes: Axes) -> bool:
    """True inside a trace at the rows of all devices along `axes`."""
    try:
        return all(jax.lax.axis_size(name) for name, _ in of_all_rows(axes))
    except NameError:
        return False


def context_mesh() -> AnyMesh:
    """The mesh of `jax.set_mesh`, or else of a `with mesh:` block; may be empty.

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
    """The mesh of `axes` at top level; None inside a `shard_map` that binds `axes`.

    In every other function of the package a mesh of None has this meaning. Here `mesh`
    is the user's option, and None means the mesh of the context (`jax.set_mesh` or a
    `with mesh:` block), or else the mesh of `batch`.

    Raises:
      ValueError: if there is no mesh, or if the mesh lacks an axis.
    """
    context = jax.sharding.get_abstract_mesh()
    bound = [name for name in axes if name in context.manual_axes]
    if len(bound) == len(axes):
        return None
    if bound:
        raise ValueError(
            f"data_axis must be all bound or all unbound, but of {axes} this shard_map "
            f"binds only {tuple(bound)}. Name the other axes in axis_names, too."
        )
    if mesh is None or context.manual_axes:  # inside a shard_map over other axes
        mesh = context if context.manual_axes else context_mesh()
    if mesh.empty:
        meshes = map(_mesh_of, jax.tree.leaves(batch))
        mesh = next((other for other in meshes if not other.empty), mesh)
    if mesh.empty:
        raise ValueError(
            f"data_axis={in_words(axes)} must be an axis of a mesh, but there is no "
            "mesh. Call inside jax.set_mesh(mesh) or jax.shard_map, or pass "
            "DataAxis(mesh=), or a batch that is sharded over a mesh."
        )
    missing = [name for name in axes if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"data_axis={in_words(axes)} must be an axis of the mesh, but the mesh has "
            f"{in_words(mesh.axis_names)}. Name the axis that splits the batch."
        )
    return mesh


def _mesh_of(x: Any) -> AnyMesh:
    """The mesh in the sharding of an array, a tracer or a type; may be empty."""
    empty = AbstractMesh((), ())
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return empty
    tracer = isinstance(x, jax.core.Tracer)
    return getattr(jax.typeof(x).sharding if tracer else x.sharding, "mesh", empty)


def is_open(tree: Any) -> bool:
    """True if a trace at `tree` may be compiled for one device or for several.

    Then neither the context nor an array names a mesh, and there are several devices.
    """
    leaves = jax.tree.leaves(tree)
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    named = not all(mesh.empty for mesh in (context_mesh(), *map(_mesh_of, leaves)))
    return traced and not named and jax.device_count() > 1


def is_distributed(tree: Any) -> bool:
    """True if the compiler is known to distribute computations on `tree`.

    The mesh is the context's, or else the arrays'. Inside of `jit` the types of arrays
    name the mesh, but not how automatic axes shard the arrays.
    """
    context, leaves = context_mesh(), jax.tree.leaves(tree)
    for mesh in map(_mesh_of, leaves) if context.empty else [context]:
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True):
            if kind == AxisType.Explicit or (kind == AxisType.Auto and size > 1):
                return True
    return False


def num_devices(axes: Axes, mesh: AnyMesh | None = None) -> int:
    """The number of devices along `axes`; `mesh` as `find_mesh` returns it."""
    return math.prod(_sizes(mesh)[name] for name in axes)


def _sizes(mesh: AnyMesh | None) -> Any:
    """The size of each axis, by name, also of bound axes."""
    return (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape


def in_words(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))


# -- Axes over which a value varies ----------------------------------------------------


def varying(x: Any) -> frozenset[str]:
    """The bound axes over which devices hold different values, as far as JAX knows."""
    aval = jax.typeof(x) if isinstance(x, (jax.Array, np.ndarray)) else x
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else frozenset()


def checks_varying() -> bool:
    """True if this `shard_map` tracks varying values (`check_vma`)."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return bool(axes) and bool(varying(jax.lax.axis_index(axes[0])))


# -- The sharding of parameters --------------------------------------------------------


class Placement(NamedTuple):
    """The sharding of one leaf over the data axes.

    Attributes:
      dims: pairs of a dimension and the axes that shard it; `()` for a whole leaf.
      summed: the axes over which the backward pass has summed the gradient already.
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
    """The sharding of each leaf of `params` over the data axes.

    Args:
      params: the parameters.
      specs: a tree of `PartitionSpec` or `NamedSharding` that is a prefix of `params`;
        None reads the leaves: explicit axes, and arrays outside of `jit`.
      axes: the data axes.
      mesh: the mesh, as `find_mesh` returns it.
      option: the option with the specs: "param_specs", or "grad_specs" for whole
        parameters.
    """
    leaves = named_leaves(params)
    if specs is None:
        leaf_specs = [None if mesh is None else known_spec(leaf) for _, leaf in leaves]
    else:
        _check_names(specs, tuple(_sizes(mesh)), option)
        leaf_specs = broadcast_specs(specs, params, option)
    sizes, result = _sizes(mesh), []
    for (name, leaf), spec in zip(leaves, leaf_specs, strict=True):
        entries = enumerate([] if spec is None else list(spec))
        if specs is not None and spec is not None and len(spec) > jnp.ndim(leaf):
            raise ValueError(
                f"{option} must fit the parameters, but {spec} has {len(spec)} "
                f"entries, and {name} has shape {jnp.shape(leaf)}. Pass a spec with at "
                "most one entry for each dimension."
            )
        dims = ((dim, tuple(n for n in names_in(x) if n in axes)) for dim, x in entries)
        placement = Placement(tuple((dim, names) for dim, names in dims if names))
        # Inside a shard_map a sharded leaf is one device's part already.
        whole = mesh is not None or option == "grad_specs"
        for dim, names in placement.dims if specs is not None else ():
            size = math.prod(sizes[axis] for axis in names) if whole else 1
            if jnp.shape(leaf)[dim] % size:
                raise ValueError(
                    f"{option} must fit the parameters, but {spec} splits dimension "
                    f"{dim} of {name} into {size} parts, and its shape is "
                    f"{jnp.shape(leaf)}. Pass a spec that divides it."
                )
        result.append(placement)
    return result


def dims_that_split(x: Any, number: int) -> list[int]:
    """The dimensions of an array that `number` divides, the largest first.

    The first dimension of a stack of matrices is left out: a model may scan over it.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return []
    dims = range(jnp.ndim(x) > 2, jnp.ndim(x))
    known = [
        d for d in dims if isinstance(x.shape[d], int) and x.shape[d] % number == 0
    ]
    return sorted(known, key=lambda d: -x.shape[d])


def known_spec(leaf: Any) -> PartitionSpec | None:
    """The spec in the type of a tracer, or of an array; None if unknown."""
    if isinstance(leaf, jax.core.Tracer):
        sharding = jax.typeof(leaf).sharding
        return sharding.spec if explicit_names(sharding.mesh) else None
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def spec_of_type(x: Any) -> tuple[Any, ...]:
    """The explicit mesh axes that split each dimension, from the type of `x`."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def num_parts(x: Any, dim: int) -> int:
    """The number of parts of a dimension along explicit mesh axes."""
    entries = spec_of_type(x)[dim : dim + 1]
    names = [name for entry in entries for name in names_in(entry)]
    return math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)


def on_mesh_of(x: jax.Array, spec: Sequence[Any]) -> NamedSharding:
    """A sharding on the mesh in the type of `x`."""
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))


def same_mesh(x: Any, y: Any) -> bool:
    """True if two types of arrays have one mesh, or meshes without explicit axes."""
    a, b = x.sharding.mesh, y.sharding.mesh
    return a == b or not (explicit_names(a) or explicit_names(b))


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, NamedSharding))


def _check_names(specs: Any, axes: Axes, option: str) -> None:
    """Raises unless specs name axes of the mesh, each once."""
    for path, spec in jax.tree.leaves_with_path(specs, _is_spec):
        spec = spec.spec if isinstance(spec, NamedSharding) else spec
        entries = spec if isinstance(spec, PartitionSpec) else ()
        constrained = [x for x in entries if x is not PartitionSpec.UNCONSTRAINED]
        names = list(itertools.chain(*map(names_in, constrained)))
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
    for spec in jax.tree.leaves(specs, is_leaf=_is_spec):
        if not _is_spec(spec):
            raise TypeError(
                f"{option} must be a tree of PartitionSpec that is a prefix of the "
                f"parameters' tree, but it holds {spec!r}. Pass "
                "jax.tree.map(lambda p: p.sharding.spec, params), for example."
            )
    return [
        spec.spec if isinstance(spec, NamedSharding) else spec
        for spec, part in _checks.parts_of_prefix(option, specs, params)
        for _ in jax.tree.leaves(part)
    ]


def check_scatter(
    params: Any, where: Sequence[Placement], axes: Axes, mesh: AnyMesh
) -> None:
    """Raises if JAX (up to 0.12) cannot lower the reduce-scatter of a leaf."""
    explicit = tuple(name for name in explicit_names(mesh) if name not in axes)
    for (name, _), placement in zip(named_leaves(params), where, strict=True):
        if explicit and placement.dims:
            raise ValueError(
                f"{name} is sharded over {placement.axes}, so all other axes must be "
                f"automatic, but {explicit} is explicit. Use AxisType.Auto, or "
                'sync="each".'
            )


def check_logical(total: int, axes: Axes, number: int, params: Any) -> None:
    """Raises if so many devices cannot compute as `total` would."""
    for name, x in named_leaves(params):
        spec = spec_of_type(x)
        if set(itertools.chain(*map(names_in, spec))) - set(axes):
            raise ValueError(
                "logical_devices needs automatic axes beside the data axis, up to jax "
                f"0.12, but an explicit one shards {name}: its type is "
                f"{jax.typeof(x)}. Use AxisType.Auto, or leave logical_devices out."
            )
    if total % number:
        raise ValueError(
            f"The devices along data_axis={axes} must divide logical_devices="
            f"{total}, but there are {number}. Use {one_of(divisors(total))} "
            "of them, or other logical devices (and then other bits)."
        )


# == Who distributes ==================================================================


class By(enum.Enum):
    """Who distributes over devices what is computed."""

    NOBODY = "nobody: one device computes it"
    US = "each device computes its part, and our collectives sum"
    COMPILER = "the compiler"
    UNKNOWN = "nobody or the compiler: the lowering of the program tells"


# == The data axis =====================================================================


@dataclasses.dataclass(frozen=True)
class DataAxis:
    """The mesh axes that split the batch, for `value_and_grad` and `accumulate`.

    >>> import ga_optax as ga
    >>> ga.DataAxis("data", sync="each").name
    'data'

    A bare name, or a tuple of names, stands for a `DataAxis` with the defaults below.

    Attributes:
      name: the axis, or a tuple of axes, that split the batch axis.
      mesh: the mesh of the axis at top level. None takes the mesh of `jax.set_mesh` (or
        of a `with mesh:` block), or else the mesh of the batch. Not read inside
        `jax.shard_map` over the axis.
      param_specs: the sharding of the parameters over the axis (FSDP, ZeRO): a tree of
        `PartitionSpec` that is a prefix of the parameters, such as
        `jax.tree.map(lambda p: p.sharding.spec, params)`. Gradients are returned with
        the same sharding. None reads the sharding from explicit axis types, and from
        arrays outside of `jit`. Under `jit` on automatic axes the sharding is unknown,
        and gradients are reduced whole. Large arrays that are no parameters stay
        sharded without a spec.
      grad_specs: the sharding of the gradients of whole parameters (ZeRO-1, ZeRO-2), in
        the same form; the method `specs` makes it. With sync="last" a reduce-scatter
        takes the place of the all-reduce. With "each" the sum is sharded too, 1/n of it
        on each device, and every micro-step reduce-scatters its gradient; all else is
        as with "last".
      sync: "last" merges once, after the loop. "each" merges in every micro-step, for
        sharded parameters that do not fit in memory whole. The program is then a
        program for one device on micro-batches of all devices (keys and aux too), and
        the compiler distributes it. If one of two axes shards no parameter, the sum
        crosses that axis once, in `value_and_grad` (HSDP). Inside
        `shard_map` `fun` has to gather the parameters, and a weight of 0 does not keep
        a NaN out. (For `grad_specs` see above.)
      logical_devices: for `accumulate` alone, a power of two L. A call is then computed
        as L devices would compute it, bit for bit, on any number of devices that
        divides L: rows, micro-batches, keys and the order of every sum.
        `num_microbatches` counts the micro-batches of one of the L devices. Each device
        sends as many bytes as without this option. Page: "Rounding and bits".

    Raises:
      TypeError, ValueError: if an attribute does not fit.
    """

    name: str | Sequence[str]
    _: dataclasses.KW_ONLY
    mesh: Mesh | AbstractMesh | None = None
    param_specs: Any = None
    grad_specs: Any = None
    sync: str = "last"
    logical_devices: int | None = None

    def __post_init__(self) -> None:
        if not check_data_axis(self.name):
            raise TypeError(
                "DataAxis must name a mesh axis, but its name is None. Pass "
                "data_axis=None if one device has the whole batch."
            )
        if self.sync not in ("last", "each"):
            raise ValueError(
                f'sync must be "last" or "each", but it is {self.sync!r}. Use "each" '
                "if there is no memory for a whole gradient."
            )
        if not (self.mesh is None or isinstance(self.mesh, (Mesh, AbstractMesh))):
            raise TypeError(
                "mesh must be a jax.sharding.Mesh, or None for the current mesh, but it"
                f" is {self.mesh!r}. Pass jax.make_mesh((devices,), (name,))."
            )
        if self.logical_devices is not None:
            self._check_logical()
        if self.param_specs is not None and self.grad_specs is not None:
            raise ValueError(
                "grad_specs must be None with param_specs, since gradients have the "
                "sharding of sharded parameters, but param_specs is "
                f"{self.param_specs!r}. Leave one of them out."
            )

    def _check_logical(self) -> None:
        todo = "Pass the number of logical devices, such as 8."
        number = check_int("logical_devices", self.logical_devices, todo)
        if number & (number - 1):
            below = 1 << number.bit_length() - 1
            raise ValueError(
                "logical_devices must be a power of two, since sums are added in "
                f"pairs, but it is {number}. Use {below} or {2 * below}."
            )
        if self.sync == "each":
            raise ValueError(
                'logical_devices must have sync="last", but sync is "each": there the '
                "compiler chooses the order of the sums. Leave one of them out."
            )

    def specs(self, tree: Any) -> Any:
        """Specs that split each leaf along its largest dimension that divides evenly.

        Use them for `grad_specs`, and for an optimizer's state:

        >>> import jax, jax.numpy as jnp
        >>> import ga_optax as ga
        >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
        >>> ga.DataAxis("data", mesh=mesh).specs({"w": jnp.ones((3, 16)), "b": 1.0})
        {'b': P(), 'w': P(None, 'data')}

        Args:
          tree: parameters, or anything with leaves of their shapes.

        Returns:
          A tree of `PartitionSpec`, empty for a leaf without such a dimension.
        """
        number = num_devices(self.axes, find_mesh(self.axes, self.mesh))

        def spec(x: Any) -> PartitionSpec:
            dims = [d for d, size in enumerate(jnp.shape(x)) if size % number == 0]
            largest = max(dims, key=lambda d: jnp.shape(x)[d], default=None)
            whole = PartitionSpec()
            return whole if largest is None else split_spec(self.axes, largest)

        return jax.tree.map(spec, tree)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names, as a tuple."""
        return check_data_axis(self.name)


def as_data_axis(data_axis: Any) -> DataAxis | None:
    """Converts None, a name, a tuple of names or a `DataAxis`; or raises."""
    if data_axis is None or isinstance(data_axis, DataAxis):
        return data_axis
    return DataAxis(data_axis)


def scope_of(axis: DataAxis | None) -> contextlib.AbstractContextManager[Any]:
    """The scope of a program that reduces in each micro-step, which `audit` reads."""
    each = axis is not None and axis.sync == "each"
    return jax.named_scope("sync_each") if each else contextlib.nullcontext()


# == Sharding constraints ==============================================================
# Sharding constraints where some axes of their mesh are bound.
#
# A model constrains its activations on the whole mesh. Where a program runs on one
# device of some axes (in a `jax.shard_map`), a constraint on these axes already holds,
# and goes. A constraint on the other axes stays.


def entry_without(entry: Any, axes: Axes) -> Any:
    """An entry of a spec without some axes."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    names = names_in(entry)
    return as_entry(tuple(name for name in names if name not in axes))
