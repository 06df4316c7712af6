"""The schedule of a window: the level of each value, and the buffers between levels.

    level of a value  =  1 + the collectives on the longest way to it

First the collectives by which rows meet; then levels and buffers, what equations cost,
and the smallest values between two parts of a program.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .. import accumulator
from .._partition.held import meeting_of
from .._passes import about, jaxprs, primitives
from .._passes.jaxprs import is_cheap, variables

# == Meetings ==========================================================================

# The result of a collective, from its buffer and the index of the micro-batch.
Evaluate = Callable[[jax.Array, jax.Array], jax.Array]


def collective(equation: core.JaxprEqn, axis: str) -> str | None:
    """The name of a collective over the axis in `MEETINGS`; None for others."""
    name = equation.primitive.name
    if name in MEETINGS and axis in jaxprs.axes_of(equation):
        return name
    return meeting_of(equation)


def is_collective(equation: core.JaxprEqn, axis: str) -> bool:
    """True if `MEETINGS` has a collective over the axis for the equation."""
    return collective(equation, axis) is not None


def whole(buffer: jax.Array, index: jax.Array) -> jax.Array:
    """The whole buffer."""
    return buffer


def part_of(buffer: jax.Array, index: jax.Array) -> jax.Array:
    """The part of one micro-batch in a stack, of this device or of all."""
    return jax.lax.dynamic_index_in_dim(buffer, index % len(buffer), keepdims=False)


def _gathered(params: dict[str, Any]) -> Evaluate:
    dim, tiled = params["all_gather_dimension"], params["tiled"]

    def of(stack: jax.Array, index: jax.Array) -> jax.Array:
        out = jnp.moveaxis(stack, 0, dim)
        shape = out.shape
        return out.reshape(*shape[:dim], -1, *shape[dim + 2 :]) if tiled else out

    return of


# The kind of the buffer of each collective, and the view of its result.
MEETINGS: dict[str, tuple[str, Callable[[dict[str, Any]], Evaluate]]] = {
    "psum": ("sum", lambda params: whole),
    "pmax": ("max", lambda params: whole),
    "pmin": ("min", lambda params: whole),
    "all_gather": ("stack", _gathered),
}


# == Levels, buffers and traits ========================================================
# The schedule of a window: the level at which each value is computed, and from what.
#
# A value of level n has n - 1 collectives on the longest way to it. Loop n over the
# micro-batches computes the values of level n from the buffers of earlier levels, and
# fills the buffers of its collectives. A value that all micro-batches share is computed
# once, before the loop of its level.


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
    of: Evaluate


# -- Traits ----------------------------------------------------------------------------


def traits_of(
    jaxpr: core.Jaxpr,
    axis: str,
    params: Sequence[Any],
    rows: Sequence[Any],
    loss: Sequence[Any] | None = None,
) -> dict[Any, Traits]:
    """The traits of every variable of a program.

    Args:
      jaxpr: the program.
      axis: the name of the axis of the window.
      params: the arguments that are differentiated.
      rows: the arguments that differ between micro-batches; some may be differentiated.
      loss: the results that are differentiated; None for the first.
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
    reached = set(variables(jaxpr.outvars[:1] if loss is None else loss))
    for e in reversed(jaxpr.eqns):
        if any(x in reached and traits[x].smooth for x in e.outvars):
            reached.update(variables(e.invars))
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
        if is_collective(e, axis):
            largest = largest._replace(level=largest.level + 1, of_rows=False)
        smooth = _differentiable(e, [x.smooth for x in given])
        pairs = zip(e.outvars, smooth, strict=True)
        traits |= {out: largest._replace(smooth=x) for out, x in pairs}
    return traits


