"""Which gradients are added to the accumulator inside the backward pass.

If a model scans over a parameter (its stacked layers), the backward pass can add the
gradient to the accumulator slice by slice, through a reference, so that no second
gradient tree exists. `arrival` reads off the program of `fun` for which parameters that
has the bits of the plain sum; `reasons` adds what else it takes. For the other
parameters XLA reuses the buffers by itself.
"""

import contextlib
import contextvars
import itertools
import logging
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._devices import meshes
from ga_optax._passes.ir import inner_programs, uses

# `jax.vjp(...).with_refs` transposes `lax.scan` correctly from jax 0.11.0 on (jax PR
# 38929), and a `custom_vmap` may have references inside it from 0.11.1 on.
HAS_REFS = jax.__version_info__ >= (0, 11, 1)

_SMALL = 1000  # a leaf of so small a part of the largest saves no memory

_logger = logging.getLogger("ga_optax")
_notes: contextvars.ContextVar[list[str]] = contextvars.ContextVar("_notes")


def arrival(jaxpr: core.Jaxpr, variable: Any, way: str = "whole") -> str | None:
    """How a parameter's gradient comes out of the backward pass.

    "slices": slice by slice, from a scan that runs over the parameter, and each slice
    is used once, where its gradient is a sum over two terms or more. Added up in place
    that saves memory, and it has the bits of the plain sum: two uses would be two
    additions, `(total + a) + b`; and a bare product may become one fused multiply-add
    with the addition, which rounds once and not twice.

    "whole": likewise, but in one piece, which exists before it can be added. So are the
    slices of a scan that is unrolled as a whole, or behind a reshape, a transpose, a
    cast or `jax.checkpoint`, through which no reference goes.

    "scatter": from one look-up of rows (an embedding), whose sum XLA scatters into the
    accumulator.

    None: anything else, such as a bare product, which has to be `accumulator.rounded`.
    """
    read = uses(jaxpr, variable)
    if len(read) != 1 or any(out is variable for out in jaxpr.outvars):
        return None
    if not variable.aval.size:
        return None  # a stack of no layers
    [(equation, i)] = read
    name = equation.primitive.name
    out: Any = next(iter(equation.outvars), None)  # printing has no results
    if name in ("jit", "pjit", "remat2", "checkpoint", "scan"):
        [inner] = inner_programs(equation)
        inside: Any = inner.invars[i]
        sliced = inside.aval.ndim < variable.aval.ndim
        if name == "scan" and not sliced:
            return None  # used in every iteration
        loops = sliced and equation.params["unroll"] < equation.params["length"]
        found = arrival(inner, inside, "slices" if loops else way)
        passes = name in ("jit", "pjit", "scan") or way == "slices"
        return "whole" if found == "slices" and not passes else found
    if name == "dot_general":
        other: Any = equation.invars[1 - i].aval
        pairs = equation.params["dimension_numbers"]
        both = math.prod(other.shape[axis] for pair in pairs for axis in pair[1 - i])
        return way if other.size > both else None
    broadcasts = name in ("add", "sub", "mul", "broadcast_in_dim")
    if broadcasts and out.aval.size > variable.aval.size:
        return way
    if name == "gather" and i == 0 and way == "whole":
        return "scatter"
    if name in ("broadcast_in_dim", "convert_element_type", "reshape", "transpose"):
        # The gradient comes back through these as it is.
        found = arrival(jaxpr, out, way)
        return "whole" if found == "slices" and way == "whole" else found
    return None


def is_cut(jaxpr: core.Jaxpr, i: int, placement: Any) -> bool:
    """Whether a parameter is split along a dimension that its slices lack.

    Asked of one that `arrival` says comes in slices.
    """
    gone = _num_scanned(jaxpr, jaxpr.invars[i])
    return any(dim < gone for dim, _ in placement.dims)


def _num_scanned(jaxpr: core.Jaxpr, variable: Any) -> int:
    """How many of a parameter's dimensions are gone where its gradient is added."""
    [(equation, i)] = uses(jaxpr, variable)
    if equation.primitive.name not in ("jit", "pjit", "scan"):
        return 0
    [inner] = inner_programs(equation)
    inside: Any = inner.invars[i]
    gone = len(variable.aval.shape) - len(inside.aval.shape)
    return gone + _num_scanned(inner, inside)


def reasons(
    wanted: bool,
    program: Any,
    operands: Any,
    sent: Mapping[int, Any] = types.MappingProxyType({}),
) -> list[str | None]:
    """Why each leaf is not added in place; None if it is.

    Asked of a `Program`, the `Operands` of its loop, and how gradients are scattered.

    A weight that multiplies a gradient needs that gradient by itself. Custom rules do
    not go with effects, such as printing or a collective. The sum of a vector, such
    as a bias, is no product that could add it: one kernel a layer would, and here one
    for all layers.
    """
    largest = max((x.size for x in operands.params), default=0)
    of_all = (
        (not wanted, "optimize=False"),
        (not HAS_REFS, f"jax {jax.__version__} is older than 0.11.1"),
        (program.multiplies, "weights multiply the gradients (float16 or custom_vjp)"),
        (program.jaxpr.effects, "fun prints, calls back or communicates"),
    )

    def reason(i: int, came: str | None, total: jax.Array, param: jax.Array) -> Any:
        dtype = total.dtype
        checks = (
            *of_all,
            (came is None, "used more than once, or not only in sums over rows"),
            (came == "replaces", "its gradient is its new value"),
            (
                came != "slices",
                "no scan runs over it as it is: XLA reuses its gradient's buffer",
            ),
            (
                came == "slices" and i in sent and is_cut(program.jaxpr, i, sent[i]),
                "its specs split a dimension that a scan runs over",
            ),
            (
                param.size * _SMALL < largest,
                f"less than 1/{_SMALL} of the largest: it is added as a whole",
            ),
            (
                jnp.finfo(dtype).bits < jnp.finfo(param.dtype).bits,
                f"it is {param.dtype}, and its accumulator {dtype}",
            ),
            (not meshes.same_mesh(total, param), "its accumulator has another mesh"),
            (jnp.finfo(dtype).bits < 32, f"{dtype} would round too often"),
        )
        return next((why for holds, why in checks if holds), None)

    leaves = program.arrivals, operands.acc.total, operands.params
    return list(map(reason, itertools.count(), *leaves))


# -- Saying it -------------------------------------------------------------------------


def report(names: Sequence[str], whys: Sequence[str | None]) -> None:
    """Logs which leaves are added in place, and hands it to `recorded`."""
    notes = _notes.get([])
    for why in dict.fromkeys(whys):
        members = [name for name, its in zip(names, whys, strict=True) if its == why]
        more = f" and {len(members) - 4} more" if len(members) > 4 else ""
        what = "in place" if why is None else f"not in place ({why})"
        line = f"{what}: {', '.join(members[:4])}{more}"
        _logger.debug("Gradients added %s.", line)
        if line not in notes:
            notes.append(line)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """The lines of every `report` inside, each once."""
    lines: list[str] = []
    token = _notes.set(lines)
    try:
        yield lines
    finally:
        _notes.reset(token)
