"""The choice of the gradients that the backward pass adds to the accumulator.

If a model scans over a parameter (stacked layers), the backward pass can add the
gradient to the accumulator slice by slice, through a reference, so that no second
gradient tree exists. `arrivals` reads off the program of `fun` for which parameters
these additions have the bits of the plain sum; `reasons` lists the other conditions.
For the other parameters XLA reuses the buffers by itself.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._checks import on_host
from ga_optax._devices import meshes
from ga_optax._passes import log, read
from ga_optax._passes.arrivals import is_cut, use_of
from ga_optax._passes.known import Reason, side_effects

# `jax.vjp(...).with_refs` transposes `lax.scan` correctly from jax 0.11.0 on (jax PR
# 38929), and a `custom_vmap` may have references inside it from 0.11.1 on.
HAS_REFS = jax.__version_info__ >= (0, 11, 1)

# A leaf of so small a part of the largest saves no memory. And the gradient of a
# vector, such as a bias, is no matrix product into which XLA could fuse the addition:
# each layer would take one more kernel.
_SMALL = 1000


def can_add(jaxpr: core.Jaxpr, multiplies: bool) -> bool:
    """True if gradients may be added in place. Weights must not multiply them."""
    return HAS_REFS and not multiplies and not side_effects(jaxpr).reordering


def reasons(
    off: str, program: Any, operands: Any, scattered: Mapping[int, Any]
) -> list[Reason | None]:
    """For each leaf the reason why it is not added in place; None if it is.

    Args:
      off: the reason that holds for all leaves; empty if there is none.
      program: a `LossProgram`.
      operands: the `Operands` of the loop.
      scattered: the gradients that are scattered before they are added, and how.
    """
    if not off and not HAS_REFS:
        off = f"jax {jax.__version__} is older than 0.11.1"
    if not off and program.multiplies:  # the weight needs the gradient by itself
        off = "weights multiply the gradients"
    largest = max((read.numbers(x.shape) for x in operands.params), default=0)

    def reason(i: int, total: jax.Array, param: jax.Array) -> Reason | None:
        if off:
            return Reason(off)
        variable = program.jaxpr.invars[i]
        if program.arrivals[i] is None:
            line = use_of(program.jaxpr, variable)
            return Reason("used more than once, or not only in sums over rows", line)
        why = _why_whole(total, param, variable)
        if program.arrivals[i] != "slices":
            why = "no scan runs over the parameter itself: XLA reuses the buffer"
        elif i in scattered and is_cut(program.jaxpr, i, scattered[i]):
            why = "grad_specs split a dimension that a scan runs over"
        elif read.numbers(param.shape) * _SMALL < largest:
            why = f"less than 1/{_SMALL} of the largest: added as a whole"
        # Custom rules do not go with effects, such as printing or a collective.
        return Reason(why) if why else program.side_effects.reordering

    return list(map(reason, itertools.count(), operands.acc.total, operands.params))


def _why_whole(total: jax.Array, param: jax.Array, variable: Any) -> str:
    """The reason why no slices can be added to an accumulator; empty if they can."""
    dtype = total.dtype
    if on_host(param):
        return "the parameter lies in the host's memory"
    if jnp.finfo(dtype).bits < jnp.finfo(param.dtype).bits:
        return f"the parameter is {param.dtype}, the accumulator {dtype}"
    # The mesh of the gradient: a program may be written without a mesh.
    if not meshes.same_mesh(jax.typeof(total), variable.aval):
        return "the accumulator has another mesh"
    return f"{dtype} would round too often" if jnp.finfo(dtype).bits < 32 else ""


# -- The log ---------------------------------------------------------------------------


def report(names: Sequence[str], whys: Sequence[Reason | None]) -> None:
    """Logs the leaves that are added in place, and for the others the reason."""
    pairs = []
    for name, why in zip(names, whys, strict=True):
        what = f"not added in place ({why.why})" if why else "added in place"
        pairs.append((what, f"{name} at {why.line}" if why and why.line else name))
    for what, members in log.grouped(pairs):
        log.write(f"Gradients {what}: {members}.")
