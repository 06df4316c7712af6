"""The program of a micro-batch, from that of the whole batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from ga_optax._partition import cutting, table
from ga_optax._partition.values import WHOLE, Layout, Value, local_shape
from ga_optax._partition.writer import Axis, Note, Writer
from ga_optax._passes import ir


class Partitioned(NamedTuple):
    """A program of a micro-batch.

    Attributes:
      jaxpr: the program, with collectives over the axis.
      consts: the values of its constants.
      layouts: those of its results.
      whole: what is computed whole because nothing better is known of it.
      failures: of rules; what they were for is computed whole.
      meets: whether rows meet, in a collective over the axis.
      reads_index: whether it reads which micro-batch it is.
      bends: whether a backward rule in it is not linear in the cotangent.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    layouts: list[Layout]
    whole: list[Note]
    meets: bool
    reads_index: bool
    bends: bool
    failures: list[Exception]

    def alone(self, index: Any, args: Sequence[Any]) -> list[Any]:
        """The results in a micro-batch, by its index, if rows do not meet."""

        def rule(e: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
            return [index] if e.primitive.name == _INDEX else None

        return ir.evaluate(ir.Program(self.jaxpr, self.consts), args, rule)


_INDEX = "axis_index"


class Argument(NamedTuple):
    """An argument: its type, its layout, and whether it is differentiated."""

    aval: Any
    layout: Layout
    smooth: bool = False


def partition(
    jaxpr: core.Jaxpr,
    arguments: Sequence[Argument],
    axis: Axis,
    due: Sequence[Layout] | None = None,
) -> Partitioned:
    """Partitions a program, whose constants are its first arguments.

    Its results are in the layouts that are due, or in those that they come in.
    """
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
        layouts = [v.layout for v in out] if due is None else list(due)
        found.update(layouts=layouts, notes=w.notes, failures=w.failures)
        return list(map(w.to, out, layouts))

    types = [_type_here(a, axis.size) for a in arguments]
    closed: Any = jax.make_jaxpr(run, axis_env=[(axis.name, axis.size)])(types)
    live = ir.live(closed.jaxpr)
    every = list(ir.equations(live))
    names = {e.primitive.name for e in every if axis.name in ir.axes_of(e)}
    return Partitioned(
        live,
        closed.consts,
        found["layouts"],
        found["notes"],
        bool(names - {_INDEX}),
        _INDEX in names,
        any(ir.is_mark(e, axis.name) for e in every),
        found["failures"],
    )


def _type_here(a: Argument, size: int) -> jax.ShapeDtypeStruct:
    """The type of what a micro-batch holds of an argument."""
    shape, dtype = local_shape(a.aval.shape, a.layout, size), a.aval.dtype
    sharding = getattr(a.aval, "sharding", None)
    # On axes of explicit type, types say how what is whole is sharded.
    if a.layout != WHOLE or sharding is None or not any(sharding.spec):
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
