"""The partition: the program of a micro-batch, from that of the whole batch.

    program of fun, [n, ...]  ->  program of a micro-batch, [n / k, ...], + collectives

`partition` runs the rule of each equation.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from .._passes import jaxprs
from . import held, linear, rules
from .created import Created, Root, best_with_created
from .held import Axis, Layout, Note, Records, Rows, Uneven, Value
from .writer import Scope, Writer


class Partitioned(NamedTuple):
    """A program of a micro-batch.

    Attributes:
      jaxpr: the program, with collectives over the axis. Its last argument is the index
        of the micro-batch.
      consts: the values of the constants.
      layouts: of each result: rows along a dimension, a part of a sum, or all. After
        the results come the operands of `late`.
      whole: equations without a rule, which are computed whole.
      promised: equations that are split because of a promise of the user.
      cut: the arrays that the program creates and that have rows, see `created`.
      turns: True if functions of pairs are split along columns.
      meets: True if rows meet, in a collective over the axis.
      in_gradient: the first meeting on the way from the parameters to the loss; None if
        rows meet in numbers without parameters alone, such as counts.
      reads_index: True if the program reads the index of the micro-batch.
      late: the results whose parts may add up to NaN, see `Value`: computed after all
        loops.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    layouts: list[Layout]
    whole: list[Note]
    promised: list[Note]
    meets: bool
    in_gradient: core.JaxprEqn | None
    reads_index: bool
    cut: frozenset[Root] = frozenset()
    turns: bool = False
    late: held.Late | None = None


def first_meetings(part: Partitioned, axis: str) -> list[core.JaxprEqn]:
    """The collectives over the axis, all of them in the open, that need no other."""
    jaxpr = part.jaxpr
    every = [e for e in jaxpr.eqns if axis in jaxprs.axes_of(e)]
    later = jaxprs.following(jaxpr, [x for e in every for x in e.outvars])
    return [e for e in every if later.isdisjoint(jaxprs.variables(e.invars))]


def without_meetings(
    part: Partitioned, meetings: Sequence[core.JaxprEqn], values: Sequence[Any]
) -> Partitioned:
    """The program with constants in place of what these collectives compute."""
    jaxpr, gone = part.jaxpr, set(map(id, meetings))
    eqns = [e for e in jaxpr.eqns if id(e) not in gone]
    effects = frozenset().union(*(e.effects for e in eqns))
    names = [*jaxpr.constvars, *(x for e in meetings for x in e.outvars)]
    consts = [*part.consts, *values]
    jaxpr = jaxpr.replace(eqns=eqns, effects=effects)
    jaxpr = jaxprs.closing_over(jaxpr, names, consts, jaxpr.invars)
    return part._replace(jaxpr=jaxpr, consts=consts)


class Argument(NamedTuple):
    """An argument: the type, the layout, and True if it is differentiated."""

    aval: Any
    layout: Layout
    smooth: bool = False


def partition(
    jaxpr: core.Jaxpr,
    arguments: Sequence[Argument],
    axis: Axis,
    first: Layout | None = None,
    like: Partitioned | None = None,
) -> Partitioned:
    """Partitions a program, of which the constants are the first arguments.

    Args:
      jaxpr: the program.
      arguments: its arguments.
      axis: the axis of the micro-batches.
      first: the layout of the first result; None for the one in which it is computed.
      like: a program whose results have the same layouts. What it creates has rows in
        the same places. If None, each result but the first stays
        in the layout in which it is computed.
    """
    split = ((a.layout, a.aval) for a in arguments if isinstance(a.layout, Rows))
    some = next((Created(x, of.shape[x.dim]) for x, of in split), None)
    wanted = like.layouts if like else [first] if first else []
    run = functools.partial(_partitioned, jaxpr, arguments, wanted)
    if like is not None and some is not None:  # what was chosen there
        some = dataclasses.replace(some, cut=like.cut)
        return run(axis._replace(turns=axis.turns and like.turns), some)
    of_axis = functools.partial(run, axis)
    best = best_with_created(of_axis, lambda x: _cost(x.jaxpr, axis), some)
    if not best.turns:
        return best
    some = some and dataclasses.replace(some, cut=best.cut)
    by_rows = run(axis._replace(turns=False), some)
    return min(best, by_rows, key=lambda x: work_of_loops(x.jaxpr, axis))


