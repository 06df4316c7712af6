"""Any function of a batch over micro-batches, and where its rows need one another."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._devices.data_axis import DataAxis
from ga_optax._inside import whole_batch
from ga_optax._inside.call import Call
from ga_optax._inside.microbatch import value_and_grad
from ga_optax._inside.options import AXIS_OF_ROWS
from ga_optax._partition import Meeting, is_over
from ga_optax._passes import ir
from ga_optax._text import ruled


def microbatch(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: int | Sequence[int] = 1,
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
) -> Callable[..., Any]:
    """`fun`, in the memory of a micro-batch and of what rows must know of each other.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def scores(w, x):
    ...     z = (x - x.mean(0)) @ w
    ...     return z, jnp.sqrt(jnp.mean(z**2))
    >>> w, x = jnp.ones(2), jnp.arange(8.0).reshape(4, 2)
    >>> z, root = jax.jit(ga.microbatch(scores, 2))(w, x)
    >>> print(z, root)
    [-6. -2.  2.  6.] 4.472136

    For a gradient function that is written already, `ga.microbatch(
    jax.value_and_grad(loss), 8)`, and for metrics over a set that does not fit. For a
    loss, `value_and_grad(loss, 8, whole_batch=True)` is better: it adds gradients in
    place, and takes the derivative level by level.

    **Exactness.** `fun(*args)` to rounding: results with rows come back whole, in the
    order of the rows; all others as they are.

    Args:
      fun: any function that JAX can trace. It is traced once, for the whole batch.
      num_microbatches: how many micro-batches, static; it must divide the rows.
      microbatch_size: in its place, how many rows one of them has.
      batch_argnums: the positional arguments to split.
      batch_axes: as for `value_and_grad`.
      data_axis: as for `value_and_grad`.

    Returns:
      A function with `fun`'s signature and result.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced.
    """

    def with_loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        return jnp.zeros([]), fun(*args[:-1], **kwargs)

    step = value_and_grad(
        with_loss,
        num_microbatches,
        microbatch_size=microbatch_size,
        argnums=-1,
        batch_argnums=_before_last(batch_argnums),
        batch_axes=batch_axes,
        has_aux=True,
        data_axis=data_axis,
        whole_batch=True,
    )

    @functools.wraps(fun)
    def microbatch_fun(*args: Any, **kwargs: Any) -> Any:
        (_, out), _ = step(*args, jnp.zeros([]), **kwargs)
        return out

    return microbatch_fun


def _before_last(positions: Any) -> Any:
    """Positions of arguments, if one more comes last."""
    if isinstance(positions, tuple | list):
        return tuple(map(_before_last, positions))
    return positions - 1 if isinstance(positions, int) and positions < 0 else positions


# The options that only gradients of a window have, as they are when left out.
_DEFAULTS = dict(value_and_grad.__kwdefaults__ or {})
del _DEFAULTS["whole_batch"], _DEFAULTS["microbatch_size"]

# -- Where rows need one another -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BatchDependencies:
    """Where the rows of a batch need one another, as a table.

    Attributes:
      num_microbatches: how many micro-batches there are.
      meetings: the collectives over micro-batches: what they carry, from which line.
      whole: `(primitive, line, numbers)` of what is computed whole in each micro-batch,
        because nothing better is known of it.
      levels: how many collectives come after one another, from the parameters to the
        result. A loss takes at most one forward pass more than that, and at most as
        many backward passes (one if there are none); fewer where values are kept.
    """

    num_microbatches: int
    meetings: list[Meeting]
    whole: list[tuple[str, str, int]]
    levels: int

    @property
    def nbytes(self) -> int:
        """The bytes that a window keeps of them."""
        return sum(_kept(m, self.num_microbatches) for m in self.meetings)

    def __str__(self) -> str:
        if not self.meetings and not self.whole:
            return "No row needs another: one forward and one backward pass."
        k = self.num_microbatches
        rows = [(_what(m, k), f"{_kept(m, k):,}", m.line) for m in self.meetings]
        rows += [
            (f"{name} is computed whole: {size:,} numbers", "", line)
            for name, line, size in self.whole
        ]
        end = f"{self.levels} levels, {self.nbytes:,} bytes kept."
        lines = ruled([("what meets", "bytes", "line"), *rows], left=(0, 2))
        return "\n".join([*lines, "", end])


def _kept(meeting: Meeting, size: int) -> int:
    number = math.prod(meeting.aval.shape) * meeting.aval.dtype.itemsize
    return number * (size if meeting.name == "all_gather" else 1)


def _what(meeting: Meeting, size: int) -> str:
    shape = list(meeting.aval.shape)
    if meeting.name == "all_gather":
        if meeting.rows is None:
            return f"what each micro-batch found, {[size, *shape]}"
        shape[meeting.rows] *= size
        return f"all rows of {shape}"
    number = math.prod(shape)
    kind = "a sum" if meeting.name == "psum" else "an extremum"
    return f"{kind} of {number:,} number{'' if number == 1 else 's'}"


def batch_dependencies(
    fun: Callable[..., Any],
    num_microbatches: int,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    batch_axes: Any = 0,
    has_aux: bool = False,
    data_axis: str | Sequence[str] | DataAxis | None = None,
) -> Callable[..., BatchDependencies]:
    """Shows where the rows of a batch need one another, and what a window keeps for it.

    >>> import jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.sqrt(jnp.mean((x * w) ** 2))
    >>> found = ga.batch_dependencies(loss, 2)(jnp.float32(1.0), jnp.ones(4))
    >>> print(found.levels, [m.name for m in found.meetings])
    1 ['psum']

    `str` of the result is a table: what meets, the bytes that are kept of it, and the
    line of the code. Nothing is computed or compiled.

    Args:
      fun: a loss, as for `value_and_grad(whole_batch=True)`.
      num_microbatches: as there; so are the others.
      argnums: the positional arguments to differentiate with respect to.
      batch_argnums: those to split.
      batch_axes: where to split them.
      has_aux: whether `fun` returns `(loss, aux)`.
      data_axis: the mesh axes that split the batch.

    Returns:
      A function of `fun`'s arguments, or of their types.

    Raises:
      TypeError, ValueError: as `value_and_grad`.
    """
    given = _DEFAULTS | locals()
    options, plain = whole_batch.prepared(given)

    def dependencies(*args: Any, **kwargs: Any) -> BatchDependencies:
        call = Call.make(options, args, kwargs)
        trace = whole_batch.traced(call, plain)
        part = trace.part
        return BatchDependencies(
            whole_batch.num_parts(call),
            part.meetings,
            [tuple(note) for note in part.whole],
            _levels(part.jaxpr, trace),
        )

    return dependencies


def _levels(jaxpr: Any, trace: whole_batch.Trace) -> int:
    """The longest chain of collectives that depend on the parameters."""
    first = len(trace.closed.consts)
    params = jaxpr.invars[first : first + trace.num_params]
    level = dict.fromkeys(params, 0)
    for e in jaxpr.eqns:
        known = [level[x] for x in ir.variables(e.invars) if x in level]
        if known:
            its = max(known) + any(is_over(x, AXIS_OF_ROWS) for x in _with_inner(e))
            level |= dict.fromkeys(e.outvars, its)
    return max(level.values(), default=0)


def _with_inner(e: Any) -> list[Any]:
    return [e, *(x for p in ir.inner_programs(e) for x in ir.equations(p))]
