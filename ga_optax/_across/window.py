"""A call of `MultiSteps`: a micro-step, and the close of a window.

    acc  <-  add(acc, g, w)
    if count = k:   params, inner  <-  inner.update(mean(acc));   count <- 0

`micro_step` and `close_early` run a `Request`, the record of one call.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .. import _checks, accumulator
from .._devices import collectives
from ..accumulator import Accumulator
from . import choices
from .choices import Predicate
from .config import Config, WindowSum, checked, differentiated
from .state import OPTIONS, MultiStepsState, check_state

# == The request =======================================================================


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The arguments of a call; raises if the state does not fit this `MultiSteps`.

    Attributes:
      config: the arguments of the `MultiSteps`.
      state: the state.
      grads: the gradients, in the caller's dtypes.
      params: the parameters, if known.
      extra_args: the arguments for the inner optimizer.
      weight: the weight of the micro-batch; None for 1.
      emit: whether the window closes; None if the state decides by counting.
      applies: whether the call returns updated parameters, or the updates.
    """

    config: Config
    state: Any
    grads: optax.Updates
    params: Any
    extra_args: dict[str, Any]
    weight: ArrayLike | None = None
    emit: Predicate | None = None
    applies: bool = True

    def __post_init__(self) -> None:
        check_state(self.state)
        for field, new in jax.eval_shape(self.config.optional_fields).items():
            if new != ():
                self._check_field(field, new)
        _ = self.averaged  # raises if an argument is no number

    def _check_field(self, field: str, new: Any) -> None:
        """Raises unless a field of the state has the structure of `new`."""
        required, actual = map(jax.tree.structure, (new, getattr(self.state, field)))
        if required != actual:
            kind = f"{actual}, not {required}" if actual.num_leaves else "empty"
            when = " while no window is open" * (field == "arg_totals")
            raise ValueError(
                f"The field {field} of the state must fit {OPTIONS[field]}, but "
                f"it is {kind}: the state was made without that option, or with "
                f"another one. Take the field from a new state{when}: "
                f"state._replace({field}=tx.init(params).{field})."
            )

    @functools.cached_property
    def keeps_sum(self) -> bool:
        """True if the state has an accumulator, or the gradient is `()`."""
        trees = (), self.state.total, self.grads
        empty, total, grads = map(jax.tree.structure, trees)
        return total != empty or grads == empty

    @functools.cached_property
    def averaged(self) -> dict[str, jax.Array]:
        """The extra arguments to average over the window, as scalars."""
        dtype, todo = jnp.result_type(float), _AVERAGED
        return {
            name: _checks.check_number(name, self.extra_args.get(name), todo).astype(
                dtype
            )
            for name in self.config.mean_argnames
        }

    @functools.cached_property
    def gradients(self) -> optax.Updates:
        """The gradients to add, floating for integer parameters too."""
        return jax.tree.map(_floating, self.grads)

    @functools.cached_property
    def update_types(self) -> Any:
        """The shapes and dtypes of the updates of the inner optimizer used alone."""
        values = self.config.storage.merged_types((self.grads, self.averaged))
        arguments = values, self.state.inner_opt_state, self.params
        return jax.eval_shape(self.update, *arguments)[0]

    def update(self, values: Any, state: optax.OptState, params: Any) -> Any:
        """Runs the inner optimizer on gradients and the means of extra arguments."""
        grads, averaged = values
        arrays = jax.tree.map(_as_array, (grads, state, params))
        return self.config.inner.update(*arrays, **(self.extra_args | averaged))

    def inner_gradients(self, grads: optax.Updates) -> optax.Updates:
        """The gradients for the inner optimizer, in the accumulator's dtype if allowed.

        Some optimizers have branches or scatters whose dtypes agree only if gradients,
        parameters and state have one dtype (`galore`, `novograd`, `apply_if_finite`
        for bfloat16). Tracing them with the accumulator's dtype raises, and they get
        the dtypes of the caller's gradients.
        """
        narrow = choices.cast_like(grads, self.grads)
        dtypes = [jax.tree.map(jnp.result_type, g) for g in (grads, narrow)]
        if dtypes[0] == dtypes[1]:
            return grads
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                _ = dataclasses.replace(self, grads=grads).update_types
        except (TypeError, ValueError, FutureWarning):
            return narrow
        return grads

    def decide(self, field: str, updates: optax.Updates) -> tuple[jax.Array, Any]:
        """Calls the function of a field: the decision, and the field's new value."""
        fn = getattr(self.config, OPTIONS[field])
        decision, new = checked(fn(updates, self.state.gradient_step, self.params))
        self._check_field(field, new)
        return decision, choices.cast_like(new, getattr(self.state, field))

    def check_params(self) -> None:
        """Raises if the parameters are no arrays, or missing and needed."""
        if self.params is not None:
            return _checks.check_arrays("params", self.params)
        try:
            _ = self.update_types
        except Exception as error:
            for params in self.grads, optax.LookaheadParams.init_synced(self.grads):
                try:
                    _ = dataclasses.replace(self, params=params).update_types
                except Exception:
                    continue
                raise ValueError(_NO_PARAMS) from error
            raise  # the optimizer fails for another reason


