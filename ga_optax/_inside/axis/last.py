"""A last level that the loss reads only as a whole is filled with its gradients.

A loss that is a `psum` itself, a metric, a mean over tokens: if the cotangents of what
the last level adds up are known before it is added up, one loop computes the sums and
their gradients: one pass forward and one backward.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._devices import collectives
from ga_optax._inside.axis.backward import Backward, Cotangents, Task
from ga_optax._inside.axis.values import Values, wide
from ga_optax._inside.program import Program
from ga_optax._passes.ir import following, results, variables


def can_merge(values: Values, program: Program) -> bool:
    """Whether `fill` can fill the last level."""
    schedule, weighted = values.schedule, program.weighted
    loss, *rest = schedule.jaxpr.outvars
    weights, results = rest[:weighted], rest[weighted:]
    kinds = {schedule.buffers[j].kind for j in schedule.at(schedule.last)}
    own = [x for x in (loss, *results) if schedule.fact(x).own]
    return (
        schedule.last > schedule.first
        and kinds == {"sum"}
        and not any(map(schedule.is_last, (*own, *weights)))
        and not (schedule.is_last(loss) and (weighted or foreseen(values) is None))
    )


def fill(
    back: Backward, wanted: dict[int, Any]
) -> tuple[jax.Array, dict[int, jax.Array]]:
    """Fills the last level in the loop that takes its gradients.

    Returns:
      The loss and those of the results that do not need the last level.
    """
    values, schedule = back.values, back.values.schedule
    roots = schedule.jaxpr.outvars[:1]
    members = schedule.at(schedule.last)
    operands = [(schedule.buffers[j].operand, "sum") for j in members]
    early = {i: pair for i, pair in wanted.items() if not schedule.is_last(pair[0])}
    cotangents = None
    if schedule.is_last(roots[0]):
        of_loss = 1 if back.as_mean else values.size
        cotangents = foreseen(values, of_loss) or {}
        roots = [schedule.buffers[j].operand for j in cotangents]
    every = [*early.values(), *operands]
    outcome = back.run(Task(schedule.last, roots, every, cotangents))
    here = back.call._replace(where=())
    value, results, _ = back.finished(outcome, here, [])
    sums = zip(members, operands, results[len(early) :], strict=True)
    values.buffers |= {
        j: collectives.vary(total.astype(x.aval.dtype), values.axes)
        for j, (x, _), total in sums
    }
    return value, dict(zip(early, results, strict=False))


def foreseen(values: Values, of_loss: int = 1) -> Cotangents | None:
    """The last level's cotangents; None if they depend on what it computes."""
    schedule = values.schedule
    zeros = {j: values.zeros(buffer) for j, buffer in enumerate(schedule.buffers)}
    last = {j: zeros[j] for j in schedule.at(schedule.last)}
    smooth = {j: x for j, x in last.items() if schedule.buffers[j].has_cotangent}

    def pulled(last: Any) -> Any:
        def loss(smooth: Any) -> jax.Array:
            known = values.params, zeros | values.buffers | last | smooth
            root = schedule.jaxpr.outvars[:1]
            return values.evaluate(root, schedule.last + 1, known=known)[0]

        value, pullback = jax.vjp(loss, {j: last[j] for j in smooth})
        [cotangents] = pullback(jnp.full_like(value, of_loss))
        return cotangents

    closed: Any = jax.make_jaxpr(pulled)(last)
    depending = following(closed.jaxpr, closed.jaxpr.invars)
    if not depending.isdisjoint(variables(closed.jaxpr.outvars)):
        return None
    cotangents = results(closed, jax.tree.leaves(last))
    return {j: wide(x) for j, x in zip(sorted(smooth), cotangents, strict=True)}
