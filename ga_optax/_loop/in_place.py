"""Which gradients are added to the accumulator inside the backward pass.

If a model scans over a parameter (its stacked layers), the backward pass can add the
gradient to the accumulator slice by slice, through a reference, so that no second
gradient tree exists. `arrivals` reads off the program of `fun` for which parameters
that has the bits of the plain sum; `reasons` adds what else it takes. For the other
parameters XLA reuses the buffers by itself.
"""

import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._devices import meshes
from ga_optax._passes import ir, notes
from ga_optax._passes.arrivals import is_cut, use_of
from ga_optax._passes.known import Reason

# `jax.vjp(...).with_refs` transposes `lax.scan` correctly from jax 0.11.0 on (jax PR
# 38929), and a `custom_vmap` may have references inside it from 0.11.1 on.
HAS_REFS = jax.__version_info__ >= (0, 11, 1)

_SMALL = 1000  # a leaf of so small a part of the largest saves no memory


def reasons(
    off: str,
    step: Any,
    operands: Any,
    sent: Mapping[int, Any] = types.MappingProxyType({}),
) -> list[Reason | None]:
    """Why each leaf is not added in place; None if it is.

    `off` is why none is, if that is known before; or else it is empty. Asked of a
    `Step`, the `Operands` of its loop, and how gradients are scattered.

    A weight that multiplies a gradient needs that gradient by itself. Custom rules do
    not go with effects, such as printing or a collective. The sum of a vector, such
    as a bias, is no product that could add it: one kernel a layer would, and here one
    for all layers.
    """
    largest = max((ir.numbers(x.shape) for x in operands.params), default=0)
    of_all = (
        (bool(off), off),
        (not HAS_REFS, f"jax {jax.__version__} is older than 0.11.1"),
        (step.multiplies, "weights multiply the gradients"),
    )

    def reason(i: int, came: str | None, total: jax.Array, param: jax.Array) -> Any:
        dtype = total.dtype
        checks = (
            *of_all,
            (came is None, "used more than once, or not only in sums over rows"),
            (
                came != "slices",
                "no scan runs over it as it is: XLA reuses its gradient's buffer",
            ),
            (
                came == "slices" and i in sent and is_cut(step.jaxpr, i, sent[i]),
                "its specs split a dimension that a scan runs over",
            ),
            (
                ir.numbers(param.shape) * _SMALL < largest,
                f"less than 1/{_SMALL} of the largest: it is added as a whole",
            ),
            (
                jnp.finfo(dtype).bits < jnp.finfo(param.dtype).bits,
                f"it is {param.dtype}, and its accumulator {dtype}",
            ),
            (
                # That of its gradient: a program may be written without a mesh.
                not meshes.same_mesh(jax.typeof(total), step.jaxpr.invars[i].aval),
                "its accumulator has another mesh",
            ),
            (jnp.finfo(dtype).bits < 32, f"{dtype} would round too often"),
        )
        why = next((why for holds, why in checks if holds), None)
        if why is None:
            return step.deeds.acts
        variable = step.jaxpr.invars[i]
        says = came is None and not any(holds for holds, _ in of_all)
        return Reason(why, use_of(step.jaxpr, variable) if says else "")

    leaves = step.arrivals, operands.acc.total, operands.params
    return list(map(reason, itertools.count(), *leaves))


# -- Saying it -------------------------------------------------------------------------


def report(names: Sequence[str], whys: Sequence[Reason | None]) -> None:
    """Notes which leaves are added in place, and why the others are not."""
    pairs = []
    for name, its in zip(names, whys, strict=True):
        what = f"not added in place ({its.why})" if its else "added in place"
        pairs.append((what, f"{name} at {its.line}" if its and its.line else name))
    for what, members in notes.grouped(pairs):
        notes.note(f"Gradients {what}: {members}.")
