"""The arguments of a `MultiSteps`, and what follows from them alone.

    sum = Σ w·g of one device;  with data axes  psum(sums) = Σ w·g

So `Config` also says how a state holds the sum of a window: that of one device, or of
each of many.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .. import accumulator
from .._checks import check_int, named_leaves, nodes_of
from .._devices import collectives, meshes
from .._text import warn_once
from .choices import Predicate, select
from .state import MultiStepsState, check_order, new_counters, state_type

SkipFn = Callable[[Any, Any, Any], tuple[Any, Any]]
WindowSum = Any  # an `Accumulator` of the pair `(gradients, extra arguments)`


@dataclasses.dataclass(frozen=True, eq=False)
class Config:
    """The checked arguments of a `MultiSteps`, under the same names."""

    opt: optax.GradientTransformation
    every_k_schedule: int | Callable[[jax.Array], ArrayLike]
    use_grad_mean: bool
    should_skip_update_fn: SkipFn | None
    accumulator_dtype: Any  # a dtype, None, or a tree of those
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
    def axes(self) -> tuple[str, ...]:
        """The data axes, bound by a `jax.shard_map`; `()` on one device."""
        return self.data_axis or ()

    @property
    def spec(self) -> PartitionSpec:
        """The `PartitionSpec` of the sum and the weight, for `jax.shard_map`."""
        return meshes.split_spec(self.axes) if self.axes else PartitionSpec()

    def init(self, params: optax.Params) -> MultiStepsState:
        """The state before the first micro-step."""
        check_order(params=params)
        trained = differentiated(params)
        acc = self.empty(trained)
        (total, arg_totals), weight, _ = self._start(acc)
        skip_state, drop_state = (), ()
        if (skips := self.should_skip_update_fn) is not None:
            zeros = optax.tree.zeros_like(trained)
            _, skip_state = checked(skips(zeros, acc.count, params))
        if (drops := self.should_drop_window_fn) is not None:
            _, drop_state = checked(drops(acc.total[0], acc.count, params))
        self.window_length(acc.count)  # raises if k is known and invalid
        inner = self.inner.init(params)
        for where in accumulators_in(inner):
            raise ValueError(
                f"opt must not accumulate gradients, but {where}. opt would then take "
                "one step in k x (the inner k) micro-steps. Pass the optimizer without "
                "that accumulation, and the number of micro-steps a step as "
                "every_k_schedule."
            )
        finite = nodes_of(optax.ApplyIfFiniteState, inner)
        if finite and not (self.should_drop_window_fn or self.should_skip_update_fn):
            warn_once(
                "An optax.apply_if_finite inside of a MultiSteps leaves out the window "
                "of a micro-batch that is not finite, and still counts its step. Pass "
                "should_drop_window_fn=ga_optax.drop_window_if_not_finite in its place,"
                " or should_skip_update_fn=optax.skip_not_finite to lose no more than "
                "the micro-batch."
            )
        return state_type(self.use_grad_mean)(
            mini_step=acc.count,
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=inner,
            total=() if self.every_k_schedule == 1 else total,
            skip_state=skip_state,
            drop_state=drop_state,
            weight=weight,
            counters=new_counters(),
            arg_totals=arg_totals,
            grad_norm=jnp.zeros([], float) if self.track_norm else (),
        )

    def empty(self, params: Any) -> WindowSum:
        """An empty accumulator for gradients and the extra arguments to average."""
        acc = accumulator.init(params, self.accumulator_dtype)
        arg_totals = {name: jnp.zeros([], float) for name in self.mean_argnames}
        return acc._replace(total=(acc.total, arg_totals))

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

    # -- The sum of a window -----------------------------------------------------------
    # On one device the state holds the accumulator, and the last addition divides the
    # sum, so its total is the mean for the inner optimizer. With data axes every device
    # holds a sum, and the step all-reduces and divides the sums.

    def _start(self, acc: WindowSum) -> WindowSum:
        """An empty accumulator for the state: one part for each device."""
        if not self.axes:
            return acc

        def zeros(acc: WindowSum) -> WindowSum:
            parts = jax.tree.map(lambda x: jnp.zeros_like(x)[None], acc)
            return collectives.vary(parts, self.axes)

        mesh = meshes.find_mesh(self.axes, None, acc.total)
        if mesh is None:
            return zeros(acc)
        specs = (PartitionSpec(),), self.spec
        return collectives.over_mesh(zeros, mesh, self.axes, specs)(acc)

    def load(self, acc: WindowSum) -> WindowSum:
        """This device's accumulator, from the state's."""
        if not self.axes:
            return acc
        if meshes.find_mesh(self.axes, None) is not None:
            raise ValueError(
                f"With data_axis={self.axes} a MultiSteps must be called inside a "
                "jax.shard_map over that axis, with state_specs for the state, but "
                "this call is outside. Wrap the training step; or leave data_axis out "
                "if the compiler splits the batch."
            )
        for name, leaf in named_leaves((acc.total, acc.weight)):
            if jnp.shape(leaf)[:1] != (1,):
                raise ValueError(
                    "Inside the shard_map the state must hold this device's part of "
                    f"the accumulator, [1, ...], but {name} has shape "
                    f"{jnp.shape(leaf)}. Pass state_specs in in_specs."
                )
        total, weight = jax.tree.map(lambda x: x[0], (acc.total, acc.weight))
        return accumulator.Accumulator(total, weight, acc.count)

    def store(self, acc: WindowSum) -> WindowSum:
        """The inverse of `load`."""
        if not self.axes:
            return acc
        parts = jax.tree.map(lambda x: x[None], (acc.total, acc.weight))
        total, weight = collectives.vary(parts, self.axes)
        return accumulator.Accumulator(total, weight, acc.count)

    def finish(self, acc: WindowSum, closes: Predicate) -> WindowSum:
        """Replaces the sum by the mean if the window closes on one device.

        This division is part of the pass that adds the gradient. In the branch of the
        conditional the division would be another pass, over a second buffer. The
        division comes last, because XLA computes a division once, but repeats a
        cheaper operation for each reader, from a sum that it then has to copy.
        """
        divides = self.use_grad_mean or acc.total[1]
        if self.axes or not divides or closes is False:
            return acc  # over devices the sums are merged before they are divided
        return select(closes, self._mean(acc), acc)

    def merged(self, acc: WindowSum) -> WindowSum:
        """The mean (or the sum) over all devices, for the inner optimizer."""
        with jax.named_scope("ga_optax.merge"):
            grads, args = acc.total
            total = grads, collectives.vary(args, self.axes)
            whole = collectives.merge_across(acc._replace(total=total), self.axes)
        return self._mean(whole)

    def _mean(self, acc: WindowSum) -> WindowSum:
        """The mean (or the sum) of gradients, and the mean of extra arguments."""
        divide = functools.partial(accumulator.divide, weight=acc.weight)
        grads, args = acc.total
        grads = jax.tree.map(divide, grads) if self.use_grad_mean else grads
        return acc._replace(total=(grads, jax.tree.map(divide, args)))


# Types of states of transformations that accumulate, and the names of those.
_ACCUMULATORS = {
    MultiStepsState: "a ga_optax.MultiSteps",
    optax.MultiStepsState: "an optax.MultiSteps",
    optax.ApplyEvery: "an optax.apply_every",
}


def accumulators_in(state: optax.OptState) -> Iterator[str]:
    """Says where the states of transformations that accumulate gradients are."""
    for kind, name in _ACCUMULATORS.items():
        for path in nodes_of(kind, state):
            yield f"its state at {path or 'the top'} is that of {name}"


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
    return k if callable(k) else check_int("every_k_schedule", k, todo)


def checked(decision: Any) -> tuple[jax.Array, Any]:
    """Returns the result of a function that skips or drops; raises if it is invalid."""
    is_pair = isinstance(decision, tuple) and len(decision) == 2
    skip, skip_state = decision if is_pair else (0, ())
    if (jnp.result_type(skip), jnp.shape(skip)) != (jnp.bool_, ()):
        raise ValueError(
            "should_skip_update_fn and should_drop_window_fn must return the pair "
            "(skip, skip_state) of a boolean scalar and what to keep, such as (), but "
            f"one returned {decision!r}. Compare and reduce, with jnp.any for example."
        )
    return jnp.asarray(skip), skip_state
