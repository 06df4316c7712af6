"""A nested `microbatch`, such as of the head of a model.

In a micro-batch of a window it divides the rows of the micro-batch on one device, into
the number of pieces that the user gave, or the largest smaller number that divides the
rows. If rows meet inside, the program of the nested function is inlined.
"""

from jax.extend import core

from ga_optax._partition import nested
from ga_optax._partition.values import Result, Value
from ga_optax._partition.writer import Writer
from ga_optax._passes import read
from ga_optax._passes.divided import Divided


def divided(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    its: Divided = e.params["its"]
    vs = w.summed(vs)
    number = _number(w, its, vs)
    if number > 1 and not its.program.jaxpr.effects:
        with w.may_fail(e) as out:
            out += _divided(w, its, vs, number)
        if out:
            return out
    return nested.inlined(w, its.program, vs)


def written(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    """A `value_and_grad`: as it was written, or as the law.

    The law if it has a derivative, or rows of a micro-batch: what is written splits the
    rows of the whole batch.
    """
    vs = w.summed(vs)
    if any(v.smooth or v.rows for v in vs):
        return divided(w, e, vs)
    return nested.inlined(w, read.inner(e)[0], vs)


def _number(w: Writer, its: Divided, vs: list[Value]) -> int:
    """The number of pieces of a micro-batch of the window, or 1."""
    pairs = [(v, d) for v, d in zip(vs, its.axes, strict=True) if d is not None]
    same = [v.dim == d for v, d in pairs]
    if not any(same):
        return its.number
    if not all(same):
        return 1
    v, d = pairs[0]
    rows = v.shape[d] // w.axis.size
    if not isinstance(rows, int):  # `jax.export` leaves it open
        return 1
    if its.size is not None:
        fewest = -(-rows // its.size)
        return next(n for n in range(fewest, rows + 1) if rows % n == 0)
    return next(n for n in range(min(its.number, rows), 0, -1) if rows % n == 0)


def _divided(w: Writer, its: Divided, vs: list[Value], number: int) -> list[Result]:
    inside = w.within(forbids_collectives=True, partitioned_again=True)
    run = nested.inner(inside, its.program, vs)
    here = its.with_program(run.closed, (None, *its.axes), number)
    index = nested.index_for(w, run)
    out = here.bind([*run.closed.consts, index, *(v.x for v in vs)])
    w.level = max(run.levels, default=0)
    return list(zip(out, run.layouts, strict=True))
