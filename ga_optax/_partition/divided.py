"""A nested `microbatch`, such as of the head of a model.

In a micro-batch of a window it divides the rows of the micro-batch on one device, into
the number of pieces that the user gave, or the largest smaller number that divides the
rows. If rows meet inside, the program of the nested function is inlined.
"""

from jax.extend import core

from ga_optax._partition import nested
from ga_optax._partition.values import Result, Value, length_of
from ga_optax._partition.writer import Writer
from ga_optax._passes import read
from ga_optax._passes.divided import Divided


def divided(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    function: Divided = e.params["function"]
    vs = w.summed(vs)
    number = _number(w, function, vs)
    if number > 1 and not function.program.jaxpr.effects:
        with w.may_fail(e) as out:
            out += _divided(w, function, vs, number)
        if out:
            return out
    return nested.inlined(w, function.program, vs)


def written(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    """A `value_and_grad`: as it was written, or as the law.

    The law if it has a derivative, or rows of a micro-batch: what is written splits the
    rows of the whole batch.
    """
    vs = w.summed(vs)
    if any(v.smooth or v.rows for v in vs):
        return divided(w, e, vs)
    return nested.inlined(w, read.inner(e)[0], vs)


def _number(w: Writer, function: Divided, vs: list[Value]) -> int:
    """The number of pieces of a micro-batch of the window, or 1."""
    pairs = [(v, d) for v, d in zip(vs, function.axes, strict=True) if d is not None]
    same = [v.dim == d for v, d in pairs]
    if not any(same):
        return function.number
    if not (all(same) and w.axis.is_even):  # the last might have another number
        return 1
    v, d = pairs[0]
    rows = length_of(v.shape[d], w.axis.parts)
    if not isinstance(rows, int):  # `jax.export` leaves it open
        return 1
    if function.size is not None:
        fewest = -(-rows // function.size)
        return next(n for n in range(fewest, rows + 1) if rows % n == 0)
    return next(n for n in range(min(function.number, rows), 0, -1) if rows % n == 0)


def _divided(
    w: Writer, function: Divided, vs: list[Value], number: int
) -> list[Result]:
    inside = w.within(forbids_collectives=True, partitioned_again=True)
    run = nested.inner(inside, function.program, vs)
    here = function.with_program(run.closed, (None, *function.axes), number)
    index = nested.index_for(w, run)
    out = here.bind([*run.closed.consts, index, *(v.x for v in vs)])
    w.level = max(run.levels, default=0)
    return list(zip(out, run.layouts, strict=True))
