"""One call of a `MultiSteps`: the arguments, and the types of the results."""

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
    emit: choices.Predicate | None = None
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
            name: check_number(name, self.extra_args.get(name), todo).astype(dtype)
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
            return check_arrays("params", self.params)
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
    is_int = is_integer(getattr(grads, "dtype", np.dtype(float)))
    return jnp.asarray(grads, float) if is_int else grads


_AVERAGED = (
    "mean_argnames names this argument: pass the micro-batch's value in every call."
)
_NO_PARAMS = (
    "The inner optimizer needs the parameters, but params is None. Pass them: "
    "update(grads, state, params)."
)
