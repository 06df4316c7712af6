"""What passes must know of the call that a program belongs to."""

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ga_optax._devices.meshes import AnyMesh, Axes


class Lies(NamedTuple):
    """How parameters lie on a mesh, along whose data axes the compiler splits."""

    specs: Sequence[Any]
    axes: Axes
    mesh: AnyMesh


class Facts(NamedTuple):
    """What passes must know of a call.

    Attributes:
      num_params: how many of the program's first arguments are parameters.
      adds_in_place: whether gradients may be added inside the backward pass.
      lies: how parameters lie that are to be gathered where they are used.
      shards: the parts of constants that are to be gathered where they are used, by
        the ids of these.
      window: the axis over which rows meet, if there is one, and its size.
      sliced: of each sum of gradients, the first results, whether it can be added slice
        by slice. If not, a stack of its slices stays in low precision, as it is there
        as a whole.
      rounds_once: whether gradients are rounded in those sums alone.
      local: whether it is known that no compiler distributes the loop over devices.
      logical: whether the loop runs for logical devices.
    """

    num_params: int = 0
    adds_in_place: bool = False
    lies: Lies | None = None
    shards: Mapping[int, Any] = types.MappingProxyType({})
    window: Sequence[tuple[str, int]] = ()
    sliced: Sequence[bool] = ()
    rounds_once: bool = False
    local: bool = False
    logical: bool = False
