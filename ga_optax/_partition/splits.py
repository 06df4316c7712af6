"""Calls that say how they split: promises, custom partitioning, attention, kernels.

    call(x [n, ...])  =  the calls of k parts [n / k, ...], side by side

One body splits a call by a record; a reader makes the record of each kind of call.
Kernels of Pallas, which a micro-batch runs on a part of the grid, come last.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .._passes import jaxprs, places, primitives
from .._passes.associative_scan import scan_as_one
from .._passes.primitives import Axes, Factor, Split
from .._passes.rowwise import bound
from . import custom, factors, nested
from .held import PARTIAL, WHOLE, Results, Rows, Value, local_shape, note_of, types_of
from .writer import Writer

# == Splits ============================================================================
# Calls with a record of how they split (`Split`): one body, a reader of each kind.
#
#     rowwise                functions whose rows do not need each other, by promise
#     custom_partitioning    calls with a rule for shardings
#     cudnn_attention        calls of a known kernel
#     pallas_call            kernels whose grid goes over the rows, see below
#
# A reader returns records. The body chooses one of the ways in them, calls the function
# with the rows of a micro-batch, and checks the types of the results.
#
# The rule of `custom_partitioning` names a *factor* for each dimension. A factor that
# is only passed through, from operands to each result, may be split over devices; so it
# may over micro-batches, which run what one of k devices would.

# Of an equation, and rows in so many segments (see `Rows`), how it splits along them.
Reader = Callable[[Writer, core.JaxprEqn, int], Sequence[Split]]


def called(w: Writer, e: core.JaxprEqn, way: Factor, **params: Any) -> Split:
    """A call that splits one way: the same equation, with some other parameters."""
    return Split(way, lambda *xs: w.results(e, xs, **params))


def split_call(reads: Reader, w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """The results of an equation in the best way to split it; None if there is none."""
    records = {n: reads(w, e, n) for n in {v.rows.segments for v in vs if v.rows}}

    def ways(rows: Any) -> list[Factor]:
        return [record.factor for record in records[rows.segments]]

    if (choice := factors.chosen_way(vs, ways)) is None:
        return None
    rows, way = choice
    record = next(x for x in records[rows.segments] if way == x.factor)
    xs = w.parts(vs, rows, way.ins)
    layouts = [PARTIAL if d is None else rows.at(d) for d in way.outs]
    pairs = zip(types_of(e), layouts, strict=True)
    due = [(local_shape(x.shape, layout, w.axis.parts), x.dtype) for x, layout in pairs]
    program, error = places.looked_at(jax.make_jaxpr(record.fun), *xs)
    why = f"raised {type(error).__name__}: {error}"
    if error is None:
        types = [(x.shape, x.dtype) for x in program.out_avals]
        why = "" if types == due else f"returned {types} and not {due}"
    if record.name and why:
        _warn(e, why)
    elif record.name:
        size = sum(jaxprs.numbers(x.shape) for x in types_of(e))
        w.records.promised.append(note_of(e, size, _name(e)))
    return None if why else list(zip(jaxprs.results(program, xs), layouts, strict=True))


# -- What the user promises ------------------------------------------------------------


def rowwise(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """A call of a function of the user whose rows do not need each other."""
    if (out := split_call(_promised, w, e, vs)) is None:
        return w.noted(_name(e), e, vs)
    if not custom.has_nonlinear_rule(w, e, vs):
        return out
    # Its cotangent must be complete, see `custom`.
    name = w.axis.name
    return [
        (checkpoint_name(x, name) if jaxprs.is_inexact(x) else x, y) for x, y in out
    ]


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


# -- Associative scans -----------------------------------------------------------------


def associative_scan(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """A `jax.lax.associative_scan` along rows: the scan of a micro-batch's own.

    Each micro-batch combines its elements to one. All that come before are combined
    with its first element, and then it scans its own. So nothing is scanned twice, and
    what a backward pass keeps is of a scan of the micro-batch.
    """
    (program, pair), n = jaxprs.inner(e), len(e.outvars)
    axis, reverse = e.params["along"], e.params["reverse"]
    along = [v.rows for v in vs[:n] if v.rows and v.dim == axis]
    # A region that checks types has types for each equation of the recursion alone.
    if not along or w.axis.is_checked or custom.has_nonlinear_rule(w, e, vs):
        return nested.inlined(w, program, vs)
    if any(rows.segments > 1 for rows in along):
        return None
    ins = w.parts(vs, Rows(0), [*[axis] * n, *[None] * (len(vs) - n)])
    xs = [jnp.moveaxis(x, axis, 0) for x in ins[:n]]

    @jax.vmap
    def fn(a: list[Any], b: list[Any]) -> list[Any]:
        return jaxprs.results(pair, [*a, *b, *ins[n:]])

    def turned(xs: list[Any]) -> list[Any]:
        return [jnp.flip(x, 0) for x in xs] if reverse else xs

    xs = turned(xs)
    for v in vs[:n]:
        w.meet(v)
    totals = turned([w.gather(x[0]) for x in _combined(fn, xs)])
    totals = jax.lax.associative_scan(fn, totals)
    at = w.axis.size - 1 - w.index if reverse else w.index
    xs = _after(fn, at, totals, xs)
    scan = jax.lax.associative_scan
    if w.scope.partitioned_again:  # a `microbatch` in the loss partitions it once more
        scan = scan_as_one
    out = turned(scan(fn, xs))
    return [(jnp.moveaxis(x, 0, axis), Rows(axis)) for x in out]


def _combined(fn: Callable[..., Any], xs: list[Any]) -> list[Any]:
    """All elements, combined to one."""
    while (n := len(xs[0])) > 1:
        pairs = fn([x[: n - 1 : 2] for x in xs], [x[1::2] for x in xs])
        ends = [x[n - n % 2 :] for x in xs]
        xs = [jnp.concatenate(both) for both in zip(pairs, ends, strict=True)]
    return xs


def _after(fn: Callable[..., Any], at: Any, totals: Any, xs: Any) -> list[Any]:
    """A micro-batch's elements, the first of which is combined with all before it.

    Before those of the first micro-batch there are none. There the first two elements
    are combined, which the scan does as well: so what is not chosen is no NaN that
    would come into a gradient.
    """
    own, following = [x[:1] for x in xs], [x[1:2] if len(x) > 1 else x for x in xs]
    last = jnp.maximum(at - 1, 0)
    before = [jax.lax.dynamic_index_in_dim(x, last, 0) for x in totals]

    def chosen(first: list[Any], others: list[Any]) -> list[Any]:
        return [jnp.where(at == 0, x, y) for x, y in zip(first, others, strict=True)]

    start = chosen(own, fn(chosen(own, before), chosen(following, own)))
    return [jnp.concatenate([x, y[1:]]) for x, y in zip(start, xs, strict=True)]


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
    ways = primitives.factors_of_dims((dims[: len(e.invars)], dims[len(e.invars) :]))
    kept = [way for way in ways if None not in way.outs]
    return [Split(way, functools.partial(_on_device, w, e, way)) for way in kept]


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


# == Kernels ===========================================================================
# Kernels of Pallas: a micro-batch runs the part of the grid that is over its rows.
#
# A kernel has one program for each point of a grid, and each program has a block of
# each operand and result. If one axis of the grid goes over the rows, and programs do
# not know where they are along it, then those of a micro-batch are a kernel by
# themselves:
#
#   grid [..., k L, ...], blocks of n rows  ->  grid [..., L, ...], blocks of n / k rows
#
# Functions of the grid give the block of a program. They are evaluated at all points of
# the grid, which is more exact than to match formulas. If anything else may depend on
# the axis, or on the order of programs along it, the kernel is computed whole.

_MOST_POINTS = 2**20  # of a grid, at which functions of it are evaluated

_ASK = ("program_id", "num_programs")  # for the place of a program on an axis

# In the names of primitives by which programs share what is no operand, or that hide a
# function of Python's.
_HIDDEN = ("prng", "semaphore", "global", "cluster", "inline", "pipeline", "fusion")


def pallas_call(w: Writer, e: core.JaxprEqn, segments: int) -> list[Split]:
    """A way to split for each axis of the grid that goes over rows."""
    grid, n, records = e.params["grid_mapping"], len(e.invars), list[Split]()
    for g in range(len(grid.grid)) if _can_be_read(e) else ():
        dims = _dims(grid, g, segments, w.axis.size)
        if dims and not _depends(e, g, dims):
            part, way = _part(e, g, dims, w.axis.size), Factor(dims[:n], dims[n:])
            records.append(called(w, e, way, **part))
    return records


def _can_be_read(e: core.JaxprEqn) -> bool:
    """True if the programs of a kernel share operands and results alone."""
    [kernel], p, grid = jaxprs.inner_programs(e), e.params, e.params["grid_mapping"]
    names = " ".join(x.primitive.name for x in jaxprs.equations(kernel))
    return (
        p.get("mesh") is None
        and grid.grid_names is None
        and len(e.invars) == grid.num_index_operands + grid.num_inputs
        and all(isinstance(n, int) for n in grid.grid)
        and not getattr(p["compiler_params"], "has_side_effects", False)
        and all(getattr(x, "input", None) in kernel.invars for x in kernel.effects)
        and not any(part in names for part in _HIDDEN)
    )


# -- Which blocks a program has --------------------------------------------------------


def _dims(grid: Any, g: int, segments: int, parts: int) -> Axes | None:
    """The dimension of each array that axis `g` goes over; None if that is not known.

    Each result has one, so that no two micro-batches write the same of it.
    """
    if grid.grid[g] % (parts * segments):
        return None
    dims: list[int | None] = [None] * grid.num_index_operands
    for i, block in enumerate(grid.block_mappings):
        each = [_index(block, d, grid.grid, g) for d in range(len(block.block_shape))]
        moves = [_moves(block, d, x, (segments, parts)) for d, x in enumerate(each)]
        is_result = i >= grid.num_inputs
        if None in moves or not is_result <= sum(map(bool, moves)) <= 1:
            return None
        dims.append(moves.index(True) if True in moves else None)
    return tuple(dims)


def _index(block: Any, d: int, sizes: tuple[int, ...], g: int) -> Any:
    """The block of each program along `d`, `[sizes[g], ...]`; None if not known."""
    jaxpr = getattr(block.index_map_jaxpr, "jaxpr", block.index_map_jaxpr)
    out, ids = jaxpr.outvars[d], jaxpr.invars[: len(sizes)]
    given = *jaxpr.constvars, *jaxpr.invars
    equations, reads = jaxprs.needed_for(jaxpr, [out], {*given}.__contains__)
    if ids[g] not in reads:
        return np.zeros(sizes[g], np.int32)
    shape = [n if x in reads else 1 for n, x in zip(sizes, ids, strict=True)]
    if not set(reads) <= set(ids) or math.prod(shape) > _MOST_POINTS:
        return None
    points = np.indices(shape, np.int32).reshape(len(shape), -1)
    with jax.ensure_compile_time_eval():
        [x] = jax.vmap(lambda *at: jaxprs.bind(jaxpr, equations, ids, [out], at))(
            *points
        )
    return np.moveaxis(np.asarray(x).reshape(shape), g, 0)


def _moves(block: Any, d: int, x: Any, cut: tuple[int, int]) -> bool | None:
    """True if micro-batches have one part after another along `d`; None if otherwise.

    False if they all have the same blocks.
    """
    if x is None:
        return None
    (segments, parts), others = cut, x.shape[1:]
    # The blocks of a micro-batch, by the same function, and those that it has now.
    local = x[: len(x) // parts].reshape(segments, 1, -1, *others)
    now = x.reshape(segments, parts, -1, *others)
    if (now == local).all():
        return False
    dim = block.block_shape[d]
    sizes = {"Squeezed": 1, "Blocked": getattr(dim, "block_size", 0)}
    size = sizes.get(type(dim).__name__, 0)  # else blocks may overlap
    here, rest = divmod(block.array_aval.shape[d], parts * segments)
    if rest or not size or here % size:
        return None
    here //= size
    segment, within = np.divmod(local, here)
    number = np.arange(parts).reshape(-1, *[1] * x.ndim)
    is_next = now == (segment * parts + number) * here + within
    return True if is_next.all() and local.max() < segments * here else None


# -- What else may depend on the axis --------------------------------------------------


def _depends(e: core.JaxprEqn, g: int, dims: Axes) -> bool:
    """True if a program may depend on where along `g` it is, or on others along it."""
    grid, [kernel] = e.params["grid_mapping"], jaxprs.inner_programs(e)
    outs = dims[len(e.invars) :]
    if any(dims[i] != outs[o] for i, o in e.params["input_output_aliases"]):
        return True
    # What is written in an operand, the next program reads.
    effects = [x for x in kernel.effects if type(x).__name__ != "ReadEffect"]
    written = [getattr(x, "input", None) for x in effects]
    shared = zip(kernel.invars, dims, strict=False)
    if any(d is None and x in written for x, d in shared):
        return True
    if g in grid.vmapped_dims:
        return False  # no program can see an axis that `jax.vmap` added
    axis = g - sum(d < g for d in grid.vmapped_dims)
    asks = [x for x in jaxprs.equations(kernel) if x.primitive.name in _ASK]
    if any(x.params["axis"] == axis for x in asks):
        return True
    semantics = getattr(e.params["compiler_params"], "dimension_semantics", None)
    how = semantics[axis] if semantics else None
    # Scratch stays from one program to the next, unless they may run side by side.
    is_parallel = str(getattr(how, "name", how)).lower() == "parallel"
    return bool(grid.scratch_avals) and not is_parallel


# -- A part of the grid ----------------------------------------------------------------


def _part(e: core.JaxprEqn, g: int, dims: Axes, parts: int) -> dict[str, Any]:
    """The parameters of the call with a micro-batch's part of axis `g` of the grid."""
    p, grid = e.params, e.params["grid_mapping"]

    def local(aval: Any, d: int | None) -> Any:
        layout = WHOLE if d is None else Rows(d)
        return aval.update(shape=local_shape(aval.shape, layout, parts))

    pairs = zip(grid.block_mappings, dims[grid.num_index_operands :], strict=True)
    blocks = [x.replace(array_aval=local(x.array_aval, d)) for x, d in pairs]
    sizes = (n // parts if i == g else n for i, n in enumerate(grid.grid))
    if (cost := p["cost_estimate"]) is not None:
        costs = dataclasses.asdict(cost).items()
        cost = type(cost)(**{key: n // parts for key, n in costs})
    return {
        "grid_mapping": grid.replace(grid=tuple(sizes), block_mappings=tuple(blocks)),
        "out_avals": tuple(map(local, p["out_avals"], dims[len(e.invars) :])),
        "cost_estimate": cost,
    }
