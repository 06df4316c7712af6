"""The program of a `MultiSteps`: a micro-step, and the end of a window.

    acc  <-  add(acc, g, w)
    if count = k:   params, inner  <-  inner.update(mean(acc));   count <- 0

`closing` has the second line. Nothing resets the accumulator: the first micro-step of
the next window overwrites it, so XLA updates it in place. The division is part of the
last addition, so no buffer is needed for the mean.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ga_optax import accumulator
from ga_optax._across import choices, noise_scale
from ga_optax._across.choices import Predicate
from ga_optax._across.closing import Closing
from ga_optax._across.config import sums
from ga_optax._across.request import Request
from ga_optax._across.reuse import Reuse, reused
from ga_optax._across.state import MultiStepsState
from ga_optax._across.storage import Buffer, When
from ga_optax._checks import check_gradients, check_leaves, check_weight
from ga_optax.accumulator import Accumulator


def micro_step(
    request: Request, weight: ArrayLike | None, emit: Predicate | None
) -> tuple[Any, MultiStepsState]:
    """Adds a gradient, and closes the window if it is full."""
    storage = request.config.storage
    k = request.config.window_length(request.state.gradient_step)
    if emit is None and isinstance(k, int) and k == 1:
        emit = True
    held = storage.load(_held(request.state))
    _check(request, held, weight, emit)
    skip, state = _ask_whether_to_skip(request)
    keeps = not _keeps_nothing(request)
    before = held if keeps else request.config.empty(request.gradients)
    addition = _Addition(request, before, weight, skip)
    acc = addition.done()
    if keeps:
        state = addition.noise(state)
    emits = _is_full(acc.count, k) if emit is None else emit
    closes = choices.both(emits, choices.negated(skip))
    buffer = addition.finish(acc, closes) if keeps else addition.alone(acc, closes)
    if emit is True:
        buffer = storage.fence(buffer)
    # Without a weight this micro-batch counts 1, so that the window's is not 0.
    weighs = _always if weight is None else _has_weight
    static = isinstance(emit, bool)
    when = When(closes, weighs, choices.pick if static else choices.branch)
    reuse = Reuse() if static else Reuse(reused(request), addition.recomputed)
    out, state = Closing(request, state, when, reuse).close(buffer)
    state = state._replace(total=state.total if keeps else ())
    return out, state.counting(
        micro_steps=choices.count_if(choices.negated(skip), state.micro_steps),
        skipped_micro_steps=choices.count_if(skip, state.skipped_micro_steps),
    )


def flush(request: Request) -> tuple[Any, MultiStepsState]:
    """Closes the window with what it holds."""
    state, storage = request.state, request.config.storage
    if not jax.tree.leaves(state.total):
        return request.params, state
    acc = storage.load(_held(state))
    check_leaves(
        sums(acc)[0],
        request.params,
        name="params",
        expected="the state",
        todo="Pass the parameters of this state.",
    )
    closes = acc.count > 0
    when = When(closes, _has_weight, choices.branch)
    buffer = storage.finish(acc, closes)
    out, flushed = Closing(request, state, when, Reuse()).close(buffer)
    emitted = jnp.where(closes, flushed.emitted, state.emitted)
    return out, flushed.counting(emitted=emitted)


class _Addition(NamedTuple):
    """One gradient that is added to a window.

    Attributes:
      request: the call that brings it.
      before: what the window holds so far.
      weight: how much the micro-batch counts; None for 1.
      skip: whether it is left out.
    """

    request: Request
    before: Accumulator
    weight: ArrayLike | None
    skip: Predicate

    def done(self) -> Accumulator:
        """The accumulator with the gradient in it."""
        with jax.named_scope("ga_optax.accumulate"):
            values = self.request.gradients, self.request.averaged
            after = accumulator.add(self.before, values, self.weight)
            return choices.select(self.skip, self.before, after)

    def finish(self, acc: Accumulator, closes: Predicate) -> Buffer:
        """What the state holds of it, divided if the window closes."""
        return self.request.config.storage.finish(acc, closes)

    def alone(self, acc: Accumulator, closes: Predicate) -> Buffer:
        """The same in a window of one micro-step: the mean of one is that one."""
        if self.weight is not None:
            return self.finish(acc, closes)
        values = self.request.gradients, self.request.averaged
        return Buffer(*acc)._replace(values=choices.cast_like(values, acc.total))

    def recomputed(self, buffer: Buffer, closes: bool) -> Buffer:
        """`buffer`, computed once more in a branch; on CPUs it is `buffer` itself.

        XLA for GPUs copies what was computed before a conditional and is passed on by
        a branch.
        """
        grads, args = buffer.values
        grads = jax.lax.platform_dependent(
            grads,
            cpu=lambda grads: grads,
            default=lambda _: self.finish(self.done(), closes).values[0],
        )
        return buffer._replace(values=(grads, args))

    def noise(self, state: MultiStepsState) -> MultiStepsState:
        """The state with this gradient in what `noise_scale` reads."""
        if not self.request.config.track_noise:
            return state
        with jax.named_scope("ga_optax.noise"):
            grads, first = self.request.gradients, state.mini_step == 0
            noise = noise_scale.add(state.noise, grads, self.weight, first)
            return state._replace(noise=choices.select(self.skip, state.noise, noise))


def _check(
    request: Request,
    held: Accumulator,
    weight: ArrayLike | None,
    emit: Predicate | None,
) -> None:
    """Raises if gradients, parameters or the weight do not fit the state."""
    names, extra_args = request.averaged, request.extra_args
    others = {name: x for name, x in extra_args.items() if name not in names}
    arguments = {**others, "emit": emit}
    request.config.storage.check(request.grads, request.params, arguments)
    keeps_nothing = _keeps_nothing(request)
    if keeps_nothing and emit is not True:
        raise ValueError(_NO_ACCUMULATOR)
    required = request.params if keeps_nothing else sums(held)[0]
    if required is not None:
        check_gradients(required, request.gradients)
    if weight is not None:
        check_weight(weight)
    request.check_params()


def _ask_whether_to_skip(request: Request) -> tuple[Predicate, MultiStepsState]:
    """Whether the micro-step is left out, and the state with what was answered."""
    state, config = request.state, request.config
    if config.should_skip is None:
        return False, state
    answer = request.ask("skip", request.grads, state)
    skip, skip_state = config.storage.agree(answer)
    skip_state = choices.cast_like(skip_state, state.skip_state)
    return skip, state._replace(skip_state=skip_state)


def _keeps_nothing(request: Request) -> bool:
    """Whether the state has no accumulator, and the gradient needs one."""
    trees = (), request.state.total, request.grads
    nothing, held, needed = map(jax.tree.structure, trees)
    return held == nothing != needed


def _is_full(count: jax.Array, k: int | jax.Array) -> jax.Array:
    """Whether a window of `count` micro-steps holds k or more."""
    k = jnp.asarray(k)
    whole = jnp.issubdtype(k.dtype, jnp.integer)
    # Never in less than 32 bits, in which counts would be rounded or wrap.
    wide = jnp.promote_types(k.dtype, jnp.int32 if whole else jnp.float32)
    return count.astype(wide) >= k.astype(wide)


def _held(state: MultiStepsState) -> Accumulator:
    """The accumulator that a state holds."""
    total = state.total, state.arg_totals
    return Accumulator(total, state.weight, state.mini_step)


def _always(buffer: Buffer) -> bool:
    del buffer
    return True


def _has_weight(buffer: Buffer) -> jax.Array:
    return buffer.weight != 0  # a NaN is not 0


_NO_ACCUMULATOR = (
    "The state must hold an accumulator if a window has more than one micro-step, but "
    "its total is empty: it was made with every_k_schedule=1. Make a new state with"
    " init, and give it the inner_opt_state and counters of this one (_replace)."
)
