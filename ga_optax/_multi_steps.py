"""Fold across calls: one micro-batch a call, one inner update a window.

A window is k calls. Each of them adds its gradient to the accumulator; the last one
emits, which means that the inner optimizer runs on the mean:

    acc  <-  add(acc, g, w)
    if count = k:   params, inner  <-  inner.update(mean(acc));   count <- 0

The inner update stands inside one branch of a `lax.cond`, so it is paid once a window
and its schedules count steps. The accumulator is read by that branch and not returned
by it, and nothing resets it (the next window overwrites), so XLA updates it in place.
The division is part of the last addition, so no buffer is needed for the mean.

This differs from `optax.MultiSteps` in: 1. the sum is divided once, where a running
mean divides in every micro-step; 2. the optimizer does not run in every micro-step to
be thrown away; 3. nothing is masked by multiplication, so inf and NaN stay where they
came; 4. the inner optimizer sees the accumulator's dtype; 5. micro-batches have
weights; 6. it is a gradient transformation, so extra arguments reach it in a chain.
"""

import dataclasses
import functools
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ga_optax import _checks, _devices, _noise, accumulator
from ga_optax.accumulator import Accumulator

__all__ = [
    "MultiSteps",
    "MultiStepsState",
    "Stats",
    "apply_gradients",
    "drop_window_if_not_finite",
    "flush",
    "from_optax",
    "has_updated",
    "stats",
]


