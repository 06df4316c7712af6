"""Fold across calls: one micro-batch a call, one inner update a window.

A window is k calls. Each call adds its gradient to the accumulator; the last call
emits, that is runs the inner optimizer on the mean.

`MultiSteps` differs from `optax.MultiSteps` in: 1. the sum is divided once, where a
running mean divides in every micro-step; 2. the optimizer runs once a window, not in
every micro-step; 3. nothing is masked by multiplication, so an inf or a NaN stays in
its window; 4. the inner optimizer sees the accumulator's dtype; 5. micro-batches have
weights; 6. `MultiSteps` is a gradient transformation, so extra arguments reach it in a
chain.
"""

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .._checks import (
    check_dtype,
    check_gradients,
    check_on_device,
    check_type,
    explains_keywords,
)
from .._devices import meshes
from .._text import listed
from .choices import check_decisions
from .config import (
    Config,
    SkipFn,
    check_every_k,
    check_optimizer,
    differentiated,
)
from .state import (
    ORDER,
    MultiStepsState,
    check_order,
    has_updated,
    some_states,
    state_type,
    warn_of_counts,
)
from .window import MicroStep


class MultiSteps(optax.GradientTransformationExtraArgs):
    """Accumulates gradients over k micro-steps, then runs `opt` once on their mean.

    A drop-in for `optax.MultiSteps` that is a gradient transformation: it works in
    `optax.chain` and every other combinator, and extra arguments reach `opt`.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    >>> params = {"w": jnp.array([1.0, 2.0])}
    >>> state = tx.init(params)
    >>> for g in ([1.0, 0.0], [3.0, 2.0]):
    ...     params, state = ga.apply_gradients(tx, {"w": jnp.array(g)}, state, params)
    ...     print(params["w"], ga.has_updated(state))
    [1. 2.] False
    [0.8 1.9] True

    Use `apply_gradients` if you can. With `update` and `optax.apply_updates`, a
    micro-step inside the window has to write, read and add a tree of zeros.

    **Cost.** One buffer of the size of the parameters. A micro-step reads the gradient,
    and reads and writes that buffer; a window also costs one update of `opt`. A static
    k of 1 keeps no buffer and adds nothing to `opt`.

    **Exactness.** `opt` sees Σ w·g / Σ w, rounded as `accumulator` says, in the
    accumulator's dtype. (A few optimizers cannot take a dtype wider than the dtype of
    the parameters; they see the mean rounded to the gradients' dtype.) Updates have the
    dtypes that `opt` alone gives for these gradients, and the state keeps its dtypes.
    Inside a window updates are exactly zero, whatever the gradients hold. A window of
    weight 0 is no step.

    Args:
      opt: the inner optimizer, any `optax.GradientTransformation`. For
        `optax.lookahead`, gradients and their sum are those of the fast parameters.
      every_k_schedule: k, micro-steps a window: an int, or a function of the step
        (traced), such as a schedule of Optax. A window closes when it holds k or more,
        so a smaller k closes the open window with the next micro-step.
      use_grad_mean: whether `opt` sees the mean (default) or the sum Σ w·g.
      should_skip_update_fn: `(updates, step, params) -> (skip, skip_state)`, as in
        Optax. If `skip` is true, that micro-step never happened.
      accumulator_dtype: see `accumulator.init`.
      should_drop_window_fn: a function of the same signature, such as
        `drop_window_if_not_finite`. It is called when the window closes, with the
        gradients for `opt`. If `skip` is true, the whole window never happened.
      track_norm: whether to keep the norm of the last gradient given to `opt`, for
        `grad_norm`. A step then reads the mean once more; a micro-step costs the same.
      mean_argnames: names of extra arguments, real scalars, of which `opt` gets the
        mean over the window, Σ w·x / Σ w in float32: `"value"` for
        `optax.contrib.reduce_on_plateau`. Pass these arguments in every call. Of every
        other argument `opt` gets the value of the last micro-step.
      data_axis: the mesh axis, or a tuple of axes, that splits the batch: for gradients
        of one device's rows, inside `jax.shard_map`. Every device accumulates its
        gradients, no micro-step communicates, and the step reduces over the axis once.
        (`should_skip_update_fn` costs one scalar all-reduce a micro-step.) `emit` and
        the extra arguments must be the same on all devices, except those in
        `mean_argnames`. If the compiler splits the batch, under `jax.jit` alone,
        gradients come reduced: leave it out, or use `value_and_grad(data_axis=)`.

    Attributes:
      init: `params -> MultiStepsState`. Leaves of the accumulator are sharded as the
        parameters are, if arrays or their types have a sharding. Gradients of integer
        parameters accumulate in a floating dtype, as in Optax.
      update: `(grads, state, params=None, *, weight=None, **extra_args) -> (updates,
        state)`. `weight` is the weight of this micro-batch: see `accumulator.add`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if k is known and less than 1, or if arguments contradict each other;
        in `init`, if `opt` or a part of it accumulates gradients.
    """

    _config: Config

    @explains_keywords
    def __new__(
        cls,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[jax.Array], ArrayLike],
        use_grad_mean: bool = True,
        should_skip_update_fn: optax.ShouldSkipUpdateFunction | None = None,
        accumulator_dtype: Any = jnp.float32,
        *,
        should_drop_window_fn: SkipFn | None = None,
        track_norm: bool = False,
        mean_argnames: str | Sequence[str] = (),
        data_axis: str | Sequence[str] | None = None,
    ) -> "MultiSteps":
        """Builds the pair of pure functions; see the class for the arguments."""
        axes = meshes.check_data_axis(data_axis)
        check_decisions(should_skip_update_fn, should_drop_window_fn)
        check_type("track_norm", track_norm, bool, "Pass True or False.")
        todo = "Call the factory: optax.adam(1e-3), not optax.adam."
        check_optimizer("opt", opt, todo)
        config = Config(
            opt=opt,
            every_k_schedule=check_every_k(every_k_schedule),
            use_grad_mean=bool(use_grad_mean),
            should_skip_update_fn=should_skip_update_fn,
            accumulator_dtype=check_dtype(accumulator_dtype),
            should_drop_window_fn=should_drop_window_fn,
            track_norm=track_norm,
            data_axis=axes or None,
            mean_argnames=_check_argnames(mean_argnames),
        )
        self = super().__new__(cls, config.init, _update_of(config))
        self._config = config
        return self

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The inner optimizer, with support for extra arguments."""
        return self._config.inner

    @property
    def state_specs(self) -> MultiStepsState:
        """`PartitionSpec`s of the state for `jax.shard_map`, as a prefix of its tree.

        The devices' sums are sharded over `data_axis`, all other fields replicated.

        >>> import optax, ga_optax as ga
        >>> tx = ga.MultiSteps(optax.sgd(0.1), 4, data_axis="data")
        >>> tx.state_specs.total, tx.state_specs.inner_opt_state
        (P('data',), P())
        """
        kind, spec = state_type(self._config.use_grad_mean), self._config.spec
        specs: Any = kind._make([PartitionSpec()] * len(kind._fields))
        return specs._replace(total=spec, weight=spec, arg_totals=spec)

    def has_updated(self, state: optax.OptState) -> jax.Array:
        """True if the last call emitted; see the function `has_updated`."""
        return has_updated(state)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Returns itself, for code written for `optax.MultiSteps`."""
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Any:
        """Makes the result of `_replace`: with other functions, no `MultiSteps`."""
        return optax.GradientTransformationExtraArgs(*iterable)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self._config.arguments), ()

    def __repr__(self) -> str:
        arguments = (f"{name}={x}" for name, x in self._config.arguments.items())
        return f"MultiSteps({', '.join(arguments)})"


