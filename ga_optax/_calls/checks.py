"""What `accumulate` asks of a call beyond what all functions ask."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._calls.batches import argument, is_key, line, named_batch
from ga_optax._calls.call import Call
from ga_optax._calls.options import Argument
from ga_optax._checks import check_arrays, named_leaves

# Flax's name of what is to be overwritten with its gradient: `flax.linen.fp8_ops`.
_REPLACED = "_overwrite_with_gradient"


def each_by_itself(call: Call) -> None:
    """Raises if the micro-batches of a call cannot be by themselves."""
    for i in call.roles["rng_argnums"]:
        _check_keys(i, call.at(i))
    _check_no_keys(call)
    _check_carry(call)
    _check_weight_fn(call)


def gradients_are_sums(params: Any) -> None:
    """Raises if a leaf has its new value for a gradient, of which no sum is right."""
    for name, _ in named_leaves(params):
        if _REPLACED in name:
            raise ValueError(
                "accumulate must have gradients to add up, but that of "
                f"{name} is its new value, of which the largest counts. Use "
                "value_and_grad, or do not differentiate with respect to it."
            )


def _check_keys(place: Argument, tree: Any) -> None:
    check_arrays(argument(place), tree, "Pass PRNG keys alone.")
    for name, leaf in named_leaves(tree):
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
        raw = dtype == jnp.uint32 and len(shape) == 1
        if not (typed or raw):
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
    if not call.options.axes or call.by_compiler:
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
        due = " and ".join(map(argument, call.roles["batch_argnums"]))
        and_aux = " and then the aux" if has_aux else ""
        raise TypeError(
            f"weight_fn must take the batch arguments, {due},{and_aux} by position, "
            f"but it takes {signature}: {error}. Give it one parameter for each."
        ) from None
