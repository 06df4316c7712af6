"""The program of `fun` of one micro-batch by itself, for `accumulate`."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._calls.call import Call
from ga_optax._calls.region import check_not_reduced, explained
from ga_optax._calls.results import check_carry, taken_apart
from ga_optax._devices import meshes
from ga_optax._loop import folds, trees
from ga_optax._loop.loss import DeviceContext, LossProgram, Operands, run_passes
from ga_optax._passes import constraints, interpret, known, places, read, rewrite
from ga_optax.accumulator import Accumulator, as_weight


def traced(
    call: Call, where: DeviceContext, acc: Accumulator
) -> tuple[LossProgram, Operands, tuple[Any, Any]]:
    """`fun` of one micro-batch; raises if what it returns does not fit.

    Returns: its program; the arrays of the loop over all of them; the structures of the
    carry and of the aux.
    """
    options, batch = call.options, call.split(call.devices.distributed)
    params, _, keys, carry = (list(call.leaves(role).values()) for role in call.roles)
    first = [x[0] for x in batch]
    arguments = params, first, keys, carry
    run = places.in_name_of(options.fun, _micro_batch(call, first[0]))
    trace = jax.make_jaxpr(run, return_shape=True)
    with explained(call):
        closed, shapes = trace(*arguments)
    devices = call.devices
    closed = closed.replace(jaxpr=constraints.without_axes(closed.jaxpr, devices.bound))
    # The types of the results say over which devices they vary; their shapes do not.
    avals = [variable.aval for variable in closed.jaxpr.outvars]
    loss, weight, new, aux = jax.tree.unflatten(jax.tree.structure(shapes), avals)

    def aux_of_twice() -> Any:
        pairs = zip(first, call.split_axes, strict=True)
        more = [jnp.concatenate([x, x], axis) for x, axis in pairs]
        return trace(params, more, keys, carry)[1][-1]

    rows = first[0].shape[call.split_axes[0]]
    of_aux = folds.of_leaves(options.aux, aux, rows, aux_of_twice)
    check_not_reduced(call, loss)
    multiplies = weight is not None and _multiplies(call, closed, arguments)
    program = read.Program(closed.jaxpr, closed.consts)
    optimize = options.optimize
    (jaxpr, consts), arrivals = run_passes(program, where, multiplies, optimize)
    step = LossProgram(
        jaxpr=rewrite.without_values(jaxpr),
        results=[loss, *jax.tree.leaves(aux)],
        folds=["mean", *of_aux],
        weighted=weight is not None,
        varying=tuple(sorted({*devices.bound, *meshes.varying(weight)})),
        multiplies=multiplies,
        arrivals=arrivals,
        optimize=optimize,
    )
    params, carry = call.params_of(jaxpr), list(map(trees.strong, carry))
    real: Any = options.num_real_microbatches
    real = None if real is None else jnp.asarray(real, jnp.int32)
    operands = Operands(consts, params, batch, keys, carry, devices.flat(acc), real)
    return step, operands, (jax.tree.structure(new), jax.tree.structure(aux))


def _micro_batch(call: Call, x: jax.Array) -> Callable[..., Any]:
    """`fun` of one micro-batch, of which `x` is the first leaf: what is traced."""
    options, weight_fn = call.options, call.options.weight_fn
    numbers = [n for role in call.roles for n in call.leaves(role)]

    def run(*leaves: list[Any]) -> Any:
        one = call.with_leaves(
            dict(zip(numbers, itertools.chain(*leaves), strict=True))
        )
        whole, weight = one.role("batch_argnums"), None
        try:
            if weight_fn is not None and not options.has_aux:
                weight = as_weight(weight_fn(*whole), float)
            out = options.fun(*one.args, **one.kwargs)
        except Exception as error:
            axis, whole = call.split_axes[0], jnp.shape(call.batch[0])
            error.add_note(
                f"ga_optax called fun with one of {call.num_parts} micro-batches: the "
                f"first leaf of the batch has shape {jnp.shape(x)}, split along axis "
                f"{axis} of {whole}. batch_argnums and batch_axes say what is split; "
                "all else goes whole."
            )
            raise
        loss, carry, aux = taken_apart(options, out)
        check_carry(call.role("carry_argnums"), carry)
        if weight_fn is not None and options.has_aux:
            weight = as_weight(weight_fn(*whole, aux), float)
        return loss, weight, carry, aux

    return run


def _multiplies(call: Call, closed: core.ClosedJaxpr, arguments: Any) -> bool:
    """True if weights must multiply gradients, and not the cotangent of the loss."""
    loss: Any = closed.jaxpr.outvars[0].aval
    if jnp.finfo(loss.dtype).bits < 32 or not call.options.optimize:
        return True
    return not _scales(closed, *arguments)


def _scales(closed: core.ClosedJaxpr, params: list[Any], *rest: Any) -> bool:
    """True if a factor of the loss's cotangent only scales the gradients.

    A custom rule may clip or quantise cotangents. And float16 and float8 overflow at
    weights that count tokens. So the dtypes are read from the backward pass, which has
    casts and rules (`jax.custom_jvp`) that the loss does not show.
    """
    if known.side_effects(closed.jaxpr).nonlinear_backward:
        return False

    def backward(params: list[Any], *rest: Any) -> Any:
        def loss_of(*params: Any) -> jax.Array:
            return interpret.results(closed, [*params, *jax.tree.leaves(rest)])[0]

        loss, pullback = jax.vjp(loss_of, *params)
        return pullback(trees.like(jnp.ones_like(loss), loss))

    return all(
        equation.params.get("exponent_bits", 8) >= 8
        and all(map(_is_wide, (*equation.invars, *equation.outvars)))
        for equation in read.equations(jax.make_jaxpr(backward)(params, *rest).jaxpr)
    )


def _is_wide(variable: Any) -> bool:
    """True if a variable has the exponents of float32, or is not floating."""
    dtype = getattr(variable.aval, "dtype", np.dtype(np.int32))
    return not jnp.issubdtype(dtype, jnp.floating) or (
        jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
    )
