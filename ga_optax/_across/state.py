"""The state of `MultiSteps`: its fields, what reads them, its form in Optax.

total, weight, count  =  Σ w·g, Σ w and the micro-steps of the window so far
"""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .. import _text, accumulator
from .._checks import nodes_of
from .choices import Predicate, count_if

# == The state =========================================================================

# The entries of `MultiStepsState.counters`. Each leaf of a state adds to the time of a
# call, so these rarely read numbers share one leaf.
COUNTERS = ("emitted", "micro_steps", "skipped_micro_steps", "skipped_windows")

# The option that adds each of these fields to a state.
OPTIONS = {
    "skip_state": "should_skip_update_fn",
    "drop_state": "should_drop_window_fn",
    "arg_totals": "mean_argnames",
    "grad_norm": "track_norm=True",
}


class MultiStepsState(NamedTuple):
    """State of `MultiSteps`.

    `mini_step`, `gradient_step`, `inner_opt_state` and `skip_state` are fields of
    Optax's state too. `acc_grads`, a field of Optax's state, is a property here, read
    from `total`. `emitted`, `micro_steps`, `skipped_micro_steps` and `skipped_windows`
    are properties, read from `counters`.

    Attributes:
      mini_step: micro-steps in the open window, int32 `[]`.
      gradient_step: steps, that is updates of the inner optimizer, int32 `[]`.
      inner_opt_state: the state of the inner optimizer.
      total: Σ w·g over the open window, with the shapes of the parameters. While
        `mini_step` is 0, `total` holds a leftover of the last step (the gradient given
        to the inner optimizer, or the updates), and the next micro-step overwrites it.
        `()` if a static k of 1 needs no sum. With a `data_axis`, the sum of each
        device, `[devices, ...]` (`[1, ...]` inside the `shard_map`), also after a step.
      skip_state: the last state returned by `should_skip_update_fn`.
      drop_state: the last state returned by `should_drop_window_fn`.
      weight: Σ w over the open window, a float `[]`; with a `data_axis` one for each
        device, `[devices]`.
      counters: `COUNTERS`, int32 `[4]`: 1 if the last call emitted, else 0;
        micro-steps accumulated since `init`; micro-steps that `should_skip_update_fn`
        left out; and windows that closed without a step, because they were dropped or
        had weight 0.
      arg_totals: Σ w·x over the open window for each extra argument in
        `mean_argnames`, by name, as floats `[]`. While `mini_step` is 0, the last mean
        given to the inner optimizer. With a `data_axis`, one for each device.
      grad_norm: the norm of the last gradient given to the inner optimizer, a float
        `[]`; 0 before the first step, and `()` without `track_norm`.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    inner_opt_state: optax.OptState
    total: optax.Updates
    skip_state: Any
    drop_state: Any
    weight: jax.Array
    counters: jax.Array
    arg_totals: dict[str, jax.Array]
    grad_norm: Any = ()

    @property
    def emitted(self) -> jax.Array:
        """True if the last call emitted, bool `[]`."""
        return self._read("emitted") != 0

    @property
    def micro_steps(self) -> jax.Array:
        """Micro-steps accumulated since `init`, int32 `[]`."""
        return self._read("micro_steps")

    @property
    def skipped_micro_steps(self) -> jax.Array:
        """Micro-steps that `should_skip_update_fn` left out, int32 `[]`."""
        return self._read("skipped_micro_steps")

    @property
    def skipped_windows(self) -> jax.Array:
        """Windows that closed without a step, int32 `[]`."""
        return self._read("skipped_windows")

    def __repr__(self) -> str:
        return _text.repr_of(type(self).__name__, self._asdict())

    def _read(self, name: str) -> jax.Array:
        counters, i = self.counters, COUNTERS.index(name)
        traced = isinstance(counters, jax.core.Tracer)
        if not traced and not getattr(counters, "is_fully_addressable", True):
            counters = counters.addressable_data(0)  # all devices have equal counters
        return _read(counters, i)

    def counting(self, **events: Predicate) -> "MultiStepsState":
        """The state with the counter of each event that happened increased."""
        is_reset = np.array([name == "emitted" for name in COUNTERS])
        counters = jnp.where(is_reset, 0, self.counters)
        happened = [jnp.asarray(events.get(name, False)) for name in COUNTERS]
        return self._replace(counters=count_if(jnp.stack(happened, -1), counters))

    @property
    def acc_grads(self) -> optax.Updates:
        """The mean so far, as Optax's field of this name; zeros between windows.

        With `use_grad_mean=False`, the sum so far.

        Raises:
          AttributeError: if there is no sum, or one for each device.
        """
        weight = self.weight
        if not jax.tree.leaves(self.total) or jnp.ndim(weight):
            raise AttributeError(
                "acc_grads must be computed from one sum of gradients, but this state "
                "holds no sum (every_k_schedule=1), or one for each device (data_axis)."
                " Read the gradient itself, or total and weight."
            )
        if isinstance(self, SummedState):
            weight = (weight != 0).astype(weight.dtype)  # 0 between windows, else 1
        return jax.tree.map(lambda t: accumulator.average(t, weight), self.total)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _read(counters: jax.Array, i: int) -> jax.Array:
    """Returns one counter. Without this jit, indexing would take ten times as long."""
    return counters[..., i]


class SummedState(MultiStepsState):
    """The state of a `MultiSteps` with `use_grad_mean=False`."""

    __slots__ = ()


class Stats(NamedTuple):
    """Counters of a run, see `stats`.

    Attributes:
      micro_steps: micro-steps accumulated since `init`, in closed windows and in the
        open one.
      steps: updates of the inner optimizer.
      skipped_micro_steps: micro-steps that `should_skip_update_fn` left out.
      skipped_windows: windows that closed without a step, because they were dropped or
        had weight 0.
      weight: Σ w of the open window, over all devices if the state is whole.
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
        """The number of skipped micro-steps and skipped windows."""
        return self.skipped_micro_steps + self.skipped_windows

    def __repr__(self) -> str:
        return _text.repr_of(type(self).__name__, self._asdict())


