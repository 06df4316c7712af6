"""Tables that a loss computes of constants alone, such as those of rotary positions.

XLA hoists such a table out of a loop of several micro-batches. In a call of one
micro-batch, XLA fuses the table with its readers, and rounds in other places. So the
library computes the table before the loop in both.

The pass hoists floating-point tables that are rounded. Numbers that are only moved or
compared, such as a mask, have the same bits anywhere, and are cheaper to compute again.
XLA computes scalars and arrays of equal numbers itself, when it compiles. The pass
looks into `jax.jit` and `jax.checkpoint`. Out of loops inside the loss XLA hoists
tables by itself, whatever is around the loops.
"""

from typing import Any, NamedTuple

import jax
from jax.extend import core

from ga_optax._passes import interpret, known, primitives, read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.read import Program

# A value that depends on arguments; of constants alone: equal numbers, different
# numbers, a table.
_OTHER, _EQUAL, _COUNTED, _TABLE = range(-1, 3)
# The parameters of a jitted function that have an entry for each argument.
_ONE_EACH = ("in_shardings", "in_layouts", "donated_invars")


def hoisted(program: Program, facts: Facts) -> Program:
    """The program with its tables among its constants."""
    jaxpr, consts = program
    split = _split(jaxpr, set())
    if not split.tables:
        return program
    values = interpret.bind(jaxpr, split.hoisted, [], list(split.tables), [])
    consts = [*consts, *map(jax.lax.optimization_barrier, values)]
    variables = [*jaxpr.constvars, *split.tables.values()]
    # In jax 0.12 a program without its constants has them among its arguments.
    return Program(
        rewrite.closing_over(split.rest, variables, consts, jaxpr.invars), consts
    )


class _Split(NamedTuple):
    """A program in two.

    Attributes:
      hoisted: equations of constants alone, which compute the tables.
      tables: the variables of the tables, and those that the rest reads instead.
      rest: the program without the hoisted equations.
    """

    hoisted: list[core.JaxprEqn]
    tables: dict[Any, core.Var]
    rest: core.Jaxpr


def _split(jaxpr: core.Jaxpr, given: set[Any]) -> _Split:
    """Takes the tables out of a program; `given` are arguments that are tables."""
    grade = dict.fromkeys(given, _TABLE)  # of what depends on constants alone
    hoisted: list[core.JaxprEqn] = []
    tables: dict[Any, core.Var] = {}
    rest: list[core.JaxprEqn] = []

    def reads(x: Any) -> Any:
        """The variable that has the value of `x` in the rest of the program."""
        is_table = read.is_variable(x) and grade.get(x) == _TABLE and x not in given
        return tables.setdefault(x, core.Var(x.aval)) if is_table else x

    for equation in jaxpr.eqns:
        ins, more = read.variables(equation.invars), []
        grades = [grade.get(x, _OTHER) for x in ins]
        highest = _OTHER if _OTHER in grades else max([_counts(equation), *grades])
        if highest != _OTHER and known.is_known(equation):
            hoisted.append(equation)
            highest += highest == _COUNTED and _rounds(equation)
            for x in equation.outvars:
                grade[x] = highest if read.is_inexact(x) else min(highest, _COUNTED)
            rest.append(equation)  # the rest may read results that are no tables
            continue
        if _takes_more(equation):
            given_tables = {x for x in ins if grade.get(x) == _TABLE}
            equation, lifted, more = _lifted(equation, given_tables)
            hoisted += lifted
            grade |= dict.fromkeys(more, _TABLE)
        elif highest >= _COUNTED:
            name = equation.primitive.name
            left_alone(equation, f"a table is made by {name}, which is not known")
        rest.append(
            equation.replace(invars=list(map(reads, [*equation.invars, *more])))
        )
    outvars = list(map(reads, jaxpr.outvars))
    if not tables:
        return _Split([], {}, jaxpr)
    new = jaxpr.replace(eqns=rest, outvars=outvars)
    rest, _ = read.needed(
        new, outvars, runs=lambda e: grade.keys().isdisjoint(e.outvars)
    )
    hoisted, _ = read.needed(jaxpr.replace(eqns=hoisted), tables)
    return _Split(hoisted, tables, new.replace(eqns=rest))


def _lifted(
    equation: core.JaxprEqn, tables: set[Any]
) -> tuple[core.JaxprEqn, list[core.JaxprEqn], list[Any]]:
    """An equation without the tables of the program inside it.

    Returns: the equation, which takes the tables as more arguments; the equations that
    compute the tables, for the program around; and the variables of the tables there.
    """
    [inner] = read.inner_programs(equation)
    pairs = list(zip(inner.invars, equation.invars, strict=True))
    split = _split(inner, {v for v, x in pairs if read.is_among(x, tables)})
    if not split.tables:
        return equation, [], []
    names = dict[Any, Any](pairs)
    names |= {x: core.Var(x.aval) for e in split.hoisted for x in e.outvars}
    rest = split.rest.replace(invars=[*inner.invars, *split.tables.values()])
    equation = rewrite.with_inner(equation, lambda _: rest)
    params, more = equation.params, len(split.tables)
    longer = {k: (*params[k], *params[k][:1] * more) for k in _ONE_EACH if k in params}
    equation = equation.replace(params=params | longer)
    return (
        equation,
        rewrite.renamed(split.hoisted, names),
        rewrite.rename(split.tables, names),
    )


def _takes_more(equation: core.JaxprEqn) -> bool:
    """True if an equation can get more arguments: all have the same parameters."""
    params = [equation.params.get(key, ()) for key in _ONE_EACH]
    alike = all(x == entries[0] for entries in params for x in entries)
    return read.is_inline(equation) and alike


def _counts(equation: core.JaxprEqn) -> bool:
    """True if an equation makes different numbers. XLA folds arrays of equal ones."""
    return any(e.primitive.name == "iota" for e in read.within(equation))


def _rounds(equation: core.JaxprEqn) -> bool:
    """True if an equation rounds floating-point numbers, and does not only move."""
    return any(
        not read.inner_programs(e)
        and not primitives.entry_of(e).is_exact
        and any(map(read.is_inexact, e.outvars))
        for e in read.within(equation)
    )
