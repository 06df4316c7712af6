"""Which gradients are added to the accumulator inside the backward pass.

If a model scans over a parameter (its stacked layers), the backward pass can add the
gradient to the accumulator slice by slice, through a reference, so that no second
gradient tree exists. `arrival` reads off the program of `fun` for which parameters that
has the bits of the plain sum; `reasons` adds what else it takes. For the other
parameters XLA reuses the buffers by itself.
"""

import contextlib
import contextvars
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax import _mesh

# `jax.vjp(...).with_refs` transposes `lax.scan` correctly from jax 0.11.0 on (jax PR
# 38929), and a `custom_vmap` may have references inside it from 0.11.1 on.
HAS_REFS = jax.__version_info__ >= (0, 11, 1)

_logger = logging.getLogger("ga_optax")
_notes: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "_notes", default=None
)


def inner_programs(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs inside an equation: loop bodies, branches, jitted functions."""
    for parameter in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
        if hasattr(parameter, "eqns"):
            yield getattr(parameter, "jaxpr", parameter)


def arrival(jaxpr: core.Jaxpr, variable: Any, way: str = "whole") -> str | None:
    """How a parameter's gradient comes out of the backward pass.

    "slices": slice by slice, from a scan that runs over the parameter, and each slice
    is used once, where its gradient is a sum over two terms or more. Added up in place
    that saves memory, and it has the bits of the plain sum: two uses would be two
    additions, `(total + a) + b`; and a bare product may become one fused multiply-add
    with the addition, which rounds once and not twice.

    "whole": likewise, but in one piece, which exists before it can be added.

    None: anything else.
    """
    uses = [
        (equation, i)
        for equation in jaxpr.eqns
        for i, operand in enumerate(equation.invars)
        if operand is variable
    ]
    if len(uses) != 1 or any(out is variable for out in jaxpr.outvars):
        return None
    [(equation, i)] = uses
    name, size = equation.primitive.name, math.prod(variable.aval.shape)
    outvars: list[Any] = equation.outvars
    if name in ("jit", "pjit", "remat2", "checkpoint", "scan"):
        [inner] = inner_programs(equation)
        inside: Any = inner.invars[i]
        sliced = inside.aval.ndim < variable.aval.ndim
        if name == "scan" and not sliced:
            return None  # used in every iteration
        return arrival(inner, inside, "slices" if sliced else way)
    if name == "dot_general":
        other: Any = equation.invars[1 - i]
        shape = other.aval.shape
        axes = [
            axis
            for pair in equation.params["dimension_numbers"]
            for axis in pair[1 - i]
        ]
        sums = math.prod(shape) > math.prod(shape[axis] for axis in axes)
        return way if sums else None
    broadcasts = name in ("add", "sub", "mul", "broadcast_in_dim")
    if broadcasts and outvars[0].aval.size > size:
        return way
    if name in ("broadcast_in_dim", "convert_element_type", "reshape", "transpose"):
        # The gradient comes back through these as it is.
        return arrival(jaxpr, outvars[0], way)
    return None


def reasons(
    wanted: bool,
    multiplies: bool,
    has_effects: bool,
    arrivals: Sequence[str | None],
    totals: Sequence[jax.Array],
    params: Sequence[jax.Array],
) -> list[str | None]:
    """Why each leaf is not added in place; None if it is.

    A weight that multiplies a gradient needs that gradient by itself. A reference has
    the type of the cotangent, in which narrow ones would round too often. Custom rules
    do not go with effects, such as printing or a collective.
    """
    for_all = None
    if not wanted:
        for_all = "in_place=False"
    elif not HAS_REFS:
        for_all = f"jax {jax.__version__} is older than 0.11.1"
    elif multiplies:
        for_all = "weights multiply the gradients (float16, or a custom_vjp in fun)"
    elif has_effects:
        for_all = "fun prints, calls back or communicates"
    if for_all is not None:
        return [for_all] * len(totals)

    def reason(came: str | None, total: jax.Array, param: jax.Array) -> str | None:
        if came is None:
            return "used more than once, or not only in sums over rows"
        if came == "whole":
            return "no scan runs over it, so XLA reuses the buffer of its gradient"
        if total.dtype != param.dtype:
            return f"it is {param.dtype}, and its accumulator {total.dtype}"
        if not _mesh.same_mesh(total, param):
            return "it lies on another mesh than its accumulator"
        if jnp.finfo(total.dtype).bits < 32:
            return f"{total.dtype} would round too often"
        return None

    return list(map(reason, arrivals, totals, params))


# -- Saying it -------------------------------------------------------------------------


def report(names: Sequence[str], whys: Sequence[str | None]) -> None:
    """Logs which leaves are added in place, and hands it to `recorded`."""
    groups: dict[str | None, list[str]] = {}
    for name, why in zip(names, whys, strict=True):
        groups.setdefault(why, []).append(name)
    lines = []
    for why, members in groups.items():
        what = "in place" if why is None else f"not in place ({why})"
        shown = ", ".join(members[:4])
        more = f" and {len(members) - 4} more" if len(members) > 4 else ""
        lines.append(f"{what}: {shown}{more}")
    for line in lines:
        _logger.debug("Gradients added %s.", line)
    notes = _notes.get()
    if notes is not None:
        notes.extend(line for line in lines if line not in notes)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The lines of every `report` inside, each once."""
    lines: list[str] = []
    token = _notes.set(lines)
    try:
        yield lines
    finally:
        _notes.reset(token)
