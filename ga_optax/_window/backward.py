"""Backward: a `Loop` for the loss, and one for each level whose buffers are read.

Parameters are buffers that are filled from the start, and cotangents of all buffers are
gradients, as the gradients of parameters are. A level takes the cotangents of its
buffers back with a loop over  Σ <cotangent, operand>,  whose gradients are cotangents
of the buffers that the loop reads.
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
from ga_optax._loop.loss import DeviceContext, Flat, LossProgram, Operands
from ga_optax._loop.over_devices import all_reduced
from ga_optax._passes import known, read, rewrite
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts
from ga_optax._window.evaluation import Arrays, Evaluation, Part, wide
from ga_optax._window.meetings import part_of
from ga_optax._window.schedule import Level
from ga_optax.accumulator import Accumulator

Wanted = Sequence[tuple[Any, str]]  # variables, and their folds
Cotangents = dict[int, jax.Array]  # by number of the buffer


class Backward:
    """The way back of a window.

    Attributes:
      program: the loss of a micro-batch.
      values: the values on the way there.
      devices: the devices.
      start: the accumulator before the first micro-batch.
      names: the names of the parameters, by the numbers of their buffers.
      cotangents: the sums of the cotangents of buffers so far; of parameters these are
        the gradients.
      rows: the buffers of the leaves of the batch that are differentiated.
    """

    def __init__(
        self,
        program: LossProgram,
        values: Evaluation,
        operands: Operands,
        devices: DeviceContext,
    ) -> None:
        self.program, self.values, self.devices = program, values, devices
        self.start = operands.acc
        self.names = dict(zip(values.params, devices.names, strict=True))
        self.cotangents = dict(zip(values.params, self.start.total, strict=True))
        traits, leaves = values.schedule.traits, values.of_rows[: operands.rows]
        self.rows = [
            values.given(x, "residual", traits[x].smooth, stack)
            for x, stack in zip(leaves, values.xs, strict=False)
        ]

    def gradients_of_rows(self) -> Arrays:
        """The gradients of the leaves of the batch, at the end."""
        zeros_of = map(jnp.zeros_like, self.stored(self.rows))
        return list(map(self.cotangents.get, self.rows, zeros_of))

    def take(self, number: int) -> None:
        """Takes the cotangents of a level back to parameters and earlier buffers."""
        level = Level(number)
        if cotangents := self.summed(level):
            self.run(level, self.operands(cotangents), cotangents=cotangents)

    def take_shared(self, number: int) -> None:
        """Takes back the cotangents of what micro-batches share at a level, once."""
        values, level = self.values, Level(number, in_loop=False)
        # A rule may be nonlinear: then it has to see the cotangent of all devices.
        every = values.schedule.operands(level)
        has_rule = any(map(known.has_rule, values.schedule.needed(every, level)[0]))
        cotangents = self.summed(level, across=has_rule)
        if not cotangents:
            return
        roots = self.operands(cotangents)
        reads, _ = self.read(roots, level)

        def evaluate(diff: Arrays) -> Arrays:
            buffers = values.buffers | dict(zip(reads, diff, strict=True))
            return values.evaluate(roots, level, buffers=buffers)

        def term(g: jax.Array, old: jax.Array) -> jax.Array:
            g = g.astype(old.dtype)
            if values.axes and has_rule:  # the gradients are all-reduced later
                is_first = jax.lax.axis_index(values.axes) == 0
                g = jnp.where(is_first, g, jnp.zeros_like(g))
            return g

        def added(operands: tuple[Arrays, Arrays, Arrays]) -> Arrays:
            totals, diff, cotangents = operands
            with jax.named_scope("compute"):
                out, pullback = jax.vjp(evaluate, diff)
                pairs = zip(out, cotangents, strict=True)
                [grads] = pullback([ct.astype(x.dtype) for x, ct in pairs])
            pairs = zip(totals, grads, strict=True)
            return [old + term(g, old) for old, g in pairs]

        totals = list(map(self.so_far, reads))
        operands: Any = self.stored(reads), list(cotangents.values())
        if any(x > level and not x.in_loop for x in values.schedule.by_level):
            # XLA would reuse the forward pass of before, and keep all that it computed
            # beside the values of later levels. At the last level that costs nothing.
            operands = jax.lax.optimization_barrier(operands)
        operands = totals, *operands
        if self.program.optimize and self.program.low_precision:
            facts = Facts(sliced=[False] * len(totals), rounds_once=True)
            totals = with_passes(added, operands, facts)
        else:
            totals = added(operands)
        self.cotangents |= zip(reads, totals, strict=True)

    def summed(self, level: Level, across: bool = True) -> Cotangents:
        """Removes and returns the cotangents of a level, summed `across` devices."""
        axes = self.values.axes
        filled = self.values.schedule.filled_at(level)
        members = [j for j in filled if j in self.cotangents]
        if not members:
            return {}
        with jax.named_scope("merge"):
            cotangents = {j: self.cotangents.pop(j) for j in members}
            shared = [j for j in members if not self.is_residual(j)]
            if axes and shared and across:
                whole = jax.lax.psum([cotangents[j] for j in shared], axes)
                cotangents |= zip(shared, whole, strict=True)
        return cotangents

    # -- Buffers -----------------------------------------------------------------------

    def operands(self, numbers: Iterable[int]) -> list[Any]:
        """The operands of some buffers."""
        return [self.values.schedule.buffers[j].operand for j in numbers]

    def stored(self, numbers: Sequence[int]) -> Arrays:
        """The values of some buffers."""
        return [self.values.buffers[j] for j in numbers]

    def is_residual(self, j: int) -> bool:
        """True if a buffer holds a value of each of this device's micro-batches."""
        return self.values.schedule.buffers[j].kind == "residual"

    def read(self, roots: Sequence[Any], level: Level) -> tuple[list[int], list[int]]:
        """The buffers with cotangents that a level reads for `roots`, by number.

        Returns: the buffers that all micro-batches share, parameters first; residuals.
        """
        schedule, last = self.values.schedule, Level(self.values.schedule.end)
        variables = schedule.needed(roots, level, known=self.values.buffers)[1]
        views = filter(None, map(schedule.views.get, variables))
        pairs = ((j, schedule.buffers[j]) for j in {view.buffer for view in views})
        smooth = [j for j, b in pairs if b.has_cotangent and b.level < last]
        smooth.sort(key=lambda j: (j not in self.names, j))
        residuals = list(filter(self.is_residual, smooth))
        return [j for j in smooth if j not in residuals], residuals

    def so_far(self, j: int) -> jax.Array:
        """The sum of the cotangents of a buffer so far."""
        if j in self.cotangents:
            return self.cotangents[j]
        # Sums start at -0, which changes no bit.
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
        """Runs the loop of a level, which adds to cotangents of the buffers it reads.

        Args:
          level: the level.
          roots: the loss; or the operands of the buffers that have `cotangents`.
          wanted: other results of the loop.
          cotangents: the cotangents of the roots; None for the loss.
        """
        values = self.values
        shared, residuals = self.read(roots, level)
        parts = [ct for j, ct in (cotangents or {}).items() if self.is_residual(j)]
        every = [*roots, *(x for x, _ in wanted)]

        def micro_batch(diff: Arrays, x: Any) -> Arrays:
            of_residuals, xs, parts = x
            given = [*diff, *map(Part, of_residuals)]
            new: Any = dict(zip([*shared, *residuals], given, strict=True))
            buffers = values.buffers | new
            out = values.evaluate(every, level, xs, buffers, acts=cotangents is None)
            if cotangents is None:
                return out
            return [self.paired(out, cotangents, parts, xs[-1])]

        params, batch = self.stored(shared), (self.stored(residuals), values.xs, parts)
        first = jax.tree.map(lambda x: x[0], batch)
        closed: Any = jax.make_jaxpr(micro_batch)(params, first)
        # A count of 1: the accumulator is not empty, and its totals are added to.
        weight, count = jnp.zeros_like(self.start.weight), jnp.ones([], jnp.int32)
        acc = Accumulator(list(map(self.so_far, shared)), weight, count)
        leaves = jax.tree.leaves(batch)
        operands = Operands(closed.consts, params, leaves, [], [], acc)
        program = program_of(self.program, closed.jaxpr, len(shared), wanted)
        return self.added(program, operands, [*shared, *residuals], parts)

    def added(
        self, program: LossProgram, operands: Operands, reads: list[int], parts: Arrays
    ) -> tuple[Loop, State]:
        """Runs a loop that adds to the cotangents of the buffers that it `read`s.

        New cotangents of residuals are written over `parts`, the last of the batch.
        """
        values, batch, totals = self.values, list(operands.batch), operands.acc.total
        shared, residuals = reads[: len(totals)], reads[len(totals) :]
        adds = self.choose_additions(program, operands, shared)
        pairs = zip(residuals, batch, strict=False)
        adds += [additions.stacked(x, j not in self.cotangents) for j, x in pairs]
        stacks, moved = self.stacks(residuals, parts)
        first = len(batch) - len(parts)
        for i in moved:
            batch[first + i] = values.xs[-1]  # the loop reads the part in the total
        loop = Loop(
            program,
            self.devices,
            len(values.xs[-1]),
            adds,
            rounds_once=program.low_precision,
            rows=len(residuals),
            index=len(residuals) + len(values.xs) - 1,
            moved=tuple((first + i, len(totals) + n) for i, n in moved.items()),
        )
        acc = operands.acc._replace(total=[*totals, *stacks])
        # Equal loops are traced once.
        key = read.form(program.jaxpr), tuple(adds), loop.moved, tuple(program.folds)
        given = operands._replace(batch=batch, acc=acc)
        state = values.run(key, loop.__call__, given)
        values.note_latest(state.acc.total)
        self.cotangents |= zip(reads, state.acc.total, strict=True)
        values.free += [x for i, x in enumerate(parts) if i not in moved]
        return loop, state

    def choose_additions(
        self, program: LossProgram, operands: Operands, shared: list[int]
    ) -> list[additions.Addition]:
        """One addition for the gradient of each shared buffer."""
        off = "" if self.program.optimize else "optimize=False"
        whys = in_place.reasons(off, program, operands, {})
        names = [self.names[j] for j in shared if j in self.names]
        in_place.report(names, whys[: len(names)])
        return additions.choose(program, operands.acc.total, whys, {})

    def stacks(self, residuals: list[int], parts: Arrays) -> tuple[Arrays, dict]:
        """The arrays for the cotangents of residuals.

        New cotangents are written over `parts` of the same type, which the loop reads.

        Returns: the arrays; for each part that is written over, by number, the number
        of its array.
        """
        stacks: Arrays = []
        moved: dict[int, int] = {}
        for n, j in enumerate(residuals):
            if j in self.cotangents:
                stacks.append(self.cotangents[j])
                continue
            like = wide(zeros(jax.typeof(self.values.buffers[j][0])))
            type_ = self.values.type_of_stack(like)
            unused = (i for i in range(len(parts)) if i not in moved)
            part = next((i for i in unused if jax.typeof(parts[i]) == type_), None)
            if part is None:
                stacks.append(self.values.stack(like))
            else:
                moved[part] = n
                stacks.append(parts[part])
        return stacks, moved

    def paired(
        self, xs: Arrays, cotangents: Cotangents, parts: Arrays, index: jax.Array
    ) -> jax.Array:
        """Σ <cotangent, operand>, which stands for the loss of a micro-batch.

        `parts` are its parts of the cotangents of residuals.
        """
        buffers, of_residuals = self.values.schedule.buffers, iter(parts)

        def of_micro_batch(j: int, cotangent: jax.Array) -> jax.Array:
            if self.is_residual(j):
                return next(of_residuals)
            return cotangent if buffers[j].is_folded else part_of(cotangent, index)

        given = [of_micro_batch(j, ct) for j, ct in cotangents.items()]
        return sum(map(_paired, given, xs), jnp.zeros([], float))

    def finished(self, loop: Loop, state: State) -> tuple[Arrays, Flat]:
        """The results of a loop on all devices, the loss first, and the accumulator."""
        acc = state.acc._replace(total=[self.cotangents[j] for j in self.names])
        state = state._replace(acc=acc, carry=[])
        if self.values.axes:
            with jax.named_scope("merge"):
                state = all_reduced(loop, state, self.devices)
        return loop.results(state), state.acc


def program_of(
    loss: LossProgram, jaxpr: core.Jaxpr, num_params: int, wanted: Wanted
) -> LossProgram:
    """The program of a loop of the window: the loss, and results with other folds."""
    return loss._replace(
        jaxpr=rewrite.without_values(jaxpr),
        results=[x.aval for x in jaxpr.outvars],
        folds=["sum", *(fold for _, fold in wanted)],
        arrivals=[arrival(jaxpr, x) for x in jaxpr.invars[:num_params]],
    )


def _paired(cotangent: jax.Array, x: jax.Array) -> jax.Array:
    """Σ cotangent · x, whose gradient is the cotangent."""
    product = cotangent * x.astype(cotangent.dtype)
    return jnp.sum(product.real).astype(float)
