"""The program of a `MultiSteps`: a micro-step, and the step that closes the window.

    acc  <-  add(acc, g, w)
    if count = k:   params, inner  <-  inner.update(mean(acc));   count <- 0

The inner update stands inside one branch of a `lax.cond`, so it is paid once a window
and its schedules count steps. That branch reads the accumulator and does not return it,
and nothing resets it (the next window clears it), so XLA updates it in place. The
division is part of the last addition, so no buffer is needed for the mean.

If the call returns updates, these have the accumulator's buffer: one branch returns the
sum, and the other the updates, after which no one reads the sum. On GPUs and TPUs both
branches do the addition themselves. XLA for GPUs copies what a branch passes on.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ga_optax import accumulator
from ga_optax._across import choices, noise_scale
from ga_optax._across.choices import Predicate
from ga_optax._across.place import Buffer, Choose, ManyDevices, OneDevice
from ga_optax._across.state import MultiStepsState, check_state, state_type
from ga_optax._checks import (
    check_arrays,
    check_gradients,
    check_int,
    check_leaves,
    check_number,
    check_weight,
    is_int,
    is_integer,
)
from ga_optax.accumulator import Accumulator

SkipFn = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What a call was given, and what it has to return.

    Attributes:
      inner: the inner optimizer.
      place: where the sum lies.
      state: the state.
      grads: gradients with the dtypes that the bare optimizer would be given.
      params: the parameters, if known.
      extra_args: for the inner optimizer.
      averaged: those of them of which it gets the mean, as scalars.
      applies: whether the call returns the parameters, with the updates applied to
        them, or the updates.
    """

    inner: optax.GradientTransformationExtraArgs
    place: OneDevice | ManyDevices
    state: MultiStepsState
    grads: optax.Updates
    params: Any
    extra_args: dict[str, Any]
    averaged: dict[str, jax.Array]
    applies: bool

    @functools.cached_property
    def bare(self) -> Any:
        """The shapes and dtypes of what the inner optimizer alone would return."""

        def update(values: Any, state: optax.OptState, params: Any) -> Any:
            return self.update(values, state, params)[0]

        values = self.place.of_all((self.grads, self.averaged))
        return jax.eval_shape(update, values, self.state.inner_opt_state, self.params)

    def update(self, values: Any, state: optax.OptState, params: Any) -> Any:
        """Runs the inner optimizer on gradients and the means of extra arguments."""
        grads, averaged = values
        return self.inner.update(grads, state, params, **self.extra_args, **averaged)

    def check_params(self) -> None:
        """Raises if the parameters are no arrays, or missing and needed."""
        if self.params is not None:
            return check_arrays("params", self.params)
        try:
            _ = self.bare
        except Exception as error:
            try:
                _ = dataclasses.replace(self, params=self.grads).bare
            except Exception:
                raise error from None  # it fails for another reason
            raise ValueError(_NO_PARAMS) from error

    def lends(self) -> list[bool]:
        """Whether an update fits into the buffer of its accumulator, leaf by leaf."""
        trees = self.state.total, self.bare
        (total, held), (bare, returned) = map(jax.tree.flatten, trees)
        if self.applies or not self.place.lends or held != returned:
            return []
        pairs = zip(total, bare, strict=True)
        return [(x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs]

    def without_step(self) -> Any:
        """What the call returns if there is no step."""
        if self.applies:
            return self.params
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.bare)

    def with_step(self, updates: optax.Updates) -> Any:
        """What the call returns after a step."""
        updates = choices.cast_like(updates, self.bare)
        return optax.apply_updates(self.params, updates) if self.applies else updates

    def seen(self, grads: optax.Updates) -> optax.Updates:
        """What the inner optimizer sees: the accumulator's dtype, if it can take that.

        Some optimizers have branches or scatters of their own, whose dtypes agree only
        if gradients, parameters and state have one dtype (`galore`, `novograd`,
        `apply_if_finite` for bfloat16). Tracing them with the wide gradients says so.
        They get what they would be given alone: the gradients' dtypes.
        """
        narrow = choices.cast_like(grads, self.grads)
        before, after = (jax.tree.map(jnp.result_type, g) for g in (grads, narrow))
        if before == after:
            return grads
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                _ = dataclasses.replace(self, grads=grads).bare
        except (TypeError, ValueError, FutureWarning):
            return narrow
        return grads


