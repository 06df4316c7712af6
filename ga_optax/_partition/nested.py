"""Equations with programs inside: functions, branches, regions of a mesh.

A jitted function is opened. A checkpoint stays one. Where rows must not meet, such as
in a branch, an equation is computed whole if they do.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._partition import labels
from ga_optax._partition.linear import is_summed_first
from ga_optax._partition.values import (
    PARTIAL,
    Layout,
    Result,
    Results,
    Rows,
    Value,
    local_shape,
    type_here,
)
from ga_optax._partition.writer import Same, Writer
from ga_optax._passes import interpret, read
from ga_optax._passes.read import is_inexact

# Parameters that say how functions with rules of their own are differentiated.
DERIVED = frozenset(("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"))


class Inner(NamedTuple):
    """A program inside an equation, as a micro-batch runs it.

    Attributes:
      closed: the program, from the index of the micro-batch and the arguments of the
        program of the whole batch.
      layouts: the layouts of the results.
      levels: the levels of the results.
      meets: True if there are collectives in it.
      reads_index: True if the program reads the index of the micro-batch.
    """

    closed: Any
    layouts: list[Layout]
    levels: list[int]
    meets: bool
    reads_index: bool

    def __call__(self, index: Any, args: Sequence[Any]) -> list[Any]:
        return interpret.results(self.closed, [index, *args])


def inner(
    w: Writer,
    program: read.Program,
    args: Sequence[Value],
    wanted: Sequence[Layout | None] = (),
) -> Inner:
    """The program inside an equation, with results in the layouts that are wanted.

    Equal programs, such as those of the layers of a model, are written once, unless
    rows meet in them.

    Args:
      w: the writer of the outer program.
      program: the program.
      args: the arguments; of their arrays only the types count.
      wanted: a layout for each result, None for any.
    """
    types = [
        type_here(v.aval, local_shape(v.aval.shape, v.layout, w.axis.parts), v.x)
        for v in args
    ]
    number = type_here(jax.ShapeDtypeStruct((), jnp.int32), (), w.index)
    facts = ((v.aval, v.layout, v.level, v.params, v.smooth) for v in args)
    key = "inner", w.scope, key_of(w, program), number, *types, *facts, *wanted
    records = w.records
    if key in records.programs:
        return records.programs[key]
    before = len(records.notes), len(records.failures)
    run = _written(w, program, args, wanted, [number, types])
    # Notes have lines: they are made for each of equal programs.
    is_silent = before == (len(records.notes), len(records.failures))
    if is_silent and not (run.meets or _is_of_here(run.closed, w.scope.in_rule)):
        records.programs[key] = run
    return run


def key_of(w: Writer, program: read.Program) -> Any:
    """A key that is equal for programs that compute the same."""
    # In a rule, functions run without their own; `_is_of_here` knows if one kept it.
    form = read.form(program.jaxpr, DERIVED if w.scope.in_rule else ())
    return form, *map(Same, program.consts)


def _is_of_here(closed: Any, in_rule: bool) -> bool:
    """True if a program has something of the place for which it is written."""
    keeps = in_rule and any(
        not DERIVED.isdisjoint(e.params) for e in read.equations(closed.jaxpr)
    )
    return keeps or any(isinstance(x, jax.core.Tracer) for x in closed.consts)


def _written(
    w: Writer,
    program: read.Program,
    args: Sequence[Value],
    wanted: Sequence[Layout | None],
    types: Any,
) -> Inner:
    """Writes an `Inner`; the types are those of the index and of the arguments."""
    layouts: list[Layout] = []
    levels: list[int] = []
    texts: list[str] = []

    def run(index: Any, xs: Sequence[Any]) -> list[Any]:
        here = w.within(is_inner=True).at(index=index)
        new = [v.alone(x) for x, v in zip(xs, args, strict=True)]
        out = here.interpret(program.jaxpr, program.consts, new)
        pairs = zip(out, wanted or [None] * len(out), strict=True)
        layouts[:] = [v.layout if layout is None else layout for v, layout in pairs]
        levels[:] = [v.level for v in out]
        values = labels.values_of(w.axis, out)
        texts[:] = map(labels.in_words, values)
        return [*in_layouts(here, out, layouts), *(v.x for v in values)]

    closed = jax.make_jaxpr(run, axis_env=w.axis.env)(*types)
    closed = labels.labelled(closed, texts)
    meets = any(map(w.axis.meets, closed.jaxpr.eqns))
    live = read.live(closed.jaxpr)
    reads_index = read.num_readers(live, live.invars[0]) > 0
    return Inner(closed, layouts, levels, meets, reads_index)


def in_layouts(w: Writer, vs: Sequence[Value], layouts: Sequence[Layout]) -> list[Any]:
    """Values in some layouts, with the types that programs and loops declare."""

    def typed(v: Value, x: Any) -> Any:
        is_key = jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
        return x if is_key else jax.lax.convert_element_type(x, v.aval.dtype)

    return [typed(v, w.to(v, layout)) for v, layout in zip(vs, layouts, strict=True)]


def index_for(w: Writer, *runs: Inner) -> Any:
    """The index of the micro-batch, or any number if none of some programs reads it.

    A derivative rule is taken to read all that it is given.
    """
    return w.index if any(run.reads_index for run in runs) else np.int32(0)


def joined(a: Layout, b: Layout) -> Layout:
    """A layout for values of both; rows stay as they are."""
    if isinstance(a, Rows) or a == b:
        return a
    return b if isinstance(b, Rows) or b == PARTIAL else a


# -- Checkpoints -----------------------------------------------------------------------


def inlined(w: Writer, program: read.Program, vs: list[Value]) -> list[Result]:
    """The results of a program, as if it stood there itself."""
    out = w.interpret(program.jaxpr, program.consts, vs)
    w.level = max(v.level for v in out)
    return [(v.x, v.layout) for v in out]


def checkpoint(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [program] = read.inner(e)
    run = inner(w, program, vs)

    def make() -> Any:
        return interpret.checkpointed(e, lambda index, *xs: run(index, xs))

    policy, prevent_cse = Same(e.params["policy"]), e.params["prevent_cse"]
    function = w.once(("checkpoint", Same(run.closed), policy, prevent_cse), make)
    out = function(w.index, *(v.x for v in vs))
    w.level = max(run.levels, default=0)
    return list(zip(out, run.layouts, strict=True))


# -- Branches --------------------------------------------------------------------------


def cond(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    which, *operands = vs
    if branch := _chosen(e, which.made and which.made[0]):
        return inlined(w, branch, operands)
    if is_summed_first(w, e, operands):
        operands = w.summed(operands)
    choice = w.whole(which)
    branches = read.inner(e)
    here, notes = w.within(forbids_collectives=True), w.records.notes
    before = len(notes)
    found = [inner(here, branch, operands).layouts for branch in branches]
    del notes[before:]
    wanted = [functools.reduce(joined, layouts) for layouts in zip(*found, strict=True)]
    runs = [inner(here, branch, operands, wanted) for branch in branches]
    choose = [lambda *args, run=run: run(w.index, args) for run in runs]
    out = jax.lax.switch(choice.astype(jnp.int32), choose, *(v.x for v in operands))
    return list(zip(out, wanted, strict=True))


# -- Devices ---------------------------------------------------------------------------


def shard_map(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """A function that devices run on parts of every row, or on different rows."""
    p, [program] = e.params, read.inner(e)
    vs = w.summed(vs)
    sizes = p["mesh"].shape
    specs = zip(vs, p["in_specs"], strict=True)
    of_args = [_on_device(v.layout, spec, sizes) for v, spec in specs]
    if w.axis.is_checked or None in of_args:
        return None
    results: list[Value] = []

    def run(index: Any, *xs: Any) -> tuple[Any, ...]:
        triples = zip(vs, xs, of_args, program.jaxpr.invars, strict=True)
        args = [v.alone(x, layout, name.aval) for v, x, layout, name in triples]
        # Programs have types of the region in which they were made.
        records = dataclasses.replace(w.records, programs={})
        here = w.within(forbids_collectives=True).at(index=index, records=records)
        results[:] = here.interpret(program.jaxpr, program.consts, args)
        return tuple(v.x for v in results)

    out = jax.shard_map(
        run,
        mesh=p["mesh"],
        in_specs=(jax.P(), *p["in_specs"]),
        out_specs=tuple(p["out_specs"]),
        axis_names=set(p["newly_manual_axes"]),
        check_vma=p["check_vma"],
    )(w.index, *(v.x for v in vs))
    w.level = max([w.level, *(v.level for v in results)])
    specs = zip(results, p["out_specs"], strict=True)
    layouts = [_on_all_devices(v.layout, spec, sizes) for v, spec in specs]
    return list(zip(out, layouts, strict=True))


def _parts(rows: Rows, spec: Any, sizes: Any) -> int:
    """The number of devices over which a `shard_map` splits the dimension of rows."""
    names = tuple(spec[rows.dim : rows.dim + 1])
    return math.prod(sizes[name] for name in jax.tree.leaves(names))


def _on_device(layout: Layout, spec: Any, sizes: Any) -> Layout | None:
    """The layout of a device's part of an array; None if there is none."""
    if not isinstance(layout, Rows) or (parts := _parts(layout, spec, sizes)) == 1:
        return layout
    segments, rest = divmod(layout.segments, parts)
    return None if rest else layout._replace(segments=segments)


