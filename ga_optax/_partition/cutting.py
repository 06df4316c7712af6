"""The rows of a whole value, computed from rows of the operands.

A value that depends on no leaf of the batch is whole: `eye(n)`, `arange(n)`, a dropout
mask. In an equation with rows a micro-batch computes the part that it needs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.random import threefry2x32_p

from ga_optax._partition import factors, nested, randoms, shapes
from ga_optax._partition.values import (
    Rows,
    Value,
    can_split,
    local_shape,
    types_of,
)
from ga_optax._partition.writer import Same, Writer
from ga_optax._passes import primitives, read, references


def recut(w: Writer, v: Value, rows: Rows) -> Any:
    """The rows of a value, or None if nothing better is known than to cut it."""
    if v.made is None or not can_split(v.shape, rows, w.axis.parts):
        return None
    e, vs, i = v.made
    if references.is_group(e) or not all(operand.is_whole for operand in vs):
        return None
    rule = _OPEN.get(e.primitive.name)
    x = rule(w, e, vs, rows) if rule and i == 0 else None
    if e.primitive is threefry2x32_p:
        x = _bits(w, e, vs, rows)[i]
    due = local_shape(v.shape, rows, w.axis.parts)
    return x if x is None or jnp.shape(x) == due else None


def _bits(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> list[Any]:
    """Pairs of words for pairs of counts, as a draw is that was cut before."""
    ways = primitives.factors_of(primitives.Entry("..."), e)
    way = next(x for x in ways if x.outs[0] == rows.dim)
    xs = w.parts(vs, rows, way.ins)
    return w.once(("bits", rows, *map(Same, xs)), lambda: w.results(e, xs))


def _iota(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    aval: Any = types_of(e)[0]
    return randoms.positions(w, aval.shape, e.params["dimension"], rows).astype(
        aval.dtype
    )


def _jitted(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """Of a jitted function that draws: as another one, the same for equal calls."""
    [program], here, notes = read.inner(e), w.at(source=e.source_info), w.records.notes
    before = len(notes)
    run = nested.inner(here, program, vs, [rows])
    if len(notes) > before:  # Notes need the names of the program around it.
        del notes[before:]
        [v] = here.interpret(program.jaxpr, program.consts, vs)
        return w.part(v, rows)
    call = w.once(("call", Same(run.closed)), lambda: jax.jit(run.__call__))
    [x] = call(nested.index_for(w, run), [w.whole(v) for v in vs])
    w.level = max(w.level, *run.levels)
    return x


def draws(w: Writer, e: core.JaxprEqn) -> bool:
    """True if a jitted function draws random numbers, and its rows can be cut."""
    [program] = read.inner(e)

    def found() -> bool:
        names = [x.primitive.name for x in read.equations(program.jaxpr)]
        return "random_bits" in names and OPEN.issuperset(names)

    return len(e.outvars) == 1 and w.once(("draws", Same(program.jaxpr)), found)


# Equations that are gone back through wherever rows of what they compute are wanted.
_OPEN: dict[str, Any] = {
    **{name: factors.wanted for name, row in primitives.TABLE.items() if row.is_open},
    "iota": _iota,
    "reshape": shapes.reshape_wanted,
    "random_bits": randoms.recut_bits,
    "random_split": randoms.recut_split,
    **{name: _jitted for name, row in primitives.TABLE.items() if row.kind == "call"},
}
OPEN = frozenset(_OPEN)


def is_open(e: core.JaxprEqn) -> bool:
    """True if rows of the result are computed from rows of the operands."""
    return e.primitive.name in OPEN and not references.is_group(e)
