"""Reading the state of an `optax.MultiSteps`, or of an earlier version of ours."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ga_optax._across import noise_scale
from ga_optax._across.state import (
    OPTIONS,
    MultiStepsState,
    check_version,
    new_counters,
    state_type,
)
from ga_optax._checks import nodes_of


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

    **Exactness.** Optax keeps the running mean of the window and we keep its sum, which
    is `mini_step` times that mean: one rounding. Optax did not count micro-steps, so
    that counter starts with those of the open window. Nor did it square their
    gradients, so `noise_scale` leaves the open window out. Nor did it sum extra
    arguments, so begin with `mean_argnames` between two windows.

    Args:
      state: an `optax.MultiStepsState`, or any state that holds some.
      use_grad_mean: what the `optax.MultiSteps` was made with.
      track_noise: what our `MultiSteps` is made with.

    Returns:
      The same state with each of them replaced by a `MultiStepsState`.

    Raises:
      ValueError: if there is none in it.
    """
    if not nodes_of(optax.MultiStepsState, state):
        raise ValueError(
            "from_optax needs an optax.MultiStepsState, or a state that holds one, but "
            f"it found none in a {type(state).__name__}. Pass the state that the "
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

        squares = jnp.where(count > 0, jnp.inf, 0.0)  # of micro-steps that it took
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
            noise=noise_scale.init(squares) if track_noise else (),
        )

    return jax.tree.map(
        convert, state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState)
    )


def from_saved(saved: Any, like: optax.OptState) -> optax.OptState:
    """Reads a state that an earlier version saved, or a run with other arguments.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> params, opt = jnp.zeros(3), optax.sgd(1.0)
    >>> saved = ga.MultiSteps(opt, 4).init(params)._asdict()
    >>> del saved["drop_state"]
    >>> tx = ga.MultiSteps(opt, 4, should_drop_window_fn=ga.drop_window_if_not_finite)
    >>> state = ga.from_saved(saved, tx.init(params))
    >>> int(state.version), state.drop_state
    (1, {'should_skip': Array(False, dtype=bool)})

    Leaves are found by their names. So `saved` may also be what a checkpoint gives
    without a target, with dictionaries and lists for named tuples and tuples.

    **Exactness.** Every saved leaf keeps its bits.

    Args:
      saved: the saved state, or any tree that holds one.
      like: a new one for the same parameters and inner optimizer, `tx.init(params)`, or
        its shapes if nothing is missing in `saved`.

    Returns:
      A tree like `like` with the saved leaves. If `skip_state`, `drop_state`,
      `arg_totals`, `noise` or `grad_norm` were not saved, they are those of `like`;
      `noise_scale` then leaves out a window that was open.

    Raises:
      TypeError: if a saved leaf is no array, but its shape or a tracer.
      ValueError: if another leaf is missing, has another shape or dtype, or is unknown;
        if a later version saved it; or if a window was open and lacks `arg_totals`.
    """
    found, due = _by_name(saved), _by_name(like)
    for name, x in found.items():
        if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
            raise TypeError(
                f"The saved state must hold arrays, but {name or 'it'} is {x}. Restore "
                "it first, outside of jit."
            )
    states = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_state)[0]
    folders = [f"{_name(at)}/".lstrip("/") for at, x in states if _is_state(x)]
    for folder in folders:
        if f"{folder}counters" in found:
            check_version(found[f"{folder}counters"])

    def place(name: str) -> tuple[str, str]:
        """The path of the `MultiStepsState` that a leaf is in, and the field."""
        folder = next(filter(name.startswith, folders), name)
        return folder, name.removeprefix(folder).partition("/")[0]

    def missing(name: str, new: Any) -> Any:
        """The leaf of a new state in the place of one that was not saved."""
        folder, field = place(name)
        if field not in OPTIONS or isinstance(new, jax.ShapeDtypeStruct):
            raise _error(f"{name} was not saved")
        opened = found.get(f"{folder}mini_step", 0) > 0
        if field == "arg_totals" and opened:
            raise _error(f"its window is open, and {name} was not saved")
        if name == f"{folder}noise/squares":
            return jnp.where(opened, jnp.inf, new)  # it will be left out
        return new

    for name, x in found.items():
        if name not in due:
            if place(name)[1] not in OPTIONS:
                raise _error(f"a new state has no leaf {name!r}")
        elif (came := _kind(x)) != (want := _kind(due[name])):
            raise _error(f"{name} is {came}, and a new state has {want}")
    leaves = (found[x] if x in found else missing(x, new) for x, new in due.items())
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _is_state(x: Any) -> bool:
    return isinstance(x, MultiStepsState)


_name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, in which containers are not told apart."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_name(path): leaf for path, leaf in paths}


def _kind(x: Any) -> str:
    return f"{jax.dtypes.result_type(x).name}{list(jnp.shape(x))}"


def _error(why: str) -> ValueError:
    return ValueError(
        f"The saved state must fit a new one, but {why}. Pass tx.init(params) of the "
        "optimizer and the parameters with which it was saved, as they were when no "
        "window was open if the arguments changed."
    )
