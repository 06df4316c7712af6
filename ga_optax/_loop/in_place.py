"""Which gradients are added to the accumulator inside the backward pass.

If a model scans over a parameter (its stacked layers), the backward pass can add the
gradient to the accumulator slice by slice, through a reference, so that no second
gradient tree exists. `arrivals` reads off the program of `fun` for which parameters
that has the bits of the plain sum; `reasons` adds what else it takes. For the other
parameters XLA reuses the buffers by itself.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._devices import meshes
from ga_optax._passes import ir, notes
from ga_optax._passes.arrivals import is_cut, use_of
from ga_optax._passes.known import Reason, deeds

# `jax.vjp(...).with_refs` transposes `lax.scan` correctly from jax 0.11.0 on (jax PR
# 38929), and a `custom_vmap` may have references inside it from 0.11.1 on.
HAS_REFS = jax.__version_info__ >= (0, 11, 1)

# A leaf of so small a part of the largest saves no memory. And the sum of a vector,
# such as a bias, is no product that could add it: it would take a kernel a layer.
_SMALL = 1000


def can_add(jaxpr: core.Jaxpr, multiplies: bool) -> bool:
    """Whether gradients of a program may be added in place, unless weights multiply."""
    return HAS_REFS and not multiplies and not deeds(jaxpr).acts


def reasons(
    off: str, step: Any, operands: Any, sent: Mapping[int, Any]
) -> list[Reason | None]:
    """Why each leaf is not added in place; None if it is.

    `off` is why none is, if that is known before; or else it is empty. Asked of a
    `Step`, the `Operands` of its loop, and how gradients are scattered.
    """
    if not off and not HAS_REFS:
        off = f"jax {jax.__version__} is older than 0.11.1"
    if not off and step.multiplies:  # such a weight needs the gradient by itself
        off = "weights multiply the gradients"
    largest = max((ir.numbers(x.shape) for x in operands.params), default=0)

    def reason(i: int, total: jax.Array, param: jax.Array) -> Reason | None:
        if off:
            return Reason(off)
        variable = step.jaxpr.invars[i]
        if step.arrivals[i] is None:
            line = use_of(step.jaxpr, variable)
            return Reason("used more than once, or not only in sums over rows", line)
        why = _why_whole(total, param, variable)
        if step.arrivals[i] != "slices":
            why = "no scan runs over it as it is: XLA reuses its gradient's buffer"
        elif i in sent and is_cut(step.jaxpr, i, sent[i]):
            why = "its specs split a dimension that a scan runs over"
        elif ir.numbers(param.shape) * _SMALL < largest:
            why = f"less than 1/{_SMALL} of the largest: it is added as a whole"
        # Custom rules do not go with effects, such as printing or a collective.
        return Reason(why) if why else step.deeds.acts

    return list(map(reason, itertools.count(), operands.acc.total, operands.params))


def _why_whole(total: jax.Array, param: jax.Array, variable: Any) -> str:
    """What of an accumulator keeps slices from being added to it."""
    dtype = total.dtype
    if jnp.finfo(dtype).bits < jnp.finfo(param.dtype).bits:
        return f"it is {param.dtype}, and its accumulator {dtype}"
    # That of its gradient: a program may be written without a mesh.
    if not meshes.same_mesh(jax.typeof(total), variable.aval):
        return "its accumulator has another mesh"
    return f"{dtype} would round too often" if jnp.finfo(dtype).bits < 32 else ""


# -- Saying it -------------------------------------------------------------------------


def report(names: Sequence[str], whys: Sequence[Reason | None]) -> None:
    """Notes which leaves are added in place, and why the others are not."""
    pairs = []
    for name, its in zip(names, whys, strict=True):
        what = f"not added in place ({its.why})" if its else "added in place"
        pairs.append((what, f"{name} at {its.line}" if its and its.line else name))
    for what, members in notes.grouped(pairs):
        notes.note(f"Gradients {what}: {members}.")
