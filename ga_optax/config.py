"""Options of the library for all calls.

>>> import ga_optax as ga
>>> ga.config.optimize
True
>>> ga.config.update("optimize", False)
>>> ga.config.update("optimize", True)

`optimize` (environment variable `GA_OPTAX_OPTIMIZE`: 0 or 1; True by default): False is
`optimize=False` in every call of `value_and_grad` and `accumulate`. It is read when a
call is traced: a function that `jax.jit` has compiled stays as it is.
"""

import os
from typing import Any

__all__ = ["optimize", "update"]

_VARIABLE = "GA_OPTAX_OPTIMIZE"


def _from_environment() -> bool:
    value = os.environ.get(_VARIABLE, "1")
    if value.lower() not in ("0", "1", "false", "true"):
        raise ValueError(
            f"The environment variable {_VARIABLE} must be 0 or 1, but it is {value!r}."
            " Set one of these, or unset it."
        )
    return value.lower() in ("1", "true")


optimize: bool = _from_environment()


def update(name: str, value: Any) -> None:
    """Sets an option for all calls that are traced from now on.

    Args:
      name: "optimize".
      value: a bool.

    Raises:
      AttributeError: if there is no such option.
      TypeError: if the value is not a bool.
    """
    global optimize
    if name != "optimize":
        raise AttributeError(
            f'ga_optax.config must be given the name of an option, "optimize", but it '
            f"got {name!r}. Pass that name."
        )
    if not isinstance(value, bool):
        raise TypeError(
            f"ga_optax.config.optimize must be a bool, but it got {value!r}. Pass True "
            "or False."
        )
    optimize = value
