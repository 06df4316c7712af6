"""Backward: a `Loop` for the loss, and one for each level whose buffers it reads.

Parameters are buffers that are there from the start, and the cotangents of all buffers
are gradients as theirs are. A level takes its own back with a loop over
Σ <cotangent, operand>,  whose gradients are those of the buffers below.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._devices import collectives
from ga_optax._devices.collectives import zeros
from ga_optax._loop import additions, in_place
from ga_optax._loop.loop import Loop, State, with_passes
from ga_optax._loop.over_devices import all_reduced
from ga_optax._loop.step import Flat, Operands, Step, Where
from ga_optax._passes import ir
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts
from ga_optax._window.forward import FOLDS
from ga_optax._window.rules import own_part
from ga_optax._window.schedule import Buffer, Level, Phase
from ga_optax._window.values import Arrays, Part, Values, start_of_sum, wide
from ga_optax.accumulator import Accumulator

Wanted = Sequence[tuple[Any, Any]]  # variables, and how they are put together
Cotangents = dict[int, jax.Array]  # by number of the buffer


class Task(NamedTuple):
    """What one loop computes, and differentiates.

    Attributes:
      level: the buffers below it are known.
      roots: the loss, or nothing; or the operands that have `cotangents`.
      wanted: what else to compute.
      cotangents: those of the buffers of the operands; None on the way there.
    """

    level: Level
    roots: Sequence[Any]
    wanted: Wanted = ()
    cotangents: Cotangents | None = None


class Read(NamedTuple):
    """What a loop reads, by number.

    Attributes:
      shared: buffers that all micro-batches share and that have cotangents; parameters
        come first.
      own: those of single micro-batches that have cotangents.
      rigid: those that have none.
    """

    shared: list[int]
    own: list[int]
    rigid: list[int]


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
        self.rows = {
            values.given(Buffer(x, "own", -1, facts[x].smooth), stack): stack
            for x, stack in zip(own, values.xs, strict=False)
        }

    def of_rows(self) -> Arrays:
        """The cotangents of the leaves of the batch that have some, at the end."""
        return [
            self.cotangents.get(j, jnp.zeros_like(stack))
            for j, stack in self.rows.items()
        ]

    def take(self, level: int) -> None:
        """Takes the cotangents of a level back to parameters and earlier buffers."""
        cotangents = self.summed(Level(level))
        if cotangents:
            roots = [self.values.schedule.buffers[j].operand for j in cotangents]
            self.run(Task(Level(level), roots, cotangents=cotangents))

    def take_once(self, number: int) -> None:
        """Those of what was computed once."""
        values, axes = self.values, self.values.axes
        level, buffers = Level(number, Phase.ONCE), values.schedule.buffers
        # A rule may be nonlinear: then it has to see the cotangent of all devices.
        every = values.schedule.operands(*level)
        has_rule = _has_rule(values.schedule.needed(every, level)[0])
        cotangents = self.summed(level, across=has_rule)
        if not cotangents:
            return
        roots = [buffers[j].operand for j in cotangents]
        read = self.read(roots, level)

        def evaluate(diff: Arrays) -> Arrays:
            return values.evaluate(roots, level, buffers=self.known(read, diff))

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

        totals = list(map(self.so_far, read.shared))
        operands = totals, self.held(read.shared), list(cotangents.values())
        if self.step.optimize and self.step.low_precision:
            facts = Facts(sliced=[False] * len(totals), rounds_once=True)
            totals = with_passes(added, operands, facts)
        else:
            totals = added(operands)
        self.put(read, totals)

    def summed(self, level: Level, across: bool = True) -> Cotangents:
        """The cotangents of a level, `across` devices; they are no longer due."""
        buffers, axes = self.values.schedule.buffers, self.values.axes
        members = [j for j in self.values.schedule.at(*level) if j in self.cotangents]
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

    def read(
        self, roots: Sequence[Any], level: Level, wanted: Sequence[Any] = ()
    ) -> Read:
        """What a level reads for `roots`, and what it reads beside them."""
        schedule, held = self.values.schedule, self.values.buffers
        buffers = schedule.buffers

        def found(roots: Sequence[Any]) -> list[int]:
            its = schedule.needed(roots, level, held=held)[1]
            views = map(schedule.views.get, its)
            numbers = {view.buffer for view in views if view}
            return sorted(numbers, key=lambda j: (j not in self.names, j))

        smooth = [
            j
            for j in found(roots)
            if buffers[j].has_cotangent and buffers[j].level < schedule.end
        ]
        own = list(filter(self.is_own, smooth))
        every = filter(self.is_own, found([*roots, *wanted]))
        shared = [j for j in smooth if not self.is_own(j)]
        return Read(shared, own, [j for j in every if j not in own])

    def held(self, numbers: Sequence[int]) -> Arrays:
        """The values of some buffers."""
        return [self.values.buffers[j] for j in numbers]

    def known(self, read: Read, shared: Arrays, own: Sequence[Any] = ()) -> Any:
        """All buffers, with others in place of some; `own` are parts of them."""
        numbers, new = (
            [*read.shared, *read.own, *read.rigid],
            [*shared, *map(Part, own)],
        )
        return self.values.buffers | dict(zip(numbers, new, strict=False))

    def so_far(self, j: int) -> jax.Array:
        """The sum of the cotangents of a buffer so far."""
        if j in self.cotangents:
            return self.cotangents[j]
        start = start_of_sum(self.values.buffers[j])
        return collectives.vary(start, self.values.axes)

    def put(self, read: Read, totals: Arrays) -> None:
        """New sums of gradients and cotangents."""
        self.cotangents |= zip([*read.shared, *read.own], totals, strict=False)

    # -- Loops -------------------------------------------------------------------------

    def run(self, task: Task) -> tuple[Loop, State]:
        """A `Loop` that adds gradients, and writes the cotangents of what is kept."""
        values = self.values
        read = self.read(task.roots, task.level, [x for x, _ in task.wanted])
        own, rigid, shared = map(self.held, (read.own, read.rigid, read.shared))
        parts = [ct for j, ct in (task.cotangents or {}).items() if self.is_own(j)]

        def micro_batch(diff: Arrays, x: Any) -> Any:
            own, xs, rigid, parts = x
            known = self.known(read, diff, [*own, *rigid])
            return self.micro_batch(task, known, xs, parts)

        groups = own, values.xs, rigid, parts
        first = jax.tree.map(lambda x: x[0], groups)
        closed: Any = jax.make_jaxpr(micro_batch)(shared, first)
        batch = jax.tree.leaves(groups)
        of_loop = self.step_of(task, closed.jaxpr, len(shared))
        totals = list(map(self.so_far, read.shared))
        # It is not empty, and its totals are added to.
        weight = jnp.zeros_like(self.start.weight)
        acc = Accumulator(totals, weight, jnp.ones([], jnp.int32))
        operands = Operands(closed.consts, shared, batch, [], [], acc)
        ways = self.ways(of_loop, operands, read)
        stacks, moved = self.stacks(read, parts)
        for j, x in zip(read.own, own, strict=True):
            begins = j not in self.cotangents
            ways.append(additions.placed(x, begins))
        first_part, first_stack = len(batch) - len(parts), len(totals)
        for i in moved:
            batch[first_part + i] = values.xs[-1]  # it is read where it is written over
        moves = tuple((first_part + i, first_stack + n) for i, n in moved.items())
        acc = acc._replace(total=[*totals, *stacks])
        operands = operands._replace(batch=batch, acc=acc)
        loop = Loop(
            of_loop,
            self.where,
            len(values.xs[-1]),
            ways,
            rounds_once=of_loop.low_precision,
            rows=len(own),
            index=len(own) + len(values.xs) - 1,
            moved=moves,
        )
        state = self.applied(loop, operands, task.cotangents is None)
        self.put(read, state.acc.total)
        values.rooms += [x for i, x in enumerate(parts) if i not in moved]
        return loop, state

    def applied(self, loop: Loop, operands: Operands, *more: Any) -> State:
        """What a loop does; those that are alike are traced once."""
        its, values = loop.step, self.values
        does = tuple(loop.additions), loop.moved, tuple(its.ways)
        key = ir.form(its.jaxpr), *does, *more
        state = values.run(key, loop.__call__, operands)
        values.came(state.acc.total)
        return state

    def ways(self, of_loop: Step, operands: Operands, read: Read) -> list[Any]:
        """How gradients of what all micro-batches share are added."""
        off = "" if self.step.optimize else "optimize=False"
        whys = in_place.reasons(off, of_loop, operands, {})
        names = [self.names[j] for j in read.shared if j in self.names]
        in_place.report(names, whys[: len(names)])
        return additions.choose(of_loop, operands.acc.total, whys, {})

    def stacks(self, read: Read, parts: Arrays) -> tuple[Arrays, dict[int, int]]:
        """The arrays for the cotangents of what single micro-batches keep.

        Those that begin are written over `parts`, which are read in the same loop, as
        far as they are alike: which of these, and what is written there, by number.
        """
        stacks: Arrays = []
        moved: dict[int, int] = {}
        for n, j in enumerate(read.own):
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

    def is_own(self, j: int) -> bool:
        """Whether a buffer holds a value of each of this device's micro-batches."""
        return self.values.schedule.buffers[j].kind == "own"

    def micro_batch(self, task: Task, known: Any, x: Arrays, own: Arrays) -> Any:
        """The loss, or what stands for it, and what else is wanted.

        `own` are the parts of those cotangents that it alone has.
        """
        values = self.values
        wanted, acts = [x for x, _ in task.wanted], task.cotangents is None
        out = values.evaluate([*task.roots, *wanted], task.level, x, known, acts)
        loss, rest = out[: len(task.roots)], out[len(task.roots) :]
        if task.cotangents is not None:
            mine = iter(own)
            parts = [
                next(mine) if self.is_own(j) else self.part(j, ct, x[-1])
                for j, ct in task.cotangents.items()
            ]
            loss = [sum(map(_paired, parts, loss), jnp.zeros([], float))]
        return *(loss or [jnp.zeros([], float)]), *rest

    def part(self, j: int, cotangent: jax.Array, index: jax.Array) -> jax.Array:
        """A micro-batch's part of the cotangent of what all of them share."""
        folded = self.values.schedule.buffers[j].kind in FOLDS
        return cotangent if folded else own_part(cotangent, index)

    def step_of(self, task: Task, jaxpr: Any, leaves: int) -> Step:
        """What the loop does to a micro-batch."""
        return self.step._replace(
            jaxpr=ir.without_values(jaxpr),
            results=[x.aval for x in jaxpr.outvars],
            ways=["sum", *(way for _, way in task.wanted)],
            arrivals=[arrival(jaxpr, x) for x in jaxpr.invars[:leaves]],
        )

    def finished(self, loop: Loop, state: State) -> tuple[Arrays, Flat]:
        """The results of a loop on all devices, the loss first, and the accumulator."""
        acc = state.acc._replace(total=[self.cotangents[j] for j in self.names])
        state = state._replace(acc=acc, carry=[])
        if self.values.axes:
            with jax.named_scope("merge"):
                state = all_reduced(loop, state, self.where)
        return loop.results(state), state.acc


def _has_rule(equations: Sequence[core.JaxprEqn]) -> bool:
    """Whether a backward pass is anything but the transpose of a derivative."""
    rules = ("custom_vjp", "linear_call")
    names = [e.primitive.name for x in equations for e in ir.within(x)]
    return any(rule in name for rule in rules for name in names)


def _paired(cotangent: jax.Array, x: jax.Array) -> jax.Array:
    """Σ cotangent · x, whose gradient is the cotangent."""
    product = cotangent * x.astype(cotangent.dtype)
    return jnp.sum(product.real).astype(float)
