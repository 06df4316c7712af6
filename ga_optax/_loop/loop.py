"""The loop over the micro-batches of one call."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._devices import collectives, meshes
from ga_optax._loop import fences, trees, ways
from ga_optax._loop.additions import Additions, MicroStep
from ga_optax._loop.step import Flat, Operands, Step
from ga_optax._passes import casts, ir, table
from ga_optax._passes.facts import Facts
from ga_optax._passes.transformable import with_rules_of
from ga_optax.accumulator import Accumulator


def with_passes(run: Callable[[Any], Any], operands: Any, facts: Facts) -> Any:
    """`run(operands)` after the passes of a loop; sums of gradients come first."""
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(operands)
    program = table.run("loop", ir.Program(closed.jaxpr, closed.consts), facts)
    out = ir.results(program, jax.tree.leaves(operands))
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


class State(NamedTuple):
    """What one micro-batch hands to the next, flat.

    Attributes:
      acc: the accumulator so far.
      carry: the carried arguments.
      results: what each mode of aux keeps, in the order of `ways.kinds`; after the
        loop, or what it collected. The loss is the first leaf of "mean".
    """

    acc: Flat
    carry: list[jax.Array]
    results: list[Any]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan over micro-batches.

    Attributes:
      step: what `fun` does to one of them.
      num_microbatches: how many there are.
      additions: how gradients are added.
      last: how those of the last micro-batch are added, if it differs.
      rounds_once: whether gradients are rounded in the accumulator alone.
      local: whether it is known that no compiler distributes it over devices.
      sums_already: whether the backward pass sums over devices.
      axes: the data axes that are bound.
      logical: whether it is compiled alike for one device and for many.
      begins: whether the accumulator is known to be empty, see `accumulator.begun`.
      rows: how many leaves of the batch are differentiated, too: the first of them.
      index: which leaf of the batch is the index of the micro-batch, if some are.
      moved: leaves of the batch that are read from a total, in which their place is
        written over: `(leaf, total)`, by number.
    """

    step: Step
    num_microbatches: int
    additions: Additions
    last: Additions | None = None
    rounds_once: bool = False
    local: bool = False
    sums_already: bool = False
    axes: tuple[str, ...] = ()
    logical: bool = False
    begins: bool = False
    rows: int = 0
    index: int = 0
    moved: tuple[tuple[int, int], ...] = ()

    def __call__(self, operands: Operands) -> State:
        """Returns the last state, with all that was collected in it."""
        if not self.additions.in_place:
            return self.run(operands)
        last = self.last and self.last.by_hand
        plain = dataclasses.replace(self, additions=self.additions.by_hand, last=last)
        return with_rules_of(plain.run, self.run, last is not None)(operands)

    def run(self, operands: Operands) -> State:
        """The loop, after all passes; with references it has no transformations."""
        if not self.step.optimize:
            return self.as_written(operands)
        facts = Facts(
            sliced=self.step.sliced,
            rounds_once=self.rounds_once,
            local=self.local,
            logical=self.logical,
        )
        return with_passes(self.as_written, operands, facts)

    def as_written(self, operands: Operands) -> State:
        """The loop itself."""
        batch, state = operands.batch, self.start(operands)
        step: Any = functools.partial(self.micro_step, operands, self.additions)
        if self.last is not None:
            state, first = jax.lax.scan(step, state, [x[:-1] for x in batch])
            step = functools.partial(self.micro_step, operands, self.last)
            state, more = self.once(step, state, [x[-1] for x in batch])
            collected = jax.tree.map(lambda *x: jnp.concatenate(x), first, more)
        else:
            if operands.num_real is not None:
                step, batch = self.counted(step, operands)
            if self.num_microbatches > 1:
                state, collected = jax.lax.scan(step, state, batch)
            else:
                first = jax.tree.map(lambda x: x[0], batch)
                state, collected = self.once(step, state, first)
        kept = zip(self.kinds, state.results, strict=True)
        results = [collected[x.name] if x.collects else kept for x, kept in kept]
        return state._replace(results=results)

    @property
    def kinds(self) -> list[ways.Mode]:
        """The modes of aux that there are."""
        return ways.kinds(self.step.ways)

    def start(self, operands: Operands) -> State:
        """The state before the first micro-batch."""
        total, weight, count = operands.acc
        if not self.begins:
            empty = count == 0
            weight = jnp.where(empty, jnp.zeros_like(weight), weight)
            total = [accumulator.cleared(x, empty) for x in total]
        weight = self.vary(weight, count)
        # A known counter would be no fence: XLA computes what follows from it.
        acc = Accumulator(total, weight, self.fenced(count))
        groups = ways.by_mode(self.step.results, self.step.ways)
        modes = zip(self.kinds, groups, strict=True)
        return State(
            acc, operands.carry, [x.init(group, self.vary) for x, group in modes]
        )

    def counted(
        self, step: Callable[..., Any], operands: Operands
    ) -> tuple[Callable[..., Any], Any]:
        """A micro-step that is left out from `num_real` on, and what to scan over."""
        index = jnp.arange(self.num_microbatches, dtype=jnp.int32)

        def step_if_real(state: State, x: Any) -> Any:
            i, batch = x
            return fences.if_holds(i < operands.num_real, step, state, batch)

        return step_if_real, (index, operands.batch)

    def once(
        self, step: Callable[..., Any], start: State, batch: Any
    ) -> tuple[State, Any]:
        """A single micro-step, as an iteration of the loop."""
        if self.step.optimize:
            return fences.alone(step, start, batch)
        state, collected = step(start, batch)
        return state, jax.tree.map(lambda x: x[None], collected)

    def fenced(self, tree: Any) -> Any:
        return fences.fusion_barrier(tree) if self.step.optimize else tree

    def micro_step(
        self,
        operands: Operands,
        additions: Additions,
        state: State,
        batch: list[jax.Array],
    ) -> tuple[State, dict[str, list[jax.Array]]]:
        """The next state, and what to collect, by way."""
        its, acc = self.step, state.acc
        index = batch[self.index] % self.num_microbatches if self.rows else None
        batch = list(batch)
        for leaf, total in self.moved:
            at = jax.lax.dynamic_index_in_dim(acc.total[total], index, keepdims=False)
            batch[leaf] = at
        loss, pullback, rest = self.forward(operands, state, batch)
        weight = None
        if its.weighted:
            weight, *rest = rest
            weight = weight.astype(acc.weight.dtype)
        carry, aux = rest[: len(state.carry)], rest[len(state.carry) :]
        zero = accumulator.unknown_zero(acc.count) if self.step.optimize else None
        # If the backward pass sums over devices, they all have to run it, and no one of
        # them may leave out what came of it.
        skip = None if self.sums_already else weight
        step = MicroStep(
            weight if its.multiplies else None, skip, zero, self.axes, index
        )
        total = self.add_gradient(acc, additions, (loss, pullback), weight, step)
        with jax.named_scope("accumulate"):
            one = jnp.ones_like(acc.weight) if weight is None else weight
            follows = fences.next_count if self.step.optimize else accumulator.increment
            weights = self.vary(acc.weight + one, one)
            acc = Accumulator(total, weights, follows(acc.count))
            pairs = zip(carry, state.carry, strict=True)
            carry = [trees.like(trees.strong(new), old) for new, old in pairs]
            groups = ways.by_mode([loss, *aux], its.ways)
            modes = list(zip(self.kinds, groups, state.results, strict=True))
            results = [x.step(kept, leaves, weight, zero) for x, leaves, kept in modes]
            collected = {x.name: leaves for x, leaves, _ in modes if x.collects}
        return State(acc, carry, results), collected

    def forward(
        self, operands: Operands, state: State, batch: list[jax.Array]
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        """The loss of a micro-batch, its pullback, and the other results of `fun`."""
        given = operands.consts, operands.params, batch, state.carry
        consts, params, batch, carry = self.fenced(given)
        if self.step.optimize and self.local and self.num_microbatches > 1:
            jaxpr, zero = self.step.jaxpr, accumulator.unknown_zero(state.acc.count)
            of_params = jaxpr.invars[: len(params)]
            narrowed = [casts.is_narrowed(jaxpr, x) for x in of_params]
            params = fences.cast_inside(params, narrowed, zero)
        params, batch = [*params, *batch[: self.rows]], batch[self.rows :]
        keys = [jax.random.fold_in(key, state.acc.count) for key in operands.keys]
        program = ir.Program(self.step.jaxpr, consts)
        facts = Facts(optimize=self.step.optimize)
        program = table.run("micro-step", program, facts)

        def evaluate(*params: jax.Array) -> tuple[jax.Array, list[Any]]:
            loss, *rest = ir.results(program, [*params, *batch, *keys, *carry])
            return loss, [jnp.asarray(x) for x in rest]  # an aux may be a plain number

        with jax.named_scope("compute"):
            return jax.vjp(evaluate, *params, has_aux=True)

    def add_gradient(
        self,
        acc: Flat,
        additions: Additions,
        forward: tuple[jax.Array, Any],
        weight: jax.Array | None,
        step: MicroStep,
    ) -> list[jax.Array]:
        """`acc.total` plus the weighted gradient of one micro-batch."""
        loss, pullback = forward
        # The backward pass is linear in the cotangent: with the weight for it, weighted
        # gradients come out, and nothing has to be multiplied, in place or not.
        scaled = weight is not None and not self.step.multiplies
        cotangent = weight.astype(loss.dtype) if scaled else jnp.ones_like(loss)
        cotangent = trees.like(cotangent, loss)

        def pull(*slots: Any) -> Sequence[jax.Array]:
            back = pullback.with_refs(*slots) if slots else pullback
            return back(cotangent)

        return additions.add(acc.total, step, pull)

    def vary(self, x: jax.Array, term: Any) -> jax.Array:
        """Marks a sum as varying over devices as `term` does, one of its terms."""
        return collectives.vary(x, (*self.step.varying, *meshes.varying(term)))

    def results(self, state: State) -> list[jax.Array]:
        """The loss and the leaves of the aux, of all micro-batches."""
        modes = zip(self.kinds, state.results, strict=True)
        leaves = ways.in_order(
            [way.finish(kept) for way, kept in modes], self.step.ways
        )
        pairs = zip(leaves, self.step.results, strict=True)
        return [
            x.astype(due.dtype) if jnp.issubdtype(due.dtype, jnp.inexact) else x
            for x, due in pairs
        ]