def has_updated(state: optax.OptState) -> jax.Array:
    """True if the last call emitted, that is took a step of the inner optimizer.

    False at the start, inside a window, after a skipped micro-step and after a dropped
    window.

    Args:
      state: the state of a `MultiSteps`, or any state that holds one, such as the state
        of an `optax.chain`.

    Returns:
      A bool scalar.

    Raises:
      ValueError: if `state` does not hold exactly one `MultiStepsState`.
    """
    return find_state(state).emitted


def stats(state: optax.OptState) -> Stats:
    """Returns the counters in the state of a `MultiSteps`, on the device.

    The counters are arrays of the state. Read them, with `jax.device_get` for example,
    before you donate the state to the next call.

    Args:
      state: the state of a `MultiSteps`, or any state that holds one.

    Returns:
      A `Stats` of scalars.

    Raises:
      ValueError: if `state` does not hold exactly one `MultiStepsState`.
    """
    state = find_state(state)
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


def grad_norm(state: optax.OptState) -> jax.Array:
    """The norm of the gradient of the last step, before the inner optimizer clips it.

    Inside a window, and after a window without a step, the norm of the step before;
    0 before the first step.

    Args:
      state: the state of a `MultiSteps` with `track_norm=True`, or any state that
        holds one.

    Returns:
      A float scalar.

    Raises:
      ValueError: if `state` does not hold exactly one `MultiStepsState`, or this one
        has no norm.
    """
    norm = find_state(state).grad_norm
    if not jax.tree.leaves(norm):
        raise ValueError(
            "The state must come from a MultiSteps with track_norm=True, but the field "
            "grad_norm is empty. Make the MultiSteps with that option, and a new state "
            "with init."
        )
    return norm


def state_type(use_grad_mean: bool) -> type[MultiStepsState]:
    """The type of the state of a `MultiSteps`."""
    return MultiStepsState if use_grad_mean else SummedState


# -- Search in a tree ------------------------------------------------------------------


def find_state(state: optax.OptState) -> MultiStepsState:
    """Returns the one `MultiStepsState` in a tree.

    Raises:
      ValueError: if there is no such state, or more than one.
    """
    states = some_states(state)
    if len(states) > 1:
        raise ValueError(
            "There must be one MultiStepsState in the state, but there are "
            f"{len(states)}: {', '.join(states)}. Pass one of them."
        )
    return next(iter(states.values()))


OF_OTHERS = (
    "Convert a state of Optax with ga_optax.from_optax. A checkpoint that was restored "
    "without a target must be restored into the structure of tx.init(params)."
)


def some_states(state: optax.OptState) -> dict[str, MultiStepsState]:
    """Every `MultiStepsState` in a tree, by path; raises if there is none."""
    if states := nodes_of(MultiStepsState, state):
        return states
    raise ValueError(
        "There must be a MultiStepsState of ga_optax in the state, but there is none "
        f"in this {type(state).__name__}. Wrap the optimizer in ga_optax.MultiSteps. "
        f"{OF_OTHERS}"
    )


# The names of the fields in which transformations of Optax count their calls.
_COUNTS = {"count", "mini_step", "step", "step_count", "steps_since_sync"}


