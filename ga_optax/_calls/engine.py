"""The stations of a call: from checked arguments to the value and the gradients.

    Call         the arguments by role, and the devices        `Call.of` checks them
    Traced       the program of `fun` at all rows              `trace`
    MicroBatch   the program of one of k micro-batches         `partition`
    Rewritten    the program after the passes, the arrays      `rewrite`
    Scheduled    the levels that compute the values            `schedule`
    Outcome      results, gradients                            `run`

`value_and_grad` passes all stations. So does `microbatch`, which takes a function for
the aux of a loss, and `batch_dependencies`, which sees the plan and computes nothing.
`accumulate` traces one micro-batch by itself, see `micro_batch`. If a station fails,
which is a fault of this library or of a new JAX, the plan is `AllRows`.

Under `jax.jit` and other transformations the stations from `rewrite` on are one
equation of JAX, see `equation`, so that the derivatives are those of `fun`.

On a mesh with a data axis the stations from `trace` on run once more in a region of the
mesh. The region is made after `partition`, which knows the results that have rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._calls import advice, rows
from ga_optax._calls.call import Call
from ga_optax._calls.devices import DoesNotFitError
from ga_optax._calls.region import (
    WHOLE,
    ManualAxisError,
    check_not_reduced,
    explained,
    gradients,
    over_mesh,
)
from ga_optax._calls.second_derivatives import NoDerivativeError
from ga_optax._calls.undivided import (
    AllRows,
    Pair,
    check_options,
    does_not_divide,
    in_one,
    undivided,
    why_undivided,
)
from ga_optax._devices import collectives, meshes
from ga_optax._loop import run as loop
from ga_optax._loop.loss import DeviceContext, LossProgram, Operands, run_passes
from ga_optax._loop.run import Outcome
from ga_optax._partition import (
    Partitioned,
    Rows,
    RowsMeet,
    unsaid,
)
from ga_optax._passes import constraints, places, read, references, rowwise
from ga_optax._passes import rewrite as rewriting
from ga_optax._text import warn
from ga_optax._window import run as window
from ga_optax._window.evaluation import Evaluation, MeetingLoss
from ga_optax._window.report import report


class Traced(NamedTuple):
    """The program of `fun` at all rows.

    Attributes:
      call: the call.
      closed: the program, of the leaves of the parameters and of the batch.
      out: the tree of the results: the loss and the aux.
    """

    call: Call
    closed: Any
    out: Any


class MicroBatch(NamedTuple):
    """The program of a micro-batch.

    Attributes:
      call: the call.
      closed: the program of `fun` at all rows.
      out: the tree of the results.
      part: the program of a micro-batch, and the layouts of its results.
      strided: True if a micro-batch holds every k-th row, False if it holds neighbours;
        None if the program is the same in both cases.
      last: the program of the last micro-batch, if that has fewer rows.
    """

    call: Call
    closed: Any
    out: Any
    part: Partitioned
    strided: bool | None
    last: Partitioned | None = None


class Rewritten(NamedTuple):
    """The program of a micro-batch after the passes, and the arrays of the loop.

    Attributes:
      micro_batch: the program before the passes.
      program: the program after the passes.
      operands: the arrays of this device.
      context: the devices.
    """

    micro_batch: MicroBatch
    program: LossProgram
    operands: Operands
    context: DeviceContext


class Scheduled(NamedTuple):
    """The plan of a call.

    Attributes:
      rewritten: the program and the arrays.
      plan: the levels; None if rows do not meet, and the call is one loop.
    """

    rewritten: Rewritten
    plan: Evaluation | None


def value_and_grad(
    call: Call, over: Callable[[MicroBatch], Pair] | None = None
) -> Pair:
    """`((loss, aux), gradients)` of a call whose function returns `(loss, aux)`.

    With `call.sums` gradients are a pair: gradients of the parameters, and gradients of
    leaves of the batch. `over` runs the micro-batch, by default `over_micro_batches`.
    """
    if call.is_undivided:
        return undivided(call, AllRows("there is one micro-batch"))
    traced = trace(call.on_device())
    try:
        return (over or over_micro_batches)(partition(traced))
    except (DoesNotFitError, NoDerivativeError, Warning):
        raise
    except Exception as error:  # Any: a future JAX may fail in ways unknown today.
        if places.is_of_user(error) or traced.call.devices.bound:
            raise
        plan = AllRows(why_undivided(error))
    return in_one(traced.call, plan)


def over_micro_batches(micro_batch: MicroBatch) -> Pair:
    """`((loss, aux), gradients)` by loops over the micro-batches."""
    micro_batch = _over_replicas(micro_batch)
    call, closed, out, part, strided, _ = micro_batch
    split: Any = meshes.split_spec(call.devices.axes)
    specs: Any = [split if isinstance(x, Rows) else WHOLE for x in part.layouts]
    outcome = on_devices(
        micro_batch,
        lambda program: run(told(schedule(rewrite(program)))),
        Outcome(specs, [], gradients(call), split),
    )
    for text in unsaid(part.failures):
        warn(text)
    leaves = rows.returned(call, part, closed.jaxpr, outcome.results, strided)
    value = jax.tree.structure(out).unflatten(leaves)
    if not call.sums:
        return value, outcome.acc
    return value, (outcome.acc, rows.gradients(call, outcome.rows, strided))


def _over_replicas(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch of one replica of the shards, if parameters have replicas.

    It holds other rows than that of all devices. So nothing may depend on which these
    are: no draw for each row, no result and no gradient with rows.
    """
    call, part = micro_batch.call, micro_batch.part
    of_rows = call.rows or any(isinstance(x, Rows) for x in part.layouts)
    by_place = read.num_readers(part.jaxpr, part.jaxpr.invars[-1])
    if of_rows or by_place or not call.devices.replicas:
        return micro_batch
    devices = call.devices.over_replicas()
    return micro_batch._replace(call=call._replace(devices=devices))


