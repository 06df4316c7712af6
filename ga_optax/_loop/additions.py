"""How a gradient gets into its accumulator: one class for each way.

ByHand             it leaves the backward pass, and is added to the sum
Placed             it is of one micro-batch alone, and has its place in a stack
Scattered          each device adds the part of the sum over devices that it keeps
InPlace            the backward pass adds it to a reference, slice by slice
ScatteredInPlace   the same, each slice scattered before
ReducedInPlace     the same in the last micro-batch, each slice reduced over devices
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._devices import collectives
from ga_optax._devices.meshes import Axes, Placement
from ga_optax._loop import fences, sending, trees
from ga_optax._loop.step import Step
from ga_optax._passes import ir
from ga_optax._passes.arrivals import is_cut


class MicroStep(NamedTuple):
    """What the gradients of one micro-step have in common.

    Attributes:
      weight: what multiplies them; None if it multiplied the cotangent of the loss.
      skip: a weight that leaves them out if it is 0; None if all devices have to add.
      zero: see `accumulator.rounded`; None if nothing has to be rounded before.
      axes: the data axes that are bound.
      index: which of the stacks of this device is the micro-batch's.
    """

    weight: jax.Array | None
    skip: jax.Array | None
    zero: jax.Array | None
    axes: Axes
    index: jax.Array | None = None

    def add(self, total: jax.Array, term: jax.Array) -> jax.Array:
        """`total + term`, or `total` if the micro-batch has weight 0."""
        return accumulator.add_terms([total], [term], self.skip)[0]

    def counted(self, g: jax.Array) -> jax.Array:
        """`g`, or a zero that changes no sum if the micro-batch has weight 0."""
        if self.skip is None:
            return g
        return jnp.where(self.skip == 0, -jnp.zeros_like(g), g)


@dataclasses.dataclass(frozen=True)
class ByHand:
    """Leaves the backward pass, and is added to the sum.

    Attributes:
      type: of the gradient where it leaves the backward pass.
      bare: whether it may be a bare product, which is rounded before it is added.
    """

    type: Any
    bare: bool = False

    @property
    def by_hand(self) -> "ByHand":
        """The same without a reference."""
        return self

    def term(self, total: jax.Array, g: jax.Array, step: MicroStep) -> jax.Array:
        """What is added."""
        if step.weight is not None:
            return accumulator.weighted(g, step.weight, total.dtype, step.zero)
        if self.bare and step.zero is not None:
            return accumulator.rounded(g, step.zero)
        return g

    def add(self, total: jax.Array, g: jax.Array, step: MicroStep) -> jax.Array:
        """The sum with this gradient in it."""
        return step.add(total, self.term(total, g, step))


@dataclasses.dataclass(frozen=True)
class Placed(ByHand):
    """Is written to its place in a stack, or added to what is there.

    Attributes:
      begins: whether nothing is there.
    """

    begins: bool = False

    def add(self, total: jax.Array, g: jax.Array, step: MicroStep) -> jax.Array:
        g = step.counted(self.term(total[0], g, step)).astype(total.dtype)
        if not self.begins:
            g = accumulator.plus(
                jax.lax.dynamic_index_in_dim(total, step.index, keepdims=False), g
            )
        return jax.lax.dynamic_update_index_in_dim(total, g, step.index, 0)


@dataclasses.dataclass(frozen=True)
class Scattered(ByHand):
    """Adds the part that this device keeps of the sum over devices."""

    placement: Placement = dataclasses.field(kw_only=True)

    def part(self, g: jax.Array, step: MicroStep) -> jax.Array:
        ndim = len(self.type.shape)
        return collectives.scatter(step.counted(g), self.placement, ndim)

    def add(self, total: jax.Array, g: jax.Array, step: MicroStep) -> jax.Array:
        g = self.term(total, g, step).astype(total.dtype)
        return accumulator.plus(total, self.part(g, step))


@dataclasses.dataclass(frozen=True)
class InPlace:
    """The backward pass adds it to a reference.

    Attributes:
      type: of the gradient.
      by_hand: the same without a reference.
      writes: whether `write` has to add it; else the backward pass can do so itself.
    """

    type: Any
    by_hand: ByHand
    writes = False

    def reference(self, total: jax.Array, axes: Axes) -> Any:
        return jax.new_ref(total)

    def held(self, total: jax.Array, ref: Any) -> Any:
        """What `write` is given: the reference, or a tree with it."""
        return ref

    def write(self, step: MicroStep, held: Any, g: jax.Array) -> None:
        """Adds a gradient, or a slice of it."""
        jax.ref.addupdate(held, ..., g.astype(held.dtype))


class ScatteredInPlace(InPlace):
    """Adds slices of the part that this device keeps."""

    by_hand: Scattered
    writes = True

    def write(self, step: MicroStep, held: Any, g: jax.Array) -> None:
        part = self.by_hand.part(g.astype(held.dtype), step)
        jax.ref.addupdate(held, ..., part)


@dataclasses.dataclass(frozen=True)
class ReducedInPlace(InPlace):
    """Adds each slice, and reduces the sum over devices as soon as it is final."""

    placement: Placement
    writes = True

    def reference(self, total: jax.Array, axes: Axes) -> Any:
        if not self.placement.dims:
            return jax.new_ref(total)
        return sending.empty(total, self.placement, axes)

    def held(self, total: jax.Array, ref: Any) -> Any:
        return (total, ref) if self.placement.dims else ref

    def write(self, step: MicroStep, held: Any, g: jax.Array) -> None:
        old, ref = held if self.placement.dims else (held[...], held)
        ndim, new = len(self.type.shape), step.add(old, g)
        new = collectives.summed(new, self.placement, step.axes, ndim)
        ref[...] = trees.like(new, ref)


# -- All leaves ------------------------------------------------------------------------


def choose(
    step: Step,
    totals: Sequence[jax.Array],
    whys: Sequence[Any],
    sent: Mapping[int, Placement] = types.MappingProxyType({}),
) -> "Additions":
    """The way of each leaf.

    Args:
      step: what `fun` does.
      totals: the accumulators.
      whys: why a leaf is not added in place; None if it is.
      sent: which gradients are scattered before they are added, and how.
    """
    ways: list[Any] = []
    for i, (total, why) in enumerate(zip(totals, whys, strict=True)):
        aval: Any = step.jaxpr.invars[i].aval
        arrival = step.arrivals[i]
        due = aval
        if arrival is not None and not step.multiplies:
            due = _wider(aval, total)
        by_hand = ByHand(due, bare=arrival is None)
        if i in sent:
            by_hand = Scattered(due, arrival is None, placement=sent[i])
        kind = ScatteredInPlace if i in sent else InPlace
        ways.append(kind(aval, by_hand) if why is None else by_hand)
    return Additions(ways)


def _wider(aval: Any, total: jax.Array) -> Any:
    """A sum leaves the backward pass in the dtype of its accumulator, if wider."""
    wider = jnp.finfo(total.dtype).bits > jnp.finfo(aval.dtype).bits
    return aval.update(dtype=total.dtype) if wider else aval


class Additions(NamedTuple):
    """The ways of all leaves.

    Attributes:
      ways: the way of each.
      after: which sums are reduced over devices after the backward pass of this
        micro-batch, the last one: each by itself, since a collective of several would
        wait for the last of them.
    """

    ways: Sequence[Any]
    after: Mapping[int, Placement] = types.MappingProxyType({})

    @property
    def in_place(self) -> bool:
        """Whether the backward pass adds anything itself."""
        return any(isinstance(way, InPlace) for way in self.ways)

    @property
    def by_hand(self) -> "Additions":
        """The same without references."""
        pairs = enumerate(self.ways)
        inside = {i: x.placement for i, x in pairs if isinstance(x, ReducedInPlace)}
        return Additions([way.by_hand for way in self.ways], {**self.after, **inside})

    def reduced(self, step: Step, where: Mapping[int, Placement]) -> "Additions":
        """Those of the last micro-batch, which reduces these sums over devices."""
        ways, after = list(self.ways), dict(where)
        for i, place in where.items():
            way = ways[i]
            if type(way) is InPlace and not is_cut(step.jaxpr, i, place):
                ways[i] = ReducedInPlace(way.type, way.by_hand, after.pop(i))
        return Additions(ways, after)

    def placing(self, rows: Sequence[jax.Array]) -> "Additions":
        """With those of leaves of the batch, each micro-batch of which has its own."""
        placed = [Placed(jax.typeof(x[0]), begins=True) for x in rows]
        return self._replace(ways=[*self.ways, *placed])

    def add(
        self, totals: Sequence[jax.Array], step: MicroStep, pull: Callable[..., Any]
    ) -> list[jax.Array]:
        """The sums with the gradients of one micro-step in them.

        `pull` returns the gradients; given references, it adds to these.
        """
        backward = Backward(self.ways, totals, step, pull)
        scatters = any(isinstance(x, (Scattered, ScatteredInPlace)) for x in self.ways)
        if backward.refs and step.skip is not None and not scatters:
            # If some slices are reduced inside, all devices have to run it.
            waits = any(isinstance(way, ReducedInPlace) for way in self.ways)
            skips = ~fences.true() if waits else step.skip == 0
            grads = _unless(skips, backward)
        else:
            grads = backward()
        sums: dict[int, Any] = {}
        with jax.named_scope("accumulate"):
            for i, g in zip(backward.rest, grads, strict=True):
                sums[i] = self.ways[i].add(totals[i], g, step)
        sums |= {i: jax.ref.freeze(ref) for i, ref in backward.refs.items()}
        for i, place in self.after.items():
            [sums[i]] = collectives.reduce([sums[i]], [place], step.axes)
        return [sums[i] for i in range(len(self.ways))]


@dataclasses.dataclass(eq=False)  # JAX wants functions that can be hashed
class Backward:
    """The backward pass of one micro-step: the gradients that it does not add itself.

    Attributes:
      refs: the references that it adds to, by leaf.
      rest: the leaves that it adds to none.
    """

    ways: Sequence[Any]
    totals: Sequence[jax.Array]
    step: MicroStep
    pull: Callable[..., Any]

    def __post_init__(self) -> None:
        self.refs = {
            i: way.reference(self.totals[i], self.step.axes)
            for i, way in enumerate(self.ways)
            if isinstance(way, InPlace)
        }
        self.rest = [i for i in range(len(self.ways)) if i not in self.refs]
        self.due = [self.ways[i].type for i in self.rest]

    def __call__(self) -> list[jax.Array]:
        with jax.named_scope("compute"):
            if not self.refs:
                return self._cast(self.pull())
            ways = [self.ways[i] for i in self.refs]
            refs = list(self.refs.values())
            same = all(w.type.dtype == x.dtype for w, x in zip(ways, refs, strict=True))
            if same and not any(way.writes for way in ways):
                return self._adding(*refs)
            held = [self.ways[i].held(self.totals[i], x) for i, x in self.refs.items()]
            writes = [functools.partial(way.write, self.step) for way in ways]
            return sending.run(self._adding, [w.type for w in ways], held, writes)

    def _adding(self, *refs: Any) -> list[jax.Array]:
        slots = dict(zip(self.refs, refs, strict=True))
        leaves = range(len(self.ways))
        grads = self.pull(*[slots.get(i, jax.ad.GradValue()) for i in leaves])
        return self._cast([grads[i] for i in self.rest])

    def _cast(self, grads: Sequence[jax.Array]) -> list[jax.Array]:
        pairs = zip(grads, self.due, strict=True)
        return [
            x if x.dtype == aval.dtype else x.astype(aval.dtype) for x, aval in pairs
        ]


def _unless(skips: jax.Array, backward: Backward) -> list[jax.Array]:
    """The gradients, or zeros without a backward pass if `skips`.

    What went into a reference cannot be selected away afterwards.
    """
    zeros = trees.blank(backward.due)
    fixed = _constant(backward)
    grads = jax.lax.cond(skips, lambda: zeros, backward)
    # XLA leaves out the addition of a zero, but not of one that a branch returns.
    return [z if same else x for same, z, x in zip(fixed, zeros, grads, strict=True)]


def _constant(fun: Callable[[], list[jax.Array]]) -> list[bool]:
    """Which results depend on nothing: gradients of what `fun` does not use."""
    jaxpr = jax.make_jaxpr(fun)().jaxpr
    depending = ir.following(jaxpr, jaxpr.constvars)
    return [not ir.is_variable(x) or x not in depending for x in jaxpr.outvars]
