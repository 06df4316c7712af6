"""A proof, from the program of a loss, of how the loss depends on rows.

The program of the loss, traced at all rows, is partitioned over micro-batches
(`_partition`): it becomes the program of one micro-batch, with collectives where rows
meet.

If rows do not meet, the loss is a sum of rows, up to constant factors. If they meet in
numbers that no parameter is in, such as a count of tokens, the loss may divide by them:
then the weight of a micro-batch is what it adds to such a number. Otherwise rows depend
on each other.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ga_optax._partition import PARTIAL, WHOLE, Argument, Axis, Rows, partition
from ga_optax._passes import interpret, places, read
from ga_optax._passes.rowwise import READ
from ga_optax._verify.gradients import Problem
from ga_optax._verify.wide import Wide, cast

_AXIS = "micro-batches to verify"
_DRAWS = ("random_", "threefry", "rng_")  # how the names of their primitives begin
_SAME_VALUE = ("convert_element_type", "copy")


class Proof:
    """The program of a loss for one micro-batch, and the facts that it shows.

    Attributes:
      problem: the loss and its arguments.
      program: the program of a micro-batch, with collectives.
      given: the values of its first arguments, constants of the loss.
      is_sum: True if the result is the part that a micro-batch adds to the loss.
      meetings: the lines where rows meet, each with the kind of the meeting.
      counts: the variables that a micro-batch adds to numbers without parameters.
      in_counts: True if rows meet in such numbers alone.
      has_rows, has_key, has_place: True if the loss depends on rows, on the key, on
        the number of the micro-batch.
      draws: True if the loss draws random numbers, and micro-batches draw other
        numbers.
      opaque: names and lines of code that cannot be read.
      promised: names and lines of calls that `rowwise` promises.
    """

    def __init__(self, problem: Problem, closed: Any) -> None:
        """Partitions a program that was traced at all rows."""
        trees = closed.consts, problem.params, problem.key
        consts, params, keys = (len(jax.tree.leaves(tree)) for tree in trees)
        axes = [*[None] * (consts + params), *problem.axes, *[None] * keys]
        smooth = range(consts, consts + params)
        rows = [None if problem.k == 1 or d is None else Rows(d) for d in axes]
        names = enumerate([*closed.jaxpr.constvars, *closed.jaxpr.invars])
        arguments = [Argument(x.aval, rows[i] or WHOLE, i in smooth) for i, x in names]
        # Rows may meet in loops of any length: nothing runs.
        part = partition(closed.jaxpr, arguments, Axis(_AXIS, problem.k, 1 << 30))
        live = read.live(part.jaxpr.replace(outvars=part.jaxpr.outvars[:1]))
        self.problem, self.given = problem, closed.consts
        self.program = read.Program(live, part.consts)
        self.is_sum = part.layouts[0] is PARTIAL
        self.opaque, self.promised = _names(part.whole), _names(part.promised)
        of_params = read.following(live, [live.invars[i] for i in smooth])
        meetings = [e for e in read.equations(live) if _AXIS in read.axes_of(e)]
        sums: list[Any] = [e.invars[0] for e in live.eqns if e in meetings]
        self.counts = [x for x in sums if x.aval.size == 1 and x not in of_params]
        self.in_counts = len(self.counts) == len(meetings)
        self.meetings = _where(meetings)
        reads = {x for x in live.invars if read.num_readers(live, x)}
        split = {x for x, d in zip(live.invars, axes, strict=False) if d is not None}
        self.has_rows = not split.isdisjoint(reads)
        self.has_place = live.invars[-1] in reads
        self.has_key = not reads.isdisjoint(live.invars[len(axes) - keys : -1])
        names = (e.primitive.name for e in read.equations(live))
        draws = any(name.startswith(_DRAWS) for name in names)
        self.draws = draws and (self.has_key or self.has_place)

    def shares(self) -> list[np.ndarray]:
        """Candidates for the weights: each of the counts, and the product of all."""
        counts = self.values(self.counts) if self.counts else [np.ones(self.problem.k)]
        every = [*counts, np.prod(counts, 0)]
        good = (x for x in every if np.isfinite(x).all() and (x >= 0).all() and x.any())
        return [x / x.sum() for x in good]

    def values(self, parts: Sequence[Any]) -> np.ndarray:
        """The parts that micro-batches add to some numbers, `[number, micro-batch]`."""
        problem, (jaxpr, consts) = self.problem, self.program
        of_parts = read.Program(read.live(jaxpr.replace(outvars=parts)), consts)

        def of_part(*batch: Any) -> list[Any]:
            leaves = *jax.tree.leaves(problem.params), *batch
            index = jax.lax.axis_index(_AXIS)
            args = [*self.given, *leaves, *jax.tree.leaves(problem.key), index]
            pairs: Any = zip(args, jaxpr.invars, strict=True)
            args = [cast(x, v.aval.dtype) for x, v in pairs]
            values = interpret.results(of_parts, args)
            return [x.astype("float64").reshape(()) for x in values]

        run = jax.vmap(of_part, problem.axes, axis_name=_AXIS, axis_size=problem.k)
        return np.array(jax.jit(run)(*jax.tree.leaves(problem.take(problem.rows))))

    def loss(self) -> float:
        """The loss, by the program of a micro-batch."""
        parts = self.values(self.program.jaxpr.outvars[:1])[0]
        return float(parts.sum() if self.is_sum else parts[0])

    def is_divided_by(self, number: int) -> bool:
        """True if the result is a mean, or another scalar but a sum, over a literal."""
        last = self._maker(self.program.jaxpr.outvars[0])
        if last is None or last.primitive.name != "div":
            return False
        term = self._maker(
            last.invars[0]
        )  # the division of a sum makes the mean itself
        is_mean = term is not None and term.primitive.name == "reduce_sum"
        return getattr(last.invars[1], "val", None) == number and not is_mean

    def _maker(self, x: Any) -> core.JaxprEqn | None:
        """The equation that computes a value, before casts."""
        e = read.made_by(self.program.jaxpr, x)
        if e is not None and e.primitive.name in _SAME_VALUE:
            return self._maker(e.invars[0])
        return e


def prove(problem: Problem, promises: bool = True) -> Proof | None:
    """The proof for a loss; None if its program cannot be partitioned.

    Without `promises`, functions of `rowwise` are read like any other code.
    """
    fun, env = problem.fun, READ if promises else []
    if isinstance(fun, jax.stages.Wrapped):
        fun = getattr(fun, "__wrapped__", fun)  # JAX remembers what it has traced.
    try:
        with jax.enable_x64(problem.x64):
            trace = jax.make_jaxpr(lambda *x: fun(*x), axis_env=env)
            closed = trace(*problem.args(None))
        # A cast that rounds would be no sum of rows.
        return Proof(problem, Wide(fun, problem.x64).widened(closed))
    except Exception:
        return None  # Any: the code is the user's.


def _where(meetings: list[core.JaxprEqn]) -> list[str]:
    lines: dict[str, dict[str, None]] = {}
    for e in meetings:
        kind = "a sum over rows" if e.primitive.name == "psum" else "all rows"
        lines.setdefault(places.short(places.line_of(e.source_info)), {})[kind] = None
    return [f"{line}: {' and '.join(kinds)}" for line, kinds in lines.items()]


def _names(notes: Any) -> list[str]:
    return list(dict.fromkeys(f"{x.name} at {places.short(x.line)}" for x in notes))