def _update_of(config: Config) -> Callable[..., Any]:
    """The `update` of a `MultiSteps`."""

    def update(
        grads: optax.Updates,
        state: MultiStepsState,
        params: optax.Params | None = None,
        *,
        weight: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MultiStepsState]:
        """Adds a gradient; the updates are zero until the window closes."""
        _check_spelling(extra_args)
        check_order(grads=grads, params=params)
        arguments = config, state, grads, params, extra_args, weight
        return MicroStep(*arguments, applies=False).add_gradient()

    @functools.wraps(update)
    def update_as_in_optax(*args: Any, **kwargs: Any) -> Any:
        if "updates" in kwargs:  # Optax's name for the first argument.
            kwargs["grads"] = kwargs.pop("updates")
        return update(*args, **kwargs)

    return update_as_in_optax


# As a pytree, a named tuple would be flattened into its two functions, and rebuilt by
# calling the class with them.
jax.tree_util.register_static(MultiSteps)


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    weight: ArrayLike | None = None,
    emit: bool | jax.Array | None = None,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """`tx.update` and `optax.apply_updates` in one, with the least memory traffic.

    >>> import jax, jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(optax.adam(1e-3), 4)
    >>> def micro_step(params, state, grads):
    ...     return ga.apply_gradients(tx, grads, state, params)
    >>> step = jax.jit(micro_step, donate_argnums=(0, 1))
    >>> params = jnp.zeros(3)
    >>> state = tx.init(params)
    >>> for _ in range(4):
    ...     params, state = step(params, state, jnp.ones(3))
    >>> int(ga.stats(state).steps)
    1

    Donate the parameters and the state, and return them in this order. JAX matches
    donated buffers to results of one shape in their order: in another order XLA copies
    both trees. Inside a window the call reads `grads`, reads and writes the
    accumulator, and touches nothing else.

    **Exactness.** The state has the bits of the state of `tx.update`, except for the
    leftover in `total` between windows. So have the parameters, except that XLA may
    contract the last product and sum, `p + (-rate · u)`, into one operation with one
    rounding.

    Args:
      tx: a `MultiSteps`. Any other transformation works too, at the cost of the two
        calls; it may hold a `MultiSteps` somewhere inside.
      grads: the micro-batch's gradient, with the tree and shapes of `params`.
      state: the state of `tx`.
      params: the parameters.
      weight: the weight of the micro-batch, a scalar; see `accumulator.add`.
      emit: `None` lets the state count. A Python bool decides statically, for a host
        loop that counts: `True` closes the window with this micro-step, `False` keeps
        the window open, and the compiled program has no cond. If a weight or a skip
        function may still prevent the step, an elementwise select decides. A traced
        bool `[]` decides at run time, for windows that end where the data says so: it
        takes the place of the state's count, at the same cost. With a k of 1 there is
        no accumulator for such a window.
      **extra_args: passed to the inner optimizer.

    Returns:
      The new parameters and the new state.

    Raises:
      ValueError: if trees, shapes or the weight do not fit; names the leaf.
      TypeError: if the state of a `MultiSteps` comes in the place of gradients or
        parameters, if `emit` is no bool, or is given and `tx` is not a `MultiSteps`, or
        if there are extra arguments and the optimizer is a plain
        `optax.GradientTransformation`, which takes none.

    Warns:
      UserWarning: if a schedule, or another transformation that counts, is around a
        `MultiSteps` inside of `tx`, or beside it in a chain, where it counts
        micro-steps.
    """
    is_scalar = isinstance(emit, jax.Array) and (emit.dtype, emit.shape) == (bool, ())
    if not (emit is None or isinstance(emit, bool) or is_scalar):
        raise TypeError(
            "emit must be None, a Python bool, or a bool scalar of JAX, but it is "
            f"{emit!r}. If the host loop counts, jit with static_argnames='emit'; or "
            "leave it out."
        )
    check_optimizer("tx", tx, ORDER)
    _check_spelling(extra_args)
    if params is None and jax.tree.leaves(grads):
        raise TypeError(
            "params must be the parameters, but it is None. apply_gradients returns "
            "updated parameters: pass the parameters of grads."
        )
    check_order(grads=grads, params=params)
    trained = differentiated(params)
    check_gradients(trained, grads, expected="params", integers=True)
    check_on_device("grads", grads)
    check_on_device("params", params)
    if isinstance(tx, MultiSteps):
        config = tx._config
        _check_extra_args(config.opt, extra_args)
        arguments = config, state, grads, params, extra_args, weight, emit
        return MicroStep(*arguments).add_gradient()

    if emit is not None:
        raise _no_multi_steps("emit", tx)
    warn_of_counts(state)
    if weight is not None:
        some_states(state)  # raises if no MultiSteps inside would see the weight
        extra_args["weight"] = weight
    _check_extra_args(tx, extra_args)
    updates, state = optax.with_extra_args_support(tx).update(
        grads, state, params, **extra_args
    )
    return optax.apply_updates(params, updates), state


