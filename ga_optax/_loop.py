"""The loop over the micro-batches of one call, and what its devices merge after it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ga_optax import _aux, _collectives, _mesh, accumulator
from ga_optax._aux import MODES, blank, strong
from ga_optax._call import Call
from ga_optax._mesh import Placement
from ga_optax._program import Program
from ga_optax.accumulator import Accumulator


class Operands(NamedTuple):
    """The arrays of a call, flat by role; the batch split."""

    consts: Sequence[Any]
    params: list[jax.Array]
    batch: list[jax.Array]
    keys: list[jax.Array]
    carry: list[jax.Array]
    total: list[jax.Array]
    weight: jax.Array
    count: jax.Array


class State(NamedTuple):
    """What one micro-batch hands to the next, flat.

    Attributes:
      total: Σ w·g, weight: Σ w, count: micro-steps, as in an `Accumulator`.
      carry: the carried arguments.
      results: what each mode of aux keeps, in the order of `MODES`. The loss is the
        first leaf of "mean".
    """

    total: list[jax.Array]
    weight: jax.Array
    count: jax.Array
    carry: list[jax.Array]
    results: tuple[Any, ...]


Stacked = tuple[list[jax.Array], ...]


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

    def __call__(self, operands: Operands) -> tuple[State, Stacked]:
        """Returns the last state, and what each mode of aux stacked."""
        run = self.run
        if any(self.in_place):
            plain = dataclasses.replace(self, in_place=[False] * len(self.in_place))
            run = _with_rules_of(plain.run, run)
        return run(operands)

    def run(self, operands: Operands) -> tuple[State, Stacked]:
        """The loop itself; with references it can be neither batched nor derived."""
        return jax.lax.scan(
            lambda state, batch: self.micro_step(operands, state, batch),
            self.start(operands),
            operands.batch,
            length=self.num_microbatches,
        )

    def start(self, operands: Operands) -> State:
        empty = operands.count == 0
        program = self.program
        leaves = self.by_mode(program.loss, jax.tree.leaves(program.aux))
        weight = jnp.where(empty, jnp.zeros_like(operands.weight), operands.weight)
        return State(
            total=[jnp.where(empty, jnp.zeros_like(t), t) for t in operands.total],
            weight=self.vary(weight, empty),
            count=operands.count,
            carry=operands.carry,
            results=tuple(
                mode.init(group, self.vary)
                for mode, group in zip(MODES.values(), leaves, strict=True)
            ),
        )

    def micro_step(
        self, operands: Operands, state: State, batch: list[jax.Array]
    ) -> tuple[State, Stacked]:
        program = self.program
        keys = [jax.random.fold_in(key, state.count) for key in operands.keys]

        def evaluate(*params: jax.Array) -> tuple[jax.Array, list[Any]]:
            args = *params, *batch, *keys, *state.carry
            loss, *rest = jax.core.eval_jaxpr(program.jaxpr, operands.consts, *args)
            return loss, [jnp.asarray(x) for x in rest]  # an aux may be a plain number

        with jax.named_scope("compute"):
            loss, pullback, rest = jax.vjp(evaluate, *operands.params, has_aux=True)
        weight = None
        if program.weighted:
            weight, *rest = rest
            weight = weight.astype(state.weight.dtype)
        carry, aux = rest[: len(state.carry)], rest[len(state.carry) :]
        total = self.add_gradient(operands, state, pullback, loss, weight)
        with jax.named_scope("accumulate"):
            leaves = self.by_mode(loss, aux)
            one = jnp.ones_like(state.weight)
            new = State(
                total=total,
                weight=self.vary(
                    state.weight + (one if weight is None else weight), one
                ),
                count=accumulator.increment(state.count),
                carry=[
                    _collectives.vary(strong(x), tuple(_mesh.varying(old)))
                    for x, old in zip(carry, state.carry, strict=True)
                ],
                results=(),
            )
            steps = [
                mode.step(kept, group, weight)
                for mode, kept, group in zip(
                    MODES.values(), state.results, leaves, strict=True
                )
            ]
            results, stacked = zip(*steps, strict=True)
            return new._replace(results=results), stacked

    def add_gradient(
        self,
        operands: Operands,
        state: State,
        pullback: Any,
        loss: jax.Array,
        weight: jax.Array | None,
    ) -> list[jax.Array]:
        """`state.total` plus the weighted gradient of one micro-batch."""
        # The backward pass is linear in the cotangent: with the weight for it, weighted
        # gradients come out, and nothing has to be multiplied, in place or not.
        multiplies, arrivals = self.program.multiplies, self.program.arrivals
        scaled = weight is not None and not multiplies
        cotangent = weight.astype(loss.dtype) if scaled else jnp.ones_like(loss)
        cotangent = _collectives.vary(cotangent, tuple(_mesh.varying(loss)))
        # If the backward pass sums over devices, they all have to run it, and no one of
        # them may leave out what came of it.
        selects = scaled and not self.sums_already
        refs = {
            i: jax.new_ref(t) for i, t in enumerate(state.total) if self.in_place[i]
        }
        by_hand = [i for i in range(len(state.total)) if i not in refs]

        def backward() -> list[jax.Array]:
            with jax.named_scope("compute"):
                if not refs:
                    return list(pullback(cotangent))
                grads = pullback.with_refs(
                    *(refs.get(i, jax.ad.GradValue()) for i in range(len(state.total)))
                )(cotangent)
                return [grads[i] for i in by_hand]

        if refs and selects:
            # What went into a reference cannot be selected away, and NaN · 0 is NaN.
            zeros = blank([operands.params[i] for i in by_hand])
            grads = jax.lax.cond(weight == 0, lambda: zeros, backward)
        else:
            grads = backward()

        with jax.named_scope("accumulate"):
            # A bare product is to be rounded, then added, in every program: see
            # `arrival`.
            grads = [
                g if arrivals[i] else jax.lax.optimization_barrier(g)
                for i, g in zip(by_hand, grads, strict=True)
            ]
            before = [state.total[i] for i in by_hand]
            acc = Accumulator(before, state.weight, state.count)
            after: Any = accumulator.add(
                acc, grads, weight if multiplies else None
            ).total
            if selects:
                after = [
                    jnp.where(weight == 0, *pair)
                    for pair in zip(before, after, strict=True)
                ]
        total = {i: jax.ref.freeze(ref) for i, ref in refs.items()}
        total |= dict(zip(by_hand, after, strict=True))
        return [total[i] for i in range(len(state.total))]

    def by_mode(self, loss: Any, aux: list[Any]) -> list[list[Any]]:
        """The leaves of each mode, the loss among them."""
        return _aux.by_mode([loss, *aux], ["mean", *self.program.modes])

    def vary(self, tree: Any, like: Any) -> Any:
        """Marks sums as varying over devices as `like` does, one of their terms."""

        def mark(x: jax.Array, term: Any) -> jax.Array:
            axes = (*self.program.varying, *_mesh.varying(term))
            return _collectives.vary(x, axes)

        return jax.tree.map(mark, tree, like)

    def results(self, state: State, stacked: Stacked) -> tuple[jax.Array, Any]:
        """The loss and the aux, of all micro-batches."""
        program = self.program
        done = [
            mode.finish(*kept)
            for mode, *kept in zip(MODES.values(), state.results, stacked, strict=True)
        ]
        loss, *aux = _aux.in_order(done, ["mean", *program.modes])
        leaves, structure = jax.tree.flatten(program.aux)
        aux = [
            x.astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else x
            for x, leaf in zip(aux, leaves, strict=True)
        ]
        return loss.astype(program.loss.dtype), jax.tree.unflatten(structure, aux)


def merged(state: State, call: Call) -> State:
    """The state of all devices: one communication, but for what is sharded."""
    axes = call.axes
    modes = list(zip(MODES.values(), state.results, strict=True))
    addends = [mode.addends(kept) for mode, kept in modes]
    # Σ w is reduced without weights, too: were the processes of a run to disagree on
    # the number of micro-batches, they would still all divide by the same number.
    small, structure = jax.tree.flatten((addends, state.weight))
    out = _collectives.reduce(
        state.total + _collectives.vary(small, axes),
        [*call.where, *(Placement() for _ in small)],
        axes,
    )
    total = out[: len(state.total)]
    sums, weight = jax.tree.unflatten(structure, out[len(total) :])

    def shared(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, axes)
        return jax.lax.pmax(x, axes)

    carry = [shared(x) for x in state.carry]
    results = tuple(
        mode.merge(kept, of_all, weight, axes)
        for (mode, kept), of_all in zip(modes, sums, strict=True)
    )
    return State(total, weight, state.count, carry, results)


def _with_rules_of(
    plain: Callable[[Operands], Any], run: Callable[[Operands], Any]
) -> Callable[[Operands], Any]:
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
    differentiated.defvjp(
        lambda operands: jax.vjp(plain, operands),
        lambda pullback, cotangents: pullback(cotangents),
    )
    return differentiated
