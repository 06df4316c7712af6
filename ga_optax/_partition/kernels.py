"""Kernels of Pallas: a micro-batch runs the part of the grid that is over its rows.

A kernel has one program for each point of a grid, and each program has a block of each
operand and result. If one axis of the grid goes over the rows, and programs do not know
where they are along it, then those of a micro-batch are a kernel by themselves:

    grid [..., k L, ...], blocks of n rows  ->  grid [..., L, ...], blocks of n / k rows

Functions of the grid say which block a program has. They are evaluated at all points of
it, which is more exact than to match them as formulas. If anything else may depend on
the axis, or on the order of programs along it, the kernel is computed whole.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ga_optax._partition.values import Results, Rows, Value, local_shape
from ga_optax._partition.writer import Writer
from ga_optax._passes import ir

Dims = list[int | None]  # the dimension of each array that has the rows

_MOST_POINTS = 2**20  # of a grid, at which functions of it are evaluated
# In the names of primitives by which programs share what is no operand, or that hide a
# function of Python's.
_HIDDEN = ("prng", "semaphore", "global", "cluster", "inline", "pipeline", "fusion")


def pallas_call(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    grid, ranked = e.params["grid_mapping"], sorted(vs, key=lambda v: -v.size)
    if not _can_be_read(e, vs):
        return None
    for v in ranked:
        for g in range(len(grid.grid)) if v.rows else ():
            dims = _dims(grid, g, v.rows, w.axis.size)
            if dims and dims[vs.index(v)] == v.dim and not _depends(e, g, dims):
                return _on_part(w, e, vs, g, (v.rows, dims))
    return None


def _can_be_read(e: core.JaxprEqn, vs: list[Value]) -> bool:
    """Whether operands and results are all that its programs share."""
    [kernel], p, grid = ir.inner_programs(e), e.params, e.params["grid_mapping"]
    return (
        p.get("mesh") is None
        and grid.grid_names is None
        and len(vs) == grid.num_index_operands + grid.num_inputs
        and all(isinstance(n, int) for n in grid.grid)
        and not getattr(p["compiler_params"], "has_side_effects", False)
        and all(getattr(x, "input", None) in kernel.invars for x in kernel.effects)
        and not any(
            part in x.primitive.name for x in ir.equations(kernel) for part in _HIDDEN
        )
    )


# -- Which blocks a program has --------------------------------------------------------


def _dims(grid: Any, g: int, rows: Rows, parts: int) -> Dims | None:
    """The dimension of each array that axis `g` goes over; None if that is not known.

    Each result has one, so that no two micro-batches write the same of it.
    """
    if grid.grid[g] % (parts * rows.segments):
        return None
    dims: Dims = [None] * grid.num_index_operands
    for i, block in enumerate(grid.block_mappings):
        moves = [
            _moves(block, d, _coordinate(block, d, grid.grid, g), rows, parts)
            for d in range(len(block.array_aval.shape))
        ]
        is_result = i >= grid.num_inputs
        if None in moves or not is_result <= sum(map(bool, moves)) <= 1:
            return None
        dims.append(moves.index(True) if True in moves else None)
    return dims


def _coordinate(block: Any, d: int, sizes: tuple[int, ...], g: int) -> Any:
    """Which block programs have along `d`, `[sizes[g], ...]`; None if not known."""
    index = block.index_map_jaxpr
    jaxpr = getattr(index, "jaxpr", index)
    out, ids = jaxpr.outvars[d], jaxpr.invars[: len(sizes)]
    given = {*jaxpr.constvars, *jaxpr.invars}
    equations, read = ir.needed(jaxpr, [out], given.__contains__)
    if ids[g] not in read:
        return np.zeros(sizes[g], np.int32)
    shape = [n if x in read else 1 for n, x in zip(sizes, ids, strict=True)]
    if not set(read) <= set(ids) or math.prod(shape) > _MOST_POINTS:
        return None
    points = np.indices(shape, np.int32).reshape(len(shape), -1)
    with jax.ensure_compile_time_eval():
        [x] = jax.vmap(lambda *at: ir.bind(jaxpr, equations, ids, [out], at))(*points)
    return np.moveaxis(np.asarray(x).reshape(shape), g, 0)


def _moves(block: Any, d: int, x: Any, rows: Rows, parts: int) -> bool | None:
    """Whether micro-batches have one part after another along `d`; None if otherwise.

    False if they all have the same blocks.
    """
    if x is None:
        return None
    segments, others = rows.segments, x.shape[1:]
    # Those of a micro-batch, by the same function, and those that it has now.
    local = x[: len(x) // parts].reshape(segments, 1, -1, *others)
    now = x.reshape(segments, parts, -1, *others)
    if (now == local).all():
        return False
    here, rest = divmod(block.array_aval.shape[d], parts * segments)
    size = _size(block.block_shape[d])
    if rest or not size or here % size:
        return None
    here //= size
    segment, within = np.divmod(local, here)
    number = np.arange(parts).reshape(-1, *[1] * x.ndim)
    is_next = now == (segment * parts + number) * here + within
    return True if is_next.all() and local.max() < segments * here else None


def _size(dim: Any) -> int:
    """The size of a block along a dimension; 0 if blocks may overlap."""
    kinds = {"Squeezed": 1, "Blocked": getattr(dim, "block_size", 0)}
    return kinds.get(type(dim).__name__, 0)


# -- What else may depend on the axis --------------------------------------------------


def _depends(e: core.JaxprEqn, g: int, dims: Dims) -> bool:
    """Whether a program may depend on where along `g` it is, or on others along it."""
    grid, [kernel] = e.params["grid_mapping"], ir.inner_programs(e)
    effects: Any = kernel.effects
    outs = dims[len(dims) - grid.num_outputs :]
    if any(dims[i] != outs[o] for i, o in e.params["input_output_aliases"]):
        return True
    # What is written in an operand, the next program reads.
    written = {x.input for x in effects if type(x).__name__ != "ReadEffect"}
    if any(
        x in written for x, d in zip(kernel.invars, dims, strict=False) if d is None
    ):
        return True
    if g in grid.vmapped_dims:
        return False  # no program can see an axis that `jax.vmap` added
    axis = g - sum(d < g for d in grid.vmapped_dims)
    if any(
        x.primitive.name in ("program_id", "num_programs") and x.params["axis"] == axis
        for x in ir.equations(kernel)
    ):
        return True
    semantics = getattr(e.params["compiler_params"], "dimension_semantics", None)
    how = semantics[axis] if semantics else None
    # Scratch stays from one program to the next, unless they may run side by side.
    is_parallel = str(getattr(how, "name", how)).lower() == "parallel"
    return bool(grid.scratch_avals) and not is_parallel


# -- A part of the grid ----------------------------------------------------------------


def _on_part(
    w: Writer, e: core.JaxprEqn, vs: list[Value], g: int, cut: tuple[Rows, Dims]
) -> Results:
    """The call with this micro-batch's part of axis `g` of the grid."""
    (rows, dims), grid, parts = cut, e.params["grid_mapping"], w.axis.size

    def local(aval: Any, d: int | None) -> Any:
        shape = aval.shape if d is None else local_shape(aval.shape, rows.at(d), parts)
        return aval.update(shape=shape)

    of_blocks = dims[grid.num_index_operands :]
    outs: list[Any] = dims[len(vs) :]
    sizes = [n // parts if i == g else n for i, n in enumerate(grid.grid)]
    blocks = [
        block.replace(array_aval=local(block.array_aval, d))
        for block, d in zip(grid.block_mappings, of_blocks, strict=True)
    ]
    changed: dict[str, Any] = {
        "grid_mapping": grid.replace(grid=tuple(sizes), block_mappings=tuple(blocks)),
        "out_avals": tuple(map(local, e.params["out_avals"], outs)),
    }
    if (cost := e.params["cost_estimate"]) is not None:
        less = {key: n // parts for key, n in dataclasses.asdict(cost).items()}
        changed["cost_estimate"] = type(cost)(**less)
    found = w.results(e, w.parts(vs, rows, dims[: len(vs)]), **changed)
    return [(x, rows.at(d)) for x, d in zip(found, outs, strict=True)]
