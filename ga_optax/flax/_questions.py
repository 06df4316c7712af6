"""`verify` of a loss of a module."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ga_optax import _verify
from ga_optax._checks import check_not_empty


def verify(
    fun: Callable[..., Any],
    model: Any,
    batch: Any,
    num_microbatches: int,
    *,
    wrt: Any = nnx.Param,
    **options: Any,
) -> _verify.Report:
    """`ga_optax.verify` for a loss of a module: is it the undivided batch's gradient?

    >>> import jax.numpy as jnp, ga_optax as ga
    >>> from flax import nnx
    >>> model = nnx.Sequential(
    ...     nnx.Linear(2, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    >>> def loss(model, x):
    ...     return jnp.mean(model(x)[:, 0] ** 3)
    >>> ga.flax.verify(loss, model, jnp.eye(8, 2), num_microbatches=4).cause.name
    'CROSS_EXAMPLE'
    >>> model.eval()  # with the running averages, rows are independent
    >>> ga.flax.verify(loss, model, jnp.eye(8, 2), num_microbatches=4).ok
    True

    Every gradient starts from the variables that `model` has. It changes none of them,
    whatever `fun` does to its copy. Random streams in the model draw the same numbers
    each time: if the loss uses dropout, call `model.eval()` first, or find
    `RANDOMNESS`.

    **Exactness**, **Memory**, **Time.** As for `ga_optax.verify`.

    Args:
      fun: the loss, `fun(model, batch)`, or `fun(model, batch, key)` if `rng` is given.
      model: the module, or a tree of modules and other NNX objects.
      batch: the undivided batch, as for `ga_optax.verify`.
      num_microbatches: k; it must divide the number of rows.
      wrt: a filter: what is differentiated, `nnx.LoRAParam` for example.
      **options: all other options of `ga_optax.verify`.

    Returns:
      A `Report`, whose leaves are those of `nnx.state(model, wrt)`.

    Raises:
      TypeError, ValueError: if an argument does not fit, as in `ga_optax.verify`; if
        `wrt` selects no variable.
    """
    graph, params, rest = nnx.split(model, wrt, ...)
    todo = "Select parameters with wrt=, a filter of NNX."
    check_not_empty("What wrt selects of the model", params, todo)
    structure = jax.tree.structure(params)

    def of_params(pure: Any, *batch_and_key: Any) -> Any:
        own = jax.tree.unflatten(structure, jax.tree.leaves(pure))
        # A copy: the variables of another trace cannot be assigned to.
        return fun(nnx.merge(graph, own, rest, copy=True), *batch_and_key)

    pure = nnx.as_pure(params)
    return _verify.verify(of_params, pure, batch, num_microbatches, **options)
