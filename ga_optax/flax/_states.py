"""Flax's `TrainState` and NNX `Optimizer`, for a `tx` that accumulates."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.linen import fp8_ops
from flax.training import train_state
from jax.typing import ArrayLike

from .._across import multi_steps
from .._across.config import check_optimizer
from .._across.state import MultiStepsState, stats
from .._checks import nodes_of

M = TypeVar("M")
_OVERWRITTEN = fp8_ops.OVERWRITE_WITH_GRADIENT


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for a `tx` that accumulates.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> from ga_optax.flax import TrainState
    >>> state = TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(2)},
    ...     tx=ga.MultiSteps(optax.sgd(0.5), 2))
    >>> for g in ([1.0, 1.0], [1.0, 3.0], [0.0, 0.0]):
    ...     state = state.apply_gradients(grads={"w": jnp.array(g)})
    >>> state.params["w"], int(state.step)
    (Array([0.5, 0. ], dtype=float32), 3)
    >>> int(state.optimizer_steps), int(state.micro_step)
    (1, 1)

    Use this class like Flax's: jit the training step and donate the state, and subclass
    it to add fields. Any `tx` works except `optax.MultiSteps`. Without a `MultiSteps`
    in `tx`, the class is Flax's train state.

    Attributes:
      step: calls of `apply_gradients` so far, as in Flax: all micro-steps. A key made
        with `jax.random.fold_in(key, step)` differs in each micro-step.
    """

    @property
    def optimizer_steps(self) -> jax.Array:
        """Updates of the inner optimizer so far, which its schedules count."""
        return _counter("steps", self.opt_state, jnp.asarray(self.step))

    @property
    def micro_step(self) -> jax.Array:
        """Micro-steps in the open window; 0 if `tx` does not accumulate."""
        return _counter("fill", self.opt_state, jnp.int32(0))

    def apply_gradients(
        self,
        *,
        grads: Any,
        weight: ArrayLike | None = None,
        emit: bool | jax.Array | None = None,
        **kwargs: Any,
    ) -> "TrainState":
        """Takes one micro-step, which updates `params` if it closes the window.

        Args:
          grads: the micro-batch's gradient, with the tree and shapes of `params`.
          weight: the weight of the micro-batch; see `ga_optax.accumulator.add`.
          emit: see `ga_optax.apply_gradients`.
          **kwargs: new values for fields of the state, as in Flax, and extra arguments
            for the optimizer.

        Returns:
          The new state.

        Raises:
          TypeError: if `tx` accumulates with `optax.MultiSteps`.
          ValueError: if `grads` does not fit `params`; the message names the leaf.
        """
        _check_accumulator(self.opt_state)
        fields = {field.name for field in dataclasses.fields(self)}
        replaced = {name: kwargs.pop(name) for name in fields & kwargs.keys()}
        grads, overwrites = _without_fp8(grads)
        named = {"weight": weight, "emit": emit, **kwargs}
        change = partial(multi_steps.apply_gradients, self.tx, grads, **named)
        return self._changed(change, overwrites, step=self.step + 1, **replaced)

    def flush(self, **extra_args: Any) -> "TrainState":
        """Closes the window early, see `ga_optax.flush`; `step` does not change.

        Args:
          **extra_args: passed to the optimizer.

        Returns:
          The new state.

        Raises:
          TypeError: if `tx` is not a `MultiSteps`.
        """
        change = partial(multi_steps.flush, self.tx, **extra_args)
        return self._changed(change, _without_fp8(self.params)[1])

    def _changed(
        self, change: Callable[..., Any], overwrites: dict[str, Any], **replaced: Any
    ) -> "TrainState":
        """The state after `change(state, params)`, with new values of other fields."""
        params, opt_state = change(self.opt_state, _without_fp8(self.params)[0])
        params = {"params": params, **overwrites} if overwrites else params
        return self.replace(params=params, opt_state=opt_state, **replaced)


