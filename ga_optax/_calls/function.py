"""Any function of a batch over micro-batches."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._calls.gradients import value_and_grad
from ga_optax._calls.options import found
from ga_optax._calls.results import is_value
from ga_optax._calls.words import explains_keywords
from ga_optax._checks import check_callable, named_leaves
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
) -> Callable[..., Any]:
    """`fun`, in the memory of a micro-batch and of what rows must know of each other.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def scores(w, x):
    ...     z = (x - x.mean(0)) @ w
    ...     return z, jnp.sqrt(jnp.mean(z**2))
    >>> w, x = jnp.ones(2), jnp.arange(8.0).reshape(4, 2)
    >>> z, root = jax.jit(ga.microbatch(scores, 2))(w, x)
    >>> print(z, root)
    [-6. -2.  2.  6.] 4.472136

    For a gradient function that is written already, `ga.microbatch(
    jax.value_and_grad(loss), 8)`, and for metrics over a set that does not fit. For a
    loss, `value_and_grad(loss, 8)` is better: it adds gradients in
    place, and takes the derivative level by level.

    **Exactness.** `fun(*args)` to rounding: results with rows come back whole, in the
    order of the rows; all others as they are.

    Args:
      fun: any function that JAX can trace. It is traced once, for the whole batch.
      num_microbatches: how many micro-batches, static; it must divide the rows.
      microbatch_size: in its place, how many rows one of them has.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: as for `value_and_grad`.
      data_axis: as for `value_and_grad`.

    Returns:
      A function with `fun`'s signature and result.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced.
    """
    check_callable("fun", fun, "of the parameters and the batch", _TODO)

    def with_loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        out = fun(*args[:-1], **kwargs)
        for name, leaf in named_leaves(out):
            if not is_value(leaf):
                raise TypeError(
                    f"fun must return arrays or numbers, but {name} of what it "
                    f"returned is {leaf!r}. Leave it out, or return a number in its "
                    "place."
                )
        return jnp.zeros([]), out

    step = value_and_grad(
        with_loss,
        num_microbatches,
        microbatch_size=microbatch_size,
        argnums=-1,
        batch_argnums=_before_last(batch_argnums),
        batch_argnames=batch_argnames,
        batch_axes=batch_axes,
        has_aux=True,
        data_axis=data_axis,
    )

    positions = [batch_argnums] if isinstance(batch_argnums, int) else batch_argnums

    @functools.wraps(fun)
    def microbatch_fun(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _by_position(fun, args, kwargs)
        for i in positions:
            found("batch_argnums of microbatch", i, len(args))
        (_, out), _ = step(*args, jnp.zeros([]), **kwargs)
        return out

    return microbatch_fun


_TODO = "Pass what is to run over micro-batches."


def _by_position(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with those by position that `fun` takes so, if it says."""
    if not kwargs:
        return args, kwargs
    try:
        signature = inspect.signature(fun)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return args, kwargs
    places = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    # Defaults fill gaps alone: what comes after the last argument is none of the call.
    while places and places[-1].name not in bound.arguments:
        places.pop()
    bound.arguments = {p.name: p.default for p in places} | bound.arguments
    return bound.args, bound.kwargs


def _before_last(positions: Any) -> Any:
    """Positions of arguments, if one more comes last."""
    if isinstance(positions, tuple | list):
        return tuple(map(_before_last, positions))
    return positions - 1 if isinstance(positions, int) and positions < 0 else positions
