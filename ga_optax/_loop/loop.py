"""The loop over the micro-batches of one call."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._devices import collectives, meshes
from ga_optax._loop import additions, fences, trees, ways
from ga_optax._loop.additions import Additions, MicroStep
from ga_optax._loop.step import Flat, Operands, Step, Where
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
      results: what the way of each result keeps of it; after the loop, or what it
        collected. The loss is the first.
      seen: the weight and the number of the micro-batches of this call, which the way
        "mean" divides by; empty without one.
    """

    acc: Flat
    carry: list[jax.Array]
    results: list[Any]
    seen: Sequence[jax.Array]


def with_collected(state: State, collected: Mapping[int, Any]) -> State:
    """The state with what was collected, by number of the result."""
    results = [collected.get(i, x) for i, x in enumerate(state.results)]
    return state._replace(results=results)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan over micro-batches.

    Attributes:
      step: what `fun` does to one of them.
      where: the devices.
      num_microbatches: how many there are.
      additions: how gradients are added.
      rounds_once: whether gradients are rounded in the accumulator alone.
      begins: whether the accumulator is known to be empty, see `accumulator.begun`.
      rows: how many leaves of the batch are differentiated, too: the first of them.
      index: which leaf of the batch is the index of the micro-batch, if some are.
      moved: leaves of the batch that are read from a total, in which their place is
        written over: `(leaf, total)`, by number.
    """

    step: Step
    where: Where
    num_microbatches: int
    additions: Additions
    rounds_once: bool = False
    begins: bool = False
    rows: int = 0
    index: int = 0
    moved: tuple[tuple[int, int], ...] = ()

    def __call__(self, operands: Operands) -> State:
        """Returns the last state, with all that was collected in it."""
        if not any(x.in_place for x in self.additions):
            return self.run(operands)
        by_hand = additions.by_hand(self.additions)
        plain = dataclasses.replace(self, additions=by_hand)
        return with_rules_of(plain.run, self.run)(operands)

    def run(self, operands: Operands) -> State:
        """The loop, after all passes; with references it has no transformations."""
        if not self.step.optimize:
            return self.as_written(operands)
        facts = Facts(
            sliced=self.step.sliced,
            rounds_once=self.rounds_once,
            local=self.where.is_local,
            logical=bool(self.where.logical),
        )
        return with_passes(self.as_written, operands, facts)

    def as_written(self, operands: Operands) -> State:
        """The loop itself."""
        batch, state = operands.batch, self.start(operands)
        step: Any = functools.partial(self.micro_step, operands, self.additions)
        xs: Any = batch
        if operands.num_real is not None:
            step = functools.partial(_if_real, step, operands.num_real)
            xs = jnp.arange(self.num_microbatches, dtype=jnp.int32), batch
        if self.num_microbatches > 1:
            state, collected = jax.lax.scan(step, state, xs)
        else:
            first = jax.tree.map(lambda x: x[0], xs)
            state, collected = self.once(step, state, first)
        return with_collected(state, collected)

    def collected(self, results: Sequence[Any]) -> dict[int, Any]:
        """Those of the results that are collected, by number."""
        pairs = enumerate(zip(self.step.ways, results, strict=True))
        return {i: x for i, (name, x) in pairs if ways.WAYS[name].collects}

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
        pairs = zip(self.step.ways, self.step.results, strict=True)
        results = [ways.WAYS[name].init(x, self.vary) for name, x in pairs]
        seen: list[Any] = []
        if "mean" in self.step.ways:
            zero = jnp.zeros([], float)
            seen = [self.vary(zero, zero), jnp.zeros([], jnp.int32)]
        return State(acc, operands.carry, results, seen)

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
        adds: Additions,
        state: State,
        batch: list[jax.Array],
    ) -> tuple[State, dict[int, Any]]:
        """The next state, and what to collect."""
        its, acc = self.step, state.acc
        index = batch[self.index] % self.num_microbatches if self.rows else None
        batch = list(batch)
        for leaf, total in self.moved:
            at = jax.lax.dynamic_index_in_dim(acc.total[total], index, keepdims=False)
            batch[leaf] = at
        loss, pullback, rest = self.forward(operands, state, batch)
        weight = factor = None
        cotangent = jnp.ones_like(loss)
        if its.weighted:
            weight, *rest = rest
            weight = weight.astype(acc.weight.dtype)
            # The backward pass is linear in the cotangent: with the weight for it,
            # weighted gradients come out, and nothing has to be multiplied.
            if its.multiplies:
                factor = weight
            else:
                cotangent = weight.astype(loss.dtype)
        carry, aux = rest[: len(state.carry)], rest[len(state.carry) :]
        zero = accumulator.unknown_zero(acc.count) if its.optimize else None
        # If the backward pass sums over devices, they all have to run it, and no one of
        # them may leave out what came of it.
        skip = None if self.where.sums_already else weight
        step = MicroStep(factor, skip, zero, self.where.axes, index)
        pull = functools.partial(_pull, pullback, trees.like(cotangent, loss))
        total = additions.add(adds, acc.total, step, pull)
        with jax.named_scope("accumulate"):
            one = jnp.ones_like(acc.weight) if weight is None else weight
            follows = fences.next_count if its.optimize else accumulator.increment
            weights = self.vary(acc.weight + one, one)
            acc = Accumulator(total, weights, follows(acc.count))
            pairs = zip(carry, state.carry, strict=True)
            carry = [trees.like(trees.strong(new), old) for new, old in pairs]
            results, seen = self.put([loss, *aux], state, weight, zero)
        return State(acc, carry, results, seen), self.collected([loss, *aux])

    def put(
        self,
        leaves: Sequence[Any],
        state: State,
        weight: jax.Array | None,
        zero: jax.Array | None,
    ) -> tuple[list[Any], list[jax.Array]]:
        """What is kept of the results, and seen, after one more micro-batch."""
        own, seen = None, []
        if state.seen:
            total, count = state.seen
            # Of this counter: with the loop's own zero XLA on CPUs (jaxlib 0.12) orders
            # the loop so that a weighted model of unrolled layers holds one more leaf.
            if weight is not None and zero is not None:
                own = accumulator.unknown_zero(count)
            one = jnp.ones_like(total) if weight is None else weight
            seen = [total + one, accumulator.increment(count)]
        now = ways.Now(weight, zero, own)
        triples = zip(self.step.ways, state.results, leaves, strict=True)
        return [ways.WAYS[name].step(kept, x, now) for name, kept, x in triples], seen

    def forward(
        self, operands: Operands, state: State, batch: list[jax.Array]
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        """The loss of a micro-batch, its pullback, and the other results of `fun`."""
        given = operands.consts, operands.params, batch, state.carry
        consts, params, batch, carry = self.fenced(given)
        if self.step.optimize and self.where.is_local and self.num_microbatches > 1:
            jaxpr, zero = self.step.jaxpr, accumulator.unknown_zero(state.acc.count)
            of_params = jaxpr.invars[: len(params)]
            narrowed = [casts.is_narrowed(jaxpr, x) for x in of_params]
            params = fences.cast_inside(params, narrowed, zero)
        params, batch = [*params, *batch[: self.rows]], batch[self.rows :]
        keys = [jax.random.fold_in(key, state.acc.count) for key in operands.keys]
        program = ir.Program(self.step.jaxpr, consts)

        def evaluate(*params: jax.Array) -> tuple[jax.Array, list[Any]]:
            loss, *rest = ir.results(program, [*params, *batch, *keys, *carry])
            return loss, [jnp.asarray(x) for x in rest]  # an aux may be a plain number

        with jax.named_scope("compute"):
            return jax.vjp(evaluate, *params, has_aux=True)

    def vary(self, x: jax.Array, term: Any) -> jax.Array:
        """Marks a sum as varying over devices as `term` does, one of its terms."""
        return collectives.vary(x, (*self.step.varying, *meshes.varying(term)))

    def results(self, state: State) -> list[jax.Array]:
        """The loss and the leaves of the aux, of all micro-batches."""
        weight = state.seen[0] if state.seen else None
        kept = zip(self.step.ways, state.results, strict=True)
        leaves = [ways.WAYS[name].finish(x, weight) for name, x in kept]
        pairs = zip(leaves, self.step.results, strict=True)
        return [
            x.astype(due.dtype) if jnp.issubdtype(due.dtype, jnp.inexact) else x
            for x, due in pairs
        ]


def _if_real(step: Callable[..., Any], number: Any, state: State, x: Any) -> Any:
    """A micro-step that is left out from a number on."""
    i, batch = x
    return fences.if_holds(i < number, step, state, batch)


def _pull(pullback: Any, cotangent: jax.Array, *slots: Any) -> Sequence[jax.Array]:
    back = pullback.with_refs(*slots) if slots else pullback
    return back(cotangent)
