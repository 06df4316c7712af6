"""After the loops: results that need no rows, from buffers, once.

A metric such as the root of a mean, a perplexity or an accuracy is the same in all
micro-batches. The loop of the loss adds up what it is made of.
"""

from typing import Any

import jax

from ga_optax._loop import ways
from ga_optax._window.schedule import Level
from ga_optax._window.values import Arrays, Values


def results(values: Values) -> Arrays:
    """Those results, once the last buffers are filled; what depends on them prints."""
    schedule = values.schedule
    level, outvars = Level(schedule.end, once=True), schedule.jaxpr.outvars
    wanted = [outvars[i] for i in sorted(schedule.after)]
    with jax.named_scope("after"):
        if schedule.needed([], level, acts=True)[0]:
            jax.lax.scan(lambda _, x: _print(values, level, x), None, values.xs)
        found = values.evaluate(wanted, level)
    if values.axes:  # They are alike on all devices.
        found = ways.of_last_device(found, values.axes)
    return found


def _print(values: Values, level: Level, x: Any) -> tuple[None, None]:
    """What prints, does so once for each micro-batch."""
    values.evaluate([], level, x, acts=True)
    return None, None
