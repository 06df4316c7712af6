"""What the way back of a level does not run forward, because nothing reads it.

The gradient of a product needs its operands, and not its result. So a product whose
result is added up, or kept, runs forward where that is needed first, and not once more.
"""

from typing import Any

from jax.extend import core

from ga_optax._passes import known
from ga_optax._passes.ir import variables
from ga_optax._window.schedule import Schedule


def unread(schedule: Schedule, level: int) -> list[core.JaxprEqn]:
    """The equations on the way back of a level whose results nothing reads there."""
    roots = schedule.operands(level, smooth=True)
    found, _ = schedule.needed(roots, level)
    read, without = set(), []
    for e in reversed(found):
        name, smooth = e.primitive.name, _is_smooth(schedule, e)
        runs = not read.isdisjoint(e.outvars)
        if smooth and name not in known.LINEAR | known.OF_TWO:
            runs = True  # Its derivative may need what it returns.
        if not runs:
            without.append(e)
        needs = e.invars if runs else _needed(schedule, e) if smooth else []
        read.update(variables(needs))
    return without


def _needed(schedule: Schedule, equation: core.JaxprEqn) -> list[Any]:
    """The operands that the gradient of a smooth equation needs, but not its result."""
    name = equation.primitive.name
    if name in known.LINEAR:
        return []
    one, two = equation.invars
    of_one, of_two = (schedule.fact(x).smooth for x in (one, two))
    return [one] * of_two + [two] * (of_one or name == "div")


def _is_smooth(schedule: Schedule, equation: core.JaxprEqn) -> bool:
    """Whether it is differentiated, and differs between micro-batches."""
    return any(
        schedule.facts[x].own and schedule.facts[x].smooth for x in equation.outvars
    )
