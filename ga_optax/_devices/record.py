"""The devices of a call: the one record of what is known of the mesh."""

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from .._checks import named_leaves
from ..accumulator import Accumulator
from . import collectives, meshes
from .collectives import Membership
from .meshes import Axes, By, DataAxis, Placement


class DoesNotFitError(ValueError):
    """An argument or an option does not fit: the error says so, and nothing runs."""


class Devices(NamedTuple):
    """The devices that a call runs on, and how arrays are sharded over them.

    Attributes:
      axes: the data axes; () if there are none.
      mesh: the mesh that is yet to bind them; None if a `shard_map` around the call
        binds them, or if there are none.
      number: how many devices there are along the data axes.
      each: True if the backward pass of every micro-step merges over devices.
      inner: the axes over which the compiler does so in a region of other axes.
      scatters: True if every micro-step adds its gradient to a sharded sum.
      logical: the number of logical devices on this one; 0 if there are none.
      is_checked: True in a `shard_map` that checks over which axes values vary.
      by: who distributes what is computed.
      specs: the `PartitionSpec` of each leaf of the parameters, or None.
      params: how the data axes shard each leaf of the parameters.
      gradients: how they shard its gradient.
      shards: the parts of arguments without gradient that are gathered where they are
        used, by the ids of these arguments.
      mapped: True in the `shard_map` that a call at top level makes.
      names: the names of the parameters, for logs.
      gathered_once: for each parameter, True if it is gathered before the loop, and
        may come in lower precision.
      window: the axis over which rows meet, if there is one, and its size.
    """

    axes: Axes = ()
    mesh: Any = None
    number: int = 1
    each: bool = False
    inner: Axes = ()
    scatters: bool = False
    logical: int = 0
    is_checked: bool = False
    by: By = By.NOBODY
    specs: Sequence[PartitionSpec | None] = ()
    params: Sequence[Placement] = ()
    gradients: Sequence[Placement] = ()
    shards: Mapping[int, Any] = types.MappingProxyType({})
    mapped: bool = False
    names: Sequence[str] = ()
    gathered_once: Sequence[bool] = ()
    window: Sequence[tuple[str, int]] = ()

    @classmethod
    def of(cls, axis: DataAxis | None, params: Any, batch: Sequence[Any]) -> "Devices":
        """Asks the mesh and the arrays; raises if they do not fit the data axis."""
        devices = cls(is_checked=meshes.checks_varying())
        # In another call with that data axis the program sees the rows of all devices.
        if axis is None or meshes.sees_all_rows(axis.axes):
            return devices
        mesh, sharded = meshes.find_mesh(axis.axes, axis.mesh, batch), axis.grad_specs
        number = meshes.num_devices(axis.axes, mesh)
        devices = devices._replace(axes=axis.axes, mesh=mesh, number=number)
        if total := axis.logical_devices or 0:
            meshes.check_logical(total, axis.axes, number, params)
        each = axis.sync == "each" and sharded is None
        devices = devices._replace(
            each=each,
            scatters=axis.sync == "each" and sharded is not None,
            logical=total // number,
            by=By.COMPILER if each and mesh is not None else By.US,
        )
        specs = axis.param_specs if sharded is None else PartitionSpec()
        devices = devices.with_params(params, specs)
        if sharded is not None:
            where = meshes.placements(params, sharded, axis.axes, mesh, "grad_specs")
            devices = devices._replace(gradients=where)
        if mesh is None:
            return devices._in_region(params, batch, axis)
        if not devices.each:
            meshes.check_scatter(params, devices.gradients, axis.axes, mesh)
        return devices

    def with_params(self, params: Any, specs: Any = None) -> "Devices":
        """The same devices, with parameters of these specs."""
        where = meshes.placements(params, specs, self.axes, self.mesh)
        known = meshes.broadcast_specs(specs, params)
        return self._replace(specs=known, params=where, gradients=where)

    def for_arrays(self, tree: Any, optimize: bool) -> "Devices":
        """The same devices, with `by` for the arrays of a tree."""
        devices = self._replace(is_checked=meshes.checks_varying())
        if self.axes:
            return devices
        if optimize and meshes.is_open(tree):
            return devices._replace(by=By.UNKNOWN)
        distributed = meshes.is_distributed(tree)
        return devices._replace(by=By.COMPILER if distributed else By.NOBODY)

    def _in_region(
        self, params: Any, batch: Sequence[Any], axis: DataAxis
    ) -> "Devices":
        """The same devices, in a `shard_map` of the user's; or raises."""
        split = frozenset().union(*map(meshes.varying, batch))
        same = tuple(name for name in self.axes if name not in split)
        if self.is_checked and same:
            raise ValueError(
                f"The batch must differ between the devices along {self.axes}, but it "
                f"is the same along {same}. Name {self.axes} in the in_specs of the "
                "shard_map."
            )
        if self.each and not self.is_checked and axis.param_specs is None:
            raise ValueError(
                f'sync="each" must know which parameters are sharded over {self.axes}, '
                "but this shard_map has check_vma=False. Pass DataAxis(param_specs=), "
                "or leave check_vma on."
            )
        where = list(self.params)
        for i, (name, x) in enumerate(named_leaves(params)):
            sharded, varying = where[i].axes, meshes.varying(x)
            loose = tuple(n for n in self.axes if n in varying and n not in sharded)
            if self.each:
                names = tuple(n for n in self.axes if n in varying or n in sharded)
                where[i] = Placement(summed=names)
            elif loose:
                raise DoesNotFitError(
                    "Parameters must be the same on all devices along the data axis, "
                    f"or param_specs must say how they are sharded, but {name} differs "
                    f"along {loose}. Pass DataAxis(param_specs=); or "
                    'sync="each", if fun itself gathers them.'
                )
        gradients = where if axis.grad_specs is None else self.gradients
        return self._replace(params=where, gradients=gradients)

    @property
    def bound(self) -> Axes:
        """The data axes over which this call is the part of one device."""
        return self.axes if self.mesh is None else ()

    @property
    def by_compiler(self) -> bool:
        """True if the compiler merges over devices: sync="each" at top level."""
        return self.by is By.COMPILER and self.mesh is not None

    @property
    def maps(self) -> bool:
        """True if each device runs its part in a `shard_map` that the call makes."""
        return self.by is By.US and self.mesh is not None

    @property
    def is_local(self) -> bool:
        """True if it is known that no compiler distributes what is computed."""
        return self.by in (By.NOBODY, By.US)

    @property
    def placements(self) -> Sequence[Placement]:
        """The placement of each gradient over the axes that are bound, or ()."""
        return self.gradients if self.bound else ()

    @property
    def scattered(self) -> dict[int, Placement]:
        """Placements of gradients that are scattered before the sum, by leaf."""
        some = enumerate(self.placements if self.scatters else ())
        return {i: x for i, x in some if x.dims}

    @property
    def replicas(self) -> Axes:
        """The axes that shard no parameter, if each micro-step merges over others."""
        sharded = {name for place in self.params for name in place.axes}
        known = self.by_compiler and sharded and not meshes.explicit_names(self.mesh)
        return tuple(name for name in self.axes if known and name not in sharded)

    def over_replicas(self) -> "Devices":
        """The devices that merge over replicas once, and in each micro-step inside."""
        axes, whole = self.replicas, [Placement()] * len(self.params)
        return self._replace(
            axes=axes,
            inner=tuple(name for name in self.axes if name not in axes),
            number=meshes.num_devices(axes, self.mesh),
            each=False,
            by=By.US,
            params=whole,
            gradients=whole,
        )

    @property
    def compiled(self) -> tuple[Axes, Any]:
        """The axes over which the compiler merges here, and the mesh it works on."""
        if self.inner and self.mesh is None:
            return self.inner, jax.sharding.get_abstract_mesh()
        return (self.axes if self.by_compiler else ()), self.mesh

    @property
    def membership(self) -> Membership:
        """The rows that a micro-batch should hold here."""
        if self.by is By.UNKNOWN:
            return Membership.EITHER
        strides = self.by is By.COMPILER and not self.axes
        return Membership.STRIDED if strides else Membership.NEIGHBOURS

    def split(self, x: Any, k: int, axis: int, membership: Membership) -> jax.Array:
        """An array as `[k, ...]`, with the rows of k micro-batches along axis 0."""
        axes, mesh = self.compiled
        if mesh is None:
            return collectives.split_rows(x, k, axis, membership)
        return collectives.split_shards(x, k, axes or self.axes, mesh, axis)

    def flat(self, acc: Accumulator) -> Any:
        """An accumulator of this device alone, whose total is a list."""
        total = collectives.vary(jax.tree.leaves(acc.total), self.bound)
        return acc._replace(total=total)

    def shard(self, total: Any, zero: float = 0.0) -> Any:
        """A sum of gradients, empty or of all devices, with the sharding of gradients.

        `zero` is the number in an empty sum.
        """
        leaves, structure = jax.tree.flatten(total)
        for i, place in self.scattered.items():
            leaves[i] = collectives.part(leaves[i], place, zero)
        if (mesh := self.compiled[1]) is not None:
            leaves = collectives.constrain(leaves, list(self.specs), mesh)
        return structure.unflatten(leaves)
