"""The end of a window: the inner optimizer runs, in one branch of a conditional.

So it is paid once a window, and its schedules count steps. That branch reads the
accumulator and does not return it, unless the updates take over its buffer (`reuse`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ga_optax._across import choices, noise_scale
from ga_optax._across.config import Config
from ga_optax._across.request import Request
from ga_optax._across.reuse import Reuse
from ga_optax._across.state import MultiStepsState
from ga_optax._across.storage import Buffer, When


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
      when: whether the window closes, and how the program chooses.
      reuse: which updates take over the buffer of their accumulator.
    """

    request: Request
    state: MultiStepsState
    when: When
    reuse: Reuse

    @property
    def _config(self) -> Config:
        return self.request.config

    def close(self, buffer: Buffer) -> tuple[Any, MultiStepsState]:
        """What the call returns.

        The inner optimizer does not run if the window has weight 0, or is dropped.
        """

        def stay() -> _Outcome:
            held = self.reuse.within(buffer, closes=False)
            return self._leave(held, self.state.drop_state)

        done = self._config.storage.close(buffer, self.when, self._run, stay)
        state = self._next(buffer, done)
        out, total = self.reuse.taken_apart(done.out, done.emitted, state.total)
        return out, state._replace(total=total)

    def _run(self, buffer: Buffer) -> _Outcome:
        """A step, unless the window is dropped."""
        buffer = self.reuse.within(buffer, closes=True)
        state = self.state
        if self._config.should_drop is None:
            return self._step(buffer, state.drop_state)
        drop, drop_state = self.request.ask("drop", buffer.values[0], state)
        drop_state = choices.cast_like(drop_state, state.drop_state)
        return self.when.choose(
            ~drop,
            lambda: self._step(buffer, drop_state),
            lambda: self._leave(buffer, drop_state),
        )

    def _step(self, buffer: Buffer, drop_state: Any) -> _Outcome:
        """Runs the inner optimizer."""
        request, before = self.request, self.state.inner_opt_state
        with jax.named_scope("ga_optax.update"):
            (grads, averaged), norm = self._norm(buffer)
            values = request.seen(grads), averaged
            updates, inner = request.update(values, before, request.params)
            inner = choices.cast_like(inner, before)
            yes = jnp.ones_like(self.state.mini_step, bool)
            out = request.with_step(updates)
            tracked = self._noise(buffer), norm
            return _Outcome(out, inner, drop_state, yes, *tracked)

    def _leave(self, buffer: Buffer, drop_state: Any) -> _Outcome:
        """Leaves everything as it is."""
        state = self.state
        no = jnp.zeros_like(state.mini_step, bool)
        out = self.reuse.unchanged(buffer, self.request.without_step())
        tracked = state.noise, state.grad_norm
        return _Outcome(out, state.inner_opt_state, drop_state, no, *tracked)

    def _noise(self, buffer: Buffer) -> Any:
        """What `noise_scale` reads, after a window that ran the inner optimizer."""
        noise = self.state.noise
        if not self._config.track_noise or not jax.tree.leaves(self.state.total):
            return noise
        mean, (grads, _) = self._config.storage.use_grad_mean, buffer.values
        with jax.named_scope("ga_optax.noise"):
            return noise_scale.close(noise, grads, buffer.weight, mean)

    def _norm(self, buffer: Buffer) -> tuple[Any, Any]:
        """What the inner optimizer will see, and its norm, if that is asked for."""
        norm = self.state.grad_norm
        if not self._config.track_norm:
            return buffer.values, norm
        with jax.named_scope("ga_optax.norm"):
            new = jnp.sqrt(noise_scale.squared_norm(buffer.values[0]))
            # Before updates take over the buffer: XLA would copy it to read it after.
            return jax.lax.optimization_barrier((buffer.values, new.astype(norm.dtype)))

    def _next(self, buffer: Buffer, done: _Outcome) -> MultiStepsState:
        """The state after the call; nothing resets the buffer."""
        (total, arg_totals), weight, count = self._config.storage.store(buffer)
        state, closes = self.state, self.when.closes
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
