"""The examples of a window, as pure functions of a key and a step.

The whole window is drawn first and split afterwards. So the number of micro-batches
does not change the examples of a step, and there is no iterator whose state would have
to be restored. Row i of the result is micro-batch i. The rows, one after another, are
the batch that `ga_optax.value_and_grad` splits into the same micro-batches on one
device.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._checks import brief, check_int, check_integer, is_key

__all__ = ["epoch_indices", "window_indices"]


def window_indices(
    key: jax.Array,
    step: ArrayLike,
    num_examples: int,
    batch_size: int,
    num_microbatches: int,
) -> jax.Array:
    """Draws the examples of one window, with replacement.

    >>> import jax
    >>> from ga_optax import data
    >>> indices = data.window_indices(jax.random.key(0), 7, 1797, 64, 4)
    >>> print(indices.shape, indices.dtype)
    (4, 16) int32

    Use this function if you train by steps rather than by epochs. A window may hold an
    example twice, and the draws of different steps are independent. A call costs
    `batch_size` random numbers, for any number of examples.

    **Exactness.** The same arguments give the same integers in every process and after
    every restart; another `num_microbatches` gives the same integers in another shape.
    The probabilities of two examples differ by less than `num_examples / 2³²` of each.

    Args:
      key: a PRNG key for the whole run.
      step: the number of the step, an integer from 0 to 2³² - 1 of any dtype; static or
        traced.
      num_examples: how many examples there are, static, at most 2³¹ - 1.
      batch_size: how many examples a window holds, static.
      num_microbatches: how many micro-batches to split them into, static; it must
        divide `batch_size`.

    Returns:
      Indices in `[0, num_examples)`, int32 `[num_microbatches, micro-batch size]`.

    Raises:
      TypeError: if `key` is no PRNG key, `step` is not an integer scalar, or another
        number not an int.
      ValueError: if a number is out of its range, or `num_microbatches` does not divide
        `batch_size`.
    """
    sizes = num_examples, batch_size, num_microbatches
    step, n, size, k = _checked(key, step, *sizes)
    key = jax.random.fold_in(key, step)
    return jax.random.randint(key, (size,), 0, n, jnp.int32).reshape(k, -1)


def epoch_indices(
    key: jax.Array,
    step: ArrayLike,
    num_examples: int,
    batch_size: int,
    num_microbatches: int,
) -> jax.Array:
    """Draws the examples of one window, without replacement within an epoch.

    >>> import jax
    >>> from ga_optax import data
    >>> key = jax.random.key(0)
    >>> epoch = [data.epoch_indices(key, step, 8, 4, 2) for step in range(2)]
    >>> print(sorted(i for window in epoch for i in window.ravel().tolist()))
    [0, 1, 2, 3, 4, 5, 6, 7]

    An epoch has `num_examples // batch_size` steps and one permutation. Examples that
    do not fill a window are left out, different ones in every epoch. Every call makes
    the permutation, so nothing but the step has to be restored, and time and memory
    grow with `num_examples`. For very many examples use `window_indices`.

    **Exactness.** As for `window_indices`; and no example appears twice in the steps of
    one epoch.

    Args:
      key: a PRNG key for the whole run.
      step: the number of the step, counted through all epochs, an integer from 0 to
        2³² - 1 of any dtype; static or traced.
      num_examples: how many examples there are, static, at most 2³¹ - 1.
      batch_size: how many examples a window holds, static, at most `num_examples`.
      num_microbatches: how many micro-batches to split them into, static; it must
        divide `batch_size`.

    Returns:
      Indices in `[0, num_examples)`, int32 `[num_microbatches, micro-batch size]`.

    Raises:
      TypeError: if `key` is no PRNG key, `step` is not an integer scalar, or another
        number not an int.
      ValueError: if a number is out of its range, `num_microbatches` does not divide
        `batch_size`, or `batch_size` is greater than `num_examples`.
    """
    sizes = num_examples, batch_size, num_microbatches
    step, n, size, k = _checked(key, step, *sizes)
    if size > n:
        raise ValueError(
            "Without replacement, batch_size must be at most num_examples, but "
            f"batch_size={size} and num_examples={n}. Use a smaller batch, or "
            "window_indices, which draws with replacement."
        )
    steps = jnp.uint32(n // size)
    order = jax.random.permutation(jax.random.fold_in(key, step // steps), n)
    start = (step % steps).astype(jnp.int32) * jnp.int32(size)
    window = jax.lax.dynamic_slice_in_dim(order.astype(jnp.int32), start, size)
    return window.reshape(k, -1)


def _checked(key: Any, step: Any, *sizes: Any) -> tuple[jax.Array, int, int, int]:
    """Returns the step as a uint32, for `fold_in`, and the sizes as ints; or raises."""
    if not is_key(key):
        raise TypeError(
            f"key must be one PRNG key, but it is {brief(key)}. Pass "
            "jax.random.key(0), for example: the same key in all steps."
        )
    names = ("num_examples", "batch_size", "num_microbatches")
    todo = "Pass a Python int, known when the function is traced."
    ints = []
    for name, value in zip(names, sizes, strict=True):
        ints.append(check_int(name, value, todo))
        if ints[-1] >= 2**31:
            raise ValueError(f"{name} must fit in an int32, but it is {value}. {todo}")
    num_examples, batch_size, num_microbatches = ints
    if batch_size % num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} must divide batch_size, but "
            f"batch_size={batch_size}. Change one of them."
        )
    todo = "Count the steps from 0."
    check_integer("step", step, todo)
    # Reading the value of a JAX array could wait for the device.
    if not isinstance(step, jax.Array) and not 0 <= int(step) < 2**32:
        raise ValueError(f"step must be from 0 to 2^32 - 1, but it is {step}. {todo}")
    return jnp.asarray(step, jnp.uint32), num_examples, batch_size, num_microbatches
