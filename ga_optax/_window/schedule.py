"""The schedule of a window: what is computed at which level, and from what."""

import dataclasses
import functools
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._passes import ir, references
from ga_optax._passes.ir import variables
from ga_optax._window import cost
from ga_optax._window.rules import (
    RULES,
    Evaluate,
    collective,
    is_collective,
    own_part,
    whole,
)


class Level(NamedTuple):
    """When something is computed; what came before is known. They compare in order.

    Attributes:
      number: its own.
      once: whether it is what micro-batches share, computed once after their loop.
    """

    number: int
    once: bool = False


class Fact(NamedTuple):
    """What is known of a value; that of a result is the largest of its arguments'.

    Attributes:
      level: how many collectives are on the longest way to it, after those that come
        before all parameters.
      smooth: whether the loss may be differentiated through it, with respect to them.
      own: whether it may differ between micro-batches.
    """

    level: int = 0
    smooth: bool = False
    own: bool = False


class Buffer(NamedTuple):
    """What a window keeps of one value of its micro-batches.

    Attributes:
      operand: the value.
      kind: "sum", "max", "min" or "stack"; "own", a stack of this device's alone; or
        "once", a value that all micro-batches share.
      level: the number of the level at which it is filled; -1 for what is there from
        the start.
      has_cotangent: whether the loss differentiates through it.
      nbytes: what a device stores of it.
      of_cotangent: what its cotangent takes.
    """

    operand: Any
    kind: str
    level: int
    has_cotangent: bool
    nbytes: int = 0
    of_cotangent: int = 0

    @property
    def filled(self) -> Level:
        """When it is filled; what comes later may read it."""
        return Level(self.level, self.kind == "once")


class View(NamedTuple):
    """How a value is read from a buffer: `of(buffer, index of the micro-batch)`."""

    buffer: int
    of: Evaluate


# -- Facts -----------------------------------------------------------------------------


def _facts(jaxpr: core.Jaxpr, axis: str, start: dict[Any, Fact]) -> dict[Any, Fact]:
    """The facts of every variable, from those of the arguments."""
    facts = dict(start)
    for equation in jaxpr.eqns:
        given = [facts[x] if ir.is_variable(x) else Fact() for x in equation.invars]
        fact = Fact(*map(max, zip(Fact(), *given, strict=True)))
        if is_collective(equation, axis):
            fact = fact._replace(level=fact.level + 1, own=False)
        smooth = _differentiable(equation, [x.smooth for x in given])
        for out, its in zip(equation.outvars, smooth, strict=True):
            facts[out] = fact._replace(smooth=its)
    return facts


def _differentiable(equation: core.JaxprEqn, moving: list[bool]) -> list[bool]:
    """Which results may have a derivative, if these of the operands have one.

    It looks inside of loops and checkpoints: what stops a gradient may stand there.
    What is written to a reference comes back from it.
    """
    its = any(moving) and equation.primitive.name != "stop_gradient"
    is_open = ir.kind(equation) in ir.THROUGH and not references.are_inside(equation)
    if not (its and is_open):
        return [its and ir.is_inexact(x) for x in equation.outvars]
    if ir.kind(equation) == "scan":  # Of its carry it is not known.
        consts, carry, slices = ir.scan_of(equation).split(moving)
        moving = [*consts, *map(ir.is_inexact, equation.outvars[: len(carry)]), *slices]
    [program] = ir.inner_programs(equation)
    pairs = zip(program.invars, moving, strict=True)
    smooth = {x for x, moves in pairs if moves}
    for e in program.eqns:
        found = _differentiable(e, [ir.is_among(x, smooth) for x in e.invars])
        smooth.update(x for x, its in zip(e.outvars, found, strict=True) if its)
    return [ir.is_among(x, smooth) for x in program.outvars]


# -- The schedule ----------------------------------------------------------------------


