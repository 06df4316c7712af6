"""Sums that wait: equations that are linear in partial operands.

`f(Σ xᵢ) = Σ f(xᵢ)`, so a sum is reduced where something that is not linear reads it,
and a gradient that contracts over rows is one sum at the very end. (Shardy calls this
`unreduced`.) A whole operand of an addition is shared out: `Σ xᵢ + y = Σ (xᵢ + y/k)`.
What costs more than the sum, such as a product, is computed after it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from .._passes import jaxprs, primitives
from .held import PARTIAL, Result, Results, Value, ancestors, types_of
from .writer import Writer


def linear(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result] | None:
    """The partial results; None if the equation is not linear in partial operands."""
    name = e.primitive.name
    if name == "div" and vs[0].is_partial and vs[0].params and not vs[1].params:
        # What does not depend on the parameters, such as a count of tokens, is known
        # before all that does.
        vs = [vs[0], *w.summed(vs[1:])]
    if any(v.rows for v in vs) or not all(jaxprs.is_inexact(x.aval) for x in e.outvars):
        return None
    places = slots(e, [i for i, v in enumerate(vs) if v.is_partial])
    if places is None:
        return None
    if any(v.is_wide for v in vs) and (
        jaxprs.inner_programs(e) or not jaxprs.is_cheap(e)
    ):
        return None
    if name == primitives.CAST:
        old, new = (x.dtype for x in (vs[0].x, *types_of(e)))
        if not jaxprs.is_inexact(vs[0].x) or old.kind == "c" != new.kind:
            return None  # it drops more than digits
        if jnp.finfo(new).bits < jnp.finfo(old).bits:
            # The sum must be rounded, and not the terms: it is when it is complete.
            forbids = w.scope.forbids_collectives and not w.scope.may_count
            rounds = forbids or w.scope.is_inner
            return None if rounds else [(vs[0].x, PARTIAL)]
    if name == "gather" and e.params["fill_value"]:
        return None  # it is added once, and not by each micro-batch
    grows = name == "broadcast_in_dim" and jaxprs.computed(e) > vs[0].size
    if grows and not w.scope.forbids_collectives:
        return None  # the smaller one is summed
    if any(_is_late(v, vs) for v in vs) or is_summed_first(w, e, vs):
        return None
    if name == "optimization_barrier":
        return barrier(w, e, vs)
    xs = [w.addend(v) if i in places else v.x for i, v in enumerate(vs)]
    if any(v.is_wide for v in vs):
        xs = _alike(xs)
    return [(x, PARTIAL) for x in w.results(e, xs)]


def barrier(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    return list(zip(w.run(e, [v.x for v in vs]), (v.layout for v in vs), strict=True))


def slots(e: core.JaxprEqn, partial: Sequence[int]) -> Sequence[int] | None:
    """The operands in which together an equation is linear, if all partial ones are."""
    row = primitives.entry_of(e)
    found = row.linear_in(len(e.invars))
    if not found and len(partial) == 1:
        found = [i for i in partial if i in row.each]
    return found if set(partial) <= set(found) else None


def _is_late(v: Value, vs: list[Value]) -> bool:
    """True if another operand is known only after a later collective.

    Then `v` is summed in that collective. Otherwise the operands of `v` would be
    computed once more where the other one is read.
    """
    return v.is_partial and any(other.level > v.level for other in vs)


def is_summed_first(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> bool:
    """True if an equation costs more than the sums of its operands: they come first.

    Otherwise each micro-batch runs the equation, forward and, for each of two operands,
    backward: a product with the weights of experts, to which an index sends rows. But a
    sum that nothing else needs is one more level, which runs the rows before it again.
    If that costs more, the equation runs with the rows, in one loop.
    """
    if jaxprs.is_cheap(e) or w.scope.forbids_collectives:
        return False
    of_rows, waiting = _work_before([v for v in vs if v.is_partial])
    more = THERE_AND_BACK * (w.axis.size - 1) * (waiting + jaxprs.work(e))
    return 2 * more > of_rows


THERE_AND_BACK = 3  # times the work of a product


def _work_before(vs: Iterable[Value]) -> tuple[float, float]:
    """The work of rows on the way to partial values, and of sums that wait.

    It is that of all rows, of equations that are not cheap.
    """
    of_rows = waiting = 0.0
    made = {id(v.made[1]): v.made for v in ancestors(vs) if v.made is not None}
    for e, operands, _ in made.values():
        work = 0.0 if jaxprs.is_cheap(e) else jaxprs.work(e)
        if any(v.rows for v in operands):
            of_rows += work
        elif any(v.is_partial for v in operands):
            waiting += work
    return of_rows, waiting


def _alike(xs: Sequence[Any]) -> list[Any]:
    """Operands of which all real numbers have the digits of the widest."""
    some = (x.dtype for x in xs if jaxprs.is_inexact(x))
    widest = max(some, key=lambda dtype: jnp.finfo(dtype).bits)
    return [jnp.asarray(x, widest) if jaxprs.is_inexact(x) else x for x in xs]
