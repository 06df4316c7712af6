"""`jax.value_and_grad` of any loss, over micro-batches.

    value, grads  =  jax.value_and_grad(fun)(params, all rows)

`fun` is traced once, at all rows, and its program is partitioned (`_partition`): what
comes out is the loss of a micro-batch, of which each adds its part. If rows do not meet
in it, it runs in one loop (`_loop`); else with collectives over an axis of the window,
which `_window` runs level by level. What nobody can partition is computed whole.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._calls import advice, layouts
from ga_optax._calls.call import Call, DoesNotFitError, NoDerivativeError
from ga_optax._calls.options import Options
from ga_optax._calls.region import WHOLE, gradients, over_mesh
from ga_optax._calls.results import taken_apart
from ga_optax._devices import collectives, meshes
from ga_optax._loop import run as loop
from ga_optax._loop.step import Operands, Step, after_passes
from ga_optax._partition import Rows
from ga_optax._passes import ir
from ga_optax._window import plans
from ga_optax._window import run as window
from ga_optax._window.values import Loss


def of_pair(options: Options) -> Options:
    """The same of a function that returns `(loss, aux)`, and of any aux."""

    @functools.wraps(options.fun)
    def fun(*args: Any, **kwargs: Any) -> Any:
        out = options.fun(*args, **kwargs)
        loss, _, aux = taken_apart(options, out, any_aux=True)
        # What is no array `jax.value_and_grad` returns as it is.
        return loss, jax.tree.map(
            lambda x: x if isinstance(x, jax.Array) else _Own(x), aux
        )

    return options._replace(fun=fun, has_aux=True)


def of_call(
    call: Call, run: Callable[[Call, layouts.Traced], Any] | None = None
) -> tuple[tuple[jax.Array, Any], Any]:
    """`((loss, aux), grads)` of a call; with `sums`, `(grads, those of rows)`.

    `run` computes that over micro-batches; it is `divided` if left out.
    """
    if layouts.num_parts(call) == 1:
        return undivided(call)
    call = call.on_device()
    trace = layouts.traced(call)
    if isinstance(trace.part, Exception):
        return _in_one(call, trace.part)
    layouts.check_options(call, trace.part)
    try:
        return (run or divided)(call, trace)
    except (DoesNotFitError, NoDerivativeError, Warning):
        raise
    except Exception as error:  # Any: what JAX will change is not known.
        return _in_one(call, error)


def as_came(aux: Any) -> Any:
    """The aux of such a pair, as `fun` returns it."""
    own = lambda x: isinstance(x, _Own)  # noqa: E731
    return jax.tree.map(lambda x: x.value if own(x) else x, aux, is_leaf=own)


def undivided(call: Call) -> tuple[tuple[jax.Array, Any], Any]:
    """By JAX, of all rows at once."""
    fun = call.options.fun
    argnums: Any = call.options.argnums
    if rows := call.roles["batch_argnums"][: call.rows]:
        argnums = (*call.roles["argnums"], *rows)
    if argnums == ():
        out, grads = fun(*call.args, **call.kwargs), ()
    else:
        value_and_grad = jax.value_and_grad(fun, argnums, has_aux=True)
        out, grads = value_and_grad(*call.args, **call.kwargs)
    if not call.sums:
        return out, grads
    number = len(call.roles["argnums"])
    return out, (grads[:number], grads[number:])


def _in_one(call: Call, error: Exception) -> tuple[tuple[jax.Array, Any], Any]:
    """The same, if a program cannot be partitioned, with a warning that says so."""
    if call.axes:
        raise error
    why = " ".join([str(error).split("\n")[0], *getattr(error, "__notes__", ())])
    warnings.warn(
        "The gradient is computed of all rows at once, in the memory that this takes, "
        f"because ga_optax with jax {jax.__version__} cannot divide the program: "
        f"{type(error).__name__}: {why} The result is right.",
        stacklevel=6,
    )
    return undivided(call)


# -- Over micro-batches ----------------------------------------------------------------


def divided(call: Call, trace: layouts.Traced) -> tuple[tuple[jax.Array, Any], Any]:
    """The same over micro-batches."""
    if not call.maps:
        results, grads, rows = _window(call, trace)
    else:

        def run(inner: Call) -> Any:
            # Types name the mesh otherwise there. Results come as those outside.
            inner = inner.on_device()
            here = layouts.traced(inner, trace.part.layouts)
            if isinstance(here.part, Exception):
                raise here.part
            layouts.check_options(inner, here.part)
            return _window(inner, here)

        split = meshes.split_spec(call.options.axes)
        specs = [split if isinstance(x, Rows) else WHOLE for x in trace.part.layouts]
        out = specs, gradients(call), split
        consts = trace.closed.consts
        results, grads, rows = over_mesh(
            call, run, results=out, check_vma=False, closed_over=consts
        )
    value = layouts.returned(call, trace, results)
    if not call.sums:
        return value, grads
    return value, (grads, layouts.of_rows(call, trace, rows))


def _window(call: Call, trace: layouts.Traced) -> tuple[list[Any], Any, list[Any]]:
    """The micro-batches of this device, merged over all of them.

    Returns: the results, of which those with rows are stacked; the gradients; those of
    leaves of the batch, of each micro-batch along axis 0.
    """
    options, part, size = call.options, trace.part, layouts.num_parts(call)
    where = call.where()._replace(window=[(layouts.AXIS, size)])
    program = trace.program
    (jaxpr, consts), arrivals = after_passes(program, where, False, options.optimize)
    ways = ["stack" if isinstance(x, Rows) else _WAYS[x] for x in part.layouts]
    step = Step(
        jaxpr=ir.without_values(jaxpr),
        results=[x.aval for x in jaxpr.outvars],
        ways=ways,
        weighted=False,
        varying=tuple(sorted(call.axes)),
        multiplies=False,
        arrivals=arrivals,
        optimize=options.optimize,
    )
    params = list(map(jnp.asarray, jax.tree.leaves(call.params)))
    batch = [*call.split(trace.strided), _indices(call)]
    acc = accumulator.begun(call.params, options.accumulator_dtype)
    acc = call.flat(acc._replace(total=call.placed(acc.total, -0.0)))
    operands = Operands(consts, params, batch, [], [], acc, rows=call.rows)
    if part.meets:
        loss = Loss(step, layouts.AXIS, size)
        kept = options.residual_bytes
        out = window.run(loss, operands, where, residual_bytes=kept)
    else:
        plans.of_loop(step, operands, size)
        out = loop.run(step, operands, where, begins=True, merges=True)
    advice.say(trace, size)
    return out.results, _gradients(call, out.acc.total), list(out.rows)


# How results come together over micro-batches that have no rows.
_WAYS = {"whole": "last", "partial": "sum"}


def _indices(call: Call) -> jax.Array:
    """Which micro-batch is which, of those of all devices."""
    index = jnp.arange(call.num_parts, dtype=jnp.int32)
    if call.axes:
        index = index + call.num_parts * jax.lax.axis_index(call.axes).astype(jnp.int32)
    varying = frozenset().union(*map(meshes.varying, call.batch))
    return collectives.vary(index, tuple(sorted(varying)))


def _gradients(call: Call, totals: Sequence[jax.Array]) -> Any:
    """Sums in the dtypes of the parameters."""
    leaves, structure = jax.tree.flatten(call.params)
    pairs = zip(totals, leaves, strict=True)
    grads = structure.unflatten(
        [g if call.sums else g.astype(jnp.result_type(x)) for g, x in pairs]
    )
    # If the caller does not say either, XLA may sum up whole gradients.
    return grads if call.mesh is None else call.placed(grads)


# -- What is no array ------------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False)
class _Own:
    """A node without leaves for what is no array: a number, a text, NumPy's."""

    value: Any
