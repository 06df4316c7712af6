"""The program of `fun` as one flat list of equations, which shows every collective."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ga_optax._devices import collectives
from ga_optax._passes import feedback, interpret, places, read, references
from ga_optax._passes.interpret import bind
from ga_optax._passes.read import is_mark
from ga_optax._window import split_scans
from ga_optax._window.meetings import is_collective

# A scan of more iterations than this is an error if a collective in it depends on its
# own results: each would be a level of its own, which costs a pass over the window and
# compile time.
LONGEST = 64


def mentions(equation: core.JaxprEqn, axis: str) -> bool:
    """True if an equation, or an equation inside it, names the axis."""
    inside = read.within(equation)
    return any(is_mark(e, axis) or is_collective(e, axis) for e in inside)


class Opening(NamedTuple):
    """The axis whose collectives come into the open, out of inner programs.

    Attributes:
      axis: the name of the axis.
      size: the size of the axis.
      loops: for the body of a scan, the parts of the arguments of inner loops, by the
        ids of the loops; else None. In such a body each equation of a checkpoint gets a
        checkpoint of its own, for one checkpoint may have equations of several parts.
    """

    axis: str
    size: int
    loops: dict[int, list[int]] | None = None


def flat(jaxpr: core.Jaxpr, args: Sequence[Any], opening: Opening) -> read.Program:
    """The same program in one list of equations.

    `args` are values for the constants and arguments of the program, or their types.
    """
    count = len(jaxpr.constvars)

    def run(*args: Any) -> list[Any]:
        return _opened(read.Program(jaxpr, args[:count]), args[count:], opening)

    axes = [(opening.axis, opening.size)]
    closed: Any = jax.make_jaxpr(run, axis_env=axes)(*args)
    return read.Program(closed.jaxpr, closed.consts)


def _opened(
    program: read.Program, args: Sequence[Any], opening: Opening, around: Any = None
) -> list[Any]:
    """The results of a program, with the equations of inner programs in the open.

    `around` is the source of the equation that the program is inside of.
    """

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
        placed = places.placed(equation, around)
        if read.kind(equation) == "call" and not references.is_group(equation):
            [inner] = read.inner(equation)
            return _opened(inner, values, opening, placed.source_info)
        if mentions(equation, opening.axis):
            return _open(equation, values, opening)
        if placed is equation:
            return None
        return bind(program.jaxpr, [placed], placed.invars, placed.outvars, values)

    program = program._replace(jaxpr=references.grouped(program.jaxpr))
    return interpret.evaluate(program, args, rule)


def _open(
    equation: core.JaxprEqn, values: list[Any], opening: Opening
) -> Sequence[Any] | None:
    axis, kind = opening.axis, read.kind(equation)
    if is_collective(equation, axis) or is_mark(equation, axis):
        return None
    if kind == "checkpoint":
        split = _checkpointed if opening.loops is None else _singly
        return split(equation, values, opening)
    if kind == "scan":
        return _in_parts(equation, values, opening)
    raise NotImplementedError(_cannot_open(equation, axis))


def _checkpointed(
    equation: core.JaxprEqn, values: list[Any], opening: Opening
) -> list[Any]:
    """A `jax.checkpoint` of each piece between the collectives."""
    [(inside, inner_consts)] = read.inner(equation)
    values = [*inner_consts, *values]
    program, consts = flat(inside, values, opening)
    given = [*program.constvars, *program.invars]
    env = dict(zip(given, [*consts, *values], strict=True))
    meets = functools.partial(mentions, axis=opening.axis)

    def run(piece: list[core.JaxprEqn], reads: list[Any], outs: list[Any]) -> Any:
        body = functools.partial(bind, program, piece, reads, outs)
        return body if meets(piece[0]) else interpret.checkpointed(equation, body)

    pairs = itertools.groupby(split_scans.sorted_apart(program.eqns, meets), meets)
    pieces = [list(group) for _, group in pairs]
    split_scans.run_in_groups(pieces, env, program.outvars, run)
    return [split_scans.read_from(x, env) for x in program.outvars]


def _singly(equation: core.JaxprEqn, values: list[Any], opening: Opening) -> list[Any]:
    """A `jax.checkpoint` of each equation. `SplitScan` puts them together again."""
    [(inside, inner_consts)] = read.inner(equation)
    values = [*inner_consts, *values]
    program = flat(inside, values, opening)

    def rule(e: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
        if mentions(e, opening.axis):
            return None
        one = split_scans.single(equation, program.jaxpr, e)
        return bind(program.jaxpr, [one], e.invars, one.outvars, values)

    return interpret.evaluate(program, values, rule)


def _in_parts(
    equation: core.JaxprEqn, values: list[Any], opening: Opening
) -> list[Any]:
    """A scan as several scans without collectives, and the collectives between them."""
    how, axis = read.scan_of(equation), opening.axis
    if not how.length:
        _, carry, _ = how.split(values)
        stacks = equation.outvars[how.num_carry :]
        return [*carry, *(collectives.zeros(x.aval) for x in stacks)]

    def meets(e: core.JaxprEqn) -> bool:
        return any(is_collective(x, axis) for x in read.within(e))

    loops = feedback.inside(how, meets) if opening.loops is None else opening.loops
    body, consts = how.body
    types = [*map(jax.typeof, consts), *(x.aval for x in body.invars)]
    program = flat(body, types, opening._replace(loops=loops))
    how = how._replace(body=program, num_consts=len(consts) + how.num_consts)
    start = loops.get(id(equation), [0] * len(body.invars))
    marks = functools.partial(is_mark, name=axis)
    start, values = [*[0] * len(consts), *start], [*consts, *values]
    return split_scans.SplitScan(how, meets, marks, start, values).run()


def _cannot_open(equation: core.JaxprEqn, axis: str) -> str:
    inside = (e for e in read.within(equation) if not read.inner_programs(e))
    name = next((e for e in inside if mentions(e, axis)), equation).primitive.name
    return (
        f"Rows must not meet inside of {equation.primitive.name}, but there is a "
        f"{name} in it."
    )
