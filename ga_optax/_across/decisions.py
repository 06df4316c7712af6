"""Functions of the user's that decide: which micro-steps count, and which windows."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ga_optax._checks import check_callable
from ga_optax.accumulator import parts


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
        for part in parts(leaf)
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
