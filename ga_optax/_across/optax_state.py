"""Converts the state of an `optax.MultiSteps`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ga_optax._across.state import new_counters, state_type
from ga_optax._checks import nodes_of


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