def _differentiable(equation: core.JaxprEqn, smooth: list[bool]) -> list[bool]:
    """For each result, True if it may have a derivative; `smooth` operands have one.

    A gradient may be stopped inside of loops and checkpoints. A value that is written
    to a reference comes back from the reference.
    """
    moves = any(smooth) and equation.primitive.name != "stop_gradient"
    is_open = jaxprs.kind(equation) in jaxprs.THROUGH and not about.references_inside(
        equation
    )
    if not (moves and is_open):
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
                and self.buffers[view.buffer].level < level
                and (known is None or view.buffer in known)
            )

        runs = functools.partial(self.acts_at, level)
        return jaxprs.needed_for(self.jaxpr, wanted, is_known, runs if acts else None)

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
        number, in_loop = self.buffers[view.buffer].level
        return (1 << number + in_loop) - 1

    def buffer(self, operand: Any, kind: str, level: int) -> int:
        """The number of the buffer of a value, which is added if there is none."""
        smooth, number = self.trait(operand).smooth, self.num_values.get(kind, 1)
        when = Level(level, in_loop=kind != "shared")
        of_cotangent = smooth and number * nbytes_of_sum(operand)
        nbytes = number * bytes_of(operand)
        members = self.by_level.setdefault(when, [])
        for i in members:
            old = self.buffers[i]
            if old.operand is operand and old.kind == kind:
                return i
        i = len(self.buffers)
        members.append(i)
        self.buffers.append(Buffer(operand, kind, when, smooth, nbytes, of_cotangent))
        if kind in ("stack", "residual", "shared") and jaxprs.is_variable(operand):
            view = View(i, whole if kind == "shared" else part_of)
            self.views.setdefault(operand, view)
        return i

    def given(self, operand: Any, kind: str) -> None:
        """Adds the buffer of an argument, which is filled from the start."""
        smooth = kind == "shared" or self.traits[operand].smooth
        of = part_of if kind == "residual" else whole
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
        if is_collective(equation, axis):
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
    name: Any = collective(equation, schedule.axis)
    kind, rule = MEETINGS[name]
    for x, out in zip(equation.invars, equation.outvars, strict=True):
        number = schedule.buffer(x, kind, schedule.traits[out].level - 1)
        schedule.views[out] = View(number, rule(equation.params))


def _stateful(equation: core.JaxprEqn) -> str | None:
    """The primitive in an equation that may return another result if it runs again."""
    inside = jaxprs.within(equation) if jaxprs.acts(equation) else ()
    acting = (e for e in inside if jaxprs.acts(e) and not jaxprs.inner_programs(e))
    return next((e.primitive.name for e in acting if e.outvars), None)


# == The cost of equations =============================================================


def bytes_of(x: Any) -> int:
    """The bytes of a value."""
    return jaxprs.numbers(x.aval.shape) * x.aval.dtype.itemsize


def nbytes_of_sum(x: Any) -> int:
    """The bytes of a sum of such values, in the dtype of sums."""
    if not jaxprs.is_inexact(x):
        return 0
    return jaxprs.numbers(x.aval.shape) * dtype_of_sum(x.aval.dtype).itemsize


def dtype_of_sum(dtype: np.dtype) -> np.dtype:
    """The dtype of sums of numbers of a dtype."""
    one = jax.ShapeDtypeStruct((), dtype)
    return accumulator.accumulator_dtype(one, np.dtype(np.float32))


def bytes_of_step(jaxpr: core.Jaxpr, params: Sequence[Any]) -> int:
    """About the bytes of a micro-batch's step: residuals and gradients.

    Args:
      jaxpr: the program of a micro-batch.
      params: the arguments with respect to which it is differentiated.
    """
    arguments = [*jaxpr.constvars, *jaxpr.invars]
    residuals = bytes_of_residuals(jaxpr.eqns, params, arguments)
    return residuals + sum(map(bytes_of, params))


def bytes_of_residuals(
    equations: Sequence[core.JaxprEqn], smooth: Iterable[Any], given: Iterable[Any]
) -> int:
    """About the bytes of the residuals that `jax.vjp` keeps, and fills again at a time.

    The residuals of a product are its operands; of any other nonlinear function, one
    coefficient for each number of the result. Those inside of a `jax.checkpoint` are
    filled again, one checkpoint after the other.

    Args:
      equations: the program.
      smooth: the arguments that are differentiated.
      given: the values that are stored in any case, and take no more bytes.
    """
    return sum(_residuals(equations, smooth, given))


def _residuals(
    equations: Sequence[core.JaxprEqn], smooth: Iterable[Any], given: Iterable[Any]
) -> tuple[int, int]:
    """About the bytes of the residuals, and of those of the largest checkpoint."""
    smooth, given = set(smooth), set(given)
    reads: dict[Any, int] = {}
    inside = again = 0
    for e in equations:
        places = [i for i, x in enumerate(e.invars) if jaxprs.is_among(x, smooth)]
        if not places:
            continue
        outs = [x for x in e.outvars if jaxprs.is_inexact(x.aval)]
        smooth.update(outs)
        name, kind = e.primitive.name, jaxprs.kind(e)
        if programs := jaxprs.inner_programs(e):
            some = [_inside(e, p, smooth) for p in programs]
            kept, filled = map(max, zip(*some, strict=True))
            if kind == "checkpoint":
                reads |= {x: bytes_of(x) for x in variables(e.invars)}
                kept, filled = 0, kept + filled
            inside, again = inside + jaxprs.times(e) * kept, max(again, filled)
        elif primitives.needs_other(e):
            pair = e.invars
            others = [pair[1 - i] for i in places] + [pair[1]] * (name == "div")
            reads |= {x: bytes_of(x) for x in variables(others)}
        elif name == "exp":  # its result, which other gradients may need as well
            reads |= {x: bytes_of(x) for x in outs}
        elif linear := primitives.entry_of(e).linear_in(len(e.invars)):
            # Such as the condition of a select.
            others = [x for i, x in enumerate(e.invars) if i not in linear]
            reads |= {x: bytes_of(x) for x in variables(others)}
        elif not _communicates(e):
            inside += sum(map(bytes_of, outs))
    return inside + sum(n for x, n in reads.items() if x not in given), again