# -- The stations ----------------------------------------------------------------------


def trace(call: Call) -> Traced:
    """Traces `fun` once, with the rows of all devices."""
    devices, leaves = call.devices, call.leaves("argnums")
    numbers = [*leaves, *call.leaves("batch_argnums")]

    def fun(params: Sequence[Any], batch: Sequence[Any]) -> Any:
        new = zip(numbers, [*params, *batch], strict=True)
        one = call.with_leaves(dict(new))
        return call.options.fun(*one.args, **one.kwargs)

    env = meshes.of_all_rows(() if devices.by_compiler else devices.axes)
    fun = places.in_name_of(call.options.fun, fun)
    make = jax.make_jaxpr(fun, axis_env=[*rowwise.READ, *env], return_shape=True)
    of_params = list(leaves.values())
    if devices.maps:
        of_params = list(map(meshes.type_without_mesh, of_params))
    types = of_params, rows.types_of_all(call)
    try:
        with explained(call):
            closed, out = make(*types)
    except ManualAxisError as error:
        closed, out = _without_mesh(make, types, error)
    check_not_reduced(call, closed.out_avals[0])
    references.check_own(closed.jaxpr)
    return Traced(call, closed, out)


def _without_mesh(make: Callable[..., Any], types: Any, error: Exception) -> Any:
    """`make(*types)` without a mesh; `error` is that of the mesh.

    In a region an array that `fun` closes over has the type that it has outside. JAX
    takes it to the types of the region, but not in an index, such as `table[ids]`.
    """
    try:
        with meshes.without_mesh():
            closed, out = make(*jax.tree.map(meshes.type_without_mesh, types))
    except Exception:  # Any: of a fun that names the mesh.
        raise error from None
    if any(meshes.explicit_names(jax.typeof(x).sharding.mesh) for x in closed.consts):
        raise error
    return closed, out


def partition(traced: Traced, like: Partitioned | None = None) -> MicroBatch:
    """Partitions the program over micro-batches, with results in the layouts of `like`.

    Raises if an option, or the number of rows, does not fit a loss whose rows meet; the
    error names the line.
    """
    call, closed, out = traced
    jaxpr = constraints.without_axes(closed.jaxpr, call.devices.bound)
    # A loss adds up before it is rounded, and has the same gradient there.
    jaxpr = rewriting.unrounded(jaxpr, [0])
    # Where rows must not meet, they may in what nobody reads.
    jaxpr, last = read.live(jaxpr) if call.rest else jaxpr, None
    try:
        part, strided = rows.split(call, jaxpr, like)
        if call.rest:
            last = rows.of_neighbours(call, jaxpr, rows.parts_of(call, True), part)
            if not _are_alike(part, last):
                raise RowsMeet
    except RowsMeet:
        raise does_not_divide(call, jaxpr) from None
    micro_batch = MicroBatch(call, closed, out, part, strided, last)
    if call.sees is None:  # a report shows the lines, whatever the options are
        check_options(micro_batch.call, micro_batch.part)
    return micro_batch


def rewrite(micro_batch: MicroBatch) -> Rewritten:
    """Runs the passes on the program of a micro-batch, and splits the batch."""
    call, part, consts = micro_batch.call, micro_batch.part, micro_batch.closed.consts
    context = call.where()._replace(window=[(rows.AXIS, call.size)])
    jaxpr = rewriting.with_constants(part.jaxpr, len(consts))
    before = read.Program(jaxpr, [*part.consts, *consts])
    optimize = call.options.optimize
    (jaxpr, consts), arrivals = run_passes(before, context, False, optimize)
    program = LossProgram(
        jaxpr=rewriting.without_values(jaxpr),
        results=[x.aval for x in jaxpr.outvars],
        folds=[
            "stack" if isinstance(x, Rows) else rows.FOLD_OF_LAYOUT[x]
            for x in part.layouts
        ],
        weighted=False,
        varying=tuple(sorted(call.devices.bound)),
        multiplies=False,
        arrivals=arrivals,
        optimize=optimize,
    )
    params = call.params_of(jaxpr)
    batch = [*call.split(micro_batch.strided), _indices(call)]
    acc = accumulator.begun(call.params, call.options.accumulator_dtype)
    acc = call.devices.flat(acc._replace(total=call.devices.shard(acc.total, -0.0)))
    operands = Operands(consts, params, batch, [], [], acc, rows=call.rows)
    return Rewritten(micro_batch, program, operands, context)


