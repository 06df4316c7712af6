"""How a gradient gets into its accumulator, one `Addition` for each leaf.

by hand     it leaves the backward pass, and is added to the sum
stacked     it is of one micro-batch alone, and has its place in a stack
scattered   each device adds the part of the sum over devices that it keeps
in place    the backward pass adds it to a reference, slice by slice; if it is scattered
            too, each slice is scattered before
reduced     in the last micro-batch, the sum is reduced over devices as soon as it is
            final: inside the backward pass, slice by slice, or after it
"""

import functools
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

Pull = Callable[..., Sequence[jax.Array]]


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


class Addition(NamedTuple):
    """How the gradient of a leaf is added.

    Attributes:
      type: of the gradient in the backward pass.
      due: its type where it leaves that.
      bare: whether it may be a bare product, which is rounded before it is added.
      in_place: whether the backward pass adds it to a reference.
      scattered: how the sum over devices is, of which this one adds its part.
      reduced: how the sum is reduced over devices.
      inside: whether that is done in the backward pass.
      stacked: whether it is written to its place in a stack.
      begins: whether nothing is there.
    """

    type: Any
    due: Any
    bare: bool = False
    in_place: bool = False
    scattered: Any = None  # a Placement, or None
    reduced: Any = None
    inside: bool = False
    stacked: bool = False
    begins: bool = False

    def add(self, total: jax.Array, g: jax.Array, step: MicroStep) -> jax.Array:
        """The sum with a gradient in it that has left the backward pass."""
        if step.weight is not None:
            g = accumulator.weighted(g, step.weight, total.dtype, step.zero)
        elif self.bare and step.zero is not None:
            g = accumulator.rounded(g, step.zero)
        if self.scattered is not None:
            return accumulator.plus(total, self._part(g.astype(total.dtype), step))
        if not self.stacked:
            return step.add(total, g)
        g = step.counted(g).astype(total.dtype)
        if not self.begins:
            g = accumulator.plus(
                jax.lax.dynamic_index_in_dim(total, step.index, keepdims=False), g
            )
        return jax.lax.dynamic_update_index_in_dim(total, g, step.index, 0)

    def _part(self, g: jax.Array, step: MicroStep) -> jax.Array:
        ndim = len(self.type.shape)
        return collectives.scatter(step.counted(g), self.scattered, ndim)

    # -- In place ----------------------------------------------------------------------

    @property
    def is_sent(self) -> bool:
        """Whether the sum of all devices has another type than that of one."""
        return self.inside and bool(self.reduced.dims)

    @property
    def writes(self) -> bool:
        """Whether `write` has to add it; else the backward pass can do so itself."""
        return self.inside or self.scattered is not None

    def reference(self, total: jax.Array, axes: Axes) -> Any:
        if self.is_sent:
            return sending.empty(total, self.reduced, axes)
        return jax.new_ref(total)

    def write(self, step: MicroStep, held: Any, g: jax.Array) -> None:
        """Adds a gradient, or a slice of it, to a reference, or to `(total, ref)`."""
        if not self.inside:
            g = g.astype(held.dtype)
            g = g if self.scattered is None else self._part(g, step)
            jax.ref.addupdate(held, ..., g)
            return
        old, ref = held if self.is_sent else (held[...], held)
        ndim, new = len(self.type.shape), step.add(old, g)
        new = collectives.summed(new, self.reduced, step.axes, ndim)
        ref[...] = trees.like(new, ref)


# -- All leaves ------------------------------------------------------------------------

Additions = Sequence[Addition]


def choose(
    step: Step,
    totals: Sequence[jax.Array],
    whys: Sequence[Any],
    sent: Mapping[int, Placement],
) -> list[Addition]:
    """How the gradient of each leaf is added.

    Args:
      step: what `fun` does.
      totals: the accumulators.
      whys: why a leaf is not added in place; None if it is.
      sent: which gradients are scattered before they are added, and how.
    """
    found = []
    for i, (total, why) in enumerate(zip(totals, whys, strict=True)):
        aval: Any = step.jaxpr.invars[i].aval
        bare, due = step.arrivals[i] is None, aval
        # A sum leaves the backward pass in the dtype of its accumulator, if wider.
        wider = jnp.finfo(total.dtype).bits > jnp.finfo(aval.dtype).bits
        if wider and not bare and not step.multiplies:
            due = aval.update(dtype=total.dtype)
        found.append(Addition(aval, due, bare, why is None, sent.get(i)))
    return found