class MultiStepsState(NamedTuple):
    """State of `MultiSteps`. The first five fields are those of Optax's state.

    Attributes:
      mini_step: micro-steps in the open window, int32 `[]`.
      gradient_step: steps, that is updates of the inner optimizer, int32 `[]`.
      inner_opt_state: the state of the inner optimizer.
      acc_grads: Σ w·g over the open window, with the shapes of the parameters. While
        `mini_step` is 0 it holds what the inner optimizer saw last, which the next
        micro-step overwrites. `()` where a static k of 1 needs none. With a
        `data_axis` it is the sum of each device, `[devices, ...]`, `[1, ...]` inside
        the `shard_map`, also after a step.
      skip_state: what `should_skip_update_fn` returned last.
      weight: Σ w over the open window, a float `[]`; with a `data_axis` one for each
        device, `[devices]`.
      emitted: whether the last call emitted, bool `[]`.
      micro_steps: micro-steps accumulated since `init`, int32 `[]`.
      skipped_micro_steps: micro-steps that `should_skip_update_fn` left out, int32
        `[]`.
      skipped_windows: windows that closed without a step, int32 `[]`: dropped, or of
        weight 0.
      noise: what `noise_scale` reads, a `NoiseState`; `()` without `track_noise`.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: optax.OptState
    acc_grads: optax.Updates
    skip_state: Any
    weight: jax.Array
    emitted: jax.Array
    micro_steps: jax.Array
    skipped_micro_steps: jax.Array
    skipped_windows: jax.Array
    noise: Any = ()


class Stats(NamedTuple):
    """Counters of a run, see `stats`.

    Attributes:
      micro_steps: micro-steps accumulated since `init`, in closed windows and in the
        open one.
      steps: updates of the inner optimizer.
      skipped_micro_steps: micro-steps that `should_skip_update_fn` left out.
      skipped_windows: windows that closed without a step, since they were not finite
        or had weight 0.
      weight: Σ w of the open window, over all devices where the state is whole.
      fill: micro-steps in the open window.
    """

    micro_steps: jax.Array
    steps: jax.Array
    skipped_micro_steps: jax.Array
    skipped_windows: jax.Array
    weight: jax.Array
    fill: jax.Array

    @property
    def skipped(self) -> jax.Array:
        """Everything that was skipped, micro-steps and whole windows."""
        return self.skipped_micro_steps + self.skipped_windows


def drop_window_if_not_finite(
    updates: optax.Updates, gradient_step: ArrayLike, params: optax.Params | None
) -> tuple[jax.Array, Any]:
    """As `should_skip_update_fn`: drops a window that met an inf or a NaN.

    The window closes without a step: parameters, the inner optimizer's state and its
    schedules stay as they were, and `stats` counts a skipped window. The check reads
    the accumulator when the window closes, and costs the other micro-steps nothing.
    To leave out the one bad micro-batch instead, pass `optax.skip_not_finite`, which
    reads every gradient.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(
    ...     optax.sgd(1.0), 2, should_skip_update_fn=ga.drop_window_if_not_finite)
    >>> params, state = jnp.ones(1), tx.init(jnp.ones(1))
    >>> for g in (jnp.array([jnp.inf]), jnp.ones(1)):
    ...     params, state = ga.apply_gradients(tx, g, state, params)
    >>> params, int(ga.stats(state).skipped_windows)
    (Array([1.], dtype=float32), 1)

    Args:
      updates: the window's sum.
      gradient_step: steps so far.
      params: the parameters, if known.

    Returns:
      Whether any element is not finite, and the same in a dictionary, as `skip_state`.
    """
    del gradient_step, params
    # NaN is the maximum of whatever holds one. Extrema are reductions of the buffer as
    # it is; to count what is not finite, XLA would write the comparison out first.
    finite = [
        jnp.isfinite(extremum)
        for leaf in jax.tree.leaves(updates)
        if leaf.size
        for part in _parts(leaf)
        for extremum in (jnp.max(part), jnp.min(part))
    ]
    should_skip = ~jnp.all(jnp.array(finite, bool))
    return should_skip, {"should_skip": should_skip}


def _parts(x: jax.Array) -> tuple[jax.Array, ...]:
    return (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)


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

    Use `apply_gradients` where you can: with `update` and `optax.apply_updates` a
    micro-step inside the window has to write, read and add a tree of zeros.

    **Cost.** One buffer of the size of the parameters. A micro-step reads the gradient,
    and reads and writes that buffer; a window costs one update of `opt` besides. A
    static k of 1 keeps no buffer and adds nothing to `opt`.

    **Exactness.** `opt` sees Σ w·g / Σ w, rounded as `accumulator` says, in the
    accumulator's dtype. (A few optimizers cannot take a dtype wider than that of the
    parameters, and see it rounded to the gradients' dtype.) Updates come out in the
    dtypes that `opt` alone gives for these gradients, and the state keeps its dtypes.
    Inside a window updates are exactly zero, whatever the gradients hold. A window of
    weight 0 is no step.

    Args:
      opt: the inner optimizer, any `optax.GradientTransformation`.
      every_k_schedule: k, micro-steps a window: an int, or a function of the step
        (traced) that returns it. A window closes when it holds k or more, so a k that
        shrank closes the open window with the next micro-step.
      use_grad_mean: whether `opt` sees the mean (default) or the sum Σ w·g.
      should_skip_update_fn: `(updates, step, params) -> (skip, skip_state)`, as in
        Optax: where `skip` is true that micro-step never happened. With
        `drop_window_if_not_finite` the whole window never happened.
      accumulator_dtype: see `accumulator.init`.
      track_noise: whether to keep what `noise_scale` needs. A micro-step then reads the
        gradient once more, and a step the mean. A static k of 1 has nothing to keep.
      data_axis: a mesh axis, or several, that split the batch: for gradients of one
        device's rows, inside `jax.shard_map`. Every device accumulates its own, no
        micro-step communicates, and the step reduces over the axis once. (A skip
        function has to be agreed on: it costs one scalar all-reduce a micro-step.)
        Where the compiler splits the batch, under `jax.jit` alone, gradients come
        reduced: leave it out, or use `value_and_grad(data_axis=)`.

    Attributes:
      init: `params -> MultiStepsState`. Leaves of the accumulator are sharded as the
        parameters are, wherever arrays or their types say that.
      update: `(grads, state, params=None, *, weight=None, **extra_args) -> (updates,
        state)`. `weight` says how much this micro-batch counts: see `accumulator.add`.

    Raises:
      TypeError: where an argument has the wrong type.
      ValueError: where k is known and less than 1.
    """

    _window: "_Window"

    def __new__(
        cls,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[jax.Array], ArrayLike],
        use_grad_mean: bool = True,
        should_skip_update_fn: optax.ShouldSkipUpdateFunction | None = None,
        accumulator_dtype: DTypeLike | None = jnp.float32,
        track_noise: bool = False,
        data_axis: str | Sequence[str] | None = None,
    ) -> "MultiSteps":
        """Builds the pair of pure functions; see the class for the arguments."""
        if not (hasattr(opt, "init") and hasattr(opt, "update")):
            raise TypeError(
                "opt must be an optax.GradientTransformation, but it is "
                f"{opt!r}. Call the factory: optax.adam(1e-3), not optax.adam."
            )
        if should_skip_update_fn is not None and not callable(should_skip_update_fn):
            raise TypeError(
                "should_skip_update_fn must be a function (updates, step, params) -> "
                f"(skip, skip_state), but it is {should_skip_update_fn!r}. Pass "
                "optax.skip_not_finite, for example, or None."
            )
        if not isinstance(track_noise, bool):
            raise TypeError(
                f"track_noise must be a Python bool, but it is {track_noise!r} of type "
                f"{type(track_noise).__name__}. It decides what the state holds: pass "
                "True or False."
            )
        axes = _devices.check_data_axis(data_axis)
        if axes and track_noise:
            raise ValueError(
                "track_noise must be False with a data_axis, since it would have to "
                f"communicate in every micro-step, but data_axis is {data_axis!r}. "
                "Track the noise in a run on one device, or leave data_axis out."
            )
        window = _Window(
            inner=optax.with_extra_args_support(opt),
            every_k=_check_every_k(every_k_schedule),
            use_grad_mean=bool(use_grad_mean),
            should_skip=should_skip_update_fn,
            dtype=_checks.check_dtype(accumulator_dtype),
            track_noise=track_noise,
            axes=axes,
        )

        @functools.wraps(window.update)
        def update(*args: Any, **kwargs: Any) -> Any:
            if "updates" in kwargs:  # Optax's name for the first argument.
                kwargs["grads"] = kwargs.pop("updates")
            return window.update(*args, **kwargs)

        self = super().__new__(cls, window.init, update)
        self._window = window
        return self

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The inner optimizer, with support for extra arguments."""
        return self._window.inner

    @property
    def state_specs(self) -> MultiStepsState:
        """How the state crosses a `jax.shard_map`: a prefix of `PartitionSpec`.

        The sums of the devices lie along the `data_axis`, the rest is the same on all.

        >>> import optax, ga_optax as ga
        >>> tx = ga.MultiSteps(optax.sgd(0.1), 4, data_axis="data")
        >>> tx.state_specs.acc_grads, tx.state_specs.inner_opt_state
        (P('data',), P())
        """
        specs: dict[str, Any] = dict.fromkeys(MultiStepsState._fields, PartitionSpec())
        if self._window.axes:
            of_device = _devices.split_spec(self._window.axes)
            specs |= {"acc_grads": of_device, "weight": of_device}
        return MultiStepsState(**specs)

    def has_updated(self, state: optax.OptState) -> jax.Array:
        """Whether the last call emitted; see the function `has_updated`."""
        return has_updated(state)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Returns itself, for code written for `optax.MultiSteps`."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        w = self._window
        return type(self), (
            w.inner,
            w.every_k,
            w.use_grad_mean,
            w.should_skip,
            w.dtype,
            w.track_noise,
            w.axes or None,
        )

    def __repr__(self) -> str:
        w = self._window
        return (
            f"MultiSteps({w.inner!r}, every_k_schedule={w.every_k!r}, "
            f"use_grad_mean={w.use_grad_mean}, should_skip_update_fn={w.should_skip}, "
            f"accumulator_dtype={w.dtype}, track_noise={w.track_noise}, "
            f"data_axis={w.axes or None})"
        )


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
    emit: bool | None = None,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """`tx.update` and `optax.apply_updates` in one, at the floor of memory traffic.

    >>> import jax, jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(optax.adam(1e-3), 4)
    >>> step = jax.jit(functools.partial(ga.apply_gradients, tx), donate_argnums=(1, 2))
    >>> params = jnp.zeros(3)
    >>> state = tx.init(params)
    >>> for _ in range(4):
    ...     params, state = step(jnp.ones(3), state, params)
    >>> int(ga.stats(state).steps)
    1

    Donate `state` and `params`, as here, so that they are updated in place. In the
    window it reads `grads`, reads and writes the accumulator, and touches nothing else.

    **Exactness.** The same state, bit for bit, as `tx.update`. The parameters too, but
    for the last product and sum, `p + (-rate · u)`, which XLA may contract into one
    operation with one rounding.

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
        prevent the step (a weight, a skip function) is then an elementwise select.
      **extra_args: passed to the inner optimizer.

    Returns:
      The new parameters and the new state.

    Raises:
      ValueError: where trees, shapes or the weight do not fit; names the leaf.
      TypeError: where `emit` is no Python bool, or `tx` is not a `MultiSteps` and
        `emit` is given.
    """
    if emit is not None and not isinstance(emit, bool):
        raise TypeError(
            f"emit must be a Python bool or None, but it is {emit!r}. Count in the "
            "host loop and jit once for each value (static_argnames='emit'), or leave "
            "it out."
        )
    _checks.check_gradients(params, grads, expected="params")
    if isinstance(tx, MultiSteps):
        return tx._window.apply_gradients(
            grads, _check_state(state), params, weight, emit, extra_args
        )

    if emit is not None:
        raise TypeError(_need_multi_steps("emit", tx))
    if weight is not None:
        _find(state)  # raises where no MultiSteps inside would see the weight
        extra_args["weight"] = weight
    updates, state = optax.with_extra_args_support(tx).update(
        grads, state, params, **extra_args
    )
    return optax.apply_updates(params, updates), state


def flush(
    tx: MultiSteps, state: optax.OptState, params: optax.Params, **extra_args: Any
) -> tuple[optax.Params, optax.OptState]:
    """Closes a window early, with the mean over what it holds.

    For the end of an epoch, or of the run, where fewer than k micro-batches are left.

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
      **extra_args: passed to the inner optimizer.

    Returns:
      The new parameters and the new state.

    Raises:
      TypeError: where `tx` is not a `MultiSteps`.
      ValueError: where `params` does not fit the state; names the leaf.
    """
    if not isinstance(tx, MultiSteps):
        raise TypeError(_need_multi_steps("flush", tx))
    return tx._window.flush(_check_state(state), params, extra_args)


def has_updated(state: optax.OptState) -> jax.Array:
    """Whether the last call emitted: whether it was a step of the inner optimizer.

    False at the start, inside a window, after a skipped micro-step and after a window
    that was dropped.

    Args:
      state: the state of a `MultiSteps`, or any state that holds one, such as that of
        an `optax.chain`.

    Returns:
      A bool scalar.

    Raises:
      ValueError: where there is none in it, or more than one.
    """
    return _find(state).emitted


def stats(state: optax.OptState) -> Stats:
    """Reads the counters of a `MultiSteps` off its state, on the device.

    They are arrays of the state: read them, with `jax.device_get` for example, before
    you donate it to the next call.

    Args:
      state: the state of a `MultiSteps`, or any state that holds one.

    Returns:
      A `Stats` of scalars.

    Raises:
      ValueError: where there is none in it, or more than one.
    """
    state = _find(state)
    return Stats(
        micro_steps=state.micro_steps,
        steps=state.gradient_step,
        skipped_micro_steps=state.skipped_micro_steps,
        skipped_windows=state.skipped_windows,
        weight=jnp.sum(
            state.weight, axis=tuple(range(state.mini_step.ndim, state.weight.ndim))
        ),
        fill=state.mini_step,
    )


def from_optax(
    state: optax.OptState, *, use_grad_mean: bool = True, track_noise: bool = False
) -> optax.OptState:
    """Turns the state of `optax.MultiSteps` into ours, in the middle of a window too.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> params, grads = jnp.zeros(1), jnp.array([4.0])
    >>> theirs = optax.MultiSteps(optax.sgd(1.0), 2)
    >>> _, state = theirs.update(grads, theirs.init(params), params)
    >>> ours = ga.MultiSteps(optax.sgd(1.0), 2)
    >>> ours.update(jnp.array([2.0]), ga.from_optax(state), params)[0]
    Array([-3.], dtype=float32)

    **Exactness.** Optax keeps the running mean of the window; ours is the sum, hence
    one rounding: `mini_step` times that mean. Optax did not count micro-steps, so that
    counter starts with those of the open window. Nor did it square their gradients, so
    that `noise_scale` leaves the open window out.

    Args:
      state: an `optax.MultiStepsState`, or any state that holds some.
      use_grad_mean: what the `optax.MultiSteps` was made with.
      track_noise: what our `MultiSteps` is made with.

    Returns:
      The same state with each of them replaced by a `MultiStepsState`.

    Raises:
      ValueError: where there is none in it.
    """
    found = False

    def convert(leaf: Any) -> Any:
        nonlocal found
        if not isinstance(leaf, optax.MultiStepsState):
            return leaf
        found = True
        count = jnp.asarray(leaf.mini_step, jnp.int32)

        def total(a: ArrayLike) -> jax.Array:
            a = jnp.asarray(a)
            return a * count.astype(a.dtype) if use_grad_mean else a

        weight = count.astype(jnp.result_type(float))
        return MultiStepsState(
            mini_step=count,
            gradient_step=jnp.asarray(leaf.gradient_step, jnp.int32),
            inner_opt_state=leaf.inner_opt_state,
            acc_grads=jax.tree.map(total, leaf.acc_grads),
            skip_state=leaf.skip_state,
            weight=weight,
            emitted=(count == 0) & (jnp.asarray(leaf.gradient_step) > 0),
            micro_steps=jnp.copy(count),
            skipped_micro_steps=jnp.zeros([], jnp.int32),
            skipped_windows=jnp.zeros([], jnp.int32),
            noise=_noise.spoiled(_noise.init(weight), count > 0) if track_noise else (),
        )

    converted = jax.tree.map(
        convert, state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState)
    )
    if not found:
        raise ValueError(
            "from_optax needs an optax.MultiStepsState, or a state that holds one, but "
            f"it found none in a {type(state).__name__}. Pass the state that the "
            "optax.MultiSteps returned."
        )
    return converted


# -- The window ------------------------------------------------------------------------


class _Call(NamedTuple):
    """What a call was given beside the state, and what it returns.

    Attributes:
      grads: gradients with the dtypes that the bare optimizer would be given.
      params: the parameters, if known.
      extra_args: for the inner optimizer.
      idle: makes what is returned where there is no step.
      finish: makes what is returned of the updates of a step.
    """

    grads: optax.Updates
    params: optax.Params | None
    extra_args: dict[str, Any]
    idle: Callable[[], Any]
    finish: Callable[[optax.Updates], Any]


class _Outcome(NamedTuple):
    """What closing a window leaves: `out` is either the updates or the parameters."""

    out: Any
    inner_opt_state: optax.OptState
    skip_state: Any
    emitted: jax.Array
    noise: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Window:
    """The configuration of a `MultiSteps`, and the functions that close over it."""

    inner: optax.GradientTransformationExtraArgs
    every_k: int | Callable[[jax.Array], ArrayLike]
    use_grad_mean: bool
    should_skip: optax.ShouldSkipUpdateFunction | None
    dtype: np.dtype | None
    track_noise: bool
    axes: tuple[str, ...]

    @property
    def drops_windows(self) -> bool:
        return self.should_skip is drop_window_if_not_finite

    def init(self, params: optax.Params) -> MultiStepsState:
        acc = accumulator.init(params, self.dtype)
        held = self.held(acc)
        skip_state = ()
        if self.should_skip is not None:
            zeros = acc.total if self.drops_windows else optax.tree.zeros_like(params)
            skip_state = self.ask_to_skip(zeros, acc.count, params)[1]
        return MultiStepsState(
            mini_step=acc.count,
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=self.inner.init(params),
            acc_grads=() if self.every_k == 1 else held.total,
            skip_state=skip_state,
            weight=held.weight,
            emitted=jnp.zeros([], bool),
            micro_steps=jnp.zeros([], jnp.int32),
            skipped_micro_steps=jnp.zeros([], jnp.int32),
            skipped_windows=jnp.zeros([], jnp.int32),
            noise=_noise.init(acc.weight) if self.track_noise else (),
        )

    def held(self, acc: Accumulator) -> Accumulator:
        """An empty accumulator as the state holds it: a part for each device."""
        if not self.axes:
            return acc

        def zeros(acc: Accumulator) -> Accumulator:
            parts = jax.tree.map(lambda x: jnp.zeros_like(x)[None], acc)
            return _devices.vary(parts, self.axes)

        mesh = _devices.find_mesh(self.axes, None, acc.total)
        if mesh is None:
            return zeros(acc)
        split = _devices.split_spec(self.axes)
        return _devices.over_mesh(
            zeros, mesh, self.axes, (acc,), (PartitionSpec(),), split
        )

    def accumulator_of(self, state: MultiStepsState) -> Accumulator:
        """This device's accumulator."""
        acc = Accumulator(state.acc_grads, state.weight, state.mini_step)
        if not self.axes:
            return acc
        if _devices.find_mesh(self.axes, None) is not None:
            raise ValueError(
                f"With data_axis={self.axes} this must be called inside a "
                "jax.shard_map over that axis, with state_specs for the state, but it "
                "is called outside. Wrap the training step; or leave data_axis out "
                "where the compiler splits the batch."
            )
        for path, leaf in jax.tree_util.tree_flatten_with_path(acc)[0][:-1]:
            if jnp.shape(leaf)[:1] != (1,):
                raise ValueError(
                    "Inside the shard_map the state must hold this device's part of "
                    f"the accumulator, [1, ...], but {_checks.leaf_name(path)} has "
                    f"shape {jnp.shape(leaf)}. Pass state_specs as its in_specs."
                )
        total, weight = jax.tree.map(lambda x: x[0], (acc.total, acc.weight))
        return Accumulator(total, weight, acc.count)

    def check_of_device(self, call: _Call) -> None:
        """Raises where what came is not this device's own, or not the same on all."""
        if not self.axes or not _devices.checks_varying():
            return
        for path, leaf in jax.tree_util.tree_flatten_with_path(call.grads)[0]:
            reduced = set(self.axes) - _devices.varying(leaf)
            if reduced:
                raise ValueError(
                    "With a data_axis, grads must be those of one device, but "
                    f"{_checks.leaf_name(path)} is the same along "
                    f"{tuple(sorted(reduced))}: it is reduced already. Differentiate "
                    "with respect to the device's own copy of the parameters: "
                    "jax.lax.pcast(params, axis, to='varying')."
                )
        for path, leaf in jax.tree_util.tree_flatten_with_path(call.extra_args)[0]:
            own = set(self.axes) & _devices.varying(leaf)
            if own:
                raise ValueError(
                    "With a data_axis, extra arguments must be the same on all "
                    f"devices, but {_checks.leaf_name(path)} differs along "
                    f"{tuple(sorted(own))}. Reduce it, with jax.lax.pmean for example."
                )
        for path, leaf in jax.tree_util.tree_flatten_with_path(call.params)[0]:
            own = set(self.axes) & _devices.varying(leaf)
            if own:
                raise ValueError(
                    "With a data_axis, params must be the same on all devices, but "
                    f"{_checks.leaf_name(path)} differs along "
                    f"{tuple(sorted(own))}: the sums would mix its shards. Pass whole "
                    "parameters; or leave data_axis out where gradients of shards "
                    "come reduced."
                )

    def update(
        self,
        grads: optax.Updates,
        state: MultiStepsState,
        params: optax.Params | None = None,
        *,
        weight: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MultiStepsState]:
        """Adds a gradient; the updates are zero until the window closes."""
        state = _check_state(state)

        @functools.cache
        def bare() -> Any:
            return self.bare_updates(grads, state, params, extra_args)

        call = _Call(
            grads,
            params,
            extra_args,
            idle=lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), bare()),
            finish=lambda updates: _cast_like(updates, bare()),
        )
        return self.micro_step(call, state, weight, emit=None)

    def apply_gradients(
        self,
        grads: optax.Updates,
        state: MultiStepsState,
        params: optax.Params,
        weight: ArrayLike | None,
        emit: bool | None,
        extra_args: dict[str, Any],
    ) -> tuple[optax.Params, MultiStepsState]:
        call = self.call_that_applies(grads, state, params, extra_args)
        return self.micro_step(call, state, weight, emit)

    def flush(
        self, state: MultiStepsState, params: optax.Params, extra_args: dict[str, Any]
    ) -> tuple[optax.Params, MultiStepsState]:
        self.check_noise(state)
        if not jax.tree.leaves(state.acc_grads):
            return params, state
        acc = self.accumulator_of(state)
        _checks.check_gradients(acc.total, params, name="params", expected="the state")
        call = self.call_that_applies(params, state, params, extra_args)
        some = acc.count > 0
        acc = self.finished(acc, some)
        outcome = self.close(call, state, acc, some, weighted=True, static=False)
        flushed = self.next_state(state, acc, some, outcome)
        return outcome.out, flushed._replace(
            emitted=jnp.where(some, flushed.emitted, state.emitted)
        )

    def call_that_applies(
        self,
        grads: optax.Updates,
        state: MultiStepsState,
        params: optax.Params,
        extra_args: dict[str, Any],
    ) -> _Call:
        """A call that returns the parameters, with the updates applied to them."""

        def finish(updates: optax.Updates) -> optax.Params:
            bare = self.bare_updates(grads, state, params, extra_args)
            return optax.apply_updates(params, _cast_like(updates, bare))

        return _Call(grads, params, extra_args, idle=lambda: params, finish=finish)

    def micro_step(
        self,
        call: _Call,
        state: MultiStepsState,
        weight: ArrayLike | None,
        emit: bool | None,
    ) -> tuple[Any, MultiStepsState]:
        """One micro-step, and the step that may close the window."""
        self.check_noise(state)
        k = self.window_length(state.gradient_step)
        if emit is None and isinstance(k, int) and k == 1:
            emit = True

        acc = self.accumulator_of(state)
        self.check_of_device(call)
        structures = map(jax.tree.structure, ((), state.acc_grads, call.grads))
        empty, held, needed = structures
        keeps_nothing = held == empty != needed
        if keeps_nothing and not emit:
            raise ValueError(_NO_ACCUMULATOR)
        required = call.params if keeps_nothing else acc.total
        if required is not None:
            _checks.check_gradients(required, call.grads)
        if weight is not None:
            weight = _checks.check_weight(weight)

        skip: bool | jax.Array = False
        if self.should_skip is not None and not self.drops_windows:
            skip, skip_state = self.ask_to_skip(
                call.grads, state.gradient_step, call.params
            )
            if self.axes:  # all devices skip, or none
                skip, skip_state = jax.tree.map(
                    lambda x: jax.lax.pmax(x, self.axes),
                    _devices.vary((skip, skip_state), self.axes),
                )
            state = state._replace(skip_state=_cast_like(skip_state, state.skip_state))

        if keeps_nothing:
            acc = accumulator.init(call.grads, self.dtype)
        with jax.named_scope("ga_optax.accumulate"):
            acc = _select(skip, acc, accumulator.add(acc, call.grads, weight))
        if self.track_noise and not keeps_nothing:
            with jax.named_scope("ga_optax.noise"):
                empty = state.mini_step == 0
                noise = _noise.add(state.noise, call.grads, weight, empty)
                state = state._replace(noise=_select(skip, state.noise, noise))

        if emit is None:
            k = jnp.asarray(k)
            emits = acc.count.astype(k.dtype) >= k
        else:
            emits = emit
        closes = _and(emits, _not(skip))
        if not (keeps_nothing and weight is None):  # the mean of one is that one
            acc = self.finished(acc, closes)
        if emit and not self.axes:
            # Without the barrier XLA would fold the last addition into the optimizer,
            # which then reads the old sum after the new one has overwritten it, and
            # so copies it first.
            acc = jax.lax.optimization_barrier(acc)
        # Without a weight this micro-batch counts 1, so that the window's is not 0.
        weighted = weight is not None
        outcome = self.close(
            call, state, acc, closes, weighted, static=emit is not None
        )

        state = self.next_state(state, acc, closes, outcome)
        return outcome.out, state._replace(
            acc_grads=() if keeps_nothing else state.acc_grads,
            micro_steps=_count(state.micro_steps, _not(skip)),
            skipped_micro_steps=_count(state.skipped_micro_steps, skip),
        )

    def finished(self, acc: Accumulator, closes: bool | jax.Array) -> Accumulator:
        """Puts the mean into the place of the sum where the window closes.

        Here the division is part of the pass that adds the gradient. In the branch of
        the cond it would be a pass of its own, over a second buffer. And it is the last
        thing that happens: XLA computes a division once, and anything cheaper that
        follows it again for each reader, out of a sum that it has to copy for that.
        """
        if not self.use_grad_mean or closes is False or self.axes:
            return acc
        divide = functools.partial(accumulator.divide, weight=acc.weight)
        return _select(closes, acc._replace(total=jax.tree.map(divide, acc.total)), acc)

    def merged(self, acc: Accumulator) -> Accumulator:
        """What the devices hold together, as `finished` leaves it on one."""
        if not self.axes:
            return acc
        with jax.named_scope("ga_optax.merge"):
            acc = _devices.merge_across(acc, self.axes)
        if not self.use_grad_mean:
            return acc
        divide = functools.partial(accumulator.divide, weight=acc.weight)
        return acc._replace(total=jax.tree.map(divide, acc.total))

    def close(
        self,
        call: _Call,
        state: MultiStepsState,
        acc: Accumulator,
        closes: bool | jax.Array,
        weighted: bool,
        static: bool,
    ) -> _Outcome:
        """Runs the inner optimizer where the window `closes`; else leaves everything.

        It does not run where the window has weight 0, or is dropped.
        """

        def leave(skip_state: Any) -> _Outcome:
            no = jnp.zeros_like(state.emitted)
            idle = call.idle()
            return _Outcome(idle, state.inner_opt_state, skip_state, no, state.noise)

        def step(acc: Accumulator, skip_state: Any) -> _Outcome:
            with jax.named_scope("ga_optax.update"):
                updates, inner = self.inner.update(
                    self.gradients_for_inner(call, state, acc.total),
                    state.inner_opt_state,
                    call.params,
                    **call.extra_args,
                )
                inner = _cast_like(inner, state.inner_opt_state)
                yes = jnp.ones_like(state.emitted)
                out = call.finish(updates)
                return _Outcome(out, inner, skip_state, yes, self.noise(state, acc))

        def step_if_finite(acc: Accumulator) -> _Outcome:
            drop, skip_state = self.ask_to_skip(
                acc.total, state.gradient_step, call.params
            )
            skip_state = _cast_like(skip_state, state.skip_state)
            return _when(
                ~drop, lambda: step(acc, skip_state), lambda: leave(skip_state), static
            )

        def run(acc: Accumulator) -> _Outcome:
            if self.drops_windows:
                return step_if_finite(acc)
            return step(acc, state.skip_state)

        def stay() -> _Outcome:
            return leave(state.skip_state)

        if not self.axes:
            runs = _and(closes, acc.weight > 0) if weighted else closes
            return _when(runs, lambda: run(acc), stay, static)

        def run_merged() -> _Outcome:
            # Only the sum over all devices says whether there is any weight.
            all_of_them = self.merged(acc)
            some = all_of_them.weight > 0 if weighted else True
            return _when(some, lambda: run(all_of_them), stay, static)

        return _when(closes, run_merged, stay, static)

    def check_noise(self, state: MultiStepsState) -> None:
        if self.track_noise and not isinstance(state.noise, _noise.NoiseState):
            raise ValueError(_NO_NOISE)

    def noise(self, state: MultiStepsState, acc: Accumulator) -> Any:
        """What `noise_scale` reads, after a window that ran the inner optimizer."""
        if not self.track_noise or not jax.tree.leaves(state.acc_grads):
            return state.noise
        with jax.named_scope("ga_optax.noise"):
            return _noise.close(state.noise, acc.total, acc.weight, self.use_grad_mean)

    def gradients_for_inner(
        self, call: _Call, state: MultiStepsState, grads: optax.Updates
    ) -> optax.Updates:
        """What the inner optimizer sees: the accumulator's dtype, where it can take it.

        Some optimizers have branches or scatters of their own, whose dtypes agree only
        where gradients, parameters and state have one dtype (`galore`, `novograd`,
        `apply_if_finite` for bfloat16). Tracing them with the wide gradients says so.
        They get what they would be given alone: the gradients' dtypes.
        """
        narrow = _cast_like(grads, call.grads)
        if jax.tree.map(jnp.result_type, narrow) == jax.tree.map(
            jnp.result_type, grads
        ):
            return grads
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                self.bare_updates(grads, state, call.params, call.extra_args)
        except (TypeError, ValueError, FutureWarning):
            return narrow
        return grads

    def next_state(
        self,
        state: MultiStepsState,
        acc: Accumulator,
        closes: bool | jax.Array,
        outcome: _Outcome,
    ) -> MultiStepsState:
        """The state after the call; nothing resets `acc.total`."""
        if self.axes:
            parts = jax.tree.map(lambda x: x[None], (acc.total, acc.weight))
            total, weight = _devices.vary(parts, self.axes)
            acc = Accumulator(total, weight, acc.count)
        return state._replace(
            mini_step=jnp.where(closes, jnp.zeros_like(acc.count), acc.count),
            gradient_step=_count(state.gradient_step, outcome.emitted),
            inner_opt_state=outcome.inner_opt_state,
            acc_grads=acc.total,
            skip_state=outcome.skip_state,
            weight=jnp.where(closes, jnp.zeros_like(acc.weight), acc.weight),
            emitted=outcome.emitted,
            skipped_windows=_count(state.skipped_windows, closes & ~outcome.emitted),
            noise=outcome.noise,
        )

    def bare_updates(
        self,
        grads: optax.Updates,
        state: MultiStepsState,
        params: optax.Params | None,
        extra_args: dict[str, Any],
    ) -> Any:
        """The shapes and dtypes of what the inner optimizer alone would return."""

        def bare(grads: optax.Updates, inner: optax.OptState, params: Any) -> Any:
            return self.inner.update(grads, inner, params, **extra_args)[0]

        if self.axes:  # of one device here, and of all of them there
            grads = jax.tree.map(
                lambda g: jax.ShapeDtypeStruct(g.shape, jnp.result_type(g)), grads
            )
        return jax.eval_shape(bare, grads, state.inner_opt_state, params)

    def window_length(self, step: jax.Array) -> int | jax.Array:
        """The k of this step: an int where it is known."""
        if isinstance(self.every_k, int):
            return self.every_k
        k = self.every_k(step)
        if isinstance(k, int) and not isinstance(k, bool):
            return _check_every_k(k)
        dtype, shape = jnp.result_type(k), jnp.shape(k)
        number = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(
            dtype, jnp.floating
        )
        if shape != () or not number:
            raise ValueError(
                "every_k_schedule must return an integer scalar, but it returned "
                f"{dtype}{list(shape)}. Return the number of micro-steps in the "
                "window that the step belongs to."
            )
        return jnp.asarray(k)

    def ask_to_skip(
        self, updates: optax.Updates, step: jax.Array, params: optax.Params | None
    ) -> tuple[jax.Array, Any]:
        """Calls `should_skip_update_fn`, and checks what it returns."""
        assert self.should_skip is not None
        answer = self.should_skip(updates, step, params)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ValueError(
                "should_skip_update_fn must return the pair (skip, skip_state), but it "
                f"returned {answer!r}. Where there is nothing to keep, return "
                "(skip, ())."
            )
        skip, skip_state = answer
        dtype, shape = jnp.result_type(skip), jnp.shape(skip)
        if (dtype, shape) != (jnp.bool_, ()):
            raise ValueError(
                "The `should_skip_update_fn` function should return a boolean scalar "
                f"array, but it returned an array of dtype {dtype} and shape {shape}. "
                "Compare and reduce, with jnp.any for example."
            )
        return jnp.asarray(skip), skip_state


