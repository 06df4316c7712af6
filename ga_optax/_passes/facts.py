"""Facts about a call that the passes of its programs need."""

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ga_optax._devices.meshes import AnyMesh, Axes


class ParamSharding(NamedTuple):
    """The sharding of parameters on a mesh, over whose data axes the compiler splits.

    Attributes:
      specs: the `PartitionSpec` of each parameter, or None.
      axes: the data axes.
      mesh: the mesh.
    """

    specs: Sequence[Any]
    axes: Axes
    mesh: AnyMesh


class Facts(NamedTuple):
    """Facts about a call.

    Attributes:
      num_params: the number of parameters; they are the program's first arguments.
      adds_in_place: True if gradients may be added inside the backward pass.
      param_sharding: the sharding of parameters that are gathered where they are used.
      gathered_once: for each parameter, True if it is gathered before the loop.
      shards: the parts of constants that are gathered where they are used, by the ids
        of the constants.
      window: the axis over which rows meet, if there is one, and its size.
      sliced: for each sum of gradients (the first results), True if the sum can be
        added slice by slice. Otherwise a stack of slices exists as a whole, and stays
        in low precision.
      rounds_once: True if gradients are rounded in those sums alone.
      local: True if no compiler distributes the loop over devices.
      logical: True if the loop runs for logical devices.
    """

    num_params: int = 0
    adds_in_place: bool = False
    param_sharding: ParamSharding | None = None
    gathered_once: Sequence[bool] = ()
    shards: Mapping[int, Any] = types.MappingProxyType({})
    window: Sequence[tuple[str, int]] = ()
    sliced: Sequence[bool] = ()
    rounds_once: bool = False
    local: bool = False
    logical: bool = False
