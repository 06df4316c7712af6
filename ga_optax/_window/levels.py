"""A level of a window: forward, then back.

    buffers     += level of buffers          one loop over the micro-batches
    cotangents  += level of its cotangents   one loop, on the way back

`Evaluation` computes values of the flat program; `fill` runs a level forward, and
`level_back` takes the cotangents of its buffers to earlier buffers.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .. import accumulator
from .._checks import is_on_host
from .._devices import collectives, meshes
from .._devices.record import Devices
from .._loop import micro_step
from .._loop.folds import FOLDS, Weighting
from .._loop.loop import (
    Loop,
    State,
    choose_additions,
    stacked_addition,
    with_passes,
)
from .._loop.micro_step import LossProgram, Operands
from .._passes import effects, jaxprs
from .._passes.facts import Facts
from .._passes.pullback import Known
from .._passes.shared import arrival
from .flat import Opening, flat, summed
from .kept import written_over
from .meetings import part_of
from .pieces import in_pieces
from .room import checkpoints_parted
from .schedule import Level, schedule_of, traits_of
from .stages import Stage

# == Evaluation ========================================================================

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
      whole: the program of all rows, if that may run in its place.
      how: the fields of a `Divided`, for what micro-batches share; None for no pieces.
    """

    program: LossProgram
    axis: str
    size: int
    whole: core.Jaxpr | None = None
    how: dict[str, Any] | None = None


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
      functions: one program for levels that compute the same, such as equal layers.
      types: the type of each micro-batch's value in a stack, by the type of the stack.
      known: what JAX wrote for kinds of equations on the way back.
      written: the window, if it was traced to count its bytes.
    """

    def __init__(
        self,
        loss: MeetingLoss,
        operands: Operands,
        devices: Devices,
        residual_bytes: int | None,
    ) -> None:
        self.residual_bytes = residual_bytes
        self.program, self.operands, self.devices = loss.program, operands, devices
        self.axes, self.xs = devices.bound, operands.batch
        varying = frozenset().union(*map(meshes.varying, operands.batch))
        self.varying = tuple(sorted({*self.axes, *varying}))
        self.params: list[int] = []
        self.rows: list[int] = []
        self.functions: dict[Any, micro_step.Replay] = {}
        self.types: dict[Any, Any] = {}
        self.known = Known()
        self.written: micro_step.Replay | None = None

        consts, rows = operands.consts, [x[0] for x in self.xs]
        groups = [*consts, *operands.params, *rows]
        jaxpr, more = flat(loss.program.jaxpr, groups, Opening(loss.axis, loss.size))
        variables = iter(jaxpr.invars)
        of_consts, self.of_params, self.of_rows = (
            [next(variables) for _ in group]
            for group in (consts, operands.params, rows)
        )
        folds = loss.program.folds
        if isinstance(jaxpr.outvars[0], core.Literal):
            jaxpr, folds = summed(jaxpr, folds)
        self.folds = folds
        jaxpr = checkpoints_parted(jaxpr, loss.axis, self.of_rows)
        of_consts = [*jaxpr.constvars, *of_consts]
        self.constants = dict(zip(of_consts, [*more, *consts], strict=True))
        smooth = [*self.of_params, *self.of_rows[: operands.rows]]
        traits = traits_of(jaxpr, loss.axis, smooth, self.of_rows)
        if loss.how is not None:
            before, jaxpr = jaxpr, in_pieces(jaxpr, loss.axis, traits, loss.how)
            if jaxpr is not before:
                traits = traits_of(jaxpr, loss.axis, smooth, self.of_rows)
        # Of these results one is enough: no loop computes one that is shared.
        pairs = enumerate(folds)
        last = [i for i, fold in pairs if i and fold == "last"]
        num_values = {"residual": len(self.operands.indices), "stack": loss.size}
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
            e if acts and self.schedule.acts_at(level, e) else jaxprs.silent_equation(e)
            for e in equations
        ]
        given = [values[v] for v in read]
        out = jaxprs.bind(self.schedule.jaxpr, runs, read, wanted, given)
        return [
            x if isinstance(x, jax.Array) else jnp.asarray(x, v.aval.dtype)
            for v, x in zip(wanted, out, strict=True)
        ]

    def type_of_one(self, stack: jax.Array) -> Any:
        """The type of the value of one micro-batch in a stack."""
        if (aval := jax.typeof(stack)) not in self.types:
            [self.types[aval]] = jax.make_jaxpr(lambda x: x[0])(aval).out_avals
        return self.types[aval]

    def traced(self, fun: Callable[..., Any], *args: Any) -> Any:
        """The program of `fun` for one micro-batch's values in the last argument."""
        *whole, stacks = args
        first = jax.tree.map(self.type_of_one, stacks)
        return jax.make_jaxpr(fun)(*whole, first)

    def run(self, key: Any, fun: Callable[..., Any], *args: Any) -> Any:
        """`fun(*args)`, as a function that was traced before if the key is the same.

        JAX traces, differentiates and lowers the function once. XLA inlines it.
        """
        if key not in self.functions:
            once = jax.jit(lambda *args: fun(*args))
            self.functions[key] = micro_step.Replay.of(once, *args)
        return self.functions[key](*args)

    def stack(self, like: jax.Array, late: Buffers, number: int = 0) -> jax.Array:
        """An array for a value of each micro-batch; its content does not matter.

        Without a dependence on something `late` XLA on CPUs allocates all stacks at the
        start. So this stack, one of a `number`, begins with a number of the latest.
        """
        stack = jnp.broadcast_to(like, (len(self.operands.indices), *like.shape))
        stack = collectives.vary(stack, self.varying)
        latest = next(filter(_has_numbers, reversed(late.values())), None)
        if latest is None or 0 in stack.shape or not _has_numbers(stack):
            return stack
        is_known = isinstance(latest.size, int)  # `jax.export` leaves sizes open
        one = jnp.ravel(latest)[number % latest.size if is_known else 0]
        block = jax.lax.broadcast(one.astype(stack.dtype), (1,) * stack.ndim)
        return jax.lax.dynamic_update_slice(stack, block, (0,) * stack.ndim)


