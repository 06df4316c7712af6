"""The values of a flat program: of one micro-batch, or shared by all of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._checks import on_host
from ga_optax._devices import meshes
from ga_optax._devices.collectives import vary
from ga_optax._loop.loss import DeviceContext, LossProgram, Operands
from ga_optax._partition import is_inexact
from ga_optax._passes import interpret, rewrite
from ga_optax._window.flat import Opening, flat
from ga_optax._window.schedule import (
    Level,
    schedule_of,
    traits_of,
)
from ga_optax._window.shared import parted

Arrays = list[jax.Array]
Buffers = dict[int, Any]  # by number; the latest come last


class Part(NamedTuple):
    """One micro-batch's part of a buffer, in place of the buffer."""

    x: jax.Array


class MeetingLoss(NamedTuple):
    """A loss whose rows meet.

    Attributes:
      program: the loss of a micro-batch, with collectives. The index comes last.
      axis: the axis that the collectives name.
      size: how many micro-batches there are, on all devices.
    """

    program: LossProgram
    axis: str
    size: int


class Evaluation:
    """A window: the program, the arrays, and how values are computed.

    Attributes:
      program: the loss of a micro-batch.
      operands: the arrays; the last leaf of the batch is the index. The accumulator is
        empty.
      devices: the devices.
      residual_bytes: the bytes that residuals may take between levels.
      axes: the data axes that are bound.
      varying: the axes over which values of micro-batches vary.
      xs: the micro-batches of this device: the leaves of the batch, and last the index.
      of_params: the variables of the leaves to differentiate with respect to.
      of_rows: the variables of `xs`.
      constants: the values of the other arguments.
      schedule: the order of the computation.
      params: the buffers of the parameters, which are filled from the start.
      rows: the buffers of the leaves of the batch that are differentiated.
      functions: one function for levels that compute the same, such as equal layers.
    """

    def __init__(
        self,
        loss: MeetingLoss,
        operands: Operands,
        devices: DeviceContext,
        residual_bytes: int | None,
    ) -> None:
        self.residual_bytes = residual_bytes
        self.program, self.operands, self.devices = loss.program, operands, devices
        self.axes, self.xs = devices.axes, operands.batch
        varying = frozenset().union(*map(meshes.varying, operands.batch))
        self.varying = tuple(sorted({*self.axes, *varying}))
        self.params: list[int] = []
        self.rows: list[int] = []
        self.functions: dict[Any, Callable[..., Any]] = {}

        consts, rows = operands.consts, [x[0] for x in self.xs]
        groups = [*consts, *operands.params, *rows]
        jaxpr, more = flat(loss.program.jaxpr, groups, Opening(loss.axis, loss.size))
        variables = iter(jaxpr.invars)
        of_consts, self.of_params, self.of_rows = (
            [next(variables) for _ in group]
            for group in (consts, operands.params, rows)
        )
        jaxpr = parted(jaxpr, loss.axis, self.of_rows)
        of_consts = [*jaxpr.constvars, *of_consts]
        self.constants = dict(zip(of_consts, [*more, *consts], strict=True))
        smooth = [*self.of_params, *self.of_rows[: operands.rows]]
        traits = traits_of(jaxpr, loss.axis, smooth, self.of_rows)
        # Of these results one is enough: no loop computes one that is shared.
        pairs = enumerate(loss.program.folds)
        last = [i for i, fold in pairs if i and fold == "last"]
        num_values = {"residual": len(self.xs[-1]), "stack": loss.size}
        self.schedule = schedule_of(jaxpr, loss.axis, traits, last, num_values)

    def arguments(self) -> Buffers:
        """Adds the buffers that are filled from the start, and returns them."""
        schedule, rows = self.schedule, self.operands.rows
        first = len(schedule.buffers)
        for x in self.of_params:
            schedule.given(x, "shared")
        for x in self.of_rows[:rows]:
            schedule.given(x, "residual")
        middle, end = first + len(self.of_params), len(schedule.buffers)
        self.params, self.rows = [*range(first, middle)], [*range(middle, end)]
        return dict(enumerate([*self.operands.params, *self.xs[:rows]], first))

    def is_residual(self, j: int) -> bool:
        """True if a buffer holds a value of each of this device's micro-batches."""
        return self.schedule.buffers[j].kind == "residual"

    def evaluate(
        self,
        wanted: Sequence[Any],
        level: Level,
        buffers: Buffers,
        x: Any = None,
        acts: bool = False,
    ) -> Arrays:
        """The values of variables at a level.

        Args:
          wanted: the variables.
          level: the time: all buffers of earlier levels can be read.
          buffers: the buffers that are filled; or a `Part` of a buffer.
          x: the micro-batch, a slice of `xs`; None if no rows are read.
          acts: True if equations that print or call back run, too.
        """
        rows = self.xs if x is None else x
        values = self.constants | dict(zip(self.of_rows, rows, strict=True))
        equations, read = self.schedule.needed(wanted, level, acts, buffers)
        for v in read:
            view = self.schedule.views.get(v)
            stored = buffers.get(view.buffer) if view else None
            if isinstance(stored, Part):
                values[v] = stored.x
            elif view and stored is not None and v not in values:
                values[v] = view.of(stored, rows[-1])
        runs = [
            e
            if acts and self.schedule.acts_at(level, e)
            else rewrite.silent_equation(e)
            for e in equations
        ]
        given = [values[v] for v in read]
        out = interpret.bind(self.schedule.jaxpr, runs, read, wanted, given)
        return [
            x if isinstance(x, jax.Array) else jnp.asarray(x, v.aval.dtype)
            for v, x in zip(wanted, out, strict=True)
        ]

    def run(self, key: Any, fun: Callable[..., Any], *args: Any) -> Any:
        """`fun(*args)`, as a function that was traced before if the key is the same.

        JAX traces, differentiates and lowers the function once. XLA inlines it.
        """
        if key not in self.functions:
            self.functions[key] = jax.jit(lambda *args: fun(*args))
        return self.functions[key](*args)

    def stack(self, like: jax.Array, late: Buffers, number: int = 0) -> jax.Array:
        """An array for a value of each micro-batch; its content does not matter.

        Without a dependence on something `late` XLA on CPUs allocates all stacks at the
        start. So this stack, one of a `number`, begins with a number of the latest.
        """
        stack = jnp.broadcast_to(like, (len(self.xs[-1]), *like.shape))
        stack = vary(stack, self.varying)
        latest = next(filter(_has_numbers, reversed(late.values())), None)
        if latest is None or 0 in stack.shape or not _has_numbers(stack):
            return stack
        is_known = isinstance(latest.size, int)  # `jax.export` leaves sizes open
        one = jnp.ravel(latest)[number % latest.size if is_known else 0]
        block = jax.lax.broadcast(one.astype(stack.dtype), (1,) * stack.ndim)
        return jax.lax.dynamic_update_slice(stack, block, (0,) * stack.ndim)


def _has_numbers(x: jax.Array) -> bool:
    """True if one number of an array can be read, without communication."""
    is_here = not on_host(x) and not any(meshes.spec_of_type(x))
    return bool(is_inexact(x) and x.size and is_here)


def placed(stack: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
    """A stack with the value of one micro-batch in it, of this device or of all."""
    index = index % len(stack)
    return jax.lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), index, 0)


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype of its sums."""
    return x.astype(accumulator.accumulator_dtype(x, np.dtype(np.float32)))
