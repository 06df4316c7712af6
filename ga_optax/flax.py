"""Train state and NNX optimizer whose `step` counts steps, not micro-steps.

Both are Flax's own, except that gradients go through `ga_optax.apply_gradients`. So a
micro-step inside a window touches only the accumulator, and `step` increases only if
the inner optimizer ran.
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

    Use it like Flax's: jit the training step and donate the state, and subclass it to
    add fields. Any `tx` works. Without a `MultiSteps` in it, this is Flax's train
    state.

    Attributes:
      step: updates of the inner optimizer so far; schedules and logs count these.
    """

    @property
    def micro_step(self) -> ArrayLike:
        """Micro-steps in the open window; 0 if `tx` does not accumulate."""
        return _fill(self.opt_state)

    def apply_gradients(
        self,
        *,
        grads: Any,
        weight: ArrayLike | None = None,
        emit: bool | None = None,
        **kwargs: Any,
    ) -> "TrainState":
        """Takes one micro-step, which updates `params` if it closes the window.

        Args:
          grads: the micro-batch's gradient, with the tree and shapes of `params`.
          weight: how much the micro-batch counts; see `ga_optax.accumulator.add`.
          emit: see `ga_optax.apply_gradients`.
          **kwargs: new values for fields of the state, as in Flax, and extra arguments
            for the optimizer.

        Returns:
          The new state.

        Raises:
          ValueError: if `grads` does not fit `params`; the message names the leaf.
        """
        fields = {field.name for field in dataclasses.fields(self)}
        replaced = {name: kwargs.pop(name) for name in fields & kwargs.keys()}
        # As in Flax: the gradient of an fp8 scaling factor is its new value.
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
            # As weakly typed as Flax's 0: otherwise the second call is traced again.
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
        """Micro-steps in the open window; 0 if `tx` does not accumulate."""
        return _fill(nnx.as_pure(self.opt_state))

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
        """Takes one micro-step, which changes `model` if it closes the window.

        Unlike Flax's `update` it returns nothing: inside a window there are no updates,
        not even zeros.

        Args:
          model: the model to update, in place.
          grads: what `nnx.grad` returned for the micro-batch.
          weight: how much the micro-batch counts; see `ga_optax.accumulator.add`.
          emit: see `ga_optax.apply_gradients`.
          **kwargs: extra arguments for the optimizer.

        Raises:
          ValueError: if `grads` does not fit the model; the message names the leaf.
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
        step = self.step[...]
        self.step[...] = jnp.where(_was_step(opt_state), step + 1, step)


def _fill(opt_state: Any) -> ArrayLike:
    """Micro-steps in the open window."""
    return _state.stats(opt_state).fill if _state.find_states(opt_state) else 0


def _was_step(opt_state: Any) -> jax.Array | bool:
    """Whether the call that returned this state ran the inner optimizer."""
    return not _state.find_states(opt_state) or _state.has_updated(opt_state)
