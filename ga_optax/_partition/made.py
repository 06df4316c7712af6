"""Facts of a value that follow from the equations that made it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ga_optax._partition.values import Value
from ga_optax._passes import read
from ga_optax._passes.primitives import CAST, entry_of, factors_of


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
    moves, casts = entry_of(e).moves, e.primitive.name == CAST
    number = number_of(vs[0]) if moves or casts else None
    if not casts or number is None or not np.isfinite(number):
        return number
    with jax.ensure_compile_time_eval():  # it may become another number
        x = np.asarray(number, vs[0].aval.dtype)
        return np.asarray(jax.lax.convert_element_type(x, v.aval.dtype)).item()


def unmoved(v: Value) -> tuple[Value, dict[int, int]]:
    """The value that a value was before it was moved, and spread along new axes.

    With it comes, for each of its axes that is longer than 1, the axis of `v` that it
    became.
    """
    axes = {d: d for d, n in enumerate(v.shape) if n != 1}
    while v.made is not None and (back := _axes_before(v.made[0])) is not None:
        axes = {back[d]: place for d, place in axes.items() if d in back}
        v = v.made[1][0]
    return v, axes


def _axes_before(e: core.JaxprEqn) -> dict[int | None, int] | None:
    """For axes of the result, the axis of the operand that each was.

    None if the equation does more than move numbers, or takes axes apart.
    """
    if not entry_of(e).moves and e.primitive.name != "stop_gradient":
        return None
    if e.primitive.name != "reshape":
        ways = factors_of(entry_of(e), e)
        return {x.outs[0]: x.ins[0] for x in ways if x.ins[0] is not None}
    both: list[Any] = [*e.invars[:1], *e.outvars]
    shapes = [x.aval.shape for x in both]
    before, after = ([d for d, n in enumerate(x) if n != 1] for x in shapes)
    same = [shapes[0][d] for d in before] == [shapes[1][d] for d in after]
    return dict(zip(after, before, strict=True)) if same else None


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
