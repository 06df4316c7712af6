"""The gradients of a micro-batch are added to their accumulators.

There is one `Addition` for each leaf:

    by hand     the gradient leaves the backward pass, and is added to the sum
    stacked     the gradient of a leaf of the batch is written to its place in a stack
    scattered   each device adds its part of the sum over devices
    in place    the backward pass adds the gradient to a reference, slice by slice; if
                the gradient is scattered, too, each slice is scattered first
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._devices import collectives
from ga_optax._devices.meshes import Placement
from ga_optax._loop import sending, trees
from ga_optax._loop.loss import LossProgram
from ga_optax._passes import interpret, read

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


def choose(
    program: LossProgram,
    totals: Sequence[jax.Array],
    whys: Sequence[Any],
    scattered: Mapping[int, Placement],
) -> list[Addition]:
    """One addition for each leaf of the parameters.

    Args:
      program: the loss of a micro-batch.
      totals: the accumulators.
      whys: the reason why a leaf is not added in place; None if it is.
      scattered: the gradients that are scattered before they are added, and how.
    """
    additions = []
    for i, (total, why) in enumerate(zip(totals, whys, strict=True)):
        aval: Any = program.jaxpr.invars[i].aval
        bare = program.arrivals[i] is None
        returned = aval.update(memory_space=jax.memory.Space.Device)
        # A sum leaves the backward pass in the dtype of its accumulator, if wider.
        wider = jnp.finfo(total.dtype).bits > jnp.finfo(aval.dtype).bits
        if wider and not bare and not program.multiplies:
            returned = returned.update(dtype=total.dtype)
        new = Addition(aval, returned, bare, why is None, scattered.get(i))
        additions.append(new)
    return additions


def by_hand(additions: Additions) -> list[Addition]:
    """The same additions without references."""
    return [x._replace(in_place=False) for x in additions]


def stacked(x: jax.Array, begins: bool = True) -> Addition:
    """The addition to `x`, which has one gradient for each micro-batch."""
    aval = jax.typeof(x[0])
    return Addition(aval, aval, stacked=True, begins=begins)


def add(
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
            return sending.run(gradients, types, [*refs.values()], writes)

    if refs and step.weight is not None and all(x.scattered is None for x in additions):
        grads = _unless(step.weight == 0, backward, trees.blank([*types.values()]))
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
    jaxpr = interpret.program_of(backward).jaxpr
    depending = read.following(jaxpr, jaxpr.constvars)
    grads = jax.lax.cond(skips, lambda: zeros, backward)
    # XLA leaves out the addition of a zero, but not of a zero that a branch returns:
    # the gradient of what `fun` does not use.
    triples = zip(jaxpr.outvars, zeros, grads, strict=True)
    return [x if read.is_among(v, depending) else z for v, z, x in triples]
