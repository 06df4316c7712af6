"""The program of a `MultiSteps`: a micro-step, and the end of a window.

    acc  <-  add(acc, g, w)
    if count = k:   params, inner  <-  inner.update(mean(acc));   count <- 0

Nothing resets the accumulator: the first micro-step of the next window overwrites it,
so XLA updates it in place. The division is part of the last addition, so no buffer is
needed for the mean.

The inner optimizer runs in one branch of a conditional: so it is paid once a window,
and its schedules count steps. That branch reads the accumulator and does not return it,
unless updates take over its buffer. A call that returns updates has two results of the
size of the parameters: the sum inside a window, and the updates after a step, when no
one reads the sum. So both branches of the conditional return one tree, sums or updates,
in the accumulator's buffer. Two trees would cost `tx.update` and `optax.apply_updates`
a copy of the parameters in temporaries, on every backend.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ga_optax import accumulator
from ga_optax._across import choices
from ga_optax._across.choices import Predicate
from ga_optax._across.config import differentiated
from ga_optax._across.request import Request
from ga_optax._across.state import MultiStepsState
from ga_optax._across.storage import Held
from ga_optax._checks import (
    check_gradients,
    check_leaves,
    check_structure,
    check_weight,
)
from ga_optax._devices import collectives
from ga_optax.accumulator import Accumulator


def micro_step(request: Request) -> tuple[Any, MultiStepsState]:
    """Adds a gradient, and closes the window if it is full."""
    config, weight, emit = request.config, request.weight, request.emit
    storage, keeps = config.storage, request.keeps_sum
    k = config.window_length(request.state.gradient_step)
    if emit is None and isinstance(k, int) and k == 1:
        emit = True
    held = storage.load(_held(request.state))
    _check(request, held, emit)
    skip, state = _ask_whether_to_skip(request)
    taken = not skip if isinstance(skip, bool) else ~skip
    before = held if keeps else config.empty(request.gradients)

    def added() -> Held:
        with jax.named_scope("ga_optax.accumulate"):
            after = accumulator.add(before, request.values, weight)
            return choices.select(skip, before, after)

    acc = added()
    emits = _is_full(acc.count, k) if emit is None else emit
    closes = choices.both(emits, taken)
    if keeps or weight is not None:
        acc = storage.finish(acc, closes)
    else:  # a window of one micro-step: the mean of one is that one
        acc = acc._replace(total=choices.cast_like(request.values, acc.total))
    if emit is True:
        acc = storage.fence(acc)

    def sums(closes: bool) -> Any:
        return storage.finish(added(), closes).total[0]

    # Without a weight this micro-batch counts 1, so that the window's is not 0.
    weighted, static = weight is not None, isinstance(emit, bool)
    closing = _Closing(request, state, closes, weighted, static, sums)
    out, state = closing.close(acc, micro_steps=taken, skipped_micro_steps=skip)
    return out, state._replace(total=state.total if keeps else ())


def flush(request: Request) -> tuple[Any, MultiStepsState]:
    """Closes the window with what it holds."""
    state, storage = request.state, request.config.storage
    if not jax.tree.leaves(state.total):
        return request.params, state
    acc = storage.load(_held(state))
    check_leaves(
        acc.total[0],
        request.grads,
        name="params",
        expected="the state",
        todo="Pass the parameters of this state.",
    )
    closes = acc.count > 0
    out, new = _Closing(request, state, closes).close(storage.finish(acc, closes))
    counters = jnp.where(closes, new.counters, state.counters)
    return out, new._replace(counters=counters)


# -- Before it -------------------------------------------------------------------------


def _check(request: Request, held: Held, emit: Predicate | None) -> None:
    """Raises if gradients, parameters or the weight do not fit the state."""
    averaged = request.averaged
    others = {name: x for name, x in request.extra_args.items() if name not in averaged}
    given = {**others, "emit": emit}
    request.config.storage.check(request.grads, request.params, given)
    if not request.keeps_sum and emit is not True:
        raise ValueError(
            "The state must hold an accumulator if a window has more than one "
            "micro-step, but its total is empty: it was made with every_k_schedule=1. "
            "Make a new state with init, and give it the inner_opt_state and counters "
            "of this one (_replace)."
        )
    required = differentiated(request.params)
    if request.keeps_sum:
        required = held.total[0]
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
    answer = request.ask("skip_state", request.grads)
    skip, skip_state = config.storage.agree(answer)
    return skip, state._replace(skip_state=skip_state)


def _is_full(count: jax.Array, k: int | jax.Array) -> jax.Array:
    """Whether a window of `count` micro-steps holds k or more."""
    k = jnp.asarray(k)
    wide = jnp.promote_types(k.dtype, jnp.int32)  # counts would wrap in fewer bits
    return count.astype(wide) >= k.astype(wide)


def _held(state: MultiStepsState) -> Held:
    """The accumulator that a state holds."""
    total = state.total, state.arg_totals
    return Accumulator(total, state.weight, state.mini_step)


# -- The end of a window ---------------------------------------------------------------

# What a branch returns: the parameters or the updates, whether it made a step, and
# these fields of the state.
_Done = tuple[Any, jax.Array, dict[str, Any]]
_STATES = {
    "name": "The state that opt.update returns",
    "expected": "that of opt.init",
    "todo": "What opt keeps in its state must be there from init on: leave out what is "
    "not, such as optax.monitor.",
}
_CHANGED = ("inner_opt_state", "drop_state", "grad_norm")


@dataclasses.dataclass(frozen=True, eq=False)
class _Closing:
    """The end of a call: a step if the window closes, else nothing.

    Attributes:
      request: the call.
      state: its state, with what this micro-step changed outside of the accumulator.
      closes: whether this call closes the window.
      weighted: whether micro-batches have weights: without weight there is no step.
      static: whether there is to be no conditional; see `choices.branch`.
      sums: computes anew what the state holds of gradients, given whether the window
        closes, if updates may take over their buffer.
    """

    request: Request
    state: MultiStepsState
    closes: Predicate
    weighted: bool = True
    static: bool = False
    sums: Callable[[bool], Any] | None = None

    def close(self, acc: Held, **happened: Predicate) -> tuple[Any, MultiStepsState]:
        """What the call returns; `happened` says what else the state counts.

        The inner optimizer does not run if the window has weight 0, or is dropped.
        """
        storage = self.request.config.storage

        def stay() -> _Done:
            return self._leave(self._within(acc, closes=False))

        def merged() -> _Done:
            # Only the sum over all devices says whether there is any weight.
            whole = storage.merged(acc)
            return self._choose(self._has_weight(whole), lambda: self._run(whole), stay)

        if storage.axes:
            done = self._choose(self.closes, merged, stay)
        else:
            steps = choices.both(self.closes, self._has_weight(acc))
            done = self._choose(steps, lambda: self._run(acc), stay)
        out, emitted, changed = done
        (total, arg_totals), weight, count = storage.store(acc)
        if self._reused:
            # What a branch returned as what the call returns, and the accumulators.
            sums = out
            updates = choices.select(emitted, out, jax.tree.map(jnp.zeros_like, out))
            out = choices.by_leaf(self._reused, updates, sums)
            total = choices.by_leaf(self._reused, sums, total)
        state = self.state._replace(
            mini_step=jnp.where(self.closes, jnp.zeros_like(count), count),
            gradient_step=choices.count_if(emitted, self.state.gradient_step),
            total=total,
            weight=jnp.where(self.closes, jnp.zeros_like(weight), weight),
            arg_totals=arg_totals,
            **changed,
        )
        return out, state.counting(
            emitted=emitted, skipped_windows=self.closes & ~emitted, **happened
        )

    @property
    def _choose(self) -> Callable[..., _Done]:
        return functools.partial(choices.branch, both=self.static)

    def _has_weight(self, acc: Held) -> Predicate:
        return acc.weight != 0 if self.weighted else True  # a NaN is not 0

    @functools.cached_property
    def _reused(self) -> list[bool]:
        """Which updates take over the buffer of their accumulator; `[]` if none do."""
        request = self.request
        if self.static or request.applies or request.config.storage.axes:
            return []
        trees = request.state.total, request.bare
        (total, held), (bare, returned) = map(jax.tree.flatten, trees)
        if held != returned:
            return []
        pairs = zip(total, bare, strict=True)
        fits = [(x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs]
        return fits if any(fits) else []

    def _within(self, acc: Held, closes: bool) -> Held:
        """What the state holds, as a branch of the conditional reads it.

        XLA for GPUs copies what was computed before a conditional and is passed on by
        a branch. So it is computed once more there; on CPUs it is `acc` itself.
        """
        if self.sums is None or not self._reused:
            return acc
        (grads, args), again = acc.total, functools.partial(self.sums, closes)
        inside = jax.lax.platform_dependent(
            grads, cpu=lambda grads: grads, default=lambda _: again()
        )
        return acc._replace(total=(choices.by_leaf(self._reused, inside, grads), args))

    def _run(self, acc: Held) -> _Done:
        """A step, unless the window is dropped."""
        acc, request = self._within(acc, closes=True), self.request
        if request.config.should_drop_window_fn is None:
            return self._step(acc)
        drop, drop_state = request.ask("drop_state", acc.total[0])
        answer = {"drop_state": drop_state}
        return self._choose(
            ~drop,
            lambda: self._step(acc, **answer),
            lambda: self._leave(acc, **answer),
        )

    def _step(self, acc: Held, **changed: Any) -> _Done:
        """Runs the inner optimizer."""
        request, state = self.request, self.state
        with jax.named_scope("ga_optax.update"):
            (grads, averaged), norm = self._norm(acc)
            values, before = (request.seen(grads), averaged), state.inner_opt_state
            updates, inner = request.update(values, before, request.params)
            check_structure(before, inner, **_STATES)
            changed = {
                "inner_opt_state": choices.cast_like(inner, before),
                "drop_state": state.drop_state,
                "grad_norm": norm,
                **changed,
            }
            out = choices.cast_like(updates, request.bare)
            if request.applies:
                out = optax.apply_updates(request.params, out)
            return out, jnp.ones_like(state.mini_step, bool), changed

    def _leave(self, acc: Held, **changed: Any) -> _Done:
        """Leaves everything as it is."""
        out = self.request.params
        if not self.request.applies:
            out = jax.tree.map(collectives.zeros, self.request.bare)
        if self._reused:  # sums in the place of zero updates
            out = choices.by_leaf(self._reused, acc.total[0], out)
        before = {name: getattr(self.state, name) for name in _CHANGED}
        return out, jnp.zeros_like(self.state.mini_step, bool), before | changed

    def _norm(self, acc: Held) -> tuple[Any, Any]:
        """What the inner optimizer will see, and its norm, if that is asked for."""
        if not self.request.config.track_norm:
            return acc.total, self.state.grad_norm
        with jax.named_scope("ga_optax.norm"):
            norm = jnp.sqrt(_squared_norm(acc.total[0]))
            norm = norm.astype(self.state.grad_norm.dtype)
            # Before updates take over the buffer: XLA would copy it to read it after.
            return jax.lax.optimization_barrier((acc.total, norm))


def _squared_norm(tree: optax.Updates) -> jax.Array:
    """Σ |x|² over all leaves, which are read once; nothing is written."""
    # Without the barrier XLA would share the squares, or the wider dtype, with what the
    # accumulator or the optimizer computes from the same leaf, and write them out.
    tree = jax.lax.optimization_barrier(tree)
    terms = [
        jnp.sum(jnp.square(part.astype(jnp.promote_types(part.dtype, jnp.float32))))
        for leaf in map(jnp.asarray, jax.tree.leaves(tree))
        for part in accumulator.parts(leaf)
    ]
    dtype = jnp.result_type(float)
    return sum((term.astype(dtype) for term in terms), jnp.zeros([], dtype))
