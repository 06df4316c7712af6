"""Gradients of modules: one law for `value_and_grad`, another for `accumulate`.

    value_and_grad(fun, k)(model, batch)  ==  nnx.value_and_grad(fun)(model, batch)
    accumulate(fun, k)                    ==  nnx.value_and_grad of micro-batches, one
                                              after another, each with the modules as
                                              the previous micro-batch left them

The functions of pure arguments do the work. To `value_and_grad`, changed variables are
aux; to `accumulate`, they are a carry. `verify` checks that both give one gradient.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from .._calls import functions, separate
from .._calls.call import check_number, warns_outside_jit
from .._calls.options import place_of
from .._checks import check_not_empty, explains_keywords
from .._devices.meshes import DataAxis
from .._verify import diagnosis
from ..accumulator import Accumulator
from ._objects import Objects, in_context, like, number_of

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
    accumulator_dtype: Any = jnp.float32,
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

    Value, gradients, aux and changes of modules are those of
    `nnx.value_and_grad(fun)`, for any loss: `fun` runs once over all rows, so
    batch statistics are updated once, with the statistics of the whole batch, and
    random streams draw and count as in one call. Call the function inside `nnx.jit`.

    Every argument may be, or hold, modules and other NNX objects, also `nnx.Rngs` and
    metrics.

    **Exactness**, **Cost.** As `ga_optax.value_and_grad`.

    Args:
      fun: a function as for `nnx.value_and_grad`, with any loss.
      num_microbatches: how many, static, as for `ga_optax.value_and_grad`.
      microbatch_size: instead, the number of rows (of each device) in a micro-batch.
      argnums: the positional arguments to differentiate with respect to: an int for
        every `nnx.Param` in the argument, an `nnx.DiffState` for the variables that the
        filter selects (LoRA: `nnx.DiffState(0, nnx.LoRAParam)`), or a sequence of
        these.
      has_aux: whether `fun` returns `(loss, aux)`. aux is returned as for all rows.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: the axis of the rows, as for `ga_optax.value_and_grad`.
      data_axis: the mesh axes that split the batch over devices, or a `DataAxis`.
      residual_bytes: the bytes of activations that may be kept where rows meet.
      accumulator_dtype: the dtype of sums; gradients have the dtypes of the variables.
        Or a tree of them, a prefix of `nnx.state(model, nnx.Param)`.
      optimize: False leaves out all passes on programs.

    Returns:
      A function that returns the results of `nnx.value_and_grad(fun)`, and updates the
      objects in its arguments.

    Raises:
      TypeError, ValueError: if an argument does not fit, as in
        `ga_optax.value_and_grad`; if `argnums` selects no variable.
    """
    core = partial(
        functions.value_and_grad,
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

    def finish(objects: Objects, out: Any) -> tuple[Any, Any]:
        (loss, (changed, aux)), grads = out
        aux = objects.update(changed, aux)
        grads = like(objects.differentiated, grads)
        return ((loss, aux) if has_aux else loss), grads

    return warns_outside_jit(_of_all_rows(core, fun, argnums, has_aux, finish))


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
) -> Callable[..., functions.BatchDependencies]:
    """`ga_optax.batch_dependencies` of modules: where rows meet, and the cost.

    >>> import jax.numpy as jnp, ga_optax as ga
    >>> from flax import nnx
    >>> model = nnx.Sequential(
    ...     nnx.Linear(2, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    >>> def loss(model, x):
    ...     return jnp.mean(model(x)[:, 0] ** 3)
    >>> report = ga.flax.batch_dependencies(loss, 4)(model, jnp.eye(8, 2))
    >>> print(sorted({x.kind for x in report.meetings}), report.backward_passes)
    ['sum'] 1

    No variable of the modules changes.

    **Exactness.** As `ga_optax.batch_dependencies`, for
    `ga_optax.flax.value_and_grad`.

    Args:
      fun: a loss, as for `value_and_grad`.
      num_microbatches: the number of micro-batches, as for `value_and_grad`.
      microbatch_size: instead, the number of rows in a micro-batch.
      argnums: the arguments to differentiate with respect to.
      has_aux: whether `fun` returns `(loss, aux)`.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: the axis of the rows.
      data_axis: the mesh axes that split the batch.
      residual_bytes: the bytes of activations that may be kept where rows meet.

    Returns:
      A function of `fun`'s arguments that returns a `BatchDependencies`.

    Raises:
      TypeError, ValueError: as `value_and_grad`.
    """
    core = partial(
        functions.batch_dependencies,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        batch_axes=batch_axes,
        data_axis=data_axis,
        residual_bytes=residual_bytes,
    )
    return _of_all_rows(core, fun, argnums, has_aux, finish=_with_variables_named)


