"""`DataAxis`: the mesh axis that splits the batch, and its options."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ga_optax._checks import check_int
from ga_optax._devices import meshes


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
        the compiler distributes it. An axis that shards no parameter, beside one that
        does, merges once in `value_and_grad`: replicas of shards (HSDP). Inside
        `shard_map` `fun` has to gather the parameters, and a weight of 0 does not keep
        a NaN out. (For `grad_specs` see above.)
      logical_devices: for `accumulate` alone, a power of two L. A call is then computed
        as L devices would compute it, bit for bit, on any number of devices that
        divides L: rows, micro-batches, keys and the order of every sum.
        `num_microbatches` counts the micro-batches of one of the L devices. Each device
        sends as many bytes as without this option. Page: "Devices".

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
        if not meshes.check_data_axis(self.name):
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
        number = meshes.num_devices(self.axes, meshes.find_mesh(self.axes, self.mesh))

        def spec(x: Any) -> PartitionSpec:
            dims = [d for d, size in enumerate(jnp.shape(x)) if size % number == 0]
            largest = max(dims, key=lambda d: jnp.shape(x)[d], default=None)
            whole = PartitionSpec()
            return whole if largest is None else meshes.split_spec(self.axes, largest)

        return jax.tree.map(spec, tree)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names, as a tuple."""
        return meshes.check_data_axis(self.name)


def as_data_axis(data_axis: Any) -> DataAxis | None:
    """Converts None, a name, a tuple of names or a `DataAxis`; or raises."""
    if data_axis is None or isinstance(data_axis, DataAxis):
        return data_axis
    return DataAxis(data_axis)
