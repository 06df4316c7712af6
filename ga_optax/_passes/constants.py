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

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._passes.ir import bind, inner_programs, is_inline, with_inner

# They round nothing, or as often as the one who reads the result.
_MOVES = {
    *("iota", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims"),
    *("slice", "concatenate", "pad", "rev", "select_n", "convert_element_type", "copy"),
}
# What a jitted function has for each argument.
_ONE_EACH = ("in_shardings", "in_layouts", "donated_invars")

Value = Callable[[], Any]


def hoisted(jaxpr: core.Jaxpr, consts: list[Any]) -> tuple[core.Jaxpr, list[Any]]:
    """The program with its tables among its constants, and these."""
    tables: dict[core.Var, Value] = {}
    new = _without(jaxpr, {}, tables)
    if not tables:
        return jaxpr, consts
    values = [jax.lax.optimization_barrier(value()) for value in tables.values()]
    consts = [*consts, *values]
    # In jax 0.12 a program without its constants has them among its arguments.
    attached = {"consts": consts} if hasattr(jaxpr, "consts") else {}
    return new.replace(constvars=[*jaxpr.constvars, *tables], **attached), consts


def _without(
    jaxpr: core.Jaxpr, known: dict[Any, Value], tables: dict[core.Var, Value]
) -> core.Jaxpr:
    """The program, which reads its tables from new variables.

    Args:
      jaxpr: the program.
      known: those of its arguments that are tables already.
      tables: where to put the variables, with how to compute each.
    """
    made: dict[Any, core.JaxprEqn] = {}  # of constants alone, by result
    values = dict[Any, Any]()
    counted, rounded = set(known), set(known)
    found: dict[Any, core.Var] = {}
    equations: list[core.JaxprEqn] = []

    def value(x: Any) -> Any:
        if isinstance(x, core.Literal):
            return x.val
        if x in known:
            return known[x]()
        if x not in values:
            ins, outs = made[x].invars, made[x].outvars
            out = bind(jaxpr, [made[x]], ins, outs, list(map(value, ins)))
            values.update(zip(outs, out, strict=True))
        return values[x]

    def read(x: Any) -> Any:
        """The variable that has the value of `x` for what is no constant."""
        if isinstance(x, core.Literal) or x not in rounded or x in known:
            return x
        if x not in found:
            found[x] = core.Var(x.aval)
            tables[found[x]] = lambda: value(x)
        return found[x]

    for equation in jaxpr.eqns:
        ins, outs = equation.invars, equation.outvars
        fixed = [isinstance(x, core.Literal) or x in made or x in known for x in ins]
        if all(fixed) and not equation.effects:
            made |= dict.fromkeys(outs, equation)
            if _counts(equation) or not counted.isdisjoint(_variables(ins)):
                counted.update(outs)
                if _rounds(equation) or not rounded.isdisjoint(_variables(ins)):
                    rounded |= {x for x in outs if _is_inexact(x)}
        elif _takes_more(equation):
            [inner] = inner_programs(equation)
            pairs = zip(inner.invars, ins, strict=True)
            tabled = rounded.intersection(_variables(ins))
            own = {v: x for v, x in pairs if isinstance(x, core.Var) and x in tabled}
            given = {v: functools.partial(value, x) for v, x in own.items()}
            more: dict[core.Var, Value] = {}
            inner = _without(inner, given, more)
            outer = {core.Var(x.aval): get for x, get in more.items()}
            tables |= outer
            equation = equation.replace(invars=[*map(read, ins), *outer])
            if more:
                inner = inner.replace(invars=[*inner.invars, *more])
                equation = with_inner(equation, lambda _, inner=inner: inner)
                params = equation.params
                one_each = {k: params[k] for k in _ONE_EACH if k in params}
                longer = {k: (*x, *x[:1] * len(more)) for k, x in one_each.items()}
                equation = equation.replace(params=params | longer)
        else:
            equation = equation.replace(invars=list(map(read, ins)))
        equations.append(equation)
    outvars = list(map(read, jaxpr.outvars))
    if not tables:
        return jaxpr
    used, kept = _variables(outvars), []
    for equation in reversed(equations):
        is_made = any(x in made for x in equation.outvars)
        if not is_made or not used.isdisjoint(equation.outvars):
            used |= _variables(equation.invars)
            kept.append(equation)
    return jaxpr.replace(eqns=kept[::-1], outvars=outvars)


def _takes_more(equation: core.JaxprEqn) -> bool:
    """Whether the program inside can be given more arguments like its others."""
    params = [equation.params.get(key, ()) for key in _ONE_EACH]
    alike = all(x == one[0] for one in params for x in one)
    return is_inline(equation) and alike


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.aval.dtype, jnp.inexact)


def _counts(equation: core.JaxprEqn) -> bool:
    """Whether it makes an array of different numbers. XLA knows those of equal ones."""
    inner = [e for program in inner_programs(equation) for e in program.eqns]
    return equation.primitive.name == "iota" or any(map(_counts, inner))


def _rounds(equation: core.JaxprEqn) -> bool:
    """Whether it computes floating-point numbers, other than by moving them."""
    inner = [e for program in inner_programs(equation) for e in program.eqns]
    if inner:
        return any(map(_rounds, inner))
    moves = equation.primitive.name in _MOVES
    return not moves and any(map(_is_inexact, equation.outvars))


def _variables(atoms: Any) -> set[Any]:
    return {x for x in atoms if isinstance(x, core.Var)}
