"""`accumulate`: micro-batches, each by itself, in one `jax.lax.scan`.

    acc  +  Σ wᵢ · jax.grad(fun)(params, micro-batch i)

First the function and its checks, then the program of one micro-batch.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from .. import _checks, accumulator
from .._devices import meshes
from .._devices.record import Devices
from .._loop import folds, micro_step
from .._loop.loop import run_loop
from .._loop.micro_step import LossProgram, Operands, run_passes
from .._partition import closures
from .._passes import effects, jaxprs, places
from ..accumulator import Accumulator, as_weight
from . import regions, undivided
from .batches import argument, is_typed_key, named_batch, to_pass
from .call import Call, check_carry, put_together, taken_apart, warns_outside_jit
from .options import Argument, Options

# == `accumulate` ======================================================================
# Micro-batches, each by itself, in one `jax.lax.scan`: `accumulate`.
#
#     acc  +  Σ wᵢ · jax.grad(fun)(params, micro-batch i)
#
# Any grouping of the same micro-batches into calls gives the same bits. See
# `_devices.collectives` for the rows of each micro-batch. On one device rows are
# neighbours: a batch that was drawn with `ga_optax.data`'s `window_indices` and
# flattened is split along that function's own rows, and calls over the halves of a
# batch continue one another.


@_checks.explains_keywords
def accumulate(
    fun: Callable[..., Any],
    num_microbatches: int = 1,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | meshes.DataAxis | None = None,
    optimize: bool = True,
    weight_fn: Callable[..., ArrayLike] | None = None,
    aux: Any = "mean",
    rng_argnums: int | Sequence[int] = (),
    rng_argnames: str | Sequence[str] = (),
    carry_argnums: int | Sequence[int] = (),
    num_real_microbatches: ArrayLike | None = None,
) -> Callable[..., tuple[Any, Accumulator]]:
    """Adds the gradients of micro-batches, each by itself, to an accumulator.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.mean((x * w) ** 2)
    >>> step = jax.jit(ga.accumulate(loss), donate_argnums=0)
    >>> w = jnp.float32(2.0)
    >>> acc = ga.accumulator.init(w)
    >>> for x in jnp.array([[1.0, 1.0], [1.0, 3.0]]):
    ...     value, acc = step(acc, w, x)
    >>> print(value, ga.accumulator.mean(acc))
    20.0 12.0

    For a window that does not come as one batch: from a loader that yields one
    micro-batch at a time, or of a length that is not known in advance. Donate the
    accumulator, and it is updated where it lies.

        acc  +  Σ wᵢ · jax.grad(fun)(params, micro-batch i)

    That is the gradient of the whole batch only if the loss is a mean over rows, or
    over what `weight_fn` counts; `verify` says whether it is. With the whole batch at
    hand, `value_and_grad` gives its gradient for any loss.

    **Exactness.** Any grouping of the same micro-batches into calls gives the same
    bits: eight calls of one, two calls of four, one call of eight. Sums are divided
    once, so integer-valued gradients are those of the undivided batch, bit for bit;
    others are off by `n·eps·Σ|terms|` at most. A micro-batch of weight 0 changes no
    gradient, loss or mean, whatever it holds. What an empty accumulator holds (`count
    == 0`) is never read. With `optimize=False` the sums are float32 too, and weight 0
    changes nothing; but groupings agree to rounding only. Page: "Rounding and bits".

    **Keys.** The micro-batches of a call see `fold_in(key, acc.count + i)`. Pass the
    same key all through the window: k calls of one micro-batch and one call of k draw
    the same.

    Args:
      fun: a function like that of `jax.value_and_grad`, of one micro-batch.
      num_microbatches: how many micro-batches are in one call, static. They are
        neighbouring rows; on a mesh without `data_axis`, every k-th row.
      argnums: the positional arguments of `fun` to differentiate with respect to. These
        and all others are counted without the accumulator.
      has_aux: True if `fun` returns `(loss, aux)`.
      batch_argnums: the positional arguments to split. What no option names goes to
        each micro-batch whole; it raises if it is a key, or as long as the batch.
      batch_argnames: keywords to split.
      batch_axes: where to split, as in `jax.vmap`: an axis, None (whole), or a prefix
        of the batch (of a tuple of several batch arguments, keywords last).
      data_axis: the mesh axis, or a tuple of them, that split the batch over devices,
        or a `DataAxis`. At top level each call merges once. Inside `jax.shard_map`
        nothing is merged: accumulator and value are the device's own, and
        `merge_across` at the end of the window communicates once. There it takes names
        alone.
      optimize: as for `value_and_grad`.
      weight_fn: a function of a micro-batch's batch arguments, and then of the aux if
        `has_aux`, that returns its weight, a non-negative scalar. A negative one gives
        NaN. No gradient flows through it.
      aux: "mean" (weighted), "sum", "max", "min", "last", "stack", or a prefix of the
        aux with those.
      rng_argnums: PRNG keys, or trees of them, one for each micro-batch, see **Keys**.
      rng_argnames: keywords that are keys.
      carry_argnums: those that thread through the micro-batches, such as batch
        statistics. `fun` and the result return their new values after the loss: `(loss,
        carry)`, or `(loss, (carry, aux))`. Pass what came back on to the next call.
      num_real_microbatches: how many micro-batches count, the first ones; static or
        traced. The others are not run, and count neither in the mean nor in the aux
        ("stack" has zeros there): for a batch padded to a fixed size.

    Returns:
      A function `(acc, *args, **kwargs) -> (value, acc)`. Make the first `acc` with
      `accumulator.init` from the argument at `argnums` (from a tuple of them if
      `argnums` is one); its dtype is the one to sum in. `value` is `fun`'s value, or
      `(value, aux)`, over the micro-batches of that call alone.

    Raises:
      TypeError, ValueError: as for `value_and_grad`, and if the accumulator does not
        match the parameters.
    """
    options = Options(**locals()).checked(adds=True)

    @warns_outside_jit
    def accumulate_fun(acc: Accumulator, *args: Any, **kwargs: Any) -> Any:
        _check_accumulator(acc, args)
        call = Call.of(options, args, kwargs)
        for i in call.roles["rng_argnums"]:
            _check_keys(i, call.at(i))
        _check_no_keys(call)
        _check_carry(call)
        _check_weight_fn(call)
        _check_continues(call, acc)
        if not call.devices.maps:
            value, acc = _added(call.on_device(), acc, merges=False)
        else:
            value, acc = _over_mesh(call, acc)
        return put_together(options, value), acc

    return accumulate_fun


def _added(call: Call, acc: Accumulator, merges: bool) -> tuple[Any, Accumulator]:
    """The micro-batches of a call, added to an accumulator: loss, carry and aux."""
    run = functools.partial(_in_loop, acc=acc, merges=merges)
    out, error = undivided.with_or_without(run, call)
    if error is not None:
        raise error
    return out


def _in_loop(call: Call, acc: Accumulator, merges: bool) -> tuple[Any, Accumulator]:
    devices = call.devices_of_loop()
    step, operands, (of_carry, of_aux) = traced_micro_batch(call, devices, acc)
    with meshes.scope_of(call.options.data_axis):
        out = run_loop(step, operands, devices, begins=False, merges=merges)
    loss, *leaves = out.results
    value = loss, of_carry.unflatten(out.carry), of_aux.unflatten(leaves)
    total = jax.tree.structure(call.params).unflatten(out.acc.total)
    # Without the specs of the parameters XLA may sum up whole gradients.
    total = total if call.devices.mesh is None else call.devices.shard(total)
    return value, out.acc._replace(total=total)


def _over_mesh(call: Call, acc: Accumulator) -> tuple[Any, Accumulator]:
    """The micro-batches of a call at top level with a data axis, merged once a call."""
    of_acc = Accumulator(
        regions.specs_of_gradients(call), regions.REPLICATED, regions.REPLICATED
    )
    # Stacks differ between devices; all other results are the same on all devices.
    split = meshes.split_spec(call.devices.axes)
    of_aux = jax.tree.map(
        lambda x: split if x == "stack" else regions.REPLICATED, call.options.aux
    )
    results = (regions.REPLICATED, regions.REPLICATED, of_aux), of_acc
    try:
        return regions.over_mesh(
            call, _merged, (acc, of_acc), results=results, check_vma=True
        )
    except regions.ManualAxisError:
        return regions.over_mesh(
            call, _merged, (acc, of_acc), results=results, check_vma=False
        )


def _merged(call: Call, acc: Accumulator) -> tuple[Any, Accumulator]:
    """Folds from zeros on every device, and adds what they merged to `acc`."""
    call = call.on_device()
    start = accumulator.init(call.params, None)
    total = jax.tree.map(lambda z, t: z.astype(t.dtype), start.total, acc.total)
    # Keys need the count.
    start = start._replace(total=call.devices.shard(total), count=acc.count)
    value, new = _added(call, start, merges=True)
    real: Any = call.options.num_real_microbatches
    count = call.options.num_microbatches if real is None else real
    count = jnp.full_like(acc.count, count)
    return value, accumulator.merge(acc, new._replace(count=count))


# -- Checks of the arguments -----------------------------------------------------------

# The name of leaves that Flax overwrites with their gradients: `flax.linen.fp8_ops`.
_REPLACED = "_overwrite_with_gradient"


def _check_accumulator(acc: Any, args: tuple[Any, ...]) -> None:
    """Raises unless the first argument is an accumulator, and no other one is."""
    others = any(isinstance(x, Accumulator) for x in args)
    if others or not isinstance(acc, Accumulator):
        came = ", ".join(type(x).__name__ for x in (acc, *args))
        raise TypeError(
            "The first argument must be the accumulator to continue, and the only one, "
            f"but the arguments are of type {came}. Start with acc = accumulator.init("
            "params). The order is accumulate(fun, k)(acc, params, batch)."
        )


def _check_continues(call: Call, acc: Any) -> None:
    """Raises if `accumulate` cannot add the gradients of a call to `acc`."""
    _checks.check_no_types("acc", acc)
    devices, axis = call.devices, call.options.data_axis
    specs = [] if axis is None else [axis.param_specs, axis.grad_specs]
    other = devices.each or devices.logical or any(x is not None for x in specs)
    if devices.bound and other:
        raise ValueError(
            'Inside shard_map accumulate must have sync="last" and neither '
            "param_specs, grad_specs nor logical_devices, but it has "
            f"{axis}. Use "
            "value_and_grad, or call accumulate at top level; or gather the "
            "parameters once before the window, and pass a name alone."
        )
    _checks.check_gradients(
        acc.total, call.params, name="the parameters", expected="acc.total"
    )
    _checks.check_on_device("acc.total", acc.total)
    for name, _ in _checks.named_leaves(call.params):
        if _REPLACED in name:
            raise ValueError(
                "accumulate must get gradients, which it adds up, but for "
                f"{name} fun returns a new value (of fp8) in the place of a gradient. "
                "Use value_and_grad, or do not differentiate with respect to that leaf."
            )


def _check_keys(place: Argument, tree: Any) -> None:
    _checks.check_arrays(argument(place), tree, "Pass PRNG keys alone.")
    for name, leaf in _checks.named_leaves(tree):
        if not _checks.is_key(leaf):
            shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
            raise ValueError(
                "rng_argnums and rng_argnames must name PRNG keys, or trees of them, "
                f"but {name} of {argument(place)} has shape {shape} and dtype "
                f"{dtype.name}. Pass one key; every micro-batch derives its own."
            )


def _check_no_keys(call: Call) -> None:
    """Raises if a PRNG key would be the same in all micro-batches: so would masks."""

    def check(name: str, leaf: Any, todo: str) -> None:
        if is_typed_key(leaf):
            raise ValueError(
                f"A PRNG key must differ between micro-batches, but {name} goes to "
                f"each as it is. {todo}"
            )

    for place in call.without_role:
        todo = f"Pass keys by themselves, and {to_pass(call, 'rng_argnums', place)}."
        for name, leaf in _checks.named_leaves(call.at(place)):
            check(f"{name} of {argument(place)}", leaf, todo)
    for (name, leaf), axis in zip(named_batch(call), call.batch_axes, strict=True):
        if axis is None:
            check(name, leaf, "Pass it by itself, and name it in rng_argnums.")


def _check_carry(call: Call) -> None:
    """Raises if a key is in a carry that is averaged over devices or micro-batches."""
    # At top level with sync="each" no data axis is ever bound, and it threads.
    if not call.devices.axes or call.devices.by_compiler:
        return
    for name, leaf in _checks.named_leaves(call.role("carry_argnums")):
        if is_typed_key(leaf):
            raise TypeError(
                "With a data_axis the carry must hold numbers to average, but "
                f"{name} of it is a PRNG key. Name it in rng_argnums."
            )


def _check_weight_fn(call: Call) -> None:
    has_aux = call.options.has_aux
    if call.options.weight_fn is None:
        return
    try:
        signature = inspect.signature(call.options.weight_fn)
    except ValueError:  # of a built-in function
        return
    try:
        signature.bind(*call.role("batch_argnums"), *[None] * has_aux)
    except TypeError as error:
        names = " and ".join(map(argument, call.roles["batch_argnums"]))
        and_aux = " and then the aux" if has_aux else ""
        raise TypeError(
            f"weight_fn must take the batch arguments, {names},{and_aux} by position, "
            f"but it takes {signature}: {error}. Give it one parameter for each."
        ) from None


# == The program of one micro-batch ====================================================


def traced_micro_batch(
    call: Call, devices: Devices, acc: Accumulator
) -> tuple[LossProgram, Operands, tuple[Any, Any]]:
    """`fun` of one micro-batch; raises if what it returns does not fit.

    Returns: its program; the arrays of the loop over all of them; the structures of the
    carry and of the aux.
    """
    options, batch = call.options, call.split(call.devices.membership)
    params, _, keys, carry = (list(call.leaves(role).values()) for role in call.roles)
    first = [x[0] for x in batch]
    arguments = params, first, keys, carry
    run = places.in_name_of(options.fun, _micro_batch(call, first[0]))
    trace = jax.make_jaxpr(run, return_shape=True)
    with regions.errors_explained(call):
        closed, shapes = trace(*arguments)
    try:
        closed = closures.without_closures(closed, (), len(params))
    except closures.EscapedError:
        closed = jax.make_jaxpr(_gradient_first(run))(*arguments)
    regions.check_no_region(call, closed.jaxpr)
    regions.check_regions(call, closed.jaxpr)
    closed = closed.replace(
        jaxpr=regions.constraints_without(closed.jaxpr, devices.bound)
    )
    # The types of the results say over which devices they vary; their shapes do not.
    avals = [variable.aval for variable in closed.jaxpr.outvars]
    loss, weight, new, aux = jax.tree.unflatten(jax.tree.structure(shapes), avals)

    def aux_of_twice() -> Any:
        pairs = zip(first, call.split_axes, strict=True)
        more = [jnp.concatenate([x, x], axis) for x, axis in pairs]
        return trace(params, more, keys, carry)[1][-1]

    length = first[0].shape[call.split_axes[0]]
    of_aux = folds.folds_of(options.aux, aux, length, aux_of_twice)
    regions.check_not_reduced(call, loss)
    multiplies = weight is not None and _multiplies(call, closed, arguments)
    program = jaxprs.Program(closed.jaxpr, closed.consts)
    optimize = options.optimize
    (jaxpr, consts), arrivals = run_passes(program, devices, multiplies, optimize)
    step = LossProgram(
        jaxpr=jaxprs.without_values(jaxpr),
        results=[loss, *jax.tree.leaves(aux)],
        folds=["mean", *of_aux],
        weighted=weight is not None,
        varying=tuple(sorted({*devices.bound, *meshes.varying(weight)})),
        multiplies=multiplies,
        arrivals=arrivals,
        optimize=optimize,
        grouped=True,
    )
    params, carry = call.params_of(jaxpr), list(map(micro_step.strong, carry))
    real: Any = options.num_real_microbatches
    real = None if real is None else jnp.asarray(real, jnp.int32)
    operands = Operands(consts, params, batch, keys, carry, devices.flat(acc), real)
    return step, operands, (jax.tree.structure(new), jax.tree.structure(aux))


def _micro_batch(call: Call, x: jax.Array) -> Callable[..., Any]:
    """`fun` of one micro-batch, of which `x` is the first leaf: what is traced."""
    options, weight_fn = call.options, call.options.weight_fn
    numbers = [n for role in call.roles for n in call.leaves(role)]

    def micro_batch(*leaves: list[Any]) -> Any:
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
                f"ga_optax called fun with one of {call.num_of_device} micro-batches: "
                f"the first leaf of the batch has shape {jnp.shape(x)}, split along "
                f"axis {axis} of {whole}. batch_argnums and batch_axes say what is "
                "split; all else goes whole."
            )
            raise
        loss, carry, aux = taken_apart(options, out)
        check_carry(call.role("carry_argnums"), carry)
        if weight_fn is not None and options.has_aux:
            weight = as_weight(weight_fn(*whole, aux), float)
        return loss, weight, carry, aux

    return micro_batch


def _gradient_first(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with a rule: JAX differentiates it where it is called.

    A rule in it that closes over what `jax.vmap` maps runs only while it is traced.
    """

    def forward(params: Any, *rest: Any) -> Any:
        def pair(params: Any) -> tuple[Any, Any]:
            loss, *others = run(params, *rest)
            return loss, others

        (loss, others), grads = jax.value_and_grad(pair, has_aux=True)(params)
        return (loss, *others), grads

    def backward(grads: Any, cts: Any) -> Any:
        def times(g: jax.Array) -> jax.Array:
            dtype = jnp.promote_types(g.dtype, cts[0].dtype)
            return (g.astype(dtype) * cts[0].astype(dtype)).astype(g.dtype)

        return jax.tree.map(times, grads), None, None, None

    ruled = jax.custom_vjp(lambda *args: run(*args))
    ruled.defvjp(forward, backward)
    return ruled


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
    moving = frozenset(closed.jaxpr.invars[: len(params)])
    if effects.side_effects(closed.jaxpr, moving).nonlinear_backward:
        return False

    def backward(params: list[Any], *rest: Any) -> Any:
        def loss_of(*params: Any) -> jax.Array:
            return jaxprs.results(closed, [*params, *jax.tree.leaves(rest)])[0]

        loss, pullback = jax.vjp(loss_of, *params)
        return pullback(micro_step.varying_like(jnp.ones_like(loss), loss))

    return all(
        equation.params.get("exponent_bits", 8) >= 8
        and all(map(_is_wide, (*equation.invars, *equation.outvars)))
        for equation in jaxprs.equations(jax.make_jaxpr(backward)(params, *rest).jaxpr)
    )


def _is_wide(variable: Any) -> bool:
    """True if a variable has the exponents of float32, or is not floating."""
    dtype = getattr(variable.aval, "dtype", np.dtype(np.int32))
    return not jnp.issubdtype(dtype, jnp.floating) or (
        jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
    )
