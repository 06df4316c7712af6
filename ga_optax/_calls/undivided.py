"""What micro-batches do not compute: all rows at once, and what does not fit."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ga_optax._calls import batches, rows
from ga_optax._calls.call import Call
from ga_optax._calls.devices import DoesNotFitError
from ga_optax._checks import divisors, one_of
from ga_optax._partition import Axis, Partitioned, meeting_of
from ga_optax._passes import places, read
from ga_optax._text import warn

Pair = tuple[tuple[jax.Array, Any], Any]  # ((loss, aux), gradients)


class AllRows(NamedTuple):
    """The plan of a call that is not divided, and why, in words."""

    why: str


def undivided(call: Call, plan: AllRows) -> Pair:
    """`((loss, aux), gradients)` by JAX, of all rows at once."""
    if call.sees is not None:
        call.sees(plan)
    fun = call.options.fun
    argnums: Any = call.options.argnums
    if of_rows := call.roles["batch_argnums"][: call.rows]:
        argnums = (*call.roles["argnums"], *of_rows)
    if argnums == ():
        out, grads = fun(*call.args, **call.kwargs), ()
    else:
        allow_int = call.options.allow_int
        of_all = jax.value_and_grad(fun, argnums, has_aux=True, allow_int=allow_int)
        out, grads = of_all(*call.args, **call.kwargs)
    if not call.sums:
        return out, grads
    number = len(call.roles["argnums"])
    return out, (grads[:number], grads[number:])


def in_one(call: Call, plan: AllRows) -> Pair:
    """As `undivided`, and a warning, unless all rows at once raise an error as well."""
    text = (
        "The gradient is computed of all rows at once, in the memory that this takes, "
        f"because {plan.why} The result is right."
    )
    try:
        out = undivided(call, plan)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        error.add_note(text)
        raise
    if call.sees is None:
        warn(text)
    return out


def why_undivided(error: Exception) -> str:
    """Why a program cannot be divided, and what helps."""
    why = " ".join([str(error).split("\n")[0], *getattr(error, "__notes__", ())])
    return (
        f"ga_optax with jax {jax.__version__} cannot divide the program: "
        f"{type(error).__name__}: {why}. If rows of a function in there do not need "
        "each other, such as a solver under jax.vmap, ga_optax.rowwise of it, here "
        "ga_optax.rowwise(jax.vmap(fun, in_axes), in_axes), needs no look inside."
    )


# -- What does not fit ------------------------------------------------------------


def does_not_divide(call: Call, jaxpr: Any) -> DoesNotFitError:
    """The error that rows meet, so that the last micro-batch cannot be smaller."""
    total = rows.parts_of(call).total
    one = rows.of_neighbours(call, jaxpr, total)  # each row by itself
    axis = Axis(rows.AXIS, total, 0)
    met = next(filter(axis.is_meeting, read.equations(one.jaxpr)), None)
    where = f", and rows meet at {places.place_of(met.source_info)}" if met else ""
    number, came, _ = batches.counted_rows(call, hint=True)
    k, name = call.size + 1, came.partition(" has shape")[0]
    leaves = jax.tree.leaves(call.role("batch_argnums"))
    more = len([x for x in leaves if np.ndim(x)]) > len(call.batch)
    todo = f"; or, if that leaf has no rows, give {name} None in batch_axes"
    return DoesNotFitError(
        f"num_microbatches={k} must divide the batch axis if rows meet, but {came}"
        f"{where}. Use {one_of(divisors(number))}{todo * more}. "
        f"{batches.uneven(number, k)}"
    )


def check_options(call: Call, part: Partitioned) -> None:
    """Raises if an option does not fit because rows meet; the error names the line.

    Sums without parameters, such as counts, fit all options: they are added up first.
    """
    devices = call.devices
    gathered = (e for e in read.equations(part.jaxpr) if meeting_of(e) == "all_gather")
    e = next(gathered, part.in_gradient)
    if e is None:
        return
    where = f"rows meet at {places.place_of(e.source_info)}"
    if devices.each or devices.scatters:
        raise DoesNotFitError(
            f'If rows meet, data_axis must have sync="last", but {where}, and it is '
            f"{call.options.data_axis}. Leave sync out, or write the loss so that its "
            "rows do not need each other; ga_optax.batch_dependencies shows all lines."
        )
    if devices.is_checked:
        raise DoesNotFitError(
            "If rows meet, a jax.shard_map must have check_vma=False, but this one "
            f"checks, and {where}: JAX has no types for an axis beside its mesh. Pass "
            "check_vma=False, or call at top level with data_axis=."
        )
    if by_type := rows.split_by_type(call):
        spec, axis = by_type
        raise DoesNotFitError(
            "If rows meet, a batch that lies along a mesh axis of explicit type needs "
            f"data_axis=, but {where}, and the batch is sharded as {spec} along "
            f"axis {axis}. Pass data_axis={spec[axis]!r}."
        )