def _without_fp8(tree: Any) -> tuple[Any, dict[str, Any]]:
    """Splits fp8 scaling factors from parameters or gradients.

    As in Flax, the gradient of a factor is the factor's new value.
    """
    if isinstance(tree, Mapping) and _OVERWRITTEN in tree:
        return tree["params"], {_OVERWRITTEN: tree[_OVERWRITTEN]}
    return tree, {}


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
    >>> int(optimizer.step[...]), int(optimizer.optimizer_steps)
    (3, 1)

    Attributes:
      step: calls of `update` so far, as in Flax: all micro-steps.
    """

    def __init__(
        self, model: M, tx: optax.GradientTransformation, *, wrt: Any, **kwargs: Any
    ) -> None:
        """Makes the optimizer of a model, as in Flax.

        Args:
          model: the model.
          tx: the optimizer, such as a `ga_optax.MultiSteps`.
          wrt: the filter of the variables to update, such as `nnx.Param`.
          **kwargs: other arguments of `flax.nnx.Optimizer`.

        Raises:
          TypeError: if `tx` is no optimizer, or accumulates with `optax.MultiSteps`.
        """
        check_optimizer("tx", tx, "The order is Optimizer(model, tx, wrt=nnx.Param).")
        super().__init__(model, tx, wrt=wrt, **kwargs)
        _check_accumulator(nnx.as_pure(self.opt_state))

    @property
    def optimizer_steps(self) -> jax.Array:
        """Updates of the inner optimizer so far, which its schedules count."""
        return _counter("steps", nnx.as_pure(self.opt_state), self.step[...])

    @property
    def micro_step(self) -> jax.Array:
        """Micro-steps in the open window; 0 if `tx` does not accumulate."""
        return _counter("fill", nnx.as_pure(self.opt_state), jnp.int32(0))

    def update(  # pyrefly: ignore[bad-override]  # returns no updates
        self,
        model: M,
        grads: Any,
        /,
        *,
        weight: ArrayLike | None = None,
        emit: bool | jax.Array | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes one micro-step, which changes `model` if it closes the window.

        Unlike Flax's `update`, this method returns nothing: inside a window there are
        no updates, not even zeros.

        Args:
          model: the model to update, in place.
          grads: the result of `nnx.grad` for the micro-batch.
          weight: the weight of the micro-batch; see `ga_optax.accumulator.add`.
          emit: see `ga_optax.apply_gradients`.
          **kwargs: extra arguments for the optimizer.

        Raises:
          TypeError: if `tx` accumulates with `optax.MultiSteps`, or if the model and
            its gradients are swapped.
          ValueError: if `grads` does not fit the model; the message names the leaf.
        """
        if isinstance(model, nnx.State) and not isinstance(grads, nnx.State):
            raise TypeError(
                "model must be the model, but it is a State, as gradients are, and "
                f"grads is of type {type(grads).__name__}. The order is "
                "update(model, grads)."
            )
        _check_accumulator(nnx.as_pure(self.opt_state))
        grads = nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph))
        named = {"weight": weight, "emit": emit, **nnx.as_pure(kwargs)}
        change = partial(multi_steps.apply_gradients, self.tx, grads, **named)
        self._apply(change, model)
        self.step[...] += 1

    def flush(self, model: M, /, **extra_args: Any) -> None:
        """Closes the window early, see `ga_optax.flush`; `step` does not change.

        Args:
          model: the model to update, in place.
          **extra_args: passed to the optimizer.

        Raises:
          TypeError: if `tx` is not a `MultiSteps`.
        """
        change = partial(multi_steps.flush, self.tx, **nnx.as_pure(extra_args))
        self._apply(change, model)

    def _apply(self, change: Callable[..., Any], model: M) -> None:
        """Replaces state and parameters by `change(state, params)`, in place."""
        params, opt_state = change(
            nnx.as_pure(self.opt_state),
            nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph)),
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, graph=self.graph))


def _counter(name: str, opt_state: Any, otherwise: jax.Array) -> jax.Array:
    """A counter of the `MultiSteps` in a state; `otherwise` without a `MultiSteps`."""
    _check_accumulator(opt_state)
    accumulates = nodes_of(MultiStepsState, opt_state)
    return getattr(stats(opt_state), name) if accumulates else otherwise


def _check_accumulator(opt_state: Any) -> None:
    """Raises if a state holds the state of an `optax.MultiSteps`, without counters."""
    if nodes_of(optax.MultiStepsState, opt_state):
        raise TypeError(
            "tx must accumulate with ga_optax.MultiSteps, but the state of tx holds "
            "the state of an optax.MultiSteps. Pass ga_optax.MultiSteps(opt, k), which "
            "takes the same arguments; ga_optax.from_optax converts a saved state."
        )
