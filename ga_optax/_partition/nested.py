"""Equations with programs inside: functions, branches, loops, regions, `microbatch`.

The program inside is partitioned like the one around it, with the layouts of operands
and of the results that are wanted.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._passes import checkpoints, effects, feedback, jaxprs
from .._passes.equation import Divided
from .._passes.jaxprs import Same, is_inexact
from . import held
from .held import PARTIAL, WHOLE, Layout, Result, Results, Rows, RowsMeet, Value
from .linear import is_summed_first
from .writer import Writer

# == Programs inside ===================================================================
# Equations with programs inside: functions, branches, regions of a mesh.
#
# A jitted function is opened. A checkpoint stays one. Where rows must not meet, such as
# in a branch, an equation is computed whole if they do.

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
        return jaxprs.results(self.closed, [index, *args])


def inner(
    w: Writer,
    program: jaxprs.Program,
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
        held.type_here(
            v.aval, held.local_shape(v.aval.shape, v.layout, w.axis.parts), v.x
        )
        for v in args
    ]
    number = held.type_here(jax.ShapeDtypeStruct((), jnp.int32), (), w.index)
    facts = ((v.aval, v.layout, v.level, v.params, v.smooth) for v in args)
    key = "inner", w.scope, key_of(w, program), number, *types, *facts, *wanted
    records = w.records
    if key in records.programs:
        return records.programs[key]
    before = len(records.notes)
    run = _written(w, program, args, wanted, [number, types])
    # Notes have lines: they are made for each of equal programs.
    is_silent = before == len(records.notes)
    if is_silent and not (run.meets or _is_of_here(run.closed, w.scope.in_rule)):
        records.programs[key] = run
    return run


def key_of(w: Writer, program: jaxprs.Program) -> Any:
    """A key that is equal for programs that compute the same."""
    # In a rule, functions run without their own; `_is_of_here` knows if one kept it.
    form = jaxprs.form(program.jaxpr, DERIVED if w.scope.in_rule else ())
    return form, *map(Same, program.consts)


def _is_of_here(closed: Any, in_rule: bool) -> bool:
    """True if a program has something of the place for which it is written."""
    keeps = in_rule and any(
        not DERIVED.isdisjoint(e.params) for e in jaxprs.equations(closed.jaxpr)
    )
    return keeps or any(isinstance(x, jax.core.Tracer) for x in closed.consts)


def _written(
    w: Writer,
    program: jaxprs.Program,
    args: Sequence[Value],
    wanted: Sequence[Layout | None],
    types: Any,
) -> Inner:
    """Writes an `Inner`; the types are those of the index and of the arguments."""
    layouts: list[Layout] = []
    levels: list[int] = []
    texts: list[str] = []

    def written(index: Any, xs: Sequence[Any]) -> list[Any]:
        here = w.within(is_inner=True).at(index=index)
        new = [v.alone(x) for x, v in zip(xs, args, strict=True)]
        out = here.interpret(program.jaxpr, program.consts, new)
        pairs = zip(out, wanted or [None] * len(out), strict=True)
        layouts[:] = [v.layout if layout is None else layout for v, layout in pairs]
        levels[:] = [v.level for v in out]
        values = held.labelled_values(w.axis, out)
        texts[:] = map(held.value_in_words, values)
        return [*in_layouts(here, out, layouts), *(v.x for v in values)]

    closed = jax.make_jaxpr(written, axis_env=w.axis.env)(*types)
    closed = held.labelled_program(closed, texts)
    meets = any(map(w.axis.meets, closed.jaxpr.eqns))
    live = jaxprs.live(closed.jaxpr)
    reads_index = jaxprs.num_readers(live, live.invars[0]) > 0
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


def inlined(w: Writer, program: jaxprs.Program, vs: list[Value]) -> list[Result]:
    """The results of a program, as if it stood there itself."""
    out = w.interpret(program.jaxpr, program.consts, vs)
    w.level = max(v.level for v in out)
    return [(v.x, v.layout) for v in out]


def checkpoint(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [program] = jaxprs.inner(e)
    run = inner(w, program, vs)

    def make() -> Any:
        return checkpoints.checkpointed(e, lambda index, *xs: run(index, xs))

    policy, prevent_cse = Same(e.params["policy"]), e.params["prevent_cse"]
    function = w.once(("checkpoint", Same(run.closed), policy, prevent_cse), make)
    out = function(w.index, *(v.x for v in vs))
    w.level = max(run.levels, default=0)
    return list(zip(out, run.layouts, strict=True))


# -- Branches --------------------------------------------------------------------------


def cond(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    which, *operands = vs
    if is_summed_first(w, e, operands):
        operands = w.summed(operands)
    choice = w.whole(which)
    branches = jaxprs.inner(e)
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
    p, [program] = e.params, jaxprs.inner(e)
    vs = w.summed(vs)
    # Where data axes are bound, fun may have been traced without them.
    mesh, context = p["mesh"], jax.sharding.get_abstract_mesh()
    mesh = context if context.manual_axes else mesh
    new = p.get("newly_manual_axes") or p["manual_axes"]  # as jax 0.10.0 calls them
    names, sizes = {*new} - {*mesh.manual_axes}, mesh.shape
    specs = zip(vs, p["in_specs"], strict=True)
    of_args = [_on_device(v.layout, spec, sizes) for v, spec in specs]
    if w.axis.is_checked or None in of_args or not names:
        return None
    results: list[Value] = []

    def on_a_part(index: Any, *xs: Any) -> tuple[Any, ...]:
        triples = zip(vs, xs, of_args, program.jaxpr.invars, strict=True)
        args = [v.alone(x, layout, name.aval) for v, x, layout, name in triples]
        # Programs have types of the region in which they were made.
        records = dataclasses.replace(w.records, programs={})
        here = w.within(forbids_collectives=True).at(index=index, records=records)
        results[:] = here.interpret(program.jaxpr, program.consts, args)
        return tuple(v.x for v in results)

    out = jax.shard_map(
        on_a_part,
        mesh=mesh,
        in_specs=(jax.P(), *p["in_specs"]),
        out_specs=tuple(p["out_specs"]),
        axis_names=names,
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
    if not isinstance(layout, Rows):
        return layout
    segments, rest = divmod(layout.segments, _parts(layout, spec, sizes))
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
        xs, its = [v.x for v in given], jaxprs.Program(program.jaxpr, program.consts)
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
    """One that is written in JAX, with no derivative that could differ from its own."""
    primitive: Any = e.params.get("_prim")
    is_written = hasattr(primitive, "expand") and hasattr(primitive, "in_tree")
    if not is_written or any(is_inexact(x.aval) for x in e.outvars):
        return None

    def plain(*leaves: Any) -> Any:
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves))

    avals: list[Any] = [x.aval for x in e.invars]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    return inlined(w, jaxprs.program_of(plain, *types), vs)


# == Loops =============================================================================


def scan(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    how, notes = jaxprs.scan_of(e), w.records.notes
    if any(v.dim == 0 for v in how.split(vs)[2]):
        return _over_rows(w, vs, how)
    before, apart = len(notes), w.within(forbids_collectives=True)
    # Sums wait for the end of the loop; or they are complete in each iteration; or
    # rows do not meet in it.
    for here, waits in (w, True), (w, False), (apart, True):
        del notes[before:]
        with w.may_meet() as results:
            results += _of_rows(here, e, vs, waits) or ()
        if results:
            w.level, times = here.level, jaxprs.numbers([how.length])
            each = [x._replace(nbytes=times * x.nbytes) for x in notes[before:]]
            notes[before:] = each
            return results
    name = f"scan of {how.length} iterations, in whose carry rows meet,"
    return w.noted(name, e, vs)


# Bytes of a scan in which rows meet: no more are worth a level for each iteration. They
# are the pairs of 1,024 rows in float32.
_LITTLE = 2**22


def _of_rows(w: Writer, e: core.JaxprEqn, vs: list[Value], waits: bool) -> Results:
    """A scan whose iterations work on rows; `waits` if sums may wait for its end.

    If rows meet, all levels would keep what they read. So a little scan without
    derivatives, such as that of Sinkhorn's steps, is computed once, of all rows.
    """
    how, vs = jaxprs.scan_of(e), vs if waits else w.summed(vs)
    consts, carry, slices = how.split(vs)
    level, params, n = w.level, any(v.params for v in vs), len(carry)
    smooth = _smooth(how, vs)
    notes, before = w.records.notes, len(w.records.notes)

    def complete(layouts: Iterable[Layout]) -> list[Layout]:
        return [WHOLE if x == PARTIAL and not waits else x for x in layouts]

    def body(wanted: Sequence[Layout] = ()) -> Inner:
        del notes[before:]
        each = zip(
            how.body.jaxpr.invars,
            [*(v.layout for v in consts), *layouts, *map(_of_slice, slices)],
            [*[level] * len(consts), *levels, *[level] * len(slices)],
            smooth,
            strict=True,
        )
        args = [
            Value(None, x.aval, layout, number, params, moves)
            for x, layout, number, moves in each
        ]
        return inner(w, how.body, args, wanted)

    layouts, levels = [v.layout for v in carry], [level] * n
    run = body()
    while (new := complete(map(joined, layouts, run.layouts))) != layouts:
        # A sum that waits is as late as what iterations add to it.
        layouts, levels = new, list(map(max, levels, run.levels))
        run = body()
    wanted = complete([*layouts, *run.layouts[n:]])
    run = run if wanted == run.layouts else body(wanted)
    # In an unrolled loop, sums that wait would be one more at each place of it.
    longest = 0 if waits and PARTIAL in layouts else w.axis.longest
    if run.meets and not any(smooth) and _is_little(vs):
        w.level = level
        return w.all_whole(e, vs)
    if run.meets and not _comes_apart(w, run, how, longest):
        return None
    start = in_layouts(w, carry, layouts)
    xs = [*(v.x for v in consts), *start, *(v.x for v in slices)]
    out = jaxprs.scan(how, lambda args: run(w.index, args), xs)
    w.level = max([level, *run.levels])
    return list(zip(out, [*layouts, *map(_of_stack, wanted[n:])], strict=True))


def _smooth(how: jaxprs.Scan, vs: list[Value]) -> list[bool]:
    """True for each argument of the body that may have a derivative.

    That is a carry, too, to which an iteration gives one.
    """
    body, some = how.body.jaxpr, [v.smooth for v in vs]
    while True:
        moving = effects.moving(body, itertools.compress(body.invars, some))
        carried = [jaxprs.is_among(x, moving) for x in body.outvars[: how.num_carry]]
        consts, carry, slices = how.split(some)
        new = [*consts, *map(operator.or_, carry, carried), *slices]
        if new == some:
            return some
        some = new


def _is_little(vs: list[Value]) -> bool:
    return sum(v.size * v.aval.dtype.itemsize for v in vs) <= _LITTLE


def _comes_apart(w: Writer, run: Inner, how: jaxprs.Scan, longest: int) -> bool:
    """True if rows meet only beside loops of more than `longest` iterations."""
    body = jaxprs.Program(run.closed.jaxpr, run.closed.consts)
    here = how._replace(body=body, num_consts=how.num_consts + 1)  # the index
    return feedback.comes_apart(here, w.axis.meets, longest)


def _of_slice(v: Value) -> Layout:
    return v.rows.at(v.dim - 1) if v.rows else v.layout


def _of_stack(layout: Layout) -> Layout:
    return layout.at(layout.dim + 1) if isinstance(layout, Rows) else layout


# -- Scans over rows -------------------------------------------------------------------


def _over_rows(w: Writer, vs: list[Value], how: jaxprs.Scan) -> Results:
    """A scan over the rows themselves: each micro-batch has its own iterations.

    It has no carry, as in `jax.lax.map`, or one to which every iteration adds.
    """
    consts, carry, slices = how.split(vs)
    rows = max((v.rows for v in slices if v.dim == 0), key=lambda rows: -rows.segments)
    if how.length % (rows.segments * held.unit(w.axis.parts)):
        return None
    if carry and not _only_adds(how):
        return None
    start = [w.addend(v) for v in carry]
    xs = [*map(w.whole, consts), *start, *(w.part(v, rows) for v in slices)]
    how = how._replace(length=held.length_of(how.length, w.axis.parts))
    out = jaxprs.scan(how, functools.partial(jaxprs.results, how.body), xs)
    n = len(carry)
    return [(x, PARTIAL if i < n else rows) for i, x in enumerate(out)]


def _only_adds(how: jaxprs.Scan) -> bool:
    """True if iterations do nothing with a carry but add to it."""
    flat = functools.partial(jaxprs.evaluate, how.body, rule=_in_the_open)
    types = [x.aval for x in how.body.jaxpr.invars]
    jaxpr = jaxprs.program_of(lambda *xs: flat(xs), *types).jaxpr
    _, totals, _ = how.split(jaxpr.invars)
    return all(map(functools.partial(_is_total, jaxpr), totals, jaxpr.outvars))


def _is_total(jaxpr: core.Jaxpr, x: Any, result: Any) -> bool:
    """True if a program only adds to an argument, which is that result then."""
    if not is_inexact(x.aval):
        return False
    dtype = x.aval.dtype
    while x is not result:
        use = jaxprs.only_use(jaxpr, x)
        if use is None or use[0].primitive.name not in _ADDS:
            return False
        [x], [aval] = use[0].outvars, held.types_of(use[0])
        if aval.dtype != dtype:
            return False
    return jaxprs.num_readers(jaxpr, result) == 1


_ADDS = ("add", "add_any", "convert_element_type")  # of a weak type, or from one


# -- Loops with a condition ------------------------------------------------------------


def while_(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    vs, n = w.summed(vs), e.params["cond_nconsts"]
    m = n + e.params["body_nconsts"]
    of_cond, of_body, carry = vs[:n], vs[n:m], vs[m:]
    cond, body = (jaxprs.Program(e.params[k].jaxpr, e.params[k].consts) for k in _WHILE)
    layouts: list[Layout] = [v.layout for v in carry]
    here = w.within(forbids_collectives=True)
    notes, before = w.records.notes, len(w.records.notes)
    facts = w.level, any(v.params for v in vs), any(v.smooth for v in vs)
    while True:
        del notes[before:]
        pairs = zip(carry, layouts, strict=True)
        args = [Value(None, v.aval, layout, *facts) for v, layout in pairs]
        wanted = [x if isinstance(x, Rows) else None for x in layouts]
        run = inner(here, body, [*of_body, *args], wanted)
        test = inner(here, cond, [*of_cond, *args])
        new: list[Layout] = list(map(joined, layouts, run.layouts))
        [rows] = test.layouts
        if isinstance(rows, Rows):  # a loop for each row, by `jax.vmap`
            new = [rows] * len(carry)
        if new == layouts:
            break
        if PARTIAL in new or new.count(WHOLE) == layouts.count(WHOLE):
            raise RowsMeet  # each round gives rows to a carry that had none
        layouts = new
    passes: Any = test.closed.out_avals[0]
    if any(x.shape[: passes.ndim] != passes.shape for x in run.closed.out_avals):
        raise RowsMeet  # tests for all rows, and carries of some
    # As JAX does, the primitive takes a test for each row.
    of_test = [*test.closed.consts, index_for(w, test), *(v.x for v in of_cond)]
    of_step = [*run.closed.consts, index_for(w, run), *(v.x for v in of_body)]
    tests, steps = (jaxprs.without_constants(x.closed.jaxpr) for x in (test, run))
    out = e.primitive.bind(
        *of_test,
        *of_step,
        *in_layouts(w, carry, layouts),
        cond_nconsts=len(of_test),
        cond_jaxpr=core.ClosedJaxpr(tests, ()),
        body_nconsts=len(of_step),
        body_jaxpr=core.ClosedJaxpr(steps, ()),
    )
    return list(zip(out, layouts, strict=True))


_WHILE = ("cond_jaxpr", "body_jaxpr")


def _in_the_open(equation: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
    """A rule by which functions and checkpoints run as if they stood there."""
    if not jaxprs.is_inline(equation):
        return None
    [program] = jaxprs.inner(equation)
    return jaxprs.evaluate(program, values, _in_the_open)


# == A microbatch inside ===============================================================
# A nested `microbatch`, such as of the head of a model.
#
# In a micro-batch of a window it divides the rows of the micro-batch on one device,
# into the number of pieces that the user gave, or the largest smaller number that
# divides the rows. If rows meet inside, the program of the nested function is inlined.


def divided(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    function: Divided = e.params["function"]
    vs = w.summed(vs)
    number = _number(w, function, vs)
    if number > 1 and not function.program.jaxpr.effects:
        with w.may_meet() as out:
            out += _divided(w, function, vs, number)
        if out:
            return out
    return inlined(w, function.program, vs)


def written_gradient(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> list[Result]:
    """A `value_and_grad`: as it was written, or as the law.

    The law if it has a derivative, or rows of a micro-batch: what is written splits the
    rows of the whole batch.
    """
    vs = w.summed(vs)
    if any(v.smooth or v.rows for v in vs):
        return divided(w, e, vs)
    return inlined(w, jaxprs.inner(e)[0], vs)


def _number(w: Writer, function: Divided, vs: list[Value]) -> int:
    """The number of pieces of a micro-batch of the window, or 1."""
    pairs = [(v, d) for v, d in zip(vs, function.axes, strict=True) if d is not None]
    same = [v.dim == d for v, d in pairs]
    if not any(same):
        return function.number
    if not (all(same) and w.axis.is_even):  # the last might have another number
        return 1
    v, d = pairs[0]
    rows = held.length_of(v.shape[d], w.axis.parts)
    if not isinstance(rows, int):  # `jax.export` leaves it open
        return 1
    if function.size is not None:
        fewest = -(-rows // function.size)
        return next(n for n in range(fewest, rows + 1) if rows % n == 0)
    return next(n for n in range(min(function.number, rows), 0, -1) if rows % n == 0)


def _divided(
    w: Writer, function: Divided, vs: list[Value], number: int
) -> list[Result]:
    inside = w.within(forbids_collectives=True, partitioned_again=True)
    run = inner(inside, function.program, vs)
    here = function.with_program(run.closed, (None, *function.axes), number)
    index = index_for(w, run)
    out = here.bind([*run.closed.consts, index, *(v.x for v in vs)])
    w.level = max(run.levels, default=0)
    return list(zip(out, run.layouts, strict=True))
