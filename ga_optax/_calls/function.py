"""Any function of a batch over micro-batches."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ga_optax._calls import equation
from ga_optax._calls.call import Call
from ga_optax._calls.options import Options
from ga_optax._calls.words import explains_keywords
from ga_optax._checks import check_callable
from ga_optax._devices.data_axis import DataAxis


@explains_keywords
def microbatch(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    remat: bool | None = None,
) -> Callable[..., Any]:
    """`fun` and its derivatives, in the memory of a micro-batch, anywhere in a program.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def head(w, h, labels):  # the largest array of a language model
    ...     logits = h @ w
    ...     own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    ...     return jnp.mean(jax.nn.logsumexp(logits, axis=1) - own)
    >>> def loss(params, x, labels):
    ...     h = jnp.tanh(x @ params["in"])
    ...     in_four = ga.microbatch(head, 4, batch_argnums=(1, 2))
    ...     return in_four(params["out"], h, labels)
    >>> params = {"in": jnp.eye(2), "out": jnp.ones((2, 3)).at[0, 0].set(2.0)}
    >>> x, labels = jnp.arange(16.0).reshape(8, 2) / 8, jnp.arange(8) % 3
    >>> value, grads = jax.jit(jax.value_and_grad(loss))(params, x, labels)
    >>> print(value, grads["out"][0])
    1.1605648 [ 0.11849982 -0.09909287 -0.01940693]

    For the logits of a language model, an MLP over a long sequence, attention over
    queries, per-example work in pieces, metrics over a set that does not fit, and a
    gradient function that is written already, `ga.microbatch(jax.value_and_grad(
    loss), 8)`. What has rows need not be a batch: tokens, time steps and channels
    serve as well, with `batch_axes`. For the loss of a training step use
    `value_and_grad(loss, 8)`. Page: "Out of memory in the logits".

    **Exactness.** `fun(*args)` to rounding, and so are `jax.grad`, `jax.vjp`,
    `jax.jvp`, `jax.linearize`, derivatives of these, and `jax.vmap`, also with respect
    to what `fun` closes over. Results with rows come back whole, in the order of the
    rows; all others as they are. Gradients are added up in float32, and rounded once.

    **Cost.** `fun` runs forward once. If one real scalar of what it returns is
    differentiated, its gradient comes with the value, so nothing runs twice: the
    matrix products of `fun` undivided. Otherwise `fun` runs forward once more on the
    way back, which has the rows of the cotangent. Where rows meet it is as in
    `value_and_grad`. `jax.jvp` runs a micro-batch and its tangent at a time. Second
    derivatives are those of the gradient as one would write it, divided like any
    function, and may take the memory of several micro-batches.

    Args:
      fun: any function that JAX can trace. It is traced once, for the whole batch.
      num_microbatches: how many micro-batches, static, as for `value_and_grad`. In a
        micro-batch of `value_and_grad` or `microbatch` they are those of its rows, on
        one device: so many, or the most that divide them.
      microbatch_size: in its place, how many rows one of them has.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: as for `value_and_grad`.
      data_axis: as for `value_and_grad`.
      remat: True computes everything again on the way back, and keeps nothing for it;
        False takes the gradient with the value, of one scalar. None: with the value
        where that costs nothing, but not in float16, where a gradient that is not
        scaled yet may vanish.

    Returns:
      A function with `fun`'s signature and result.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced; with
        remat=False, if what is differentiated is not one real scalar.
    """
    check_callable("fun", fun, "of the parameters and the batch", _TODO)
    if not (remat is None or isinstance(remat, bool)):
        raise TypeError(
            f"remat must be True, False or None, but it is {remat!r}. Leave it out: "
            "the gradient comes with the value where that costs nothing."
        )
    options = Options(
        fun,
        num_microbatches,
        microbatch_size=microbatch_size,
        argnums=(),
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        batch_axes=batch_axes,
        has_aux=True,
        data_axis=data_axis,
        residual_bytes=0 if remat else None,
        accumulator_dtype=jnp.float32,
    ).checked(differentiates=False)

    @functools.wraps(fun)
    def microbatch_fun(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _by_position(fun, args, kwargs)
        call = Call.of(options, args, kwargs, hint=True)
        return equation.of_call(call, remat, options.microbatch_size)

    return microbatch_fun


_TODO = "Pass what is to run over micro-batches."


def _by_position(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments, by position where `fun` takes these by position."""
    if not kwargs:
        return args, kwargs
    try:
        signature = inspect.signature(fun)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    places = [p for p in signature.parameters.values() if p.kind in kinds]
    # A default fills a gap before the last argument that came, and nothing behind it.
    while places and places[-1].name not in bound.arguments:
        places.pop()
    bound.arguments = {p.name: p.default for p in places} | bound.arguments
    return bound.args, bound.kwargs
