"""The axis of the micro-batches, and the collectives over it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from ga_optax._partition.values import Parts, RowsMeet, Uneven
from ga_optax._passes import read


class Axis(NamedTuple):
    """The axis of the micro-batches.

    Attributes:
      name: the name of the axis.
      parts: the number of micro-batches, on all devices together; or their size, if
        the last one is smaller. Then rows must not meet.
      longest: the length of the longest scan in which rows may meet; longer scans are
        computed whole.
      is_checked: True if the axis is in a region of a mesh that has no types for it.
        Then a `name` equation of the operand stands for a collective.
      draws_whole: True if generators other than threefry draw for all rows at once.
      labels: True if equations are to say what a micro-batch holds of their results.
    """

    name: str
    parts: Parts
    longest: int
    is_checked: bool = False
    draws_whole: bool = False
    labels: bool = False

    @property
    def is_even(self) -> bool:
        """True if all micro-batches have as many rows."""
        return not isinstance(self.parts, Uneven)

    @property
    def size(self) -> int:
        """The number of micro-batches, for rules that know of nothing else."""
        if isinstance(self.parts, Uneven):
            raise RowsMeet
        return self.parts

    @property
    def env(self) -> list[tuple[str, int]]:
        """The axes that are bound where programs of micro-batches are traced."""
        return [(self.name, self.size)] if self.is_even else []

    def is_meeting(self, e: core.JaxprEqn) -> bool:
        """True if an equation is a collective over the axis, in which rows meet."""
        return self.name in read.axes_of(e) or meeting_of(e) is not None

    def meets(self, e: core.JaxprEqn) -> bool:
        """True if rows meet in an equation, or in a program inside of it."""
        return any(map(self.is_meeting, read.within(e)))

    def sum(self, x: Any) -> Any:
        return self._over("psum", x)

    def extremum(self, x: Any, is_max: bool) -> Any:
        return self._over("pmax" if is_max else "pmin", x)

    def gather(self, x: Any, dim: int = 0, tiled: bool = False) -> Any:
        """The arrays of all micro-batches, stacked along a new axis, or joined."""
        if self.is_checked or 0 in x.shape:
            x = self._over("all_gather", x)
            each = [x] * self.size
            return jnp.concatenate(each, dim) if tiled else jnp.stack(each, dim)
        return jax.lax.all_gather(x, self.name, axis=dim, tiled=tiled)

    def _over(self, collective: str, x: Any) -> Any:
        if 0 in x.shape:
            return x  # without numbers nothing meets
        if self.is_checked:
            return checkpoint_name(x, _MEETS + collective)
        return getattr(jax.lax, collective)(x, self.name)


_MEETS = "rows meet: "


def meeting_of(e: core.JaxprEqn) -> str | None:
    """The collective that a `name` equation stands for in a region that checks."""
    name = str(e.params.get("name", "")) if e.primitive.name == "name" else ""
    return name.removeprefix(_MEETS) if name.startswith(_MEETS) else None