def warn_of_counts(state: optax.OptState) -> None:
    """Warns if a transformation around or beside a `MultiSteps` counts micro-steps.

    In an `optax.chain` each transformation sees every call, and so does each schedule
    of an `optax.inject_hyperparams`. Each group of an `optax.partition` is a separate
    optimizer.
    """

    def is_window(node: Any) -> bool:
        return isinstance(node, MultiStepsState)

    leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_window)[0]
    windows = [path for path, x in leaves if is_window(x) and jax.tree.leaves(x.total)]
    paths = [path for path, _ in leaves if path]
    counts = [path for path in paths if getattr(path[-1], "name", "") in _COUNTS]
    outside = [
        jax.tree_util.keystr(path)
        for path in counts
        if any(_counts_calls(path, window) for window in windows)
    ]
    if outside:
        warnings.warn(
            "Transformations that count steps must be inside of the MultiSteps, but "
            f"the state counts micro-steps at {', '.join(outside)}. To let a schedule "
            "count steps, use MultiSteps(optax.chain(...), k).",
            stacklevel=3,
        )


def _counts_calls(count: tuple[Any, ...], window: tuple[Any, ...]) -> bool:
    """True if a counter is in a transformation around a window, or beside it."""
    same = [a == b for a, b in zip(count, window, strict=False)]
    at = same.index(False) if False in same else len(same)
    key, parent = count[at], count[at - 1] if at else None
    if isinstance(key, jax.tree_util.GetAttrKey):
        # An inject_hyperparams always has a `count`, read by its schedules alone.
        return key.name in {"hyperparams_states", *_COUNTS} - {"count"}
    return getattr(parent, "name", "") != "inner_states"


def new_counters(emitted: ArrayLike = 0, micro_steps: ArrayLike = 0) -> jax.Array:
    """The counters of a new state, or of a state of Optax."""
    counters = jnp.broadcast_arrays(emitted, micro_steps, 0, 0)
    return jnp.stack([x.astype(jnp.int32) for x in counters], -1)


ORDER = (
    "The order is apply_gradients(tx, grads, state, params), tx.update(grads, state, "
    "params), and flush(tx, state, params)."
)


def check_order(**trees: Any) -> None:
    """Raises if a tree is, or holds, the state: the arguments were swapped."""
    for name, tree in trees.items():
        for path in nodes_of(MultiStepsState, tree):
            raise TypeError(
                f"{name} must not hold the state of a MultiSteps, but there is one at "
                f"{path or 'the top'}. Were arguments swapped? {ORDER}"
            )


# == States of Optax ===================================================================


def from_optax(state: optax.OptState, *, use_grad_mean: bool = True) -> optax.OptState:
    """Converts the state of an `optax.MultiSteps`, in the middle of a window too.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> params, grads = jnp.zeros(1), jnp.array([4.0])
    >>> theirs = optax.MultiSteps(optax.sgd(1.0), 2)
    >>> _, state = theirs.update(grads, theirs.init(params), params)
    >>> ours = ga.MultiSteps(optax.sgd(1.0), 2)
    >>> ours.update(jnp.array([2.0]), ga.from_optax(state), params)[0]
    Array([-3.], dtype=float32)

    **Exactness.** Optax keeps the running mean of the window. This library keeps the
    sum, `mini_step` times the mean: one rounding. Optax does not count micro-steps, so
    that counter starts with the micro-steps of the open window. Optax does not sum
    extra arguments either, so begin with `mean_argnames` between two windows.

    Args:
      state: an `optax.MultiStepsState`, or a state that holds one or more.
      use_grad_mean: the `use_grad_mean` of the `optax.MultiSteps`.

    Returns:
      `state` with a `MultiStepsState` in the place of every `optax.MultiStepsState`.

    Raises:
      ValueError: if `state` holds no `optax.MultiStepsState`.
    """
    if not nodes_of(optax.MultiStepsState, state):
        raise ValueError(
            "from_optax needs an optax.MultiStepsState, or a state that holds one, but "
            f"there is none in this {type(state).__name__}. Pass the state that the "
            "optax.MultiSteps returned."
        )

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, optax.MultiStepsState):
            return leaf
        count = jnp.asarray(leaf.mini_step, jnp.int32)
        steps = jnp.asarray(leaf.gradient_step, jnp.int32)

        def total(a: ArrayLike) -> jax.Array:
            a = jnp.asarray(a)
            return a * count.astype(a.dtype) if use_grad_mean else a

        return state_type(use_grad_mean)(
            mini_step=count,
            gradient_step=steps,
            inner_opt_state=leaf.inner_opt_state,
            total=jax.tree.map(total, leaf.acc_grads),
            skip_state=leaf.skip_state,
            drop_state=(),
            weight=count.astype(jnp.result_type(float)),
            counters=new_counters((count == 0) & (steps > 0), count),
            arg_totals={},
        )

    return jax.tree.map(
        convert, state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState)
    )
