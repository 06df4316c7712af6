"""Where the rows of a batch need one another, and what that costs a window."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ga_optax._devices.data_axis import DataAxis
from ga_optax._inside import whole_batch
from ga_optax._inside.axis.report import Report, Stored, recorded, said_of
from ga_optax._inside.call import Call
from ga_optax._inside.microbatch import of_options, value_and_grad
from ga_optax._inside.sizes import by_size, size_of
from ga_optax._partition import Note
from ga_optax._text import ruled, wrap


@dataclasses.dataclass(frozen=True)
class BatchDependencies:
    """Where the rows of a batch need one another, and what that costs, as a table.

    Attributes:
      num_microbatches: how many micro-batches there are, on all devices.
      meetings: what rows need of each other: its `kind` ("sum", "max", "min", or
        "stack" for what each micro-batch has), its `type` in one micro-batch, the
        `line` of the code (beside it the module or function of a package inside),
        the `nbytes` that a device keeps of it, and how often what
        it is computed of runs `forward` and `backward` over all rows.
      kept: what else a window keeps, so that less runs again: activations of the
        micro-batches ("kept"), and what they share ("once").
      whole: `(name, line, size)` of what is computed whole in each micro-batch, because
        nothing better is known of it; the size is in numbers that it returns, or reads
        of all rows.
      forward_passes: how often any part of the loss runs forward, at most. Elementwise
        functions cost little, and are not counted where there is anything else.
      backward_passes: how often any part runs backward.
      peak_bytes: about how many bytes a device needs at a time, beside arguments and
        results: what is stored between the passes, its cotangents, and one
        micro-batch's step. 0 where there is no pass but those of a plain loop.
      more_room: `(residual_bytes, forward, backward)`: with how much room everything
        stays, and how many passes that takes; None if more room changes nothing.
    """

    num_microbatches: int
    meetings: list[Stored]
    kept: list[Stored]
    whole: list[Note]
    forward_passes: int
    backward_passes: int
    peak_bytes: int
    more_room: tuple[int, int, int] | None

    @property
    def kept_bytes(self) -> int:
        """What a device keeps between passes, each as long as it is read."""
        return sum(x.nbytes for x in (*self.meetings, *self.kept))

    def __str__(self) -> str:
        passes = (
            f"{_times(self.forward_passes, 'forward pass')} and "
            f"{_times(self.backward_passes, 'backward pass')}"
        )
        if not self.meetings and not self.whole:
            return f"No row needs another: {passes}."
        rows = [_cells(group) for group in _groups((*self.meetings, *self.kept))]
        rows += [
            (f"{name}, computed whole: {size:,} numbers", "", "", "", short(line))
            for name, line, size in dict.fromkeys(self.whole)
        ]
        lines = ruled([("what meets", *_HEADER, "line"), *rows], left=(0, 4))
        room = f", in about {self.peak_bytes:,} bytes" if self.peak_bytes else ""
        end = f"In all: {passes}{room}."
        if self.more_room:
            end += " " + said_of(self.more_room)
        legend = dict.fromkeys([_LEGEND, *(_TODO.get(x.name, "") for x in self.whole)])
        told = [line for text in legend if text for line in wrap(text)]
        runs = self.forward_passes or self.backward_passes
        return "\n".join([*lines, "", *told, *(wrap(end) if runs else [])])


_HEADER = ("bytes", "forward", "backward")
_LEGEND = (
    "forward, backward: how often what leads to the line runs over all rows. "
    "Elementwise functions cost little, and may run more often."
)


_OF_INDEX = (
    "An index may reach any row. If each row has its own, such as the nodes of its own "
    "graph, index inside of a row, by jax.vmap or take_along_axis, and add no offsets."
)
# What to do about what is computed whole.
_TODO = {
    "while": "A loop that runs until all rows are done has all of them in every "
    "micro-batch. Give each row a loop of its own, by jax.vmap.",
    **dict.fromkeys(("scatter", "scatter-max", "scatter-min"), _OF_INDEX),
}


def short(line: str) -> str:
    """A line of code without the folder of its file."""
    path, *rest = line.split(":")
    return ":".join([os.path.basename(path), *rest])


def _groups(stored: Sequence[Stored]) -> list[list[Stored]]:
    """Those that are alike, such as those of several layers, together."""
    groups: dict[Any, list[Stored]] = {}
    for x in stored:
        groups.setdefault((x.line, _what(x)), []).append(x)
    return list(groups.values())


def _cells(group: list[Stored]) -> tuple[str, ...]:
    what = _what(group[0])
    runs = [max(getattr(x, name) for x in group) for name in ("forward", "backward")]
    return (
        what if len(group) == 1 else f"{len(group)} times {what}",
        f"{sum(x.nbytes for x in group):,}",
        *map(str, runs),
        short(group[0].line),
    )


def _what(x: Stored) -> str:
    size, is_tiled = x.type.size, len(x.shape) == len(x.type.shape)
    if x.kind == "stack" and is_tiled:
        return f"all rows of {list(x.shape)}"
    own = list(x.type.shape) or "a number"
    if x.kind == "stack":
        return f"{own} of each micro-batch"
    if x.kind in ("kept", "once"):
        whose = "of each micro-batch" if x.kind == "kept" else "for all rows"
        return f"kept: {own} {whose}"
    kind = "a sum" if x.kind == "sum" else "an extremum"
    return f"{kind} of {size:,} number{'' if size == 1 else 's'}"


def _times(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es'}"


# The options that only gradients of a window have, as they are when left out.
_DEFAULTS = dict(value_and_grad.__kwdefaults__ or {})
del _DEFAULTS["microbatch_size"]


def batch_dependencies(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    batch_axes: Any = 0,
    has_aux: bool = False,
    residual_bytes: int | None = None,
    data_axis: str | Sequence[str] | DataAxis | None = None,
) -> Callable[..., BatchDependencies]:
    """Shows where the rows of a batch need one another, and what that costs a window.

    >>> import jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.sqrt(jnp.mean((x @ w) ** 2))
    >>> found = ga.batch_dependencies(loss, 2)(jnp.ones(3), jnp.ones((4, 3)))
    >>> print(found.forward_passes, found.backward_passes, found.kept_bytes)
    2 1 8
    >>> [mean] = found.meetings
    >>> print(mean.kind, mean.type.shape, mean.nbytes)
    sum () 4

    `str` of the result is a table of the lines of the code where rows meet: what meets
    there, the bytes that a device keeps of it, and how often what leads to it runs
    forward and backward over all rows. A loss whose rows do not meet takes one forward
    and one backward pass. Nothing is computed or compiled.

    **Exactness.** Bytes and passes are those of `value_and_grad(whole_batch=True)` with
    the same options: its program is traced, and says what it does.

    Args:
      fun: a loss, as for `value_and_grad(whole_batch=True)`.
      num_microbatches: as there; so are the others.
      microbatch_size: in its place, how many rows one of them has.
      argnums: the positional arguments to differentiate with respect to.
      batch_argnums: those to split.
      batch_axes: where to split them.
      has_aux: whether `fun` returns `(loss, aux)`.
      residual_bytes: what may be kept so that less runs again.
      data_axis: the mesh axes that split the batch.

    Returns:
      A function of `fun`'s arguments, or of their types.

    Raises:
      TypeError, ValueError: as `value_and_grad`.
    """
    given = _DEFAULTS | locals() | {"whole_batch": True}
    if (size := size_of(given)) is not None:
        return by_size(_of_number, given, size)
    return _of_number(**given)


def _of_number(**given: Any) -> Callable[..., BatchDependencies]:
    """`batch_dependencies` with a number of micro-batches."""
    del given["whole_batch"]
    options, plain = whole_batch.prepared(given)

    def dependencies(*args: Any, **kwargs: Any) -> BatchDependencies:
        call = Call.make(options, args, kwargs)
        whole_batch.check_region(call)
        trace, [*reports] = _traced(call, plain)
        # If no rows meet there is a plain loop, which reports nothing.
        plain_loop = Report(0, 1, int(trace.loss_has_gradients), ())
        last = reports[-1] if reports else plain_loop
        kept = [x for x in last.stored if x.kind in ("kept", "once")]
        meetings = [x for x in last.stored if x not in kept]
        passes = last.forward, last.backward, last.peak, last.room
        size, whole = whole_batch.num_parts(call), trace.part.whole
        return BatchDependencies(size, meetings, kept, whole, *passes)

    return dependencies


def _traced(
    call: Call, fun: Callable[..., Any]
) -> tuple[whole_batch.Trace, list[Report]]:
    """The program of `fun`, and what its window reports."""
    found: list[whole_batch.Trace] = []
    leaves, structure = jax.tree.flatten((call.args, call.kwargs))
    places = [i for i, x in enumerate(leaves) if _is_array(x)]

    def run(arrays: Sequence[Any]) -> Any:
        new = dict(zip(places, arrays, strict=True))
        every = [new.get(i, x) for i, x in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(structure, every)
        here = call._replace(args=args, kwargs=kwargs)
        found.append(whole_batch.traced(here, fun))
        _, grads = whole_batch.window(of_options, fun, here, found[0])
        return grads

    with recorded() as reports:
        jax.eval_shape(run, [leaves[i] for i in places])
    return found[0], reports


def _is_array(x: Any) -> bool:
    """Whether `jax.jit` would trace it, or it is the type of such."""
    return hasattr(x, "shape") and hasattr(x, "dtype")