class _Loan(NamedTuple):
    """Accumulators whose buffers hold the updates after a step.

    Attributes:
      lends: which leaves do.
      within: the buffer, added up inside of a branch, given whether it closes.
    """

    lends: list[bool]
    within: Callable[[bool], Buffer]

    def out(self, buffer: Buffer, zeros: optax.Updates) -> optax.Updates:
        """What a branch without a step returns: sums, or zeros beside them."""
        return choices.by_leaf(self.lends, buffer.values[0], zeros)

    def settled(self, done: "_Outcome", total: Any) -> tuple[optax.Updates, Any]:
        """What a branch returned as the updates and the accumulators."""
        zeros = jax.tree.map(jnp.zeros_like, done.out)
        updates = choices.select(done.emitted, done.out, zeros)
        return (
            choices.by_leaf(self.lends, updates, done.out),
            choices.by_leaf(self.lends, done.out, total),
        )


class _Outcome(NamedTuple):
    """What closing a window leaves: `out` is either the updates or the parameters."""

    out: Any
    inner_opt_state: optax.OptState
    drop_state: Any
    emitted: jax.Array
    noise: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """The configuration of a `MultiSteps`, and the functions that close over it."""

    inner: optax.GradientTransformationExtraArgs
    every_k: int | Callable[[jax.Array], ArrayLike]
    should_skip: SkipFn | None
    should_drop: SkipFn | None
    dtype: np.dtype | None
    track_noise: bool
    mean_argnames: tuple[str, ...]
    place: OneDevice | ManyDevices

    # -- The three calls ---------------------------------------------------------------

    def init(self, params: optax.Params) -> MultiStepsState:
        acc = self.empty(params)
        held = self.place.start(acc)
        skip_state, drop_state = (), ()
        if self.should_skip is not None:
            zeros = optax.tree.zeros_like(params)
            _, skip_state = _checked(self.should_skip(zeros, acc.count, params))
        if self.should_drop is not None:
            _, drop_state = _checked(self.should_drop(_sums(acc)[0], acc.count, params))
        total, arg_totals = _sums(held)
        return state_type(self.place.use_grad_mean)(
            mini_step=acc.count,
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=self.inner.init(params),
            total=() if self.every_k == 1 else total,
            skip_state=skip_state,
            drop_state=drop_state,
            weight=held.weight,
            emitted=jnp.zeros([], bool),
            micro_steps=jnp.zeros([], jnp.int32),
            skipped_micro_steps=jnp.zeros([], jnp.int32),
            skipped_windows=jnp.zeros([], jnp.int32),
            arg_totals=arg_totals,
            noise=noise_scale.init(acc.weight) if self.track_noise else (),
        )

    def request(
        self,
        state: Any,
        grads: optax.Updates,
        params: optax.Params | None,
        extra_args: dict[str, Any],
        *,
        applies: bool,
    ) -> Request:
        """A call of this `MultiSteps`; raises if the state is not one of it."""
        state = check_state(state)
        if self.track_noise and not isinstance(state.noise, noise_scale.NoiseState):
            raise ValueError(_NO_NOISE)
        if sorted(state.arg_totals) != sorted(self.mean_argnames):
            raise ValueError(
                "The state must hold a sum for each of mean_argnames, "
                f"{self.mean_argnames}, but it holds {tuple(state.arg_totals)}. Put "
                "those of a new state into it while no window is open: "
                "state._replace(arg_totals=tx.init(params).arg_totals)."
            )
        averaged = {}
        for name in self.mean_argnames:
            value = check_number(name, extra_args.get(name), _AVERAGED)
            averaged[name] = value.astype(jnp.result_type(float))
        others = {k: x for k, x in extra_args.items() if k not in averaged}
        return Request(
            self.inner, self.place, state, grads, params, others, averaged, applies
        )

    def empty(self, params: Any) -> Accumulator:
        """An empty accumulator for gradients and the extra arguments to average."""
        acc = accumulator.init(params, self.dtype)
        args = {name: jnp.zeros_like(acc.weight) for name in self.mean_argnames}
        return acc._replace(total=(acc.total, args))

    def micro_step(
        self, request: Request, weight: ArrayLike | None, emit: Predicate | None
    ) -> tuple[Any, MultiStepsState]:
        """Adds a gradient, and closes the window if it is full."""
        state = request.state
        k = self.window_length(state.gradient_step)
        if emit is None and isinstance(k, int) and k == 1:
            emit = True

        acc = self.place.load(_held(state))
        arguments = {**request.extra_args, "emit": emit}
        self.place.check(request.grads, request.params, arguments)
        structures = map(jax.tree.structure, ((), state.total, request.grads))
        nothing, held, needed = structures
        keeps_nothing = held == nothing != needed
        if keeps_nothing and emit is not True:
            raise ValueError(_NO_ACCUMULATOR)
        grads = jax.tree.map(_floating, request.grads)
        required = request.params if keeps_nothing else _sums(acc)[0]
        if required is not None:
            check_gradients(required, grads)
        if weight is not None:
            check_weight(weight)
        request.check_params()

        skip: Predicate = False
        if self.should_skip is not None:
            answer = _ask(self.should_skip, request.grads, request, state)
            skip, skip_state = self.place.agree(answer)
            state = state._replace(
                skip_state=choices.cast_like(skip_state, state.skip_state)
            )

        if keeps_nothing:
            acc = self.empty(grads)

        before = acc

        def added() -> Accumulator:
            with jax.named_scope("ga_optax.accumulate"):
                after = accumulator.add(before, (grads, request.averaged), weight)
                return choices.select(skip, before, after)

        acc = added()
        if self.track_noise and not keeps_nothing:
            with jax.named_scope("ga_optax.noise"):
                first = state.mini_step == 0
                noise = noise_scale.add(state.noise, grads, weight, first)
                state = state._replace(noise=choices.select(skip, state.noise, noise))

        if emit is None:
            k = jnp.asarray(k)
            whole = jnp.issubdtype(k.dtype, jnp.integer)
            # Never in less than 32 bits, in which counts would be rounded or wrap.
            wide = jnp.promote_types(k.dtype, jnp.int32 if whole else jnp.float32)
            emits: Predicate = acc.count.astype(wide) >= k.astype(wide)
        else:
            emits = emit
        closes = choices.both(emits, choices.negated(skip))
        if keeps_nothing and weight is None:  # the mean of one is that one
            one = choices.cast_like((grads, request.averaged), acc.total)
            buffer = Buffer(*acc)._replace(values=one)
        else:
            buffer = self.place.finish(acc, closes)
        if emit is True:
            buffer = self.place.fence(buffer)
        # Without a weight this micro-batch counts 1, so that the window's is not 0.
        weighs = _always if weight is None else _has_weight
        choose = choices.pick if isinstance(emit, bool) else choices.branch
        lends = [] if isinstance(emit, bool) else request.lends()

        def within(closes: bool) -> Buffer:
            outside, args = buffer.values
            grads = jax.lax.platform_dependent(
                outside,
                cpu=lambda grads: grads,
                default=lambda _: self.place.finish(added(), closes).values[0],
            )
            return buffer._replace(
                values=(choices.by_leaf(lends, grads, outside), args)
            )

        loan = _Loan(lends, within) if any(lends) else None
        done = self.close(request, state, buffer, closes, weighs, choose, loan)
        state, out = self.next_state(state, buffer, closes, done), done.out
        if loan is not None:
            out, total = loan.settled(done, state.total)
            state = state._replace(total=total)
        return out, state._replace(
            total=() if keeps_nothing else state.total,
            micro_steps=choices.count_if(choices.negated(skip), state.micro_steps),
            skipped_micro_steps=choices.count_if(skip, state.skipped_micro_steps),
        )

    def flush(self, request: Request) -> tuple[Any, MultiStepsState]:
        """Closes the window with what it holds."""
        state = request.state
        if not jax.tree.leaves(state.total):
            return request.params, state
        acc = self.place.load(_held(state))
        check_leaves(
            _sums(acc)[0],
            request.params,
            name="params",
            expected="the state",
            todo="Pass the parameters of this state.",
        )
        closes = acc.count > 0
        buffer = self.place.finish(acc, closes)
        outcome = self.close(
            request, state, buffer, closes, _has_weight, choices.branch
        )
        flushed = self.next_state(state, buffer, closes, outcome)
        return outcome.out, flushed._replace(
            emitted=jnp.where(closes, flushed.emitted, state.emitted)
        )

    # -- What they share ---------------------------------------------------------------

    def close(
        self,
        request: Request,
        state: MultiStepsState,
        buffer: Buffer,
        closes: Predicate,
        weighs: Callable[[Buffer], Predicate],
        choose: Choose[_Outcome],
        loan: _Loan | None = None,
    ) -> _Outcome:
        """Runs the inner optimizer if the window `closes`; else leaves everything.

        It does not run if the window has weight 0, or is dropped.
        """

        def leave(buffer: Buffer, drop_state: Any) -> _Outcome:
            no = jnp.zeros_like(state.emitted)
            out = request.without_step()
            out = out if loan is None else loan.out(buffer, out)
            return _Outcome(out, state.inner_opt_state, drop_state, no, state.noise)

        def step(buffer: Buffer, drop_state: Any) -> _Outcome:
            with jax.named_scope("ga_optax.update"):
                grads, averaged = buffer.values
                values = request.seen(grads), averaged
                inner = state.inner_opt_state
                updates, inner = request.update(values, inner, request.params)
                inner = choices.cast_like(inner, state.inner_opt_state)
                yes = jnp.ones_like(state.emitted)
                out = request.with_step(updates)
                return _Outcome(out, inner, drop_state, yes, self.noise(state, buffer))

        def run(buffer: Buffer) -> _Outcome:
            buffer = buffer if loan is None else loan.within(True)
            if self.should_drop is None:
                return step(buffer, state.drop_state)
            drop, drop_state = _ask(self.should_drop, buffer.values[0], request, state)
            drop_state = choices.cast_like(drop_state, state.drop_state)
            return choose(
                *(~drop, lambda: step(buffer, drop_state)),
                lambda: leave(buffer, drop_state),
            )

        def stay() -> _Outcome:
            held = buffer if loan is None else loan.within(False)
            return leave(held, state.drop_state)

        return self.place.close(buffer, closes, weighs, run, stay, choose)

    def next_state(
        self, state: MultiStepsState, buffer: Buffer, closes: Predicate, done: _Outcome
    ) -> MultiStepsState:
        """The state after the call; nothing resets the buffer."""
        buffer = self.place.store(buffer)
        (total, arg_totals), weight, count = buffer
        return state._replace(
            mini_step=jnp.where(closes, jnp.zeros_like(count), count),
            gradient_step=choices.count_if(done.emitted, state.gradient_step),
            inner_opt_state=done.inner_opt_state,
            total=total,
            drop_state=done.drop_state,
            weight=jnp.where(closes, jnp.zeros_like(weight), weight),
            emitted=done.emitted,
            skipped_windows=choices.count_if(
                closes & ~done.emitted, state.skipped_windows
            ),
            arg_totals=arg_totals,
            noise=done.noise,
        )

    def noise(self, state: MultiStepsState, buffer: Buffer) -> Any:
        """What `noise_scale` reads, after a window that ran the inner optimizer."""
        if not self.track_noise or not jax.tree.leaves(state.total):
            return state.noise
        mean = self.place.use_grad_mean
        with jax.named_scope("ga_optax.noise"):
            return noise_scale.close(state.noise, buffer.values[0], buffer.weight, mean)

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