def _on_all_devices(layout: Layout, spec: Any, sizes: Any) -> Layout:
    """The layout of an array, of whose part a device has this layout."""
    if not isinstance(layout, Rows):
        return layout
    return layout._replace(segments=layout.segments * _parts(layout, spec, sizes))


# -- Systems of equations --------------------------------------------------------------


def linear_solve(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """A `jax.lax.custom_linear_solve` in which rows do not meet."""
    vs = w.summed(vs)
    lengths, programs = e.params["const_lengths"], e.params["jaxprs"]
    num_consts = sum(lengths)
    sides = [_sides(w, v, vs[:num_consts]) for v in vs[num_consts:]]
    due, rest = [v.layout for v in sides], iter(vs)

    def part(program: Any, number: int) -> Any:
        given = list(itertools.islice(rest, number))
        if program is None:
            return None, []
        xs, its = [v.x for v in given], read.Program(program.jaxpr, program.consts)
        aux = [None] * (len(its.jaxpr.outvars) - len(due))
        where = w.within(forbids_collectives=True)
        run = inner(where, its, [*given, *sides], [*due, *aux])

        def call(*b: Any) -> Any:
            out = run(w.index, [*xs, *b[-1]])
            return (out[: len(due)], out[len(due) :]) if aux else out

        return call, run.layouts

    (matvec, _), _, (solve, layouts), (transposed, _) = map(part, programs, lengths)
    symmetric, has_aux = programs[1] is programs[0], len(layouts) > len(due)
    out = jax.lax.custom_linear_solve(
        matvec, [v.x for v in sides], solve, transposed, symmetric, has_aux=has_aux
    )
    return list(zip(jax.tree.leaves(out), layouts, strict=True))


def _sides(w: Writer, v: Value, matrices: list[Value]) -> Value:
    """The right side of a system; with rows, if the matrices have some."""
    for u in matrices if v.is_whole else ():
        if u.rows and u.shape[: u.dim + 1] == v.shape[: u.dim + 1]:
            return v.with_layout(w.part(v, u.rows), u.rows)
    return v


# -- Primitives with a program of their own --------------------------------------------


def expanded(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """One that has a program, and no derivative that could differ from its own."""
    program = None if any(is_inexact(x.aval) for x in e.outvars) else _expanded(e)
    return None if program is None else inlined(w, program, vs)


def _expanded(equation: core.JaxprEqn) -> read.Program | None:
    """The program of a primitive that is written in JAX; None for other primitives."""
    primitive = equation.params.get("_prim")
    if not hasattr(primitive, "expand") or not hasattr(primitive, "in_tree"):
        return None
    avals: list[Any] = [x.aval for x in equation.invars]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]

    def run(*leaves: Any) -> Any:
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves))

    return interpret.program_of(run, *types)


def _chosen(
    equation: core.JaxprEqn, which: core.JaxprEqn | None
) -> read.Program | None:
    """The branch of a conditional that is taken, if that is known; `which` computes it.

    JAX has branches for the kernels of an accelerator, where none of ours is written.
    """
    platforms: Any = which.params.get("platforms") if which else None
    if platforms is None:
        return None
    pairs = zip(read.inner(equation), platforms, strict=True)
    left = [branch for branch, names in pairs if set(names or ("",)) - {"mosaic"}]
    return left[0] if len(left) == 1 else None
