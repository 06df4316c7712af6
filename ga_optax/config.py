"""Options of the library for all calls.

>>> import ga_optax as ga
>>> ga.config.optimize
True
>>> ga.config.update("optimize", False)
>>> ga.config.update("optimize", True)

`optimize` (environment variable `GA_OPTAX_OPTIMIZE`; True by default): False means
`optimize=False` in every call of `value_and_grad` and `accumulate`.

Variables are 0 or 1, options False or True. Options are read when a call is traced: a
function that `jax.jit` has compiled does not change.
"""

import os
from typing import Any

__all__ = ["optimize", "update"]


def _from_environment() -> bool:
    value = os.environ.get("GA_OPTAX_OPTIMIZE", "1")
    if value.lower() not in ("0", "1", "false", "true"):
        raise ValueError(
            "The environment variable GA_OPTAX_OPTIMIZE must be 0 or 1, but it is "
            f"{value!r}. Set it to 0 or 1, or unset it."
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
            f'The option of ga_optax.config must be "optimize", but it is {name!r}. '
            "Pass this name."
        )
    if not isinstance(value, bool):
        raise TypeError(
            f"ga_optax.config.optimize must be a bool, but it got {value!r}. Pass True "
            "or False."
        )
    optimize = value
