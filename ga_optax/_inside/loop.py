"""The loop over the micro-batches of one call, and what its devices merge after it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax import accumulator
from ga_optax._devices import collectives, logical, meshes
from ga_optax._devices.meshes import Placement
from ga_optax._inside import aux_modes
from ga_optax._inside.aux_modes import MODES, strong
from ga_optax._inside.call import Call
from ga_optax._inside.program import Program
from ga_optax._passes import ir, table
from ga_optax._passes.arrivals import is_cut
from ga_optax._passes.facts import Facts
from ga_optax._passes.transformable import with_rules_of
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
      results: what each mode of aux keeps, in the order of `MODES`; after the loop,
        or what it collected. The loss is the first leaf of "mean".
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
      optimize: whether to keep the bits in every grouping; False is the plain scan.
      rounds_once: whether gradients are rounded in the accumulator alone.
      sent: which of them are scattered over devices before they are added, and how.
      met: which sums the last micro-batch reduces over devices, and how: those in place
        inside its backward pass, the others one by one, where they are final.
      axes: the data axes that are bound.
      logical: whether it is compiled alike for one device and for many.
    """

    program: Program
    num_microbatches: int
    sums_already: bool
    in_place: Sequence[bool]
    optimize: bool = True
    rounds_once: bool = False
    sent: dict[int, Placement] = dataclasses.field(default_factory=dict)
    met: dict[int, Placement] = dataclasses.field(default_factory=dict)
    axes: tuple[str, ...] = ()
    logical: bool = False

    def __call__(self, operands: Operands) -> State:
        """Returns the last state, with all that was collected in it."""
        if not any(self.in_place):
            return self.run(operands)
        by_hand = [False] * len(self.in_place)
        plain = dataclasses.replace(self, in_place=by_hand)
        return with_rules_of(plain.run, self.run, bool(self.met))(operands)

    def run(self, operands: Operands) -> State:
        """The loop, after all passes; with references it has no transformations."""
        if not self.optimize:
            return self.as_written(operands)
        facts = Facts(
            sliced=self.program.sliced,
            rounds_once=self.rounds_once,
            logical=self.logical,
        )
        closed, shapes = jax.make_jaxpr(self.as_written, return_shape=True)(operands)
        program = ir.Program(closed.jaxpr, closed.consts)
        jaxpr, consts = table.run("loop", program, facts)
        out = jax.core.eval_jaxpr(jaxpr, consts, *jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    def as_written(self, operands: Operands) -> State:
        """The loop itself."""
        batch, state = operands.batch, self.start(operands)

        def step_of(met: dict[int, Placement]) -> Callable[..., Any]:
            return functools.partial(self.micro_step, operands, met)

        if self.met:
            before = [x[:-1] for x in batch]
            state, collected = jax.lax.scan(step_of({}), state, before)
            last = [x[-1] for x in batch]
            state, more = self.once(step_of(self.met), state, last)
            both = collected, more
            collected = jax.tree.map(lambda *parts: jnp.concatenate(parts), *both)
        elif self.num_microbatches > 1:
            state, collected = jax.lax.scan(step_of({}), state, batch)
        else:
            state, collected = self.once(step_of({}), state, [x[0] for x in batch])
        kept = zip(MODES, state.results, strict=True)
        return state._replace(results=[collected.get(name, x) for name, x in kept])

    def start(self, operands: Operands) -> State:
        empty = operands.acc.count == 0
        total, weight, count = operands.acc
        weight = self.vary(jnp.where(empty, jnp.zeros_like(weight), weight), empty)
        total = [accumulator.cleared(x, empty) for x in total]
        # If it were known, what is computed of it would be, and be no fence.
        acc = Accumulator(total, weight, self.fenced(count))
        groups = aux_modes.by_mode(self.program.results, self.program.modes)
        modes = zip(MODES.values(), groups, strict=True)
        results = [mode.init(group, self.vary) for mode, group in modes]
        return State(acc, operands.carry, results)

    def micro_step(
        self,
        operands: Operands,
        met: dict[int, Placement],
        state: State,
        batch: list[jax.Array],
    ) -> tuple[State, dict[str, list[jax.Array]]]:
        """The next state, and what to collect, by mode; `met` is that of this step."""
        program, acc = self.program, state.acc
        params, batch, carry = self.fenced((operands.params, batch, state.carry))
        keys = [jax.random.fold_in(key, acc.count) for key in operands.keys]

        def evaluate(*params: jax.Array) -> tuple[jax.Array, list[Any]]:
            args = *params, *batch, *keys, *carry
            loss, *rest = jax.core.eval_jaxpr(program.jaxpr, operands.consts, *args)
            return loss, [jnp.asarray(x) for x in rest]  # an aux may be a plain number

        with jax.named_scope("compute"):
            loss, pullback, rest = jax.vjp(evaluate, *params, has_aux=True)
        weight = None
        if program.weighted:
            weight, *rest = rest
            weight = weight.astype(acc.weight.dtype)
        carry, aux = rest[: len(state.carry)], rest[len(state.carry) :]
        total = self.add_gradient(acc, pullback, loss, weight, met)
        with jax.named_scope("accumulate"):
            one = jnp.ones_like(acc.weight) if weight is None else weight
            weights, count = acc.weight + one, self.following(acc.count)
            acc = Accumulator(total, self.vary(weights, one), count)
            pairs = zip(carry, state.carry, strict=True)
            carry = [aux_modes.like(strong(new), old) for new, old in pairs]
            leaves = [
                self.rounded(x, acc) if MODES[mode].adds else x
                for x, mode in zip((loss, *aux), program.modes, strict=True)
            ]
            groups = dict(
                zip(MODES, aux_modes.by_mode(leaves, program.modes), strict=True)
            )
            modes = zip(MODES.items(), state.results, strict=True)
            zero = self.zero(acc)
            results = [
                mode.step(x, groups[name], weight, zero) for (name, mode), x in modes
            ]
            collected = {name: groups[name] for name in MODES if MODES[name].collects}
        return State(acc, carry, results), collected

    def add_gradient(
        self,
        acc: Flat,
        pullback: Any,
        loss: jax.Array,
        weight: Any,
        met: dict[int, Placement],
    ) -> list[jax.Array]:
        """`acc.total` plus the weighted gradient of one micro-batch."""
        from ga_optax._inside import sending  # which few need

        # The backward pass is linear in the cotangent: with the weight for it, weighted
        # gradients come out, and nothing has to be multiplied, in place or not.
        multiplies, arrivals = self.program.multiplies, self.program.arrivals
        scaled = weight is not None and not multiplies
        cotangent = weight.astype(loss.dtype) if scaled else jnp.ones_like(loss)
        cotangent = aux_modes.like(cotangent, loss)
        # If the backward pass sums over devices, they all have to run it, and no one of
        # them may leave out what came of it.
        selects = None if self.sums_already else weight
        leaves = range(len(self.in_place))
        later = {i: x for i, x in met.items() if not self.meets_inside(i, x)}
        met = {i: place for i, place in met.items() if i not in later}
        parts = {i: place for i, place in met.items() if place.dims}
        refs = {
            i: sending.empty(x, parts[i], self.axes) if i in parts else jax.new_ref(x)
            for i, x in enumerate(acc.total)
            if self.in_place[i]
        }
        by_hand = [i for i in leaves if i not in refs]
        types: list[Any] = [x.aval for x in self.program.jaxpr.invars[: len(leaves)]]
        due: list[Any] = [self.due(i, types[i], acc.total[i]) for i in by_hand]

        def scattered(i: int, g: jax.Array) -> jax.Array:
            if selects is not None:
                g = jnp.where(selects == 0, -jnp.zeros_like(g), g)
            return collectives.scatter(g, self.sent[i], len(types[i].shape))

        def write(i: int, ref: Any, g: jax.Array) -> None:
            if i in met:
                old, ref = ref if i in parts else (ref[...], ref)
                [new] = accumulator.add_terms([old], [g], selects)
                ndim = len(types[i].shape)
                new = collectives.summed(new, met[i], self.axes, ndim)
                ref[...] = aux_modes.like(new, ref)
            else:
                g = g.astype(ref.dtype)
                jax.ref.addupdate(ref, ..., scattered(i, g) if i in self.sent else g)

        def cast(grads: Sequence[jax.Array]) -> list[jax.Array]:
            return [x.astype(aval.dtype) for x, aval in zip(grads, due, strict=True)]

        def added(*held: Any) -> list[jax.Array]:
            slots = dict(zip(refs, held, strict=True))
            slots = [slots.get(i, jax.ad.GradValue()) for i in leaves]
            grads = pullback.with_refs(*slots)(cotangent)
            return cast([grads[i] for i in by_hand])

        def backward() -> list[jax.Array]:
            with jax.named_scope("compute"):
                if not refs:
                    return cast(pullback(cotangent))
                own = all(types[i].dtype == x.dtype for i, x in refs.items())
                if own and not refs.keys() & {**self.sent, **met}:
                    return added(*refs.values())
                held = [(acc.total[i], x) if i in parts else x for i, x in refs.items()]
                writes = [functools.partial(write, i) for i in refs]
                return sending.run(added, [types[i] for i in refs], held, writes)

        if refs and selects is not None and not self.sent:  # all devices have to send
            # What went into a reference cannot be selected away, and NaN · 0 is NaN.
            zeros = aux_modes.blank(due)
            constant = _constant(backward)
            # If some gradients meet, all devices have to run it.
            leaves_out = ~_yes() if met else weight == 0
            grads = jax.lax.cond(leaves_out, lambda: zeros, backward)
            # XLA adds a zero that it knows to nothing: in a branch it would not know.
            grads = [
                z if fixed else x
                for fixed, z, x in zip(constant, zeros, grads, strict=True)
            ]
        else:
            grads = backward()

        with jax.named_scope("accumulate"):
            total = {}
            for i, g in zip(by_hand, grads, strict=True):
                old, largest = acc.total[i], arrivals[i] == "replaces"
                # A bare product is rounded, then added, see `arrival`.
                if largest:
                    g = g.astype(old.dtype)
                elif multiplies:
                    g = accumulator.weighted(g, weight, old.dtype, self.zero(acc))
                elif not arrivals[i]:
                    g = self.rounded(g, acc)
                if i in self.sent:
                    total[i] = accumulator.plus(old, scattered(i, g.astype(old.dtype)))
                else:
                    new = accumulator.add_terms([old], [g], selects, [largest])
                    [total[i]] = new
        sums = [jax.ref.freeze(refs[i]) if i in refs else total[i] for i in leaves]
        # Each by itself: a collective of several would wait for the last of them.
        for i, place in later.items():
            [sums[i]] = collectives.reduce([sums[i]], [place], self.axes)
        return sums

    def fenced(self, tree: Any) -> Any:
        return _island(tree) if self.optimize else tree

    def following(self, count: jax.Array) -> jax.Array:
        return _next(count) if self.optimize else accumulator.increment(count)

    def zero(self, acc: Flat) -> jax.Array | None:
        return accumulator.unknown_zero(acc.count) if self.optimize else None

    def rounded(self, x: jax.Array, acc: Flat) -> jax.Array:
        zero = self.zero(acc)
        return x if zero is None else accumulator.rounded(x, zero)

    def once(
        self, step: Callable[..., Any], start: State, batch: list[jax.Array]
    ) -> tuple[State, Any]:
        if self.optimize:
            return _once(step, start, batch)
        state, collected = step(start, batch)
        return state, jax.tree.map(lambda x: x[None], collected)

    def meets_inside(self, i: int, place: Placement) -> bool:
        """Whether a sum is reduced slice by slice, inside the backward pass."""
        jaxpr = self.program.jaxpr
        return self.in_place[i] and not is_cut(jaxpr, i, place)

    def due(self, i: int, type_: Any, total: jax.Array) -> Any:
        """The type in which a gradient leaves the backward pass.

        A sum does so in the dtype of its accumulator, if that is wider.
        """
        is_sum = self.program.arrivals[i] not in (None, "replaces")
        if not is_sum or self.program.multiplies:
            return type_
        wider = jnp.finfo(total.dtype).bits > jnp.finfo(type_.dtype).bits
        return type_.update(dtype=total.dtype) if wider else type_

    def vary(self, x: jax.Array, term: Any) -> jax.Array:
        """Marks a sum as varying over devices as `term` does, one of its terms."""
        return collectives.vary(x, (*self.program.varying, *meshes.varying(term)))

    def results(self, state: State) -> list[jax.Array]:
        """The loss and the leaves of the aux, of all micro-batches."""
        modes = zip(MODES.values(), state.results, strict=True)
        done = [mode.finish(kept) for mode, kept in modes]
        leaves = aux_modes.in_order(done, self.program.modes)
        return [
            x.astype(due.dtype)
            if mode != "sum" and jnp.issubdtype(due.dtype, jnp.inexact)
            else x
            for x, due, mode in zip(
                leaves, self.program.results, self.program.modes, strict=True
            )
        ]


# -- One program in every grouping -----------------------------------------------------
#
# A micro-step has the same bits in a loop of any length if XLA compiles it the same
# way, whatever is around it. Three of its passes look at what is around it.


def _island(tree: Any) -> Any:
    """`tree`, which XLA computes before the micro-step, and not a part of it.

    Else it would hoist what depends on the parameters alone out of a loop of several
    micro-steps, and fuse and round it in another way than in a loop of one.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):  # jax 0.10 mixes the varying axes of one barrier
        groups.setdefault(meshes.varying(x), []).append(i)
    for members in groups.values():
        fenced = jax.lax.optimization_barrier([leaves[i] for i in members])
        for i, x in zip(members, fenced, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def _once(
    step: Callable[..., Any], start: State, batch: list[jax.Array]
) -> tuple[State, Any]:
    """One micro-step, which XLA compiles by itself, as it does the body of a loop.

    It would remove a loop of one micro-step. On CPUs it cannot tell that this
    conditional has one way; elsewhere that is not needed, and the predicate is known.
    """
    step, (due, types) = ir.traced_once(step, start, batch)
    types, structure = jax.tree.flatten(types)

    def stay() -> tuple[State, Any]:
        def like(x: jax.Array, due: Any) -> jax.Array:  # a sum may have met
            same = x.shape == due.shape and meshes.varying(x) == meshes.varying(due)
            return x if same else aux_modes.blank([due])[0]

        state = jax.tree.map(like, start, due)
        return state, jax.tree.unflatten(structure, aux_modes.blank(types))

    state, collected = jax.lax.cond(_yes(), lambda: step(start, batch), stay)
    return state, jax.tree.map(lambda x: x[None], collected)


def _yes() -> jax.Array:
    """True, which XLA does not know on CPUs."""
    return jax.lax.platform_dependent(
        cpu=lambda: jax.lax.optimization_barrier(jnp.ones([], bool)),
        default=lambda: jnp.ones([], bool),
    )


def _next(count: jax.Array) -> jax.Array:
    """`count + 1`; on CPUs by a sort.

    That keeps XLA from compiling a loop as one function, in which it adds in another
    order and contracts other products than in operations compiled one by one.
    """
    return jax.lax.platform_dependent(
        count,
        accumulator.increment(count),
        cpu=lambda *pair: jax.lax.sort(jnp.stack(pair))[1],
        default=lambda _, following: following,
    )


def _constant(fun: Callable[[], list[jax.Array]]) -> list[bool]:
    """Which results depend on nothing: gradients of what `fun` does not use."""
    jaxpr = jax.make_jaxpr(fun)().jaxpr
    depending = set(jaxpr.constvars)
    for equation in jaxpr.eqns:
        read = {x for x in equation.invars if isinstance(x, core.Var)}
        if not depending.isdisjoint(read):
            depending.update(equation.outvars)
    return [isinstance(x, core.Literal) or x not in depending for x in jaxpr.outvars]


# -- Logical devices -------------------------------------------------------------------


def of_logical(loop: Loop, operands: Operands, call: Call) -> State:
    """The state of the logical devices of this device: each runs the loop by itself."""
    number, axes = call.logical, call.axes
    indices = number * jax.lax.axis_index(axes) + jnp.arange(number, dtype=jnp.int32)
    batch = [jnp.reshape(x, (number, -1, *x.shape[1:])) for x in operands.batch]

    def run(part: Any, buffer: State) -> tuple[State, list[Any]]:
        index, batch = part
        keys = [jax.random.fold_in(key, index) for key in operands.keys]
        # If XLA knew that this is empty, it would write zeros to one more buffer. The
        # index changes, so its sort stays in the loop; the counter's may be dropped.
        empty, count = _island((_next(index) > index, operands.acc.count))
        total = [accumulator.cleared(x, empty) for x in buffer.acc.total]
        acc = operands.acc._replace(total=total, count=count)
        state = loop(operands._replace(batch=batch, keys=keys, acc=acc))
        pairs = list(zip(MODES.values(), state.results, strict=True))
        kept = [[] if mode.collects else x for mode, x in pairs]
        collected = [x if mode.collects else [] for mode, x in pairs]
        return state._replace(results=kept), collected

    def join(a: State, b: State) -> State:
        pairs = zip(a.acc.total, b.acc.total, call.replaced, strict=True)
        total = [
            jnp.maximum(x, y) if new else logical.plus(x, y) for x, y, new in pairs
        ]
        acc = Accumulator(total, a.acc.weight + b.acc.weight, b.acc.count)
        carry = [
            logical.plus(x, y) if _averages(x) else jnp.maximum(x, y)
            for x, y in zip(a.carry, b.carry, strict=True)
        ]
        kept = zip(MODES.values(), a.results, b.results, strict=True)
        return State(acc, carry, [mode.join(x, y) for mode, x, y in kept])

    buffers = [loop.start(operands)] * number.bit_length()  # one for each level
    loop = dataclasses.replace(loop, logical=True)
    (*_, state), collected = logical.fold(run, (indices, batch), number, buffers, join)
    collected = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), collected)
    pairs = zip(MODES.values(), state.results, collected, strict=True)
    results = [new if mode.collects else kept for mode, kept, new in pairs]
    return state._replace(results=results)


def _averages(x: jax.Array) -> bool:
    """Whether the carry of all devices is their mean, and not the largest."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


# -- After the loop --------------------------------------------------------------------


def merged(state: State, call: Call) -> State:
    """The state of all devices: one communication, but for what is sharded."""
    axes = call.axes
    modes = list(zip(MODES.values(), state.results, strict=True))
    addends = [mode.addends(kept) for mode, kept in modes]
    # Σ w is reduced without weights, too: were the processes of a run to disagree on
    # the number of micro-batches, they would still all divide by the same number.
    means = [x for x in state.carry if _averages(x)]
    small, structure = jax.tree.flatten((addends, state.acc.weight, means))
    is_first = jax.lax.axis_index(axes) == 0

    def largest(x: jax.Array) -> jax.Array:
        """On one device, and 0 on the others: as a sum over them it is itself."""
        x = collectives.vary(jax.lax.pmax(x, axes), axes)
        return jnp.where(is_first, x, jnp.zeros_like(x))

    pairs = zip(state.acc.total, call.replaced, strict=False)  # there may be no totals
    totals = [largest(x) if replaced else x for x, replaced in pairs]
    leaves = [*totals, *collectives.vary(small, axes)]
    where = [*call.where, *[Placement()] * len(small)]
    number = meshes.num_devices(axes, None)
    if call.logical:
        number *= call.logical
        zero = accumulator.unknown_zero(state.acc.count)
        # What follows is the same program on any number of devices.
        out = _island(logical.reduce(leaves, where, axes, zero))
    else:
        out = collectives.reduce(leaves, where, axes)
    total = out[: len(call.where)]
    sums, weight, means = jax.tree.unflatten(structure, out[len(total) :])
    rest = iter(means)
    carry = [
        next(rest) / number if _averages(x) else jax.lax.pmax(x, axes)
        for x in state.carry
    ]
    pairs = zip(modes, sums, strict=True)
    results = [mode.merge(kept, x, weight, axes) for (mode, kept), x in pairs]
    return State(Accumulator(total, weight, state.acc.count), carry, results)