def _with_variables_named(
    objects: Objects, report: functions.BatchDependencies
) -> functions.BatchDependencies:
    """The report, with one name for all variables that are not differentiated."""
    del objects
    whole: dict[str, int] = {}
    for name, nbytes in report.given_whole.items():
        name = "other variables of modules" if "nnx_variables" in name else name
        whole[name] = whole.get(name, 0) + nbytes
    return dataclasses.replace(report, given_whole=whole)


def _of_all_rows(
    core: Callable[..., Any],
    fun: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    finish: Callable[[Objects, Any], Any],
) -> Callable[..., Any]:
    """Makes a function of `fun`'s arguments from `core`, a function of pure arguments.

    `finish` gets the result of `core`, whose aux holds the changed variables.
    """
    core = partial(core, argnums=jax.tree.map(number_of, argnums), has_aux=True)
    core(fun)  # checks the options
    dtypes = {"accumulator_dtype"} & core.keywords.keys()  # which may be a tree

    @in_context
    @wraps(fun)
    def of_arguments(*args: Any, **kwargs: Any) -> Any:
        objects = Objects(fun, argnums, args, kwargs)

        @wraps(fun)  # `core` looks up the names of `fun`'s arguments
        def run_pure(*args: Any, nnx_variables: Any, **kwargs: Any) -> Any:
            out, variables = objects.run(args, kwargs, nnx_variables)
            if not has_aux:
                check_number(out)
                out = out, ()
            return _with_aux(objects.changed(variables), out)

        kwargs = objects.kwargs | {"nnx_variables": objects.rest}
        pure = {name: objects.pure_prefix(core.keywords[name]) for name in dtypes}
        return finish(objects, core(run_pure, **pure)(*objects.args, **kwargs))

    return of_arguments


def _with_aux(new: Any, out: Any) -> Any:
    """`(loss, (new, aux))`; `core` raises if `out` is no pair."""
    is_pair = isinstance(out, (tuple, list)) and len(out) == 2
    return (out[0], (new, out[1])) if is_pair else out


