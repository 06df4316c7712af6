"""The state of `MultiSteps`: what it holds, and what reads it."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ga_optax import accumulator
from ga_optax._across.choices import Predicate, count_if
from ga_optax._checks import nodes_of

# What `MultiStepsState.counters` holds: each leaf of a state adds to the time of a
# call, so numbers that few read share one.
COUNTERS = ("emitted", "micro_steps", "skipped_micro_steps", "skipped_windows")

# The option that makes a state hold each of these fields.
OPTIONS = {
    "skip_state": "should_skip_update_fn",
    "drop_state": "should_drop_window_fn",
    "arg_totals": "mean_argnames",
    "grad_norm": "track_norm=True",
}


class MultiStepsState(NamedTuple):
    """State of `MultiSteps`.

    `mini_step`, `gradient_step`, `inner_opt_state` and `skip_state` are fields of
    Optax's state too. Its `acc_grads` is a property here, computed of `total`; so are
    `emitted`, `micro_steps`, `skipped_micro_steps` and `skipped_windows`, which are
    read off `counters`.

    Attributes:
      mini_step: micro-steps in the open window, int32 `[]`.
      gradient_step: steps, that is updates of the inner optimizer, int32 `[]`.
      inner_opt_state: the state of the inner optimizer.
      total: Σ w·g over the open window, with the shapes of the parameters. While
        `mini_step` is 0 it holds what the last step left there (the gradient that the
        inner optimizer saw, or the updates that it made), and the next micro-step
        overwrites it. `()` if a static k of 1 needs none. With a `data_axis` it
        is the sum of each device, `[devices, ...]`, `[1, ...]` inside the `shard_map`,
        also after a step.
      skip_state: what `should_skip_update_fn` returned last.
      drop_state: what `should_drop_window_fn` returned last.
      weight: Σ w over the open window, a float `[]`; with a `data_axis` one for each
        device, `[devices]`.
      counters: `COUNTERS`, int32 `[4]`: 1 if the last call emitted, else 0;
        micro-steps accumulated since `init`; micro-steps that `should_skip_update_fn`
        left out; and windows that closed without a step, because they were dropped or
        had weight 0.
      arg_totals: Σ w·x over the open window of each extra argument that
        `mean_argnames` names, by name, as floats `[]`. While `mini_step` is 0, the mean
        that the inner optimizer saw last. With a `data_axis` as `total`.
      grad_norm: the norm of the gradient that the inner optimizer saw last, a float
        `[]`; 0 before its first step, and `()` without `track_norm`.
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
        """Whether the last call emitted, bool `[]`."""
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

    def _read(self, name: str) -> jax.Array:
        counters, i = self.counters, COUNTERS.index(name)
        traced = isinstance(counters, jax.core.Tracer)
        if not traced and not getattr(counters, "is_fully_addressable", True):
            counters = counters.addressable_data(0)  # the same everywhere
        return _read(counters, i)

    def counting(self, **happened: Predicate) -> "MultiStepsState":
        """The state after a call in which some of what it counts happened."""
        of_this_call = np.array([name == "emitted" for name in COUNTERS])
        counters = jnp.where(of_this_call, 0, self.counters)
        events = [jnp.asarray(happened.get(name, False)) for name in COUNTERS]
        return self._replace(counters=count_if(jnp.stack(events, -1), counters))

    @property
    def acc_grads(self) -> optax.Updates:
        """What Optax keeps under this name: the mean so far; zeros between windows.

        With `use_grad_mean=False` it is the sum so far.

        Raises:
          AttributeError: if there is no sum, or one for each device.
        """
        weight = self.weight
        if not jax.tree.leaves(self.total) or jnp.ndim(weight):
            raise AttributeError(
                "acc_grads must be computed of one sum of gradients, but this state "
                "holds none (every_k_schedule=1), or one for each device (data_axis). "
                "Read the gradient itself, or total and weight."
            )
        if isinstance(self, SummedState):
            weight = (weight != 0).astype(weight.dtype)  # 0 between windows, else 1
        return jax.tree.map(lambda t: accumulator.average(t, weight), self.total)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _read(counters: jax.Array, i: int) -> jax.Array:
    """A counter; outside of a trace indexing would take ten times as long."""
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
      weight: Σ w of the open window. If the state is whole, it is over all devices.
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
      ValueError: if there is none in it, or more than one.
    """
    return find_state(state).emitted


def stats(state: optax.OptState) -> Stats:
    """Reads the counters of a `MultiSteps` off its state, on the device.

    They are arrays of the state. Read them, with `jax.device_get` for example, before
    you donate the state to the next call.

    Args:
      state: the state of a `MultiSteps`, or any state that holds one.

    Returns:
      A `Stats` of scalars.

    Raises:
      ValueError: if there is none in it, or more than one.
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
    """The norm of the gradient of the last step, as the inner optimizer saw it.

    So it is that before the inner optimizer clips. Inside a window, and after one that
    was no step, it is that of the step before; 0 before the first.

    Args:
      state: the state of a `MultiSteps` with `track_norm=True`, or any that holds one.

    Returns:
      A float scalar.

    Raises:
      ValueError: if there is none in it, or more than one, or if it tracks no norm.
    """
    return find_state(state, "grad_norm").grad_norm


