"""Functions that run a program, and that trace a program of a Python function."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util

from ga_optax._passes import read, rewrite


def program_of(fun: Callable[..., Any], *types: Any) -> read.Program:
    """The program of a function, for arguments of these types."""
    closed: Any = jax.make_jaxpr(fun)(*types)
    return read.Program(closed.jaxpr, closed.consts)


# Returns the results of an equation with these arguments; None to run the equation.
Override = Callable[[core.JaxprEqn, list[Any]], Sequence[Any] | None]


def evaluate(program: read.Program, args: Sequence[Any], rule: Override) -> list[Any]:
    """The results of a program, whose equations `rule` computes."""
    jaxpr = program.jaxpr
    names = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(names, [*program.consts, *args], strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else env[x]

    outer = source_info_util.current_name_stack()
    for equation in jaxpr.eqns:
        values = list(map(value, equation.invars))
        with as_of(equation, outer):
            out = rule(equation, values)
        if out is None:
            out = bind(jaxpr, [equation], equation.invars, equation.outvars, values)
        env.update(zip(equation.outvars, out, strict=True))
    return list(map(value, jaxpr.outvars))


def results(program: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a program as it is."""
    return jax.core.eval_jaxpr(program.jaxpr, program.consts, *args)


def bind(
    jaxpr: core.Jaxpr,
    equations: Sequence[core.JaxprEqn],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    values: Sequence[Any],
) -> list[Any]:
    """The values of `outvars`, from those of `invars`, by equations of `jaxpr`.

    A variable in `invars` keeps its value, even if an equation computes the variable
    (which runs because it prints).
    """
    pairs = zip(invars, values, strict=True)
    known = {v: x for v, x in pairs if not isinstance(v, core.Literal)}
    equations = [_without_results(e, known) for e in equations]
    effects = frozenset().union(*(equation.effects for equation in equations))
    program = jaxpr.replace(
        constvars=[],
        invars=list(known),
        outvars=list(outvars),
        eqns=list(equations),
        effects=effects,
    )
    return jax.core.eval_jaxpr(program, (), *known.values())


def _without_results(equation: core.JaxprEqn, known: Mapping[Any, Any]) -> Any:
    """The equation with new variables in place of results that are known."""
    if known.keys().isdisjoint(equation.outvars):
        return equation
    new = [core.Var(x.aval) if x in known else x for x in equation.outvars]
    return equation.replace(outvars=new)


def of_some(
    fun: Callable[..., Any], xs: Sequence[Any], places: Iterable[int]
) -> Callable[..., Any]:
    """A function of the operands at some places; the others have the values in `xs`."""
    places = list(places)

    def run(*some: Any) -> Any:
        return fun(*put(xs, places, some))

    return run


def put(xs: Sequence[Any], places: Iterable[int], new: Sequence[Any]) -> list[Any]:
    """The values, with others at some places."""
    return list((dict(enumerate(xs)) | dict(zip(places, new, strict=True))).values())


def checkpointed(equation: core.JaxprEqn, body: Callable[..., Any]) -> Any:
    """`jax.checkpoint` of another function, with the options of an equation."""
    options = {key: equation.params[key] for key in ("prevent_cse", "policy")}
    return jax.checkpoint(body, **options)


def scan(
    how: read.Scan, body: Callable[[list[Any]], Any], values: list[Any]
) -> list[Any]:
    """The results of a scan with another body."""
    consts, start, slices = how.split(values)

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body([*consts, *carry, *slices])
        return list(out[: how.num_carry]), list(out[how.num_carry :])

    carry, stacked = jax.lax.scan(
        step, start, slices, how.length, how.reverse, how.unroll
    )
    return [*carry, *stacked]


def traced(
    fun: Callable[..., Any], invars: Sequence[Any], result: core.Var, at: core.JaxprEqn
) -> list[core.JaxprEqn]:
    """Equations that compute `result` as `fun` of values of a program.

    The equations have the line of the equation `at`.
    """
    jaxpr = program_of(fun, *(x.aval for x in invars)).jaxpr
    known = dict(zip(jaxpr.invars, invars, strict=True)) | {jaxpr.outvars[0]: result}
    new = rewrite.renamed(jaxpr.eqns, known)
    return [e.replace(source_info=at.source_info) for e in new]


@contextlib.contextmanager
def as_of(equation: core.JaxprEqn, outer: Any) -> Iterator[None]:
    """A context, in which new equations have the line and the names of an equation.

    The names stand behind `outer`. Without a line of its own, the equation has the line
    of the equation around.
    """
    info = equation.source_info
    has_line = source_info_util.summarize(info)
    lines = (info if has_line else source_info_util.current()).traceback
    names = outer + info.name_stack
    with source_info_util.user_context(lines, name_stack=names):
        yield
