"""The batch of a call: which leaves have rows, along which axis, and whether k divides.

n rows  =  devices · num_microbatches · rows of a micro-batch
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _checks
from .._checks import divisors, is_raw_key, is_single, named_leaves, one_of, uneven
from .._devices import meshes
from .._passes import jaxprs
from .._text import warn_once
from .options import NAMES, Argument

# == Rows of the batch =================================================================

Call = Any  # of `call`, which imports this


def argument(place: Argument) -> str:
    """The name of an argument in messages."""
    return f"argument {place!r}"


def to_pass(call: Call, role: str, place: Argument) -> str:
    """The option that gives a role to one more argument, as users write it."""
    named = isinstance(place, str)
    places = [i for i in call.roles[role] if isinstance(i, str) == named]
    value = (*places, place) if places else place
    return f"{NAMES[role] if named else role}={value!r}"


def is_typed_key(leaf: Any) -> bool:
    """True for a typed array of PRNG keys."""
    is_traced = isinstance(leaf, jax.Array)
    return is_traced and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def named_batch(call: Call) -> list[tuple[str, Any]]:
    """The leaves of the batch arguments, each with its name."""
    places = call.roles["batch_argnums"]
    leaves = []
    for i in places:
        for name, x in named_leaves(call.at(i)):
            alone = len(places) == 1 and x is not call.at(i)
            leaves.append((name if alone else f"{name} of {argument(i)}", x))
    return leaves


def is_array(x: Any) -> bool:
    """True for a leaf that `jax.jit` would trace, and for the type of such a leaf."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


_A_KEY_ALONE = (
    "Pass keys by themselves, and name them in rng_argnums; to verify pass rng=."
)


# -- Axes ------------------------------------------------------------------------------


def axes_of(call: Call, hint: bool) -> list[int | None]:
    """The axis of each leaf of the batch, not negative; None for what goes whole."""
    axes, batch = call.options.batch_axes, call.role("batch_argnums")
    of_list = len(batch) == 1 and isinstance(axes, list) and isinstance(batch[0], list)
    if isinstance(axes, list) and not (of_list and len(axes) == len(batch[0])):
        axes = tuple(axes)
    if len(batch) == 1 and not (is_single(axes) and not is_single(batch[0])):
        axes = (axes,)
    try:
        of_leaves = jax.tree.broadcast(axes, batch, is_leaf=_checks.is_none)
    except ValueError:
        tree = jax.tree.structure(batch if len(batch) > 1 else batch[0])
        raise ValueError(
            "batch_axes must be a prefix of the batch (of a tuple of the arguments, if "
            f"there are several), but it is {call.options.batch_axes!r}, and the batch "
            f"is {tree}. Pass an int, None, or one for each part."
        ) from None
    named = named_batch(call)
    leaf_axes = jax.tree.structure(batch).flatten_up_to(of_leaves)
    for i, ((name, x), axis) in enumerate(zip(named, leaf_axes, strict=True)):
        if axis is None:
            continue
        if hint and np.ndim(x) == 0:
            leaf_axes[i] = None
            continue
        whole = "Give it None in batch_axes to pass it to each micro-batch as it is."
        todo = _A_KEY_ALONE if is_typed_key(x) and not hint else whole
        _checks.check_arrays(name, x, todo)
        ndim = jnp.ndim(x)
        if not -ndim <= axis < ndim:
            has = f"has shape {jnp.shape(x)}" if ndim else "is a scalar"
            raise ValueError(
                "Every leaf of the batch must have a batch axis, here axis "
                f"{axis}, but {name} {has}. {todo}{call.question}"
            )
        leaf_axes[i] = axis % ndim
    return leaf_axes


# -- Rows ------------------------------------------------------------------------------