def _inside(
    e: core.JaxprEqn, program: core.Jaxpr, outside: set[Any]
) -> tuple[int, int]:
    """About the bytes of the residuals of a program inside an equation."""
    pairs = zip(program.invars, jaxprs.operands(e, program), strict=False)
    smooth = [x for x, operand in pairs if jaxprs.is_among(operand, outside)]
    given = [*program.constvars, *program.invars]
    if jaxprs.kind(e) == "scan":  # each iteration has another carry
        consts, _, slices = jaxprs.scan_of(e).split(program.invars)
        given = [*program.constvars, *consts, *slices]
    return _residuals(program.eqns, smooth, given)


def _communicates(equation: core.JaxprEqn) -> bool:
    return any(isinstance(name, str) for name in jaxprs.axes_of(equation))


# == The minimum cut ===================================================================
# A minimum cut: the smallest values that every way through a program goes through.
#
# Each value is an edge as wide as its bytes (Ford and Fulkerson, 1956; shortest paths
# first, as in Edmonds and Karp). Paths are searched from the sinks: of two cuts of one
# size, the nearer to the sinks is found.

_Node = tuple[Any, str]  # a value where it comes in, or where it goes out
_SOURCE, _SINK = (None, "source"), (None, "sink")


def smallest_cut(
    equations: Iterable[core.JaxprEqn],
    sources: Iterable[Any],
    sinks: Container[Any],
    size: Callable[[Any], float],
) -> list[Any]:
    """The values of a minimum cut between `sources` and `sinks`, nearest to the sinks.

    Args:
      equations: the equations of the program, in order.
      sources: the values that must not be computed again.
      sinks: the values that must be known, if they are computed of `sources`.
      size: the price of keeping a value; infinite if it cannot be kept. A value on each
        path has a finite price.
    """
    inf, readers = float("inf"), _readers(equations, sources)
    capacity: dict[_Node, dict[_Node, float]] = collections.defaultdict(dict)
    edges = [((x, "out"), (x, "in"), size(x)) for x in readers]
    edges += [((y, "in"), (x, "out"), inf) for x, ys in readers.items() for y in ys]
    edges += [((x, "in"), _SOURCE, inf) for x in sources]
    edges += [(_SINK, (x, "out"), inf) for x in readers if x in sinks]
    for start, end, width in edges:
        capacity[start][end] = capacity[start].get(end, 0.0) + width
        capacity[end].setdefault(start, 0.0)
    while _SOURCE in (previous := _reached(capacity)):
        path, node = [], _SOURCE
        while node != _SINK:
            path.append((previous[node], node))
            node = previous[node]
        width = min(capacity[a][b] for a, b in path)
        for a, b in path:
            capacity[a][b] -= width
            capacity[b][a] += width
    return [x for x in readers if (x, "out") in previous and (x, "in") not in previous]


def _readers(
    equations: Iterable[core.JaxprEqn], sources: Iterable[Any]
) -> dict[Any, list[Any]]:
    """The values computed of each source, and of each value that is computed of one."""
    readers: dict[Any, list[Any]] = {x: [] for x in sources}
    for e in equations:
        inputs = [x for x in variables(e.invars) if x in readers]
        for x in inputs:
            readers[x] += e.outvars
        if inputs:
            readers |= {x: [] for x in e.outvars if x not in readers}
    return readers


def _reached(capacity: Mapping[_Node, Mapping[_Node, float]]) -> dict[_Node, _Node]:
    """For each node with capacity left to the sink, the previous node on a path."""
    previous: dict[_Node, _Node] = {_SINK: _SINK}
    queue = collections.deque(previous)
    while queue:
        node = queue.popleft()
        for other in capacity[node]:
            if capacity[node][other] > 0 and other not in previous:
                previous[other] = node
                queue.append(other)
    return previous


# == Stages, and how often equations run ===============================================
# The stages of a window, and how often each equation runs.
#
# A stage is a loop over the micro-batches, or a computation of what they share. A stage
# on the way back knows which equations need not run forward, since no gradient reads
# their results, and which buffers it fills again. `run` runs this list; reports show
# it.


