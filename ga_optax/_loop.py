"""The loop over the micro-batches of one call, and what its devices merge after it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ga_optax import _aux, _collectives, _mesh, accumulator
from ga_optax._aux import MODES, strong
from ga_optax._call import Call
from ga_optax._mesh import Placement
from ga_optax._program import Program
from ga_optax.accumulator import Accumulator

Flat = Any  # an Accumulator whose total is a list


class Operands(NamedTuple):
    """The arrays of a call, flat by role; the batch split."""

    consts: Sequence[Any]
    params: list[jax.Array]
    batch: list[jax.Array]
    keys: list[jax.Array]
    carry: list[jax.Array]
    acc: Flat


Run = Callable[[Operands], Any]


class State(NamedTuple):
    """What one micro-batch hands to the next, flat.

    Attributes:
      acc: the accumulator so far.
      carry: the carried arguments.
      results: what each mode of aux keeps, in the order of `MODES`. The loss is the
        first leaf of "mean".
    """

    acc: Flat
    carry: list[jax.Array]
    results: list[Any]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan over micro-batches.

    Attributes:
      program: what `fun` does to one of them.
      num_microbatches: how many there are.
      sums_already: whether the backward pass sums over devices.
      in_place: which gradients the backward pass adds to the accumulator itself.
    """

    program: Program
    num_microbatches: int
    sums_already: bool
    in_place: Sequence[bool]

    def __call__(self, operands: Operands) -> State:
        """Returns the last state, with all that "stack" stacked in it."""
        if not any(self.in_place):
            return self.run(operands)
        plain = dataclasses.replace(self, in_place=[False] * len(self.in_place))
        return _with_rules_of(plain.run, self.run)(operands)

    def run(self, operands: Operands) -> State:
        """The loop itself; with references it can be neither batched nor derived."""
        state, stacked = jax.lax.scan(
            lambda state, batch: self.micro_step(operands, state, batch),
            self.start(operands),
            operands.batch,
            length=self.num_microbatches,
        )
        return state._replace(results=[*state.results[:-1], stacked])

    def start(self, operands: Operands) -> State:
        empty = operands.acc.count == 0
        *total, weight = (
            jnp.where(empty, jnp.zeros_like(x), x)
            for x in (*operands.acc.total, operands.acc.weight)
        )
        acc = Accumulator(total, self.vary(weight, empty), operands.acc.count)
        groups = _aux.by_mode(self.program.results, self.program.modes)
        modes = zip(MODES.values(), groups, strict=True)
        results = [mode.init(group, self.vary) for mode, group in modes]
        return State(acc, operands.carry, results)

    def micro_step(
        self, operands: Operands, state: State, batch: list[jax.Array]
    ) -> tuple[State, list[jax.Array]]:
        program, acc = self.program, state.acc
        keys = [jax.random.fold_in(key, acc.count) for key in operands.keys]

        def evaluate(*params: jax.Array) -> tuple[jax.Array, list[Any]]:
            args = *params, *batch, *keys, *state.carry
            loss, *rest = jax.core.eval_jaxpr(program.jaxpr, operands.consts, *args)
            return loss, [jnp.asarray(x) for x in rest]  # an aux may be a plain number

        with jax.named_scope("compute"):
            loss, pullback, rest = jax.vjp(evaluate, *operands.params, has_aux=True)
        weight = None
        if program.weighted:
            weight, *rest = rest
            weight = weight.astype(acc.weight.dtype)
        carry, aux = rest[: len(state.carry)], rest[len(state.carry) :]
        total = self.add_gradient(acc, pullback, loss, weight)
        with jax.named_scope("accumulate"):
            one = jnp.ones_like(acc.weight) if weight is None else weight
            weights, count = acc.weight + one, accumulator.increment(acc.count)
            acc = Accumulator(total, self.vary(weights, one), count)
            pairs = zip(carry, state.carry, strict=True)
            carry = [_aux.like(strong(new), old) for new, old in pairs]
            groups = _aux.by_mode([loss, *aux], program.modes)
            modes = zip(MODES.values(), state.results, groups, strict=True)
            results = [mode.step(kept, group, weight) for mode, kept, group in modes]
        return State(acc, carry, results), groups[-1]

    def add_gradient(
        self, acc: Flat, pullback: Any, loss: jax.Array, weight: _aux.Weight
    ) -> list[jax.Array]:
        """`acc.total` plus the weighted gradient of one micro-batch."""
        # The backward pass is linear in the cotangent: with the weight for it, weighted
        # gradients come out, and nothing has to be multiplied, in place or not.
        multiplies, arrivals = self.program.multiplies, self.program.arrivals
        scaled = weight is not None and not multiplies
        cotangent = weight.astype(loss.dtype) if scaled else jnp.ones_like(loss)
        cotangent = _aux.like(cotangent, loss)
        # If the backward pass sums over devices, they all have to run it, and no one of
        # them may leave out what came of it.
        selects = scaled and not self.sums_already
        leaves = range(len(self.in_place))
        refs = {i: jax.new_ref(acc.total[i]) for i in leaves if self.in_place[i]}
        by_hand = [i for i in leaves if i not in refs]

        def backward() -> list[jax.Array]:
            with jax.named_scope("compute"):
                if not refs:
                    return list(pullback(cotangent))
                slots = [refs.get(i, jax.ad.GradValue()) for i in leaves]
                grads = pullback.with_refs(*slots)(cotangent)
                return [grads[i] for i in by_hand]

        if refs and selects:
            # What went into a reference cannot be selected away, and NaN · 0 is NaN.
            params = self.program.jaxpr.invars
            zeros = _aux.blank([params[i].aval for i in by_hand])
            grads = jax.lax.cond(weight == 0, lambda: zeros, backward)
        else:
            grads = backward()

        with jax.named_scope("accumulate"):
            # A bare product is rounded, then added, in every program: see `arrival`.
            for j, i in enumerate(by_hand):
                if not arrivals[i]:
                    grads[j] = jax.lax.optimization_barrier(grads[j])
            before = acc._replace(total=[acc.total[i] for i in by_hand])
            after: Flat = accumulator.add(before, grads, weight if multiplies else None)
            pairs = zip(before.total, after.total, strict=True)
            added = (jnp.where(weight == 0, *p) if selects else p[1] for p in pairs)
            total = dict(zip(by_hand, added, strict=True))
        return [jax.ref.freeze(refs[i]) if i in refs else total[i] for i in leaves]

    def vary(self, x: jax.Array, term: Any) -> jax.Array:
        """Marks a sum as varying over devices as `term` does, one of its terms."""
        return _collectives.vary(x, (*self.program.varying, *_mesh.varying(term)))

    def results(self, state: State) -> tuple[jax.Array, Any]:
        """The loss and the aux, of all micro-batches."""
        modes = zip(MODES.values(), state.results, strict=True)
        done = [mode.finish(kept) for mode, kept in modes]
        leaves = _aux.in_order(done, self.program.modes)
        loss, *aux = (
            x.astype(due.dtype) if jnp.issubdtype(due.dtype, jnp.inexact) else x
            for x, due in zip(leaves, self.program.results, strict=True)
        )
        return loss, jax.tree.unflatten(self.program.aux, aux)


