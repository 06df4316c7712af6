"""Fold across calls: one micro-batch a call, one inner update a window.

A window is k calls. Each of them adds its gradient to the accumulator; the last one
emits, which means that the inner optimizer runs on the mean.

This differs from `optax.MultiSteps` in: 1. the sum is divided once, where a running
mean divides in every micro-step; 2. the optimizer runs once a window, not in every
micro-step; 3. nothing is masked by multiplication, so an inf or a NaN stays in its
window; 4. the inner optimizer sees the accumulator's dtype; 5. micro-batches have
weights; 6. it is a gradient transformation, so extra arguments reach it in a chain.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ga_optax._across import window
from ga_optax._across.config import (
    Config,
    SkipFn,
    check_every_k,
    check_optimizer,
    differentiated,
    windows_of_windows,
)
from ga_optax._across.request import Request
from ga_optax._across.state import (
    ORDER,
    MultiStepsState,
    check_order,
    has_updated,
    some_states,
    state_type,
    warn_of_counts,
)
from ga_optax._checks import check_callable, check_dtype, check_gradients
from ga_optax._devices import meshes
from ga_optax._text import listed
from ga_optax.accumulator import parts

P = ParamSpec("P")
R = TypeVar("R")


def drop_window_if_not_finite(
    updates: optax.Updates, gradient_step: ArrayLike, params: optax.Params | None
) -> tuple[jax.Array, Any]:
    """As `should_drop_window_fn`: drops a window that met an inf or a NaN.

    The window closes without a step: parameters, the inner optimizer's state and its
    schedules stay as they were, and `stats` counts a skipped window. The check reads
    the accumulator when the window closes, and costs the other micro-steps nothing.
    To leave out the one bad micro-batch instead, pass `optax.skip_not_finite` as
    `should_skip_update_fn`. That reads every gradient.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(
    ...     optax.sgd(1.0), 2, should_drop_window_fn=ga.drop_window_if_not_finite)
    >>> params, state = jnp.ones(1), tx.init(jnp.ones(1))
    >>> for g in (jnp.array([jnp.inf]), jnp.ones(1)):
    ...     params, state = ga.apply_gradients(tx, g, state, params)
    >>> params, int(ga.stats(state).skipped_windows)
    (Array([1.], dtype=float32), 1)

    Args:
      updates: what the inner optimizer would see.
      gradient_step: steps so far.
      params: the parameters, if known.

    Returns:
      Whether any element is not finite, and the same in a dictionary, as `drop_state`.
    """
    del gradient_step, params
    # A NaN or infinities of both signs make the sum NaN, and an infinity is an
    # extremum: reductions of the buffer as it is. To count what is not finite, XLA
    # would write the comparison out first. Extrema are not enough: over devices, that
    # of CPUs leaves out a NaN of one. (A sum that overflows both ways is NaN, too.)
    finite = [
        jnp.isfinite(jnp.max(part))
        & jnp.isfinite(jnp.min(part))
        & ~jnp.isnan(jnp.sum(part))
        for leaf in jax.tree.leaves(updates)
        if leaf.size
        for part in parts(leaf)
    ]
    should_skip = ~jnp.all(jnp.array(finite, bool))
    return should_skip, {"should_skip": should_skip}


def _explains_keywords(new: Callable[P, R]) -> Callable[P, R]:
    """`MultiSteps.__new__`, which says which options there are if it lacks one."""
    options = [*inspect.signature(new).parameters][1:]

    @functools.wraps(new)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in options:
                raise TypeError(
                    f"The options of MultiSteps must be among {', '.join(options)}, "
                    f"but {name} came. The number of micro-steps in a window, k, is "
                    "every_k_schedule here."
                )
        return new(*args, **kwargs)

    return make


class MultiSteps(optax.GradientTransformationExtraArgs):
    """Accumulates gradients over k micro-steps, then runs `opt` once on their mean.

    A drop-in for `optax.MultiSteps` that is itself a gradient transformation: it goes
    into `optax.chain` and every other combinator, and extra arguments reach `opt`.

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
    accumulator's dtype. (A few optimizers cannot take a dtype wider than that of the
    parameters. They see it rounded to the gradients' dtype.) Updates have the dtypes
    that `opt` alone gives for these gradients, and the state keeps its dtypes. Inside a
    window updates are exactly zero, whatever the gradients hold. A window of weight 0
    is no step.

    Args:
      opt: the inner optimizer, any `optax.GradientTransformation`. Of the parameters
        of `optax.lookahead`, gradients and their sum are of the fast ones.
      every_k_schedule: k, micro-steps a window: an int, or a function of the step
        (traced) that returns one. A window closes when it holds k or more, so a k that
        shrank closes the open window with the next micro-step.
      use_grad_mean: whether `opt` sees the mean (default) or the sum Σ w·g.
      should_skip_update_fn: `(updates, step, params) -> (skip, skip_state)`, as in
        Optax. If `skip` is true, that micro-step never happened.
      accumulator_dtype: see `accumulator.init`.
      should_drop_window_fn: a function of the same signature. It is asked when the
        window closes, with what `opt` would see. If it says true, the whole window
        never happened. `drop_window_if_not_finite` is one.
      track_norm: whether to keep the norm of the gradient that `opt` saw last, for
        `grad_norm`. A step then reads the mean once more; a micro-step is as without.
      mean_argnames: names of extra arguments, real scalars, whose mean over the window,
        Σ w·x / Σ w in float32, `opt` gets: `"value"` for
        `optax.contrib.reduce_on_plateau`. They must be given in every call. Of all
        others it gets what the last micro-step was given.
      data_axis: a mesh axis, or a tuple of them, that split the batch: for gradients of
        one device's rows, inside `jax.shard_map`. Every device accumulates its own, no
        micro-step communicates, and the step reduces over the axis once. (The answer of
        `should_skip_update_fn` costs one scalar all-reduce a micro-step.) `emit` and
        the extra arguments must be the same on all devices, except those to average. If
        the compiler splits the batch, under `jax.jit` alone, gradients come reduced:
        leave it out, or use `value_and_grad(data_axis=)`.

    Attributes:
      init: `params -> MultiStepsState`. Leaves of the accumulator are sharded as the
        parameters are, if arrays or their types say how. Gradients of integer
        parameters accumulate in a floating dtype, as in Optax.
      update: `(grads, state, params=None, *, weight=None, **extra_args) -> (updates,
        state)`. `weight` says how much this micro-batch counts: see `accumulator.add`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if k is known and less than 1, if arguments contradict each other, or
        if `opt` accumulates itself (anywhere inside of it, `init` raises).
    """

    _config: Config

    @_explains_keywords
    def __new__(
        cls,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[jax.Array], ArrayLike],
        use_grad_mean: bool = True,
        should_skip_update_fn: optax.ShouldSkipUpdateFunction | None = None,
        accumulator_dtype: DTypeLike | None = jnp.float32,
        *,
        should_drop_window_fn: SkipFn | None = None,
        track_norm: bool = False,
        mean_argnames: str | Sequence[str] = (),
        data_axis: str | Sequence[str] | None = None,
    ) -> "MultiSteps":
        """Builds the pair of pure functions; see the class for the arguments."""
        axes = meshes.check_data_axis(data_axis)
        _check_decides(should_skip_update_fn, should_drop_window_fn)
        _check_track_norm(track_norm)
        _check_opt(opt, every_k_schedule)
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
        """How the state crosses a `jax.shard_map`: a prefix of `PartitionSpec`.

        The sums of the devices lie along the `data_axis`, the rest is the same on all.

        >>> import optax, ga_optax as ga
        >>> tx = ga.MultiSteps(optax.sgd(0.1), 4, data_axis="data")
        >>> tx.state_specs.total, tx.state_specs.inner_opt_state
        (P('data',), P())
        """
        kind, spec = state_type(self._config.use_grad_mean), self._config.storage.spec
        specs: Any = kind._make([PartitionSpec()] * len(kind._fields))
        return specs._replace(total=spec, weight=spec, arg_totals=spec)

    def has_updated(self, state: optax.OptState) -> jax.Array:
        """Whether the last call emitted; see the function `has_updated`."""
        return has_updated(state)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Returns itself, for code written for `optax.MultiSteps`."""
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Any:
        """What `_replace` makes: with another function it is no `MultiSteps`."""
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
        return window.micro_step(
            Request(config, state, grads, params, extra_args, weight, applies=False)
        )

    @functools.wraps(update)
    def update_as_in_optax(*args: Any, **kwargs: Any) -> Any:
        if "updates" in kwargs:  # Optax's name for the first argument.
            kwargs["grads"] = kwargs.pop("updates")
        return update(*args, **kwargs)

    return update_as_in_optax


