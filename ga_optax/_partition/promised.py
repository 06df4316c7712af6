"""What the user says of rows: functions in `rowwise`, primitives that are registered.

Both say along which dimensions something can be split, and nothing else of what it
does. It is called with the rows of a micro-batch, and what it returns is checked.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from ga_optax._partition import custom, factors
from ga_optax._partition.notes import note_of
from ga_optax._partition.values import Results, Value, types_of
from ga_optax._partition.writer import Writer
from ga_optax._passes import ir, places, primitives
from ga_optax._passes.ir import is_inexact
from ga_optax._passes.primitives import Row, Way
from ga_optax._passes.rowwise import NAME, bound


def rowwise(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """A call of a function of the user's, of which each row needs its own alone."""
    promise, out = e.params["promise"], None
    if not any(map(ir.is_reference, e.invars)):
        is_open = not w.scope.partitioned_again
        fun = promise.fun if is_open else lambda *xs: bound(promise, xs)
        out = _split(w, e, vs, promise.ways, fun)
    if out is None:
        return w.noted(_name(e), e, vs)
    if any(v.smooth for v in vs) and custom.has_nonlinear_rule(w, e):
        # Its cotangent must be complete, see `custom`.
        name = w.axis.name
        return [(checkpoint_name(x, name) if is_inexact(x) else x, of) for x, of in out]
    return out


def registered(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """A primitive that has no rule of ours; None unless one is registered."""
    if e.primitive not in _registered:
        return None
    row = _registered[e.primitive]
    shapes = *(v.shape for v in vs), *(x.shape for x in types_of(e))
    ranks = list(map(len, shapes))
    dims = primitives.named(str(row.dims))
    if ranks != [len(names) for side in dims for names in side]:
        return _warn(e, f"has operands and results of {ranks} dimensions")
    ways = [way for way in primitives.ways(row, e) if None not in way.outs]
    return _split(w, e, vs, ways, lambda *xs: w.results(e, xs))


def _split(
    w: Writer,
    e: core.JaxprEqn,
    vs: list[Value],
    ways: Sequence[Way],
    fun: Callable[..., Any],
) -> Results:
    """The results of a promise, which is noted, or warned of if it does not hold."""
    try:
        out = factors.split(w, e, vs, ways, lambda _, *xs: fun(*xs))
    except factors.Refused as error:
        return _warn(e, str(error))
    if out:
        size = sum(ir.numbers(x.shape) for x in types_of(e))
        w.records.promised.append(note_of(e, size, _name(e)))
    return out


def _name(e: core.JaxprEqn) -> str:
    name = e.primitive.name
    return f"{name} of {e.params['promise'].name}" if name == NAME else name


def _warn(e: core.JaxprEqn, what: str) -> None:
    warnings.warn(
        f"{_name(e)} must take any number of rows, and return as many, but at "
        f"{places.line_of(e.source_info)} it {what}, with the rows of a micro-batch. "
        "It is computed whole in each micro-batch instead: the result is right, but "
        "takes more memory. Give None in in_axes to what has no rows, or correct what "
        "is said of its dimensions.",
        stacklevel=2,
    )


# -- Primitives of others --------------------------------------------------------------

_registered: dict[core.Primitive, Row] = {}


def register_primitive(primitive: core.Primitive, dimensions: str) -> None:
    """Says along which dimensions a primitive can be computed in parts.

    >>> import ga_optax as ga
    >>> from jax.extend.core import Primitive
    >>> ga.register_primitive(Primitive("norm_and_scale"), "b t _, _ -> b t _")

    For a primitive of your own, or of a package, of which nothing is known: it is bound
    with the rows of a micro-batch, and the same parameters. Its rules for derivatives
    stay what they are. If the primitive of the derivative is another one, register that
    as well. Calls that share a primitive, such as those of `jax.ffi` and of
    `jax.pure_callback`, take `rowwise`.

    Args:
      primitive: the primitive.
      dimensions: a name for each dimension of its operands, `->`, and those of its
        results. A name that is in operands and in all results promises that a part
        along it needs, of the operands that have it, the same part alone (and all of
        the others). `_` is a dimension that is needed whole; so is a name that some
        result does not have.

    Raises:
      TypeError: if it is no primitive.
      ValueError: if the dimensions cannot be read, or nothing can be split.
    """
    if not isinstance(primitive, core.Primitive):
        raise TypeError(
            "register_primitive must have a jax.extend.core.Primitive, but it is "
            f"{primitive!r}. Pass the primitive that a program shows, and wrap any "
            "other function in ga_optax.rowwise."
        )
    sides = [[x.split() for x in side.split(",")] for side in dimensions.split("->")]
    wrong = [
        x
        for side in sides
        for names in side
        for x in names
        if not x.isidentifier() or (x != "_" and names.count(x) > 1)
    ]
    kept = len(sides) == 2 and any(
        None not in way.outs and any(d is not None for d in way.ins)
        for way in primitives.ways_of(primitives.named(dimensions))
    )
    if wrong or not kept:
        why = f"{wrong[0]!r} is no name, or twice in one of them" if wrong else ""
        why = why or "no name is in an operand and in all results"
        raise ValueError(
            "dimensions must name those of operands -> results, with at least one in "
            f"both, but they are {dimensions!r}: {why}. Write them as in "
            "'b t _, _ -> b t _', where _ is a dimension that is needed whole."
        )
    _registered[primitive] = Row(dimensions)
