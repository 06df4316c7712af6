"""Gradients of modules: one law for `value_and_grad`, another for `accumulate`.

    value_and_grad(fun, k)(model, batch)  ==  nnx.value_and_grad(fun)(model, batch)
    accumulate(fun, k)                    ==  nnx.value_and_grad of micro-batches, one
                                              after another: each finds what the one
                                              before it left in the modules

So to the functions of pure arguments, which do the work, variables that change are aux
in the first, and a carry in the second. `verify` asks whether both give one gradient.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from ga_optax import _verify
from ga_optax._calls import accumulate as of_each
from ga_optax._calls import dependencies, gradients
from ga_optax._calls.options import found
from ga_optax._calls.words import explains_keywords, warns_outside_jit
from ga_optax._checks import check_not_empty
from ga_optax._devices.data_axis import DataAxis
from ga_optax.accumulator import Accumulator
from ga_optax.flax._objects import Objects, in_context, like, number_of

Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]

# -- One call over all rows ------------------------------------------------------------


@explains_keywords
def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: Argnums = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    residual_bytes: int | None = None,
    accumulator_dtype: DTypeLike | None = jnp.float32,
    optimize: bool = True,
) -> Callable[..., tuple[Any, Any]]:
    """`nnx.value_and_grad` over micro-batches: a big batch in a small one's memory.

    >>> import jax.numpy as jnp, ga_optax.flax
    >>> from flax import nnx
    >>> model = nnx.Sequential(
    ...     nnx.Linear(2, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    >>> def loss(model, x):
    ...     return jnp.mean(model(x)[:, 0] ** 3)
    >>> step = nnx.jit(ga_optax.flax.value_and_grad(loss, num_microbatches=4))
    >>> value, grads = step(model, jnp.eye(8, 2))
    >>> grads["layers"][0]["kernel"].shape
    (2, 4)

    Value, gradients, aux and what `fun` changes in modules are those of
    `nnx.value_and_grad(fun)`, whatever the loss: `fun` runs once over all rows, so
    batch statistics are updated once, by those of the whole batch, and random streams
    draw and count as in one call. Call it inside `nnx.jit`.

    Every argument may be, or hold, modules and other NNX objects, also `nnx.Rngs` and
    metrics.

    **Exactness**, **Cost.** As `ga_optax.value_and_grad`.

    Args:
      fun: a function like that of `nnx.value_and_grad`, of any loss.
      num_microbatches: how many, static; it must divide the rows (of each device).
      microbatch_size: in its place, how many rows (of each device) one of them has.
      argnums: the positional arguments to differentiate with respect to: an int for
        every `nnx.Param` in one, an `nnx.DiffState` for what its filter selects (LoRA:
        `nnx.DiffState(0, nnx.LoRAParam)`), or a sequence of those.
      has_aux: whether `fun` returns `(loss, aux)`. aux comes back as for all rows.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: along which axis they lie, as for `ga_optax.value_and_grad`; so are
        the others.
      data_axis: the mesh axes that split the batch over devices, or a `DataAxis`.
      residual_bytes: how many bytes of activations may be kept where rows meet.
      accumulator_dtype: in what to sum; gradients have the dtypes of their variables.
      optimize: False leaves out all passes on programs.

    Returns:
      A function that returns what `nnx.value_and_grad` returns, and updates the objects
      that it is given.

    Raises:
      TypeError, ValueError: if an argument does not fit, as in
        `ga_optax.value_and_grad`; if `argnums` selects no variable.
    """
    core = partial(
        gradients.value_and_grad,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        batch_axes=batch_axes,
        data_axis=data_axis,
        residual_bytes=residual_bytes,
        accumulator_dtype=accumulator_dtype,
        optimize=optimize,
    )

    def then(objects: Objects, out: Any) -> tuple[Any, Any]:
        (loss, (changed, aux)), grads = out
        aux = objects.update(changed, aux)
        grads = like(objects.differentiated, grads)
        return ((loss, aux) if has_aux else loss), grads

    return warns_outside_jit(_of_all_rows(core, fun, argnums, has_aux, then))


@explains_keywords
def batch_dependencies(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: Argnums = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    residual_bytes: int | None = None,
) -> Callable[..., dependencies.BatchDependencies]:
    """`ga_optax.batch_dependencies` of modules: where rows meet, and what that costs.

    >>> import jax.numpy as jnp, ga_optax as ga
    >>> from flax import nnx
    >>> model = nnx.Sequential(
    ...     nnx.Linear(2, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    >>> def loss(model, x):
    ...     return jnp.mean(model(x)[:, 0] ** 3)
    >>> found = ga.flax.batch_dependencies(loss, 4)(model, jnp.eye(8, 2))
    >>> print(sorted({x.kind for x in found.meetings}), found.backward_passes)
    ['sum'] 1

    It changes no variable of the modules.

    **Exactness.** As `ga_optax.batch_dependencies`, for
    `ga_optax.flax.value_and_grad`.

    Args:
      fun: a loss, as for `value_and_grad`.
      num_microbatches: as there; so are the others.
      microbatch_size: in its place, how many rows one of them has.
      argnums: what to differentiate with respect to.
      has_aux: whether `fun` returns `(loss, aux)`.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: along which axis.
      data_axis: the mesh axes that split the batch.
      residual_bytes: what may be kept so that less runs again.

    Returns:
      A function of `fun`'s arguments.

    Raises:
      TypeError, ValueError: as `value_and_grad`.
    """
    core = partial(
        dependencies.batch_dependencies,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        batch_axes=batch_axes,
        data_axis=data_axis,
        residual_bytes=residual_bytes,
    )
    return _of_all_rows(core, fun, argnums, has_aux, then=lambda _, out: out)


def _of_all_rows(
    core: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    then: Callable[[Objects, Any], Any],
) -> Callable[..., Any]:
    """A function of `fun`'s arguments: `then` of what `core` returns for pure ones.

    In those, what `fun` changes is in the aux.
    """
    core = partial(core, argnums=jax.tree.map(number_of, argnums), has_aux=True)
    core(fun)  # checks the options

    @in_context
    @wraps(fun)
    def of_arguments(*args: Any, **kwargs: Any) -> Any:
        objects = Objects(fun, argnums, args, kwargs)

        @wraps(fun)  # whose names for its arguments `core` looks up
        def run(*args: Any, nnx_variables: Any, **kwargs: Any) -> Any:
            out, left = objects.run(args, kwargs, nnx_variables)
            return _beside(objects.changed(left), out if has_aux else (out, ()))

        own = core(run)(*objects.args, **objects.kwargs, nnx_variables=objects.rest)
        return then(objects, own)

    return of_arguments


def _beside(new: Any, out: Any) -> Any:
    """`(loss, (new, aux))`; `core` tells what is no pair."""
    is_pair = isinstance(out, (tuple, list)) and len(out) == 2
    return (out[0], (new, out[1])) if is_pair else out


# -- Micro-batches, each by itself -----------------------------------------------------


@explains_keywords
def accumulate(
    fun: Callable[..., Any],
    num_microbatches: int = 1,
    *,
    argnums: Argnums = 0,
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
    num_real_microbatches: ArrayLike | None = None,
) -> Callable[..., tuple[Any, Accumulator]]:
    """`ga_optax.accumulate` for modules: micro-batches each by themselves, in order.

    >>> import jax.numpy as jnp, optax, ga_optax.flax
    >>> from flax import nnx
    >>> from ga_optax import accumulator
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> def loss(model, x):
    ...     return jnp.mean(model(x) ** 2)
    >>> step = nnx.jit(ga_optax.flax.accumulate(loss))
    >>> acc = accumulator.init(nnx.state(model, nnx.Param))
    >>> for x in jnp.ones((2, 4, 2)):
    ...     value, acc = step(acc, model, x)
    >>> _ = optimizer.update(model, accumulator.mean(acc))

    What `fun` changes in modules, such as batch statistics and the counts of random
    streams, goes from one micro-batch to the next, and from one call to the next. So
    every micro-batch draws other random numbers.

    **Exactness.** As `ga_optax.accumulate`. With a `data_axis` every device starts from
    the same variables, and floating ones are averaged over devices afterwards; devices
    draw other random numbers, and other ones than without it.

    Args:
      fun: a function like that of `nnx.value_and_grad`, of one micro-batch.
      num_microbatches: how many micro-batches are in one call, static.
      argnums: as for `value_and_grad`. It counts the arguments of `fun`.
      has_aux: whether `fun` returns `(loss, aux)`.
      batch_argnums: the positional arguments to split.
      batch_argnames: keywords to split.
      batch_axes: where to split, as for `ga_optax.accumulate`; so are the others.
      data_axis: the mesh axes that split the batch over devices, or a `DataAxis`.
      optimize: False leaves out all passes on programs.
      weight_fn: what a micro-batch counts, of its batch arguments (and the aux).
      aux: "mean", "sum", "last", "stack", or a prefix of the aux with those.
      rng_argnums: PRNG keys that are no part of a module, one for each micro-batch.
      rng_argnames: keywords that are keys.
      num_real_microbatches: how many micro-batches count, the first ones.

    Returns:
      A function `(acc, *args, **kwargs) -> (value, acc)`, which updates the modules
      that it is given. Make the first `acc` with `accumulator.init` from what `argnums`
      selects, such as `nnx.state(model, nnx.Param)`.

    Raises:
      TypeError, ValueError: as `value_and_grad`; if the accumulator does not match the
        selected variables; if `fun` assigns to those, adds or removes variables, or
        changes an attribute that is no variable.
    """
    numbers = {
        "argnums": jax.tree.map(number_of, argnums),
        "batch_argnums": batch_argnums,
        "rng_argnums": rng_argnums,
    }

    core = partial(
        of_each.accumulate,
        num_microbatches=num_microbatches,
        has_aux=has_aux,
        batch_argnames=batch_argnames,
        batch_axes=batch_axes,
        data_axis=data_axis,
        optimize=optimize,
        weight_fn=weight_fn,
        aux=aux,
        rng_argnames=rng_argnames,
        num_real_microbatches=num_real_microbatches,
    )
    core(fun, **numbers)  # checks the options

    @warns_outside_jit
    @in_context
    @wraps(fun)
    def add(acc: Accumulator, *args: Any, **kwargs: Any) -> tuple[Any, Accumulator]:
        objects = Objects(fun, argnums, args, kwargs, keys=data_axis is not None)
        # One key a device and micro-batch is derived of each, so they come one by one.
        scalars = {i: list(key.reshape(-1)) for i, key in objects.keys.items()}
        inside = *objects.args, objects.rest, scalars
        run, places = _of_micro_batch(objects, has_aux), _places(numbers, len(args))
        of_places = core(run, **places, carry_argnums=len(args))
        (loss, new), added = of_places(nnx.as_pure(acc), *inside, **objects.kwargs)
        aux = objects.update(*new) if has_aux else objects.update(new, ())
        added = added._replace(total=like(acc.total, added.total))
        return ((loss, aux) if has_aux else loss), added

    return add


def _of_micro_batch(objects: Objects, has_aux: bool) -> Callable[..., Any]:
    """`fun` of pure arguments: what it changes is the carry."""

    def run(*inside: Any, **kwargs: Any) -> Any:
        *args, rest, scalars = inside
        keys = {
            i: jnp.stack(x).reshape(objects.keys[i].shape) for i, x in scalars.items()
        }
        out, left = objects.run(tuple(args), kwargs, {**keys, **rest})
        new = objects.carry(left)
        return _beside(new, out) if has_aux else (out, new)

    return run


def _places(numbers: dict[str, Any], num_args: int) -> dict[str, Any]:
    """Options that count positional arguments, none of them negative.

    Behind those stand the variables, and the keys that are kept apart.
    """
    places = {
        name: jax.tree.map(partial(found, name, num_args=num_args), of)
        for name, of in numbers.items()
    }
    of_keys = *jax.tree.leaves(places["rng_argnums"]), num_args + 1
    return places | {"rng_argnums": of_keys}


# -- Whether the second is the first --------------------------------------------------


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
