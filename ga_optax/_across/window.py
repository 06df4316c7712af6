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

from ga_optax import accumulator
from ga_optax._across import choices, noise_scale
from ga_optax._across.choices import Predicate
from ga_optax._across.closing import Closing
from ga_optax._across.request import Request
from ga_optax._across.state import MultiStepsState
from ga_optax._across.storage import Held
from ga_optax._checks import check_gradients, check_leaves, check_weight
from ga_optax.accumulator import Accumulator


def micro_step(request: Request) -> tuple[Any, MultiStepsState]:
    """Adds a gradient, and closes the window if it is full."""
    storage, weight, emit = request.config.storage, request.weight, request.emit
    k = request.config.window_length(request.state.gradient_step)
    if emit is None and isinstance(k, int) and k == 1:
        emit = True
    held = storage.load(_held(request.state))
    _check(request, held, emit)
    skip, state = _ask_whether_to_skip(request)
    keeps = not _keeps_nothing(request)
    before = held if keeps else request.config.empty(request.gradients)
    addition = _Addition(request, before, skip)
    acc = addition.done()
    if keeps:
        state = addition.noise(state)
    emits = _is_full(acc.count, k) if emit is None else emit
    closes = choices.both(emits, choices.negated(skip))
    if keeps or weight is not None:
        acc = storage.finish(acc, closes)
    else:  # a window of one micro-step: the mean of one is that one
        acc = acc._replace(total=choices.cast_like(request.values, acc.total))
    if emit is True:
        acc = storage.fence(acc)
    choose, recomputed = choices.branch, addition.recomputed
    if isinstance(emit, bool):
        choose, recomputed = choices.pick, None
    # Without a weight this micro-batch counts 1, so that the window's is not 0.
    weighted = weight is not None
    closing = Closing(request, state, closes, weighted, choose, recomputed)
    out, state = closing.close(acc)
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
        acc.total[0],
        request.params,
        name="params",
        expected="the state",
        todo="Pass the parameters of this state.",
    )
    closes = acc.count > 0
    out, flushed = Closing(request, state, closes).close(storage.finish(acc, closes))
    emitted = jnp.where(closes, flushed.emitted, state.emitted)
    return out, flushed.counting(emitted=emitted)


class _Addition(NamedTuple):
    """One gradient that is added to a window.

    Attributes:
      request: the call that brings it.
      before: what the window holds so far.
      skip: whether it is left out.
    """

    request: Request
    before: Held
    skip: Predicate

    def done(self) -> Held:
        """The accumulator with the gradient in it."""
        with jax.named_scope("ga_optax.accumulate"):
            values, weight = self.request.values, self.request.weight
            after = accumulator.add(self.before, values, weight)
            return choices.select(self.skip, self.before, after)

    def recomputed(self, acc: Held, closes: bool) -> Held:
        """`acc`, computed once more in a branch; on CPUs it is `acc` itself.

        XLA for GPUs copies what was computed before a conditional and is passed on by
        a branch.
        """
        grads, args = acc.total
        finish = self.request.config.storage.finish
        grads = jax.lax.platform_dependent(
            grads,
            cpu=lambda grads: grads,
            default=lambda _: finish(self.done(), closes).total[0],
        )
        return acc._replace(total=(grads, args))

    def noise(self, state: MultiStepsState) -> MultiStepsState:
        """The state with this gradient in what `noise_scale` reads."""
        if not self.request.config.track_noise:
            return state
        with jax.named_scope("ga_optax.noise"):
            grads, first = self.request.gradients, state.mini_step == 0
            noise = noise_scale.add(state.noise, grads, self.request.weight, first)
            return state._replace(noise=choices.select(self.skip, state.noise, noise))


def _check(request: Request, held: Held, emit: Predicate | None) -> None:
    """Raises if gradients, parameters or the weight do not fit the state."""
    names, extra_args = request.averaged, request.extra_args
    others = {name: x for name, x in extra_args.items() if name not in names}
    arguments = {**others, "emit": emit}
    request.config.storage.check(request.grads, request.params, arguments)
    keeps_nothing = _keeps_nothing(request)
    if keeps_nothing and emit is not True:
        raise ValueError(_NO_ACCUMULATOR)
    required = request.params if keeps_nothing else held.total[0]
    if required is not None:
        check_gradients(required, request.gradients)
    if request.weight is not None:
        check_weight(request.weight)
    request.check_params()


def _ask_whether_to_skip(request: Request) -> tuple[Predicate, MultiStepsState]:
    """Whether the micro-step is left out, and the state with what was answered."""
    state, config = request.state, request.config
    if config.should_skip_update_fn is None:
        return False, state
    answer = request.ask("skip_state", request.grads, state)
    skip, skip_state = config.storage.agree(answer)
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


def _held(state: MultiStepsState) -> Held:
    """The accumulator that a state holds."""
    total = state.total, state.arg_totals
    return Accumulator(total, state.weight, state.mini_step)


_NO_ACCUMULATOR = (
    "The state must hold an accumulator if a window has more than one micro-step, but "
    "its total is empty: it was made with every_k_schedule=1. Make a new state with"
    " init, and give it the inner_opt_state and counters of this one (_replace)."
)
