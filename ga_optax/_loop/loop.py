"""The loop over the micro-batches of one call."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._devices import collectives, meshes
from ga_optax._loop import additions, fences, trees
from ga_optax._loop.additions import Additions, MicroStep
from ga_optax._loop.folds import FOLDS, Weighting
from ga_optax._loop.loss import DeviceContext, Flat, LossProgram, Operands
from ga_optax._passes import casts, interpret, read, table
from ga_optax._passes.facts import Facts
from ga_optax._passes.transformable import with_rules_of
from ga_optax.accumulator import Accumulator


def with_passes(run: Callable[[Any], Any], operands: Any, facts: Facts) -> Any:
    """`run(operands)` after the passes of a loop; sums of gradients come first."""
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(operands)
    program = table.run("loop", read.Program(closed.jaxpr, closed.consts), facts)
    out = interpret.results(program, jax.tree.leaves(operands))
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


class State(NamedTuple):
    """The carry of the loop, flat.

    Attributes:
      acc: the accumulator.
      carry: the carried arguments of `fun`.
      results: the carry of the fold of each result; after the loop that carry, or the
        stack that the loop collected. The loss is the first.
      weights: the weight and the number of the micro-batches of this call, by which the
        fold "mean" divides; empty without such a fold.
    """

    acc: Flat
    carry: list[jax.Array]
    results: list[Any]
    weights: Sequence[jax.Array]


def with_collected(state: State, collected: Mapping[int, Any]) -> State:
    """The state with the stacks that were collected, by number of the result."""
    results = [collected.get(i, x) for i, x in enumerate(state.results)]
    return state._replace(results=results)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan over micro-batches.

    Attributes:
      program: the loss of a micro-batch.
      devices: the devices on which the loop runs.
      num_microbatches: how many micro-batches there are.
      additions: how gradients are added.
      rounds_once: True if gradients are rounded in the accumulator alone.
      rows: how many leaves of the batch are differentiated: the first ones.
      index: which leaf of the batch is the index of the micro-batch, if `rows`.
      begins: True if the accumulator is known to be empty, see `accumulator.begun`.
      moved: pairs `(leaf of the batch, total)`: a micro-batch reads the leaf at its
        place in the total, before the gradient is written over this place.
    """

    program: LossProgram
    devices: DeviceContext
    num_microbatches: int
    additions: Additions
    rounds_once: bool
    rows: int
    index: int
    begins: bool = False
    moved: tuple[tuple[int, int], ...] = ()

    def __call__(self, operands: Operands) -> State:
        """Returns the last state, with all that the loop collected."""
        if not any(x.in_place for x in self.additions):
            return self.run(operands)
        by_hand = additions.by_hand(self.additions)
        plain = dataclasses.replace(self, additions=by_hand)
        return with_rules_of(plain.run, self.run)(operands)

    def run(self, operands: Operands) -> State:
        """The loop after all passes. JAX cannot transform a loop with references."""
        if not self.program.optimize:
            return self.as_written(operands)
        facts = Facts(
            sliced=self.program.sliced,
            rounds_once=self.rounds_once,
            local=self.devices.is_local,
            logical=bool(self.devices.logical),
        )
        return with_passes(self.as_written, operands, facts)

    def as_written(self, operands: Operands) -> State:
        """The loop before all passes."""
        state, xs = self.start(operands), operands.batch
        step: Any = functools.partial(self.micro_step, operands)
        if operands.num_real is not None:
            step = functools.partial(_if_real, step, operands.num_real)
            xs = jnp.arange(self.num_microbatches, dtype=jnp.int32), xs
        if self.num_microbatches > 1:
            return with_collected(*jax.lax.scan(step, state, xs))
        first = jax.tree.map(lambda x: x[0], xs)
        once = fences.single_step if self.program.optimize else _single_step
        return with_collected(*once(step, state, first))

    def collected(self, results: Sequence[Any]) -> dict[int, Any]:
        """The results that the loop collects, by number."""
        pairs = enumerate(zip(self.program.folds, results, strict=True))
        return {i: x for i, (name, x) in pairs if FOLDS[name].collects}

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
        pairs = zip(self.program.folds, self.program.results, strict=True)
        results = [FOLDS[name].init(x, self.vary) for name, x in pairs]
        weights: list[Any] = []
        if "mean" in self.program.folds:
            zero = jnp.zeros([], float)
            weights = [self.vary(zero, zero), jnp.zeros([], jnp.int32)]
        return State(acc, operands.carry, results, weights)

    def fenced(self, tree: Any) -> Any:
        return fences.fusion_barrier(tree) if self.program.optimize else tree

    def micro_step(
        self, operands: Operands, state: State, batch: list[jax.Array]
    ) -> tuple[State, dict[int, Any]]:
        """The next state, and the results to collect."""
        program, acc = self.program, state.acc
        index = batch[self.index] % self.num_microbatches if self.rows else None
        batch = list(batch)
        for leaf, total in self.moved:
            stack = acc.total[total]
            batch[leaf] = jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
        loss, pullback, rest = self.forward(operands, state, batch)
        weight = factor = None
        cotangent = jnp.ones_like(loss)
        if program.weighted:
            weight, *rest = rest
            weight = weight.astype(acc.weight.dtype)
            # The backward pass is linear in the cotangent: if the cotangent is the
            # weight, the gradients are weighted, and nothing has to be multiplied.
            if program.multiplies:
                factor = weight
            else:
                cotangent = weight.astype(loss.dtype)
        carry, aux = rest[: len(state.carry)], rest[len(state.carry) :]
        zero = accumulator.unknown_zero(acc.count) if program.optimize else None
        step = MicroStep(factor, weight, zero, index)
        pull = functools.partial(_pull, pullback, trees.like(cotangent, loss))
        total = additions.add(self.additions, acc.total, step, pull)
        with jax.named_scope("accumulate"):
            one = jnp.ones_like(acc.weight) if weight is None else weight
            increment = fences.next_count if program.optimize else accumulator.increment
            weights = self.vary(acc.weight + one, one)
            acc = Accumulator(total, weights, increment(acc.count))
            pairs = zip(carry, state.carry, strict=True)
            carry = [trees.like(trees.strong(new), old) for new, old in pairs]
            results, weights = self.fold([loss, *aux], state, weight, zero)
        return State(acc, carry, results, weights), self.collected([loss, *aux])

    def fold(
        self,
        leaves: Sequence[Any],
        state: State,
        weight: jax.Array | None,
        zero: jax.Array | None,
    ) -> tuple[list[Any], list[jax.Array]]:
        """The carries of the folds, and the weights, after one more micro-batch."""
        zero_of_weighted, weights = None, []
        if state.weights:
            total, count = state.weights
            # Of this counter: with the loop's own zero XLA on CPUs (jaxlib 0.12) orders
            # the loop so that a weighted model of unrolled layers holds one more leaf.
            if weight is not None and zero is not None:
                zero_of_weighted = accumulator.unknown_zero(count)
            one = jnp.ones_like(total) if weight is None else weight
            weights = [total + one, accumulator.increment(count)]
        weighting = Weighting(weight, zero, zero_of_weighted)
        triples = zip(self.program.folds, state.results, leaves, strict=True)
        results = [FOLDS[name].step(carry, x, weighting) for name, carry, x in triples]
        return results, weights

    def forward(
        self, operands: Operands, state: State, batch: list[jax.Array]
    ) -> tuple[jax.Array, Any, list[jax.Array]]:
        """The loss of a micro-batch, its pullback, and the other results of `fun`."""
        given = operands.consts, operands.params, batch, state.carry
        consts, params, batch, carry = self.fenced(given)
        optimize, jaxpr = self.program.optimize, self.program.jaxpr
        if optimize and self.devices.is_local and self.num_microbatches > 1:
            zero = accumulator.unknown_zero(state.acc.count)
            of_params = jaxpr.invars[: len(params)]
            narrowed = [casts.is_narrowed(jaxpr, x) for x in of_params]
            params = fences.cast_inside(params, narrowed, zero)
        params, batch = [*params, *batch[: self.rows]], batch[self.rows :]
        keys = [jax.random.fold_in(key, state.acc.count) for key in operands.keys]
        program = read.Program(jaxpr, consts)
        if optimize:
            program = table.run("micro-step", program, Facts())

        def evaluate(*params: jax.Array) -> tuple[jax.Array, list[Any]]:
            loss, *rest = interpret.results(program, [*params, *batch, *keys, *carry])
            return loss, [jnp.asarray(x) for x in rest]  # an aux may be a plain number

        with jax.named_scope("compute"):
            return jax.vjp(evaluate, *params, has_aux=True)

    def vary(self, x: jax.Array, term: Any) -> jax.Array:
        """Marks a sum as varying over devices as `term` does, one of its terms."""
        return collectives.vary(x, (*self.program.varying, *meshes.varying(term)))

    def results(self, state: State) -> list[jax.Array]:
        """The loss and the leaves of the aux, of all micro-batches."""
        weight = state.weights[0] if state.weights else None
        names, types = self.program.folds, self.program.results
        pairs = zip(names, state.results, strict=True)
        leaves = [FOLDS[name].finish(x, weight) for name, x in pairs]
        return [
            x.astype(t.dtype) if jnp.issubdtype(t.dtype, jnp.inexact) else x
            for x, t in zip(leaves, types, strict=True)
        ]


def _single_step(step: Callable[..., Any], state: State, batch: Any) -> tuple[Any, Any]:
    state, collected = step(state, batch)
    return state, jax.tree.map(lambda x: x[None], collected)


def _if_real(step: Callable[..., Any], number: Any, state: State, x: Any) -> Any:
    """A micro-step, which is left out from a number on."""
    i, batch = x
    return fences.if_holds(i < number, step, state, batch)


def _pull(pullback: Any, cotangent: jax.Array, *slots: Any) -> Sequence[jax.Array]:
    back = pullback.with_refs(*slots) if slots else pullback
    return back(cotangent)
