"""The configuration of a `MultiSteps`, and everything that follows from it alone."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ga_optax import accumulator
from ga_optax._across.state import (
    MultiStepsState,
    check_order,
    new_counters,
    state_type,
)
from ga_optax._across.storage import Storage, WindowSum
from ga_optax._checks import check_int, is_int, nodes_of

SkipFn = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Config:
    """The checked arguments of a `MultiSteps`, under the same names."""

    opt: optax.GradientTransformation
    every_k_schedule: int | Callable[[jax.Array], ArrayLike]
    use_grad_mean: bool
    should_skip_update_fn: SkipFn | None
    accumulator_dtype: np.dtype | None
    should_drop_window_fn: SkipFn | None
    track_norm: bool
    data_axis: tuple[str, ...] | None
    mean_argnames: tuple[str, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @functools.cached_property  # always the same object
    def inner(self) -> optax.GradientTransformationExtraArgs:
        """The inner optimizer, with support for extra arguments."""
        return optax.with_extra_args_support(self.opt)

    @property
    def storage(self) -> Storage:
        """The storage of a window's sum between calls."""
        return Storage(self.use_grad_mean, self.data_axis or ())

    def init(self, params: optax.Params) -> MultiStepsState:
        """The state before the first micro-step."""
        check_order(params=params)
        trained = differentiated(params)
        acc = self.empty(trained)
        (total, arg_totals), weight, _ = self.storage.start(acc)
        skip_state, drop_state = (), ()
        if (skips := self.should_skip_update_fn) is not None:
            zeros = optax.tree.zeros_like(trained)
            _, skip_state = checked(skips(zeros, acc.count, params))
        if (drops := self.should_drop_window_fn) is not None:
            _, drop_state = checked(drops(acc.total[0], acc.count, params))
        self.window_length(acc.count)  # raises if k is known and invalid
        inner = self.inner.init(params)
        for kind, name in _ACCUMULATORS.items():
            for path in nodes_of(kind, inner):
                cause = f"its state at {path or 'the top'} is that of {name}"
                raise windows_of_windows(cause, self.every_k_schedule)
        return state_type(self.use_grad_mean)(
            mini_step=acc.count,
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=inner,
            total=() if self.every_k_schedule == 1 else total,
            skip_state=skip_state,
            drop_state=drop_state,
            weight=weight,
            counters=new_counters(),
            **(self.optional_fields() | {"arg_totals": arg_totals}),
        )

    def empty(self, params: Any) -> WindowSum:
        """An empty accumulator for gradients and the extra arguments to average."""
        acc = accumulator.init(params, self.accumulator_dtype)
        return acc._replace(total=(acc.total, self.optional_fields()["arg_totals"]))

    def optional_fields(self) -> dict[str, Any]:
        """The initial values of the state's fields that an option adds."""
        return {
            "arg_totals": {name: jnp.zeros([], float) for name in self.mean_argnames},
            "grad_norm": jnp.zeros([], float) if self.track_norm else (),
        }

    def window_length(self, step: jax.Array) -> int | jax.Array:
        """The k of this step: an int if k is known."""
        if isinstance(self.every_k_schedule, int):
            return self.every_k_schedule
        k = _in_micro_steps(self.every_k_schedule(step))
        if not isinstance(k, jax.core.Tracer):
            return check_int(_LENGTH, k, _RETURN)
        if k.shape != () or not jnp.issubdtype(k.dtype, jnp.integer):
            kind = f"{k.dtype.name}{list(k.shape)}"
            raise TypeError(f"{_LENGTH} must be an int, but it is {kind}. {_RETURN}")
        return k


# Types of states of transformations that accumulate, and the names of those.
_ACCUMULATORS = {
    MultiStepsState: "a ga_optax.MultiSteps",
    optax.MultiStepsState: "an optax.MultiSteps",
    optax.ApplyEvery: "an optax.apply_every",
}
_LENGTH = "The result of every_k_schedule"
_RETURN = "Return the number of micro-steps in the window of that step, at least 1."


def _in_micro_steps(k: Any) -> Any:
    """`k`; of a real number, such as schedules of Optax return, the next integer.

    So a window closes when it holds k micro-steps or more, in any dtype of k: bfloat16
    has no 299, and a count that is cast to bfloat16 would be 300 too early.
    """
    is_number = isinstance(k, (float, np.generic, jax.Array)) and jnp.shape(k) == ()
    if not (is_number and jnp.issubdtype(jnp.result_type(k), jnp.floating)):
        return k
    if isinstance(k, jax.core.Tracer):
        return jnp.ceil(k).astype(jnp.int32)
    return math.ceil(k) if math.isfinite(k) else k


def differentiated(params: Any) -> Any:
    """The parameters that have gradients: the fast ones of `optax.LookaheadParams`."""

    def is_pair(node: Any) -> bool:
        return isinstance(node, optax.LookaheadParams)

    def fast(node: Any) -> Any:
        return node.fast if is_pair(node) else node

    return jax.tree.map(fast, params, is_leaf=is_pair)


def check_optimizer(name: str, value: Any, todo: str) -> None:
    """Raises unless `value` is an optimizer of Optax."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, but it is of type "
            f"{type(value).__name__}. {todo}"
        )


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


def windows_of_windows(cause: str, k: Any, inner_k: Any = None) -> ValueError:
    """The error for an inner optimizer that accumulates, in windows of `inner_k`."""
    known = isinstance(k, int) and isinstance(inner_k, int)
    times = f"{k} x {inner_k} = {k * inner_k}" if known else "k x (the inner k)"
    return ValueError(
        f"opt must not accumulate gradients, but {cause}. opt would then take one step "
        f"in {times} micro-steps. Pass the optimizer without that accumulation, and "
        "the number of micro-steps a step as every_k_schedule."
    )


def checked(decision: Any) -> tuple[jax.Array, Any]:
    """Returns the result of a function that skips or drops; raises if it is invalid."""
    if not isinstance(decision, tuple) or len(decision) != 2:
        raise ValueError(
            "should_skip_update_fn and should_drop_window_fn must return the pair "
            f"(skip, skip_state), but one returned {decision!r}. If there is no state "
            "to keep, return (skip, ())."
        )
    skip, skip_state = decision
    dtype, shape = jnp.result_type(skip), jnp.shape(skip)
    if (dtype, shape) != (jnp.bool_, ()):
        raise ValueError(
            "The `should_skip_update_fn` function should return a boolean scalar "
            f"array, but it returned an array of dtype {dtype} and shape {shape}. "
            "Compare and reduce, with jnp.any for example."
        )
    return jnp.asarray(skip), skip_state
