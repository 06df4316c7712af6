"""The schedule of a window: the level of each value, and the buffers between levels.

    level of a value  =  1 + the collectives on the longest way to it

Loop n over the micro-batches computes the values of level n from the buffers of
earlier levels, and fills the buffers of its collectives. A value that all micro-batches
share is computed once, before the loop of its level.
"""

import dataclasses
import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from .. import accumulator
from .._passes import jaxprs
from . import meetings


class Level(NamedTuple):
    """A time at which values are computed. Levels compare in order.

    Attributes:
      number: the level of these values.
      in_loop: False for what micro-batches share, which comes before their loop.
    """

    number: int
    in_loop: bool = True


class Traits(NamedTuple):
    """The traits of a value. A result has the largest trait of its arguments.

    Attributes:
      level: the level at which it is computed; parameters come after all collectives
        that do not depend on parameters.
      smooth: True if the loss may be differentiated through the value.
      of_rows: True if the value may differ between micro-batches.
    """

    level: int = 1
    smooth: bool = False
    of_rows: bool = False


class Buffer(NamedTuple):
    """A value of the micro-batches that a window stores.

    Attributes:
      operand: the value.
      kind: "sum", "max", "min" or "stack" of a collective; "residual", a stack of this
        device's micro-batches alone; or "shared", a value that all of them share.
      level: when the buffer is filled. Later levels may read it; 0 is before all.
      has_cotangent: True if the loss differentiates through the buffer.
      nbytes: the bytes that a device stores.
      of_cotangent: the bytes of the cotangent.
    """

    operand: Any
    kind: str
    level: Level
    has_cotangent: bool
    nbytes: int = 0
    of_cotangent: int = 0

    @property
    def is_folded(self) -> bool:
        """True if one value is stored for all micro-batches that the loop folds."""
        return self.kind in ("sum", "max", "min")


class View(NamedTuple):
    """A value is `of(buffer, index of the micro-batch)`."""

    buffer: int
    of: meetings.Evaluate


# -- Traits ----------------------------------------------------------------------------


def traits_of(
    jaxpr: core.Jaxpr, axis: str, params: Sequence[Any], rows: Sequence[Any]
) -> dict[Any, Traits]:
    """The traits of every variable of a program.

    Args:
      jaxpr: the program.
      axis: the name of the axis of the window.
      params: the arguments that are differentiated.
      rows: the arguments that differ between micro-batches; some may be differentiated.
    """

    def traits_if(level: int) -> dict[Any, Traits]:
        """The traits if parameters are of a level."""
        start = dict.fromkeys([*jaxpr.constvars, *jaxpr.invars], Traits())
        start |= dict.fromkeys(rows, Traits(of_rows=True))
        smooth = {x: Traits(level, smooth=True, of_rows=x in rows) for x in params}
        return _propagated(jaxpr, axis, start | smooth)

    behind = jaxprs.following(jaxpr, params)
    before = [x.level for v, x in traits_if(1).items() if v not in behind]
    traits = traits_if(max(before, default=1))
    # Values through which the loss is not differentiated are not smooth.
    reached = set(jaxprs.variables(jaxpr.outvars[:1]))
    for e in reversed(jaxpr.eqns):
        if any(x in reached and traits[x].smooth for x in e.outvars):
            reached.update(jaxprs.variables(e.invars))
    stopped = traits.keys() - reached
    return traits | {x: traits[x]._replace(smooth=False) for x in stopped}


def _propagated(
    jaxpr: core.Jaxpr, axis: str, start: dict[Any, Traits]
) -> dict[Any, Traits]:
    """The traits of every variable, from the traits of the arguments."""
    traits = dict(start)
    for e in jaxpr.eqns:
        given = [traits[x] if jaxprs.is_variable(x) else Traits() for x in e.invars]
        largest = Traits(*map(max, zip(Traits(), *given, strict=True)))
        if meetings.is_collective(e, axis):
            largest = largest._replace(level=largest.level + 1, of_rows=False)
        smooth = _differentiable(e, [x.smooth for x in given])
        pairs = zip(e.outvars, smooth, strict=True)
        traits |= {out: largest._replace(smooth=x) for out, x in pairs}
    return traits


def _differentiable(equation: core.JaxprEqn, smooth: list[bool]) -> list[bool]:
    """For each result, True if it may have a derivative; `smooth` operands have one.

    A gradient may be stopped inside of loops and checkpoints.
    """
    moves = any(smooth) and equation.primitive.name != "stop_gradient"
    if not moves or jaxprs.kind(equation) not in jaxprs.THROUGH:
        return [moves and jaxprs.is_inexact(x) for x in equation.outvars]
    if jaxprs.kind(equation) == "scan":  # any carry may have one
        consts, carry, slices = jaxprs.scan_of(equation).split(smooth)
        smooth = [
            *consts,
            *map(jaxprs.is_inexact, equation.outvars[: len(carry)]),
            *slices,
        ]
    [program] = jaxprs.inner_programs(equation)
    inside = {x for x, moves in zip(program.invars, smooth, strict=True) if moves}
    for e in program.eqns:
        results = _differentiable(e, [jaxprs.is_among(x, inside) for x in e.invars])
        inside.update(x for x, moves in zip(e.outvars, results, strict=True) if moves)
    return [jaxprs.is_among(x, inside) for x in program.outvars]