def _held(state: MultiStepsState) -> Accumulator:
    total = state.total, state.arg_totals
    return Accumulator(total, state.weight, state.mini_step)


def _sums(acc: Accumulator) -> tuple[Any, dict[str, jax.Array]]:
    """The sum of gradients, and those of extra arguments."""
    total: Any = acc.total
    return total


def _floating(grads: ArrayLike) -> ArrayLike:
    """Gradients of integer parameters, which are integers in some programs."""
    integers = is_integer(getattr(grads, "dtype", np.dtype(float)))
    return jnp.asarray(grads, float) if integers else grads


def _always(buffer: Buffer) -> bool:
    del buffer
    return True


def _has_weight(buffer: Buffer) -> jax.Array:
    return buffer.weight != 0  # a NaN is not 0


def _ask(
    fn: SkipFn, updates: optax.Updates, request: Request, state: MultiStepsState
) -> tuple[jax.Array, Any]:
    """Calls a function that skips or drops."""
    return _checked(fn(updates, state.gradient_step, request.params))


def _checked(answer: Any) -> tuple[jax.Array, Any]:
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


_NO_ACCUMULATOR = (
    "The state must hold an accumulator if a window has more than one micro-step, but "
    "its total is empty: it was made with every_k_schedule=1. Make a new state with"
    " init, and give it the inner_opt_state and counters of this one (_replace)."
)

_NO_PARAMS = (
    "The inner optimizer needs the parameters, but params is None. Pass them: "
    "update(grads, state, params)."
)

_AVERAGED = "mean_argnames names it: pass the value of the micro-batch in every call."

_NO_NOISE = (
    "The state must hold a NoiseState if track_noise=True, but its field noise is "
    "empty: it was made without. Put the noise of a new state into this one while no "
    "window is open: state._replace(noise=tx.init(params).noise)."
)