def state_type(use_grad_mean: bool) -> type[MultiStepsState]:
    """The type of the state of a `MultiSteps`."""
    return MultiStepsState if use_grad_mean else SummedState


# -- Finding it ------------------------------------------------------------------------


def find_state(state: optax.OptState, field: str | None = None) -> MultiStepsState:
    """The one `MultiStepsState` in a tree; raises if there is none, or another.

    If a field is given, it is the one that holds something there.
    """
    found = some_states(state)
    if field is not None:
        full = {path: jax.tree.leaves(getattr(x, field)) for path, x in found.items()}
        found = {path: x for path, x in found.items() if full[path]}
        if not found:
            raise ValueError(
                f"The state must be that of a MultiSteps with {OPTIONS[field]}, but "
                f"there is none whose field {field} holds anything. Make one with "
                "that, and its init."
            )
    if len(found) > 1:
        raise ValueError(
            "There must be one MultiStepsState in the state, but there are "
            f"{len(found)}: {', '.join(found)}. Pass the one that you mean."
        )
    return next(iter(found.values()))


def some_states(state: optax.OptState) -> dict[str, MultiStepsState]:
    """Every `MultiStepsState` in a tree, by its path; raises if there is none."""
    if found := nodes_of(MultiStepsState, state):
        return found
    hint = "Wrap the optimizer in ga_optax.MultiSteps."
    if nodes_of(optax.MultiStepsState, state):
        hint = "There is one of Optax's: convert it with ga_optax.from_optax."
    raise ValueError(
        "There must be a MultiStepsState of ga_optax in the state, but there is none "
        f"in a {type(state).__name__}. {hint}"
    )


# What optimizers of Optax call the number of their calls.
_COUNTS = {"count", "mini_step", "step", "step_count", "steps_since_sync"}


def warn_of_counts(state: optax.OptState) -> None:
    """Warns if a transformation around or beside a `MultiSteps` counts micro-steps.

    In an `optax.chain` each transformation sees every call, and so does each schedule
    of an `optax.inject_hyperparams`. The groups of an `optax.partition` are optimizers
    of their own.
    """

    def is_one(node: Any) -> bool:
        return isinstance(node, MultiStepsState)

    leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_one)[0]
    windows = [path for path, x in leaves if is_one(x) and jax.tree.leaves(x.total)]
    paths = [path for path, _ in leaves if path]
    counts = [path for path in paths if getattr(path[-1], "name", "") in _COUNTS]
    found = [
        jax.tree_util.keystr(path)
        for path in counts
        if any(_counts_calls(path, window) for window in windows)
    ]
    if found:
        warnings.warn(
            "What counts steps must be inside of the MultiSteps, but the state counts "
            f"micro-steps at {', '.join(found)}. If a schedule is meant to count "
            "steps, use MultiSteps(optax.chain(...), k).",
            stacklevel=3,
        )


def _counts_calls(count: tuple[Any, ...], window: tuple[Any, ...]) -> bool:
    """True if a count stands beside a window in a chain, or around it."""
    same = [a == b for a, b in zip(count, window, strict=False)]
    at = same.index(False) if False in same else len(same)
    here, before = count[at], count[at - 1] if at else None
    if isinstance(here, jax.tree_util.GetAttrKey):
        # An inject_hyperparams counts always, and reads that for its schedules alone.
        return here.name in {"hyperparams_states", *_COUNTS} - {"count"}
    return getattr(before, "name", "") != "inner_states"


def new_counters(emitted: ArrayLike = 0, micro_steps: ArrayLike = 0) -> jax.Array:
    """The counters of a state before its first call, or of one that did not count."""
    counters = jnp.broadcast_arrays(emitted, micro_steps, 0, 0)
    return jnp.stack([x.astype(jnp.int32) for x in counters], -1)


ORDER = (
    "The order is apply_gradients(tx, grads, state, params), tx.update(grads, state, "
    "params), and flush(tx, state, params)."
)


def check_order(**trees: Any) -> None:
    """Raises if one of the trees is, or holds, the state: they were swapped."""
    for name, tree in trees.items():
        for path in nodes_of(MultiStepsState, tree):
            raise TypeError(
                f"{name} must not hold the state of a MultiSteps, but there is one at "
                f"{path or 'its top'}. Swapped? {ORDER}"
            )


def check_state(state: Any) -> MultiStepsState:
    """Returns `state` if it is a `MultiStepsState`, or raises."""
    if isinstance(state, MultiStepsState):
        _check_counters(state.counters)
        return state
    hint = "Pass what init or the last call returned."
    if isinstance(state, optax.MultiStepsState):
        hint = "Convert it with ga_optax.from_optax."
    raise TypeError(
        "state must be a MultiStepsState of ga_optax, but it is a "
        f"{type(state).__module__}.{type(state).__name__}. {hint}"
    )


def _check_counters(counters: Any) -> None:
    """Raises unless a state holds its counters."""
    due = len(COUNTERS)
    came = getattr(counters, "shape", None)
    if came is None or came[-1:] != (due,):
        raise ValueError(
            f"The field counters of the state must be int32[{due}], but its shape is "
            f"{came}. Restore the state into the structure of tx.init(params)."
        )
