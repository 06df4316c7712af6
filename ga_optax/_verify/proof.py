"""The proof, from the program of a loss, of how the loss depends on rows.

The program of the loss, traced at all rows, is partitioned over micro-batches
(`_partition`): it becomes the program of one micro-batch, with collectives where rows
meet.

If rows do not meet, the loss is a sum of rows, up to constant factors. If they meet
in numbers that no parameter is in, such as a count of tokens, the loss may divide by
them: then the weight of a micro-batch is what it adds to such a number. Otherwise
rows depend on each other.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .._partition.held import PARTIAL, WHOLE, Axis, Rows
from .._partition.partitioned import Argument, partition
from .._passes import jaxprs
from .._passes.places import line_of, short_line
from .._passes.rowwise import READ
from .measured import Problem, Wide

_AXIS = "micro-batches to verify"

_DRAWS = ("random_", "threefry", "rng_")  # how the names of their primitives begin


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
      has_rows, has_place: True if the loss depends on rows, on the number of the
        micro-batch.
      draws: True if the loss draws random numbers, and micro-batches draw other
        numbers.
      opaque: True if the loss calls code that cannot be read.
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
        live = jaxprs.live(part.jaxpr.replace(outvars=part.jaxpr.outvars[:1]))
        self.problem, self.given = problem, closed.consts
        self.program = jaxprs.Program(live, part.consts)
        self.is_sum = part.layouts[0] is PARTIAL
        self.opaque = bool(part.whole)
        self.promised = [f"{x.name} at {short_line(x.line)}" for x in part.promised]
        of_params = jaxprs.following(live, [live.invars[i] for i in smooth])
        meetings = [e for e in jaxprs.equations(live) if _AXIS in jaxprs.axes_of(e)]
        sums: list[Any] = [e.invars[0] for e in live.eqns if e in meetings]
        self.counts = [x for x in sums if x.aval.size == 1 and x not in of_params]
        self.in_counts = len(self.counts) == len(meetings)
        self.meetings = list(dict.fromkeys(map(_where, meetings)))
        reads = {x for x in live.invars if jaxprs.num_readers(live, x)}
        pairs = zip(live.invars, axes, strict=False)
        self.has_rows = any(x in reads for x, d in pairs if d is not None)
        self.has_place = live.invars[-1] in reads
        differ = reads.intersection(live.invars[len(axes) - keys :])
        names = (e.primitive.name for e in jaxprs.equations(live))
        self.draws = bool(differ) and any(x.startswith(_DRAWS) for x in names)

    def weights(self) -> list[np.ndarray]:
        """Candidates for the weights: each of the counts, and the product of all."""
        counts = self.values(self.counts) if self.counts else [np.ones(self.problem.k)]
        return [*counts, np.prod(counts, 0)]

    def values(self, parts: Sequence[Any]) -> np.ndarray:
        """The parts that micro-batches add to some numbers, `[number, micro-batch]`."""
        problem, (jaxpr, consts) = self.problem, self.program
        of_parts = jaxprs.Program(jaxprs.live(jaxpr.replace(outvars=parts)), consts)

        def of_part(batch: Any, params: Any, key: Any) -> list[Any]:
            index = jax.lax.axis_index(_AXIS).astype("int32")
            args = jax.tree.leaves((self.given, params, batch, key, index))
            return [x.astype(float).sum() for x in jaxprs.results(of_parts, args)]

        axes = [None if d is None else 0 for d in problem.axes], None, None
        run = jax.vmap(of_part, axes, axis_name=_AXIS, axis_size=problem.k)
        return np.array(jax.jit(run)(problem.parts(), problem.params, problem.key))

    def loss(self) -> float:
        """The loss, by the program of a micro-batch."""
        parts = self.values(self.program.jaxpr.outvars[:1])[0]
        return float(parts.sum() if self.is_sum else parts[0])


def prove(problem: Problem, promises: bool = True) -> Proof | None:
    """The proof for a loss; None if its program cannot be partitioned.

    Without `promises`, functions of `rowwise` are read like any other code.
    """
    # Casts that round would be no sums of rows.
    wide = Wide(lambda *x: problem.fun(*x)[0], problem.x64)
    trace = jax.make_jaxpr(wide, axis_env=READ if promises else [])
    try:
        jax.eval_shape(wide, *problem.args(0))
        return Proof(problem, trace(*problem.args(None)))
    except Exception:
        return None  # Any: the code is the user's.


def _where(e: core.JaxprEqn) -> str:
    kind = "a sum over rows" if e.primitive.name == "psum" else "all rows"
    return f"{short_line(line_of(e.source_info))}: {kind}"