# -- Selecting, casting, counting ------------------------------------------------------


def _when(
    pred: bool | jax.Array,
    do: Callable[[], _Outcome],
    leave: Callable[[], _Outcome],
    static: bool,
) -> _Outcome:
    """`do()` where `pred`, `leave()` elsewhere; a `static` program has no cond."""
    if isinstance(pred, bool):
        return do() if pred else leave()
    if static:
        return _select(pred, do(), leave())
    return jax.lax.cond(pred, do, leave)


def _select(pred: bool | jax.Array, on_true: Any, on_false: Any) -> Any:
    if isinstance(pred, bool):
        return on_true if pred else on_false
    return jax.tree.map(lambda t, f: jnp.where(pred, t, f), on_true, on_false)


def _and(a: bool | jax.Array, b: bool | jax.Array) -> bool | jax.Array:
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def _not(a: bool | jax.Array) -> bool | jax.Array:
    return not a if isinstance(a, bool) else ~a


def _count(counter: jax.Array, happened: bool | jax.Array) -> jax.Array:
    return jnp.where(happened, accumulator.increment(counter), counter)


def _cast_like(tree: Any, like: Any) -> Any:
    """Gives each leaf the dtype of its leaf in `like`: states must not drift."""

    def cast(x: Any, y: Any) -> Any:
        x, dtype = jnp.asarray(x), jax.dtypes.result_type(y)
        return x if x.dtype == dtype else x.astype(dtype)

    return jax.tree.map(cast, tree, like)


