"""A plan for people: each loop, and what a micro-batch holds of each value in it.

It is read from the schedule by which the window runs. A loss whose rows do not meet has
the schedule of one level. What a micro-batch holds of a value is what the partition
wrote on its equation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._loop.step import Operands, Step
from ga_optax._passes import ir, places
from ga_optax._text import columns
from ga_optax._window import schedule as scheduling
from ga_optax._window.levels import Stored
from ga_optax._window.passes import stages
from ga_optax._window.rules import is_collective
from ga_optax._window.schedule import Fact, Level, Schedule

_MOST = 8  # primitives that are named of one loop or function


class Value(NamedTuple):
    """A value that a loop computes, or takes cotangents back through.

    Attributes:
      holds: what a micro-batch holds of it: "rows 0 of float32[16,3]", "all of ..." or
        "part of ...", of which the sum over micro-batches is the value; "own of ..."
        for a step of the library's, in the shape that it has in a micro-batch.
      name: the primitive, or the loop or function with those in it.
      line: the line of the user's code.
    """

    holds: str
    name: str
    line: str


class Stage(NamedTuple):
    """One loop over the micro-batches, or what is computed once.

    Attributes:
      name: when it runs: "level 1", "the loss", "level 1, back".
      loop: how it runs: once, or in a loop over so many micro-batches.
      computes: the values that it computes.
      goes_back: those that cotangents go back through, in that order.
      fills: what it leaves for later stages.
    """

    name: str
    loop: str
    computes: list[Value]
    goes_back: list[Value]
    fills: list[Stored]

    def __str__(self) -> str:
        pairs = ("computes", self.computes), ("goes back", self.goes_back)
        rows = [
            (f"  {verb}", *x.holds.split(" of ", 1), x.name, places.short(x.line))
            for verb, values in pairs
            for x in dict.fromkeys(values)
        ]
        fills = [
            f"  fills      {x.what}, {x.nbytes:,} bytes, at {places.short(x.line)}"
            for x in self.fills
        ]
        head = f"{self.name}: {self.loop}"
        return "\n".join([head, *columns(rows, range(5)), *fills])


def of_loop(step: Step, operands: Operands) -> Schedule:
    """The schedule of a loss whose rows do not meet."""
    count = len(operands.params)
    params, own = step.jaxpr.invars[:count], step.jaxpr.invars[count:]
    facts = scheduling.facts_of(step.jaxpr, "", [*params, *own[: operands.rows]], own)
    return Schedule(step.jaxpr, "", facts, after=frozenset())


def listed(
    schedule: Schedule, stored: Sequence[Stored], number: int, size: int
) -> list[Stage]:
    """The stages of a schedule, in the order in which they run.

    Args:
      schedule: the schedule.
      stored: what it stores.
      number: how many micro-batches a device has.
      size: how many all devices have.
    """
    devices = f" on each of {size // number} devices" if size > number else ""
    fills = {x.number: x for x in stored}
    found = []
    for x in stages(schedule):
        back = [y for e in x.back for y in _through(e, schedule.facts)][::-1]
        loop = f"a loop over {number} micro-batches{devices}"
        if x.level.once:
            loop = "once, in no loop"
        elif x.level == Level(schedule.end):
            loop += f", forward{' and backward' * bool(back)}"
        of_level = [fills[j] for j in x.fills if j in fills]
        there, back = ([_value(e, schedule) for e in es] for es in (x.forward, back))
        found.append(Stage(x.name, loop, there, back, of_level))
    return found


def _value(e: core.JaxprEqn, schedule: Schedule) -> Value:
    """The value of an equation."""
    inside = [ir.name_of(x) for x in ir.within(e) if not ir.inner_programs(x)]
    inside = list(dict.fromkeys(inside)) if ir.inner_programs(e) else []
    more = ", ..." if len(inside) > _MOST else ""
    name = ir.name_of(e)
    name += f" ({', '.join(inside[:_MOST])}{more})" if inside else ""
    if not (holds := places.label_of(e)):
        facts = [schedule.facts.get(x, Fact()) for x in e.outvars]
        shared = is_collective(e, schedule.axis) or not any(x.own for x in facts)
        types = ", ".join(places.type_of(x.aval) for x in e.outvars)
        holds = f"{'all' if shared else 'own'} of {types}"
    source = places.placed(e, None).source_info
    return Value(holds, name, places.line_of(source))


def _through(e: core.JaxprEqn, facts: dict[Any, Fact]) -> list[core.JaxprEqn]:
    """What cotangents go through: the equation, or some of the function inside it."""
    if not any(facts[x].smooth for x in e.outvars):
        return []
    if not ir.is_inline(e):
        return [e]

    def smooth(names: Sequence[Any], outside: Sequence[Any]) -> list[Any]:
        pairs = zip(names, outside, strict=True)
        return [x for x, v in pairs if ir.is_variable(v) and facts[v].smooth]

    [inner] = ir.inner_programs(e)
    params, loss = smooth(inner.invars, e.invars), smooth(inner.outvars, e.outvars)
    inside = scheduling.facts_of(inner, "", params, (), loss)
    placed = (places.placed(x, e.source_info) for x in inner.eqns)
    return [y for x in placed for y in _through(x, inside)]
