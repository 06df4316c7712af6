"""A head that ends in sums runs forward once, although its cotangents come after them.

The gradient of a ratio of sums, such as a dice loss, is known when all rows are added
up: the level runs again to take it back. But the gradient of a product does not need
its result. If the results of the last products of a level are kept, their cotangents
follow from them, and those products need not run again: in a model that is little more
than a head, that is all of the second forward pass.
"""

import math
from collections.abc import Callable
from typing import Any

from jax.extend import core

from ga_optax._inside.axis import cost, cut
from ga_optax._inside.axis.read import is_mark
from ga_optax._inside.axis.schedule import Schedule
from ga_optax._inside.axis.unread import LINEAR, PRODUCTS, is_smooth
from ga_optax._passes.ir import variables

_MOST = 1 / 2  # of a level's work, from which on that is worth a loop more


def keep_heads(
    schedule: Schedule, num_microbatches: int, limit: Callable[[], float]
) -> None:
    """Keeps the results of last products, in what others left of `limit` bytes."""
    marks = {
        x for e in schedule.jaxpr.eqns if is_mark(e, schedule.axis) for x in e.outvars
    }
    others = [b.operand for b in schedule.buffers if b.kind == "own"]
    held = num_microbatches * sum(cost.nbytes(x) for x in others if x not in marks)
    for level in range(1, schedule.end):
        members = [schedule.buffers[j] for j in schedule.at(level)]
        smooth = [b for b in members if b.has_cotangent]
        if not smooth or any(b.kind != "sum" for b in smooth):
            continue
        roots = [b.operand for b in smooth]
        found = [e for e in schedule.needed(roots, level)[0] if is_smooth(schedule, e)]
        dear = [e for e in found if not cost.is_cheap(e)]
        results = _results(found, dear, roots)
        last = [e for e in dear if _is_last(e, found, results)]
        again, spared = (sum(map(cost.work, es)) for es in (dear, last))
        taken = num_microbatches * sum(map(cost.nbytes, results))
        # It has cotangents as large.
        if not spared or spared < _MOST * again or held + 2 * taken > limit():
            continue
        trial = schedule.copy()
        for x in results:
            trial.buffer(x, "own", schedule.before(level))
        rest, _ = trial.needed(trial.operands(level), level)
        if all(map(cost.is_cheap, rest)):
            schedule.buffers, schedule.views = trial.buffers, trial.views
            held += taken


def _results(
    found: list[core.JaxprEqn], dear: list[core.JaxprEqn], roots: list[Any]
) -> list[Any]:
    """The smallest set between what is dear and the sums, as early as it can be."""
    sources = [x for e in dear for x in e.outvars]
    readers = cut.readers(found, sources)
    # Behind anything that is not linear the way back would need the products again.
    linear = set(sources)
    for e in found:
        inputs = [x for x in variables(e.invars) if x in readers]
        if e.primitive.name in LINEAR and linear.issuperset(inputs):
            linear.update(e.outvars)

    def size(x: Any) -> float:
        return cost.nbytes(x) + 1.0 if x in linear else math.inf

    return cut.smallest(readers, sources, set(roots), size, early=True)


def _is_last(
    equation: core.JaxprEqn, found: list[core.JaxprEqn], results: list[Any]
) -> bool:
    """Whether nothing on its way to `results` needs the values of what it returns."""
    due, seen = [equation], set(results)
    if equation.primitive.name not in PRODUCTS:
        return False
    while due:
        for x in due.pop().outvars:
            if x in seen:
                continue
            seen.add(x)
            readers = [e for e in found if any(y is x for y in e.invars)]
            if not all(e.primitive.name in LINEAR for e in readers):
                return False
            due += readers
    return True
