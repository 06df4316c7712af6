"""Facts about a call that passes need."""

from collections.abc import Sequence
from typing import NamedTuple

from .._devices.record import Devices


class Facts(NamedTuple):
    """Facts about a call.

    Attributes:
      devices: the devices; parameters are the program's first arguments.
      adds_in_place: True if gradients may be added inside the backward pass.
      sliced: for each sum of gradients (the first results), True if the sum can be
        added slice by slice. Otherwise a stack of slices exists as a whole, and stays
        in low precision.
      rounds_once: True if gradients are rounded in those sums alone.
    """

    devices: Devices = Devices()
    adds_in_place: bool = False
    sliced: Sequence[bool] = ()
    rounds_once: bool = False
