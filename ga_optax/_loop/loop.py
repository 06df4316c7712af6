"""The loop over the micro-batches: scan, additions, merge.

    acc  =  Σ micro-steps on this device;   then once over all devices

`run_loop` is what a call runs. Below it the ways in which a gradient gets into its sum,
the scan itself, and how states of devices become one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import accumulator
from .._devices import collectives, meshes
from .._devices.meshes import By, Placement
from .._devices.record import Devices
from .._passes import jaxprs, shared, table
from .._passes.facts import Facts
from .._passes.pullback import Known, with_pullback
from ..accumulator import Accumulator
from . import in_place, micro_step
from .folds import FOLDS, Weighting
from .micro_step import Flat, LossProgram, Operands

# == The run of a loop =================================================================


class Outcome(NamedTuple):
    """The results of a loop or of a window.

    Attributes:
      results: the loss, and the other results of `fun`.
      carry: the carried arguments.
      acc: the accumulator.
      rows: the gradients of leaves of the batch, of each micro-batch along axis 0.
    """

    results: list[jax.Array]
    carry: list[jax.Array]
    acc: Flat
    rows: Sequence[jax.Array]


def run_loop(
    program: LossProgram,
    operands: Operands,
    devices: Devices,
    *,
    begins: bool,
    merges: bool,
) -> Outcome:
    """Adds the micro-batches of a call.

    Args:
      program: the loss of a micro-batch.
      operands: the arrays.
      devices: the devices.
      begins: True if the accumulator is known to be empty.
      merges: True if the sums of all devices are added up at the end.
    """
    num_microbatches = len(operands.batch[0]) // (devices.logical or 1)
    adds = choose_additions(program, operands, devices.names, devices.scattered)
    leaves = operands.batch[: operands.rows]
    # The sums that the compiler reduces over devices in each micro-step would be twice
    # as large.
    reduces = devices.by is By.COMPILER or any(x.summed for x in devices.placements)
    loop = Loop(
        program,
        devices,
        num_microbatches,
        [*adds, *(stacked_addition(jax.typeof(x[0])) for x in leaves)],
        begins=begins,
        rounds_once=program.low_precision and not reduces,
        rows=operands.rows,
        index=len(operands.batch) - 1,
    )
    sums, acc = len(operands.acc.total), operands.acc
    acc = acc._replace(total=[*acc.total, *map(jnp.zeros_like, leaves)])
    operands = operands._replace(acc=acc)
    state = (
        on_logical_devices(loop, operands, devices)
        if devices.logical
        else loop(operands)
    )
    stacks = state.acc.total[sums:]
    state = state._replace(acc=state.acc._replace(total=state.acc.total[:sums]))
    if merges and devices.bound:
        with jax.named_scope("merge"):
            summed = {i: Placement(summed=x.axes) for i, x in devices.scattered.items()}
            places = [summed.get(i, x) for i, x in enumerate(devices.placements)]
            state = all_reduced(loop, state, devices, places)
    return Outcome(loop.results(state), state.carry, state.acc, rows=stacks)


# == Additions of gradients ============================================================
# The gradients of a micro-batch are added to their accumulators.
#
# There is one `Addition` for each leaf:
#
#     by hand     the gradient leaves the backward pass, and is added to the sum
#     stacked     the gradient of a leaf of the batch is written to its place in a stack
#     scattered   each device adds its part of the sum over devices
#     in place    the backward pass adds the gradient to a reference, slice by slice; if
#                 the gradient is scattered, too, each slice is scattered first

Pull = Callable[..., Sequence[jax.Array]]


class MicroStep(NamedTuple):
    """The weight and the index of a micro-batch, for all gradients.

    Attributes:
      factor: the weight, if it multiplies the gradients and not the cotangent; or None.
      weight: the weight; gradients of weight 0 are left out. None without weights.
      zero: see `accumulator.rounded`; None if nothing has to be rounded first.
      index: the place of the micro-batch in the stacks of this device.
    """

    factor: jax.Array | None
    weight: jax.Array | None
    zero: jax.Array | None
    index: jax.Array | None = None

    def counted(self, g: jax.Array) -> jax.Array:
        """`g`, or a zero that changes no sum if the micro-batch has weight 0."""
        if self.weight is None:
            return g
        return jnp.where(self.weight == 0, -jnp.zeros_like(g), g)


class Addition(NamedTuple):
    """The addition of the gradient of one leaf to a sum.

    Attributes:
      type: the type of the gradient in the backward pass.
      returned: the type in which the gradient leaves the backward pass.
      bare: True if the gradient may be a bare product, which is rounded before it is
        added.
      in_place: True if the backward pass adds the gradient to a reference.
      scattered: the placement of the sum over devices, if this device adds a part.
      stacked: True if the gradient is written to its place in a stack.
      begins: True if this place is empty.
    """

    type: Any
    returned: Any
    bare: bool = False
    in_place: bool = False
    scattered: Any = None  # a Placement, or None
    stacked: bool = False
    begins: bool = False

    def add(self, total: jax.Array, g: jax.Array, step: MicroStep) -> jax.Array:
        """The sum after the addition of a gradient that has left the backward pass."""
        if step.factor is not None:
            g = accumulator.weighted(g, step.factor, total.dtype, step.zero)
        elif self.bare and step.zero is not None:
            g = accumulator.rounded(g, step.zero)
        if self.scattered is not None:
            return accumulator.plus(total, self._part(g.astype(total.dtype), step))
        if not self.stacked:  # the sum stays as it is if the micro-batch has weight 0
            return accumulator.add_terms([total], [g], step.weight)[0]
        g = g.astype(total.dtype)
        if not self.begins:
            g = accumulator.plus(
                jax.lax.dynamic_index_in_dim(total, step.index, keepdims=False), g
            )
        return jax.lax.dynamic_update_index_in_dim(total, g, step.index, 0)

    def adds_as_it_comes(self, ref: Any) -> bool:
        """True if the backward pass can add to the reference without `write`."""
        return self.scattered is None and self.type.dtype == ref.dtype

    def write(self, step: MicroStep, ref: Any, g: jax.Array) -> None:
        """Adds a gradient, or a slice of the gradient, to a reference."""
        g = g.astype(ref.dtype)
        g = g if self.scattered is None else self._part(g, step)
        jax.ref.addupdate(ref, ..., g)

    def _part(self, g: jax.Array, step: MicroStep) -> jax.Array:
        ndim = len(self.type.shape)
        return collectives.scatter(step.counted(g), self.scattered, ndim)


# -- All leaves ------------------------------------------------------------------------

Additions = Sequence[Addition]


def choose_additions(
    program: LossProgram,
    operands: Operands,
    names: Sequence[str],
    scattered: Mapping[int, Placement],
) -> list[Addition]:
    """One addition for each leaf of the parameters.

    Args:
      program: the loss of a micro-batch.
      operands: those of the loop.
      names: the names of the leaves for the log; other leaves come last.
      scattered: the gradients that are scattered before they are added, and how.
    """
    additions, whys = [], in_place.reasons_not_in_place(program, operands, scattered)
    in_place.log_in_place(names, whys)
    for i, (total, why) in enumerate(zip(operands.acc.total, whys, strict=True)):
        parameter: Any = program.jaxpr.invars[i].aval
        aval = returned = parameter.update(memory_space=jax.memory.Space.Device)
        bare = program.arrivals[i] is None
        # A sum leaves the backward pass in the dtype of its accumulator, if wider.
        wider = jnp.finfo(total.dtype).bits > jnp.finfo(aval.dtype).bits
        if wider and not bare and not program.multiplies:
            returned = returned.update(dtype=total.dtype)
        new = Addition(aval, returned, bare, why is None, scattered.get(i))
        additions.append(new)
    return additions


def stacked_addition(aval: Any, begins: bool = True) -> Addition:
    """The addition to a stack, of such a gradient for each micro-batch."""
    return Addition(aval, aval, stacked=True, begins=begins)


def add_gradients(
    additions: Additions, totals: Sequence[jax.Array], step: MicroStep, pull: Pull
) -> list[jax.Array]:
    """The sums after the addition of the gradients of one micro-batch.

    `pull` returns all gradients. If `pull` is given references, it adds to the
    references.
    """
    places = range(len(additions))
    refs = {i: jax.new_ref(totals[i]) for i in places if additions[i].in_place}
    types = {i: additions[i].returned for i in places if i not in refs}

    def gradients(*slots: Any) -> list[jax.Array]:
        """Adds to the references `slots`; returns the other gradients."""
        ref_of = dict(zip(refs, slots, strict=True))
        every = [ref_of.get(i, jax.ad.GradValue()) for i in places] if refs else ()
        grads = pull(*every)
        return [_as_type(grads[i], aval) for i, aval in types.items()]

    def backward() -> list[jax.Array]:
        pairs = [(additions[i], ref) for i, ref in refs.items()]
        with jax.named_scope("compute"):
            if all(x.adds_as_it_comes(ref) for x, ref in pairs):
                return gradients(*refs.values())
            types = [x.type for x, _ in pairs]
            writes = [functools.partial(x.write, step) for x, _ in pairs]
            return in_place.write_gradients(gradients, types, [*refs.values()], writes)

    if refs and step.weight is not None and all(x.scattered is None for x in additions):
        grads = _unless(step.weight == 0, backward, micro_step.blank([*types.values()]))
    else:
        grads = backward()
    with jax.named_scope("accumulate"):
        pairs = zip(types, grads, strict=True)
        sums = {i: additions[i].add(totals[i], g, step) for i, g in pairs}
    sums |= {i: jax.ref.freeze(ref) for i, ref in refs.items()}
    return [sums[i] for i in places]


def _as_type(g: jax.Array, aval: Any) -> jax.Array:
    """A gradient in the dtype of its addition, in the memory of the device."""
    g = collectives.on_device(g)
    return g if g.dtype == aval.dtype else g.astype(aval.dtype)


def _unless(
    skips: jax.Array, backward: Callable[[], list[jax.Array]], zeros: list[jax.Array]
) -> list[jax.Array]:
    """The gradients; or zeros, and no backward pass, if `skips`.

    An addition to a reference cannot be selected away afterwards.
    """
    jaxpr = jaxprs.program_of(backward).jaxpr
    depending = jaxprs.following(jaxpr, jaxpr.constvars)
    grads = jax.lax.cond(skips, lambda: zeros, backward)
    # XLA leaves out the addition of a zero, but not of a zero that a branch returns:
    # the gradient of what `fun` does not use.
    triples = zip(jaxpr.outvars, zeros, grads, strict=True)
    return [x if jaxprs.is_among(v, depending) else z for v, z, x in triples]


# == The scan ==========================================================================


def with_passes(run: Callable[[Any], Any], operands: Any, facts: Facts) -> Any:
    """`run(operands)` after the passes of a loop; sums of gradients come first."""
    closed, out = micro_step.Replay.of(run, operands)
    program = jaxprs.Program(closed.jaxpr, closed.consts)
    return micro_step.Replay(table.run_scope("loop", program, facts), out)(operands)


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
      begins: True if the totals are known to hold nothing of an earlier window, see
        `accumulator.begun`.
      moved: pairs `(leaf of the batch, total)`: a micro-batch reads the leaf at its
        place in the total, before the gradient is written over this place.
      known: what JAX wrote for kinds of equations, in loops of the same call.
    """

    program: LossProgram
    devices: Devices
    num_microbatches: int
    additions: Additions
    rounds_once: bool
    rows: int
    index: int
    begins: bool = False
    moved: tuple[tuple[int, int], ...] = ()
    known: Known = dataclasses.field(default_factory=Known)

    def __call__(self, operands: Operands) -> State:
        """Returns the last state, with all that the loop collected."""
        if not any(x.in_place for x in self.additions):
            return self.run(operands)
        by_hand = [x._replace(in_place=False) for x in self.additions]
        plain = dataclasses.replace(self, additions=by_hand)
        return in_place.with_rules_of(plain.run, self.run)(operands)

    def run(self, operands: Operands) -> State:
        """The loop after all passes. JAX cannot transform a loop with references."""
        if not self.program.optimize:
            return self.as_written(operands)
        sliced = self.program.sliced
        facts = Facts(self.devices, sliced=sliced, rounds_once=self.rounds_once)
        return with_passes(self.as_written, operands, facts)

    def as_written(self, operands: Operands) -> State:
        """The loop before all passes."""
        state, xs = self.start(operands), operands.batch
        step: Any = functools.partial(self.micro_step, operands)
        if operands.num_real is not None:
            step = functools.partial(_if_real, step, operands.num_real)
            xs = jnp.arange(self.num_microbatches, dtype=jnp.int32), xs
        if self.num_microbatches > 1:
            return with_collected(*micro_step.scan()(step, state, xs))
        first = jax.tree.map(lambda x: x[0], xs)
        once = micro_step.single_step if self.program.same_bits else _single_step
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
        results = [FOLDS[name].init(x, self.program.varying) for name, x in pairs]
        weights: list[Any] = []
        if "mean" in self.program.folds:
            zero = jnp.zeros([], float)
            weights = [self.vary(zero, zero), jnp.zeros([], jnp.int32)]
        return State(acc, operands.carry, results, weights)

    def fenced(self, tree: Any) -> Any:
        fences = self.program.optimize or accumulator.LOSES_ROWS  # of derivatives, too
        return micro_step.fusion_barrier(tree) if fences else tree

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
        zero = accumulator.unknown_zero(acc.count) if program.same_bits else None
        step = MicroStep(factor, weight, zero, index)
        pull = functools.partial(
            _pull, pullback, micro_step.varying_like(cotangent, loss)
        )
        total = add_gradients(self.additions, acc.total, step, pull)
        with jax.named_scope("accumulate"):
            one = jnp.ones_like(acc.weight) if weight is None else weight
            increment = (
                micro_step.next_count if program.same_bits else accumulator.increment
            )
            weights = self.vary(acc.weight + one, one)
            acc = Accumulator(total, weights, increment(acc.count))
            pairs = zip(carry, state.carry, strict=True)
            carry = [
                micro_step.varying_like(micro_step.strong(new), old)
                for new, old in pairs
            ]
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
            narrowed = [shared.is_narrowed(jaxpr, x) for x in of_params]
            params = micro_step.cast_inside(params, narrowed, zero)
        params, batch = [*params, *batch[: self.rows]], batch[self.rows :]
        keys = [jax.random.fold_in(key, state.acc.count) for key in operands.keys]
        program, rest = jaxprs.Program(jaxpr, consts), [*batch, *keys, *carry]
        program, params, rest = in_place.with_stand_ins(program, params, rest)
        alike = optimize and not any(x.in_place for x in self.additions)
        with jax.named_scope("compute"):
            known = self.known if alike else None
            return with_pullback(program, params, rest, known)

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
    return micro_step.if_holds(i < number, step, state, batch)