# -- Finding and checking --------------------------------------------------------------


def find_states(state: optax.OptState) -> dict[str, MultiStepsState]:
    """Every `MultiStepsState` in a tree, by its path."""
    nodes = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, MultiStepsState)
    )[0]
    return {
        jax.tree_util.keystr(path): node
        for path, node in nodes
        if isinstance(node, MultiStepsState)
    }


def _find(state: optax.OptState) -> MultiStepsState:
    """The one `MultiStepsState` in a tree."""
    found = find_states(state)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ValueError(
            f"There must be one MultiStepsState in the state, but there are "
            f"{len(found)}: {', '.join(found)}. Pass the one that you mean."
        )
    theirs = jax.tree.leaves(
        state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState)
    )
    hint = "Wrap the optimizer in ga_optax.MultiSteps."
    if any(isinstance(leaf, optax.MultiStepsState) for leaf in theirs):
        hint = "There is one of Optax's: convert it with ga_optax.from_optax."
    raise ValueError(
        "There must be a MultiStepsState of ga_optax in the state, but there is none "
        f"in a {type(state).__name__}. {hint}"
    )


def _need_multi_steps(what: str, tx: Any) -> str:
    return (
        f"{what} needs tx to be a ga_optax.MultiSteps, but it is a "
        f"{type(tx).__name__}. Put the other transformations inside: "
        "MultiSteps(optax.chain(...), k)."
    )


