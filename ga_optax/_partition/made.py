"""Facts of a value that follow from the equations that made it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ga_optax._partition.values import Value
from ga_optax._passes import ir, known


def computed_by(v: Value) -> tuple[core.JaxprEqn, list[Value]] | None:
    """The equation that computes a value of no rows, unless it only moves numbers."""
    if v.made is None or not all(u.is_whole for u in v.made[1]):
        return None
    e, vs, _ = v.made
    moves = e.primitive.name in known.EXACT or e.primitive.name.startswith(_MOVES)
    return None if moves else (e, vs)


_MOVES = ("gather", "scatter", "dynamic_", "stack", "unstack", "split")


def number_of(v: Value) -> Any:
    """The number that all of a value is for certain, or None."""
    if v.made is None:
        is_number = v.shape == () and not isinstance(v.x, jax.core.Tracer)
        return np.asarray(v.x).item() if is_number else None
    e, vs, _ = v.made
    spread = ("broadcast_in_dim", "convert_element_type", "reshape")
    return number_of(vs[0]) if e.primitive.name in spread else None


def is_reshaped(v: Value) -> bool:
    """True if a value is rows in another shape: they are kept once for both shapes."""
    if v.made is None or v.made[0].primitive.name not in _SHAPES:
        return False
    return not v.made[1][0].is_whole


_SHAPES = ("transpose", "reshape", "squeeze")


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
    if ir.inner_programs(e) or sum(v.size for v in summed) > max(size, _FEW):
        return False
    numbers = map(number_of, factors)
    finite = all(x is not None and np.isfinite(x) and x != 0 for x in numbers)
    return any(v.scaled for v in vs) or not finite


_FEW = 16  # numbers: so many more may be summed