def checked_split(call: Call, hint: bool) -> Call:
    """The call, whose rows the devices and micro-batches divide; or raises."""
    rows, came, todo = counted_rows(call, hint)
    if hint:
        _warn_of_rows(call, rows, came)
        is_split = lambda x, _: not is_raw_key(x) or np.shape(x)[0] == rows  # noqa: E731
        call = _split_where(call, is_split)
    devices, kind = _num_splits(call)
    part, rest = divmod(rows, devices)
    if rest:
        raise ValueError(
            f"The {devices} {kind} along data_axis={call.devices.axes} must divide the "
            f"batch, but {came}.{_checks.or_else(call.question, 'Use')} a batch of "
            f"{one_of([n for n in (rows - rest, rows - rest + devices) if n])}{todo}."
        )
    of_all = rows, f"the batch axis, but {came}", todo
    each = f"the batch of each of the {devices} {kind}, {part} examples, but {came}"
    of_device = of_all if devices == 1 else (part, each, todo)
    # The last micro-batch is smaller if no row needs another, see `engine.partition`.
    may_rest = hint and devices == 1 and not call.devices.axes and isinstance(rows, int)
    options = call.options
    if (size := options.microbatch_size) is not None:
        divided = of_device if call.devices.axes else of_all
        if may_rest:
            number = -(-rows // size)
        else:
            number = _quotient(call, "microbatch_size", size, divided)
        options = options._replace(num_microbatches=number, microbatch_size=None)
        call = call._replace(options=options)
    if may_rest and options.num_microbatches > rows:
        use = _checks.or_else(call.question, "Use")
        raise ValueError(
            f"num_microbatches={options.num_microbatches} must be at most the number "
            f"of rows, but {came}.{use} {rows} or fewer{todo}. {_OF_ONE}"
        )
    if may_rest and options.num_microbatches < rows:
        call = call.in_pieces(rows, options.num_microbatches)
    k = call.options.num_microbatches
    # In a region a device does not know which leaves are whole on all devices.
    if hint and not call.devices.bound:
        call = _as_they_divide(call, rows, 0 if call.rest else devices * k)
    else:
        _check_one_length(call, rows, came)
        if devices * k > 1:
            _check_no_batch(call, rows)
    if not call.rest:
        _quotient(call, "num_microbatches", k, of_device)
    return call


_OF_ONE = (
    "One example, or one sequence, has no rows: give each leaf a batch axis, or name "
    "another one in batch_axes."
)


def _quotient(call: Call, option: str, number: int, rows: tuple[int, str, str]) -> int:
    """The number of rows over `number`; raises if `number` does not divide it."""
    part, what, todo = rows
    if not isinstance(part, int) and not _holds(lambda: part % number == 0):
        raise ValueError(
            f"{option}={number} must divide {what}. Export a dimension that it "
            f'divides, such as jax.export.symbolic_shape("{number}*b").'
        )
    if part % number:
        nearest = sorted(divisors(part), key=lambda d: abs(d - number))[:8]
        use = _checks.or_else(call.question, "Use")
        more = f" {_OF_ONE}" if number > part and not call.question else ""
        raise ValueError(
            f"{option}={number} must divide {what}.{use} {one_of(sorted(nearest))}"
            f"{todo}. {uneven(part, number)}{more}"
        )
    return part // number


def _with_axes(call: Call) -> list[tuple[str, Any, int]]:
    """The leaves that have rows: their names, themselves, and how many rows."""
    named = zip(named_batch(call), call.batch_axes, strict=True)
    return [
        (name, x, jnp.shape(x)[axis]) for (name, x), axis in named if axis is not None
    ]


def counted_rows(call: Call, hint: bool) -> tuple[int, str, str]:
    """The number of rows: the length of the leaves with most bytes of the batch.

    Returns: the number; a leaf that has it, in words; advice if it is not the number.
    """
    leaves = _with_axes(call)
    if not leaves:
        places = call.roles["batch_argnums"]
        came = " and ".join(
            f"{argument(i)} is {_checks.brief(call.at(i))}" for i in places
        )
        raise ValueError(
            "batch_argnums must name arguments that hold arrays with rows, but "
            f"{came}, and batch_axes is {call.options.batch_axes!r}. Pass the batch in "
            "that argument, name another one in batch_argnums, or give the leaves with "
            f"rows their axis.{call.question}"
        )
    sizes: dict[Any, int] = {}
    for _, x, length in leaves:
        sizes[length] = sizes.get(length, 0) + (
            0 if is_raw_key(x) else jaxprs.nbytes(x)
        )
    # A size that `jax.export` leaves open is the number of rows.
    rows = max(sizes, key=lambda n: (not isinstance(n, int), sizes[n]))
    name, x = next((name, x) for name, x, length in leaves if length == rows)
    came = f"{name} has shape {jnp.shape(x)}"
    if rows == 0:
        todo = "Skip the call"
        if not hint:
            todo += ", or pad the batch and pass num_real_microbatches=0"
        raise ValueError(
            f"The batch must hold at least one example, but {came}. {todo}."
        )
    other = f"; or, if that leaf has no rows, give {name} None in batch_axes"
    return rows, came, other if len(sizes) > 1 else ""


def _split_where(call: Call, is_split: Callable[[Any, int], bool]) -> Call:
    """The call, in which only some leaves of the batch are split; others go whole.

    `is_split` is asked of a leaf that is split so far, and of its axis.
    """
    leaves = jax.tree.leaves(call.role("batch_argnums"))
    axes = [
        axis if axis is not None and is_split(x, axis) else None
        for x, axis in zip(leaves, call.batch_axes, strict=True)
    ]
    return call._replace(batch_axes=axes)


def _check_one_length(call: Call, rows: int, came: str) -> None:
    for name, x, length in _with_axes(call):
        if length != rows:
            todo = (
                "Put the examples on axis 0, or say in batch_axes where they are, with "
                "None for a leaf without examples, such as a table, which goes whole."
            )
            raise ValueError(
                "All leaves of the batch must have one length along their batch axis, "
                f"but {came} and {name} has shape {jnp.shape(x)}. "
                f"{_A_KEY_ALONE if is_raw_key(x) else todo}{call.question}"
            )


def _as_they_divide(call: Call, rows: int, parts: int) -> Call:
    """The call, in which leaves that do not divide go whole, and others have a role.

    An argument without a role that has the batch's rows in all of its leaves has one.
    With 0 `parts` micro-batches have the rows of the batch alone.
    """

    def is_split(x: Any, axis: int) -> bool:
        n = np.shape(x)[axis]
        is_one = _holds(lambda: n == rows)
        return is_one or (parts > 0 and _holds(lambda: n > 0 and n % parts == 0))

    call = _split_where(call, is_split)
    [axis, *others] = dict.fromkeys(call.split_axes)
    axis = 0 if others else axis
    for place in call.without_role:
        leaves = jax.tree.leaves(call.at(place))
        if leaves and all(np.shape(x)[axis : axis + 1] == (rows,) for x in leaves):
            batch = *call.roles["batch_argnums"], place
            call = call._replace(
                roles=call.roles | {"batch_argnums": batch},
                batch_axes=[*call.batch_axes, *[axis] * len(leaves)],
            )
    return call


def _warn_of_rows(call: Call, rows: Any, came: str) -> None:
    """Warns if fewer rows are those of more leaves: the largest one may be a table.

    Integers in a matrix, such as tokens, count twice; `batch_axes` as a tree decides. A
    table has no integers beside it, as the edges of a graph have.
    """
    _, k, size, *_ = call.options
    votes: dict[Any, int] = {}
    if not isinstance(call.options.batch_axes, int):
        return
    for _, x, n in _with_axes(call):
        is_integer = jnp.issubdtype(x.dtype, jnp.integer) and not is_raw_key(x)
        if is_integer and _holds(lambda n=n: n == rows):
            return
        votes[n] = votes.get(n, 0) + 1 + (is_integer and np.ndim(x) > 1)
    n = max(votes, key=votes.__getitem__)
    fewer = _holds(lambda: n < rows) and votes[n] > votes[rows]
    if fewer and k != 1 and n % (k or size) == 0:
        warn_once(
            f"The rows of a batch are those of most of its bytes, here {rows:,} ({came}"
            f"), but more leaves have {n} rows. If that leaf is a table, give it None "
            "in batch_axes; the gradient is right anyway, but may save nothing."
            f"{call.question}"
        )


def _holds(test: Callable[[], Any]) -> bool:
    """The result of a test of dimensions; False if `jax.export` leaves them open."""
    try:
        return bool(test())
    except jax.errors.InconclusiveDimensionOperation:
        return False


def _num_splits(call: Call) -> tuple[int, str]:
    """The number of devices that the batch is split over, and the kind of devices."""
    devices = call.devices
    if not devices.axes:
        return max(map(meshes.num_parts, call.batch, call.split_axes)), "devices"
    kind = "logical devices" if devices.logical else "devices"
    number = 1 if devices.mesh is None else devices.number
    return number * (devices.logical or 1), kind


def _check_no_batch(call: Call, rows: int) -> None:
    """Raises if an argument without a role is as long as the batch."""
    for place in call.without_role:
        leaves = jax.tree.leaves(call.at(place))
        shapes = [getattr(x, "shape", ()) for x in leaves]
        for axis in {0, *call.split_axes} if leaves else ():
            if all(shape[axis : axis + 1] == (rows,) for shape in shapes):
                raise ValueError(
                    f"An argument with the batch's {rows} rows must have a role, but "
                    f"{argument(place)}, of shape {shapes[0]}, has none, and would go "
                    "to each micro-batch whole. Pass "
                    f"{to_pass(call, 'batch_argnums', place)} to split it; if it is to "
                    "go whole, pass that, and None for it in batch_axes."
                )
