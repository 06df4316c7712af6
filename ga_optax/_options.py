"""Options of the fold inside a call, checked before anything is traced."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.typing import ArrayLike, DTypeLike

from ga_optax import _aux
from ga_optax._checks import check_callable, check_dtype, check_num_microbatches
from ga_optax._data_axis import DataAxis, as_data_axis

ROLES = ("argnums", "batch_argnums", "rng_argnums", "carry_argnums")


@dataclass(frozen=True)
class FromAux:
    """A `weight_fn` that reads the weight off the aux, which the loss computes anyway.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, batch):
    ...     tokens = jnp.sum(batch["mask"])
    ...     error = (batch["x"] * w) ** 2
    ...     return jnp.sum(error * batch["mask"]) / tokens, {"tokens": tokens}
    >>> fun = ga.value_and_grad(
    ...     loss, 2, has_aux=True, weight_fn=ga.FromAux(lambda aux: aux["tokens"]))
    >>> batch = {"x": jnp.arange(1.0, 5.0), "mask": jnp.array([1, 1, 1, 0])}
    >>> (value, aux), grad = jax.jit(fun)(jnp.float32(3.0), batch)
    >>> print(value, grad, aux["tokens"])
    42.0 28.0 3

    Nothing is computed twice: the weight is known after the forward pass, before the
    backward pass of the same micro-batch.

    Attributes:
      fun: a function of the aux of one micro-batch that returns its weight, a
        non-negative scalar. No gradient flows through it.
    """

    fun: Callable[[Any], ArrayLike]


class Options(NamedTuple):
    """The options of `value_and_grad` and `accumulate`, under their names."""

    fun: Callable[..., Any]
    num_microbatches: int
    argnums: int | Sequence[int]
    batch_argnums: int | Sequence[int]
    rng_argnums: int | Sequence[int]
    carry_argnums: int | Sequence[int]
    has_aux: bool
    weight_fn: Callable[..., ArrayLike] | FromAux | None
    aux: Any
    accumulator_dtype: DTypeLike | None
    in_place: bool
    data_axis: DataAxis | None

    def checked(self) -> "Options":
        """The same, in one form; raises if an option does not fit."""
        todo = "Pass the loss function itself, not its value."
        check_callable("fun", self.fun, "of the parameters and the batch", todo)
        check_weight_fn(self.weight_fn, self.has_aux)
        if not isinstance(self.in_place, bool):
            raise TypeError(
                f"in_place must be a bool, but it is {self.in_place!r}. Pass True: it "
                "means wherever that is right."
            )
        _aux.check_option(self.aux)
        options = self._replace(
            data_axis=as_data_axis(self.data_axis),
            num_microbatches=check_num_microbatches(self.num_microbatches),
            accumulator_dtype=check_dtype(self.accumulator_dtype),
            **{name: _positions(name, getattr(self, name)) for name in ROLES},
        )
        options.roles()
        return options

    @property
    def axes(self) -> tuple[str, ...]:
        """The data axes, `()` if there are none."""
        return () if self.data_axis is None else self.data_axis.axes

    @property
    def each(self) -> bool:
        """Whether every micro-step merges across devices."""
        return self.data_axis is not None and self.data_axis.sync == "each"

    @property
    def carries(self) -> bool:
        """Whether `fun` returns a carry."""
        return self.carry_argnums != ()

    def roles(self, num_args: int | None = None) -> dict[str, tuple[int, ...]]:
        """Which positions have which role; raises if one is missing or has two."""
        owner: dict[int, str] = {}
        for name in ROLES:
            value = getattr(self, name)
            for i in (value,) if isinstance(value, int) else value:
                if num_args is not None and not -num_args <= i < num_args:
                    raise ValueError(
                        f"{name} must name positional arguments of the call, but it "
                        f"names number {i}, and {num_args} came. Pass that argument by "
                        f"position, or change {name}."
                    )
                position = i if num_args is None else i % num_args
                if position in owner:
                    raise ValueError(
                        f"{name} must not overlap {owner[position]}, but both name "
                        f"argument {position}. Give each argument one role."
                    )
                owner[position] = name
        return {name: tuple(i for i in owner if owner[i] == name) for name in ROLES}


def check_weight_fn(weight_fn: Any, has_aux: bool) -> None:
    """Raises unless `weight_fn` is None, a function or a `FromAux`."""
    todo = "Pass None to count every micro-batch as 1."
    if isinstance(weight_fn, FromAux):
        check_callable("The argument of FromAux", weight_fn.fun, "of the aux", todo)
        if not has_aux:
            raise ValueError(
                f"weight_fn=FromAux must have an aux to read, but has_aux={has_aux!r}. "
                "Pass has_aux=True, and return (loss, aux)."
            )
    elif weight_fn is not None:
        check_callable("weight_fn", weight_fn, "of the batch arguments", todo)


def _positions(name: str, value: Any) -> Any:
    try:
        if not isinstance(value, (tuple, list)):
            return operator.index(value)
        positions = tuple(map(operator.index, value))
    except TypeError:
        raise TypeError(
            f"{name} must be an int or a sequence of ints, but it is {value!r}. Number "
            "the positional arguments of fun from 0."
        ) from None
    if not positions and name in ("argnums", "batch_argnums"):
        raise ValueError(
            f"{name} must name at least one argument, but it is (). Leave it out."
        )
    return positions
