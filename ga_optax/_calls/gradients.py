"""`value_and_grad`: `jax.value_and_grad` of any loss, over micro-batches."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from ga_optax._calls import engine, equation
from ga_optax._calls.call import Call
from ga_optax._calls.options import Options
from ga_optax._calls.results import as_returned, returning_pair
from ga_optax._calls.words import explains_keywords, warns_outside_jit
from ga_optax._devices.data_axis import DataAxis


@explains_keywords
def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    residual_bytes: int | None = None,
    accumulator_dtype: DTypeLike | None = jnp.float32,
    optimize: bool = True,
) -> Callable[..., tuple[Any, optax.Updates]]:
    """`jax.value_and_grad` over micro-batches: a big batch in a small one's memory.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, batch):
    ...     error = (batch["x"] * w - batch["y"]) ** 2
    ...     return jnp.sum(error * batch["mask"]) / jnp.sum(batch["mask"])
    >>> mask = jnp.array([1, 1, 1, 0])
    >>> batch = {"x": jnp.arange(4.0), "y": jnp.ones(4), "mask": mask}
    >>> step = jax.jit(ga.value_and_grad(loss, num_microbatches=2))
    >>> value, grad = step(jnp.float32(2.0), batch)
    >>> print(value, grad)
    3.6666667 4.6666665
    >>> print(*jax.value_and_grad(loss)(jnp.float32(2.0), batch))
    3.6666667 4.6666665

    Value, gradients and aux are those of `jax.value_and_grad(fun)`, for any loss:
    `fun` is traced once, at all rows, and its program is partitioned over micro-batches
    as compilers partition programs over devices. Call it under `jax.jit`: outside,
    every call compiles afresh.

    **Cost.** If rows do not need one another, as in a mean, one loop: one forward and
    one backward pass, the activations of one micro-batch, one gradient tree. Otherwise
    also the values that rows exchange, more of the activations, and two, at most three,
    forward passes; `batch_dependencies` shows the lines. Code that cannot be read is
    computed whole. Compile time does not grow with the number of micro-batches. Pages:
    "Any loss", "Memory", and "Devices" for `data_axis`.

    **Exactness.** To rounding. Sums over micro-batches are taken in
    `accumulator_dtype`, and gradients of bfloat16 models are rounded there alone. The
    same bits each time that one program runs; for the same bits in every grouping of
    micro-batches see `accumulate`. Page: "Exactness".

    Args:
      fun: a function like that of `jax.value_and_grad`, of any loss.
      num_microbatches: how many, static. It must divide the rows (of each device), but
        for one device and rows that do not meet: then the last one has the rest.
      microbatch_size: in its place, how many rows (of each device) one of them has.
      argnums: the positional arguments to differentiate with respect to.
      has_aux: True if `fun` returns `(loss, aux)`. aux comes back as for all rows.
      holomorphic: True if `fun` is holomorphic: loss and parameters are complex.
      allow_int: True if parameters may hold integers, whose gradients are `float0`.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: along which axis, as in `jax.vmap`: an int, None (whole), or a prefix
        of the batch (of a tuple of several batch arguments, keywords last).
      data_axis: the mesh axis, or a tuple of them, that split the batch over devices,
        or a `DataAxis`. Sums are reduced once, after the loop. Also in `jax.shard_map`.
      residual_bytes: how many bytes of activations a device may keep where rows meet,
        so that less runs again. By default as many as one micro-batch's step takes
        anyway, or 1 MiB; 0 keeps none. `plan` and the log say what is kept.
      accumulator_dtype: see `accumulator.init`. The result has the parameters' dtypes.
      optimize: False leaves out all passes on programs: the plain scan, and each
        gradient added after its backward pass. `ga_optax.config` switches it for all
        calls. Page: "Turn rewriting off".

    Returns: a function with the result of `jax.value_and_grad(fun, argnums, has_aux)`.
    Gradients lie in the memory of the device, also of parameters in that of the host.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced; if
        what `fun` returned does not fit, before anything runs.
    """
    options = Options(**locals()).checked()
    of_pair = returning_pair(options)

    @warns_outside_jit
    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = Call.of(of_pair, args, kwargs, hint=True)
        value, grads = engine.value_and_grad(call, equation.of_micro_batch)
        return as_returned(options, value), call.with_zeros(grads)

    return value_and_grad_fun
