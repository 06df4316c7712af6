"""Choices: Python bools, or traced ones, also of the user's functions that decide.

select(True, a, b) is a;   a traced predicate selects, and never multiplies
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from .. import accumulator
from .._checks import check_callable, is_on_host

# == Choices ===========================================================================

Predicate = bool | jax.Array
T = TypeVar("T")


def branch(
    predicate: Predicate, do: Callable[[], T], leave: Callable[[], T], run_both: bool
) -> T:
    """Runs `do` if the predicate is true, else `leave`.

    With `run_both` there is no conditional: both run, and one result is selected. But
    results in the host's memory would have to come to the device to be selected.
    """
    if isinstance(predicate, bool):
        return do() if predicate else leave()
    if run_both and not any(map(is_on_host, jax.tree.leaves(other := leave()))):
        return select(predicate, do(), other)
    return jax.lax.cond(predicate, _fenced(do), _fenced(leave))


def _fenced(branch: Callable[[], T]) -> Callable[[], T]:
    """`branch` with an optimization barrier around its smallest result.

    XLA's GPU compiler turns a conditional with elementwise branches into selects, so
    both branches would run every time. It keeps a conditional that has a barrier in it.
    """

    def fenced() -> T:
        leaves, structure = jax.tree.flatten(branch())
        smallest = min(range(len(leaves)), key=lambda i: jnp.size(leaves[i]))
        leaves[smallest] = jax.lax.optimization_barrier(leaves[smallest])
        return jax.tree.unflatten(structure, leaves)

    return fenced


def select(predicate: Predicate, on_true: T, on_false: T) -> T:
    """Returns one of two trees; a NaN in the other tree has no effect."""
    if isinstance(predicate, bool):
        return on_true if predicate else on_false
    return jax.tree.map(lambda t, f: jnp.where(predicate, t, f), on_true, on_false)


def by_leaf(choices: Sequence[bool], on_true: T, on_false: T) -> T:
    """Takes each leaf from `on_true` if its choice is true, else from `on_false`."""
    trees = jax.tree.leaves(on_true), jax.tree.leaves(on_false)
    leaves = [t if choice else f for choice, t, f in zip(choices, *trees, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(on_false), leaves)


def both(a: Predicate, b: Predicate) -> Predicate:
    """`a` and `b`."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def count_if(happened: Predicate, counter: jax.Array) -> jax.Array:
    """The counter, plus 1 if the event happened."""
    return jnp.where(happened, accumulator.increment(counter), counter)


def cast_like(tree: Any, like: Any) -> Any:
    """Casts each leaf to the dtype of the same leaf in `like`, so no state drifts."""
    dtypes = jax.tree.map(jax.dtypes.result_type, like)
    return jax.tree.map(lambda x, t: accumulator.cast(jnp.asarray(x), t), tree, dtypes)


# == Decisions =========================================================================


def drop_window_if_not_finite(
    updates: optax.Updates, gradient_step: ArrayLike, params: optax.Params | None
) -> tuple[jax.Array, Any]:
    """A `should_drop_window_fn` that drops a window with an inf or a NaN.

    The window closes without a step: parameters, the inner optimizer's state and its
    schedules stay as they were, and `stats` counts a skipped window. The check reads
    the accumulator when the window closes, and costs the other micro-steps nothing.
    To leave out only the bad micro-batch, pass `optax.skip_not_finite` as
    `should_skip_update_fn`, which reads every gradient.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(
    ...     optax.sgd(1.0), 2, should_drop_window_fn=ga.drop_window_if_not_finite)
    >>> params, state = jnp.ones(1), tx.init(jnp.ones(1))
    >>> for g in (jnp.array([jnp.inf]), jnp.ones(1)):
    ...     params, state = ga.apply_gradients(tx, g, state, params)
    >>> params, int(ga.stats(state).skipped_windows)
    (Array([1.], dtype=float32), 1)

    Args:
      updates: the gradients for the inner optimizer.
      gradient_step: steps so far.
      params: the parameters, if known.

    Returns:
      `(should_skip, {"should_skip": should_skip})`, where `should_skip` is True if any
      element is not finite. The dictionary becomes the `drop_state`.
    """
    del gradient_step, params
    # A NaN, or infinities of both signs, make the sum NaN, and an infinity is an
    # extremum. These reductions read the buffer alone; to count elements that are not
    # finite, XLA would first write out the comparison. Extrema are not enough: on CPUs
    # the extremum over devices loses the NaN of one device. (A sum that overflows both
    # ways is NaN, too.)
    finite = [
        jnp.isfinite(jnp.max(part))
        & jnp.isfinite(jnp.min(part))
        & ~jnp.isnan(jnp.sum(part))
        for leaf in jax.tree.leaves(updates)
        if leaf.size
        for part in accumulator.parts(leaf)
    ]
    should_skip = ~jnp.all(jnp.array(finite, bool))
    return should_skip, {"should_skip": should_skip}


def check_decisions(skip: Any, drop: Any) -> None:
    """Raises unless `skip` decides on micro-steps, and `drop` on windows."""
    if skip is drop_window_if_not_finite:
        raise ValueError(
            "should_skip_update_fn must decide on one micro-step, but it is "
            "drop_window_if_not_finite, which decides on a window. Pass "
            "should_drop_window_fn=ga_optax.drop_window_if_not_finite."
        )
    signature = "(updates, step, params) -> (skip, skip_state)"
    for name, fn, example in (
        ("should_skip_update_fn", skip, "optax.skip_not_finite"),
        ("should_drop_window_fn", drop, "ga_optax.drop_window_if_not_finite"),
    ):
        if fn is not None:
            todo = f"Pass {example}, for example, or None."
            check_callable(name, fn, signature, todo)