# A named tuple would be taken apart into its two functions, and put together again by
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
    """`tx.update` and `optax.apply_updates` in one, at the floor of memory traffic.

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

    Donate the parameters and the state, and return them in the order in which they
    came, as here. JAX matches donated buffers to results of one shape in their order:
    in another order they cross, and XLA copies both trees. In the window this reads
    `grads`, reads and writes the accumulator, and touches nothing else.

    **Exactness.** The state has the same bits as that of `tx.update`, except for what
    is left in `total` between windows. The parameters have too, except that XLA may
    contract the last product and sum, `p + (-rate · u)`, into one operation with one
    rounding.

    Args:
      tx: a `MultiSteps`. Any other transformation is taken too, at the price of the two
        calls; it may hold a `MultiSteps` somewhere inside.
      grads: the micro-batch's gradient, with the tree and shapes of `params`.
      state: the state of `tx`.
      params: the parameters.
      weight: how much the micro-batch counts, a scalar; see `accumulator.add`.
      emit: `None` lets the state count. A Python bool says it statically, for a host
        loop that counts for itself: `True` closes the window with this micro-step,
        `False` keeps it open, and the compiled program has no cond. What may still
        prevent the step (a weight, a skip function) is then an elementwise select. A
        traced bool `[]` says it at run time, for windows that end where the data says
        so: it takes the place of the state's count, at the same cost. A k of 1 keeps no
        accumulator to hold such a window.
      **extra_args: passed to the inner optimizer.

    Returns:
      The new parameters and the new state.

    Raises:
      ValueError: if trees, shapes or the weight do not fit; names the leaf.
      TypeError: if `emit` is no bool, if `emit` is given and `tx` is not a
        `MultiSteps`, or if there are extra arguments and the optimizer is a plain
        `optax.GradientTransformation`, which takes none.

    Warns:
      UserWarning: if a schedule, or anything else that counts, stands around a
        `MultiSteps` inside of `tx`, or beside it in a chain: it counts micro-steps.
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
            "them updated: pass those that grads belong to."
        )
    check_order(grads=grads, params=params)
    trained = differentiated(params)
    check_gradients(trained, grads, expected="params", integers=True)
    if isinstance(tx, MultiSteps):
        config = tx._config
        _check_taken(config.opt, extra_args)
        return window.micro_step(
            Request(config, state, grads, params, extra_args, weight, emit)
        )

    if emit is not None:
        raise TypeError(_need_multi_steps("emit", tx))
    warn_of_counts(state)
    if weight is not None:
        some_states(state)  # raises if no MultiSteps inside would see the weight
        extra_args["weight"] = weight
    _check_taken(tx, extra_args)
    updates, state = optax.with_extra_args_support(tx).update(
        grads, state, params, **extra_args
    )
    return optax.apply_updates(params, updates), state


def flush(
    tx: MultiSteps, state: optax.OptState, params: optax.Params, **extra_args: Any
) -> tuple[optax.Params, optax.OptState]:
    """Closes a window early, with the mean over what it holds.

    For the end of an epoch or of the run, if fewer than k micro-batches are left.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(optax.sgd(1.0), 4)
    >>> params, state = jnp.zeros(1), tx.init(jnp.zeros(1))
    >>> for g in (1.0, 2.0):
    ...     params, state = ga.apply_gradients(tx, jnp.array([g]), state, params)
    >>> ga.flush(tx, state, params)[0]
    Array([-1.5], dtype=float32)

    **Exactness.** As a window with a k of as many micro-steps as it holds. An empty
    window changes no bit of parameters and state.

    Args:
      tx: the `MultiSteps`.
      state: its state.
      params: the parameters.
      **extra_args: passed to the inner optimizer. Those that `mean_argnames` names
        come from the window.

    Returns:
      The new parameters and the new state.

    Raises:
      TypeError: if `tx` is not a `MultiSteps`, or if there are extra arguments and its
        optimizer takes none.
      ValueError: if `params` does not fit the state; names the leaf.
    """
    check_optimizer("tx", tx, ORDER)
    if not isinstance(tx, MultiSteps):
        raise TypeError(_need_multi_steps("flush", tx))
    config = tx._config
    _check_taken(config.opt, extra_args)
    check_order(params=params)
    extra_args |= dict.fromkeys(config.mean_argnames, 0.0)  # only their types are read
    trained = differentiated(params)
    return window.flush(Request(config, state, trained, params, extra_args))


def _check_opt(opt: Any, k: Any) -> None:
    """Raises unless `opt` is an optimizer that does not accumulate itself."""
    todo = "Call the factory: optax.adam(1e-3), not optax.adam."
    check_optimizer("opt", opt, todo)
    if isinstance(opt, MultiSteps):
        what = "it is a ga_optax.MultiSteps"
        raise windows_of_windows(what, k, opt._config.every_k_schedule)
    if isinstance(opt, optax.MultiSteps):
        raise windows_of_windows("it is an optax.MultiSteps", k)


def _check_decides(skip: Any, drop: Any) -> None:
    """Raises unless what skips micro-steps and what drops windows can be called so."""
    if skip is drop_window_if_not_finite:
        raise ValueError(
            "should_skip_update_fn must decide on one micro-step, but it is "
            "drop_window_if_not_finite, which decides on a window. Pass "
            "should_drop_window_fn=ga_optax.drop_window_if_not_finite."
        )
    what = "(updates, step, params) -> (skip, skip_state)"
    for name, fn, example in (
        ("should_skip_update_fn", skip, "optax.skip_not_finite"),
        ("should_drop_window_fn", drop, "ga_optax.drop_window_if_not_finite"),
    ):
        if fn is not None:
            todo = f"Pass {example}, for example, or None."
            check_callable(name, fn, what, todo)


def _check_track_norm(value: Any) -> None:
    """Raises unless it is a Python bool."""
    if not isinstance(value, bool):
        raise TypeError(
            f"track_norm must be a Python bool, but it is {value!r}. It decides what "
            "the state holds: pass True or False."
        )


def _check_spelling(extra_args: dict[str, Any]) -> None:
    """Raises if an extra argument looks like one of ours, misspelt."""
    for name in extra_args:
        for meant in difflib.get_close_matches(name, ("weight", "emit"), cutoff=0.75):
            raise TypeError(
                "Extra arguments are for the inner optimizer, but "
                f"{name!r} looks like {meant!r}. Spell it {meant}=."
            )


def _check_taken(opt: Any, extra_args: dict[str, Any]) -> None:
    """Raises if there are extra arguments, and an optimizer that takes none."""
    if extra_args and not isinstance(opt, optax.GradientTransformationExtraArgs):
        raise TypeError(
            "Extra arguments must be for the optimizer, but it is a plain "
            f"GradientTransformation, which takes none, and {listed([*extra_args])} "
            "came. Leave them out, or see optax.GradientTransformationExtraArgs."
        )


def _check_argnames(names: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of extra arguments as a tuple, or raises."""
    every: tuple[Any, ...] = (
        tuple(names) if isinstance(names, (tuple, list)) else (names,)
    )
    for name in every:
        if not isinstance(name, str) or name in ("weight", "emit"):
            raise ValueError(
                "mean_argnames must name extra arguments of the inner optimizer, but "
                f"one is {name!r}. Pass a tuple of names, such as ('value',)."
            )
    return every


def _need_multi_steps(what: str, tx: Any) -> str:
    return (
        f"{what} needs tx to be a ga_optax.MultiSteps, but it is a "
        f"{type(tx).__name__}. Put the other transformations inside: "
        "MultiSteps(optax.chain(...), k)."
    )