def _as_array(x: Any) -> Any:
    """Converts a NumPy array, as some checkpoints return, to a JAX array.

    Outside of `jit` NumPy would compute with the array, and round differently.
    """
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x


def _floating(grads: ArrayLike) -> ArrayLike:
    """Casts integer gradients, which some programs have for integer parameters."""
    is_int = _checks.is_integer(getattr(grads, "dtype", np.dtype(float)))
    return jnp.asarray(grads, float) if is_int else grads


_AVERAGED = (
    "mean_argnames names this argument: pass the micro-batch's value in every call."
)
_NO_PARAMS = (
    "The inner optimizer needs the parameters, but params is None. Pass them: "
    "update(grads, state, params)."
)


# == A micro-step, and the close of a window ===========================================
# The program of a `MultiSteps`: a micro-step, and the close of a window.
#
#     acc  <-  add(acc, g, w)
#     if count = k:   params, inner  <-  inner.update(mean(acc));   count <- 0
#
# Nothing resets the accumulator: the first micro-step of the next window overwrites it,
# so XLA updates the accumulator in place. The division is part of the last addition, so
# the mean needs no buffer.
#
# The inner optimizer runs in one branch of a conditional, so it costs time once a
# window, and its schedules count steps. That branch reads the accumulator and does not
# return it, unless the updates reuse its buffer. A call that returns updates has two
# results of the size of the parameters: the sum inside a window, and the updates after
# a step, when nothing reads the sum. So both branches return one tree, sums or updates,
# in the accumulator's buffer. With two trees, `tx.update` and `optax.apply_updates`
# would copy the parameters into temporaries, on every backend.


def micro_step(request: Request) -> tuple[Any, MultiStepsState]:
    """Adds a gradient, and closes the window if it is full."""
    config, weight, emit = request.config, request.weight, request.emit
    storage, keeps = config.storage, request.keeps_sum
    k = config.window_length(request.state.gradient_step)
    if emit is None and isinstance(k, int) and k == 1:
        emit = True
    loaded = storage.load(_accumulator_of(request.state))
    _check(request, loaded, emit)
    skip, state = _skip_decision(request)
    runs = not skip if isinstance(skip, bool) else ~skip
    old = loaded if keeps else config.empty(request.gradients)
    terms = request.gradients, request.averaged

    def accumulated() -> WindowSum:
        with jax.named_scope("ga_optax.accumulate"):
            new = accumulator.add(old, terms, weight)
            return choices.select(skip, old, new)

    acc = accumulated()
    emits = _is_full(acc.count, k) if emit is None else emit
    closes = choices.both(emits, runs)
    if keeps or weight is not None:
        acc = storage.finish(acc, closes)
    else:  # the mean of a window of one micro-step is its gradient
        acc = acc._replace(total=choices.cast_like(terms, acc.total))
    if emit is True:
        acc = storage.fence(acc)

    def gradient_sums(closes: bool) -> Any:
        return storage.finish(accumulated(), closes).total[0]

    # Without a weight this micro-batch counts 1, so the window's weight is not 0.
    weighted, static = weight is not None, isinstance(emit, bool)
    closing = _Closing(request, state, closes, weighted, static, gradient_sums)
    out, state = closing.close(acc, micro_steps=runs, skipped_micro_steps=skip)
    return out, state._replace(total=state.total if keeps else ())


def close_early(request: Request) -> tuple[Any, MultiStepsState]:
    """Closes the window with the micro-steps so far."""
    state, storage = request.state, request.config.storage
    if not jax.tree.leaves(state.total):
        return request.params, state
    acc = storage.load(_accumulator_of(state))
    total, todo = acc.total[0], "Pass the parameters of this state."
    names = {"name": "params", "expected": "the state", "todo": todo}
    _checks.check_leaves(total, request.grads, **names)
    closes = acc.count > 0
    out, new = _Closing(request, state, closes).close(storage.finish(acc, closes))
    counters = jnp.where(closes, new.counters, state.counters)
    return out, new._replace(counters=counters)