class Stage(NamedTuple):
    """A loop over the micro-batches, or a computation of what they share.

    Attributes:
      name: the name, in words.
      kind: what it does: "fill" or "fill again" buffers, take cotangents "back", or
        compute "the loss", or what comes "after" it.
      level: the time: buffers of earlier levels are known.
      forward: the equations that run forward.
      back: the equations through which cotangents go back, if they have some.
      fills: the buffers that it fills, by number.
    """

    name: str
    kind: str
    level: Level
    forward: Sequence[core.JaxprEqn]
    back: Sequence[core.JaxprEqn] = ()
    fills: Sequence[int] = ()


def stages(schedule: Schedule) -> Iterator[Stage]:
    """The stages of a window, in the order in which they run."""
    numbers, last = range(schedule.end), Level(schedule.end)
    for n in numbers:
        for level in (Level(n), Level(n + 1, in_loop=False)):
            if members := schedule.filled_at(level):
                runs = schedule.needed(schedule.operands(level), level)[0]
                yield Stage(_name(level), "fill", level, runs, fills=members)
    runs, back = (
        schedule.needed(schedule.roots(schedule.end, smooth=smooth), last)[0]
        for smooth in (False, True)
    )
    yield Stage("the loss", "the loss", last, runs, back, schedule.filled_at(last))
    for n in reversed(numbers):
        if members := schedule.refills.get(n):
            others = set(range(len(schedule.buffers))) - set(members)
            operands = [schedule.buffers[j].operand for j in members]
            level, name = Level(n + 1), f"level {n}, filled again"
            runs = schedule.needed(operands, level, known=others)[0]
            yield Stage(name, "fill again", level, runs, fills=members)
        for level in (Level(n + 1, in_loop=False), Level(n)):
            if roots := schedule.operands(level, smooth=True):
                back = schedule.needed(roots, level)[0]
                runs = _read_back(schedule, back) if level.in_loop else back
                yield Stage(f"{_name(level)}, back", "back", level, runs, back)
    if runs := schedule.needed(schedule.epilogue_results, schedule.epilogue)[0]:
        yield Stage("after the loops", "after", schedule.epilogue, runs)


def _name(level: Level) -> str:
    return f"level {level.number}{', shared' * (not level.in_loop)}"


class Runs(NamedTuple):
    """The runs of an equation over the rows; `costs` is True if it is not cheap."""

    costs: bool = False
    forward: int = 0
    backward: int = 0


def runs_of_equations(schedule: Schedule) -> dict[int, Runs]:
    """The runs of every equation of rows, by its id."""
    forward, backward = collections.Counter(), collections.Counter()
    for stage in stages(schedule):
        forward.update(map(id, stage.forward))
        backward.update(id(e) for e in stage.back if schedule.is_smooth(e))
    return {
        id(e): Runs(not is_cheap(e), forward[id(e)], backward[id(e)])
        for e in schedule.jaxpr.eqns
        if schedule.is_of_rows(e) and forward[id(e)]
    }


def most_runs(runs: Iterable[Runs]) -> Runs:
    """The most runs of costly equations; if there are none, of all.

    The gradient of a costly equation may be in the rule of a cheap one.
    """
    runs = list(runs)
    costly = [x for x in runs if x.costs] or runs
    costs, forward, backward = map(max, zip(Runs(), *costly, strict=True))
    return Runs(costs, forward, backward or int(any(x.backward for x in runs)))


def _read_back(
    schedule: Schedule, equations: Sequence[core.JaxprEqn]
) -> list[core.JaxprEqn]:
    """The equations that run forward again before cotangents go back through all.

    The gradient of a product needs the operands, and not the result. So a product whose
    result is added up or stored does not run again.
    """
    again: list[core.JaxprEqn] = []
    read: set[Any] = set()
    for e in reversed(equations):
        needs = _needed_back(schedule, e)
        if needs is None or not read.isdisjoint(e.outvars):
            again.append(e)
            needs = e.invars
        read.update(variables(needs))
    return again[::-1]


def _needed_back(schedule: Schedule, equation: core.JaxprEqn) -> list[Any] | None:
    """The operands that the gradient needs; None if it may need the results, too."""
    differs = schedule.is_of_rows(equation) and schedule.is_smooth(equation)
    if primitives.is_linear(equation) or not differs:
        return []
    if not primitives.needs_other(equation):
        return None
    one, two = equation.invars
    of_one, of_two = (schedule.trait(x).smooth for x in (one, two))
    return [one] * of_two + [two] * (of_one or equation.primitive.name == "div")