# -- Separate micro-batches ------------------------------------------------------------


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
    """`ga_optax.accumulate` for modules: separate micro-batches, in order.

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

    Changes of modules, such as batch statistics and the counts of random streams, go
    from one micro-batch to the next, and from one call to the next. So every
    micro-batch draws different random numbers.

    **Exactness.** As `ga_optax.accumulate`. With a `data_axis` every device starts from
    the same variables, and floating variables are averaged over devices afterwards;
    each device draws different random numbers, and not those without a `data_axis`.

    Args:
      fun: a function as for `nnx.value_and_grad`, of one micro-batch.
      num_microbatches: the number of micro-batches in one call, static.
      argnums: as for `value_and_grad`; the positions of arguments of `fun`.
      has_aux: whether `fun` returns `(loss, aux)`.
      batch_argnums: the positional arguments to split.
      batch_argnames: the keywords to split.
      batch_axes: the axis to split, as for `ga_optax.accumulate`.
      data_axis: the mesh axes that split the batch over devices, or a `DataAxis`.
      optimize: False leaves out all passes on programs.
      weight_fn: returns the weight of a micro-batch from its batch arguments (and aux).
      aux: "mean", "sum", "max", "min", "last", "stack", or a prefix of the aux.
      rng_argnums: PRNG keys that are no part of a module, one for each micro-batch.
      rng_argnames: keywords that are keys.
      num_real_microbatches: the number of micro-batches, from the first, that count.

    Returns:
      A function `(acc, *args, **kwargs) -> (value, acc)`, which updates the modules in
      its arguments. Make the first `acc` with `accumulator.init` from the variables
      that `argnums` selects, such as `nnx.state(model, nnx.Param)`.

    Raises:
      TypeError, ValueError: as `value_and_grad`; if the accumulator does not match the
        selected variables; if `fun` assigns to selected variables, adds or removes
        variables, or changes an attribute that is no variable.
    """
    numbers = {
        "argnums": jax.tree.map(number_of, argnums),
        "batch_argnums": batch_argnums,
        "rng_argnums": rng_argnums,
    }

    core = partial(
        separate.accumulate,
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
        # `core` derives a key from each scalar key, for each device and micro-batch.
        scalars = {i: list(key.reshape(-1)) for i, key in objects.keys.items()}
        inputs = *objects.args, objects.rest, scalars
        pure, places = _of_micro_batch(objects, has_aux), _places(numbers, len(args))
        add_pure = core(pure, **places, carry_argnums=len(args))
        (loss, new), sums = add_pure(nnx.as_pure(acc), *inputs, **objects.kwargs)
        aux = objects.update(*new) if has_aux else objects.update(new, ())
        sums = sums._replace(total=like(acc.total, sums.total))
        return ((loss, aux) if has_aux else loss), sums

    return add


def _of_micro_batch(objects: Objects, has_aux: bool) -> Callable[..., Any]:
    """`fun` as a function of pure arguments, with the other variables as the carry."""

    def fun_pure(*inputs: Any, **kwargs: Any) -> Any:
        *args, rest, scalars = inputs
        keys = {
            i: jnp.stack(x).reshape(objects.keys[i].shape) for i, x in scalars.items()
        }
        out, variables = objects.run(tuple(args), kwargs, {**keys, **rest})
        new = objects.carry(variables)
        return _with_aux(new, out) if has_aux else (out, new)

    return fun_pure


def _places(numbers: dict[str, Any], num_args: int) -> dict[str, Any]:
    """The options that hold positions of arguments, with no negative positions.

    After the positional arguments come the variables, and the separate keys.
    """
    places = {
        name: jax.tree.map(partial(place_of, name, num_args=num_args), positions)
        for name, positions in numbers.items()
    }
    rng_argnums = *jax.tree.leaves(places["rng_argnums"]), num_args + 1
    return places | {"rng_argnums": rng_argnums}


# -- Do both give one gradient? --------------------------------------------------------


def verify(
    fun: Callable[..., Any],
    model: Any,
    batch: Any,
    num_microbatches: int,
    *,
    wrt: Any = nnx.Param,
    **options: Any,
) -> diagnosis.Report:
    """`ga_optax.verify` for a loss of a module: is the gradient that of all rows?

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

    Every gradient starts from the variables of `model`, and `fun` gets a copy, so no
    variable changes. Random streams in the model draw the same numbers each time: if
    the loss uses dropout, call `model.eval()` first, or the cause is `RANDOMNESS`.

    **Exactness**, **Memory**, **Time.** As for `ga_optax.verify`.

    Args:
      fun: the loss, `fun(model, batch)`, or `fun(model, batch, key)` if `rng` is given.
      model: the module, or a tree of modules and other NNX objects.
      batch: the undivided batch, as for `ga_optax.verify`.
      num_microbatches: k; it must divide the number of rows.
      wrt: the filter of the variables to differentiate, such as `nnx.LoRAParam`.
      **options: all other options of `ga_optax.verify`.

    Returns:
      A `Report`, with the leaves of `nnx.state(model, wrt)`.

    Raises:
      TypeError, ValueError: if an argument does not fit, as in `ga_optax.verify`; if
        `wrt` selects no variable.
    """
    graph, params, rest = nnx.split(model, wrt, ...)
    todo = "Select parameters with wrt=, a filter of NNX."
    check_not_empty("The selection of wrt in the model", params, todo)
    structure = jax.tree.structure(params)

    def of_params(pure: Any, *batch_and_key: Any) -> Any:
        params = jax.tree.unflatten(structure, jax.tree.leaves(pure))
        # A copy: the variables of another trace cannot be assigned to.
        return fun(nnx.merge(graph, params, rest, copy=True), *batch_and_key)

    pure = nnx.as_pure(params)
    return diagnosis.verify(of_params, pure, batch, num_microbatches, **options)
