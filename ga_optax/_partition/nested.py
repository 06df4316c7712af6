"""Equations with programs inside: functions, loops, branches, rules of the user's.

A jitted function is opened. A checkpoint stays one. Where rows must not meet, in a
branch or in a long loop, an equation is computed whole if they do.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Layout,
    Result,
    Results,
    Rows,
    RowsMeet,
    Value,
    local_shape,
    type_here,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes import feedback, ir
from ga_optax._passes.ir import is_inexact


class Inner(NamedTuple):
    """A program inside an equation, as a micro-batch runs it.

    Attributes:
      closed: the program; its arguments are the index of the micro-batch and its own.
      layouts: those of its results.
      levels: those of its results.
      meets: whether there are collectives in it.
      reads: whether it reads the index.
    """

    closed: Any
    layouts: list[Layout]
    levels: list[int]
    meets: bool
    reads: bool

    def __call__(self, index: Any, args: Sequence[Any]) -> list[Any]:
        return ir.results(self.closed, [index, *args])


def inner(
    w: Writer,
    program: ir.Program,
    args: Sequence[Value],
    due: Sequence[Layout | None] = (),
) -> Inner:
    """The program inside an equation, with results in the layouts that are due.

    It is written once for equations that are alike, unless rows meet in it.

    Args:
      w: the writer of the program around it.
      program: the program.
      args: values of its arguments; of their arrays only the types count.
      due: a layout for each result, None for any.
    """
    types = [
        type_here(v.aval, local_shape(v.aval.shape, v.layout, w.axis.size), v.x)
        for v in args
    ]
    number = type_here(jax.ShapeDtypeStruct((), jnp.int32), (), w.index)
    each = ((v.aval, v.layout, v.level, v.params, v.smooth) for v in args)
    facts = "inner", number, *types, *each, *due

    def make() -> Inner:
        return _written(w, program, args, due, [number, types])

    def serves(run: Inner) -> bool:
        return not (run.meets or _is_of_here(run.closed, w.in_rule))

    return w.once(make, first(w, program), facts, serves)


def first(w: Writer, program: ir.Program) -> list[Any]:
    """The first program that does the same, and its constants."""
    # In a rule, functions run without their own; `_is_of_here` knows if one kept it.
    form = "form", ir.form(program.jaxpr, ir.DERIVED if w.in_rule else ())
    alike = w.once(lambda: program.jaxpr, program.consts, form)
    return [alike, *program.consts]


def _is_of_here(closed: Any, in_rule: bool) -> bool:
    """Whether a program has something of the place for which it is written."""
    keeps = in_rule and any(
        not ir.DERIVED.isdisjoint(e.params) for e in ir.equations(closed.jaxpr)
    )
    return keeps or any(isinstance(x, jax.core.Tracer) for x in closed.consts)


def _written(
    w: Writer,
    program: ir.Program,
    args: Sequence[Value],
    due: Sequence[Layout | None],
    types: Any,
) -> Inner:
    """Writes such a program; the types are those of the index and of its arguments."""
    found: dict[str, Any] = {}

    def run(index: Any, xs: Sequence[Any]) -> list[Any]:
        here = w.within(index=index)
        new = [
            Value(x, v.aval, v.layout, v.level, v.params, v.smooth)
            for x, v in zip(xs, args, strict=True)
        ]
        out = here.interpret(program.jaxpr, program.consts, new)
        wanted = due or [None] * len(out)
        layouts = [
            v.layout if layout is None else layout
            for v, layout in zip(out, wanted, strict=True)
        ]
        found["layouts"] = layouts
        found["levels"] = [v.level for v in out]
        return _begun(here, out, layouts)

    closed = jax.make_jaxpr(run, axis_env=[tuple(w.axis[:2])])(*types)
    meets = any(map(w.axis.meets, closed.jaxpr.eqns))
    live = ir.live(closed.jaxpr)
    reads = ir.num_readers(live, live.invars[0]) > 0
    return Inner(closed, found["layouts"], found["levels"], meets, reads)


def index_for(w: Writer, *runs: Inner) -> Any:
    """The index of the micro-batch, or any number if none of these reads it.

    What is handed to a rule of the user's counts as read.
    """
    return w.index if any(run.reads for run in runs) else np.int32(0)


# -- Checkpoints -----------------------------------------------------------------------


def inlined(w: Writer, program: ir.Program, vs: list[Value]) -> list[Result]:
    """The results of a program, as if it stood there itself."""
    found = w.interpret(program.jaxpr, program.consts, vs)
    w.level = max(v.level for v in found)
    return [(v.x, v.layout) for v in found]


def checkpoint(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    [program] = ir.inner(e)
    run = inner(w, program, vs)

    def make() -> Any:
        return ir.checkpointed(e, lambda index, *xs: run(index, xs))

    facts = "checkpoint", e.params["prevent_cse"]
    again = w.once(make, [run.closed, e.params["policy"]], facts)
    out = again(w.index, *(v.x for v in vs))
    w.level = max(run.levels, default=0)
    return list(zip(out, run.layouts, strict=True))


# -- Loops -----------------------------------------------------------------------------


def scan(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    if any(map(ir.is_reference, e.invars)):
        return None
    how, notes = ir.scan_of(e), len(w.notes)
    if any(v.dim == 0 for v in how.split(vs)[2]):
        return _scan_over_rows(w, vs, how)
    # Sums wait for its end; or they are complete in it; or rows do not meet in it.
    for here, waits in (w, True), (w, False), (w.within(apart=True), True):
        del w.notes[notes:]
        with w.may_fail(e) as found:
            found += _scan_of_rows(here, vs, how, waits) or ()
        if found:
            w.level = here.level
            length = ir.numbers([how.length])
            each = [x._replace(nbytes=length * x.nbytes) for x in w.notes[notes:]]
            w.notes[notes:] = each
            return found
    name = f"scan of {how.length} iterations, in whose carry rows meet,"
    return w.noted(name, e, vs)


def _scan_of_rows(w: Writer, vs: list[Value], how: ir.Scan, waits: bool) -> Results:
    """A scan whose iterations work on rows; `waits` if sums may wait for its end."""
    vs = vs if waits else w.summed(vs)
    consts, carry, slices = how.split(vs)
    level, params, n = w.level, any(v.params for v in vs), len(carry)

    def due(layouts: Iterable[Layout]) -> list[Layout]:
        return [WHOLE if x == PARTIAL and not waits else x for x in layouts]

    layouts, levels = [v.layout for v in carry], [level] * n
    notes = len(w.notes)
    while True:
        del w.notes[notes:]
        each = zip(
            vs,
            how.body.jaxpr.invars,
            [*(v.layout for v in consts), *layouts, *map(_inside, slices)],
            [*[level] * len(consts), *levels, *[level] * len(slices)],
            strict=True,
        )
        args = [
            Value(None, x.aval, layout, its, params, v.smooth or params)
            for v, x, layout, its in each
        ]
        run = inner(w, how.body, args)
        joined = due(map(_join, layouts, run.layouts))
        if joined == layouts:
            break
        # A sum that waits is as late as what iterations add to it.
        layouts, levels = joined, list(map(max, levels, run.levels))
    of_results = due([*layouts, *run.layouts[n:]])
    if of_results != run.layouts:
        del w.notes[notes:]
        run = inner(w, how.body, args, of_results)
    # In an unrolled loop, sums that wait would be one more at each place of it.
    longest = 0 if waits and PARTIAL in layouts else w.axis.longest
    if run.meets and not _comes_apart(w, run, how, longest):
        return None
    start = _begun(w, carry, layouts)
    xs = [*(v.x for v in consts), *start, *(v.x for v in slices)]
    out = ir.scan(how, lambda args: run(w.index, args), xs)
    w.level = max([level, *run.levels])
    return list(zip(out, [*layouts, *map(_outside, of_results[n:])], strict=True))


def _begun(w: Writer, carry: Sequence[Value], layouts: Sequence[Layout]) -> list[Any]:
    """What a loop begins with."""
    return [_strong(w.to(v, x), v) for v, x in zip(carry, layouts, strict=True)]


def _comes_apart(w: Writer, run: Inner, how: ir.Scan, longest: int) -> bool:
    """Whether rows meet only on the side of loops that are longer than that."""
    body = ir.Program(run.closed.jaxpr, run.closed.consts)
    here = how._replace(body=body, num_consts=how.num_consts + 1)  # the index
    return feedback.comes_apart(here, w.axis.meets, longest)


def _inside(v: Value) -> Layout:
    return v.rows.at(v.dim - 1) if v.rows else v.layout


def _outside(layout: Layout) -> Layout:
    return layout.at(layout.dim + 1) if isinstance(layout, Rows) else layout


def _join(a: Layout, b: Layout) -> Layout:
    """A layout for values of both; rows stay as they are."""
    if isinstance(a, Rows) or a == b:
        return a
    return b if isinstance(b, Rows) or b == PARTIAL else a


def _strong(x: Any, v: Value) -> Any:
    is_extended = jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
    return x if is_extended else jax.lax.convert_element_type(x, v.aval.dtype)


def _scan_over_rows(w: Writer, vs: list[Value], how: ir.Scan) -> Results:
    """A scan over the rows themselves: each micro-batch has its own iterations.

    It has no carry, as in `jax.lax.map`, or one to which every iteration adds.
    """
    consts, carry, slices = how.split(vs)
    rows = max((v.rows for v in slices if v.dim == 0), key=lambda rows: -rows.segments)
    if rows.segments > 1 or how.length % w.axis.size:
        return None
    if carry and not _only_adds(how):
        return None
    start = [w.addend(v) for v in carry]
    xs = [*map(w.whole, consts), *start, *(w.part(v, rows) for v in slices)]
    how = how._replace(length=how.length // w.axis.size)
    out = ir.scan(how, functools.partial(ir.results, how.body), xs)
    n = len(carry)
    return [(x, PARTIAL if i < n else rows) for i, x in enumerate(out)]


def _only_adds(how: ir.Scan) -> bool:
    """Whether all that iterations do with a carry is to add to it."""
    flat = functools.partial(ir.evaluate, how.body, rule=ir.in_the_open)
    types = [x.aval for x in how.body.jaxpr.invars]
    jaxpr = ir.program_of(lambda *xs: flat(xs), *types).jaxpr
    _, totals, _ = how.split(jaxpr.invars)
    return all(map(functools.partial(_is_total, jaxpr), totals, jaxpr.outvars))


def _is_total(jaxpr: core.Jaxpr, x: Any, out: Any) -> bool:
    """Whether a program only adds to an argument, which is that result then."""
    if not is_inexact(x.aval):
        return False
    while x is not out:
        if (use := ir.only_use(jaxpr, x)) is None:
            return False
        e, _ = use
        # A cast is of a weak type, or from one.
        adds = e.primitive.name in ("add", "add_any", "convert_element_type")
        if not adds or not all(_is_alike(y, e.outvars[0]) for y in e.invars):
            return False
        [x] = e.outvars
    return ir.num_readers(jaxpr, out) == 1


def _is_alike(x: Any, y: Any) -> bool:
    """Whether two variables have the same type, be it weak or not."""
    return (x.aval.shape, x.aval.dtype) == (y.aval.shape, y.aval.dtype)


def while_(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    vs, n = w.summed(vs), e.params["cond_nconsts"]
    m = n + e.params["body_nconsts"]
    of_cond, of_body, carry = vs[:n], vs[n:m], vs[m:]
    cond, body = (ir.Program(e.params[k].jaxpr, e.params[k].consts) for k in _WHILE)
    layouts, here = [v.layout for v in carry], w.within(apart=True)
    notes = len(w.notes)
    while True:
        del w.notes[notes:]
        now = [
            Value(None, v.aval, x, v.level, v.params, v.smooth)
            for v, x in zip(carry, layouts, strict=True)
        ]
        due = [x if isinstance(x, Rows) else None for x in layouts]
        run = inner(here, body, [*of_body, *now], due)
        test = inner(here, cond, [*of_cond, *now])
        joined = list(map(_join, layouts, run.layouts))
        [rows] = test.layouts
        if isinstance(rows, Rows):  # a loop for each row, by `jax.vmap`
            joined = [rows] * len(carry)
        if joined == layouts:
            break
        if PARTIAL in joined or layouts == [rows] * len(carry):
            raise RowsMeet
        layouts = joined
    is_one = not test.closed.out_avals[0].shape

    def goes_on(carry: Sequence[Any]) -> jax.Array:
        return test(w.index, [*(v.x for v in of_cond), *carry])[0]

    def any_goes_on(carry: Sequence[Any]) -> jax.Array:
        return goes_on(carry) if is_one else goes_on(carry).any()

    def step(carry: Sequence[Any]) -> Sequence[Any]:
        new = run(w.index, [*(v.x for v in of_body), *carry])
        if is_one:
            return new
        return list(map(functools.partial(_where, goes_on(carry)), new, carry))

    out = jax.lax.while_loop(any_goes_on, step, _begun(w, carry, layouts))
    return list(zip(out, layouts, strict=True))


def _where(goes: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """What has new values where a loop goes on; axes of loops come first."""
    goes = goes.reshape(*goes.shape, *[1] * (new.ndim - goes.ndim))
    return jnp.where(goes, new, old)


_WHILE = ("cond_jaxpr", "body_jaxpr")


def cond(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    which, *operands = vs
    if branch := ir.chosen(e, which.made and which.made[0]):
        return inlined(w, branch, operands)
    choice = w.whole(which)
    branches = ir.inner(e)
    here, notes = w.within(apart=True), len(w.notes)
    found = [inner(here, branch, operands).layouts for branch in branches]
    del w.notes[notes:]
    due = [functools.reduce(_join, layouts) for layouts in zip(*found, strict=True)]
    runs = [inner(here, branch, operands, due) for branch in branches]
    choose = [lambda *args, run=run: run(w.index, args) for run in runs]
    out = jax.lax.switch(choice.astype(jnp.int32), choose, *(v.x for v in operands))
    return list(zip(out, due, strict=True))


# -- Devices ---------------------------------------------------------------------------


def shard_map(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """A function that devices run, each on a part of every row, or on its own rows."""
    p, [program] = e.params, ir.inner(e)
    vs = w.summed(vs)
    sizes = p["mesh"].shape
    own = [
        _on_device(v.layout, s, sizes) for v, s in zip(vs, p["in_specs"], strict=True)
    ]
    if w.axis.is_checked or None in own:
        return None
    found: list[Value] = []

    def run(index: Any, *xs: Any) -> tuple[Any, ...]:
        names = program.jaxpr.invars
        args = [
            Value(x, name.aval, layout, v.level, v.params, v.smooth)
            for x, name, layout, v in zip(xs, names, own, vs, strict=True)
        ]
        # What is made once for what is alike has types of the region that it is in.
        here = w.within(apart=True, index=index, objects={})
        found[:] = here.interpret(program.jaxpr, program.consts, args)
        return tuple(v.x for v in found)

    out = jax.shard_map(
        run,
        mesh=p["mesh"],
        in_specs=(jax.P(), *p["in_specs"]),
        out_specs=tuple(p["out_specs"]),
        axis_names=set(p["newly_manual_axes"]),
        check_vma=p["check_vma"],
    )(w.index, *(v.x for v in vs))
    w.level = max([w.level, *(v.level for v in found)])
    pairs = zip(found, p["out_specs"], strict=True)
    due = [_on_device(v.layout, spec, sizes, back=True) for v, spec in pairs]
    return list(zip(out, due, strict=True))


def _on_device(layout: Layout, spec: Any, sizes: Any, back: bool = False) -> Any:
    """The layout of what a device has of an array, or `back`; None if there is none."""
    names = spec[layout.dim : layout.dim + 1] if isinstance(layout, Rows) else ()
    parts = math.prod(sizes[name] for name in jax.tree.leaves(tuple(names)))
    if not isinstance(layout, Rows) or parts == 1:
        return layout
    if not back and layout.segments % parts:
        return None
    segments = layout.segments * parts if back else layout.segments // parts
    return layout._replace(segments=segments)


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
            return None
        xs, its = [v.x for v in given], ir.Program(program.jaxpr, program.consts)
        run = inner(w.within(apart=True), its, [*given, *sides], due)
        return lambda *b: run(w.index, [*xs, *b[-1]])

    matvec, _, solve, transposed = map(part, programs, lengths)
    symmetric = programs[1] is programs[0]
    out = jax.lax.custom_linear_solve(
        matvec, [v.x for v in sides], solve, transposed, symmetric
    )
    return list(zip(out, due, strict=True))


def _sides(w: Writer, v: Value, matrices: list[Value]) -> Value:
    """The right side of a system; with rows, if the matrices have some."""
    for u in matrices if v.is_whole else ():
        if u.rows and u.shape[: u.dim + 1] == v.shape[: u.dim + 1]:
            return v.held(w.part(v, u.rows), u.rows)
    return v


# -- Primitives with a program of their own --------------------------------------------


def expanded(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    """One that has a program, and no derivative that could differ from its own."""
    program = None if any(is_inexact(x.aval) for x in e.outvars) else ir.expanded(e)
    return None if program is None else inlined(w, program, vs)
