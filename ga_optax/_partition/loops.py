"""Loops: scans whose iterations work on rows, scans over rows, and `while`."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._partition.nested import Inner, in_layouts, inner, joined
from ga_optax._partition.values import (
    PARTIAL,
    WHOLE,
    Layout,
    Results,
    Rows,
    RowsMeet,
    Value,
    length_of,
    unit,
)
from ga_optax._partition.writer import Writer
from ga_optax._passes import feedback, interpret, read
from ga_optax._passes.read import is_inexact


def scan(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    if any(map(read.is_reference, e.invars)):
        return None
    how, notes = read.scan_of(e), w.records.notes
    if any(v.dim == 0 for v in how.split(vs)[2]):
        return _over_rows(w, vs, how)
    before, apart = len(notes), w.within(forbids_collectives=True)
    # Sums wait for the end of the loop; or they are complete in each iteration; or
    # rows do not meet in it.
    for here, waits in (w, True), (w, False), (apart, True):
        del notes[before:]
        with w.may_fail(e) as results:
            results += _of_rows(here, vs, how, waits) or ()
        if results:
            w.level, times = here.level, read.numbers([how.length])
            each = [x._replace(nbytes=times * x.nbytes) for x in notes[before:]]
            notes[before:] = each
            return results
    name = f"scan of {how.length} iterations, in whose carry rows meet,"
    return w.noted(name, e, vs)


def _of_rows(w: Writer, vs: list[Value], how: read.Scan, waits: bool) -> Results:
    """A scan whose iterations work on rows; `waits` if sums may wait for its end."""
    vs = vs if waits else w.summed(vs)
    consts, carry, slices = how.split(vs)
    level, params, n = w.level, any(v.params for v in vs), len(carry)
    smooth = any(v.smooth for v in vs)
    notes, before = w.records.notes, len(w.records.notes)

    def complete(layouts: Iterable[Layout]) -> list[Layout]:
        return [WHOLE if x == PARTIAL and not waits else x for x in layouts]

    def body(wanted: Sequence[Layout] = ()) -> Inner:
        del notes[before:]
        each = zip(
            vs,
            how.body.jaxpr.invars,
            [*(v.layout for v in consts), *layouts, *map(_of_slice, slices)],
            [*[level] * len(consts), *levels, *[level] * len(slices)],
            strict=True,
        )
        args = [
            Value(None, x.aval, layout, number, params, smooth)
            for v, x, layout, number in each
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
    if run.meets and not _comes_apart(w, run, how, longest):
        return None
    start = in_layouts(w, carry, layouts)
    xs = [*(v.x for v in consts), *start, *(v.x for v in slices)]
    out = interpret.scan(how, lambda args: run(w.index, args), xs)
    w.level = max([level, *run.levels])
    return list(zip(out, [*layouts, *map(_of_stack, wanted[n:])], strict=True))


def _comes_apart(w: Writer, run: Inner, how: read.Scan, longest: int) -> bool:
    """True if rows meet only beside loops of more than `longest` iterations."""
    body = read.Program(run.closed.jaxpr, run.closed.consts)
    here = how._replace(body=body, num_consts=how.num_consts + 1)  # the index
    return feedback.comes_apart(here, w.axis.meets, longest)


def _of_slice(v: Value) -> Layout:
    return v.rows.at(v.dim - 1) if v.rows else v.layout


def _of_stack(layout: Layout) -> Layout:
    return layout.at(layout.dim + 1) if isinstance(layout, Rows) else layout


# -- Scans over rows -------------------------------------------------------------------


def _over_rows(w: Writer, vs: list[Value], how: read.Scan) -> Results:
    """A scan over the rows themselves: each micro-batch has its own iterations.

    It has no carry, as in `jax.lax.map`, or one to which every iteration adds.
    """
    consts, carry, slices = how.split(vs)
    rows = max((v.rows for v in slices if v.dim == 0), key=lambda rows: -rows.segments)
    if how.length % (rows.segments * unit(w.axis.parts)):
        return None
    if carry and not _only_adds(how):
        return None
    start = [w.addend(v) for v in carry]
    xs = [*map(w.whole, consts), *start, *(w.part(v, rows) for v in slices)]
    how = how._replace(length=length_of(how.length, w.axis.parts))
    out = interpret.scan(how, functools.partial(interpret.results, how.body), xs)
    n = len(carry)
    return [(x, PARTIAL if i < n else rows) for i, x in enumerate(out)]


def _only_adds(how: read.Scan) -> bool:
    """True if iterations do nothing with a carry but add to it."""
    flat = functools.partial(interpret.evaluate, how.body, rule=_in_the_open)
    types = [x.aval for x in how.body.jaxpr.invars]
    jaxpr = interpret.program_of(lambda *xs: flat(xs), *types).jaxpr
    _, totals, _ = how.split(jaxpr.invars)
    return all(map(functools.partial(_is_total, jaxpr), totals, jaxpr.outvars))


def _is_total(jaxpr: core.Jaxpr, x: Any, result: Any) -> bool:
    """True if a program only adds to an argument, which is that result then."""
    if not is_inexact(x.aval):
        return False
    while x is not result:
        if (use := read.only_use(jaxpr, x)) is None:
            return False
        e, _ = use
        # A cast is of a weak type, or from one.
        adds = e.primitive.name in ("add", "add_any", "convert_element_type")
        if not adds or not all(_is_alike(y, e.outvars[0]) for y in e.invars):
            return False
        [x] = e.outvars
    return read.num_readers(jaxpr, result) == 1


def _is_alike(x: Any, y: Any) -> bool:
    """True if two variables have the same type, be it weak or not."""
    return (x.aval.shape, x.aval.dtype) == (y.aval.shape, y.aval.dtype)


# -- Loops with a condition ------------------------------------------------------------


def while_(w: Writer, e: core.JaxprEqn, vs: list[Value]) -> Results:
    vs, n = w.summed(vs), e.params["cond_nconsts"]
    m = n + e.params["body_nconsts"]
    of_cond, of_body, carry = vs[:n], vs[n:m], vs[m:]
    cond, body = (read.Program(e.params[k].jaxpr, e.params[k].consts) for k in _WHILE)
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

    out = jax.lax.while_loop(any_goes_on, step, in_layouts(w, carry, layouts))
    return list(zip(out, layouts, strict=True))


def _where(goes_on: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """The new values of the loops that go on; axes of loops come first."""
    goes_on = goes_on.reshape(*goes_on.shape, *[1] * (new.ndim - goes_on.ndim))
    return jnp.where(goes_on, new, old)


_WHILE = ("cond_jaxpr", "body_jaxpr")


def _in_the_open(equation: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
    """A rule by which functions and checkpoints run as if they stood there."""
    if not read.is_inline(equation):
        return None
    [program] = read.inner(equation)
    return interpret.evaluate(program, values, _in_the_open)
