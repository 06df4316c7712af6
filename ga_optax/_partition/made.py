"""Facts of a value that follow from the equations that made it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ga_optax._partition.values import Value
from ga_optax._passes import read
from ga_optax._passes.primitives import CAST, entry_of


def computed_by(v: Value) -> tuple[core.JaxprEqn, list[Value]] | None:
    """The equation that computes a value of no rows, unless it only moves numbers."""
    if v.made is None or not all(u.is_whole for u in v.made[1]):
        return None
    e, vs, _ = v.made
    moves = entry_of(e).is_exact or e.primitive.name.startswith("scatter")
    return None if moves else (e, vs)


def number_of(v: Value) -> Any:
    """The number that all of a value is for certain, or None."""
    if v.made is None:
        is_number = v.shape == () and not isinstance(v.x, jax.core.Tracer)
        return np.asarray(v.x).item() if is_number else None
    e, vs, _ = v.made
    spreads = entry_of(e).moves or e.primitive.name == CAST
    return number_of(vs[0]) if spreads else None


def is_reshaped(v: Value) -> bool:
    """True if a value is rows in another shape: they are kept once for both shapes."""
    if v.made is None or not entry_of(v.made[0]).moves:
        return False
    of = v.made[1][0]
    return of.size == v.size and not of.is_whole


def is_scaled(e: core.JaxprEqn, vs: Sequence[Value], size: int) -> bool:
    """True if the parts of a result may add up to NaN, see `Value`.

    Then the operand is summed instead, unless that is much larger.
    """
    name = e.primitive.name
    summed, factors = [v for v in vs if v.is_partial], []
    if name == "div":
        summed, factors = vs[:1], vs[1:]
    elif name == "mul":
        factors = [v for v in vs if not v.is_partial]
    if read.inner_programs(e) or sum(v.size for v in summed) > max(size, _FEW):
        return False
    numbers = map(number_of, factors)
    finite = all(x is not None and np.isfinite(x) and x != 0 for x in numbers)
    return any(v.scaled for v in vs) or not finite


_FEW = 16  # numbers: so many more may be summed