def by_hand(additions: Additions) -> list[Addition]:
    """The same without references."""
    return [x._replace(in_place=False, inside=False) for x in additions]


def reduced(
    additions: Additions, step: Step, where: Mapping[int, Placement]
) -> list[Addition]:
    """Those of the last micro-batch, which reduces these sums over devices."""
    found = list(additions)
    for i, place in where.items():
        can = found[i].in_place and found[i].scattered is None
        inside = can and not is_cut(step.jaxpr, i, place)
        found[i] = found[i]._replace(reduced=place, inside=inside)
    return found


def placed(x: jax.Array, begins: bool = True) -> Addition:
    """That of a leaf of the batch, each micro-batch of which has its own in a stack."""
    aval = jax.typeof(x[0])
    return Addition(aval, aval, stacked=True, begins=begins)


def add(
    additions: Additions, totals: Sequence[jax.Array], step: MicroStep, pull: Pull
) -> list[jax.Array]:
    """The sums with the gradients of one micro-step in them.

    `pull` returns the gradients; given references, it adds to these.
    """
    pairs = enumerate(zip(additions, totals, strict=True))
    refs = {i: x.reference(t, step.axes) for i, (x, t) in pairs if x.in_place}
    due = {i: x.due for i, x in enumerate(additions) if not x.in_place}

    def left(grads: Sequence[jax.Array]) -> list[jax.Array]:
        """Those of the gradients that are not added yet."""
        pairs = ((grads[i], aval.dtype) for i, aval in due.items())
        return [x if x.dtype == dtype else x.astype(dtype) for x, dtype in pairs]

    def adding(*its: Any) -> list[jax.Array]:
        slots = dict(zip(refs, its, strict=True))
        every = range(len(additions))
        return left(pull(*[slots.get(i, jax.ad.GradValue()) for i in every]))

    def backward() -> list[jax.Array]:
        with jax.named_scope("compute"):
            if not refs:
                return left(pull())
            its = {i: additions[i] for i in refs}
            same = all(x.type.dtype == refs[i].dtype for i, x in its.items())
            if same and not any(x.writes for x in its.values()):
                return adding(*refs.values())
            held = [
                (totals[i], refs[i]) if x.is_sent else refs[i] for i, x in its.items()
            ]
            writes = [functools.partial(x.write, step) for x in its.values()]
            return sending.run(adding, [x.type for x in its.values()], held, writes)

    if refs and step.skip is not None and all(x.scattered is None for x in additions):
        # If some slices are reduced inside, all devices have to run it.
        waits = any(x.inside for x in additions)
        skips = ~fences.true() if waits else step.skip == 0
        grads = _unless(skips, backward, trees.blank(list(due.values())))
    else:
        grads = backward()
    sums: dict[int, Any] = {}
    with jax.named_scope("accumulate"):
        for i, g in zip(due, grads, strict=True):
            sums[i] = additions[i].add(totals[i], g, step)
    sums |= {i: jax.ref.freeze(ref) for i, ref in refs.items()}
    for i, x in enumerate(additions):
        # Each by itself: a collective of several would wait for the last of them.
        if x.reduced is not None and not x.inside:
            [sums[i]] = collectives.reduce([sums[i]], [x.reduced], step.axes)
    return [sums[i] for i in range(len(additions))]


def _unless(
    skips: jax.Array, backward: Callable[[], list[jax.Array]], zeros: list[jax.Array]
) -> list[jax.Array]:
    """The gradients, or zeros without a backward pass if `skips`.

    What went into a reference cannot be selected away afterwards.
    """
    jaxpr = ir.program_of(backward).jaxpr
    depending = ir.following(jaxpr, jaxpr.constvars)
    grads = jax.lax.cond(skips, lambda: zeros, backward)
    # XLA leaves out the addition of a zero, but not of one that a branch returns: of
    # the gradient of what `fun` does not use.
    triples = zip(jaxpr.outvars, zeros, grads, strict=True)
    return [x if ir.is_among(v, depending) else z for v, z, x in triples]
