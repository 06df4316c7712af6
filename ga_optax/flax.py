"""Train state and NNX optimizer whose `step` counts steps, not micro-steps.

Both are Flax's own, with one thing changed: gradients go through
`ga_optax.apply_gradients`, so that a micro-step inside a window touches the
accumulator alone, and `step` moves where the inner optimizer ran.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import fp8_ops
from flax.training import train_state
from jax.typing import ArrayLike

from ga_optax import _multi_steps, _state

__all__ = ["Optimizer", "TrainState"]

M = TypeVar("M")


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for a `tx` that accumulates.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> from ga_optax.flax import TrainState
    >>> state = TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(2)},
    ...     tx=ga.MultiSteps(optax.sgd(0.5), 2))
    >>> for g in ([1.0, 1.0], [1.0, 3.0], [0.0, 0.0]):
    ...     state = state.apply_gradients(grads={"w": jnp.array(g)})
    >>> state.params["w"], int(state.step), int(state.micro_step)
    (Array([0.5, 0. ], dtype=float32), 1, 1)

    Use it as Flax's, jitted with the state donated. Subclass it for more fields, as
    usual. Any `tx` works; without a `MultiSteps` in it this is Flax's train state.

    Attributes:
      step: updates of the inner optimizer so far, what a schedule or a log counts.
    """

    @property
    def micro_step(self) -> ArrayLike:
        """Micro-steps in the open window; 0 where `tx` does not accumulate."""
        if not _state.find_states(self.opt_state):
            return 0
        return _state.stats(self.opt_state).fill

    def apply_gradients(
        self,
        *,
        grads: Any,
        weight: ArrayLike | None = None,
        emit: bool | None = None,
        **kwargs: Any,
    ) -> "TrainState":
        """Takes one micro-step, which closes the window or does not.

        Args:
          grads: the micro-batch's gradient, with the tree and shapes of `params`.
          weight: how much the micro-batch counts; see `ga_optax.accumulator.add`.
          emit: see `ga_optax.apply_gradients`.
          **kwargs: those that name a field of the state replace it, as in Flax; the
            others are extra arguments of the optimizer.

        Returns:
          The new state.

        Raises:
          ValueError: where `grads` does not fit `params`; names the leaf.
        """
        fields = {field.name for field in dataclasses.fields(self)}
        replaced = {name: kwargs.pop(name) for name in fields & kwargs.keys()}
        # Flax's rule for fp8 scaling factors: their gradient is their new value.
        overwritten = fp8_ops.OVERWRITE_WITH_GRADIENT
        overwrites = isinstance(grads, Mapping) and overwritten in grads
        params, opt_state = _multi_steps.apply_gradients(
            self.tx,
            grads["params"] if overwrites else grads,
            self.opt_state,
            self.params["params"] if overwrites else self.params,
            weight=weight,
            emit=emit,
            **kwargs,
        )
        if overwrites:
            params = {"params": params, overwritten: grads[overwritten]}
        return self.replace(
            # As weakly typed as Flax's 0, or the second call would be traced again.
            step=jnp.where(_was_step(opt_state), self.step + 1, self.step),
            params=params,
            opt_state=opt_state,
            **replaced,
        )


class Optimizer(nnx.Optimizer[M]):
    """`flax.nnx.Optimizer` for a `tx` that accumulates.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> from flax import nnx
    >>> from ga_optax.flax import Optimizer
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = Optimizer(model, ga.MultiSteps(optax.adam(1e-3), 2), wrt=nnx.Param)
    >>> def loss(model, x):
    ...     return jnp.mean(model(x) ** 2)
    >>> for _ in range(3):
    ...     optimizer.update(model, nnx.grad(loss)(model, jnp.ones((4, 2))))
    >>> int(optimizer.step[...]), int(optimizer.micro_step)
    (1, 1)

    Attributes:
      step: updates of the inner optimizer so far.
    """

    @property
    def micro_step(self) -> ArrayLike:
        """Micro-steps in the open window; 0 where `tx` does not accumulate."""
        opt_state = nnx.as_pure(self.opt_state)
        if not _state.find_states(opt_state):
            return 0
        return _state.stats(opt_state).fill

    def update(  # pyrefly: ignore[bad-override]  # returns no updates
        self,
        model: M,
        grads: Any,
        /,
        *,
        weight: ArrayLike | None = None,
        emit: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes one micro-step, which changes `model` where it closes the window.

        Unlike Flax's it returns nothing: inside a window there are no updates, not
        even zeros.

        Args:
          model: the model to update, in place.
          grads: what `nnx.grad` returned for the micro-batch.
          weight: how much the micro-batch counts; see `ga_optax.accumulator.add`.
          emit: see `ga_optax.apply_gradients`.
          **kwargs: extra arguments of the optimizer.

        Raises:
          ValueError: where `grads` does not fit the model; names the leaf.
        """
        params, opt_state = _multi_steps.apply_gradients(
            self.tx,
            nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph)),
            nnx.as_pure(self.opt_state),
            nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph)),
            weight=weight,
            emit=emit,
            **nnx.as_pure(kwargs),
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, graph=self.graph))
        self.step[...] = jnp.where(
            _was_step(opt_state), self.step[...] + 1, self.step[...]
        )


def _was_step(opt_state: Any) -> jax.Array | bool:
    """Whether the call that returned this state ran the inner optimizer."""
    if not _state.find_states(opt_state):
        return True
    return _state.has_updated(opt_state)
