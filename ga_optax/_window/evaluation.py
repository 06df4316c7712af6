"""The values of a flat program: of one micro-batch, or shared by all of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._devices import meshes
from ga_optax._devices.collectives import vary
from ga_optax._devices.meshes import Axes
from ga_optax._loop.loss import LossProgram, Operands
from ga_optax._partition import is_inexact
from ga_optax._passes import interpret, rewrite
from ga_optax._window.flat import Opening, flat
from ga_optax._window.meetings import part_of, whole
from ga_optax._window.schedule import (
    Buffer,
    Level,
    Schedule,
    View,
    schedule_of,
    traits_of,
)
from ga_optax._window.shared import parted

Arrays = list[jax.Array]
Buffers = dict[int, jax.Array]


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
    """The values that a window has computed, and how to compute more.

    Attributes:
      axes: the data axes that are bound.
      varying: the axes over which values of micro-batches vary.
      xs: the micro-batches of this device: the leaves of the batch, and last the index.
      of_params: the variables of the leaves to differentiate with respect to.
      of_rows: the variables of `xs`.
      params: the buffers of the parameters, which are filled from the start.
      constants: the values of the other arguments.
      schedule: the order of the computation.
      buffers: the values of the buffers that are filled, by number.
      free: arrays that are no longer read, over which new stacks are written.
      num_new: how many stacks were allocated beside these.
      latest: an array that was computed last.
      filled_before: the buffers that were filled before.
      functions: one function for levels that compute the same, such as equal layers.
    """

    def __init__(self, loss: MeetingLoss, operands: Operands, axes: Axes) -> None:
        self.axes = axes
        varying = frozenset().union(*map(meshes.varying, operands.batch))
        self.varying = tuple(sorted({*axes, *varying}))
        self.xs = operands.batch
        self.params: list[int] = []
        self.buffers: Buffers = {}
        self.free: Arrays = []
        self.num_new = 0
        self.latest: jax.Array | None = None
        self.filled_before: set[int] = set()
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

    def begin(self, schedule: Schedule, params: Arrays) -> None:
        """Sets the schedule, and fills the buffers of parameters."""
        self.schedule = schedule
        pairs = zip(self.of_params, params, strict=True)
        self.params = [self.given(x, "shared", True, value) for x, value in pairs]

    def given(
        self, operand: Any, kind: str, has_cotangent: bool, value: jax.Array
    ) -> int:
        """Adds a buffer that is filled from the start; returns its number."""
        schedule, j = self.schedule, len(self.schedule.buffers)
        schedule.buffers.append(Buffer(operand, kind, Level(0), has_cotangent))
        schedule.views[operand] = View(j, part_of if kind == "residual" else whole)
        self.buffers[j] = value
        return j

    def evaluate(
        self,
        wanted: Sequence[Any],
        level: Level,
        x: Any = None,
        buffers: Buffers | None = None,
        acts: bool = False,
    ) -> Arrays:
        """The values of variables at a level.

        Args:
          wanted: the variables.
          level: the time: all buffers of earlier levels can be read.
          x: the micro-batch, a slice of `xs`; None if no rows are read.
          buffers: buffers, or a `Part` of a buffer, in place of `self.buffers`.
          acts: True if equations that print or call back run, too.
        """
        buffers = self.buffers if buffers is None else buffers
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

    # -- Stacks of values of micro-batches ---------------------------------------------

    def stack(self, like: jax.Array) -> jax.Array:
        """An array for a value of each micro-batch; its content does not matter."""
        type_ = self.type_of_stack(like)
        for i, x in enumerate(self.free):
            if jax.typeof(x) == type_:
                return self.free.pop(i)
        self.num_new += 1
        return self.after_latest(self._stack(like))

    def type_of_stack(self, like: jax.Array) -> Any:
        """The type of a stack of such values."""
        return jax.typeof(self._stack(like))

    def _stack(self, like: jax.Array) -> jax.Array:
        stack = jnp.broadcast_to(like, (len(self.xs[-1]), *like.shape))
        return vary(stack, self.varying)

    def after_latest(self, stack: jax.Array) -> jax.Array:
        """Makes a stack depend on the latest result.

        Without this dependence XLA on CPUs allocates all stacks at the start. The stack
        begins with one number of the result.
        """
        latest, is_empty = self.latest, 0 in stack.shape
        if latest is None or is_empty or not is_inexact(stack) or _is_sharded(stack):
            return stack
        is_known = isinstance(latest.size, int)  # `jax.export` leaves sizes open
        number = jnp.ravel(latest)[self.num_new % latest.size if is_known else 0]
        block = jax.lax.broadcast(number.astype(stack.dtype), (1,) * stack.ndim)
        return jax.lax.dynamic_update_slice(stack, block, (0,) * stack.ndim)

    def note_latest(self, new: Iterable[jax.Array]) -> None:
        """Remembers one of the arrays that were computed last."""
        for x in new:
            if is_inexact(x) and x.size and not _is_sharded(x):
                self.latest = x

    def drop(self, numbers: Iterable[int]) -> None:
        """Drops buffers of micro-batches. New stacks are written over them."""
        self.free += [self.buffers.pop(j) for j in numbers if j in self.buffers]


def _is_sharded(x: jax.Array) -> bool:
    """True if the type of an array names a mesh axis."""
    return any(meshes.spec_of_type(x))


def placed(stack: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
    """A stack with the value of one micro-batch in it, of this device or of all."""
    index = index % len(stack)
    return jax.lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), index, 0)


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype of its sums."""
    return x.astype(accumulator.accumulator_dtype(x, np.dtype(np.float32)))
