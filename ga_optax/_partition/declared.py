"""Calls that say themselves how they split, or of which it is known.

`custom_partitioning` has a rule that names a *factor* for each dimension. A factor that
is only passed through, from operands to each result, may be split over devices; so it
may over micro-batches, which run what one of k devices would.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ga_optax._partition import factors
from ga_optax._partition.values import Results, Value, types_of
from ga_optax._partition.writer import Writer
from ga_optax._passes import ir, notation
from ga_optax._passes.notation import Way

# -- Rules of the user's ---------------------------------------------------------------


def custom_partitioning(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """What one of several devices would run that have the rows between them."""
    rule = e.params["sharding_rule"]
    if not hasattr(rule, "operand_mappings"):
        return None  # none, or a function of MLIR's types
    shapes = [x.shape for x in (*vs, *types_of(e))]
    dims = _dims(rule, shapes)
    if [len(names) for side in dims for names in side] != list(map(len, shapes)):
        return None  # a rule for something else
    ways = [way for way in notation.ways_of(dims) if None not in way.outs]

    def run(way: Way, *xs: Any) -> list[Any]:
        return w.results(e, xs, call=_of_a_device(e, way, w.axis.size, xs))

    try:
        return factors.split(w, e, vs, ways, run)
    except factors.Refused:  # by the user's function
        return None


def _dims(rule: Any, shapes: list[Any]) -> notation.Dims:
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


_AXIS = "rows"


def _of_a_device(e: core.JaxprEqn, way: Way, parts: int, xs: Sequence[Any]) -> Any:
    """The program that a rule has for one device."""
    p, mesh = e.params, AbstractMesh((parts,), (_AXIS,))

    def typed(x: Any, d: int | None) -> Any:
        spec = PartitionSpec(*(_AXIS if i == d else None for i in range(x.aval.ndim)))
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=sharding)

    ins, outs = (
        list(map(typed, e.invars, way.ins)),
        list(map(typed, e.outvars, way.outs)),
    )
    given, due = (
        jax.tree.unflatten(p["in_tree"], ins),
        jax.tree.unflatten(p["out_tree"], outs),
    )
    _, lower, of_outs, of_ins = p["partition"](*p["static_args"], mesh, given, due)
    if not _are_as_wanted(jax.tree.leaves((of_ins, of_outs)), [*ins, *outs]):
        raise ValueError("other shardings are needed")

    def call(*xs: Any) -> list[Any]:
        return jax.tree.leaves(lower(*jax.tree.unflatten(p["in_tree"], xs)))

    found: Any = jax.make_jaxpr(call, axis_env=[(_AXIS, parts)])(*xs)
    if found.consts or any(_AXIS in ir.axes_of(x) for x in ir.equations(found.jaxpr)):
        raise ValueError("it communicates, or closes over something")
    return found


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
_PACKED, _FORWARD, _BACKWARD = slice(6, 10), 10, 13


def cudnn_attention(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """Rows are along dimension 0 of all operands; a bias may be the same for all.

    Then its gradient is a sum.
    """
    p, is_backward = e.params, "bwd" in e.primitive.name
    n = vs[0].shape[0]
    given = [v.shape[0] for v in vs]  # 0 of what there is none of
    dims = [0 if x == n > 1 else None for x in given]
    every = (0, 1, 2, *range(_FORWARD, len(vs)), *(i for i in (4, 5) if given[i]))
    if (
        len(vs) != (_BACKWARD if is_backward else _FORWARD)
        or p["dropout_rate"] > 0  # drawn for the whole batch
        or p.get("score_mod") is not None
        or any(given[_PACKED])
        or any(dims[i] is None for i in every)
    ):
        return None
    outs = [dims[i] if is_backward else 0 for i in range(len(e.outvars))]
    way = Way(tuple(dims), tuple(outs))
    return factors.split(w, e, vs, [way], lambda _, *xs: w.results(e, xs))
