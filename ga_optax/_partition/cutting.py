"""A value's rows, computed from the rows of what it is made of.

What comes from no leaf of the batch is whole: `eye(n)`, `arange(n)`, a dropout mask.
Where it meets rows, only its own part is computed. And a product of rows with rows is
turned: its columns are split where its rows were.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._partition import elementwise, nested, products, randoms, shapes
from ga_optax._partition.values import (
    Rows,
    RowsMeet,
    Value,
    can_split,
    local_shape,
    types_of,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes import ir, references


def recut(w: Writer, v: Value, rows: Rows) -> Any:
    """The rows of a value, or None if nothing better is known than to cut it.

    Raises:
      RowsMeet: if it would have to gather more than the writer allows.
    """
    if v.made is None or not can_split(v.shape, rows, w.axis.size):
        return None
    e, vs, i = v.made
    if v.is_whole and not all(operand.is_whole for operand in vs):
        return None
    rule = None if references.is_group(e) else _RULES.get(e.primitive.name)
    x = rule(w, e, vs, rows) if rule and i == 0 else None
    due = local_shape(v.shape, rows, w.axis.size)
    return x if x is None or jnp.shape(x) == due else None


def _elementwise(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    shape = types_of(e)[0].shape
    casts_bits = e.primitive.name == "bitcast_convert_type"
    if len(e.outvars) > 1 or (casts_bits and shape != vs[0].shape):
        return None
    return w.run(e, [elementwise.fitted(w, v, rows, shape) for v in vs])


def _iota(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    aval: Any = types_of(e)[0]
    return randoms.positions(w, aval.shape, e.params["dimension"], rows).astype(
        aval.dtype
    )


def _broadcast(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    v, shape = vs[0], e.params["shape"]
    where = list(e.params["broadcast_dimensions"])
    x = None
    if rows.dim in where:
        d = where.index(rows.dim)
        if v.shape[d] == shape[rows.dim]:
            x = w.part(v, rows.at(d))
    x = w.whole(v) if x is None else x
    return jax.lax.broadcast_in_dim(x, local_shape(shape, rows, w.axis.size), where)


def _reshape(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    v, shape, parts = vs[0], types_of(e)[0].shape, w.axis.size
    before = shapes.reshaped(shape, v.shape, rows, parts)
    if before is None or shapes.reshaped(v.shape, shape, before, parts) != rows:
        return None
    return w.part(v, before).reshape(local_shape(shape, rows, parts))


def _transpose(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    return w.run(e, [w.part(vs[0], rows.at(e.params["permutation"][rows.dim]))])


def _squeeze(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    gone = [d % len(vs[0].shape) for d in e.params["dimensions"]]
    left = [d for d in range(len(vs[0].shape)) if d not in gone]
    return w.run(e, [w.part(vs[0], rows.at(left[rows.dim]))])


def _reduce(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    axes = e.params["axes"]
    left = [d for d in range(len(vs[0].shape)) if d not in axes]
    if w.limit is None:
        return None  # a reduction is there already
    return w.run(e, [w.part(vs[0], rows.at(left[rows.dim]))])


def _product(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    if w.limit is None:
        return None
    out = products.recut_dot(w, e, vs, rows)
    if out is None:
        raise RowsMeet
    return out


def _concatenate(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    if rows.dim == e.params["dimension"]:
        return None
    return w.run(e, [w.part(v, rows) for v in vs])


def _call(w: Writer, e: core.JaxprEqn, vs: list[Value], rows: Rows) -> Any:
    """Of a jitted function that draws: as another one, the same for equal calls."""
    [program], source, said = ir.inner(e), w.source, len(w.notes)
    w.source = e.source_info
    try:
        run = nested.inner(w, program, vs, [rows])
        if len(w.notes) > said:  # with the names of the program around it
            del w.notes[said:]
            [v] = w.interpret(program.jaxpr, program.consts, vs)
            return w.part(v, rows)
    finally:
        w.source = source
    call = w.once(lambda: jax.jit(run.__call__), [run.closed], "call")
    [x] = call(nested.index_for(w, run), [w.whole(v) for v in vs])
    w.level = max(w.level, *run.levels)
    return x


def draws(w: Writer, e: core.JaxprEqn) -> bool:
    """Whether a jitted function draws random numbers, and rows of it can be cut."""
    [program] = ir.inner(e)

    def found() -> bool:
        names = [x.primitive.name for x in ir.equations(program.jaxpr)]
        return "random_bits" in names and OPEN.issuperset(names)

    return len(e.outvars) == 1 and w.once(found, [program.jaxpr], "draws")


# Equations that are gone back through wherever rows of what they compute are wanted.
_OPEN: dict[str, Any] = {
    **dict.fromkeys(elementwise.NAMES - {"optimization_barrier"}, _elementwise),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "concatenate": _concatenate,
    "random_bits": randoms.recut_bits,
    "random_split": randoms.recut_split,
    **dict.fromkeys((name for name, kind in ir.CALLS.items() if kind == "call"), _call),
    **dict.fromkeys(
        ("random_wrap", "random_unwrap", "random_fold_in", "random_seed"),
        randoms.recut_keys,
    ),
}
OPEN = frozenset(_OPEN)


def is_open(e: core.JaxprEqn) -> bool:
    """Whether an equation is gone back through wherever rows of it are wanted."""
    return e.primitive.name in OPEN and not references.is_group(e)


_RULES = _OPEN | {
    "dot_general": _product,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduce),
}
