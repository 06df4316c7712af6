"""Tables that a loss computes of constants alone, such as those of rotary positions.

XLA hoists such a table out of a loop of several micro-batches. In a call of one, it
fuses the table with what reads it, and rounds in other places. So it is computed before
the loop in both.

That is done for floating-point tables that are rounded. What is only moved or compared,
such as a mask, has the same bits anywhere, and is cheaper to compute again. Scalars and
arrays of equal numbers XLA computes itself, when it compiles. Tables are found in
`jax.jit` and `jax.checkpoint`, too. Out of loops inside the loss XLA hoists by itself,
whatever is around them.
"""

from typing import Any, NamedTuple

import jax
from jax.extend import core

from ga_optax._passes import interpret, known, primitives, read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.read import Program

# What depends on others; on constants alone: equal numbers, different ones, a table.
_OTHER, _EQUAL, _COUNTED, _TABLE = range(-1, 3)
# What a jitted function has for each argument.
_ONE_EACH = ("in_shardings", "in_layouts", "donated_invars")


def hoisted(program: Program, facts: Facts) -> Program:
    """The program with its tables among its constants, and these."""
    jaxpr, consts = program
    split = _split(jaxpr, set())
    if not split.tables:
        return program
    values = interpret.bind(jaxpr, split.made, [], list(split.tables), [])
    consts = [*consts, *map(jax.lax.optimization_barrier, values)]
    variables = [*jaxpr.constvars, *split.tables.values()]
    # In jax 0.12 a program without its constants has them among its arguments.
    return Program(
        rewrite.closing_over(split.rest, variables, consts, jaxpr.invars), consts
    )


class _Split(NamedTuple):
    """A program in two.

    Attributes:
      made: equations of constants alone, which compute the tables.
      tables: those, and the variables that the rest reads instead.
      rest: the program without those equations.
    """

    made: list[core.JaxprEqn]
    tables: dict[Any, core.Var]
    rest: core.Jaxpr


def _split(jaxpr: core.Jaxpr, given: set[Any]) -> _Split:
    """Takes the tables out of a program; `given` are arguments that are tables."""
    grade = dict.fromkeys(given, _TABLE)  # of what depends on constants alone
    made: list[core.JaxprEqn] = []
    tables: dict[Any, core.Var] = {}
    rest: list[core.JaxprEqn] = []

    def reads(x: Any) -> Any:
        """The variable that has the value of `x` for what is no constant."""
        is_table = read.is_variable(x) and grade.get(x) == _TABLE and x not in given
        return tables.setdefault(x, core.Var(x.aval)) if is_table else x

    for equation in jaxpr.eqns:
        ins, more = read.variables(equation.invars), []
        grades = [grade.get(x, _OTHER) for x in ins]
        its = _OTHER if _OTHER in grades else max([_counts(equation), *grades])
        if its != _OTHER and known.is_known(equation):
            made.append(equation)
            its += its == _COUNTED and _rounds(equation)
            for x in equation.outvars:
                grade[x] = its if read.is_inexact(x) else min(its, _COUNTED)
            rest.append(equation)  # others may read what is no table
            continue
        if _takes_more(equation):
            own = {x for x in ins if grade.get(x) == _TABLE}
            equation, lifted, more = _lifted(equation, own)
            made += lifted
            grade |= dict.fromkeys(more, _TABLE)
        elif its >= _COUNTED:
            name = equation.primitive.name
            left_alone(equation, f"a table is made by {name}, which is not known")
        rest.append(
            equation.replace(invars=list(map(reads, [*equation.invars, *more])))
        )
    outvars = list(map(reads, jaxpr.outvars))
    if not tables:
        return _Split([], {}, jaxpr)
    due = jaxpr.replace(eqns=rest, outvars=outvars)
    rest, _ = read.needed(
        due, outvars, runs=lambda e: grade.keys().isdisjoint(e.outvars)
    )
    made, _ = read.needed(jaxpr.replace(eqns=made), tables)
    return _Split(made, tables, due.replace(eqns=rest))


def _lifted(
    equation: core.JaxprEqn, tables: set[Any]
) -> tuple[core.JaxprEqn, list[core.JaxprEqn], list[Any]]:
    """An equation without the tables of the program inside it.

    Returns: the equation, which waits for them as more arguments; equations that
    compute them, for the program around it; and the tables there.
    """
    [inner] = read.inner_programs(equation)
    pairs = list(zip(inner.invars, equation.invars, strict=True))
    own = {v for v, x in pairs if read.is_among(x, tables)}
    split = _split(inner, own)
    if not split.tables:
        return equation, [], []
    names = dict[Any, Any](pairs)
    names |= {x: core.Var(x.aval) for e in split.made for x in e.outvars}
    rest = split.rest.replace(invars=[*inner.invars, *split.tables.values()])
    equation = rewrite.with_inner(equation, lambda _: rest)
    params, more = equation.params, len(split.tables)
    longer = {k: (*params[k], *params[k][:1] * more) for k in _ONE_EACH if k in params}
    equation = equation.replace(params=params | longer)
    return (
        equation,
        rewrite.renamed(split.made, names),
        rewrite.rename(split.tables, names),
    )


def _takes_more(equation: core.JaxprEqn) -> bool:
    """Whether the program inside can be given more arguments like its others."""
    params = [equation.params.get(key, ()) for key in _ONE_EACH]
    alike = all(x == one[0] for one in params for x in one)
    return read.is_inline(equation) and alike


def _counts(equation: core.JaxprEqn) -> bool:
    """Whether it makes an array of different numbers. XLA knows those of equal ones."""
    return any(e.primitive.name == "iota" for e in read.within(equation))


def _rounds(equation: core.JaxprEqn) -> bool:
    """Whether it computes floating-point numbers, other than by moving them."""
    return any(
        not read.inner_programs(e)
        and not primitives.entry_of(e).is_exact
        and any(map(read.is_inexact, e.outvars))
        for e in read.within(equation)
    )
