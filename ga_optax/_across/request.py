"""One call of a `MultiSteps`: what it was given, and what it has to return."""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from ga_optax._across import choices
from ga_optax._across.config import Config, checked
from ga_optax._across.state import OPTIONS, check_state
from ga_optax._checks import check_arrays, check_number, is_integer


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What a call was given; raises if the state is not one of this `MultiSteps`.

    Attributes:
      config: what the `MultiSteps` was made with.
      state: the state; anything else raises.
      grads: gradients with the dtypes that the bare optimizer would be given.
      params: the parameters, if known.
      extra_args: for the inner optimizer.
      weight: how much the micro-batch counts; None for 1.
      emit: whether the window closes; None if its state counts.
      applies: whether the call returns the parameters, with the updates applied to
        them, or the updates.
    """

    config: Config
    state: Any
    grads: optax.Updates
    params: Any
    extra_args: dict[str, Any]
    weight: ArrayLike | None = None
    emit: choices.Predicate | None = None
    applies: bool = True

    def __post_init__(self) -> None:
        check_state(self.state)
        for field, new in jax.eval_shape(self.config.tracked).items():
            if new != ():
                self._check_field(field, new)
        _ = self.averaged  # raises if one is no number

    def _check_field(self, field: str, new: Any) -> None:
        """Raises unless the state holds what the option of a field needs."""
        due, held = map(jax.tree.structure, (new, getattr(self.state, field)))
        if due != held:
            came = f"it is {held}, not {due}" if held.num_leaves else "it is empty"
            when = " while no window is open" * (field == "arg_totals")
            raise ValueError(
                f"The field {field} of the state must be that of {OPTIONS[field]}, but "
                f"{came}: the state was made without that option, or with another one. "
                f"Put that of a new state into it{when}: "
                f"state._replace({field}=tx.init(params).{field})."
            )

    @functools.cached_property
    def keeps_sum(self) -> bool:
        """Whether the state has an accumulator, or the gradient needs none."""
        trees = (), self.state.total, self.grads
        nothing, held, needed = map(jax.tree.structure, trees)
        return held != nothing or needed == nothing

    @functools.cached_property
    def averaged(self) -> dict[str, jax.Array]:
        """The extra arguments of which it gets the mean, as scalars."""
        dtype, todo = jnp.result_type(float), _AVERAGED
        return {
            name: check_number(name, self.extra_args.get(name), todo).astype(dtype)
            for name in self.config.mean_argnames
        }

    @functools.cached_property
    def gradients(self) -> optax.Updates:
        """The gradients as they are added: floating ones for integer parameters."""
        return jax.tree.map(_floating, self.grads)

    @property
    def values(self) -> Any:
        """What is added: gradients, and extra arguments."""
        return self.gradients, self.averaged

    @functools.cached_property
    def bare(self) -> Any:
        """The shapes and dtypes of what the inner optimizer alone would return."""
        values = self.config.storage.of_all((self.grads, self.averaged))
        given = values, self.state.inner_opt_state, self.params
        return jax.eval_shape(self.update, *given)[0]

    def update(self, values: Any, state: optax.OptState, params: Any) -> Any:
        """Runs the inner optimizer on gradients and the means of extra arguments."""
        grads, averaged = values
        args = self.extra_args | averaged
        given = jax.tree.map(_as_array, (grads, state, params))
        return self.config.inner.update(*given, **args)

    def seen(self, grads: optax.Updates) -> optax.Updates:
        """What the inner optimizer sees: the accumulator's dtype, if it can take that.

        Some optimizers have branches or scatters of their own, whose dtypes agree only
        if gradients, parameters and state have one dtype (`galore`, `novograd`,
        `apply_if_finite` for bfloat16). Tracing them with the wide gradients says so.
        They get what they would be given alone: the gradients' dtypes.
        """
        as_given = choices.cast_like(grads, self.grads)
        before, after = (jax.tree.map(jnp.result_type, g) for g in (grads, as_given))
        if before == after:
            return grads
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                _ = dataclasses.replace(self, grads=grads).bare
        except (TypeError, ValueError, FutureWarning):
            return as_given
        return grads

    def ask(self, field: str, updates: optax.Updates) -> tuple[jax.Array, Any]:
        """What a function decides, and what a field of the state keeps of that."""
        fn = getattr(self.config, OPTIONS[field])
        answer, new = checked(fn(updates, self.state.gradient_step, self.params))
        self._check_field(field, new)
        return answer, choices.cast_like(new, getattr(self.state, field))

    def check_params(self) -> None:
        """Raises if the parameters are no arrays, or missing and needed."""
        if self.params is not None:
            return check_arrays("params", self.params)
        try:
            _ = self.bare
        except Exception as error:
            for params in self.grads, optax.LookaheadParams.init_synced(self.grads):
                try:
                    _ = dataclasses.replace(self, params=params).bare
                except Exception:
                    continue
                raise ValueError(_NO_PARAMS) from error
            raise  # it fails for another reason


def _as_array(x: Any) -> Any:
    """An array of NumPy, as some checkpoints give it, as one of JAX.

    Outside of `jit` NumPy would compute with it, and round otherwise than JAX.
    """
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x


def _floating(grads: ArrayLike) -> ArrayLike:
    """Gradients of integer parameters, which are integers in some programs."""
    integers = is_integer(getattr(grads, "dtype", np.dtype(float)))
    return jnp.asarray(grads, float) if integers else grads


_AVERAGED = "mean_argnames names it: pass the value of the micro-batch in every call."

_NO_PARAMS = (
    "The inner optimizer needs the parameters, but params is None. Pass them: "
    "update(grads, state, params)."
)
