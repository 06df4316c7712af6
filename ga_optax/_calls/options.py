"""Options of the fold inside a call, checked before anything is traced."""

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from .. import _checks
from .._devices.meshes import as_data_axis
from .._loop import folds

ROLES = ("argnums", "batch_argnums", "rng_argnums", "carry_argnums")

# Keywords may have two of them, under these options.
NAMES = {"batch_argnums": "batch_argnames", "rng_argnums": "rng_argnames"}

_BOOLS = ("has_aux", "holomorphic", "allow_int", "optimize")

Argument = int | str  # of the call: its position, or its keyword


class Options(NamedTuple):
    """The options of the functions that run inside a call, under their names.

    The options after `optimize` are those of `accumulate` alone.
    """

    fun: Callable[..., Any]
    num_microbatches: Any  # an int once it is checked, and rows are known
    microbatch_size: int | None = None
    argnums: int | Sequence[int] = 0
    has_aux: bool = False
    holomorphic: bool = False
    allow_int: bool = False
    batch_argnums: int | Sequence[int] = 1
    batch_argnames: str | Sequence[str] = ()
    batch_axes: Any = 0
    data_axis: Any = None
    residual_bytes: int | None = None
    accumulator_dtype: Any = None
    optimize: bool = True
    weight_fn: Callable[..., ArrayLike] | None = None
    aux: Any = "mean"
    rng_argnums: int | Sequence[int] = ()
    rng_argnames: str | Sequence[str] = ()
    carry_argnums: int | Sequence[int] = ()
    num_real_microbatches: ArrayLike | None = None

    def checked(self, differentiates: bool = True, adds: bool = False) -> "Options":
        """The options in one form; raises if an option does not fit.

        A function that `differentiates` needs `argnums`; a function that `adds` to an
        accumulator may have logical devices.
        """
        todo = "Pass the loss function itself, not its value."
        _checks.check_callable("fun", self.fun, "of the parameters and the batch", todo)
        if self.weight_fn is not None:
            todo = "Pass None to count every micro-batch as 1."
            _checks.check_callable(
                "weight_fn", self.weight_fn, "of the batch arguments", todo
            )
        for name in _BOOLS:
            todo = "Pass True or False, or leave it out."
            _checks.check_type(name, getattr(self, name), bool, todo)
        folds.check_aux(self.aux)
        _check_residual_bytes(self.residual_bytes)
        for axis in jax.tree.leaves(self.batch_axes):
            if not _checks.is_int(axis):
                raise TypeError(
                    "batch_axes must be an int, None, or a tree of those that is a "
                    f"prefix of the batch, but it holds {axis!r}. Pass the axis to "
                    "split along, and None for what goes to each micro-batch whole."
                )
        options = self._replace(
            data_axis=as_data_axis(self.data_axis),
            **self._checked_number(),
            accumulator_dtype=_checks.check_dtype(self.accumulator_dtype),
            **{name: _positions(name, getattr(self, name)) for name in ROLES},
            **{name: _names(name, getattr(self, name)) for name in NAMES.values()},
        )
        if not adds and options.data_axis and options.data_axis.logical_devices:
            raise ValueError(
                "Here data_axis must have no logical_devices, which accumulate alone "
                f"has, but it is {options.data_axis}. Use ga_optax.accumulate for the "
                "same bits on any number of devices, or leave logical_devices out."
            )
        options._check_num_real()
        roles = options.roles()
        for name in ("argnums",) * differentiates + ("batch_argnums",):
            if not roles[name]:
                came = f"{name} must name an argument, but it is ()"
                raise ValueError(f"{came}. Leave it out, or pass a position.")
        return options

    def _checked_number(self) -> dict[str, Any]:
        """The number of micro-batches; or the size, and 1 for the number."""
        number, size = self.num_microbatches, self.microbatch_size
        if (number is None) == (size is None):
            came = "neither" if size is None else "each of them"
            raise TypeError(
                "One of num_microbatches and microbatch_size must be given, but "
                f"{came} was passed. Pass how many micro-batches there are, or how "
                "many rows each has."
            )
        if size is None:
            return {"num_microbatches": _checks.check_num_microbatches(number)}
        todo = "Pass how many rows one forward and backward pass sees."
        _checks.check_int("microbatch_size", size, todo)
        return {"num_microbatches": 1, "microbatch_size": size}

    @property
    def asked(self) -> tuple[str, int]:
        """The option that says how the batch is divided, and its value."""
        if self.microbatch_size is None:
            return "num_microbatches", self.num_microbatches
        return "microbatch_size", self.microbatch_size

    def _check_num_real(self) -> None:
        number, k = self.num_real_microbatches, self.num_microbatches
        if number is None:
            return
        todo = "Pass how many micro-batches hold examples, or None for all."
        _checks.check_integer("num_real_microbatches", number, todo)
        is_traced = isinstance(number, jax.core.Tracer)
        if not is_traced and not 0 <= np.asarray(number) <= k:
            raise ValueError(
                f"num_real_microbatches must be from 0 to num_microbatches={k}, but it "
                f"is {number}. {todo}"
            )

    @property
    def carries(self) -> bool:
        """True if `fun` returns a carry."""
        return self.carry_argnums != ()

    def roles(
        self, num_args: int | None = None, keywords: Iterable[str] = ()
    ) -> dict[str, tuple[Argument, ...]]:
        """The arguments of each role; raises if one is missing or has two roles."""
        owner: dict[Argument, str] = {}
        roles: dict[str, list[Argument]] = {role: [] for role in ROLES}
        for role in ROLES:
            value, named = getattr(self, role), NAMES.get(role, "")
            places = (
                *((value,) if _checks.is_int(value) else value),
                *getattr(self, named, ()),
            )
            for i in places:
                option = named if isinstance(i, str) else role
                if num_args is not None:
                    i = place_of(option, i, num_args, keywords, self.fun)
                if i in owner:
                    raise ValueError(
                        f"Each argument must have one role, but {owner[i]} and "
                        f"{option} name argument {i!r}. Name it once; a gradient of "
                        "what is split is that of jax.value_and_grad("
                        "ga_optax.microbatch(fun, num_microbatches), argnums)."
                    )
                owner[i] = option
                roles[role].append(i)
        return {role: tuple(places) for role, places in roles.items()}


