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
from ga_optax._inside.axis.schedule import Schedule
from ga_optax._passes import known
from ga_optax._passes.ir import variables

_MOST = 1 / 2  # of a level's work, from which on that is worth a loop more
_LINEAR = {*known.EXACT, "reduce_sum", "add", "add_any", "sub", "neg"} - {"select_n"}
_PRODUCTS = (known.PRODUCT, known.CONVOLUTION)


def keep_heads(
    schedule: Schedule, num_microbatches: int, limit: Callable[[], float]
) -> None:
    """Keeps the results of last products, in at most `limit` bytes for each level."""
    for level in range(1, schedule.end):
        members = [schedule.buffers[j] for j in schedule.at(level)]
        smooth = [b for b in members if b.has_cotangent]
        if not smooth or any(b.kind != "sum" for b in smooth):
            continue
        roots = [b.operand for b in smooth]
        found = [e for e in schedule.needed(roots, level)[0] if _is_smooth(schedule, e)]
        dear = [e for e in found if not cost.is_cheap(e)]
        results = _results(found, dear, roots)
        last = [e for e in dear if _is_last(e, found, results)]
        again, spared = (sum(map(cost.work, es)) for es in (dear, last))
        taken = 2 * num_microbatches * sum(map(cost.nbytes, results))
        if not spared or spared < _MOST * again or taken > limit():
            continue
        trial = schedule.copy()
        for x in results:
            trial.buffer(x, "own", schedule.before(level))
        rest, _ = trial.needed(trial.operands(level), level)
        if all(map(cost.is_cheap, rest)):
            schedule.buffers, schedule.views = trial.buffers, trial.views
            schedule.spared.update(map(id, last))


def _is_smooth(schedule: Schedule, equation: core.JaxprEqn) -> bool:
    return any(
        schedule.facts[x].own and schedule.facts[x].smooth for x in equation.outvars
    )


def _results(
    found: list[core.JaxprEqn], dear: list[core.JaxprEqn], roots: list[Any]
) -> list[Any]:
    """The smallest set between what is dear and the sums, as early as it can be."""
    sources = [x for e in dear for x in e.outvars]
    readers: dict[Any, list[Any]] = {x: [] for x in sources}
    for e in found:
        inputs = [x for x in variables(e.invars) if x in readers]
        for x in inputs:
            readers[x] += e.outvars
        if inputs:
            readers |= {x: [] for x in e.outvars if x not in readers}
    # Behind anything that is not linear the way back would need the products again.
    linear = set(sources)
    for e in found:
        inputs = [x for x in variables(e.invars) if x in readers]
        if e.primitive.name in _LINEAR and linear.issuperset(inputs):
            linear.update(e.outvars)

    def size(x: Any) -> float:
        return cost.nbytes(x) + 1.0 if x in linear else math.inf

    sinks = [x for x in readers if x in set(roots)]
    kept = set(cut.smallest(readers, sources, sinks, size, early=True))
    return [x for x in readers if x in kept]


def _is_last(
    equation: core.JaxprEqn, found: list[core.JaxprEqn], results: list[Any]
) -> bool:
    """Whether nothing on its way to `results` needs the values of what it returns."""
    due, seen = [equation], set(results)
    if equation.primitive.name not in _PRODUCTS:
        return False
    while due:
        for x in due.pop().outvars:
            if x in seen:
                continue
            seen.add(x)
            readers = [e for e in found if any(y is x for y in e.invars)]
            if not all(e.primitive.name in _LINEAR for e in readers):
                return False
            due += readers
    return True