@dataclasses.dataclass
class Schedule:
    """What to compute when.

    A level is evaluated once the buffers below it are filled. The last, `end`, is that
    of the loss, whose loop fills the buffers of that level as well: only results that
    need no rows read those, and are evaluated once, `after` the loop.

    Attributes:
      jaxpr: the flat program; its first result is the loss.
      axis: the name of the axis.
      facts: what is known of its variables.
      after: which results are evaluated once, after the loops, by number.
      times: how many values a device holds in buffers of a kind; of others it is one.
      last: the last level whose buffers the loss reads, or anything else with rows.
      buffers: what the window keeps.
      views: how variables are read from it.
      numbers: which buffers are filled at a level.
      dropped: the buffers that are dropped after a level on the way there.
      again: those that are filled again before a level goes back.
      peak: the bytes of what is kept and of its cotangents, at most at a time.
      full: the same that drops nothing, and keeps all that would run again; None if
        this is that.
    """

    jaxpr: core.Jaxpr
    axis: str
    facts: dict[Any, Fact]
    after: frozenset[int]
    times: dict[str, int] = dataclasses.field(default_factory=dict)
    last: int = 0
    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    views: dict[Any, View] = dataclasses.field(default_factory=dict)
    numbers: dict[Level, list[int]] = dataclasses.field(default_factory=dict)
    dropped: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    again: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    peak: int = 0
    full: "Schedule | None" = None

    @property
    def end(self) -> int:
        """The level of the loop that takes the gradients of the loss."""
        return self.last + 1

    @functools.cached_property
    def given(self) -> set[Any]:
        """What is there from the start."""
        return {*self.jaxpr.constvars, *self.jaxpr.invars}

    def copy(self) -> "Schedule":
        """The same, to which buffers can be added."""
        return dataclasses.replace(
            self,
            buffers=list(self.buffers),
            views=dict(self.views),
            numbers={level: list(its) for level, its in self.numbers.items()},
        )

    def fact(self, atom: Any) -> Fact:
        return Fact() if isinstance(atom, core.Literal) else self.facts[atom]

    def level_of(self, equation: core.JaxprEqn) -> int:
        """How many collectives are on the longest way to what it computes."""
        return self.facts[equation.outvars[0]].level

    def is_own(self, equation: core.JaxprEqn) -> bool:
        """Whether what it computes may differ between micro-batches."""
        return any(self.facts[x].own for x in equation.outvars)

    def is_smooth(self, equation: core.JaxprEqn) -> bool:
        """Whether the loss may be differentiated through it."""
        return any(self.facts[x].smooth for x in equation.outvars)

    def at(self, level: Level) -> list[int]:
        """The buffers that are filled at a level."""
        return self.numbers.get(level, [])

    def operands(self, level: Level, *, smooth: bool = False) -> list[Any]:
        """What fills those buffers; if `smooth`, that which has a cotangent."""
        buffers = [self.buffers[i] for i in self.at(level)]
        return [b.operand for b in buffers if b.has_cotangent or not smooth]

    def needed(
        self,
        wanted: Iterable[Any],
        level: Level,
        acts: bool = False,
        held: Container[int] | None = None,
    ) -> tuple[list[core.JaxprEqn], list[Any]]:
        """The equations that compute `wanted` at a level, and the known that they read.

        If it `acts`, those that print or call back are among them: each at one level.
        Of the buffers below the level those that are `held` are known, or all of them.
        """

        def known(x: Any) -> bool:
            if x in self.given:
                return True
            view = self.views.get(x)
            return (
                view is not None
                and self.buffers[view.buffer].filled < level
                and (held is None or view.buffer in held)
            )

        runs = functools.partial(self.acts_at, level)
        return ir.needed(self.jaxpr, wanted, known, runs if acts else None)

    def acts_at(self, level: Level, equation: core.JaxprEqn) -> bool:
        """True if what prints or calls back does so here: at the end, or after it."""
        if not ir.acts(equation):
            return False
        its = max((self.fact(x).level for x in equation.invars), default=0)
        after = level > Level(self.end)  # what reads what only the loops have filled
        return (its >= self.end) == after

    def roots(self, level: int, *, smooth: bool = False) -> list[Any]:
        """What a level computes: what fills its buffers, and the results of `fun`.

        If `smooth`, what is differentiated of that: of results the loss alone.
        """
        if level < self.end:
            return self.operands(Level(level), smooth=smooth)
        loss = self.jaxpr.outvars[:1]
        return loss if smooth else [*self.results, *self.operands(Level(level))]

    @property
    def results(self) -> list[Any]:
        """The results of `fun` but for those that are evaluated after the loops."""
        every = enumerate(self.jaxpr.outvars)
        return [x for i, x in every if i not in self.after]

    def computed_at(self, variable: Any) -> int:
        """The levels that cannot read it from a buffer, as bits."""
        view = self.views.get(variable)
        if view is None:
            return -1
        return (1 << self.buffers[view.buffer].level + 1) - 1

    def buffer(self, operand: Any, kind: str, level: int) -> int:
        """The buffer of a value, a new one if there is none."""
        smooth, times = self.fact(operand).smooth, self.times.get(kind, 1)
        of_cotangent = smooth and times * cost.nbytes_of_sum(operand)
        nbytes = times * cost.nbytes(operand)
        new = Buffer(operand, kind, level, smooth, nbytes, of_cotangent)
        its = self.numbers.setdefault(new.filled, [])
        for i in its:
            old = self.buffers[i]
            if old.operand is operand and old.kind == kind:
                return i
        its.append(len(self.buffers))
        self.buffers.append(new)
        of = whole if kind == "once" else own_part
        if kind in ("stack", "own", "once") and ir.is_variable(operand):
            self.views.setdefault(operand, View(len(self.buffers) - 1, of))
        return len(self.buffers) - 1


