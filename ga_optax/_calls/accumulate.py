"""Micro-batches, each by itself, in one `jax.lax.scan`: `accumulate`.

    acc  +  Σ wᵢ · jax.grad(fun)(params, micro-batch i)

Any grouping of the same micro-batches into calls gives the same bits. See
`_devices.membership` for the rows of each micro-batch. On one device rows are
neighbours: a
batch that was drawn with `ga_optax.data`'s `window_indices` and flattened is split
along that function's own rows, and calls over the halves of a batch continue one
another.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ga_optax import accumulator
from ga_optax._calls.batches import argument, is_key, line, named_batch
from ga_optax._calls.call import Call
from ga_optax._calls.micro_batch import traced
from ga_optax._calls.options import Argument, Options
from ga_optax._calls.region import WHOLE, ManualAxisError, gradients, over_mesh
from ga_optax._calls.results import put_together
from ga_optax._calls.words import explains_keywords, warns_outside_jit
from ga_optax._checks import (
    check_arrays,
    check_gradients,
    check_on_device,
    named_leaves,
)
from ga_optax._checks import is_key as is_one_key
from ga_optax._devices import meshes
from ga_optax._devices.data_axis import DataAxis
from ga_optax._loop.run import run
from ga_optax.accumulator import Accumulator


@explains_keywords
def accumulate(
    fun: Callable[..., Any],
    num_microbatches: int = 1,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
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
    changes nothing; but two groupings agree to rounding only. Page: "Exactness".

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
      aux: "mean" (weighted), "sum", "last", "stack", or a prefix of the aux with those.
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
    where = call.where()
    step, operands, (of_carry, of_aux) = traced(call, where, acc)
    out = run(step, operands, where, begins=False, merges=merges)
    loss, *leaves = out.results
    value = loss, of_carry.unflatten(out.carry), of_aux.unflatten(leaves)
    total = jax.tree.structure(call.params).unflatten(out.acc.total)
    # Without the specs of the parameters XLA may sum up whole gradients.
    total = total if call.devices.mesh is None else call.devices.shard(total)
    return value, out.acc._replace(total=total)


def _over_mesh(call: Call, acc: Accumulator) -> tuple[Any, Accumulator]:
    """The micro-batches of a call at top level with a data axis, merged once a call."""
    of_acc = Accumulator(gradients(call), WHOLE, WHOLE)
    # Stacks differ between devices; all other results are the same on all devices.
    split = meshes.split_spec(call.devices.axes)
    of_aux = jax.tree.map(lambda x: split if x == "stack" else WHOLE, call.options.aux)
    results = (WHOLE, WHOLE, of_aux), of_acc
    try:
        return over_mesh(call, _merged, (acc, of_acc), results=results, check_vma=True)
    except ManualAxisError:
        return over_mesh(call, _merged, (acc, of_acc), results=results, check_vma=False)


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


def _check_continues(call: Call, acc: Any) -> None:
    """Raises if `accumulate` cannot add the gradients of a call to `acc`."""
    if not isinstance(acc, Accumulator):
        raise TypeError(
            "The first argument must be the accumulator to continue, but it is of "
            f"type {type(acc).__name__}. Start with accumulator.init(params)."
        )
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
    check_gradients(acc.total, call.params, name="the parameters", expected="acc.total")
    check_on_device("acc.total", acc.total)
    for name, _ in named_leaves(call.params):
        if _REPLACED in name:
            raise ValueError(
                "accumulate must get gradients, which it adds up, but for "
                f"{name} fun returns a new value (of fp8) in the place of a gradient. "
                "Use value_and_grad, or do not differentiate with respect to that leaf."
            )


def _check_keys(place: Argument, tree: Any) -> None:
    check_arrays(argument(place), tree, "Pass PRNG keys alone.")
    for name, leaf in named_leaves(tree):
        if not is_one_key(leaf):
            shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
            raise ValueError(
                "rng_argnums and rng_argnames must name PRNG keys, or trees of them, "
                f"but {name} of {argument(place)} has shape {shape} and dtype "
                f"{dtype.name}. Pass one key; every micro-batch derives its own."
            )


def _check_no_keys(call: Call) -> None:
    """Raises if a PRNG key would be the same in all micro-batches: so would masks."""

    def check(name: str, leaf: Any, todo: str) -> None:
        if is_key(leaf):
            raise ValueError(
                f"A PRNG key must differ between micro-batches, but {name} goes to "
                f"each as it is. {todo}"
            )

    for place in call.without_role:
        todo = f"Pass keys by themselves, and {line(call, 'rng_argnums', place)}."
        for name, leaf in named_leaves(call.at(place)):
            check(f"{name} of {argument(place)}", leaf, todo)
    for (name, leaf), axis in zip(named_batch(call), call.batch_axes, strict=True):
        if axis is None:
            check(name, leaf, "Pass it by itself, and name it in rng_argnums.")


def _check_carry(call: Call) -> None:
    """Raises if a key is in a carry that is averaged over devices or micro-batches."""
    # At top level with sync="each" no data axis is ever bound, and it threads.
    if not call.devices.axes or call.devices.by_compiler:
        return
    for name, leaf in named_leaves(call.role("carry_argnums")):
        if is_key(leaf):
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
