"""How a loss is made of its rows: a proof, from its program.

The program of the loss, traced at all rows, is partitioned over micro-batches
(`_partition`): it becomes that of one of them, with collectives where rows meet. What
each value depends on is followed to the loss.

If rows do not meet, the loss is a sum of rows, up to constant factors. If they meet in
numbers that no parameter is in, such as a count of tokens, the loss may divide by them:
then the weight of a micro-batch is what it adds to such a number, which is evaluated,
not fitted, and confirmed. Otherwise rows depend on each other.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from ga_optax._partition import WHOLE, Argument, Axis, Rows, partition
from ga_optax._passes import ir, places
from ga_optax._passes.rowwise import READ
from ga_optax._verify.problem import Problem
from ga_optax._verify.wide import Wide, cast

_AXIS = "micro-batches to verify"
_DRAWS = ("random_", "threefry", "rng_")  # how the names of their primitives begin
_RULES = ("custom_jvp", "custom_vjp")


class Meeting(NamedTuple):
    """Where rows meet.

    Attributes:
      what: what they need of each other.
      line: the line of the user's code.
      of_params: whether parameters are in it.
      part: the variable of what a micro-batch adds.
    """

    what: str
    line: str
    of_params: bool
    part: Any


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the program of a loss says.

    Attributes:
      problem: whose loss it is.
      program: that of a micro-batch, with collectives.
      given: the values of its first arguments, constants of the loss.
      meetings: where rows meet; first those that parameters are in.
      has_rows: whether the loss depends on rows.
      has_place: whether it depends on which micro-batch it is of.
      draws: whether it draws random numbers that no row has a key for.
      whole: names and lines of what nothing is known of.
    """

    problem: Problem
    program: ir.Program
    given: Sequence[Any]
    meetings: Sequence[Meeting]
    has_rows: bool
    has_place: bool
    draws: bool
    whole: str

    @property
    def counts(self) -> list[Meeting]:
        """Where they meet in numbers that no parameter is in."""
        return [x for x in self.meetings if not x.of_params]

    @property
    def meets_in_counts(self) -> bool:
        """Whether they meet nowhere else."""
        return self.counts == self.meetings

    def shares(self) -> list[np.ndarray]:
        """How micro-batches may weigh: by each of the counts, or by all together."""
        k, jaxpr = self.problem.k, self.program.jaxpr
        parts = [x.part for x in self.counts if ir.uses(jaxpr, x.part)]
        parts = [x for x in parts if x.aval.size == 1]
        found = list(map(np.asarray, self._values(parts))) if parts else []
        found += [np.prod(found, 0)] if parts else [np.ones(k)]
        return [
            x / x.sum()
            for i, x in enumerate(found)
            if np.isfinite(x).all() and (x >= 0).all() and x.any()
            if not any(np.allclose(x / x.sum(), y / y.sum()) for y in found[:i])
        ]

    def _values(self, parts: Sequence[Any]) -> Any:
        """What each micro-batch adds, `[micro-batch]` for each."""
        problem, (jaxpr, consts) = self.problem, self.program
        equations, _ = ir.needed(jaxpr, parts)
        own = ir.Program(jaxpr.replace(eqns=equations, outvars=parts), consts)
        split = problem.take(problem.batch, problem.rows(None).reshape(problem.k, -1))

        def of_part(*batch: Any) -> list[Any]:
            leaves = *jax.tree.leaves(problem.params), *batch
            index = jax.lax.axis_index(_AXIS)
            args = [*self.given, *leaves, *jax.tree.leaves(problem.key), index]
            pairs: Any = zip(args, jaxpr.invars, strict=True)
            found = ir.results(own, [cast(x, v.aval.dtype) for x, v in pairs])
            return [x.astype("float64").reshape(()) for x in found]

        run = jax.vmap(of_part, problem.axes, axis_name=_AXIS, axis_size=problem.k)
        return jax.jit(run)(*jax.tree.leaves(split))


def in_words(meetings: Iterable[Meeting]) -> str:
    """The lines of some, each with what rows need of each other there."""
    lines: dict[str, dict[str, None]] = {}
    for x in meetings:
        lines.setdefault(x.line, {})[x.what] = None
    return "; ".join(f"{x}: {' and '.join(of)}" for x, of in lines.items())


def prove(problem: Problem) -> Proof | None:
    """What the program of a loss says; None if it cannot be partitioned."""
    for wide in (True, False):  # A cast that rounds would be no sum of rows.
        try:
            with jax.enable_x64(True):
                return _proof(problem, wide)
        except Exception:
            continue  # Any: the code is the user's, and there are numbers to ask.
    return None


