"""The program of a micro-batch, from that of the whole batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from ga_optax._partition import created, labels, randoms, table
from ga_optax._partition.axis import Axis
from ga_optax._partition.notes import Drawn, Failure, Note, Records
from ga_optax._partition.values import (
    WHOLE,
    Layout,
    Rows,
    Uneven,
    Value,
    local_shape,
    type_here,
)
from ga_optax._partition.writer import Scope, Writer
from ga_optax._passes import interpret, read, rewrite


class Partitioned(NamedTuple):
    """A program of a micro-batch.

    Attributes:
      jaxpr: the program, with collectives over the axis. Its last argument is the index
        of the micro-batch.
      consts: the values of the constants.
      layouts: the layouts of the results. The first result may come once more, whole,
        if parts of it may add up to NaN, see `Value`.
      whole: equations without a rule, which are computed whole.
      drawn: random draws of each micro-batch: on some platforms other draws of the same
        distribution than those of the whole batch.
      promised: equations that are split because of a promise of the user.
      failures: errors of rules; the equations are computed whole.
      cut: the arrays that the program creates and that have rows, see `created`.
      meets: True if rows meet, in a collective over the axis.
      in_gradient: the first meeting on the way from the parameters to the loss; None if
        rows meet in numbers without parameters alone, such as counts.
      reads_index: True if the program reads the index of the micro-batch.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    layouts: list[Layout]
    whole: list[Note]
    drawn: list[Note]
    promised: list[Note]
    meets: bool
    in_gradient: core.JaxprEqn | None
    reads_index: bool
    failures: list[Failure]
    cut: frozenset[created.Root] = frozenset()


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
      like: a program whose results have the same layouts. If rows are uneven, what it
        creates has rows in the same places. If None, each result but the first stays
        in the layout in which it is computed, and those are whole whose parts may add
        up to NaN.
    """
    split = ((a.layout, a.aval) for a in arguments if isinstance(a.layout, Rows))
    some = next((created.Created(x, of.shape[x.dim]) for x, of in split), None)
    layouts = None if like is None else like.layouts
    whole = _Whole(jaxpr, arguments, axis, first, layouts)
    if like is not None and some is not None and not axis.is_even:
        return whole.partitioned(dataclasses.replace(some, cut=like.cut))
    return created.best(whole.partitioned, lambda x: _cost(x.jaxpr, axis), some)


class _Whole(NamedTuple):
    """A program of the whole batch, see `partition`."""

    jaxpr: core.Jaxpr
    arguments: Sequence[Argument]
    axis: Axis
    first: Layout | None
    layouts: Sequence[Layout] | None

    def partitioned(self, some: created.Created | None) -> Partitioned:
        """The program, with rows of some of what it creates.

        All random numbers are drawn whole if not all readers would read the same.
        """
        closed, found = self._traced(some)
        part = _live(closed, found, self.axis, [a.smooth for a in self.arguments])
        if randoms.differ(found["records"].notes, part.jaxpr):
            whole = self._replace(axis=self.axis._replace(draws_whole=True))
            return whole.partitioned(some)
        return part._replace(cut=frozenset() if some is None else some.cut)

    def _traced(self, some: created.Created | None) -> tuple[Any, dict[str, Any]]:
        """The program, and what was recorded; `some` of what it creates has rows."""
        jaxpr, axis, found = self.jaxpr, self.axis, {}

        def run(xs: Sequence[Any], index: Any) -> list[Any]:
            rules = table.RULES._replace(operands=some) if some else table.RULES
            if isinstance(axis.parts, Uneven):
                index = index + axis.parts.before
            scope = Scope(forbids_collectives=not axis.is_even)
            w = Writer(axis, index, rules, Records(), scope)
            given = [
                Value(x, a.aval, a.layout, 0, a.smooth, a.smooth)
                for x, a in zip(xs, self.arguments, strict=True)
            ]
            out = w.interpret(rewrite.without_constants(jaxpr), (), given)
            layouts, scaled = self.layouts, list[int]()
            if layouts is None:
                own = [v.layout if some is None else some.layout(v) for v in out]
                layouts = [self.first or own[0], *own[1:]]
                scaled = [i for i, v in enumerate(out) if v.scaled and axis.is_even]
            # Not the writer, which holds what is traced.
            found.update(layouts=layouts, scaled=scaled, records=w.records)
            pairs = zip([*out, *out[:1]], layouts, strict=False)
            put = [_put(w, v, layout) for v, layout in pairs]
            values = labels.values_of(axis, out)
            found.update(labels=list(map(labels.in_words, values)))
            return [*put, *(w.whole(out[i]) for i in scaled), *(v.x for v in values)]

        types = [
            type_here(a.aval, local_shape(a.aval.shape, a.layout, axis.parts), None)
            for a in self.arguments
        ]
        number = jax.ShapeDtypeStruct((), jnp.int32)
        for x in types:
            number = type_here(number, (), x)
        trace = jax.make_jaxpr(run, axis_env=axis.env)
        closed = trace(types, number)
        return labels.labelled(closed, found["labels"]), found


def _live(
    closed: Any, found: dict[str, Any], axis: Axis, smooth: list[bool]
) -> Partitioned:
    """Such a program without what nobody reads."""
    layouts, outvars = found["layouts"], closed.jaxpr.outvars
    records: Records = found["records"]
    live = read.live(closed.jaxpr.replace(outvars=outvars[: len(layouts)]))
    if _meets(live, axis):
        outvars, layouts = _exact(outvars, layouts, found["scaled"])
        live = read.live(closed.jaxpr.replace(outvars=outvars))
    return Partitioned(
        live,
        closed.consts,
        layouts,
        [x for x in records.notes if not isinstance(x, Drawn)],
        [Note(*x[:3]) for x in records.notes if isinstance(x, Drawn)],
        records.promised,
        _meets(live, axis),
        _in_gradient(live, axis, smooth),
        read.num_readers(live, live.invars[-1]) > 0,
        records.failures,
    )


def _put(w: Writer, v: Value, layout: Layout) -> Any:
    """A result in a layout; equations for the change have the line of the result."""
    if v.made is None:
        return w.to(v, layout)
    with interpret.as_of(v.made[0], source_info_util.current_name_stack()):
        return w.to(v, layout)


def _cost(jaxpr: core.Jaxpr, axis: Axis) -> tuple[int, int]:
    """The number of numbers that a micro-batch computes, and of collectives."""
    meetings = sum(map(axis.is_meeting, read.equations(jaxpr)))
    return sum(map(read.computed, jaxpr.eqns)), meetings


def _exact(
    outvars: list[Any], layouts: list[Layout], scaled: list[int]
) -> tuple[list[Any], list[Layout]]:
    """The results with those whole whose parts may add up to NaN, see `Partitioned`.

    `outvars` ends in those.
    """
    exact = dict(zip(scaled, outvars[len(layouts) :], strict=True))
    chosen = [
        (exact[i], WHOLE) if i and i in exact else pair
        for i, pair in enumerate(zip(outvars, layouts, strict=False))
    ]
    if 0 in exact:  # It has a derivative, so micro-batches add to it, too.
        chosen.append((exact[0], WHOLE))
    return [x for x, _ in chosen], [layout for _, layout in chosen]


def _in_gradient(jaxpr: core.Jaxpr, axis: Axis, smooth: Sequence[bool]) -> Any:
    loss = read.live(jaxpr.replace(outvars=jaxpr.outvars[:1]))
    params = [x for x, its in zip(loss.invars, smooth, strict=False) if its]
    found = read.following(loss, params)
    for e in loss.eqns:
        if axis.meets(e) and not found.isdisjoint(read.variables(e.invars)):
            return next(filter(axis.is_meeting, read.within(e)))
    return None


def _meets(jaxpr: core.Jaxpr, axis: Axis) -> bool:
    """True if there is a collective over the axis, or what stands for one."""
    return any(axis.is_meeting(e) for e in read.equations(jaxpr))