def flush(
    tx: MultiSteps, state: optax.OptState, params: optax.Params, **extra_args: Any
) -> tuple[optax.Params, optax.OptState]:
    """Closes a window early, with the mean over the micro-steps so far.

    For the end of an epoch or of the run, if fewer than k micro-batches are left.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(optax.sgd(1.0), 4)
    >>> params, state = jnp.zeros(1), tx.init(jnp.zeros(1))
    >>> for g in (1.0, 2.0):
    ...     params, state = ga.apply_gradients(tx, jnp.array([g]), state, params)
    >>> ga.flush(tx, state, params)[0]
    Array([-1.5], dtype=float32)

    **Exactness.** As a full window whose k is the number of micro-steps so far. An
    empty window changes no bit of parameters and state.

    Args:
      tx: the `MultiSteps`.
      state: the state of `tx`.
      params: the parameters.
      **extra_args: passed to the inner optimizer. The arguments in `mean_argnames` come
        from the window.

    Returns:
      The new parameters and the new state.

    Raises:
      TypeError: if `tx` is not a `MultiSteps`, or if there are extra arguments and the
        inner optimizer takes none.
      ValueError: if `params` does not fit the state; names the leaf.
    """
    check_optimizer("tx", tx, ORDER)
    if not isinstance(tx, MultiSteps):
        raise _no_multi_steps("flush", tx)
    config = tx._config
    _check_extra_args(config.opt, extra_args)
    check_order(params=params)
    extra_args |= dict.fromkeys(config.mean_argnames, 0.0)  # only their types are read
    trained = differentiated(params)
    return MicroStep(config, state, trained, params, extra_args).close_early()


