"""Options of the fold inside a call, checked before anything is traced."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.typing import ArrayLike

from ga_optax import _aux
from ga_optax._checks import check_callable, check_num_microbatches
from ga_optax._data_axis import DataAxis, as_data_axis

ROLES = ("argnums", "batch_argnums", "rng_argnums", "carry_argnums")


class Options(NamedTuple):
    """The options of `value_and_grad` and `accumulate`, under their names."""

    fun: Callable[..., Any]
    num_microbatches: int
    argnums: int | Sequence[int]
    batch_argnums: int | Sequence[int]
    rng_argnums: int | Sequence[int]
    carry_argnums: int | Sequence[int]
    has_aux: bool
    weight_fn: Callable[..., ArrayLike] | None
    aux: Any
    in_place: bool
    data_axis: DataAxis | None

    def checked(self) -> "Options":
        """The same, in one form; raises if an option does not fit."""
        check_callable(
            "fun",
            self.fun,
            "of the parameters and the batch",
            "Pass the loss function itself, not its value.",
        )
        if self.weight_fn is not None:
            check_callable(
                "weight_fn",
                self.weight_fn,
                "of the batch arguments",
                "Pass for example lambda batch: batch['mask'].sum(), or None to count "
                "every micro-batch as 1.",
            )
        if not isinstance(self.in_place, bool):
            raise TypeError(
                f"in_place must be a Python bool, but it is {self.in_place!r}. Pass "
                "True to add gradients in place wherever that is right, or False."
            )
        _aux.check_option(self.aux)
        options = self._replace(
            data_axis=as_data_axis(self.data_axis),
            num_microbatches=check_num_microbatches(self.num_microbatches),
            **{name: _positions(name, getattr(self, name)) for name in ROLES},
        )
        for name in ("argnums", "batch_argnums"):
            if getattr(options, name) == ():
                raise ValueError(
                    f"{name} must name at least one positional argument, but it is (). "
                    "Leave it out for the default, "
                    f"{name}={0 if name == 'argnums' else 1}."
                )
        options.roles(None)
        return options

    @property
    def axes(self) -> tuple[str, ...]:
        """The data axes, `()` if there are none."""
        return () if self.data_axis is None else self.data_axis.axes

    @property
    def each(self) -> bool:
        """Whether every micro-step merges across devices."""
        return self.data_axis is not None and self.data_axis.sync == "each"

    def roles(self, num_args: int | None) -> dict[str, tuple[int, ...]]:
        """Which positions have which role; raises if one is missing or has two."""
        owner: dict[int, str] = {}
        roles = {}
        for name in ROLES:
            positions = []
            value = getattr(self, name)
            for given in (value,) if isinstance(value, int) else value:
                position = given
                if num_args is not None:
                    if not -num_args <= given < num_args:
                        raise ValueError(
                            f"{name} must name positional arguments of the call, but "
                            f"it names number {given}, and {num_args} came. Pass that "
                            f"argument by position, or change {name}."
                        )
                    position = given % num_args
                if position in owner:
                    raise ValueError(
                        f"{name} must not overlap {owner[position]}, but both name "
                        f"argument {position}. Give each argument one role: "
                        "differentiated, split, a key, or carried."
                    )
                owner[position] = name
                positions.append(position)
            roles[name] = tuple(positions)
        return roles


def _positions(name: str, value: Any) -> int | tuple[int, ...]:
    try:
        if isinstance(value, (tuple, list)):
            return tuple(operator.index(i) for i in value)
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an int or a sequence of ints, but it is {value!r}. Number "
            "the positional arguments of fun from 0."
        ) from None