def place_of(
    option: str,
    i: Argument,
    num_args: int,
    keywords: Iterable[str] = (),
    fun: Callable[..., Any] | None = None,
) -> Argument:
    """The position or keyword of an argument in the call; raises if it did not come.

    An argument that `fun` takes by position or keyword may come as either.
    """
    if isinstance(i, str):
        kind, came = "keyword", f"the call has {' and '.join(keywords) or 'none'}"
        if i in keywords:
            return i
    else:
        kind, came = "positional", f"the call has {num_args}, counted from 0"
        if -num_args <= i < num_args:
            return i % num_args
    names = _names_of_positions(fun)
    if isinstance(i, str) and i in names[:num_args]:
        return names.index(i)
    if isinstance(i, int) and 0 <= i < len(names) and names[i] in keywords:
        return names[i]
    other = f" (for keywords there is {NAMES[option]})" if option in NAMES else ""
    if option.startswith("batch_argnum"):
        other += ". fun must take its batch: what it closes over cannot be split"
    raise ValueError(
        f"{option} must name {kind} arguments of the call, but it names {i!r}, and "
        f"{came}. Pass that argument as a {kind} one, or change {option}{other}."
    )


def _names_of_positions(fun: Any) -> list[str]:
    """The names of arguments that `fun` takes by position or keyword, in order."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # of a built-in function
        return []
    names = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    only = any(p.kind == p.POSITIONAL_ONLY for p in parameters)
    return [] if only else names


def _check_residual_bytes(residual_bytes: Any) -> None:
    """Raises unless it is a number of bytes, or None."""
    if residual_bytes is None or (
        _checks.is_int(residual_bytes) and residual_bytes >= 0
    ):
        return
    raise ValueError(
        "residual_bytes must be a number of bytes, 0 or more, but it is "
        f"{residual_bytes!r}. Leave it out for what one micro-batch's step takes."
    )


def _positions(name: str, value: Any) -> Any:
    many = isinstance(value, (tuple, list))
    try:
        if any(isinstance(i, (bool, np.bool_)) for i in (value if many else [value])):
            raise TypeError
        return tuple(map(operator.index, value)) if many else operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an int or a sequence of ints, but it is {value!r}. Number "
            "the positional arguments of fun from 0."
        ) from None


def _names(name: str, value: Any) -> Any:
    names = (value,) if isinstance(value, str) else value
    if isinstance(names, (tuple, list)) and all(isinstance(x, str) for x in names):
        return tuple(names)
    raise TypeError(
        f"{name} must be a str or a sequence of strs, but it is {value!r}. Name the "
        "keyword arguments of the call."
    )