def _check_spelling(extra_args: dict[str, Any]) -> None:
    """Raises if an extra argument is `emit`, or a misspelt `weight` or `emit`."""
    for name in extra_args:
        for meant in difflib.get_close_matches(name, ("weight", "emit"), cutoff=0.75):
            found = f"{name!r} looks like {meant!r}. Spell it {meant}=."
            if name == meant:  # `update` has no such argument
                found = f"only ga_optax.apply_gradients has {name}=. Call it instead."
            raise TypeError(f"Extra arguments are for the inner optimizer, but {found}")


def _check_extra_args(opt: Any, extra_args: dict[str, Any]) -> None:
    """Raises if there are extra arguments, and the optimizer takes none."""
    if extra_args and not isinstance(opt, optax.GradientTransformationExtraArgs):
        raise TypeError(
            "The optimizer must take extra arguments, but it is a plain "
            "GradientTransformation, which takes none, and this call passes "
            f"{listed([*extra_args])}. Leave the extra arguments out, or see "
            "optax.GradientTransformationExtraArgs."
        )


def _check_argnames(names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of extra arguments as a tuple, or raises."""
    argnames: Any = tuple(names) if isinstance(names, (tuple, list)) else (names,)
    for name in argnames:
        if not isinstance(name, str) or name in ("weight", "emit"):
            raise ValueError(
                "mean_argnames must name extra arguments of the inner optimizer, but "
                f"one is {name!r}. Pass a tuple of names, such as ('value',)."
            )
    return argnames


def _no_multi_steps(option: str, tx: Any) -> TypeError:
    return TypeError(
        f"{option} needs tx to be a ga_optax.MultiSteps, but it is a "
        f"{type(tx).__name__}. Put the other transformations inside: "
        "MultiSteps(optax.chain(...), k)."
    )