def _has_numbers(x: jax.Array) -> bool:
    """True if one number of an array can be read, without communication."""
    is_here = not is_on_host(x) and not any(meshes.spec_of_type(x))
    return bool(jaxprs.is_inexact(x) and x.size and is_here)


def placed(stack: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
    """A stack with the value of one micro-batch in it, of this device or of all."""
    index = index % len(stack)
    return jax.lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), index, 0)


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype of its sums."""
    return x.astype(accumulator.sum_dtype(x.dtype))


# == Forward ===========================================================================


def fill(values: Evaluation, level: Level, buffers: Buffers) -> Buffers:
    """The buffers after a level, without residuals that no later level reads."""
    schedule, members = values.schedule, values.schedule.filled_at(level)
    if not level.in_loop:  # what all micro-batches share
        with jax.named_scope("forward"):
            new = values.evaluate(schedule.operands(level), level, buffers)
        return buffers | dict(zip(members, new, strict=True))
    new = filled(values, members, level, buffers)
    buffers = buffers | over_devices(values, new, _ACROSS)
    return buffers_without(buffers, schedule.drops.get(level.number, ()))


def fill_again(
    values: Evaluation, stage: Stage, buffers: Buffers, cotangents: Buffers
) -> Buffers:
    """The buffers with dropped residuals of the segment that ends before a level."""
    buffers = before(values, Level(stage.level.number - 1), buffers)
    new = filled(values, stage.fills, stage.level, buffers, cotangents)
    return buffers | new


def before(values: Evaluation, level: Level, buffers: Buffers) -> Buffers:
    """The buffers without residuals that a level fills: its way back reads none."""
    members = values.schedule.filled_at(level)
    return buffers_without(buffers, filter(values.is_residual, members))


def fill_last(values: Evaluation, buffers: Buffers, results: Arrays) -> Buffers:
    """The buffers after the level of the loss, with results of its loop."""
    members = values.schedule.filled_at(Level(values.schedule.end))
    new = dict(zip(members, results, strict=True))
    return buffers | over_devices(values, new, ["stack"])


def buffers_without(buffers: Buffers, numbers: Iterable[int]) -> Buffers:
    """The other buffers."""
    gone = set(numbers)
    return {j: x for j, x in buffers.items() if j not in gone}


def filled(
    values: Evaluation,
    members: Sequence[int],
    level: Level,
    buffers: Buffers,
    late: Buffers | None = None,
) -> Buffers:
    """The buffers that one loop fills from other buffers.

    New stacks wait for `late`, by default for these buffers; or they are written over
    others that are dropped now.
    """
    some = [values.schedule.buffers[j] for j in members]
    operands = [b.operand for b in some]
    folds = {i: FOLDS[b.kind] for i, b in enumerate(some) if b.is_folded}
    late = buffers if late is None else late
    start: dict[int, Any] = {
        i: folds[i].init(x.aval, values.varying)
        if i in folds
        else values.stack(collectives.zeros(x.aval), late, i)
        for i, x in enumerate(operands)
        if not jnp.issubdtype(x.aval.dtype, jax.dtypes.extended)
    }

    def micro_batch(x: Any) -> Arrays:
        return values.evaluate(operands, level, buffers, x)

    closed = values.traced(micro_batch, values.xs)
    moved: dict[int, int] = {}
    for i, old in written_over(values.schedule, members, level, buffers).items():
        start[i] = buffers[old]
        moved |= {n: i for n, x in enumerate(closed.consts) if x is buffers[old]}

    def scanned(start: Any, xs: Arrays, consts: Arrays) -> Any:
        def step(carry: Any, x: Arrays) -> tuple[Any, Any]:
            rest, numbers = iter(consts), range(len(closed.consts))
            given = [carry[moved[n]] if n in moved else next(rest) for n in numbers]
            out = jaxprs.results(jaxprs.Program(closed.jaxpr, given), x)
            new = {
                i: folds[i].step(old, out[i], Weighting())
                if i in folds
                else placed(old, out[i], x[-1])
                for i, old in carry.items()
            }
            return new, {i: x for i, x in enumerate(out) if i not in carry}

        last, keys = micro_step.scan()(step, start, xs)
        return last | {i: folds[i].finish(last[i], None) for i in folds} | keys

    with jax.named_scope("forward"):
        key = jaxprs.form(closed.jaxpr), tuple(b.kind for b in some), (*moved.items(),)
        consts = [x for n, x in enumerate(closed.consts) if n not in moved]
        new = values.run(key, scanned, start, values.xs, consts)
    return {j: new[i] for i, j in enumerate(members)}


def over_devices(values: Evaluation, new: Buffers, kinds: Iterable[str]) -> Buffers:
    """New buffers in their dtypes; some kinds are put together over all devices."""
    axes, buffers = values.axes, values.schedule.buffers
    for kind in kinds if axes else ():
        group = [j for j in new if buffers[j].kind == kind]
        whole = _ACROSS[kind]([new[j] for j in group], axes)
        new |= zip(group, whole, strict=True)
    dtypes: dict[int, Any] = {j: buffers[j].operand.aval.dtype for j in new}
    return {
        j: collectives.vary(x if x.dtype == dtypes[j] else x.astype(dtypes[j]), axes)
        for j, x in new.items()
    }


# How each kind of buffer is put together over devices.
_ACROSS: dict[str, Any] = {
    "sum": jax.lax.psum,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
    "stack": functools.partial(jax.lax.all_gather, tiled=True),
}


# == Backward ==========================================================================
# Backward: a `Loop` for the loss, and one for each level whose buffers are read.
#
# Parameters are buffers that are filled from the start, and cotangents of all buffers
# are gradients, as the gradients of parameters are. A level takes the cotangents of its
# buffers back with a loop over  Σ <cotangent, operand>,  whose gradients are added to
# the cotangents of the buffers that the loop reads.

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


def loss_back(
    values: Evaluation, buffers: Buffers, totals: Cotangents, wanted: Wanted
) -> tuple[Cotangents, Loop, State]:
    """The cotangents after the loop of the loss, the loop, and the last state."""
    schedule = values.schedule
    way = Way(Level(schedule.end), schedule.jaxpr.outvars[:1], None, wanted)
    return _looped(values, way, buffers, totals)


def level_back(
    values: Evaluation, level: Level, buffers: Buffers, cotangents: Cotangents
) -> Cotangents:
    """The cotangents after a level took those of its buffers back."""
    if not level.in_loop:
        return shared_back(values, level, buffers, cotangents)
    way, rest = _way(values, level, cotangents)
    return _looped(values, way, buffers, rest)[0] if way.cotangents else rest


def shared_back(
    values: Evaluation, level: Level, buffers: Buffers, cotangents: Cotangents
) -> Cotangents:
    """The cotangents after those of what micro-batches share went back, once."""
    schedule = values.schedule
    # A rule may be nonlinear: then it has to see the cotangent of all devices.
    every = schedule.operands(level)
    has_rule = any(map(effects.has_rule, schedule.needed(every, level)[0]))
    way, cotangents = _way(values, level, cotangents, across=has_rule)
    if not way.cotangents:
        return cotangents
    names, _ = buffers_read(values, way, buffers)

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

    totals = [cotangent_so_far(values, j, buffers, cotangents) for j in names]
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


def buffers_read(
    values: Evaluation, way: Way, buffers: Buffers
) -> tuple[list[int], list[int]]:
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


def cotangent_so_far(
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
    shared, residuals = buffers_read(values, way, buffers)
    numbers, mine = [*shared, *residuals], way.cotangents or {}
    parts = [ct for j, ct in mine.items() if values.is_residual(j)]
    batch = [buffers[j] for j in residuals], values.xs, parts
    params = [buffers[j] for j in shared]
    closed = _traced(values, way, buffers, numbers, (params, batch))
    program = program_back(values.program, closed.jaxpr, len(shared), way.wanted)

    # The totals are those of this window.
    weight, count = jnp.zeros_like(values.operands.acc.weight), jnp.ones([], jnp.int32)
    totals = [cotangent_so_far(values, j, buffers, cotangents) for j in shared]
    acc = accumulator.Accumulator(totals, weight, count)
    operands = Operands(closed.consts, params, jax.tree.leaves(batch), [], [], acc)
    names = dict(zip(values.params, values.devices.names, strict=True))
    names = [names[j] for j in shared if j in names]  # parameters come first
    adds = choose_additions(program, operands, names, {})
    types = map(values.type_of_one, batch[0])
    pairs = zip(residuals, types, strict=True)
    adds += [stacked_addition(x, j not in cotangents) for j, x in pairs]
    # Nothing adds to `mine` any more: to read a number of them costs no copy.
    late = buffers if way.cotangents is None else cotangents | mine
    given = {j: cotangents.get(j) for j in residuals}
    stacks, moved = _stacks(values, buffers, given, parts, late)

    leaves, first = operands.batch, len(operands.batch) - len(parts)
    for i in moved:  # the loop reads the part in the total
        leaves[first + i] = values.operands.indices
    loop = Loop(
        program,
        values.devices,
        len(values.operands.indices),
        adds,
        rounds_once=program.low_precision,
        rows=len(residuals),
        index=len(residuals) + len(values.xs) - 1,
        begins=True,
        known=values.known,
        moved=tuple((first + i, len(totals) + n) for i, n in moved.items()),
    )
    operands = operands._replace(acc=acc._replace(total=[*totals, *stacks]))
    # Equal loops are traced once.
    key = jaxprs.form(program.jaxpr), tuple(adds), loop.moved, tuple(program.folds)
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

    return values.traced(micro_batch, *args)


def _paired(cotangent: jax.Array, x: jax.Array) -> jax.Array:
    """Σ cotangent · x, whose gradient is the cotangent."""
    product = jax.lax.mul(cotangent, accumulator.cast(x, cotangent.dtype))
    real = product.real if jnp.iscomplexobj(product) else product
    return jnp.sum(real).astype(float)


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
            like = wide(collectives.zeros(values.type_of_one(buffers[j])))
            type_ = jax.typeof(values.stack(like, {}))
            unused = (i for i in range(len(parts)) if i not in moved)
            part = next((i for i in unused if jax.typeof(parts[i]) == type_), None)
            if part is not None:
                moved[part] = n
            stack = values.stack(like, late, n) if part is None else parts[part]
        stacks.append(stack)
    return stacks, moved


def program_back(
    loss: LossProgram, jaxpr: core.Jaxpr, num_params: int, wanted: Wanted
) -> LossProgram:
    """The program of a loop of the window: the loss, and results with other folds."""
    return loss._replace(
        jaxpr=jaxprs.without_values(jaxpr),
        results=[x.aval for x in jaxpr.outvars],
        folds=["sum", *(fold for _, fold in wanted)],
        arrivals=[arrival(jaxpr, x) for x in jaxpr.invars[:num_params]],
    )
