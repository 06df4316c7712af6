"""Kernels of Pallas: a micro-batch runs the part of the grid that is over its rows.

A kernel has one program for each point of a grid, and each program has a block of each
operand and result. If one axis of the grid goes over the rows, and programs do not know
where they are along it, then those of a micro-batch are a kernel by themselves:

    grid [..., k L, ...], blocks of n rows  ->  grid [..., L, ...], blocks of n / k rows

Functions of the grid give the block of a program. They are evaluated at all points of
the grid, which is more exact than to match formulas. If anything else may depend on
the axis, or on the order of programs along it, the kernel is computed whole.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ga_optax._partition import splits
from ga_optax._partition.values import WHOLE, Rows, local_shape
from ga_optax._partition.writer import Writer
from ga_optax._passes import interpret, read
from ga_optax._passes.notation import Axes, Factor, Split

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
            records.append(splits.called(w, e, way, **part))
    return records


def _can_be_read(e: core.JaxprEqn) -> bool:
    """True if the programs of a kernel share operands and results alone."""
    [kernel], p, grid = read.inner_programs(e), e.params, e.params["grid_mapping"]
    names = " ".join(x.primitive.name for x in read.equations(kernel))
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
    equations, reads = read.needed(jaxpr, [out], {*given}.__contains__)
    if ids[g] not in reads:
        return np.zeros(sizes[g], np.int32)
    shape = [n if x in reads else 1 for n, x in zip(sizes, ids, strict=True)]
    if not set(reads) <= set(ids) or math.prod(shape) > _MOST_POINTS:
        return None
    points = np.indices(shape, np.int32).reshape(len(shape), -1)
    with jax.ensure_compile_time_eval():
        [x] = jax.vmap(lambda *at: interpret.bind(jaxpr, equations, ids, [out], at))(
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
    grid, [kernel] = e.params["grid_mapping"], read.inner_programs(e)
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
    asks = [x for x in read.equations(kernel) if x.primitive.name in _ASK]
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