def _proof(problem: Problem, wide: bool) -> Proof:
    fun = problem.fun
    if isinstance(fun, jax.stages.Wrapped):
        fun = getattr(fun, "__wrapped__", fun)  # JAX remembers what it has traced.
    args = problem.params, problem.batch, *problem.keys(0)
    with jax.enable_x64(problem.x64):
        closed: Any = jax.make_jaxpr(read_by(fun, _in_the_open))(*args)
    if wide:
        closed = Wide(fun, x64=problem.x64).widened(closed)
    trees = closed.consts, problem.params, problem.key
    consts, params, keys = (len(jax.tree.leaves(tree)) for tree in trees)
    axes = [*[None] * (consts + params), *problem.axes, *[None] * keys]
    smooth = range(consts, consts + params)
    rows = [None if problem.k == 1 or d is None else Rows(d) for d in axes]
    names = enumerate([*closed.jaxpr.constvars, *closed.jaxpr.invars])
    arguments = [Argument(x.aval, rows[i] or WHOLE, i in smooth) for i, x in names]
    # Rows may meet in loops of any length: nothing runs.
    part = partition(closed.jaxpr, arguments, Axis(_AXIS, problem.k, 1 << 30))
    live = ir.live(part.jaxpr.replace(outvars=part.jaxpr.outvars[:1]))
    split = {x for x, d in zip(live.invars, axes, strict=False) if d is not None}
    found = list(_read(live, {live.invars[i] for i in smooth}, split))
    meetings = {x.part: x for x in found if x is not None}
    whole = dict.fromkeys(f"{x.name} at {places.short(x.line)}" for x in part.whole)
    return Proof(
        problem,
        ir.Program(live, part.consts),
        closed.consts,
        sorted(meetings.values(), key=lambda x: not x.of_params),
        has_rows=any(ir.num_readers(live, x) for x in split),
        has_place=ir.num_readers(live, live.invars[-1]) > 0,
        draws=None in found,
        whole="; ".join(whole),
    )


def read_by(fun: Callable[..., Any], rule: ir.Rule) -> Callable[..., list[Any]]:
    """A function of the arguments of `fun`: its program, promises too, by a rule."""

    def run(*args: Any) -> list[Any]:
        closed: Any = jax.make_jaxpr(lambda *x: fun(*x), axis_env=READ)(*args)
        program = ir.Program(closed.jaxpr, closed.consts)
        return ir.evaluate(program, jax.tree.leaves(args), rule)

    return run


def _in_the_open(e: core.JaxprEqn, values: list[Any]) -> Any:
    """A rule by which functions run as if they stood there, those with rules too."""
    rules = any(x.primitive.name.startswith(_RULES) for x in ir.within(e))
    if not rules and not ir.is_inline(e):
        return None  # JAX chooses some branches by the platform.
    if e.primitive.name.startswith(_RULES):
        return ir.evaluate(_placed(ir.inner(e)[0], e), values, _in_the_open)
    return opened(e, values, _in_the_open)


def opened(e: core.JaxprEqn, values: list[Any], rule: ir.Rule) -> Any:
    """What an equation gives whose programs run by a rule; None if it has none."""
    runs = [
        functools.partial(ir.evaluate, _placed(p, e), rule=rule) for p in ir.inner(e)
    ]
    if ir.is_inline(e):
        return runs[0](values)
    if ir.kind(e) == "scan" and not any(map(ir.is_reference, e.invars)):
        return ir.scan(ir.scan_of(e), runs[0], values)
    if ir.kind(e) == "cond":
        branches = [lambda *xs, run=run: run(xs) for run in runs]
        return jax.lax.switch(values[0].astype("int32"), branches, *values[1:])
    return None


def _placed(program: ir.Program, e: core.JaxprEqn) -> ir.Program:
    """The program of an equation, with lines of the user's."""
    jaxpr = program.jaxpr
    eqns = [places.placed(x, e.source_info) for x in jaxpr.eqns]
    return program._replace(jaxpr=jaxpr.replace(eqns=eqns))


def _read(
    jaxpr: core.Jaxpr, params: set[Any], rows: set[Any], around: bool = False
) -> Iterator[Meeting | None]:
    """Where rows meet in a program; None where it draws what no row has a key for.

    Args:
      jaxpr: the program, of which all is read.
      params: its arguments that depend on parameters.
      rows: those that depend on rows.
      around: whether parameters are in what is read around it.
    """
    params, rows = ir.following(jaxpr, params), ir.following(jaxpr, rows)
    for e in jaxpr.eqns:
        read, name = ir.variables(e.invars), e.primitive.name
        of_params = not params.isdisjoint(read)
        if _AXIS in ir.axes_of(e):
            what = "a sum over rows" if name == "psum" else "all rows"
            line = places.short(places.line_of(e.source_info))
            yield from (Meeting(what, line, of_params or around, x) for x in read)
        elif name.startswith(_DRAWS) and rows.isdisjoint(read):
            yield None
        for program in ir.inner_programs(e):
            own = _inside(e, program, params), _inside(e, program, rows)
            yield from _read(program, *own, of_params)


def _inside(e: core.JaxprEqn, program: core.Jaxpr, some: set[Any]) -> set[Any]:
    """The arguments of a program inside an equation that are some of its operands."""
    own = ir.operands(e, program)
    if len(own) != len(program.invars):
        return set() if some.isdisjoint(ir.variables(e.invars)) else {*program.invars}
    pairs = zip(own, program.invars, strict=True)
    return {inner for x, inner in pairs if ir.is_among(x, some)}