def facts_of(
    jaxpr: core.Jaxpr,
    axis: str,
    params: Sequence[Any],
    own: Sequence[Any],
    loss: Sequence[Any] | None = None,
) -> dict[Any, Fact]:
    """The facts of every variable, of a program with these arguments.

    Args:
      jaxpr: the program.
      axis: the name of the axis.
      params: what is differentiated.
      own: what differs between micro-batches; some of that may be differentiated.
      loss: the results that are differentiated; None for the first.
    """

    def facts_at(level: int) -> dict[Any, Fact]:
        """Those if the parameters come after so many collectives."""
        start = dict.fromkeys([*jaxpr.constvars, *jaxpr.invars], Fact())
        start |= dict.fromkeys(own, Fact(own=True))
        of_params = {x: Fact(level, smooth=True, own=x in own) for x in params}
        return _facts(jaxpr, axis, start | of_params)

    behind = ir.following(jaxpr, params)
    before = [fact.level for x, fact in facts_at(0).items() if x not in behind]
    facts = facts_at(max(before, default=0))
    # What the loss is not differentiated through is not smooth.
    reached = set(variables(jaxpr.outvars[:1] if loss is None else loss))
    for e in reversed(jaxpr.eqns):
        if any(x in reached and facts[x].smooth for x in e.outvars):
            reached.update(variables(e.invars))
    stopped = facts.keys() - reached
    return facts | {x: facts[x]._replace(smooth=False) for x in stopped}


def make(
    jaxpr: core.Jaxpr,
    axis: str,
    facts: dict[Any, Fact],
    whole: Iterable[int],
    times: dict[str, int],
) -> Schedule:
    """The schedule of a flat program, without what is kept beside its collectives.

    Args:
      jaxpr: the program.
      axis: the name of the axis.
      facts: what is known of its variables.
      whole: which results need no loop if all micro-batches share them, by number.
      times: see `Schedule`.
    """
    schedule = Schedule(jaxpr, axis, facts, frozenset(), times)
    shared = (i for i in whole if not schedule.fact(jaxpr.outvars[i]).own)
    schedule.after = frozenset(shared)
    for equation in jaxpr.eqns:
        if is_collective(equation, axis):
            _add_collective(schedule, equation)
        elif name := _state(equation):
            raise NotImplementedError(
                "Where rows meet, micro-batches run more than once, so nothing in fun "
                f"must have a state, but it calls {name} for a result. Call "
                "jax.pure_callback, or call back before value_and_grad."
            )
    read = [*schedule.results, *(b.operand for b in schedule.buffers)]
    schedule.last = max(schedule.fact(x).level for x in read)
    return schedule


def _add_collective(schedule: Schedule, equation: core.JaxprEqn) -> None:
    """Adds the buffers of a collective, and how its results are read from them."""
    name: Any = collective(equation, schedule.axis)
    kind, rule = RULES[name]
    for x, out in zip(equation.invars, equation.outvars, strict=True):
        place = schedule.buffer(x, kind, schedule.facts[out].level)
        schedule.views[out] = View(place, rule(equation.params))


def _state(equation: core.JaxprEqn) -> str | None:
    """The primitive in an equation that may return something else if it runs again."""
    inside = ir.within(equation) if ir.acts(equation) else ()
    acting = (e for e in inside if ir.acts(e) and not ir.inner_programs(e))
    return next((e.primitive.name for e in acting if e.outvars), None)