# -- Before the addition ---------------------------------------------------------------


def _check(request: Request, acc: WindowSum, emit: Predicate | None) -> None:
    """Raises if gradients, parameters or the weight do not fit the state."""
    averaged = request.averaged
    others = {name: x for name, x in request.extra_args.items() if name not in averaged}
    others["emit"] = emit
    request.config.storage.check(request.grads, request.params, others)
    if not request.keeps_sum and emit is not True:
        raise ValueError(
            "The state must hold an accumulator if a window has more than one "
            "micro-step, but total is empty: the state was made with "
            "every_k_schedule=1. Make a new state with init, and copy inner_opt_state "
            "and counters of this state into it with _replace."
        )
    required = differentiated(request.params)
    if request.keeps_sum:
        required = acc.total[0]
    if required is not None:
        _checks.check_gradients(required, request.gradients)
        _checks.check_on_device("grads", request.gradients)
    if request.weight is not None:
        _checks.check_weight(request.weight)
    request.check_params()


def _skip_decision(request: Request) -> tuple[Predicate, MultiStepsState]:
    """True if the micro-step is left out, and the state with the new `skip_state`."""
    state, config = request.state, request.config
    if config.should_skip_update_fn is None:
        return False, state
    decision = request.decide("skip_state", request.grads)
    skip, skip_state = config.storage.agree(decision)
    return skip, state._replace(skip_state=skip_state)


def _is_full(count: jax.Array, k: int | jax.Array) -> jax.Array:
    """`count >= k`."""
    k = jnp.asarray(k)
    wide = jnp.promote_types(k.dtype, jnp.int32)  # counts would wrap in fewer bits
    return count.astype(wide) >= k.astype(wide)


def _accumulator_of(state: MultiStepsState) -> WindowSum:
    """The accumulator in a state."""
    total = state.total, state.arg_totals
    return Accumulator(total, state.weight, state.mini_step)


# -- The close of a window -------------------------------------------------------------

# The results of a branch: the parameters or the updates, whether the branch made a
# step, and the fields `_CHANGED` of the state.
_Results = tuple[Any, jax.Array, dict[str, Any]]
_STATES = {
    "name": "The state that opt.update returns",
    "expected": "the state of opt.init",
    "todo": "init must make every field of the state: leave out transformations that "
    "add fields later, such as optax.monitor.",
}
_CHANGED = ("inner_opt_state", "drop_state", "grad_norm")