def _partitioned(
    jaxpr: core.Jaxpr,
    arguments: Sequence[Argument],
    wanted: Sequence[Layout],
    axis: Axis,
    some: Created | None,
) -> Partitioned:
    """The program, with the layouts that are wanted of its first results.

    `some` of what the program creates has rows.
    """
    records, found = Records(), dict[str, Any]()

    def micro_batch(xs: Sequence[Any], index: Any) -> list[Any]:
        mine = rules.RULES._replace(operands=some) if some else rules.RULES
        if isinstance(axis.parts, Uneven):
            index = index + axis.parts.before
        is_uneven = not axis.is_even
        scope = Scope(forbids_collectives=is_uneven, may_count=is_uneven)
        w = Writer(axis, index, mine, records, scope)
        given = [
            Value(x, a.aval, a.layout, 0, a.smooth, a.smooth)
            for x, a in zip(xs, arguments, strict=True)
        ]
        whole = jaxprs.without_constants(jaxpr)
        of_loss = [True, *[False] * (len(whole.outvars) - 1)]
        out = w.interpret(whole, (), given, of_loss if is_uneven else ())
        late, operands = held.late_of(out)
        own = [v.layout if some is None else some.layout(v) for v in out]
        own += [v.layout for v in operands]
        layouts = [*wanted, *own[len(wanted) :]]
        pairs = zip([*out, *operands], layouts, strict=True)
        put = [_put(w, v, layout) for v, layout in pairs]
        values = held.labelled_values(axis, out)
        labels = list(map(held.value_in_words, values))
        found.update(layouts=layouts, late=late, labels=labels)
        return [*put, *(v.x for v in values)]

    types = _types_here(arguments, axis)
    closed = jax.make_jaxpr(micro_batch, axis_env=axis.env)(*types)
    closed = held.labelled_program(closed, found["labels"])
    live, smooth = jaxprs.live(closed.jaxpr), [a.smooth for a in arguments]
    meets = any(axis.is_meeting(e) for e in jaxprs.equations(live))
    return Partitioned(
        live,
        closed.consts,
        found["layouts"],
        records.notes,
        records.promised,
        meets,
        _in_gradient(live, axis, smooth) if meets else None,
        jaxprs.num_readers(live, live.invars[-1]) > 0,
        frozenset() if some is None else some.cut,
        records.turns,
        found["late"],
    )


def _types_here(arguments: Sequence[Argument], axis: Axis) -> tuple[list[Any], Any]:
    """The types of what a micro-batch has of the arguments, and of its index."""
    shapes = [held.local_shape(a.aval.shape, a.layout, axis.parts) for a in arguments]
    pairs = zip(arguments, shapes, strict=True)
    types = [held.type_here(a.aval, shape, None) for a, shape in pairs]
    number = jax.ShapeDtypeStruct((), jnp.int32)
    for x in types:
        number = held.type_here(number, (), x)
    return types, number


def _put(w: Writer, v: Value, layout: Layout) -> Any:
    """A result in a layout; equations for the change have the line of the result."""
    if v.made is None:
        return w.to(v, layout)
    with jaxprs.as_of(v.made[0], source_info_util.current_name_stack()):
        return w.to(v, layout)


def _cost(jaxpr: core.Jaxpr, axis: Axis) -> tuple[int, int]:
    """The number of numbers that a micro-batch computes, and of collectives."""
    meetings = sum(map(axis.is_meeting, jaxprs.equations(jaxpr)))
    return sum(map(jaxprs.computed, jaxpr.eqns)), meetings


def _in_gradient(jaxpr: core.Jaxpr, axis: Axis, smooth: Sequence[bool]) -> Any:
    loss = jaxprs.live(jaxpr.replace(outvars=jaxpr.outvars[:1]))
    params = [x for x, its in zip(loss.invars, smooth, strict=False) if its]
    found = jaxprs.following(loss, params)
    for e in loss.eqns:
        if axis.meets(e) and not found.isdisjoint(jaxprs.variables(e.invars)):
            return next(filter(axis.is_meeting, jaxprs.within(e)))
    return None


def in_any_order(jaxpr: core.Jaxpr, part: Partitioned) -> bool:
    """True if `part`, made of `jaxpr`, is surely the same for rows in any order."""
    every = (e for e in jaxprs.equations(jaxpr) if jaxprs.kind(e) != "call")
    by_place = part.meets or part.reads_index or part.whole or part.cut
    has_rows = any(isinstance(x, Rows) for x in part.layouts)
    return not (by_place or has_rows) and all(
        e.primitive.name in rules.IN_ANY_ORDER for e in every
    )


def work_of_loops(jaxpr: core.Jaxpr, axis: Axis) -> float:
    """About the operations of a micro-batch in all loops, there and back.

    Each loop computes what it reads, but for sums and other values that are smaller
    than what they are computed of: these are kept for later loops.
    """
    meets = [axis.meets(e) for e in jaxpr.eqns]
    level: dict[Any, int] = {}
    for e, its in zip(jaxpr.eqns, meets, strict=True):
        reads = (level.get(x, 0) for x in jaxprs.variables(e.invars))
        level |= dict.fromkeys(e.outvars, max(reads, default=0) + its)
    end = max(level.values(), default=0)
    loops = dict.fromkeys(jaxprs.variables(jaxpr.outvars), 1 << end)
    total = 0.0
    for e, its in zip(jaxpr.eqns[::-1], meets[::-1], strict=True):
        runs = functools.reduce(operator.or_, (loops.get(x, 0) for x in e.outvars), 0)
        if runs and (its or _is_less(e)):
            runs = 1 << level[e.outvars[0]] - its
        again = linear.THERE_AND_BACK * runs.bit_count() + (runs not in (0, 1 << end))
        total += jaxprs.work(e) * again
        for x in jaxprs.variables(e.invars):
            loops[x] = loops.get(x, 0) | runs
    return total


def _is_less(e: core.JaxprEqn) -> bool:
    """True if the results have half the numbers of an operand, or fewer."""
    ins: list[Any] = [x.aval for x in e.invars]
    results = sum(jaxprs.numbers(getattr(x.aval, "shape", ())) for x in e.outvars)
    largest = max((jaxprs.numbers(getattr(x, "shape", ())) for x in ins), default=0)
    return 2 * results <= largest