# -- The schedule ----------------------------------------------------------------------


@dataclasses.dataclass
class Schedule:
    """The order in which a window computes the values of a program.

    Attributes:
      jaxpr: the flat program; its first result is the loss.
      axis: the name of the axis of the window.
      traits: the traits of its variables.
      shared_results: the results, by number, that need no rows. They are computed once,
        in the `epilogue`, and may read buffers that the loop of the loss fills.
      num_values: how many values a device stores in a "residual" and in a "stack".
      end: the level of the loss: its loop takes the gradients.
      buffers: what the window stores.
      views: how variables are read from buffers.
      by_level: the buffers that are filled at each level, by number.
      drops: the buffers that the way there drops after each level.
      refills: the buffers that the way back fills again before it reaches a level.
      kept: the residuals that each level can read, by number; None for all that are
        filled at earlier levels.
      peak: the bytes of residuals and of their cotangents, at most at a time.
      unlimited: the schedule that drops and computes nothing again; None if this is it.
    """

    jaxpr: core.Jaxpr
    axis: str
    traits: dict[Any, Traits]
    shared_results: frozenset[int] = frozenset()
    num_values: dict[str, int] = dataclasses.field(default_factory=dict)
    end: int = 1
    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    views: dict[Any, View] = dataclasses.field(default_factory=dict)
    by_level: dict[Level, list[int]] = dataclasses.field(default_factory=dict)
    drops: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    refills: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    kept: "list[frozenset[int]] | None" = None
    peak: int = 0
    unlimited: "Schedule | None" = None

    @property
    def epilogue(self) -> Level:
        """The level at which shared results are computed, after all loops."""
        return Level(self.end + 1, in_loop=False)

    @functools.cached_property
    def arguments(self) -> set[Any]:
        """The variables that are known from the start."""
        return {*self.jaxpr.constvars, *self.jaxpr.invars}

    def copy(self) -> "Schedule":
        """A copy, to which buffers can be added."""
        return dataclasses.replace(
            self,
            buffers=list(self.buffers),
            views=dict(self.views),
            by_level={level: list(some) for level, some in self.by_level.items()},
            drops=dict(self.drops),
        )

    def trait(self, atom: Any) -> Traits:
        return Traits() if isinstance(atom, core.Literal) else self.traits[atom]

    def level_of(self, equation: core.JaxprEqn) -> int:
        """The level of the results of an equation."""
        return self.traits[equation.outvars[0]].level

    def is_of_rows(self, equation: core.JaxprEqn) -> bool:
        """True if the results may differ between micro-batches."""
        return any(self.traits[x].of_rows for x in equation.outvars)

    def is_smooth(self, equation: core.JaxprEqn) -> bool:
        """True if the loss may be differentiated through the equation."""
        return any(self.traits[x].smooth for x in equation.outvars)

    def filled_at(self, level: Level) -> list[int]:
        """The buffers that are filled at a level."""
        return self.by_level.get(level, [])

    def operands(self, level: Level, *, smooth: bool = False) -> list[Any]:
        """The operands of these buffers; if `smooth`, of those with a cotangent."""
        buffers = [self.buffers[i] for i in self.filled_at(level)]
        return [b.operand for b in buffers if b.has_cotangent or not smooth]

    def needed(
        self,
        wanted: Iterable[Any],
        level: Level,
        acts: bool = False,
        known: Container[int] | None = None,
    ) -> tuple[list[core.JaxprEqn], list[Any]]:
        """The equations that compute `wanted` at a level, and the values they read.

        If `acts`, equations that print or call back are included, each at one level.
        Of the buffers of earlier levels all can be read, or the `known` ones.
        """

        def is_known(x: Any) -> bool:
            if x in self.arguments:
                return True
            view = self.views.get(x)
            return (
                view is not None
                and self.can_read(view.buffer, level)
                and (known is None or view.buffer in known)
            )

        runs = functools.partial(self.acts_at, level)
        return jaxprs.needed_for(self.jaxpr, wanted, is_known, runs if acts else None)

    def can_read(self, number: int, level: Level) -> bool:
        """True if a level can read a buffer."""
        buffer = self.buffers[number]
        if self.kept is None or buffer.kind != "residual" or not buffer.level.number:
            return buffer.level < level
        return level.number < len(self.kept) and number in self.kept[level.number]

    def acts_at(self, level: Level, equation: core.JaxprEqn) -> bool:
        """True if an equation prints or calls back at this level.

        An equation does so in the loop of the loss; or, if it reads a result of that
        loop, in the epilogue.
        """
        if not jaxprs.acts(equation):
            return False
        reads = max((self.trait(x).level for x in equation.invars), default=0)
        return (reads > self.end) == (level == self.epilogue)

    def roots(self, level: int, *, smooth: bool = False) -> list[Any]:
        """The values that a loop computes: operands of its buffers, results of `fun`.

        If `smooth`, only differentiated values: of the results the loss alone.
        """
        if level < self.end:
            return self.operands(Level(level), smooth=smooth)
        loss = self.jaxpr.outvars[:1]
        return loss if smooth else [*self.results, *self.operands(Level(level))]

    @property
    def results(self) -> list[Any]:
        """The results of `fun` that the loop of the loss computes."""
        every = enumerate(self.jaxpr.outvars)
        return [x for i, x in every if i not in self.shared_results]

    @property
    def epilogue_results(self) -> list[Any]:
        """The results of `fun` that the epilogue computes."""
        return [self.jaxpr.outvars[i] for i in sorted(self.shared_results)]

    def computed_at(self, variable: Any) -> int:
        """The loops that cannot read the variable from a buffer: bit i for loop i."""
        view = self.views.get(variable)
        if view is None:
            return -1
        loops = range(1, self.end + 1)
        return sum(1 << n for n in loops if not self.can_read(view.buffer, Level(n)))

    def buffer(self, operand: Any, kind: str, level: int) -> int:
        """The number of the buffer of a value, which is added if there is none."""
        smooth, number = self.trait(operand).smooth, self.num_values.get(kind, 1)
        when = Level(level, in_loop=kind != "shared")
        nbytes, of_cotangent = number * jaxprs.nbytes(operand), 0
        if smooth:
            itemsize = accumulator.sum_dtype(operand.aval.dtype).itemsize
            of_cotangent = number * jaxprs.numbers(operand.aval.shape) * itemsize
        members = self.by_level.setdefault(when, [])
        for i in members:
            old = self.buffers[i]
            if old.operand is operand and old.kind == kind:
                return i
        i = len(self.buffers)
        members.append(i)
        self.buffers.append(Buffer(operand, kind, when, smooth, nbytes, of_cotangent))
        if kind in ("stack", "residual", "shared") and jaxprs.is_variable(operand):
            view = View(i, meetings.whole if kind == "shared" else meetings.part_of)
            self.views.setdefault(operand, view)
        return i

    def given(self, operand: Any, kind: str) -> None:
        """Adds the buffer of an argument, which is filled from the start."""
        smooth = kind == "shared" or self.traits[operand].smooth
        of = meetings.part_of if kind == "residual" else meetings.whole
        self.views[operand] = View(len(self.buffers), of)
        self.buffers.append(Buffer(operand, kind, Level(0), smooth))