def _pull(pullback: Any, cotangent: jax.Array, *slots: Any) -> Sequence[jax.Array]:
    back = pullback.with_refs(*slots) if slots else pullback
    return back(cotangent)


# == States of devices, put together ===================================================


def on_logical_devices(loop: Loop, operands: Operands, devices: Devices) -> State:
    """The state of all logical devices of this device. Each runs the loop by itself."""
    number, axes = devices.logical, devices.bound
    indices = number * jax.lax.axis_index(axes) + jnp.arange(number, dtype=jnp.int32)
    batch = [jnp.reshape(x, (number, -1, *x.shape[1:])) for x in operands.batch]

    def of_one(part: Any, buffer: State) -> tuple[State, dict[int, Any]]:
        index, batch = part
        keys = [jax.random.fold_in(key, index) for key in operands.keys]
        # If XLA knew that this is empty, it would write zeros to one more buffer. The
        # index changes, so its sort stays in the loop; the counter's may be dropped.
        is_empty = micro_step.next_count(index) > index
        empty, count = micro_step.fusion_barrier((is_empty, operands.acc.count))
        total = [accumulator.cleared(x, empty) for x in buffer.acc.total]
        acc = operands.acc._replace(total=total, count=count)
        state = loop(operands._replace(batch=batch, keys=keys, acc=acc))
        collected = loop.collected(state.results)
        return with_collected(state, dict.fromkeys(collected, ())), collected

    def join(a: State, b: State) -> State:
        total = list(map(collectives.rounded_sum, a.acc.total, b.acc.total))
        acc = Accumulator(total, a.acc.weight + b.acc.weight, b.acc.count)
        carry = [
            collectives.rounded_sum(x, y) if _averages(x) else jnp.maximum(x, y)
            for x, y in zip(a.carry, b.carry, strict=True)
        ]
        triples = zip(loop.program.folds, a.results, b.results, strict=True)
        results = [FOLDS[name].join(x, y) for name, x, y in triples]
        weights = [a.weights[0] + b.weights[0], b.weights[1]]
        return State(acc, carry, results, weights)

    buffers = [loop.start(operands)] * number.bit_length()  # one for each level
    (*_, state), collected = collectives.sum_of_neighbours(
        of_one, (indices, batch), number, buffers, join
    )
    collected = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), collected)
    return with_collected(state, collected)


