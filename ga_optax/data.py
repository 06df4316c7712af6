"""Which examples are in a window: pure functions of a key and a step.

The whole window is drawn first and split afterwards, so the number of micro-batches
does not change which examples a step sees, and no iterator has a state to restore.
Row i of the result is micro-batch i, and the rows one after the other are the batch
that `ga_optax.value_and_grad` splits into those same micro-batches.
"""

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

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

    For training by the step, where an example may come up twice in a window and the
    draws of different steps are independent. It costs `batch_size` random numbers,
    however many examples there are.

    **Exactness.** The same integers in every process, at every restart, for the same
    arguments; for another `num_microbatches` the same integers in another shape. The
    probabilities of two examples differ by less than `num_examples / 2³²` of each.

    Args:
      key: a PRNG key for the whole run.
      step: the number of the step, from 0; static or traced.
      num_examples: how many examples there are, static, at most 2³¹ - 1.
      batch_size: how many examples a window holds, static.
      num_microbatches: into how many micro-batches to split them, static; it must
        divide `batch_size`.

    Returns:
      Indices in `[0, num_examples)`, int32 `[num_microbatches, micro-batch size]`.

    Raises:
      TypeError, ValueError: where an argument does not fit the description above.
    """
    num_examples, batch_size, num_microbatches = _check(
        step, num_examples, batch_size, num_microbatches
    )
    drawn = jax.random.randint(
        jax.random.fold_in(key, step), (batch_size,), 0, num_examples, jnp.int32
    )
    return drawn.reshape(num_microbatches, -1)


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

    An epoch is `num_examples // batch_size` steps long, and each has a permutation of
    its own. The examples that are left over at its end are not seen in it; they are
    others in every epoch. Every call sorts anew: time and memory grow with
    `num_examples`, so that nothing but the step has to be restored. For very many
    examples use `window_indices`.

    **Exactness.** As for `window_indices`; and in the steps of one epoch no example
    comes twice.

    Args:
      key: a PRNG key for the whole run.
      step: the number of the step, from 0 and not starting again with the epochs;
        static or traced.
      num_examples: how many examples there are, static, at most 2³¹ - 1.
      batch_size: how many examples a window holds, static, at most `num_examples`.
      num_microbatches: into how many micro-batches to split them, static; it must
        divide `batch_size`.

    Returns:
      Indices in `[0, num_examples)`, int32 `[num_microbatches, micro-batch size]`.

    Raises:
      TypeError, ValueError: where an argument does not fit the description above.
    """
    num_examples, batch_size, num_microbatches = _check(
        step, num_examples, batch_size, num_microbatches
    )
    if batch_size > num_examples:
        raise ValueError(
            "Without replacement, batch_size must be at most num_examples, but "
            f"batch_size={batch_size} and num_examples={num_examples}. Use a smaller "
            "batch, or window_indices, which draws with replacement."
        )
    step = jnp.asarray(step)
    steps = jnp.asarray(num_examples // batch_size, step.dtype)
    order = jax.random.permutation(
        jax.random.fold_in(key, step // steps), num_examples
    ).astype(jnp.int32)
    start = (step % steps).astype(jnp.int32) * jnp.int32(batch_size)
    window = jax.lax.dynamic_slice_in_dim(order, start, batch_size)
    return window.reshape(num_microbatches, -1)


def _check(
    step: Any, num_examples: Any, batch_size: Any, num_microbatches: Any
) -> tuple[int, int, int]:
    sizes = {
        "num_examples": num_examples,
        "batch_size": batch_size,
        "num_microbatches": num_microbatches,
    }
    for name, value in sizes.items():
        todo = "Pass a Python int, known when the function is traced."
        try:
            if isinstance(value, (bool, np.bool_)):
                raise TypeError
            sizes[name] = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{name} must be an int, but it is {value!r} of type "
                f"{type(value).__name__}. {todo}"
            ) from None
        if not 1 <= sizes[name] < 2**31:
            raise ValueError(
                f"{name} must be at least 1 and fit in an int32, but it is {value}. "
                f"{todo}"
            )
    if sizes["batch_size"] % sizes["num_microbatches"]:
        raise ValueError(
            f"num_microbatches={num_microbatches} must divide batch_size, but "
            f"batch_size={batch_size}. Change one of them."
        )
    todo = "Count the steps from 0."
    shape, dtype = jnp.shape(step), jax.dtypes.result_type(step)
    if shape != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"step must be an integer scalar, but it has shape {shape} and dtype "
            f"{dtype.name}. {todo}"
        )
    if isinstance(step, numbers.Integral) and step < 0:
        raise ValueError(f"step must not be negative, but it is {step}. {todo}")
    return tuple(sizes.values())
