"""Calls with a record of how they split (`Split`): one body, a reader of each kind.

    rowwise                functions whose rows do not need each other, by promise
    custom_partitioning    calls with a rule for shardings
    cudnn_attention        calls of a known kernel
    pallas_call            kernels whose grid goes over the rows, see `kernels`

A reader returns records. The body chooses one of the ways in them, calls the function
with the rows of a micro-batch, and checks the types of the results.

The rule of `custom_partitioning` names a *factor* for each dimension. A factor that is
only passed through, from operands to each result, may be split over devices; so it may
over micro-batches, which run what one of k devices would.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ga_optax._partition import custom, factors
from ga_optax._partition.notes import note_of
from ga_optax._partition.values import PARTIAL, Results, Value, local_shape, types_of
from ga_optax._partition.writer import Writer
from ga_optax._passes import interpret, notation, places, read
from ga_optax._passes.notation import Factor, Split
from ga_optax._passes.rowwise import bound

# Of an equation, and rows in so many segments (see `Rows`), how it splits along them.
Reader = Callable[[Writer, core.JaxprEqn, int], Sequence[Split]]


def called(w: Writer, e: core.JaxprEqn, way: Factor, **params: Any) -> Split:
    """A call that splits one way: the same equation, with some other parameters."""
    return Split((way,), lambda *xs: w.results(e, xs, **params))


def split(reads: Reader, w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """The results of an equation in the best way to split it; None if there is none."""
    records = {n: reads(w, e, n) for n in {v.rows.segments for v in vs if v.rows}}

    def ways(rows: Any) -> list[Factor]:
        return [way for record in records[rows.segments] for way in record.factors]

    if (choice := factors.chosen(vs, ways)) is None:
        return None
    rows, way = choice
    record = next(x for x in records[rows.segments] if way in x.factors)
    xs = w.parts(vs, rows, way.ins)
    layouts = [PARTIAL if d is None else rows.at(d) for d in way.outs]
    pairs = zip(types_of(e), layouts, strict=True)
    due = [(local_shape(x.shape, layout, w.axis.parts), x.dtype) for x, layout in pairs]
    try:
        program: Any = jax.make_jaxpr(record.fun)(*xs)
        types = [(x.shape, x.dtype) for x in program.out_avals]
        why = "" if types == due else f"returned {types} and not {due}"
    except Exception as error:  # Any: the code is the user's.
        program, why = None, f"raised {type(error).__name__}: {error}"
    if record.name and why:
        _warn(e, why)
    elif record.name:
        size = sum(read.numbers(x.shape) for x in types_of(e))
        w.records.promised.append(note_of(e, size, _name(e)))
    return (
        None if why else list(zip(interpret.results(program, xs), layouts, strict=True))
    )


# -- What the user promises ------------------------------------------------------------


def rowwise(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """A call of a function of the user whose rows do not need each other."""
    if (out := split(_promised, w, e, vs)) is None:
        return w.noted(_name(e), e, vs)
    if not any(v.smooth for v in vs) or not custom.has_nonlinear_rule(w, e):
        return out
    # Its cotangent must be complete, see `custom`.
    name = w.axis.name
    return [(checkpoint_name(x, name) if read.is_inexact(x) else x, y) for x, y in out]


def _promised(w: Writer, e: core.JaxprEqn, _: int) -> Sequence[Split]:
    promise = e.params["promise"]
    if w.scope.partitioned_again:  # a `microbatch` in the loss partitions it once more
        promise = promise._replace(fun=functools.partial(bound, promise))
    return [promise]


def _name(e: core.JaxprEqn) -> str:
    return f"rowwise of {e.params['promise'].name}"


def _warn(e: core.JaxprEqn, why: str) -> None:
    warnings.warn(
        f"{_name(e)} must take any number of rows, and return as many, but at "
        f"{places.line_of(e.source_info)} it {why}, with the rows of a micro-batch. "
        "All rows are computed in each micro-batch instead: the result is right, but "
        "takes more memory. Give None in in_axes to what has no rows, or write the "
        "function for any number of rows.",
        stacklevel=2,
    )


# -- Rules for shardings ---------------------------------------------------------------


def custom_partitioning(w: Writer, e: Any, _: int) -> Sequence[Split]:
    """A way to split for each factor that is only passed through."""
    rule = e.params["sharding_rule"]
    if not hasattr(rule, "operand_mappings"):
        return []  # none, or a function of MLIR's types
    mappings = *rule.operand_mappings, *rule.result_mappings
    shapes = [x.aval.shape for x in (*e.invars, *e.outvars)]
    names = list(map(_names, mappings, map(len, shapes)))
    if list(map(len, names)) != list(map(len, shapes)):
        return []  # a rule for something else
    every = [x for side in names for x in side]
    whole = {
        *rule.reduction_factors,
        *rule.need_replication_factors,
        *rule.permutation_factors,
        *(y for x in every if isinstance(x, tuple) for y in (x, *x)),
        *(x for side in names for x in side if side.count(x) > 1),
    }
    # Of another size it would be another factor.
    pairs = map(zip, names, shapes)
    dims = [[None if x in whole else (x, n) for x, n in each] for each in pairs]
    ways = notation.factors_of_dims((dims[: len(e.invars)], dims[len(e.invars) :]))
    kept = [way for way in ways if None not in way.outs]
    return [Split((way,), functools.partial(_on_device, w, e, way)) for way in kept]


def _names(mapping: Any, rank: int) -> list[Any]:
    """The factor of each dimension, a tuple if it has several.

    The factors of an ellipsis are the leading ones.
    """
    first, *rest = [*mapping] or [None]
    if not (isinstance(first, str) and first.startswith("…")):
        return list(mapping)
    group = first[1:] or "0"
    return [*(f"…{group} {i}" for i in range(rank - len(rest))), *rest]


_AXIS = "parts of ga_optax"  # of a device; no axis of the user's


def _on_device(w: Writer, e: core.JaxprEqn, way: Factor, *xs: Any) -> list[Any]:
    """The results of the program that a rule has for one of several devices.

    Raises:
      ValueError: if the rule asks for other shardings, or the program has constants.
    """
    p, mesh = e.params, AbstractMesh((w.axis.size,), (_AXIS,))

    def typed(x: Any, d: int | None) -> Any:
        spec = PartitionSpec(*(_AXIS if i == d else None for i in range(x.aval.ndim)))
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=sharding)

    ins = jax.tree.unflatten(p["in_tree"], map(typed, e.invars, way.ins))
    outs = jax.tree.unflatten(p["out_tree"], map(typed, e.outvars, way.outs))
    _, lower, *shardings = p["partition"](*p["static_args"], mesh, ins, outs)
    pairs = zip(jax.tree.leaves(shardings), jax.tree.leaves((outs, ins)), strict=True)
    if any(s.shard_shape(x.shape) != x.sharding.shard_shape(x.shape) for s, x in pairs):
        raise ValueError("other shardings are needed")

    def call(*xs: Any) -> list[Any]:
        return jax.tree.leaves(lower(*jax.tree.unflatten(p["in_tree"], xs)))

    program: Any = jax.make_jaxpr(call)(*xs)  # raises if it communicates
    if program.consts:
        raise ValueError("it closes over something")
    return w.results(e, xs, call=program)


# -- Attention of cuDNN ----------------------------------------------------------------

# The operands of `jax.nn.dot_product_attention(implementation="cudnn")` are queries,
# keys, values, a bias, the lengths of queries and keys, offsets of several sequences in
# one row (two), and tables of pages (two). Backward there are three more.
_BIAS, _PACKED, _FORWARD, _BACKWARD = 3, slice(6, 10), 10, 13


def cudnn_attention(w: Writer, e: Any, _: int) -> Sequence[Split]:
    """Rows are along dimension 0 of all operands; a bias may be the same for all.

    Then its gradient is a sum.
    """
    p, is_backward = e.params, "bwd" in e.primitive.name
    given = [x.aval.shape[0] for x in e.invars]  # 0 of what there is none of
    dims = tuple(0 if n == given[0] > 1 else None for n in given)
    whole = {i for i, n in enumerate(given) if n and dims[i] is None}
    if (
        len(dims) != (_BACKWARD if is_backward else _FORWARD)
        or p["dropout_rate"] > 0  # drawn for the whole batch
        or p.get("score_mod") is not None
        or any(given[_PACKED])
        or whole - {_BIAS}
    ):
        return []
    outs = tuple(dims[i] if is_backward else 0 for i in range(len(e.outvars)))
    return [called(w, e, Factor(dims, outs))]
