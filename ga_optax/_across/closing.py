"""The end of a window: the inner optimizer runs, in one branch of a conditional.

So it is paid once a window, and its schedules count steps. That branch reads the
accumulator and does not return it, unless updates take over its buffer.

A call that returns updates has two results of the size of the parameters: the sum
inside a window, and the updates after a step, when no one reads the sum. So both
branches of the conditional return one tree, sums or updates, in the accumulator's
buffer. Two trees would cost `tx.update` and `optax.apply_updates` a copy of the
parameters in temporaries, on every backend.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ga_optax._across import choices, noise_scale
from ga_optax._across.choices import Predicate
from ga_optax._across.config import Config
from ga_optax._across.request import Request
from ga_optax._across.state import MultiStepsState
from ga_optax._across.storage import Held


class _Outcome(NamedTuple):
    """What a branch returns: `out` is either the updates or the parameters."""

    out: Any
    inner_opt_state: optax.OptState
    drop_state: Any
    emitted: jax.Array
    noise: Any
    grad_norm: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Closing:
    """The end of a call: a step if the window closes, else nothing.

    Attributes:
      request: the call.
      state: its state, with what this micro-step changed outside of the accumulator.
      closes: whether this call closes the window.
      weighted: whether micro-batches have weights: without weight there is no step.
      choose: `choices.branch` or `choices.pick`.
      recomputed: what the state holds as a branch reads it where updates take over its
        buffer, given that outside and whether the window closes; None if none may.
    """

    request: Request
    state: MultiStepsState
    closes: Predicate
    weighted: bool = True
    choose: Callable[..., Any] = choices.branch
    recomputed: Callable[[Held, bool], Held] | None = None

    @property
    def _config(self) -> Config:
        return self.request.config

    def close(self, acc: Held) -> tuple[Any, MultiStepsState]:
        """What the call returns.

        The inner optimizer does not run if the window has weight 0, or is dropped.
        """

        def stay() -> _Outcome:
            return self._leave(self._within(acc, closes=False), self.state.drop_state)

        def merged() -> _Outcome:
            # Only the sum over all devices says whether there is any weight.
            whole = storage.merged(acc)
            return self.choose(self._has_weight(whole), lambda: self._run(whole), stay)

        storage = self._config.storage
        if storage.axes:
            done = self.choose(self.closes, merged, stay)
        else:
            steps = choices.both(self.closes, self._has_weight(acc))
            done = self.choose(steps, lambda: self._run(acc), stay)
        out, state = done.out, self._next(acc, done)
        if not self._reused:
            return out, state
        # What a branch returned as what the call returns, and the accumulators.
        updates = choices.select(done.emitted, out, jax.tree.map(jnp.zeros_like, out))
        total = choices.by_leaf(self._reused, out, state.total)
        return choices.by_leaf(self._reused, updates, out), state._replace(total=total)

    def _has_weight(self, acc: Held) -> Predicate:
        return acc.weight != 0 if self.weighted else True  # a NaN is not 0

    @functools.cached_property
    def _reused(self) -> list[bool]:
        """Which updates take over the buffer of their accumulator; `[]` if none do."""
        request = self.request
        if self.recomputed is None or request.applies or self._config.storage.axes:
            return []
        trees = request.state.total, request.bare
        (total, held), (bare, returned) = map(jax.tree.flatten, trees)
        if held != returned:
            return []
        pairs = zip(total, bare, strict=True)
        fits = [(x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs]
        return fits if any(fits) else []

    def _within(self, acc: Held, closes: bool) -> Held:
        """What the state holds, as a branch of the conditional reads it."""
        if self.recomputed is None or not self._reused:
            return acc
        grads, args = acc.total
        inside, _ = self.recomputed(acc, closes).total
        return acc._replace(total=(choices.by_leaf(self._reused, inside, grads), args))

    def _run(self, acc: Held) -> _Outcome:
        """A step, unless the window is dropped."""
        acc = self._within(acc, closes=True)
        state = self.state
        if self._config.should_drop_window_fn is None:
            return self._step(acc, state.drop_state)
        drop, drop_state = self.request.ask("drop_state", acc.total[0], state)
        return self.choose(
            ~drop,
            lambda: self._step(acc, drop_state),
            lambda: self._leave(acc, drop_state),
        )

    def _step(self, acc: Held, drop_state: Any) -> _Outcome:
        """Runs the inner optimizer."""
        request, before = self.request, self.state.inner_opt_state
        with jax.named_scope("ga_optax.update"):
            (grads, averaged), norm = self._norm(acc)
            values = request.seen(grads), averaged
            updates, inner = request.update(values, before, request.params)
            inner = choices.cast_like(inner, before)
            yes = jnp.ones_like(self.state.mini_step, bool)
            out = request.with_step(updates)
            tracked = self._noise(acc), norm
            return _Outcome(out, inner, drop_state, yes, *tracked)

    def _leave(self, acc: Held, drop_state: Any) -> _Outcome:
        """Leaves everything as it is."""
        state = self.state
        no = jnp.zeros_like(state.mini_step, bool)
        out = self.request.without_step()
        if self._reused:  # sums in the place of zero updates
            out = choices.by_leaf(self._reused, acc.total[0], out)
        tracked = state.noise, state.grad_norm
        return _Outcome(out, state.inner_opt_state, drop_state, no, *tracked)

    def _noise(self, acc: Held) -> Any:
        """What `noise_scale` reads, after a window that ran the inner optimizer."""
        noise = self.state.noise
        if not self._config.track_noise or not jax.tree.leaves(self.state.total):
            return noise
        mean, (grads, _) = self._config.use_grad_mean, acc.total
        with jax.named_scope("ga_optax.noise"):
            return noise_scale.close(noise, grads, acc.weight, mean)

    def _norm(self, acc: Held) -> tuple[Any, Any]:
        """What the inner optimizer will see, and its norm, if that is asked for."""
        norm = self.state.grad_norm
        if not self._config.track_norm:
            return acc.total, norm
        with jax.named_scope("ga_optax.norm"):
            new = jnp.sqrt(noise_scale.squared_norm(acc.total[0]))
            # Before updates take over the buffer: XLA would copy it to read it after.
            return jax.lax.optimization_barrier((acc.total, new.astype(norm.dtype)))

    def _next(self, acc: Held, done: _Outcome) -> MultiStepsState:
        """The state after the call; nothing resets the buffer."""
        (total, arg_totals), weight, count = self._config.storage.store(acc)
        state, closes = self.state, self.closes
        return state._replace(
            mini_step=jnp.where(closes, jnp.zeros_like(count), count),
            gradient_step=choices.count_if(done.emitted, state.gradient_step),
            inner_opt_state=done.inner_opt_state,
            total=total,
            drop_state=done.drop_state,
            weight=jnp.where(closes, jnp.zeros_like(weight), weight),
            arg_totals=arg_totals,
            noise=done.noise,
            grad_norm=done.grad_norm,
        ).counting(
            emitted=done.emitted,
            skipped_windows=choices.count_if(
                closes & ~done.emitted, state.skipped_windows
            ),
        )
