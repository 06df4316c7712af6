"""The values of a flat program: in one micro-batch, or the same in all of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax import accumulator
from ga_optax._inside.axis import schedule as scheduling
from ga_optax._inside.axis import waiting
from ga_optax._inside.axis.read import flat
from ga_optax._inside.axis.schedule import Buffer, Schedule
from ga_optax._inside.call import Call
from ga_optax._inside.loop import Operands
from ga_optax._inside.program import Program
from ga_optax._passes.ir import bind

Arrays = list[jax.Array]
Buffers = dict[int, jax.Array]


class Values:
    """What a window has computed so far, and how to compute more.

    Attributes:
      axes: the data axes that are bound.
      size: the number of micro-batches, on all devices.
      xs: what differs between this device's: the index, the batch and the keys.
      params: the leaves to differentiate with respect to.
      of_params: their variables.
      schedule: what to compute when.
      buffers: the buffers that are filled, by number.
    """

    def __init__(self, call: Call, program: Program, operands: Operands) -> None:
        k, self.axes = call.options.num_microbatches, call.axes
        [(axis, self.size)] = call.axis_env
        index = jnp.arange(k, dtype=jnp.int32)
        fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        keys = [fold_in(key, index) for key in operands.keys]
        if self.axes:
            index = index + k * jax.lax.axis_index(self.axes).astype(index.dtype)
        self.xs = [index, *operands.batch, *keys]
        self.params = operands.params
        self.buffers: Buffers = {}

        own, carry = [x[0] for x in self.xs[1:]], operands.carry
        groups = operands.consts, self.params, own, carry
        values = [x for group in groups for x in group]
        jaxpr, consts = flat(program.jaxpr, values, axis, self.size)
        variables = iter(jaxpr.invars)
        of_consts, self.of_params, self.of_own, of_carry = (
            [next(variables) for _ in group] for group in groups
        )
        fixed = [*jaxpr.constvars, *of_consts, *of_carry]
        known = [*consts, *operands.consts, *carry]
        self.fixed = dict(zip(fixed, known, strict=True))
        differ = self.of_params, self.of_own
        facts = scheduling.facts_of(jaxpr, axis, *differ)
        if not program.weighted:
            new = waiting.with_parts(jaxpr, axis, self.size, facts)
            if new is not jaxpr:
                jaxpr, facts = new, scheduling.facts_of(new, axis, *differ)
        whole = _need_no_loop(program, jaxpr)
        self.schedule: Schedule = scheduling.make(jaxpr, axis, facts, whole)

    def needed(
        self, wanted: Sequence[Any], level: float, acts: bool = False
    ) -> tuple[list[core.JaxprEqn], list[Any]]:
        """The equations that compute `wanted` with the buffers below a level known.

        If the loop `acts`, it also runs those that print or call back: each once.
        """
        schedule = self.schedule
        # After the loops, those that read what only they have filled.
        lowest = schedule.end if level > schedule.end else 0

        def runs(equation: core.JaxprEqn) -> bool:
            names = [getattr(effect, "name", "") for effect in equation.effects]
            others = any(name != schedule.axis for name in names)
            its = max((schedule.fact(x).level for x in equation.invars), default=0)
            return acts and others and lowest <= its < level

        return schedule.needed(wanted, level, runs)

    def evaluate(
        self,
        wanted: Sequence[Any],
        level: float,
        x: Any = None,
        known: tuple[Arrays, Buffers] | None = None,
        acts: bool = False,
    ) -> Arrays:
        """The values of variables at a level.

        Args:
          wanted: the variables.
          level: the buffers below it are read.
          x: a slice of `xs`, which is the micro-batch; None if it does not matter.
          known: parameters and buffers in place of those here.
          acts: whether to run what prints, too.
        """
        params, buffers = known or (self.params, self.buffers)
        index, *own = self.xs if x is None else x
        values = dict.fromkeys(self.schedule.index, index) | self.fixed
        values |= zip(self.of_params, params, strict=True)
        values |= zip(self.of_own, own, strict=True)
        equations, read = self.needed(wanted, level, acts)
        for v in read:
            if v not in values:
                place, of = self.schedule.views[v]
                values[v] = of(buffers[place], index)
        given = [values[v] for v in read]
        out = bind(self.schedule.jaxpr, equations, read, wanted, given)
        return [
            x if isinstance(x, jax.Array) else jnp.asarray(x, v.aval.dtype)
            for v, x in zip(wanted, out, strict=True)
        ]

    def zeros(self, buffer: Buffer) -> jax.Array:
        """A buffer before it is filled."""
        aval: Any = buffer.operand.aval
        more = {"stack": (self.size,), "own": (len(self.xs[0]),)}.get(buffer.kind, ())
        return jnp.zeros((*more, *aval.shape), aval.dtype)


def _need_no_loop(program: Program, jaxpr: core.Jaxpr) -> list[int]:
    """Which results of the aux are what all micro-batches have, if they share it."""
    first = len(jaxpr.outvars) - program.aux.num_leaves
    found = []
    for i, mode in enumerate(program.modes[1:], first):
        of_numbers = mode == "mean" and is_inexact(jaxpr.outvars[i].aval)
        if of_numbers or mode in ("last", "max", "min"):
            found.append(i)  # The mean of integers has another type.
    return found


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype of its sums."""
    return x.astype(accumulator.accumulator_dtype(x, np.dtype(np.float32)))


def start_of_sum(x: jax.Array) -> jax.Array:
    """The number to which all of a sum is added: -0, which changes no bit."""
    return -wide(jnp.zeros_like(x))


def is_inexact(x: Any) -> bool:
    """Whether it has gradients and means."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
