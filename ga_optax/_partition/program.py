"""The program of a micro-batch, from that of the whole batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ga_optax._partition import cutting, table
from ga_optax._partition.values import Layout, Value, local_shape
from ga_optax._partition.writer import Axis, Note, Writer
from ga_optax._passes import ir


class Meeting(NamedTuple):
    """A collective: where rows need one another.

    Attributes:
      name: the collective.
      aval: the type of what a micro-batch gives.
      line: the line of the user's code.
      rows: the axis that has the rows, if all of them are gathered.
    """

    name: str
    aval: Any
    line: str
    rows: int | None = None


class Partitioned(NamedTuple):
    """A program of a micro-batch.

    Attributes:
      jaxpr: the program, with collectives over the axis.
      consts: the values of its constants.
      layouts: those of its results.
      meetings: its collectives.
      whole: what is computed whole because nothing better is known of it.
      failures: of rules; what they were for is computed whole.
      uses_axis: whether it must run with the axis bound.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    layouts: list[Layout]
    meetings: list[Meeting]
    whole: list[Note]
    uses_axis: bool
    failures: list[Exception]


class Argument(NamedTuple):
    """An argument: its type, its layout, and whether it is differentiated."""

    aval: Any
    layout: Layout
    smooth: bool = False


def partition(
    jaxpr: core.Jaxpr, arguments: Sequence[Argument], axis: Axis
) -> Partitioned:
    """Partitions a program, whose constants are its first arguments."""
    found: dict[str, Any] = {}

    def run(xs: Sequence[Any]) -> list[Any]:
        index = jax.lax.axis_index(axis.name)
        w = Writer(axis, index, table.RULES, cutting.recut)
        given = [
            Value(x, a.aval, a.layout, 0, a.smooth, a.smooth)
            for x, a in zip(xs, arguments, strict=True)
        ]
        num_consts = len(jaxpr.constvars)
        consts = given[:num_consts]
        out = w.interpret(jaxpr, [v.x for v in consts], given[num_consts:])
        found.update(
            layouts=[v.layout for v in out], notes=w.notes, failures=w.failures
        )
        return [v.x for v in out]

    types = [
        jax.ShapeDtypeStruct(
            local_shape(a.aval.shape, a.layout, axis.size), a.aval.dtype
        )
        for a in arguments
    ]
    closed: Any = jax.make_jaxpr(run, axis_env=[(axis.name, axis.size)])(types)
    live = _without_dead(closed.jaxpr, axis.name)
    every = list(ir.equations(live))
    meetings = [
        Meeting(e.primitive.name, e.invars[0].aval, ir.line_of(e), _rows_of(e))
        for e in every
        if is_over(e, axis.name) and e.primitive.name != "axis_index"
    ]
    uses = bool(meetings) or any(is_over(e, axis.name) for e in every)
    return Partitioned(
        live,
        closed.consts,
        found["layouts"],
        meetings,
        found["notes"],
        uses,
        found["failures"],
    )


def is_over(e: core.JaxprEqn, axis: str) -> bool:
    keys = ("axes", "axis_name")
    return axis in jax.tree.leaves([e.params.get(key) for key in keys])


def _rows_of(e: core.JaxprEqn) -> int | None:
    return e.params["all_gather_dimension"] if e.params.get("tiled") else None


def _without_dead(jaxpr: core.Jaxpr, axis: str) -> core.Jaxpr:
    """The program without equations whose results nobody reads."""

    def acts(e: core.JaxprEqn) -> bool:
        return any(getattr(effect, "name", "") != axis for effect in e.effects)

    equations, _ = ir.needed(jaxpr, jaxpr.outvars, runs=acts)
    return jaxpr.replace(eqns=equations)
