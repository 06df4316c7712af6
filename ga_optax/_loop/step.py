"""What a loop knows of a loss, and of where it runs: no call, no options."""

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._devices.meshes import Axes, Placement
from ga_optax._loop import in_place
from ga_optax._passes import ir, known, table
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts, Lies

Flat = Any  # an Accumulator whose total is a list


class Step(NamedTuple):
    """What `fun` does to one micro-batch.

    Attributes:
      jaxpr: of the flat arguments `(params, batch, keys, carry)` to the flat results
        `(loss, weight, carry, results)`; no weight if there is none.
      results: the types of the loss and of the other results.
      ways: how each of them is put together over the micro-batches, see `ways`.
      weighted: whether there is a weight.
      varying: the mesh axes over which every sum differs between devices: those of
        the data, and of the weight.
      multiplies: whether the weight multiplies the gradients, and not the cotangent.
      arrivals: how the gradient of each leaf of the parameters arrives, see `arrival`.
      optimize: whether passes run on programs; False is the plain scan.
    """

    jaxpr: core.Jaxpr
    results: list[Any]
    ways: list[str]
    weighted: bool
    varying: Axes
    multiplies: bool
    arrivals: list[str | None]
    optimize: bool

    @property
    def sliced(self) -> list[bool]:
        """Which gradients come in slices that can be added in place."""
        found = [came == "slices" for came in self.arrivals]
        can = any(found) and in_place.can_add(self.jaxpr, self.multiplies)
        return found if can else [False] * len(found)

    @property
    def deeds(self) -> known.Deeds:
        """What it does beside its results, there and back."""
        return known.deeds(self.jaxpr)

    @property
    def low_precision(self) -> bool:
        """Whether it computes anything in less than 32 bits."""
        results = (x.aval for e in ir.equations(self.jaxpr) for x in e.outvars)
        dtypes = (getattr(aval, "dtype", np.dtype(np.int32)) for aval in results)
        return any(jnp.issubdtype(d, np.floating) and d.itemsize < 4 for d in dtypes)


class Operands(NamedTuple):
    """The arrays of a loop, flat by role; the batch split.

    Attributes:
      num_real: how many micro-batches count; None for all.
      rows: how many leaves of the batch are differentiated, too: the first of them. The
        last is the index of the micro-batch then.
    """

    consts: Sequence[Any]
    params: list[jax.Array]
    batch: list[jax.Array]
    keys: list[jax.Array]
    carry: list[jax.Array]
    acc: Flat
    num_real: jax.Array | None = None
    rows: int = 0


class Where(NamedTuple):
    """On which devices a loop runs, and how their sums come together.

    Attributes:
      names: those of the parameters, for logs.
      axes: the data axes that are bound.
      placements: how to merge the gradient of each leaf over them.
      sent: which gradients are scattered before they are added, and how.
      logical: as how many devices this one runs; 0 if as itself.
      gathered: how parameters lie that every micro-step gathers; None if none does.
      shards: the parts of constants that are gathered where they are used, by the ids
        of these.
      window: the axis over which rows meet, if there is one, and its size.
      split_by_compiler: whether the compiler distributes what is computed; None if that
        is not known.
    """

    names: Sequence[str]
    axes: Axes = ()
    placements: Sequence[Placement] = ()
    sent: Mapping[int, Placement] = types.MappingProxyType({})
    logical: int = 0
    gathered: Lies | None = None
    shards: Mapping[int, Any] = types.MappingProxyType({})
    window: Sequence[tuple[str, int]] = ()
    split_by_compiler: bool | None = False

    @property
    def is_local(self) -> bool:
        """Whether it is known that no compiler distributes what is computed."""
        return self.split_by_compiler is False

    @property
    def sums_already(self) -> bool:
        """Whether the backward pass sums over devices."""
        return any(place.summed for place in self.placements)


def after_passes(
    program: ir.Program, where: Where, multiplies: bool, optimize: bool
) -> tuple[ir.Program, list[str | None]]:
    """A program of a micro-batch as it is to run, and how its gradients arrive."""
    number = len(where.names)
    if not optimize:
        return program, [None] * number
    facts = Facts(
        num_params=number,
        adds_in_place=in_place.can_add(program.jaxpr, multiplies),
        lies=where.gathered,
        shards=where.shards,
        window=where.window,
    )
    program = table.run("fun", program, facts)
    arrivals = [arrival(program.jaxpr, x) for x in program.jaxpr.invars[:number]]
    return table.run("sharded fun", program, facts), arrivals