def schedule_of(
    jaxpr: core.Jaxpr,
    axis: str,
    traits: dict[Any, Traits],
    last_results: Iterable[int],
    num_values: dict[str, int],
) -> Schedule:
    """The schedule of a flat program, with buffers for collectives alone.

    Args:
      jaxpr: the program.
      axis: the name of the axis.
      traits: the traits of its variables.
      last_results: the results, by number, that any micro-batch may compute.
      num_values: see `Schedule`.
    """
    schedule = Schedule(jaxpr, axis, traits, num_values=num_values)
    outvars = jaxpr.outvars
    shared = (i for i in last_results if not schedule.trait(outvars[i]).of_rows)
    schedule.shared_results = frozenset(shared)
    for equation in jaxpr.eqns:
        if meetings.is_collective(equation, axis):
            _add_collective(schedule, equation)
        elif name := _stateful(equation):
            raise NotImplementedError(
                "Where rows meet, micro-batches run more than once, so nothing in fun "
                f"must have a state, but it calls {name} for a result. Call "
                "jax.pure_callback, or call back before value_and_grad."
            )
    reads = [*schedule.results, *(b.operand for b in schedule.buffers)]
    schedule.end = max(schedule.trait(x).level for x in reads)
    return schedule


def _add_collective(schedule: Schedule, equation: core.JaxprEqn) -> None:
    """Adds the buffers of a collective, and views of its results."""
    name: Any = meetings.collective(equation, schedule.axis)
    kind, rule = meetings.MEETINGS[name]
    for x, out in zip(equation.invars, equation.outvars, strict=True):
        number = schedule.buffer(x, kind, schedule.traits[out].level - 1)
        schedule.views[out] = View(number, rule(equation.params))


def _stateful(equation: core.JaxprEqn) -> str | None:
    """The primitive in an equation that may return another result if it runs again."""
    inside = jaxprs.within(equation) if jaxprs.acts(equation) else ()
    acting = (e for e in inside if jaxprs.acts(e) and not jaxprs.inner_programs(e))
    return next((e.primitive.name for e in acting if e.outvars), None)