_NO_ACCUMULATOR = (
    "The state must hold an accumulator where a window has more than one micro-step, "
    "but its acc_grads is empty: it was made with every_k_schedule=1. Make a new state "
    "with init, and give it the inner_opt_state and counters of this one (_replace)."
)


_NO_NOISE = (
    "The state must hold a NoiseState where track_noise=True, but its field noise is "
    "empty: it was made without. Put the noise of a new state into this one while no "
    "window is open: state._replace(noise=tx.init(params).noise)."
)


def _check_state(state: Any) -> MultiStepsState:
    if isinstance(state, MultiStepsState):
        return state
    hint = "Pass what init or the last call returned."
    if isinstance(state, optax.MultiStepsState):
        hint = "Convert it with ga_optax.from_optax."
    raise TypeError(
        "state must be a MultiStepsState of ga_optax, but it is a "
        f"{type(state).__module__}.{type(state).__name__}. {hint}"
    )


def _check_every_k(k: Any) -> Any:
    """Returns k, an int of at least 1 or a function, or raises."""
    todo = "Pass the number of micro-steps in a window, or a function of the step."
    if isinstance(k, numbers.Integral) and not isinstance(k, (bool, np.bool_)):
        if k < 1:
            raise ValueError(
                f"every_k_schedule must be at least 1, but it is {k}. {todo}"
            )
        return int(k)
    if not callable(k):
        raise TypeError(
            "every_k_schedule must be an int or a function, but it is "
            f"{k!r} of type {type(k).__name__}. {todo}"
        )
    return k
