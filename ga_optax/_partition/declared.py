"""Calls that say themselves how they split, or of which it is known.

`custom_partitioning` has a rule that names a *factor* for each dimension. A factor that
is only passed through, from operands to each result, may be split over devices; so it
may over micro-batches, which run what one of k devices would.
"""

from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ga_optax._partition.values import (
    PARTIAL,
    Results,
    Rows,
    Value,
    local_types,
    types_of,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes import ir, primitives

Dims = list[int | None]  # the dimension of each array that has the rows


# -- Rules of the user's ---------------------------------------------------------------


def custom_partitioning(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    rule = e.params["sharding_rule"]
    if not hasattr(rule, "operand_mappings"):
        return None  # none, or a function of MLIR's types
    shapes = [x.shape for x in (*vs, *types_of(e))]
    dims = _dims(rule, shapes)
    if [len(names) for side in dims for names in side] != list(map(len, shapes)):
        return None  # a rule for something else
    for v in sorted((v for v in vs if v.rows), key=lambda v: -v.size):
        due, i = v.shape[v.dim], vs.index(v)
        for way in primitives.ways_of(dims):
            places = *way.ins, *way.outs
            pairs = zip(shapes, places, strict=True)
            fits = all(d is None or x[d] == due for x, d in pairs)
            if way.ins[i] == v.dim and None not in way.outs and fits:
                return _as_a_device(w, e, vs, (v.rows, list(places)))
    return None


def _dims(rule: Any, shapes: list[Any]) -> primitives.Dims:
    """The factors of operands and results that are only passed through."""
    mappings = *rule.operand_mappings, *rule.result_mappings
    factors = [
        _factors(x, len(shape)) for x, shape in zip(mappings, shapes, strict=False)
    ]
    every = [x for names in factors for x in names]
    parts = [x for f in every if type(f).__name__ == _COMPOUND for x in f]
    whole = {
        *rule.reduction_factors,
        *rule.need_replication_factors,
        *rule.permutation_factors,
        *parts,
        *(x for names in factors for x in names if names.count(x) > 1),
    }
    dims = [
        [None if type(x).__name__ == _COMPOUND or x in whole else x for x in names]
        for names in factors
    ]
    number = len(rule.operand_mappings)
    return dims[:number], dims[number:]


def _factors(mapping: Any, rank: int) -> list[Any]:
    """The factor of each dimension; those of an ellipsis are the leading ones."""
    first, *rest = [*mapping] or [None]
    if not (isinstance(first, str) and first.startswith("…")):
        return list(mapping)
    group = first[1:] or "0"
    return [*((group, i) for i in range(rank - len(rest))), *rest]


_COMPOUND = "CompoundFactor"  # several factors in one dimension


def _as_a_device(
    w: Writer, e: core.JaxprEqn, vs: list[Value], cut: tuple[Rows, Dims]
) -> Results:
    """What one of several devices would run that have the rows between them."""
    rows, dims = cut
    of_results: list[Any] = dims[len(vs) :]
    xs = w.parts(vs, rows, dims[: len(vs)])
    try:
        call: Any = _traced(e, dims, w.axis.size, xs)
    except Exception:  # of the user's function, which may refuse this
        return None
    due = local_types(e, map(rows.at, of_results), w.axis.size)
    meets = any(_AXIS in ir.axes_of(x) for x in ir.equations(call.jaxpr))
    if meets or call.consts or [(x.shape, x.dtype) for x in call.out_avals] != due:
        return None
    found = w.results(e, xs, call=call)
    return [(x, rows.at(d)) for x, d in zip(found, of_results, strict=True)]


_AXIS = "rows"


def _traced(e: core.JaxprEqn, dims: Dims, parts: int, xs: list[Any]) -> Any:
    """The program that a rule has for one device."""
    p, mesh, number = e.params, AbstractMesh((parts,), (_AXIS,)), len(e.invars)

    def typed(x: Any, d: int | None) -> Any:
        spec = PartitionSpec(*(_AXIS if i == d else None for i in range(len(x.shape))))
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        )

    types = [
        typed(x.aval, d) for x, d in zip([*e.invars, *e.outvars], dims, strict=True)
    ]
    given = jax.tree.unflatten(p["in_tree"], types[:number])
    wanted = jax.tree.unflatten(p["out_tree"], types[number:])
    _, lower, outs, ins = p["partition"](*p["static_args"], mesh, given, wanted)
    if not _are_as_wanted([*jax.tree.leaves(ins), *jax.tree.leaves(outs)], types):
        raise ValueError("other shardings are needed")

    def call(*xs: Any) -> list[Any]:
        return jax.tree.leaves(lower(*jax.tree.unflatten(p["in_tree"], xs)))

    return jax.make_jaxpr(call, axis_env=[(_AXIS, parts)])(*xs)


def _are_as_wanted(shardings: list[Any], types: list[Any]) -> bool:
    def of(sharding: Any, rank: int) -> list[Any]:
        spec = [
            x[0] if isinstance(x, tuple) and len(x) == 1 else x for x in sharding.spec
        ]
        return spec + [None] * (rank - len(spec))

    pairs = zip(shardings, types, strict=True)
    return all(of(s, x.ndim) == of(x.sharding, x.ndim) for s, x in pairs)


# -- Attention of cuDNN ----------------------------------------------------------------

# The operands of `jax.nn.dot_product_attention(implementation="cudnn")` are queries,
# keys, values, a bias, the lengths of queries and keys, offsets of several sequences in
# one row (two), and tables of pages (two). Backward there are three more.
_BIAS, _PACKED, _FORWARD, _BACKWARD = 3, slice(6, 10), 10, 13


def cudnn_attention(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Rows are along dimension 0 of all operands; a bias may be the same for all."""
    p, is_backward = e.params, "bwd" in e.primitive.name
    rows = max((v for v in vs if v.rows), key=lambda v: v.size).rows
    is_given = [v.shape[0] > 0 for v in vs]  # what there is none of is empty
    n = vs[0].shape[0]
    has_rows = [its and v.shape[0] == n for its, v in zip(is_given, vs, strict=True)]
    if (
        len(vs) != (_BACKWARD if is_backward else _FORWARD)
        or rows.dim != 0
        or n == 1
        or p["dropout_rate"] > 0  # drawn for the whole batch
        or p.get("score_mod") is not None
        or any(is_given[_PACKED])
        or not all(has_rows[i] for i in (0, 1, 2, *range(_FORWARD, len(vs))))
        or not all(
            its for its, x in zip(has_rows[4:6], is_given[4:6], strict=True) if x
        )
    ):
        return None
    dims: Dims = [0 if its else None for its in has_rows]
    layouts: list[Any] = [rows] * len(e.outvars)
    if is_backward and len(layouts) > _BIAS and not has_rows[_BIAS]:
        layouts[_BIAS] = PARTIAL  # the gradient of what is the same for all rows
    return list(zip(w.results(e, w.parts(vs, rows, dims)), layouts, strict=True))
