"""The values of a flat program: in one micro-batch, or the same in all of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import accumulator
from ga_optax._devices import meshes
from ga_optax._devices.collectives import vary
from ga_optax._devices.meshes import Axes
from ga_optax._loop.step import Operands, Step
from ga_optax._partition import is_inexact
from ga_optax._passes import ir
from ga_optax._window import schedule as scheduling
from ga_optax._window.read import Opening, flat
from ga_optax._window.schedule import Buffer, Level, Schedule, View
from ga_optax._window.shared import parted

Arrays = list[jax.Array]
Buffers = dict[int, jax.Array]


class Part(NamedTuple):
    """One micro-batch's part of a buffer, in place of the buffer."""

    x: jax.Array


class Loss(NamedTuple):
    """A loss whose rows meet.

    Attributes:
      step: what a micro-batch computes, with collectives. The index comes last.
      axis: the axis that these name.
      size: how many micro-batches there are, on all devices.
    """

    step: Step
    axis: str
    size: int


class Values:
    """What a window has computed so far, and how to compute more.

    Attributes:
      axes: the data axes that are bound.
      varying: the axes over which what micro-batches hold varies.
      xs: what differs between this device's: the batch, and last the index.
      of_params: the variables of the leaves to differentiate with respect to.
      params: their buffers, which are there from the start.
      schedule: what to compute when.
      buffers: the buffers that are filled, by number.
      rooms: the arrays that can be written over, for what comes next.
      late: something that was computed last.
      made: how many arrays were made beside those.
      seen: the buffers that were filled before.
      functions: those of the levels, by what they do: layers that are alike share one.
    """

    late: jax.Array | None = None
    made: int = 0

    def __init__(self, loss: Loss, operands: Operands, axes: Axes) -> None:
        self.axes = axes
        varying = frozenset().union(*map(meshes.varying, operands.batch))
        self.varying = tuple(sorted({*axes, *varying}))
        self.xs = operands.batch
        self.params: list[int] = []
        self.buffers: Buffers = {}
        self.rooms: Arrays = []
        self.seen: set[int] = set()
        self.functions: dict[Any, Callable[..., Any]] = {}

        own = [x[0] for x in self.xs]
        values = [*operands.consts, *operands.params, *own]
        opening = Opening(loss.axis, loss.size)
        jaxpr, consts = flat(loss.step.jaxpr, values, opening)
        variables = iter(jaxpr.invars)
        of_consts, self.of_params, self.of_own = (
            [next(variables) for _ in group]
            for group in (operands.consts, operands.params, own)
        )
        jaxpr = parted(jaxpr, loss.axis, self.of_own)
        fixed = [*jaxpr.constvars, *of_consts]
        self.fixed = dict(zip(fixed, [*consts, *operands.consts], strict=True))
        smooth = [*self.of_params, *self.of_own[: operands.rows]]
        facts = scheduling.facts_of(jaxpr, loss.axis, smooth, self.of_own)
        # These need no loop if all micro-batches share them.
        whole = [i for i, way in enumerate(loss.step.ways) if i and way == "last"]
        times = {"own": len(self.xs[-1]), "stack": loss.size}
        self.schedule = scheduling.make(jaxpr, loss.axis, facts, whole, times)

    def begin(self, schedule: Schedule, params: Arrays) -> None:
        """Goes by a schedule from here on."""
        self.schedule = schedule
        pairs = zip(self.of_params, params, strict=True)
        self.params = [self.given(Buffer(x, "once", -1, True), p) for x, p in pairs]

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
          level: the buffers below it are read.
          x: a slice of `xs`, which is the micro-batch; None if it does not matter.
          buffers: buffers, or parts of those, in place of those here.
          acts: whether to run what prints, too.
        """
        buffers = self.buffers if buffers is None else buffers
        own = self.xs if x is None else x
        index, values = own[-1], dict(self.fixed)
        values |= zip(self.of_own, own, strict=True)
        equations, read = self.schedule.needed(wanted, level, acts, buffers)
        for v in read:
            view = self.schedule.views.get(v)
            held = buffers.get(view.buffer) if view else None
            if isinstance(held, Part):
                values[v] = held.x
            elif view and held is not None and v not in values:
                values[v] = view.of(held, index)
        runs = [
            e if acts and self.schedule.acts_at(level, e) else ir.silent_equation(e)
            for e in equations
        ]
        given = [values[v] for v in read]
        out = ir.bind(self.schedule.jaxpr, runs, read, wanted, given)
        return [
            x if isinstance(x, jax.Array) else jnp.asarray(x, v.aval.dtype)
            for v, x in zip(wanted, out, strict=True)
        ]

    def given(self, buffer: Buffer, value: jax.Array) -> int:
        """The number of a buffer that is there from the start."""
        schedule = self.schedule
        j = len(schedule.buffers)
        schedule.buffers.append(buffer)
        of = scheduling.own_part if buffer.kind == "own" else scheduling.whole
        schedule.views[buffer.operand] = View(j, of)
        self.buffers[j] = value
        return j

    def room(self, like: jax.Array) -> jax.Array:
        """A stack for a value of each micro-batch, whose content does not matter.

        It is one that is no longer read, or else a new one.
        """
        due = self.type_of_stack(like)
        for i, x in enumerate(self.rooms):
            if jax.typeof(x) == due:
                return self.rooms.pop(i)
        self.made += 1
        return self.after_all(self._stack(like))

    def type_of_stack(self, like: jax.Array) -> Any:
        """The type of a stack of such values."""
        return jax.typeof(self._stack(like))

    def _stack(self, like: jax.Array) -> jax.Array:
        stack = jnp.broadcast_to(like, (len(self.xs[-1]), *like.shape))
        return vary(stack, self.varying)

    def after_all(self, stack: jax.Array) -> jax.Array:
        """A stack that is not there before what was computed last.

        Otherwise XLA may write to it, and to what stands beside it, while much else is
        still read: it begins with whatever needs nothing that is late.
        """
        late, is_empty = self.late, 0 in stack.shape
        if late is None or is_empty or not is_inexact(stack) or _is_sharded(stack):
            return stack
        is_open = not isinstance(late.size, int)  # as `jax.export` leaves it
        place = 0 if is_open else self.made % late.size
        start = jnp.ravel(late)[place].astype(stack.dtype)
        block = jax.lax.broadcast(start, (1,) * stack.ndim)
        return jax.lax.dynamic_update_slice(stack, block, (0,) * stack.ndim)

    def run(self, key: Any, fun: Callable[..., Any], *args: Any) -> Any:
        """`fun(*args)`, as a function that was traced before if the key is the same.

        JAX traces, differentiates and lowers it once. XLA inlines it.
        """
        if key not in self.functions:
            self.functions[key] = jax.jit(lambda *args: fun(*args))
        return self.functions[key](*args)

    def came(self, new: Iterable[jax.Array]) -> None:
        """Takes note of what was computed last."""
        found = [x for x in new if is_inexact(x) and x.size and not _is_sharded(x)]
        self.late = found[-1] if found else self.late

    def drop(self, numbers: Iterable[int]) -> None:
        """Leaves buffers of micro-batches to what comes next."""
        for j in list(numbers):
            if j in self.buffers:
                self.rooms.append(self.buffers.pop(j))


def _is_sharded(x: jax.Array) -> bool:
    """Whether a mesh shards it by its type."""
    return any(meshes.spec_of_type(x))


def placed(stack: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
    """A stack with the value of one micro-batch in it, of this device or of all."""
    index = index % len(stack)
    return jax.lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), index, 0)


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype of its sums."""
    return x.astype(accumulator.accumulator_dtype(x, np.dtype(np.float32)))