def schedule(rewritten: Rewritten) -> Scheduled:
    """Plans the levels of a loss whose rows meet, or do work that all rows share.

    Any other loss is one loop, and so is one whose last micro-batch is smaller.
    """
    (call, *_, part, _, last), program, operands, context = rewritten
    may_share = call.options.optimize and last is None and not call.devices.bound
    of_rows = program.jaxpr.invars[-len(operands.batch) :]
    if not part.meets and not (may_share and read.shares_much(program.jaxpr, of_rows)):
        return Scheduled(rewritten, None)
    loss, room = MeetingLoss(program, rows.AXIS, call.size), call.options.residual_bytes
    plan = window.prepared(loss, operands, context, room)
    fits = part.meets or window.is_small(plan)
    return Scheduled(rewritten, plan if fits else None)


def told(scheduled: Scheduled) -> Scheduled:
    """The plan, told before it runs: to a report, or in the log and in warnings.

    Raises if an option does not fit, now that the report has the plan.
    """
    micro_batch, plan = scheduled.rewritten.micro_batch, scheduled.plan
    call = micro_batch.call
    if call.sees is not None:
        call.sees(scheduled)
        check_options(micro_batch.call, micro_batch.part)
    elif plan is not None and micro_batch.part.meets:
        report(plan.schedule, call.options.residual_bytes is None)
    return scheduled


def run(scheduled: Scheduled) -> Outcome:
    """Runs the loops. The accumulator of the outcome is the tree of gradients.

    Results with rows, and gradients of leaves of the batch, are stacked over the
    micro-batches of this device.
    """
    (micro_batch, program, operands, context), plan = scheduled
    call = micro_batch.call
    if plan is None:
        out = loop.run(program, operands, context, begins=True, merges=True)
        if (last := micro_batch.last) is not None:
            out = _with_last(micro_batch, last, out)
    else:
        out = window.run(plan)
        if call.sees is None:
            advice.say(call, micro_batch.closed.jaxpr, micro_batch.part)
    leaves, structure = jax.tree.flatten(call.params)
    grads = structure.unflatten(
        g if call.sums else g.astype(jnp.result_type(x))
        for g, x in zip(out.acc.total, leaves, strict=True)
    )
    # Without the specs of the parameters XLA may sum up whole gradients.
    grads = call.devices.shard(grads) if call.devices.compiled[1] else grads
    return out._replace(acc=grads)


def _with_last(micro_batch: MicroBatch, last: Partitioned, some: Outcome) -> Outcome:
    """The outcome of the other micro-batches, and of the last one, which is smaller."""
    call, part = micro_batch.call, micro_batch.part
    one = micro_batch._replace(call=call.of_last(), part=last, last=None)
    _, program, operands, context = rewrite(one)
    operands = operands._replace(acc=some.acc)
    out = loop.run(program, operands, context, begins=True, merges=True)
    return rows.merged(call, part.layouts, some, out)


def _are_alike(some: Partitioned, last: Partitioned) -> bool:
    """True if two programs are the same but for the number of rows."""
    names = [[e.primitive.name for e in read.equations(x.jaxpr)] for x in (some, last)]
    return some.layouts == last.layouts and names[0] == names[1]


def _indices(call: Call) -> jax.Array:
    """The number of each micro-batch of this device, among those of all devices."""
    index, axes = jnp.arange(call.num_parts, dtype=jnp.int32), call.devices.bound
    if axes:
        index = index + call.num_parts * jax.lax.axis_index(axes).astype(jnp.int32)
    varying = frozenset().union(*map(meshes.varying, call.batch))
    return collectives.vary(index, tuple(sorted(varying)))


def on_devices(
    micro_batch: MicroBatch, stations: Callable[[MicroBatch], Any], results: Any
) -> Any:
    """`stations(micro_batch)` on each device; `results` are the specs of the results.

    At top level with a data axis the stations run in a region of the mesh. Types in the
    region differ, so `fun` is traced once more, with results in the same layouts.
    """
    call = micro_batch.call
    if not call.devices.maps:
        return stations(micro_batch)

    def on_device(inner: Call) -> Any:
        return stations(partition(trace(inner.on_device()), micro_batch.part))

    consts = micro_batch.closed.consts
    return over_mesh(
        call, on_device, results=results, check_vma=False, closed_over=consts
    )
