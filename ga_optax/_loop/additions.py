"""How a gradient gets into its accumulator, one `Addition` for each leaf.

by hand     it leaves the backward pass, and is added to the sum
stacked     it is of one micro-batch alone, and has its place in a stack
scattered   each device adds the part of the sum over devices that it keeps
in place    the backward pass adds it to a reference, slice by slice; if it is scattered
            too, each slice is scattered before
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._devices import collectives
from ga_optax._devices.meshes import Axes, Placement
from ga_optax._loop import sending, trees
from ga_optax._loop.step import Step
from ga_optax._passes import ir

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
      stacked: whether it is written to its place in a stack.
      begins: whether nothing is there.
    """

    type: Any
    due: Any
    bare: bool = False
    in_place: bool = False
    scattered: Any = None  # a Placement, or None
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

    def write(self, step: MicroStep, ref: Any, g: jax.Array) -> None:
        """Adds a gradient, or a slice of it, to a reference."""
        g = g.astype(ref.dtype)
        g = g if self.scattered is None else self._part(g, step)
        jax.ref.addupdate(ref, ..., g)


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
    return [x._replace(in_place=False) for x in additions]


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
    refs = {i: jax.new_ref(t) for i, (x, t) in pairs if x.in_place}
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
            if same and all(x.scattered is None for x in its.values()):
                return adding(*refs.values())
            writes = [functools.partial(x.write, step) for x in its.values()]
            types = [x.type for x in its.values()]
            return sending.run(adding, types, [*refs.values()], writes)

    if refs and step.skip is not None and all(x.scattered is None for x in additions):
        grads = _unless(step.skip == 0, backward, trees.blank(list(due.values())))
    else:
        grads = backward()
    sums: dict[int, Any] = {}
    with jax.named_scope("accumulate"):
        for i, g in zip(due, grads, strict=True):
            sums[i] = additions[i].add(totals[i], g, step)
    sums |= {i: jax.ref.freeze(ref) for i, ref in refs.items()}
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
