"""The program of a micro-batch, from that of the whole batch."""

import itertools
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
      layouts: those of its results. There may be one more: the first again, whole, if
        what micro-batches add to it may add up to NaN, see `Value`.
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
        scaled = [i for i, v in enumerate(out) if v.scaled and due is None]
        found.update(layouts=layouts, notes=w.notes, failures=w.failures, scaled=scaled)
        pairs = zip([*out, *out[:1]], layouts, strict=False)
        return [*itertools.starmap(w.to, pairs), *(w.whole(out[i]) for i in scaled)]

    types = [_type_here(a, axis.size) for a in arguments]
    closed: Any = jax.make_jaxpr(run, axis_env=[(axis.name, axis.size)])(types)
    layouts, outvars = found["layouts"], closed.jaxpr.outvars
    live = ir.live(closed.jaxpr.replace(outvars=outvars[: len(layouts)]))
    if _names(live, axis) - {_INDEX}:
        outvars, layouts = _exact(outvars, layouts, found["scaled"])
        live = ir.live(closed.jaxpr.replace(outvars=outvars))
    names = _names(live, axis)
    return Partitioned(
        live,
        closed.consts,
        layouts,
        found["notes"],
        bool(names - {_INDEX}),
        _INDEX in names,
        any(ir.is_mark(e, axis.name) for e in ir.equations(live)),
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


def _names(jaxpr: core.Jaxpr, axis: Axis) -> set[str]:
    """The primitives that refer to the axis."""
    every = ir.equations(jaxpr)
    return {e.primitive.name for e in every if axis.name in ir.axes_of(e)}