def _averages(x: jax.Array) -> bool:
    """True if the carry of all devices is the mean, and False if it is the largest."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def all_reduced(
    loop: Loop, state: State, devices: Devices, places: Sequence[Placement]
) -> State:
    """The state of all devices: one all-reduce, and one collective a sharded leaf."""
    axes = devices.bound
    merges = [FOLDS[name].merge for name in loop.program.folds]
    results = list(zip(merges, state.results, strict=True))
    addends = [x for merge, x in results if merge is None]
    # Σ w is reduced without weights, too: were the processes of a run to disagree on
    # the number of micro-batches, they would still all divide by the same number.
    weights = [state.acc.weight] if "mean" in loop.program.folds else []
    means = [x for x in state.carry if _averages(x)]
    small, structure = jax.tree.flatten((addends, weights, means))
    leaves = [*state.acc.total, *collectives.vary(small, axes)]
    places = [*places, *[Placement()] * len(small)]
    number = meshes.num_devices(axes)
    if devices.logical:
        number *= devices.logical
        zero = accumulator.unknown_zero(state.acc.count)
        # What follows is the same program on any number of devices.
        out = micro_step.fusion_barrier(
            collectives.reduce_in_order(leaves, places, axes, zero)
        )
    else:
        out = collectives.reduce(leaves, places, axes)
    total = out[: len(state.acc.total)]
    sums, weight, means = jax.tree.unflatten(structure, out[len(total) :])
    [weight] = weight or [state.acc.weight]
    means, sums = iter(means), iter(sums)
    carry = [
        next(means) / number if _averages(x) else jax.lax.pmax(x, axes)
        for x in state.carry
    ]
    merged = [merge(x, axes) if merge else next(sums) for merge, x in results]
    weights = state.weights and [weight, state.weights[1]]
    return State(Accumulator(total, weight, state.acc.count), carry, merged, weights)