def merged(state: State, call: Call) -> State:
    """The state of all devices: one communication, but for what is sharded."""
    axes = call.axes
    modes = list(zip(MODES.values(), state.results, strict=True))
    addends = [mode.addends(kept) for mode, kept in modes]
    # Σ w is reduced without weights, too: were the processes of a run to disagree on
    # the number of micro-batches, they would still all divide by the same number.
    small, structure = jax.tree.flatten((addends, state.acc.weight))
    leaves = [*state.acc.total, *_collectives.vary(small, axes)]
    where = [*call.where, *[Placement()] * len(small)]
    out = _collectives.reduce(leaves, where, axes)
    total = out[: len(call.where)]
    sums, weight = jax.tree.unflatten(structure, out[len(total) :])

    def shared(x: jax.Array) -> jax.Array:
        same = jax.lax.pmean if jnp.issubdtype(x.dtype, jnp.inexact) else jax.lax.pmax
        return same(x, axes)

    carry = list(map(shared, state.carry))
    pairs = zip(modes, sums, strict=True)
    results = [mode.merge(kept, x, weight, axes) for (mode, kept), x in pairs]
    return State(Accumulator(total, weight, state.acc.count), carry, results)


def _with_rules_of(plain: Run, run: Run) -> Run:
    """`run`, which is batched and differentiated as if it were `plain`.

    A `jax.custom_jvp`, which would serve forward mode too, may not hold references.
    """
    batched = custom_vmap(run)

    @batched.def_vmap
    def rule(axis_size: int, in_batched: list[Any], operands: Operands) -> Any:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, in_batched)
        out = jax.vmap(plain, in_axes=axes, axis_size=axis_size)(operands)
        return out, jax.tree.map(lambda _: True, out)

    differentiated = jax.custom_vjp(lambda operands: batched(operands))
    differentiated.defvjp(lambda x: jax.vjp(plain, x), lambda pull, ct: pull(ct))
    return differentiated
