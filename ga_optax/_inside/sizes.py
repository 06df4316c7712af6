"""`microbatch_size=`: as many micro-batches of that size as the rows of a call make."""

import functools
from collections.abc import Callable
from typing import Any

from ga_optax._checks import check_int, divisors, one_of
from ga_optax._inside.call import Call, rows_of_device
from ga_optax._inside.options import Options

_TODO = "Pass how many rows one forward and backward pass sees."


def size_of(given: dict[str, Any], default: int | None = None) -> int | None:
    """Takes the size out of the options; None if the number of micro-batches is there.

    Raises unless one of both is there; `default` is the number if none is.
    """
    size = given.pop("microbatch_size")
    if size is None and given["num_microbatches"] is None:
        given["num_microbatches"] = default
    if (size is None) == (given["num_microbatches"] is None):
        came = "neither" if size is None else "both"
        raise TypeError(
            "One of num_microbatches and microbatch_size must be given, but "
            f"{came} came. Pass how many micro-batches there are, or how many rows "
            "each has."
        )
    return None if size is None else check_int("microbatch_size", size, _TODO)


def by_size(
    core: Callable[..., Callable[..., Any]],
    given: dict[str, Any],
    size: int,
    first: int = 0,
) -> Callable[..., Any]:
    """What `core` returns for `given`, with micro-batches of `size` rows.

    The arguments of `fun` come after the `first` ones of the call.
    """
    # All options but the number are checked before a call, and rows need no others.
    one: dict[str, Any] = dict.fromkeys(Options._fields) | given
    one |= {"num_microbatches": 1, "num_real_microbatches": None}
    options = Options(**one).checked()

    @functools.cache
    def of_number(number: int) -> Callable[..., Any]:
        return core(**given | {"num_microbatches": number})

    @functools.wraps(options.fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        number = _number(Call.make(options, args[first:], kwargs), size)
        return of_number(number)(*args, **kwargs)

    return call


def _number(call: Call, size: int) -> int:
    rows, what, came = rows_of_device(call)
    if rows % size:
        nearest = sorted(divisors(rows), key=lambda d: abs(d - size))[:8]
        todo = one_of(sorted(nearest))
        if not call.options.whole_batch:
            todo += "; or pad the batch, and count its rows with weight_fn"
        raise ValueError(
            f"microbatch_size={size} must divide {what}, but {came}. Use {todo}."
        )
    return rows // size
