"""A schedule in words: each stage, and the part of each value in a micro-batch.

The window runs by the same schedule. A loss whose rows do not meet has the schedule of
one level. The partition wrote on each equation which part of the value a micro-batch
holds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._loop.loss import LossProgram, Operands
from ga_optax._passes import places, read
from ga_optax._text import columns
from ga_optax._window.meetings import is_collective
from ga_optax._window.report import Stored
from ga_optax._window.runs import stages
from ga_optax._window.schedule import Level, Schedule, Traits, traits_of

_MOST = 8  # primitives that are named of one loop or function


class DescribedValue(NamedTuple):
    """A value that a loop computes, or takes cotangents back through.

    Attributes:
      holds: the part that a micro-batch holds: "rows 0 of float32[16,3]", "all of ...",
        or "part of ...": the sum of the parts is the value. "own of ..." for a step of
        the library, in the shape of a micro-batch.
      name: the primitive, or the loop or function with the primitives inside.
      line: the line of the user's code.
    """

    holds: str
    name: str
    line: str


class DescribedLoop(NamedTuple):
    """A loop over the micro-batches, or a computation of what they share, in words.

    Attributes:
      name: the name: "level 1", "the loss", "level 1, back".
      loop: "once", or a loop over so many micro-batches.
      computes: the values that the stage computes.
      goes_back: the values through which cotangents go back, in order.
      fills: the values that the stage stores for later stages.
    """

    name: str
    loop: str
    computes: list[DescribedValue]
    goes_back: list[DescribedValue]
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


def of_loop(program: LossProgram, operands: Operands) -> Schedule:
    """The schedule of a loss whose rows do not meet."""
    jaxpr, count = program.jaxpr, len(operands.params)
    params, rows = jaxpr.invars[:count], jaxpr.invars[count:]
    smooth = [*params, *rows[: operands.rows]]
    return Schedule(jaxpr, "", traits_of(jaxpr, "", smooth, rows))


def of_all_rows(jaxpr: core.Jaxpr, number: int) -> Schedule:
    """The schedule of a program of all rows, of which the first are parameters."""
    return Schedule(jaxpr, "", traits_of(jaxpr, "", jaxpr.invars[:number], ()))


def listed(
    schedule: Schedule, stored: Sequence[Stored], number: int, size: int
) -> list[DescribedLoop]:
    """The stages of a schedule, in the order in which they run.

    Args:
      schedule: the schedule.
      stored: the values that it stores.
      number: how many micro-batches a device has; 0 if all rows run at once.
      size: how many all devices have.
    """
    devices = f" on each of {size // number} devices" if size > number > 0 else ""
    fills = {x.number: x for x in stored}
    in_words = []
    for x in stages(schedule):
        back = [y for e in x.back for y in _smooth_inside(e, schedule.traits)][::-1]
        loop = f"a loop over {number} micro-batches{devices}"
        if not number:
            loop = "once, all rows"
        if not x.level.in_loop:
            loop = "once, in no loop"
        elif x.level == Level(schedule.end):
            loop += f", forward{' and backward' * bool(back)}"
        of_level = [fills[j] for j in x.fills if j in fills]
        computes, goes_back = (
            [_described(e, schedule) for e in equations]
            for equations in (x.forward, back)
        )
        in_words.append(DescribedLoop(x.name, loop, computes, goes_back, of_level))
    return in_words


def _described(e: core.JaxprEqn, schedule: Schedule) -> DescribedValue:
    """The value of an equation."""
    inside = [read.name_of(x) for x in read.within(e) if not read.inner_programs(x)]
    inside = list(dict.fromkeys(inside)) if read.inner_programs(e) else []
    more = ", ..." if len(inside) > _MOST else ""
    name = read.name_of(e)
    name += f" ({', '.join(inside[:_MOST])}{more})" if inside else ""
    if not (holds := places.label_of(e)):
        traits = [schedule.traits.get(x, Traits()) for x in e.outvars]
        shared = is_collective(e, schedule.axis) or not any(x.of_rows for x in traits)
        types = ", ".join(places.type_of(x.aval) for x in e.outvars)
        holds = f"{'all' if shared else 'own'} of {types}"
    source = places.placed(e, None).source_info
    return DescribedValue(holds, name, places.line_of(source))


def _smooth_inside(e: core.JaxprEqn, traits: dict[Any, Traits]) -> list[core.JaxprEqn]:
    """The equations of a call through which cotangents go; others by themselves."""
    if not any(traits[x].smooth for x in e.outvars):
        return []
    if not read.is_inline(e):
        return [e]

    def smooth(names: Sequence[Any], outside: Sequence[Any]) -> list[Any]:
        pairs = zip(names, outside, strict=True)
        return [x for x, v in pairs if read.is_variable(v) and traits[v].smooth]

    [inner] = read.inner_programs(e)
    params, loss = smooth(inner.invars, e.invars), smooth(inner.outvars, e.outvars)
    inside = traits_of(inner, "", params, (), loss)
    equations = (places.placed(x, e.source_info) for x in inner.eqns)
    return [y for x in equations for y in _smooth_inside(x, inside)]
