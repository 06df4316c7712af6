"""The program of a loss, the arrays of a loop, and its devices: no call, no options."""

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._devices.meshes import Axes, Placement
from ga_optax._loop import in_place
from ga_optax._passes import known, read, table
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts, ParamSharding

Flat = Any  # an Accumulator whose total is a list


class LossProgram(NamedTuple):
    """The program of `fun` for one micro-batch.

    Attributes:
      jaxpr: of the flat arguments `(params, batch, keys, carry)` to the flat results
        `(loss, weight, carry, results)`; no weight if there is none.
      results: the types of the loss and of the other results.
      folds: the name of the fold of each of these results, see `folds`.
      weighted: True if there is a weight.
      varying: the mesh axes over which every sum differs between devices: the axes of
        the data, and of the weight.
      multiplies: True if the weight multiplies the gradients, and not the cotangent.
      arrivals: how the gradient of each leaf of the parameters arrives, see `arrival`.
      optimize: True if passes run on programs; False is the plain scan.
    """

    jaxpr: core.Jaxpr
    results: list[Any]
    folds: list[str]
    weighted: bool
    varying: Axes
    multiplies: bool
    arrivals: list[str | None]
    optimize: bool

    @property
    def sliced(self) -> list[bool]:
        """For each gradient, True if slices of the gradient can be added in place."""
        can = in_place.can_add(self.jaxpr, self.multiplies)
        return [can and arrives == "slices" for arrives in self.arrivals]

    @property
    def side_effects(self) -> known.SideEffects:
        """The effects of the program, and of its backward pass, beside the results."""
        return known.side_effects(self.jaxpr)

    @property
    def low_precision(self) -> bool:
        """True if anything is computed in less than 32 bits."""
        results = (x.aval for e in read.equations(self.jaxpr) for x in e.outvars)
        dtypes = (getattr(aval, "dtype", np.dtype(np.int32)) for aval in results)
        return any(jnp.issubdtype(d, np.floating) and d.itemsize < 4 for d in dtypes)


class Operands(NamedTuple):
    """The arrays of a loop, flat by role; the batch is split into micro-batches.

    Attributes:
      num_real: how many micro-batches count; None for all.
      rows: how many leaves of the batch are differentiated: the first ones. The last
        leaf of the batch is the index of the micro-batch then.
    """

    consts: Sequence[Any]
    params: list[jax.Array]
    batch: list[jax.Array]
    keys: list[jax.Array]
    carry: list[jax.Array]
    acc: Flat
    num_real: jax.Array | None = None
    rows: int = 0


class DeviceContext(NamedTuple):
    """The devices on which a loop runs, and how their sums come together.

    Attributes:
      names: the names of the parameters, for logs.
      axes: the data axes that are bound.
      placements: how the gradient of each leaf is merged over these axes.
      scattered: the gradients that are scattered before they are added, and how.
      logical: the number of devices that this device stands for; 0 for itself alone.
      gathered: how parameters are sharded that every micro-step gathers; or None.
      gathered_once: for each parameter, True if it is gathered before the loop, and
        may come in lower precision.
      shards: the parts of constants that are gathered where they are used, by the ids
        of the constants.
      window: the axis over which rows meet, if there is one, and its size.
      split_by_compiler: True if the compiler distributes what is computed; None if that
        is not known.
    """

    names: Sequence[str]
    axes: Axes = ()
    placements: Sequence[Placement] = ()
    scattered: Mapping[int, Placement] = types.MappingProxyType({})
    logical: int = 0
    gathered: ParamSharding | None = None
    gathered_once: Sequence[bool] = ()
    shards: Mapping[int, Any] = types.MappingProxyType({})
    window: Sequence[tuple[str, int]] = ()
    split_by_compiler: bool | None = False

    @property
    def is_local(self) -> bool:
        """True if it is known that no compiler distributes what is computed."""
        return self.split_by_compiler is False

    @property
    def sums_already(self) -> bool:
        """True if the backward pass sums over devices."""
        return any(place.summed for place in self.placements)


def run_passes(
    program: read.Program, devices: DeviceContext, multiplies: bool, optimize: bool
) -> tuple[read.Program, list[str | None]]:
    """Runs all passes on the program of a micro-batch; tells how gradients arrive."""
    number = len(devices.names)
    if not optimize:
        return program, [None] * number
    facts = Facts(
        num_params=number,
        adds_in_place=in_place.can_add(program.jaxpr, multiplies),
        param_sharding=devices.gathered,
        gathered_once=devices.gathered_once,
        shards=devices.shards,
        window=devices.window,
    )
    program = table.run("fun", program, facts)
    arrivals = [arrival(program.jaxpr, x) for x in program.jaxpr.invars[:number]]
    return table.run("sharded fun", program, facts), arrivals
