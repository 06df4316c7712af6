"""Reading a state that was saved by an earlier version, or with other arguments."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ga_optax._across import noise_scale
from ga_optax._across.state import MultiStepsState, check_version

# What a state may lack: it was saved before they were added, or with other arguments.
_OPTIONAL = ("skip_state", "drop_state", "arg_totals", "noise", "grad_norm")


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
    nodes = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_state)[0]
    states = [f"{_name(path)}/".lstrip("/") for path, x in nodes if _is_state(x)]
    optional = tuple(f"{state}{field}" for state in states for field in _OPTIONAL)
    for state in states:
        if (counters := found.get(f"{state}counters")) is not None:
            check_version(counters)
        opened = found.get(f"{state}mini_step", 0) > 0
        lost = [name for name in due if name.startswith(f"{state}arg_totals")]
        if opened and not found.keys() >= set(lost):
            raise _error(f"its window is open, and {lost[0]} was not saved")
    for name in found:
        if name not in due and not _is_in(name, optional):
            raise _error(f"a new state has no {name}")
    leaves = [_leaf(name, found, x, optional) for name, x in due.items()]
    restored = jax.tree.unflatten(jax.tree.structure(like), leaves)

    def spoil(path: Any, state: Any) -> Any:
        squares = f"{_name(path)}/noise/squares".lstrip("/")
        if not _is_state(state) or squares in found or squares not in due:
            return state
        noise = noise_scale.spoiled(state.noise, state.mini_step > 0)
        return state._replace(noise=noise)

    return jax.tree_util.tree_map_with_path(spoil, restored, is_leaf=_is_state)


def _is_state(x: Any) -> bool:
    return isinstance(x, MultiStepsState)


_name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, in which containers are not told apart."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_name(path): leaf for path, leaf in paths}


def _is_in(name: str, fields: tuple[str, ...]) -> bool:
    return any(name == field or name.startswith(f"{field}/") for field in fields)


def _leaf(name: str, found: dict[str, Any], like: Any, optional: Any) -> Any:
    """The saved leaf, or that of a new state if it may be missing."""
    if name not in found:
        if _is_in(name, optional) and not isinstance(like, jax.ShapeDtypeStruct):
            return like
        raise _error(f"{name} was not saved")
    came, want = (
        f"{jax.dtypes.result_type(x).name}{list(jnp.shape(x))}"
        for x in (found[name], like)
    )
    if came != want:
        raise _error(f"{name} is {came}, and a new state has {want}")
    return found[name]


def _error(why: str) -> ValueError:
    return ValueError(
        f"The saved state must fit a new one, but {why}. Pass tx.init(params) of the "
        "optimizer and the parameters with which it was saved, as they were when no "
        "window was open if the arguments changed."
    )
