"""All rows at once: what runs then, what is refused, what is advised."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._checks import divisors, one_of, or_else, uneven
from .._devices import collectives
from .._devices.record import DoesNotFitError
from .._partition import custom
from .._partition.held import Note, meeting_of
from .._partition.partitioned import Partitioned
from .._passes import effects, equation, jaxprs, places
from .._text import is_first, warn
from .._window.meetings import MEETINGS
from .._window.report import ALONE
from .._window.run import TakesMoreError
from . import batches, rows
from .call import Call

# == All rows at once ==================================================================

Pair = tuple[tuple[jax.Array, Any], Any]  # ((loss, aux), gradients)


class AllRows(NamedTuple):
    """The plan of a call that is not divided, and why, in words."""

    why: str


def undivided(call: Call, plan: AllRows) -> Pair:
    """`((loss, aux), gradients)` by JAX, of all rows at once."""
    if call.sees is not None:
        call.sees(plan)
    fun = call.options.fun
    argnums: Any = call.options.argnums
    if of_rows := call.roles["batch_argnums"][: call.rows]:
        argnums = (*call.roles["argnums"], *of_rows)
    if argnums == ():
        return fun(*call.args, **call.kwargs), ()
    allow_int = call.options.allow_int
    of_all = jax.value_and_grad(fun, argnums, has_aux=True, allow_int=allow_int)
    return of_all(*call.args, **call.kwargs)


def in_one(call: Call, plan: AllRows) -> Pair:
    """As `undivided`, and a warning, unless all rows at once raise an error as well."""
    text = (
        "The gradient is computed of all rows at once, in the memory that this takes, "
        f"because {plan.why} The result is right."
    )
    try:
        out = undivided(call, plan)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        error.add_note(text)
        raise
    if call.sees is None:
        warn(text)
    return out


def flat_of(
    jaxpr: core.Jaxpr, num_params: int, types: Sequence[Any], reads: Sequence[int]
) -> Callable[..., list[Any]]:
    """`jax.value_and_grad` of the traced function, whose operands are the last.

    `types` are the types of all operands, `reads` the places of the operands that come,
    `num_params` is the number of leaves to differentiate with respect to.
    """
    jaxpr = jaxprs.without_values(jaxpr)
    number = len(types)

    def zero(i: int) -> Any:
        return None if i in reads else jnp.zeros(types[i].shape, types[i].dtype)

    unread = number - len(jaxpr.constvars) - len(jaxpr.invars)

    def flat(*some: Any) -> list[Any]:
        xs = jaxprs.put([*map(zero, range(number))], reads, some)
        args = xs[number - len(jaxpr.invars) :]
        consts = xs[unread : number - len(args)]

        def loss_of(*params: Any) -> tuple[Any, list[Any]]:
            batch = args[num_params:]
            loss, *aux = jax.core.eval_jaxpr(jaxpr, consts, *params, *batch)
            return loss, aux

        loss, pull, aux = jax.vjp(loss_of, *args[:num_params], has_aux=True)
        return [loss, *aux, *pull(jnp.ones_like(loss))]

    return flat


def tried(run: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """`run(*args)`, or the error, which is a fault of this library or of a new JAX.

    An `IndivisibleError`, which says why all rows run at once, is returned as well.
    Errors of the user's code are raised, and errors that say what does not fit.
    """
    try:
        return run(*args), None
    except (DoesNotFitError, equation.NoDerivativeError, Warning):
        raise
    except Exception as error:
        if places.is_of_user(error):
            raise places.of_numbers(error) or error  # noqa: B904
        return None, error


def with_or_without(
    run: Callable[[Call], Any], call: Call
) -> tuple[Any, Exception | None]:
    """`tried(run, call)`, or without passes if one of them raises, and a warning."""
    out, error = tried(run, call)
    is_fault = error is not None and not isinstance(error, effects.IndivisibleError)
    if not (is_fault and call.options.optimize):
        return out, error
    devices = call.devices.for_arrays((call.args, call.kwargs), False)
    options = call.options._replace(optimize=False)
    out, again = tried(run, call._replace(options=options, devices=devices))
    if again is not None:
        return None, error
    warn(
        f"{_said_of(error)} It goes on as with optimize=False, which may take more "
        "memory. The result is right."
    )
    return out, None


def with_loss(
    fun: Callable[..., Any], axes: tuple[str, ...] = ()
) -> Callable[..., Any]:
    def with_loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        return collectives.vary(jnp.zeros([]), axes), fun(*args, **kwargs)

    return with_loss


def why_undivided(error: Exception, micro_batch: Any) -> str:
    """Why a program is not divided, or cannot be, and what helps."""
    if isinstance(error, TakesMoreError):
        part, question = micro_batch.part, micro_batch.call.question
        todo = f"{ALONE} ga_optax.batch_dependencies shows the lines."
        text = f"{error}{question} {todo}"
        if part.whole:
            _, what, todo = _whole_in_words(part)
            each = or_else(question, "Each of them has")
            text = f"{error}{each} {what}. {todo}"
        return " ".join(x for x in (text, advice_on_scans(part.jaxpr)) if x)
    if isinstance(error, effects.IndivisibleError):
        return str(error)
    return (
        f"{_said_of(error)} If rows of a function in there do not need each other, "
        "such as a solver under jax.vmap, ga_optax.rowwise of it, here "
        "ga_optax.rowwise(jax.vmap(fun, in_axes), in_axes), needs no look inside."
    )


def _said_of(error: Exception) -> str:
    """A sentence on a fault of this library, or of a new JAX."""
    why = " ".join([str(error).split("\n")[0], *getattr(error, "__notes__", ())])
    file, line = places.raised_at(error)
    return (
        f"ga_optax with jax {jax.__version__} cannot divide the program: "
        f"{type(error).__name__}: {why} ({os.path.basename(file)}:{line})."
    )


# -- What does not fit ------------------------------------------------------------


def does_not_divide(call: Call, source: Any) -> DoesNotFitError:
    """The error that rows meet, so that the last micro-batch cannot be smaller."""
    where = f", and rows meet at {places.place_of(source)}" if source else ""
    number, came, _ = batches.counted_rows(call, hint=True)
    (option, k), name = call.asked, came.partition(" has shape")[0]
    leaves = jax.tree.leaves(call.role("batch_argnums"))
    more = len([x for x in leaves if np.ndim(x)]) > len(call.batch)
    todo = f"; or, if that leaf has no rows, give {name} None in batch_axes"
    return DoesNotFitError(
        f"{option}={k} must divide the batch axis if rows meet, but {came}"
        f"{where}.{or_else(call.question, 'Use')} "
        f"{one_of(divisors(number))}{todo * more}. {uneven(number, k)}"
    )


def check_options(call: Call, part: Partitioned) -> None:
    """Raises if an option does not fit because rows meet; the error names the line.

    Sums without parameters, such as counts, fit all options: they are added up first.
    """
    if not part.meets:
        return
    devices = call.devices
    gathered = (
        e for e in jaxprs.equations(part.jaxpr) if meeting_of(e) == "all_gather"
    )
    e = next(gathered, part.in_gradient)
    if e is None:
        return
    where = f"rows meet at {places.place_of(e.source_info)}"
    if devices.each or devices.scatters:
        raise DoesNotFitError(
            f'If rows meet, data_axis must have sync="last", but {where}, and it is '
            f"{call.options.data_axis}. Leave sync out, or write the loss so that its "
            "rows do not need each other; ga_optax.batch_dependencies shows all lines."
        )
    if devices.is_checked:
        raise DoesNotFitError(
            "If rows meet, a jax.shard_map must have check_vma=False, but this one "
            f"checks, and {where}: JAX has no types for an axis beside its mesh. Pass "
            "check_vma=False, or call at top level with data_axis=."
        )
    if by_type := rows.split_by_type(call):
        spec, axis = by_type
        raise DoesNotFitError(
            "If rows meet, a batch that lies along a mesh axis of explicit type needs "
            f"data_axis=, but {where}, and the batch is sharded as {spec} along "
            f"axis {axis}. Pass data_axis={spec[axis]!r}."
        )


# == Advice ============================================================================
# Advice on code that each micro-batch computes for all rows, and the warning of it.
#
# The partition records the lines. A call warns of the lines if a micro-batch computes
# more for all rows than for its own rows: then more micro-batches save little memory.

_OF_INDEX = (
    "An index may reach any row. If each row has its own, such as the nodes of its own "
    "graph, index inside of a row, by jax.vmap or take_along_axis, and add no offsets."
)

# The advice on primitives that are computed for all rows.
_TODO = {
    "while": "A loop that runs until all rows are done has all of them in every "
    "micro-batch. Give each row a loop of its own, by jax.vmap.",
    **dict.fromkeys(("gather", "scatter", "scatter-max", "scatter-min"), _OF_INDEX),
    "reshape": "A reshape cuts rows into pieces, and micro-batches would have unequal "
    "numbers of them: choose a number of pieces that num_microbatches divides, or "
    "fewer micro-batches.",
    "dynamic_update_slice": "Join the new part and the old one by jnp.concatenate.",
}

_OF_EFFECT = (
    "Code that prints, checks or calls back gets all rows at once: give it fewer "
    "numbers, such as a sum over rows."
)

_OF_ANY_OTHER = (
    "If no row needs another there, write it for one row, under jax.vmap. If rows must "
    "meet, more micro-batches save no memory there."
)

_MOST_LINES = 4


def advice_on_scans(jaxpr: core.Jaxpr) -> str:
    """Returns the advice on scans of JAX along rows; "" if there is no such scan."""
    met = (e for e in jaxprs.equations(jaxpr) if e.primitive.name in MEETINGS)
    scans = [e for e in met if places.is_inside(e, jax.lax.associative_scan)]
    if not scans:
        return ""
    line = places.line_of(scans[0].source_info)
    return (
        f"jax.lax.associative_scan, at {line}, scans along the rows: with "
        "ga_optax.associative_scan each micro-batch scans its own, not under jax.vmap."
    )


def advice(whole: Sequence[Note]) -> list[str]:
    """Returns the advice on what is computed whole, each sentence once."""
    todo = [
        _OF_EFFECT if x.name.startswith("what ") else _TODO.get(x.name) for x in whole
    ]
    hidden = [x for x in whole if effects.hidden_kind(x.name)]
    if hidden:
        kinds = dict.fromkeys(str(effects.hidden_kind(x.name)) for x in hidden)
        pattern = r"(.*?:\d+):\d+ \((.*?)\)"
        lines = (re.match(pattern, places.short_line(x.line)) for x in hidden)
        named = dict.fromkeys(f"{x[2]} ({x[1]})" for x in lines if x)
        todo.append(
            f"Hidden code ({', '.join(kinds)}) is computed whole: wrap "
            f"{' and '.join(named) or 'what calls it'} in ga_optax.rowwise if its rows "
            "do not need each other."
        )
    return list(dict.fromkeys(filter(None, todo)))


def warn_of_whole(call: Call, jaxpr: core.Jaxpr, part: Partitioned) -> None:
    """Warns of each set of lines once, if a micro-batch computes more for all rows.

    `plan` prints the warning, too. If rows only meet, which no other code avoids, the
    limit is the number of bytes that the whole batch computes. `jaxpr` is the program
    of the whole batch.
    """
    if rows.is_open(jaxpr):
        return
    size, one = call.num_of_all, part.jaxpr
    of_batch = one.invars[-1 - len(call.batch) :]
    if not part.whole:  # a scan that is computed once without a note is a little one
        moving = effects.moving(one, one.invars[: -len(of_batch)])
        still = [e for e in one.eqns if moving.isdisjoint(e.outvars)]
        little = {id(e) for e in still if jaxprs.kind(e) == "scan"}
        one = one.replace(eqns=[e for e in one.eqns if id(e) not in little])
    for_all, for_own = _computed(one, of_batch, ())
    if for_all <= for_own * (1 if part.whole else size):
        return
    lines, what, todo = _whole_in_words(part)
    text = (
        f"Each of {size} micro-batches computes {for_all:,} bytes for all rows, "
        f"and {for_own:,} for its own rows: {what}. "
        f"{todo} ga_optax.batch_dependencies shows every line."
        f"{call.question}"
    )
    places.log_sentence(text)
    if is_first(lines):
        warn(text)


def _whole_in_words(part: Partitioned) -> tuple[tuple[str, ...], str, str]:
    """Lines that are computed whole, or where rows meet; the same in words; advice."""
    lines = [f"{x.name.rstrip(',')}, at {x.line}" for x in part.whole] or [
        f"{jaxprs.name_of(e)}, at {places.place_of(e.source_info)}"
        for e in jaxprs.equations(part.jaxpr)
        if e.primitive.name in MEETINGS
    ]
    some = tuple(dict.fromkeys(lines))[:_MOST_LINES]
    todo = "If rows must meet there, more micro-batches save no memory."
    if part.whole:
        todo = " ".join(advice(part.whole))
    what = "; ".join(some) + (", computed whole" if part.whole else "")
    return some, what, todo or _OF_ANY_OTHER


def _computed(
    jaxpr: core.Jaxpr, of_rows: Iterable[Any], of_all: Iterable[Any]
) -> tuple[int, int]:
    """The bytes that a micro-batch computes forward: for all rows, for its own rows.

    Integers do not count, such as the indices by which rows are shuffled.

    Args:
      jaxpr: the program of the micro-batch.
      of_rows: the arguments that have the rows of the micro-batch.
      of_all: the arguments that have all rows. A sum over rows has none; what follows
        from it, such as the way back through what is shared, is computed once.
    """
    gathered = (e for e in jaxpr.eqns if e.primitive.name == "all_gather")
    of_all = [*of_all, *(x for e in gathered for x in e.outvars)]
    of_all = jaxprs.following(jaxpr, of_all)
    of_rows = jaxprs.following(jaxpr, of_rows, list(MEETINGS))
    total = [0, 0]
    for e in jaxpr.eqns:
        for program in jaxprs.inner_programs(e):
            pairs = list(zip(program.invars, jaxprs.operands(e, program), strict=False))
            inside = [
                [x for x, y in pairs if jaxprs.is_among(y, group)]
                for group in (of_rows, of_all)
            ]
            for i, n in enumerate(_computed(program, *inside)):
                total[i] += jaxprs.times(e) * n
        if jaxprs.inner_programs(e):
            continue
        size = sum(jaxprs.nbytes(x) for x in filter(jaxprs.is_inexact, e.outvars))
        if not of_rows.isdisjoint(e.outvars):
            total[1] += size
        elif not of_all.isdisjoint(e.outvars):
            total[0] += size
    return total[0], total[1]


# == Second derivatives ================================================================
# Custom derivative rules, of which a window has the first derivatives alone.
#
# The program of a window has no rules for second derivatives. On a mesh JAX would
# differentiate the program, so functions with such rules are refused.


def custom_rule_in(jaxpr: core.Jaxpr) -> core.JaxprEqn | None:
    """A call in a program that has a rule which may not be the true derivative.

    Rules of JAX for forward mode are true derivatives if they call no other rules.
    """

    def is_true(e: core.JaxprEqn) -> bool:
        return effects.is_of_jax(e) and not custom.calls_rules(e)

    return effects.rule_in(jaxpr, is_true)


def derivative_refused(call: Call, e: core.JaxprEqn, what: str) -> Exception:
    """The error of a derivative that cannot be had, of a program with such a call."""
    bound = call.devices.bound
    where = f"a jax.shard_map binds {bound}" if bound else "the mesh has them"
    return equation.NoDerivativeError(
        f"{what} cannot be differentiated in a jax.shard_map, or with mesh axes of "
        "explicit type, if fun has a derivative rule of its own, but fun has "
        f"{e.primitive.name} at {places.place_of(e.source_info)}, and {where}. Call "
        "the function of ga_optax at top level, with data_axis=ga_optax.DataAxis(name, "
        "mesh=mesh) and mesh axes of the type Auto."
    )


def differentiable_once(x: Any, error: Exception) -> Any:
    """The same array, which raises `error` if it is differentiated twice."""
    same = jax.custom_jvp(lambda x: x)
    same.defjvp(lambda xs, ts: (equation.not_differentiable(xs[0], error), ts[0]))
    return same(x)
