"""What a `MultiSteps` was made with, and what follows from that alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ga_optax import accumulator
from ga_optax._across import noise_scale
from ga_optax._across.state import (
    MultiStepsState,
    new_counters,
    state_type,
)
from ga_optax._across.storage import ManyDevices, OneDevice
from ga_optax._checks import check_int, is_int, nodes_of
from ga_optax.accumulator import Accumulator

SkipFn = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Config:
    """The arguments of a `MultiSteps`, checked.

    Attributes:
      inner: the inner optimizer.
      every_k: k, or a function of the step that returns it.
      should_skip: whether a micro-step is left out, or None.
      should_drop: whether a window is left out, or None.
      dtype: of the accumulator; None for that of each leaf.
      track_noise: whether the state holds what `noise_scale` reads.
      track_norm: whether it holds the norm of the last window's gradient.
      mean_argnames: the extra arguments to average.
      storage: where the sum of a window is kept between calls.
    """

    inner: optax.GradientTransformationExtraArgs
    every_k: int | Callable[[jax.Array], ArrayLike]
    should_skip: SkipFn | None
    should_drop: SkipFn | None
    dtype: np.dtype | None
    track_noise: bool
    track_norm: bool
    mean_argnames: tuple[str, ...]
    storage: OneDevice | ManyDevices

    def init(self, params: optax.Params) -> MultiStepsState:
        """The state before the first micro-step."""
        acc = self.empty(params)
        held = self.storage.start(acc)
        skip_state, drop_state = (), ()
        if self.should_skip is not None:
            zeros = optax.tree.zeros_like(params)
            _, skip_state = checked(self.should_skip(zeros, acc.count, params))
        if self.should_drop is not None:
            zeros, _ = sums(acc)
            _, drop_state = checked(self.should_drop(zeros, acc.count, params))
        total, arg_totals = sums(held)
        inner = self.inner.init(params)
        for kind in (MultiStepsState, optax.MultiStepsState):
            for path in nodes_of(kind, inner):
                held = f"its state holds a {kind.__name__} at {path}"
                raise windows_of_windows(held, self.every_k)
        return state_type(self.storage.use_grad_mean)(
            mini_step=acc.count,
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=inner,
            total=() if self.every_k == 1 else total,
            skip_state=skip_state,
            drop_state=drop_state,
            weight=held.weight,
            counters=new_counters(),
            arg_totals=arg_totals,
            noise=noise_scale.init(acc.weight) if self.track_noise else (),
            grad_norm=jnp.zeros([], float) if self.track_norm else (),
        )

    def empty(self, params: Any) -> Accumulator:
        """An empty accumulator for gradients and the extra arguments to average."""
        acc = accumulator.init(params, self.dtype)
        args = {name: jnp.zeros_like(acc.weight) for name in self.mean_argnames}
        return acc._replace(total=(acc.total, args))

    def window_length(self, step: jax.Array) -> int | jax.Array:
        """The k of this step: an int if it is known."""
        if isinstance(self.every_k, int):
            return self.every_k
        k = self.every_k(step)
        if isinstance(k, int) and not isinstance(k, bool):
            return check_every_k(k)
        dtype, shape = jnp.result_type(k), jnp.shape(k)
        kinds = (jnp.integer, jnp.floating)
        if shape != () or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            raise ValueError(
                "every_k_schedule must return an integer scalar, but it returned "
                f"{dtype}{list(shape)}. Return the number of micro-steps in the "
                "window that the step belongs to."
            )
        return jnp.asarray(k)


def sums(acc: Accumulator) -> tuple[Any, dict[str, jax.Array]]:
    """The sum of gradients, and those of extra arguments."""
    total: Any = acc.total
    return total


def check_every_k(k: Any) -> Any:
    """Returns k, an int of at least 1 or a function, or raises."""
    todo = "Pass the number of micro-steps in a window, or a function of the step."
    if is_int(k):
        return check_int("every_k_schedule", k, todo)
    if not callable(k):
        raise TypeError(
            f"every_k_schedule must be an int or a function, but it is {k!r} of type "
            f"{type(k).__name__}. {todo}"
        )
    return k


def windows_of_windows(what: str, k: Any, own: Any = "its k") -> ValueError:
    """The error if the inner optimizer accumulates itself, in windows of `own`."""
    known = isinstance(k, int) and isinstance(own, int)
    times = f"{k} x {own} = {k * own}" if known else "k x (its k)"
    return ValueError(
        f"opt must not accumulate itself, but {what}. Its windows would be windows of "
        f"windows, with one step in {times} micro-steps. Pass the optimizer that it "
        "was made of, and the k that is meant."
    )


def checked(answer: Any) -> tuple[jax.Array, Any]:
    """What a function that skips or drops returned, or an error."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ValueError(
            "should_skip_update_fn and should_drop_window_fn must return the pair "
            f"(skip, skip_state), but one returned {answer!r}. If there is nothing to "
            "keep, return (skip, ())."
        )
    skip, skip_state = answer
    dtype, shape = jnp.result_type(skip), jnp.shape(skip)
    if (dtype, shape) != (jnp.bool_, ()):
        raise ValueError(
            "The `should_skip_update_fn` function should return a boolean scalar "
            f"array, but it returned an array of dtype {dtype} and shape {shape}. "
            "Compare and reduce, with jnp.any for example."
        )
    return jnp.asarray(skip), skip_state
