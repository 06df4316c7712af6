"""Backward: a `Loop` for the loss, and one for each level whose buffers it reads.

Parameters are buffers that are there from the start, and the cotangents of all buffers
are gradients as theirs are. A level takes its own back with a loop over
Σ <cotangent, operand>,  whose gradients are those of the buffers below.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._devices import collectives
from ga_optax._devices.collectives import zeros
from ga_optax._loop import additions, in_place
from ga_optax._loop.loop import Loop, State, with_passes
from ga_optax._loop.over_devices import all_reduced
from ga_optax._loop.step import Flat, Operands, Step, Where
from ga_optax._passes import ir, known
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts
from ga_optax._window.forward import FOLDS
from ga_optax._window.rules import own_part
from ga_optax._window.schedule import Buffer, Level
from ga_optax._window.values import Arrays, Part, Values, wide
from ga_optax.accumulator import Accumulator

Wanted = Sequence[tuple[Any, str]]  # variables, and how they are put together
Cotangents = dict[int, jax.Array]  # by number of the buffer


class Backward:
    """The gradients of a window so far.

    Attributes:
      names: those of the parameters, by number.
      cotangents: the sums of the cotangents of the buffers; those of parameters are
        their gradients.
    """

    def __init__(
        self, step: Step, values: Values, operands: Operands, where: Where
    ) -> None:
        self.step, self.values, self.where = step, values, where
        self.start = operands.acc
        self.names = dict(zip(values.params, where.names, strict=True))
        self.cotangents = dict(zip(values.params, self.start.total, strict=True))
        facts, own = values.schedule.facts, values.of_own[: operands.rows]
        self.rows = [
            values.given(Buffer(x, "own", -1, facts[x].smooth), stack)
            for x, stack in zip(own, values.xs, strict=False)
        ]

    def of_rows(self) -> Arrays:
        """The cotangents of the leaves of the batch that have some, at the end."""
        zeros_of = map(jnp.zeros_like, self.held(self.rows))
        return list(map(self.cotangents.get, self.rows, zeros_of))

    def take(self, number: int) -> None:
        """Takes the cotangents of a level back to parameters and earlier buffers."""
        level = Level(number)
        if cotangents := self.summed(level):
            self.run(level, self.operands(cotangents), cotangents=cotangents)

    def take_once(self, number: int) -> None:
        """Those of what was computed once."""
        values, axes, level = self.values, self.values.axes, Level(number, once=True)
        # A rule may be nonlinear: then it has to see the cotangent of all devices.
        every = values.schedule.operands(level)
        has_rule = any(map(known.has_rule, values.schedule.needed(every, level)[0]))
        cotangents = self.summed(level, across=has_rule)
        if not cotangents:
            return
        roots = self.operands(cotangents)
        read, _ = self.read(roots, level)

        def evaluate(diff: Arrays) -> Arrays:
            known = values.buffers | dict(zip(read, diff, strict=True))
            return values.evaluate(roots, level, buffers=known)

        def term(g: jax.Array, old: jax.Array) -> jax.Array:
            g = g.astype(old.dtype)
            if axes and has_rule:  # The gradients are all-reduced later.
                g = jnp.where(jax.lax.axis_index(axes) == 0, g, jnp.zeros_like(g))
            return g

        def added(operands: tuple[Arrays, Arrays, Arrays]) -> Arrays:
            totals, diff, cotangents = operands
            with jax.named_scope("compute"):
                out, pullback = jax.vjp(evaluate, diff)
                pairs = zip(out, cotangents, strict=True)
                [grads] = pullback([ct.astype(x.dtype) for x, ct in pairs])
            pairs = zip(totals, grads, strict=True)
            return [old + term(g, old) for old, g in pairs]

        totals = list(map(self.so_far, read))
        held, its = self.held(read), list(cotangents.values())
        if any(x.once and x > level for x in values.schedule.numbers):
            # XLA would take the forward pass of before, and keep all that it computed
            # while that of later levels is there. Of the last level that costs nothing.
            held, its = jax.lax.optimization_barrier((held, its))
        operands = totals, held, its
        if self.step.optimize and self.step.low_precision:
            facts = Facts(sliced=[False] * len(totals), rounds_once=True)
            totals = with_passes(added, operands, facts)
        else:
            totals = added(operands)
        self.cotangents |= zip(read, totals, strict=True)

    def summed(self, level: Level, across: bool = True) -> Cotangents:
        """The cotangents of a level, `across` devices; they are no longer due."""
        buffers, axes = self.values.schedule.buffers, self.values.axes
        members = [j for j in self.values.schedule.at(level) if j in self.cotangents]
        if not members:
            return {}
        with jax.named_scope("merge"):
            cotangents = {j: self.cotangents.pop(j) for j in members}
            shared = [j for j in members if buffers[j].kind != "own"]
            if axes and shared and across:
                whole = jax.lax.psum([cotangents[j] for j in shared], axes)
                cotangents |= zip(shared, whole, strict=True)
        return cotangents

    # -- What is differentiated --------------------------------------------------------

    def operands(self, numbers: Iterable[int]) -> list[Any]:
        """What fills some buffers."""
        return [self.values.schedule.buffers[j].operand for j in numbers]

    def held(self, numbers: Sequence[int]) -> Arrays:
        """The values of some buffers."""
        return [self.values.buffers[j] for j in numbers]

    def is_own(self, j: int) -> bool:
        """Whether a buffer holds a value of each of this device's micro-batches."""
        return self.values.schedule.buffers[j].kind == "own"

    def read(self, roots: Sequence[Any], level: Level) -> tuple[list[int], list[int]]:
        """The buffers with cotangents that a level reads for `roots`, by number.

        First those that all micro-batches share, of which parameters come first; then
        those of single ones.
        """
        schedule, held = self.values.schedule, self.values.buffers
        views = map(schedule.views.get, schedule.needed(roots, level, held=held)[1])
        smooth = [
            j
            for j in {view.buffer for view in views if view}
            if schedule.buffers[j].has_cotangent
            and schedule.buffers[j].level < schedule.end
        ]
        smooth.sort(key=lambda j: (j not in self.names, j))
        own = list(filter(self.is_own, smooth))
        return [j for j in smooth if j not in own], own

    def so_far(self, j: int) -> jax.Array:
        """The sum of the cotangents of a buffer so far."""
        if j in self.cotangents:
            return self.cotangents[j]
        # The number to which all of a sum is added is -0, which changes no bit.
        start = -wide(jnp.zeros_like(self.values.buffers[j]))
        return collectives.vary(start, self.values.axes)

    # -- Loops -------------------------------------------------------------------------

    def run(
        self,
        level: Level,
        roots: Sequence[Any],
        wanted: Wanted = (),
        cotangents: Cotangents | None = None,
    ) -> tuple[Loop, State]:
        """A `Loop` that adds gradients, and writes the cotangents of what is kept.

        Args:
          level: the buffers below it are known.
          roots: the loss; or the operands that have `cotangents`.
          wanted: what else to compute.
          cotangents: those of the buffers of the operands; None on the way there.
        """
        values = self.values
        shared, own = self.read(roots, level)
        parts = [ct for j, ct in (cotangents or {}).items() if self.is_own(j)]
        every = [*roots, *(x for x, _ in wanted)]

        def micro_batch(diff: Arrays, x: Any) -> Arrays:
            its, xs, parts = x
            given = [*diff, *map(Part, its)]
            known: Any = dict(zip([*shared, *own], given, strict=True))
            known = values.buffers | known
            out = values.evaluate(every, level, xs, known, acts=cotangents is None)
            if cotangents is None:
                return out
            return [self.paired(out, cotangents, parts, xs[-1])]

        params, groups = self.held(shared), (self.held(own), values.xs, parts)
        first = jax.tree.map(lambda x: x[0], groups)
        closed: Any = jax.make_jaxpr(micro_batch)(params, first)
        # It is not empty, and its totals are added to.
        weight, count = jnp.zeros_like(self.start.weight), jnp.ones([], jnp.int32)
        acc = Accumulator(list(map(self.so_far, shared)), weight, count)
        batch = jax.tree.leaves(groups)
        operands = Operands(closed.consts, params, batch, [], [], acc)
        step = step_of(self.step, closed.jaxpr, len(shared), wanted)
        return self.added(step, operands, [*shared, *own], parts)

    def added(
        self, step: Step, operands: Operands, read: list[int], parts: Arrays
    ) -> tuple[Loop, State]:
        """Adds to the cotangents of what a loop reads, and writes those of its own.

        Those that begin are written over `parts`, the last of the batch.
        """
        values, batch, totals = self.values, list(operands.batch), operands.acc.total
        shared, own = read[: len(totals)], read[len(totals) :]
        ways = self.ways(step, operands, shared)
        stacks, moved = self.stacks(own, parts)
        for j, x in zip(own, batch, strict=False):
            begins = j not in self.cotangents
            ways.append(additions.placed(x, begins))
        first = len(batch) - len(parts)
        for i in moved:
            batch[first + i] = values.xs[-1]  # it is read where it is written over
        loop = Loop(
            step,
            self.where,
            len(values.xs[-1]),
            ways,
            rounds_once=step.low_precision,
            rows=len(own),
            index=len(own) + len(values.xs) - 1,
            moved=tuple((first + i, len(totals) + n) for i, n in moved.items()),
        )
        acc = operands.acc._replace(total=[*totals, *stacks])
        # Those that are alike are traced once.
        key = ir.form(step.jaxpr), tuple(ways), loop.moved, tuple(step.ways)
        given = operands._replace(batch=batch, acc=acc)
        state = values.run(key, loop.__call__, given)
        values.came(state.acc.total)
        self.cotangents |= zip(read, state.acc.total, strict=True)
        values.rooms += [x for i, x in enumerate(parts) if i not in moved]
        return loop, state

    def ways(self, of_loop: Step, operands: Operands, shared: list[int]) -> list[Any]:
        """How gradients of what all micro-batches share are added."""
        off = "" if self.step.optimize else "optimize=False"
        whys = in_place.reasons(off, of_loop, operands, {})
        names = [self.names[j] for j in shared if j in self.names]
        in_place.report(names, whys[: len(names)])
        return additions.choose(of_loop, operands.acc.total, whys, {})

    def stacks(self, own: list[int], parts: Arrays) -> tuple[Arrays, dict[int, int]]:
        """The arrays for the cotangents of what single micro-batches keep.

        Those that begin are written over `parts`, which are read in the same loop, as
        far as they are alike: which of these, and what is written there, by number.
        """
        stacks: Arrays = []
        moved: dict[int, int] = {}
        for n, j in enumerate(own):
            if j in self.cotangents:
                stacks.append(self.cotangents[j])
                continue
            like = wide(zeros(jax.typeof(self.values.buffers[j][0])))
            due = self.values.type_of_stack(like)
            left = (i for i, x in enumerate(parts) if i not in moved)
            same = next((i for i in left if jax.typeof(parts[i]) == due), None)
            if same is None:
                stacks.append(self.values.room(like))
            else:
                moved[same] = n
                stacks.append(parts[same])
        return stacks, moved

    def paired(
        self, xs: Arrays, cotangents: Cotangents, own: Arrays, index: jax.Array
    ) -> jax.Array:
        """What stands for the loss of a micro-batch: Σ <cotangent, operand>.

        `own` are the parts of those cotangents that it alone has.
        """
        mine, buffers = iter(own), self.values.schedule.buffers
        parts = [
            next(mine)
            if self.is_own(j)
            else (ct if buffers[j].kind in FOLDS else own_part(ct, index))
            for j, ct in cotangents.items()
        ]
        return sum(map(_paired, parts, xs), jnp.zeros([], float))

    def finished(self, loop: Loop, state: State) -> tuple[Arrays, Flat]:
        """The results of a loop on all devices, the loss first, and the accumulator."""
        acc = state.acc._replace(total=[self.cotangents[j] for j in self.names])
        state = state._replace(acc=acc, carry=[])
        if self.values.axes:
            with jax.named_scope("merge"):
                state = all_reduced(loop, state, self.where)
        return loop.results(state), state.acc


def step_of(step: Step, jaxpr: core.Jaxpr, leaves: int, wanted: Wanted) -> Step:
    """What a loop does whose program has so many leaves, and results after the loss."""
    return step._replace(
        jaxpr=ir.without_values(jaxpr),
        results=[x.aval for x in jaxpr.outvars],
        ways=["sum", *(way for _, way in wanted)],
        arrivals=[arrival(jaxpr, x) for x in jaxpr.invars[:leaves]],
    )


def _paired(cotangent: jax.Array, x: jax.Array) -> jax.Array:
    """Σ cotangent · x, whose gradient is the cotangent."""
    product = cotangent * x.astype(cotangent.dtype)
    return jnp.sum(product.real).astype(float)
