"""Backward: a `Loop` for the loss, and one for each level whose buffers are read.

Parameters are buffers that are filled from the start, and cotangents of all buffers are
gradients, as the gradients of parameters are. A level takes the cotangents of its
buffers back with a loop over  Σ <cotangent, operand>,  whose gradients are added to the
cotangents of the buffers that the loop reads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._devices import collectives
from ga_optax._devices.collectives import zeros
from ga_optax._loop import additions, in_place
from ga_optax._loop.loop import Loop, State, with_passes
from ga_optax._loop.loss import LossProgram, Operands
from ga_optax._passes import known, rewrite
from ga_optax._passes import read as reading
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts
from ga_optax._window.evaluation import Arrays, Buffers, Evaluation, Part, wide
from ga_optax._window.meetings import part_of
from ga_optax._window.schedule import Level
from ga_optax.accumulator import Accumulator

Wanted = Sequence[tuple[Any, str]]  # variables, and their folds
Cotangents = dict[int, jax.Array]  # by number of the buffer; the latest come last


class Way(NamedTuple):
    """The way back through a level.

    Attributes:
      level: the level.
      roots: the values whose cotangents are known: operands of buffers, or the loss.
      cotangents: the cotangents of these buffers; None for the loss.
      wanted: other results of the loop of the loss.
    """

    level: Level
    roots: Sequence[Any]
    cotangents: Cotangents | None = None
    wanted: Wanted = ()


def of_loss(
    values: Evaluation, buffers: Buffers, totals: Cotangents, wanted: Wanted
) -> tuple[Cotangents, Loop, State]:
    """The cotangents after the loop of the loss, the loop, and the last state."""
    schedule = values.schedule
    way = Way(Level(schedule.end), schedule.jaxpr.outvars[:1], None, wanted)
    return _looped(values, way, buffers, totals)


def of_level(
    values: Evaluation, number: int, buffers: Buffers, cotangents: Cotangents
) -> Cotangents:
    """The cotangents after a level took those of its buffers back."""
    way, rest = _way(values, Level(number), cotangents)
    return _looped(values, way, buffers, rest)[0] if way.cotangents else rest


def of_shared(
    values: Evaluation, number: int, buffers: Buffers, cotangents: Cotangents
) -> Cotangents:
    """The cotangents after those of what micro-batches share went back, once."""
    schedule, level = values.schedule, Level(number, in_loop=False)
    # A rule may be nonlinear: then it has to see the cotangent of all devices.
    every = schedule.operands(level)
    has_rule = any(map(known.has_rule, schedule.needed(every, level)[0]))
    way, cotangents = _way(values, level, cotangents, across=has_rule)
    if not way.cotangents:
        return cotangents
    names, _ = read(values, way, buffers)

    def evaluate(diff: Arrays) -> Arrays:
        given = buffers | dict(zip(names, diff, strict=True))
        return values.evaluate(way.roots, level, given)

    def term(g: jax.Array, old: jax.Array) -> jax.Array:
        g = collectives.on_device(g).astype(old.dtype)
        if values.axes and has_rule:  # the gradients are all-reduced later
            is_first = jax.lax.axis_index(values.axes) == 0
            g = jnp.where(is_first, g, jnp.zeros_like(g))
        return g

    def added(operands: tuple[Arrays, Arrays, Arrays]) -> Arrays:
        totals, diff, cotangents = operands
        with jax.named_scope("compute"):
            out, pullback = jax.vjp(evaluate, diff)
            pairs = zip(out, cotangents, strict=True)
            [grads] = pullback([ct.astype(x.dtype) for x, ct in pairs])
        pairs = zip(totals, grads, strict=True)
        return [old + term(g, old) for old, g in pairs]

    totals = [so_far(values, j, buffers, cotangents) for j in names]
    operands: Any = [buffers[j] for j in names], list(way.cotangents.values())
    if any(x > level and not x.in_loop for x in schedule.by_level):
        # XLA would reuse the forward pass of before, and keep all that it computed
        # beside the values of later levels. At the last level that costs nothing.
        operands = jax.lax.optimization_barrier(operands)
    operands = totals, *operands
    if values.program.optimize and values.program.low_precision:
        facts = Facts(sliced=[False] * len(totals), rounds_once=True)
        totals = with_passes(added, operands, facts)
    else:
        totals = added(operands)
    return _updated(cotangents, names, totals)


def _way(
    values: Evaluation, level: Level, cotangents: Cotangents, across: bool = True
) -> tuple[Way, Cotangents]:
    """The cotangents of a level, summed `across` devices, and the other cotangents."""
    filled = values.schedule.filled_at(level)
    mine = {j: cotangents[j] for j in filled if j in cotangents}
    shared = [j for j in mine if not values.is_residual(j)]
    if values.axes and shared and across:
        with jax.named_scope("merge"):
            whole = jax.lax.psum([mine[j] for j in shared], values.axes)
        mine |= zip(shared, whole, strict=True)
    roots = [values.schedule.buffers[j].operand for j in mine]
    rest = {j: x for j, x in cotangents.items() if j not in mine}
    return Way(level, roots, mine), rest


def _updated(
    cotangents: Cotangents, numbers: Sequence[int], new: Sequence[jax.Array]
) -> Cotangents:
    rest = {j: x for j, x in cotangents.items() if j not in numbers}
    return rest | dict(zip(numbers, new, strict=True))


def read(values: Evaluation, way: Way, buffers: Buffers) -> tuple[list[int], list[int]]:
    """The buffers with cotangents that a level reads, by number.

    Returns: the buffers that all micro-batches share, parameters first; residuals.
    """
    schedule, last = values.schedule, Level(values.schedule.end)
    variables = schedule.needed(way.roots, way.level, known=buffers)[1]
    views = filter(None, map(schedule.views.get, variables))
    pairs = ((j, schedule.buffers[j]) for j in {view.buffer for view in views})
    smooth = [j for j, b in pairs if b.has_cotangent and b.level < last]
    smooth.sort(key=lambda j: (j not in values.params, j))
    residuals = list(filter(values.is_residual, smooth))
    return [j for j in smooth if j not in residuals], residuals


def so_far(
    values: Evaluation, j: int, buffers: Buffers, cotangents: Cotangents
) -> jax.Array:
    """The sum of the cotangents of a buffer so far."""
    if j in cotangents:
        return cotangents[j]
    # Sums start at -0, which changes no bit.
    return collectives.vary(-wide(jnp.zeros_like(buffers[j])), values.axes)


# -- Loops -----------------------------------------------------------------------------


def _looped(
    values: Evaluation, way: Way, buffers: Buffers, cotangents: Cotangents
) -> tuple[Cotangents, Loop, State]:
    """Adds to the cotangents of the buffers that the loop of a level reads."""
    shared, residuals = read(values, way, buffers)
    numbers, mine = [*shared, *residuals], way.cotangents or {}
    parts = [ct for j, ct in mine.items() if values.is_residual(j)]
    batch = [buffers[j] for j in residuals], values.xs, parts
    params = [buffers[j] for j in shared]
    closed = _traced(values, way, buffers, numbers, (params, batch))
    program = program_of(values.program, closed.jaxpr, len(shared), way.wanted)

    # A count of 1: the accumulator is not empty, and its totals are added to.
    weight, count = jnp.zeros_like(values.operands.acc.weight), jnp.ones([], jnp.int32)
    totals = [so_far(values, j, buffers, cotangents) for j in shared]
    acc = Accumulator(totals, weight, count)
    operands = Operands(closed.consts, params, jax.tree.leaves(batch), [], [], acc)
    adds = _chosen_additions(values, program, operands, shared)
    pairs = zip(residuals, batch[0], strict=True)
    adds += [additions.stacked(x, j not in cotangents) for j, x in pairs]
    # Nothing adds to `mine` any more: to read a number of them costs no copy.
    late = buffers if way.cotangents is None else cotangents | mine
    given = {j: cotangents.get(j) for j in residuals}
    stacks, moved = _stacks(values, buffers, given, parts, late)

    leaves, first = operands.batch, len(operands.batch) - len(parts)
    for i in moved:
        leaves[first + i] = values.xs[-1]  # the loop reads the part in the total
    loop = Loop(
        program,
        values.devices,
        len(values.xs[-1]),
        adds,
        rounds_once=program.low_precision,
        rows=len(residuals),
        index=len(residuals) + len(values.xs) - 1,
        moved=tuple((first + i, len(totals) + n) for i, n in moved.items()),
    )
    operands = operands._replace(acc=acc._replace(total=[*totals, *stacks]))
    # Equal loops are traced once.
    key = reading.form(program.jaxpr), tuple(adds), loop.moved, tuple(program.folds)
    state = values.run(key, loop.__call__, operands)
    return _updated(cotangents, numbers, state.acc.total), loop, state


def _traced(
    values: Evaluation, way: Way, buffers: Buffers, numbers: list[int], args: Any
) -> Any:
    """The program of a micro-batch: the loss and other results; or a sum of pairs."""
    is_loss, cotangents = way.cotangents is None, way.cotangents or {}
    every = [*way.roots, *(x for x, _ in way.wanted)]

    def micro_batch(diff: Arrays, x: Any) -> Arrays:
        of_residuals, xs, parts = x
        new: Any = dict(zip(numbers, [*diff, *map(Part, of_residuals)], strict=True))
        out = values.evaluate(every, way.level, buffers | new, xs, acts=is_loss)
        if is_loss:
            return out
        of_stacks = iter(parts)
        given = [
            next(of_stacks)
            if values.is_residual(j)
            else ct
            if values.schedule.buffers[j].is_folded
            else part_of(ct, xs[-1])
            for j, ct in cotangents.items()
        ]
        return [sum(map(_paired, given, out), jnp.zeros([], float))]

    params, batch = args
    first = jax.tree.map(lambda x: x[0], batch)
    return jax.make_jaxpr(micro_batch)(params, first)


def _paired(cotangent: jax.Array, x: jax.Array) -> jax.Array:
    """Σ cotangent · x, whose gradient is the cotangent."""
    product = cotangent * x.astype(cotangent.dtype)
    return jnp.sum(product.real).astype(float)


def _chosen_additions(
    values: Evaluation, program: LossProgram, operands: Operands, shared: list[int]
) -> list[additions.Addition]:
    """One addition for the gradient of each shared buffer."""
    off = "" if program.optimize else "optimize=False"
    whys = in_place.reasons(off, program, operands, {})
    names = dict(zip(values.params, values.devices.names, strict=True))
    names = [names[j] for j in shared if j in names]  # parameters come first
    in_place.report(names, whys[: len(names)])
    return additions.choose(program, operands.acc.total, whys, {})


def _stacks(
    values: Evaluation,
    buffers: Buffers,
    given: dict[int, jax.Array | None],
    parts: Arrays,
    late: Buffers,
) -> tuple[Arrays, dict[int, int]]:
    """The arrays for the cotangents of residuals.

    New cotangents are written over `parts` of the same type, which the loop reads.

    Returns: the arrays; for each part that is written over, by number, the number of
    its array.
    """
    stacks: Arrays = []
    moved: dict[int, int] = {}
    for n, (j, stack) in enumerate(given.items()):
        if stack is None:
            like = wide(zeros(jax.typeof(buffers[j][0])))
            type_ = jax.typeof(values.stack(like, {}))
            unused = (i for i in range(len(parts)) if i not in moved)
            part = next((i for i in unused if jax.typeof(parts[i]) == type_), None)
            if part is not None:
                moved[part] = n
            stack = values.stack(like, late, n) if part is None else parts[part]
        stacks.append(stack)
    return stacks, moved


def program_of(
    loss: LossProgram, jaxpr: core.Jaxpr, num_params: int, wanted: Wanted
) -> LossProgram:
    """The program of a loop of the window: the loss, and results with other folds."""
    return loss._replace(
        jaxpr=rewrite.without_values(jaxpr),
        results=[x.aval for x in jaxpr.outvars],
        folds=["sum", *(fold for _, fold in wanted)],
        arrivals=[arrival(jaxpr, x) for x in jaxpr.invars[:num_params]],
    )