@dataclasses.dataclass(frozen=True, eq=False)
class _Closing:
    """The end of a call: a step if the window closes, else nothing.

    Attributes:
      request: the call.
      state: the state, with this micro-step's changes outside of the accumulator.
      closes: whether this call closes the window.
      weighted: whether micro-batches have weights. A window of weight 0 has no step.
      static: whether the program has no conditional; see `choices.branch`.
      gradient_sums: recomputes the sum of gradients, given whether the window closes;
        None if updates cannot reuse the buffer.
    """

    request: Request
    state: MultiStepsState
    closes: Predicate
    weighted: bool = True
    static: bool = False
    gradient_sums: Callable[[bool], Any] | None = None

    def close(self, acc: WindowSum, **events: Predicate) -> tuple[Any, MultiStepsState]:
        """Returns the results of the call; the state counts `events` too.

        The inner optimizer does not run if the window has weight 0, or is dropped.
        """
        storage = self.request.config.storage

        def stay() -> _Results:
            return self._without_step(self._in_branch(acc, closes=False))

        def merge_and_step() -> _Results:
            # Only the sum over all devices shows whether the weight is 0.
            whole = storage.merged(acc)
            step = functools.partial(self._step_unless_dropped, whole)
            return self._choose(self._has_weight(whole), step, stay)

        if storage.axes:
            results = self._choose(self.closes, merge_and_step, stay)
        else:
            steps = choices.both(self.closes, self._has_weight(acc))
            step = functools.partial(self._step_unless_dropped, acc)
            results = self._choose(steps, step, stay)
        out, emitted, changed = results
        (total, arg_totals), weight, count = storage.store(acc)
        if self._reused:
            # Splits the tree of a branch into updates and accumulators.
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
            emitted=emitted, skipped_windows=self.closes & ~emitted, **events
        )

    @property
    def _choose(self) -> Callable[..., _Results]:
        return functools.partial(choices.branch, run_both=self.static)

    def _has_weight(self, acc: WindowSum) -> Predicate:
        return acc.weight != 0 if self.weighted else True  # a NaN is not 0

    @functools.cached_property
    def _reused(self) -> list[bool]:
        """True for each leaf whose update reuses the sum's buffer; `[]` if none."""
        request = self.request
        if self.static or request.applies or request.config.storage.axes:
            return []
        trees = request.state.total, request.update_types
        (totals, total_tree), (updates, update_tree) = map(jax.tree.flatten, trees)
        if total_tree != update_tree:
            return []
        pairs = zip(totals, updates, strict=True)
        fits = [(x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs]
        return fits if any(fits) else []

    def _in_branch(self, acc: WindowSum, closes: bool) -> WindowSum:
        """The accumulator for use in a branch of the conditional.

        XLA for GPUs copies an array that was computed before a conditional and that a
        branch returns. So a branch recomputes the sum; on CPUs it reads `acc`.
        """
        if self.gradient_sums is None or not self._reused:
            return acc
        grads, args = acc.total
        recompute = functools.partial(self.gradient_sums, closes)
        sums = jax.lax.platform_dependent(
            grads, cpu=lambda grads: grads, default=lambda _: recompute()
        )
        return acc._replace(total=(choices.by_leaf(self._reused, sums, grads), args))

    def _step_unless_dropped(self, acc: WindowSum) -> _Results:
        acc, request = self._in_branch(acc, closes=True), self.request
        if request.config.should_drop_window_fn is None:
            return self._step(acc)
        drop, drop_state = request.decide("drop_state", acc.total[0])
        step = functools.partial(self._step, acc, drop_state=drop_state)
        stay = functools.partial(self._without_step, acc, drop_state=drop_state)
        return self._choose(~drop, step, stay)

    def _step(self, acc: WindowSum, **changed: Any) -> _Results:
        """Runs the inner optimizer."""
        request, state = self.request, self.state
        with jax.named_scope("ga_optax.update"):
            (grads, averaged), norm = self._with_norm(acc)
            values = request.inner_gradients(grads), averaged
            old = state.inner_opt_state
            updates, new = request.update(values, old, request.params)
            _checks.check_structure(old, new, **_STATES)
            changed = {
                "inner_opt_state": choices.cast_like(new, old),
                "drop_state": state.drop_state,
                "grad_norm": norm,
                **changed,
            }
            out = choices.cast_like(updates, request.update_types)
            if request.applies:
                out = optax.apply_updates(request.params, out)
            return out, jnp.ones_like(state.mini_step, bool), changed

    def _without_step(self, acc: WindowSum, **changed: Any) -> _Results:
        """Returns the parameters (or zero updates) and the fields unchanged."""
        out = self.request.params
        if not self.request.applies:
            out = jax.tree.map(collectives.zeros, self.request.update_types)
        if self._reused:  # sums in the place of zero updates
            out = choices.by_leaf(self._reused, acc.total[0], out)
        old = {name: getattr(self.state, name) for name in _CHANGED}
        return out, jnp.zeros_like(self.state.mini_step, bool), old | changed

    def _with_norm(self, acc: WindowSum) -> tuple[Any, Any]:
        """The mean for the inner optimizer, and the norm of the gradient if tracked."""
        if not self.request.config.track_norm:
            return acc.total, self.state.grad_norm
        with jax.named_scope("ga_optax.norm"):
            norm = jnp.sqrt(_squared_norm(acc.total[0]))
            norm = norm.astype(self.state.grad_norm.dtype)
            # The barrier computes the norm before updates overwrite the buffer; XLA
            # would copy the buffer to read it later.
            return jax.lax.optimization_barrier((acc.total, norm))


def _squared_norm(tree: optax.Updates) -> jax.Array:
    """Σ |x|² over all leaves, each read once; nothing of their size is written."""
    # Without the barrier XLA would share the squares, or the wider dtype, with other
    # readers of the leaf (the accumulator, the optimizer), and write them out.
    tree = jax.lax.optimization_barrier(tree)
    terms = [
        jnp.sum(jnp.square(part.astype(jnp.promote_types(part.dtype, jnp.float32))))
        for leaf in map(jnp.asarray, jax.tree.leaves(tree))
        for part in accumulator.parts(leaf)
    ]
    dtype = jnp.result_type(float)
    return sum((term.astype(dtype) for term in terms), jnp.zeros([], dtype))
