"""A call of `MultiSteps`: a micro-step, which may close a window.

    acc  <-  add(acc, g, w)
    if count = k:   params, inner  <-  inner.update(mean(acc));   count <- 0

Nothing resets the accumulator: the first micro-step of the next window overwrites it,
so XLA updates the accumulator in place. The division is part of the last addition, so
the mean needs no buffer.

The inner optimizer runs in one branch of a conditional, so it costs time once a
window, and its schedules count steps. That branch reads the accumulator and does not
return it, unless the updates reuse its buffer. A call that returns updates has two
results of the size of the parameters: the sum inside a window, and the updates after
a step, when nothing reads the sum. So both branches return one tree, sums or updates,
in the accumulator's buffer. With two trees, `tx.update` and `optax.apply_updates`
would copy the parameters into temporaries, on every backend.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .. import _checks, accumulator
from .._devices import collectives, meshes
from . import choices
from .choices import Predicate
from .config import Config, WindowSum, checked, differentiated
from .state import OF_OTHERS, OPTIONS, MultiStepsState

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
class MicroStep:
    """A call, to `add_gradient` or to `close_early`: its arguments, and what follows.

    Raises if the state does not fit this `MultiSteps`.

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
        todo = f"Pass the state that init or the last call returned. {OF_OTHERS}"
        _checks.check_type("state", self.state, MultiStepsState, todo)
        self._check_field("arg_totals", dict.fromkeys(self.config.mean_argnames, 0))
        if self.config.track_norm:
            self._check_field("grad_norm", 0)
        _ = self.averaged  # raises if an argument is no number

    def add_gradient(self) -> tuple[Any, MultiStepsState]:
        """Adds the gradient, and closes the window if it is full."""
        self._check()
        skip, skip_state = self.skips
        runs = not skip if isinstance(skip, bool) else ~skip
        acc = self.added()
        emits = self._is_full(acc.count) if self.emits is None else self.emits
        closes = choices.both(emits, runs)
        if self.keeps_sum or self.weight is not None:
            acc = self.config.finish(acc, closes)
        else:  # the mean of a window of one micro-step is its gradient
            acc = acc._replace(total=choices.cast_like(self.terms, acc.total))
        if self.emits is True and not self.config.axes:
            # Fused into the last addition, the optimizer would read the old sum after
            # the new one has overwritten it, so XLA would copy the old sum first.
            acc = jax.lax.optimization_barrier(acc)
        # Without a weight this micro-batch counts 1, so the window's weight is not 0.
        weighted = self.weight is not None
        events = {"micro_steps": runs, "skipped_micro_steps": skip}
        out, state = self.close(acc, closes, weighted, **events)
        total = state.total if self.keeps_sum else ()
        return out, state._replace(total=total, skip_state=skip_state)

    def close_early(self) -> tuple[Any, MultiStepsState]:
        """Closes the window with the micro-steps so far."""
        if not jax.tree.leaves(self.state.total):
            return self.params, self.state
        acc, todo = self.loaded, "Pass the parameters of this state."
        names = {"name": "params", "expected": "the state", "todo": todo}
        _checks.check_leaves(acc.total[0], self.grads, **names)
        closes = acc.count > 0
        out, new = self.close(self.config.finish(acc, closes), closes)
        counters = jnp.where(closes, new.counters, self.state.counters)
        return out, new._replace(counters=counters)

    # -- What is added -----------------------------------------------------------------

    @functools.cached_property
    def keeps_sum(self) -> bool:
        """True if the state has an accumulator, or the gradient is `()`."""
        trees = (), self.state.total, self.grads
        empty, total, grads = map(jax.tree.structure, trees)
        return total != empty or grads == empty

    @functools.cached_property
    def loaded(self) -> WindowSum:
        """This device's accumulator, as the state has it."""
        total = self.state.total, self.state.arg_totals
        acc = accumulator.Accumulator(total, self.state.weight, self.state.mini_step)
        return self.config.load(acc)

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
    def terms(self) -> tuple[optax.Updates, dict[str, jax.Array]]:
        """The gradients (floating for integers) and `averaged`, to be added."""
        return jax.tree.map(_floating, self.grads), self.averaged

    @functools.cached_property
    def skips(self) -> tuple[Predicate, Any]:
        """True if the micro-step is left out, and the new `skip_state`."""
        if self.config.should_skip_update_fn is None:
            return False, self.state.skip_state
        decision = self._decide("skip_state", self.grads)
        if axes := self.config.axes:  # yes if any device decides yes
            decision = jax.lax.pmax(collectives.vary(decision, axes), axes)
        return decision

    def added(self) -> WindowSum:
        """The accumulator with this micro-step, unless it is left out."""
        skip, _ = self.skips
        old = self.loaded if self.keeps_sum else self.config.empty(self.terms[0])
        with jax.named_scope("ga_optax.accumulate"):
            new = accumulator.add(old, self.terms, self.weight)
            return choices.select(skip, old, new)

    # -- When the window closes --------------------------------------------------------

    @functools.cached_property
    def length(self) -> int | jax.Array:
        """The k of the window: an int if it is known."""
        return self.config.window_length(self.state.gradient_step)

    @property
    def emits(self) -> Predicate | None:
        """`emit`, which a k that is known to be 1 decides, too."""
        alone = isinstance(self.length, int) and self.length == 1
        return True if self.emit is None and alone else self.emit

    @property
    def static(self) -> bool:
        """True if the program has no conditional; see `choices.branch`."""
        return isinstance(self.emits, bool)

    def _is_full(self, count: jax.Array) -> jax.Array:
        """`count >= k`."""
        k = jnp.asarray(self.length)
        wide = jnp.promote_types(k.dtype, jnp.int32)  # counts would wrap in fewer bits
        return count.astype(wide) >= k.astype(wide)

    def close(
        self, acc: WindowSum, closes: Predicate, weighted: bool = True, **events: Any
    ) -> tuple[Any, MultiStepsState]:
        """Makes a step if the window closes; the state counts `events` too.

        The inner optimizer does not run if the window is dropped, or has weight 0,
        which only a window of micro-batches with weights (`weighted`) can have.
        """
        config, state = self.config, self.state

        def has_weight(acc: WindowSum) -> Predicate:
            return acc.weight != 0 if weighted else True  # a NaN is not 0

        def stay() -> _Results:
            return self._without_step(self._in_branch(acc, closes=False))

        def merge_and_step() -> _Results:
            # Only the sum over all devices shows whether the weight is 0.
            whole = config.merged(acc)
            step = functools.partial(self._step_unless_dropped, whole)
            return choices.branch(has_weight(whole), step, stay, self.static)

        if config.axes:
            results = choices.branch(closes, merge_and_step, stay, self.static)
        else:
            steps = choices.both(closes, has_weight(acc))
            step = functools.partial(self._step_unless_dropped, acc)
            results = choices.branch(steps, step, stay, self.static)
        out, emitted, changed = results
        (total, arg_totals), weight, count = config.store(acc)
        if self._reused:
            # Splits the tree of a branch into updates and accumulators.
            sums = out
            updates = choices.select(emitted, out, jax.tree.map(jnp.zeros_like, out))
            out = choices.by_leaf(self._reused, updates, sums)
            total = choices.by_leaf(self._reused, sums, total)
        state = state._replace(
            mini_step=jnp.where(closes, jnp.zeros_like(count), count),
            gradient_step=choices.count_if(emitted, state.gradient_step),
            total=total,
            weight=jnp.where(closes, jnp.zeros_like(weight), weight),
            arg_totals=arg_totals,
            **changed,
        )
        skipped = closes & ~emitted
        return out, state.counting(emitted=emitted, skipped_windows=skipped, **events)

    @functools.cached_property
    def _reused(self) -> list[bool]:
        """True for each leaf whose update reuses the sum's buffer; `[]` if none."""
        if self.static or self.applies or self.config.axes:
            return []
        trees = self.state.total, self.update_types
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
        if not self._reused:
            return acc
        grads, args = acc.total

        def recomputed(_: Any) -> Any:
            return self.config.finish(self.added(), closes).total[0]

        sums = jax.lax.platform_dependent(grads, cpu=lambda x: x, default=recomputed)
        return acc._replace(total=(choices.by_leaf(self._reused, sums, grads), args))

    def _step_unless_dropped(self, acc: WindowSum) -> _Results:
        acc = self._in_branch(acc, closes=True)
        if self.config.should_drop_window_fn is None:
            return self._step(acc)
        drop, drop_state = self._decide("drop_state", acc.total[0])
        step = functools.partial(self._step, acc, drop_state=drop_state)
        stay = functools.partial(self._without_step, acc, drop_state=drop_state)
        return choices.branch(~drop, step, stay, self.static)

    def _step(self, acc: WindowSum, **changed: Any) -> _Results:
        """Runs the inner optimizer."""
        state = self.state
        with jax.named_scope("ga_optax.update"):
            (grads, averaged), norm = self._with_norm(acc)
            values = self._inner_gradients(grads), averaged
            old = state.inner_opt_state
            updates, new = self._update(values, old, self.params)
            _checks.check_structure(old, new, **_STATES)
            changed = {
                "inner_opt_state": choices.cast_like(new, old),
                "drop_state": state.drop_state,
                "grad_norm": norm,
                **changed,
            }
            out = choices.cast_like(updates, self.update_types)
            if self.applies:
                out = optax.apply_updates(self.params, out)
            return out, jnp.ones_like(state.mini_step, bool), changed

    def _without_step(self, acc: WindowSum, **changed: Any) -> _Results:
        """Returns the parameters (or zero updates) and the fields unchanged."""
        out = self.params
        if not self.applies:
            out = jax.tree.map(collectives.zeros, self.update_types)
        if self._reused:  # sums in the place of zero updates
            out = choices.by_leaf(self._reused, acc.total[0], out)
        old = {name: getattr(self.state, name) for name in _CHANGED}
        return out, jnp.zeros_like(self.state.mini_step, bool), old | changed

    def _with_norm(self, acc: WindowSum) -> tuple[Any, Any]:
        """The mean for the inner optimizer, and the norm of the gradient if tracked."""
        if not self.config.track_norm:
            return acc.total, self.state.grad_norm
        with jax.named_scope("ga_optax.norm"):
            norm = jnp.sqrt(_squared_norm(acc.total[0]))
            norm = norm.astype(self.state.grad_norm.dtype)
            # The barrier computes the norm before updates overwrite the buffer; XLA
            # would copy the buffer to read it later.
            return jax.lax.optimization_barrier((acc.total, norm))

    # -- The inner optimizer -----------------------------------------------------------

    @functools.cached_property
    def update_types(self) -> Any:
        """The shapes and dtypes of the updates of the inner optimizer used alone."""
        values = self.grads, self.averaged
        if self.config.axes:  # what is merged does not vary over devices
            kind = jax.ShapeDtypeStruct
            values = jax.tree.map(lambda x: kind(x.shape, jnp.result_type(x)), values)
        arguments = values, self.state.inner_opt_state, self.params
        return jax.eval_shape(self._update, *arguments)[0]

    def _update(self, values: Any, state: optax.OptState, params: Any) -> Any:
        """Runs the inner optimizer on gradients and the means of extra arguments."""
        grads, averaged = values
        arrays = jax.tree.map(_as_array, (grads, state, params))
        return self.config.inner.update(*arrays, **(self.extra_args | averaged))

    def _inner_gradients(self, grads: optax.Updates) -> optax.Updates:
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

    def _decide(self, field: str, updates: optax.Updates) -> tuple[jax.Array, Any]:
        """Calls the function of a field: the decision, and the field's new value."""
        fn = getattr(self.config, OPTIONS[field])
        decision, new = checked(fn(updates, self.state.gradient_step, self.params))
        self._check_field(field, new)
        return decision, choices.cast_like(new, getattr(self.state, field))

    # -- Checks ------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises if k, gradients, parameters or the weight do not fit the state."""
        _ = self.length  # raises if k is known and invalid
        loaded, grads = self.loaded, self.terms[0]
        if self.config.axes and meshes.checks_varying():
            others = {**self.extra_args, "emit": self.emits}
            others = {n: x for n, x in others.items() if n not in self.averaged}
            _check_varying(set(self.config.axes), self.grads, self.params, others)
        if not self.keeps_sum and self.emits is not True:
            raise ValueError(
                "The state must hold an accumulator if a window has more than one "
                "micro-step, but total is empty: the state was made with "
                "every_k_schedule=1. Make a new state with init, and copy "
                "inner_opt_state and counters of this state into it with _replace."
            )
        required = loaded.total[0] if self.keeps_sum else differentiated(self.params)
        if required is not None:
            _checks.check_gradients(required, grads)
            _checks.check_on_device("grads", grads)
        if self.weight is not None:
            _checks.check_weight(self.weight)
        self._check_params()

    def _check_field(self, field: str, new: Any) -> None:
        """Raises unless a field of the state has the structure of `new`."""
        required, actual = map(jax.tree.structure, (new, getattr(self.state, field)))
        if required != actual:
            raise ValueError(
                f"The field {field} of the state must fit {OPTIONS[field]}, but it is "
                f"{actual}, not {required}: the state was made without that option, or "
                "with another one. Take the field from a new state while no window is "
                f"open: state._replace({field}=tx.init(params).{field})."
            )

    def _check_params(self) -> None:
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


def _check_varying(axes: set[str], grads: Any, params: Any, extra_args: Any) -> None:
    """Raises if gradients are reduced already, or other arguments vary."""
    for name, leaf in _checks.named_leaves(grads):
        reduced = sorted(axes - meshes.varying(leaf))
        if reduced:
            raise ValueError(
                "With a data_axis, grads must be the gradients of one device, but "
                f"{name} is the same along {reduced}: it is reduced already. To "
                f"fix this, {meshes.OWN_COPY}"
            )
    for arguments, tree, todo in (
        ("extra arguments", extra_args, "Reduce them, with jax.lax.pmean."),
        ("params", params, "The sums would mix shards: pass whole parameters."),
    ):
        for name, leaf in _checks.named_leaves(tree):
            differing = sorted(axes & meshes.varying(leaf))
            if differing:
                raise ValueError(
                    f"With a data_axis, {arguments} must be the same on all "
                    f"devices, but {name} differs along {differing}. {todo}"
                )


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
