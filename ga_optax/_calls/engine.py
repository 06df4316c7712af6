"""The stations of a call: from checked arguments to the value and the gradients.

    Call -> Traced -> MicroBatch -> Rewritten -> Scheduled -> Outcome

Each station is a function. Below them a call as one equation of JAX, so that its
derivatives are those of `fun`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from .. import _checks, accumulator
from .._devices import collectives, meshes
from .._devices.record import Devices
from .._loop import loop
from .._loop.loop import Outcome
from .._loop.micro_step import LossProgram, Operands, run_passes
from .._partition import closures
from .._partition.held import Rows, RowsMeet
from .._partition.partitioned import Partitioned
from .._passes import effects, equation, jaxprs, places, rowwise
from .._passes.equation import Divided, Gradient, paired
from .._window.levels import Evaluation, MeetingLoss
from .._window.report import log_report
from .._window.run import is_small, plan_window, run_window
from . import regions, rows, undivided
from .call import NO_ARRAY, Call, call_of
from .regions import REPLICATED, ManualAxisError
from .undivided import AllRows, Pair

# == Stations ==========================================================================
# The stations of a call: from checked arguments to the value and the gradients.
#
#     Call         the arguments by role, and the devices        `Call.of` checks them
#     Traced       the program of `fun` at all rows              `trace`
#     MicroBatch   the program of one of k micro-batches         `partition`
#     Rewritten    the program after the passes, the arrays      `rewrite`
#     Scheduled    the levels that compute the values            `schedule`
#     Outcome      results, gradients                            `run`
#
# `value_and_grad` passes all stations. So does `microbatch`, which takes a function for
# the aux of a loss, and `batch_dependencies`, which sees the plan and computes nothing.
# `accumulate` traces one micro-batch by itself, see `separate`. The plan is `AllRows`
# if the undivided batch takes less memory, or if a station fails, also without passes:
# a fault of this library or of a new JAX, which is caught in `undivided.tried` alone.
#
# Under `jax.jit` and other transformations the stations from `rewrite` on are one
# equation of JAX, see `as_one_equation`, so that the derivatives are those of `fun`.
#
# On a mesh with a data axis the stations from `trace` on run once more in a region of
# the mesh. The region is made after `partition`, which knows the results that have
# rows.


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
      membership: the rows that it holds.
      last: the program of the last micro-batch, if that has fewer rows.
    """

    call: Call
    closed: Any
    out: Any
    part: Partitioned
    membership: collectives.Membership
    last: Partitioned | None = None


class Rewritten(NamedTuple):
    """The program of a micro-batch after the passes, and the arrays of the loop.

    Attributes:
      micro_batch: the program before the passes.
      program: the program after the passes.
      operands: the arrays of this device.
      devices: the devices.
    """

    micro_batch: MicroBatch
    program: LossProgram
    operands: Operands
    devices: Devices


class Scheduled(NamedTuple):
    """The plan of a call.

    Attributes:
      rewritten: the program and the arrays.
      plan: the levels; None if the call is one loop.
    """

    rewritten: Rewritten
    plan: Evaluation | None


def value_and_grad(
    call: Call, over: Callable[[MicroBatch], Pair] | None = None
) -> Pair:
    """`((loss, aux), gradients)` of a call whose function returns `(loss, aux)`.

    Gradients of leaves of the batch come last, see `call.rows`. `over` runs the
    micro-batch, by default `over_micro_batches`.
    """
    if call.is_undivided:
        return undivided.undivided(call, AllRows("there is one micro-batch"))
    over = over or over_micro_batches
    try:
        traced = trace(call.on_device())
    except closures.EscapedError as error:
        return _gradient_first(call, error)
    micro_batch, error = undivided.tried(partition, traced)
    if error is None:

        def divided(its: Call) -> Pair:
            one = its is call
            return over(micro_batch if one else partition(trace(its.on_device())))

        out, error = undivided.with_or_without(divided, call)
        if error is None:
            return out
    if traced.call.devices.bound:
        raise error
    plan = AllRows(undivided.why_undivided(error, micro_batch))
    return undivided.in_one(traced.call, plan)


def _gradient_first(call: Call, error: Exception) -> Pair:
    """The same of a function with a rule that runs only while JAX traces the function.

    So JAX differentiates it first, and its gradient is a function like any other.
    """
    plan = AllRows(str(error))
    if call.devices.bound:
        raise error
    if call.devices.axes or call.sums or not call.roles["argnums"]:
        return undivided.in_one(call, plan)

    def of_all(*args: Any, **kwargs: Any) -> Pair:
        whole = call._replace(args=args, kwargs=kwargs, sees=None)
        return undivided.undivided(whole, plan)

    options = call.options._replace(fun=of_all, argnums=())
    roles = call.roles | {"argnums": ()}
    return of_call(call._replace(options=options, roles=roles), None)


def over_micro_batches(micro_batch: MicroBatch) -> Pair:
    """`((loss, aux), gradients)` by loops over the micro-batches."""
    micro_batch = _over_replicas(micro_batch)
    call, closed, out, part, membership, _ = micro_batch
    split: Any = meshes.split_spec(call.devices.axes)
    specs: Any = [split if isinstance(x, Rows) else REPLICATED for x in part.layouts]
    outcome = on_devices(
        micro_batch,
        lambda program: run(told(schedule(rewrite(counted(program))))),
        Outcome(specs, [], regions.specs_of_gradients(call), split),
    )
    leaves = rows.returned(call, part, closed.jaxpr, outcome.results, membership)
    value = jax.tree.structure(out).unflatten(leaves)
    if not call.rows:
        return value, outcome.acc
    of_rows = rows.gradients_of_rows(call, outcome.rows, membership)
    return value, (*outcome.acc, *of_rows)


def _over_replicas(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch of one replica of the shards, if parameters have replicas.

    It holds other rows than that of all devices. So nothing may depend on which these
    are: no draw for each row, no result and no gradient with rows.
    """
    call, part = micro_batch.call, micro_batch.part
    of_rows = call.rows or any(isinstance(x, Rows) for x in part.layouts)
    place = part.jaxpr.invars[-1]
    if not call.devices.replicas or of_rows or jaxprs.uses(part.jaxpr, place):
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

    axes = () if devices.by_compiler else devices.axes
    make = functools.partial(_jaxpr_of, call, fun, axes, len(leaves))
    of_params = list(leaves.values())
    if devices.maps:
        of_params = list(map(meshes.type_without_mesh, of_params))
    types = of_params, rows.types_of_all(call)
    try:
        with regions.errors_explained(call):
            closed, out = make(*types)
    except ManualAxisError as error:
        closed, out = _without_mesh(make, types, error)
    regions.check_no_region(call, closed.jaxpr)
    regions.check_not_reduced(call, closed.out_avals[0])
    effects.check_own_references(closed.jaxpr)
    return Traced(call, closed, out)


def _jaxpr_of(
    call: Call, fun: Callable[..., Any], axes: Any, smooth: int | None, *types: Any
) -> tuple[Any, Any]:
    """The program of a function; rules in it take what they close over, see `custom`.

    `smooth` is the number of arguments that have a derivative, or None if all have.
    """
    env = [*rowwise.READ, *meshes.of_all_rows(axes)]
    fun = places.in_name_of(call.options.fun, fun)
    closed, out = jax.make_jaxpr(fun, axis_env=env, return_shape=True)(*types)
    if not effects.has_rules(closed.jaxpr):
        return closed, out
    try:
        return closures.without_closures(closed, env, smooth), out
    except closures.EscapedError as error:
        error.traced = closed, out
        raise


def _without_mesh(make: Callable[..., Any], types: Any, error: Exception) -> Any:
    """`make(*types)` without a mesh; `error` is that of the mesh.

    In a region an array that `fun` closes over has the type that it has outside. JAX
    takes it to the types of the region, but not in an index, such as `table[ids]`. Nor
    does it take the mesh of a `jax.shard_map` there.
    """
    with meshes.without_mesh():
        without = jax.tree.map(meshes.type_without_mesh, types)
        made, failed = places.looked_at(make, *without)
    if failed is not None:
        raise error from None
    meshes_of = [jax.typeof(x).sharding.mesh for x in made[0].consts]
    if any(map(meshes.explicit_names, meshes_of)):
        raise error
    return made


def partition(traced: Traced, like: Partitioned | None = None) -> MicroBatch:
    """Partitions the program over micro-batches, with results in the layouts of `like`.

    Raises if an option, or the number of rows, does not fit a loss whose rows meet; the
    error names the line.
    """
    call, closed, out = traced
    effects.check_divisible(jaxprs.equations(closed.jaxpr))
    jaxpr = regions.constraints_without(closed.jaxpr, call.devices.bound)
    # A loss adds up before it is rounded, and has the same gradient there.
    jaxpr = rows.unrounded(jaxpr, [0])
    # Where rows must not meet, they may in what nobody reads.
    jaxpr, last = jaxprs.live(jaxpr) if call.rest else jaxpr, None
    try:
        part, membership = rows.of_micro_batch(call, jaxpr, like)
        if call.rest:
            last = rows.of_neighbours(call, jaxpr, rows.parts_of(call, True), part)
            if not rows.are_alike(part, last):
                raise RowsMeet
    except RowsMeet as error:
        raise undivided.does_not_divide(call, error.source) from None
    regions.check_regions(call, part.jaxpr)
    micro_batch = MicroBatch(call, closed, out, part, membership, last)
    if call.sees is None:  # a report shows the lines, whatever the options are
        undivided.check_options(micro_batch.call, micro_batch.part)
    return micro_batch


def counted(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch, with its counts as constants if the last one is smaller."""
    call, closed, _, part, membership, last = micro_batch
    if last is None:
        return micro_batch
    pairs = [
        (part, [*its.split(membership), _indices(its)])
        for its, part in ((call, part), (call.of_last(), last))
    ]
    fixed = [*closed.consts, *jax.tree.leaves(call.params)]
    part, last = rows.without_counts(pairs, fixed)
    return micro_batch._replace(part=part, last=last)


def rewrite(micro_batch: MicroBatch) -> Rewritten:
    """Runs the passes on the program of a micro-batch, and splits the batch."""
    call, part, consts = micro_batch.call, micro_batch.part, micro_batch.closed.consts
    devices = call.devices_of_loop()._replace(window=[(rows.AXIS, call.num_of_all)])
    jaxpr = jaxprs.with_constants(part.jaxpr, len(consts))
    before = jaxprs.Program(jaxpr, [*part.consts, *consts])
    optimize = call.options.optimize
    (jaxpr, consts), arrivals = run_passes(before, devices, False, optimize)
    program = LossProgram(
        jaxpr=jaxprs.without_values(jaxpr),
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
        grouped=False,
    )
    params = call.params_of(jaxpr)
    batch = [*call.split(micro_batch.membership), _indices(call)]
    acc = accumulator.begun(call.params, call.options.accumulator_dtype)
    acc = call.devices.flat(acc._replace(total=call.devices.shard(acc.total, -0.0)))
    operands = Operands(consts, params, batch, [], [], acc, rows=call.rows)
    return Rewritten(micro_batch, program, operands, devices)


def schedule(rewritten: Rewritten) -> Scheduled:
    """Plans the levels of a loss whose rows meet, or do work that all rows share.

    Any other loss is one loop, and so is one whose last micro-batch is smaller. Raises
    if the undivided batch takes less memory, and can run: the rows of all devices can,
    unless a `shard_map` of the user's has some of them.
    """
    (call, closed, _, part, _, last), program, operands, devices = rewritten
    may = call.options.optimize and last is None and not call.devices.bound
    of_rows = program.jaxpr.invars[-len(operands.batch) :]
    if not part.meets and not (may and rows.shares_much(program.jaxpr, of_rows)):
        return Scheduled(rewritten, None)
    of_some = call.devices.bound and not call.devices.mapped
    whole = None if of_some or not part.meets else closed.jaxpr
    one = call._replace(devices=Devices())  # which computes what all share
    how = _parameters(one) if call.options.optimize else None
    loss = MeetingLoss(program, rows.AXIS, call.num_of_all, whole, how)
    plan = plan_window(loss, operands, devices, call.options.residual_bytes)
    return Scheduled(rewritten, plan if part.meets or is_small(plan) else None)


def told(scheduled: Scheduled) -> Scheduled:
    """The plan, told before it runs: to a report, or in the log and in warnings.

    Raises if an option does not fit, now that the report has the plan.
    """
    micro_batch, plan = scheduled.rewritten.micro_batch, scheduled.plan
    call = micro_batch.call
    if call.sees is not None:
        call.sees(scheduled)
        undivided.check_options(micro_batch.call, micro_batch.part)
    elif plan is not None and micro_batch.part.meets:
        log_report(plan.schedule, call.options.residual_bytes is None)
    return scheduled


def run(scheduled: Scheduled) -> Outcome:
    """Runs the loops. The accumulator of the outcome is the tree of gradients.

    Results with rows, and gradients of leaves of the batch, are stacked over the
    micro-batches of this device.
    """
    (micro_batch, program, operands, devices), plan = scheduled
    call = micro_batch.call
    with meshes.scope_of(call.options.data_axis):
        if plan is not None:
            out = run_window(plan)
        else:
            out = loop.run_loop(program, operands, devices, begins=True, merges=True)
            if (last := micro_batch.last) is not None:
                out = _with_last(micro_batch, last, out)
    if plan is not None and call.sees is None:
        undivided.warn_of_whole(call, micro_batch.closed.jaxpr, micro_batch.part)
    leaves, structure = jax.tree.flatten(call.params)
    grads = structure.unflatten(
        g if call.sums else accumulator.cast(g, jax.typeof(x).dtype)
        for g, x in zip(out.acc.total, leaves, strict=True)
    )
    # Without the specs of the parameters XLA may sum up whole gradients.
    grads = call.devices.shard(grads) if call.devices.compiled[1] else grads
    return out._replace(acc=grads)


def _with_last(micro_batch: MicroBatch, last: Partitioned, some: Outcome) -> Outcome:
    """The outcome of the other micro-batches, and of the last one, which is smaller."""
    call, part = micro_batch.call, micro_batch.part
    one = micro_batch._replace(call=call.of_last(), part=last, last=None)
    _, program, operands, devices = rewrite(one)
    operands = operands._replace(acc=some.acc)
    out = loop.run_loop(program, operands, devices, begins=True, merges=True)
    return rows.merged(call, part.layouts, some, out)


def _indices(call: Call) -> jax.Array:
    """The number of each micro-batch of this device, among those of all devices."""
    index, axes = jnp.arange(call.num_of_device, dtype=jnp.int32), call.devices.bound
    if axes:
        index = index + call.num_of_device * jax.lax.axis_index(axes).astype(jnp.int32)
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
    return regions.over_mesh(
        call, on_device, results=results, check_vma=False, closed_over=consts
    )


# == A call as one equation ============================================================
# Calls as one equation, and what runs it over micro-batches.
#
#   of_call          `microbatch`: the derivatives of the equation are functions over
#                    micro-batches themselves
#   as_one_equation  `value_and_grad`: the program is written when `fun` is traced, and
#                    the derivatives are those of `jax.value_and_grad(fun)`. The program
#                    has the first derivative of each custom rule, and not the rules,
#                    see `undivided`
#
# A function runs like a loss of which only the aux counts. A gradient is that of Σ
# cotangent · result, or of one scalar result, also with respect to leaves with rows.


def of_call(call: Call, remat: bool | None, size: int | None = None) -> Any:
    """Returns the result of `fun` for all rows, by an equation that has derivatives.

    `size` is the number of rows of a micro-batch, if the user gave it.
    """
    options, fun = call.options, call.options.fun
    leaves = call.leaves("batch_argnums") | call.others

    def of_args(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        _checks.check_arrays("what fun returns", out, NO_ARRAY)
        return out

    def flat(*xs: Any) -> Any:
        new = call.with_leaves(dict(zip(leaves, xs, strict=True)))
        return of_args(*new.args, **new.kwargs)

    if call.is_undivided:
        return of_args(*call.args, **call.kwargs)
    if call.sees is not None or not _is_one(call):
        call = call._replace(
            options=options._replace(
                fun=undivided.with_loss(of_args, call.devices.bound)
            )
        )
        return value_and_grad(call, _in_loop)[0][1]
    xs = regions.on_mesh(call, list(leaves.values()))
    axes = (*call.split_axes, *[None] * len(call.others))
    parameters = _parameters(call, remat) | {"size": size}
    try:
        closed, out = _traced(flat, xs, call)
        effects.check_divisible(jaxprs.equations(closed.jaxpr))
        divided = Divided.of_program(closed, axes, **parameters)
    except (closures.EscapedError, effects.IndivisibleError) as error:
        if isinstance(error, effects.IndivisibleError) or any(
            isinstance(x, jax.core.Tracer) for x in error.traced[0].consts
        ):
            call = call._replace(
                options=options._replace(fun=undivided.with_loss(of_args))
            )
            return undivided.in_one(call, AllRows(str(error)))[0][1]
        closed, out = error.traced
        first, like = len(closed.consts), parameters["runs"].args[0]
        divided = dataclasses.replace(
            Divided.of_program(closed, axes, **parameters),
            runs=functools.partial(_as_function, like),
            flat=lambda *xs: jax.tree.leaves(flat(*xs[first:])),
        )
    # Constants that `fun` closes over are operands, for they may be differentiated.
    results = divided.bind([*closed.consts, *xs])
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _in_loop(micro_batch: MicroBatch) -> Any:
    """The results over micro-batches, without second derivatives if `fun` has rules."""
    call, closed = micro_batch.call, micro_batch.closed
    if (rule := undivided.custom_rule_in(closed.jaxpr)) is None:
        return over_micro_batches(micro_batch)
    error = undivided.derivative_refused(call, rule, "A gradient of microbatch")
    once = functools.partial(undivided.differentiable_once, error=error)
    if not call.devices.maps:  # else `fun` is traced once more
        closed = closed.replace(consts=list(map(once, closed.consts)))
    leaves = call.leaves("batch_argnums") | call.others
    call = call.with_leaves({n: once(x) for n, x in leaves.items()})
    return over_micro_batches(micro_batch._replace(call=call, closed=closed))


def _parameters(call: Call, remat: bool | None = None) -> dict[str, Any]:
    """The parameters of the equation of a call, beside the program."""
    options = call.options
    like = call._replace(args=(), kwargs={}, options=options._replace(fun=_unknown))
    return {
        "name": getattr(options.fun, "__name__", "a function"),
        "number": options.num_microbatches + (call.rest > 0),
        "remat": remat,
        "runs": functools.partial(_run, like),
        "finds": functools.partial(_axes_of_results, like),
    }


def as_one_equation(micro_batch: MicroBatch) -> Any:
    """The value and the gradients, by one equation if anything is traced."""
    call, closed = micro_batch.call, micro_batch.closed
    leaves = call.leaves("argnums") | call.leaves("batch_argnums")
    xs = [*closed.consts, *map(jnp.asarray, leaves.values())]
    traced = any(isinstance(x, jax.core.Tracer) for x in xs)
    rule = undivided.custom_rule_in(closed.jaxpr) if traced else None
    devices = call.devices
    if not traced or (devices.axes and rule is None):
        return over_micro_batches(micro_batch)
    first = len(closed.consts)

    def with_gradients(*xs: Any) -> Any:
        new = call.with_leaves(dict(zip(leaves, xs[first:], strict=True)))
        of_xs = closed.replace(consts=list(xs[:first]))
        return over_micro_batches(micro_batch._replace(call=new, closed=of_xs))

    if devices.bound and rule is not None:
        error = undivided.derivative_refused(call, rule, "What value_and_grad returns")
        return with_gradients(*(equation.not_differentiable(x, error) for x in xs))
    program, out = jax.make_jaxpr(with_gradients, return_shape=True)(*xs)
    operands = [*program.consts, *xs]
    jaxpr = jaxprs.live(jaxprs.without_constants(program.jaxpr))
    # Only operands that are read stay, so that `jax.jit` drops the others.
    types: list[Any] = [x.aval for x in jaxpr.invars]
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in types]
    pairs = enumerate(zip(jaxpr.invars, is_key, strict=True))
    reads = [i for i, (x, key) in pairs if key or jaxprs.num_readers(jaxpr, x)]
    kept = [operands[i] for i in reads]
    jaxpr = jaxprs.closing_over(jaxpr, [], [], [jaxpr.invars[i] for i in reads])
    program = core.ClosedJaxpr(jaxpr, [])
    types, num_params = list(map(jax.typeof, operands)), len(call.leaves("argnums"))
    flat = undivided.flat_of(micro_batch.closed.jaxpr, num_params, types, reads)
    split_axes = call.split_axes
    axes = [*[None] * (len(operands) - len(split_axes)), *split_axes]
    parameters = _parameters(call)
    if devices.axes:
        parameters |= {"runs": _at_once, "finds": lambda x: [None] * len(x.results)}
    divided = Divided(
        flat=flat,
        types=tuple(program.in_avals),
        results=tuple(program.out_avals),
        axes=tuple(axes[i] for i in reads),
        **parameters,
    )
    return jax.tree.unflatten(jax.tree.structure(out), divided.bind(kept, program))


def _at_once(divided: Divided, xs: Sequence[Any]) -> list[Any]:
    """A derivative of all rows of a device at once, which the compiler distributes."""
    return jaxprs.results(divided.program, xs)


def _traced(flat: Callable[..., Any], xs: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """The program, and the types of divided results.

    The region of a mesh has other types, so a program must not have the mesh in types.
    """
    make = functools.partial(_jaxpr_of, call, flat, call.devices.axes, None)
    if call.devices.mesh is None:
        return make(*xs)
    with meshes.without_mesh():
        return make(*map(meshes.type_without_mesh, xs))


def _is_one(call: Call) -> bool:
    """True if the call can be one equation: one program serves all devices."""
    divided = call.devices
    if not divided.axes:
        return True
    plain = not (divided.each or divided.scatters)
    return (
        plain and divided.mesh is not None and not meshes.explicit_names(divided.mesh)
    )


def _run(like: Call, divided: Divided, xs: Sequence[Any]) -> list[Any]:
    """The results of an equation, over micro-batches."""
    if isinstance(divided.of, Gradient):
        return _gradient(like, divided, xs)
    return _as_function(like, divided, xs)


def _as_function(like: Call, divided: Divided, xs: Sequence[Any]) -> list[Any]:
    """The same, where a gradient is a function like any other."""
    call = call_of(like, undivided.with_loss(divided.flat), divided, xs)
    return value_and_grad(call)[0][1]


def _axes_of_results(like: Call, divided: Divided) -> list[int | None]:
    """The axes of the results that have rows, if rows are divided over devices."""
    axes: list[int | None] = [None] * len(divided.results)

    def in_layouts(*xs: Any) -> None:
        call = call_of(like, undivided.with_loss(divided.flat), divided, xs)
        if call.devices.bound or call.devices.by is meshes.By.NOBODY:
            return
        of_one, error = undivided.tried(partition, trace(call))
        if error is None:  # else no results have rows
            types, membership = of_one.closed.out_avals, of_one.membership
            by_place = rows.axes_of_results(call, of_one.part, types, membership)
            axes[:] = by_place[1:]

    jax.eval_shape(in_layouts, *divided.types)
    return axes


def _gradient(like: Call, divided: Divided, xs: Sequence[Any]) -> list[Any]:
    """The results of a gradient: the loss is the sum of cotangents times results."""
    gradient: Any = divided.of
    n = len(gradient.base.types)
    program = gradient.base.program if gradient.outs else gradient.base.silent
    jaxpr = rows.unrounded(program.jaxpr, gradient.given)
    smooth = [jaxpr.outvars[i] for i in gradient.given]
    outs = [program.jaxpr.outvars[i] for i in gradient.outs]
    program = jaxprs.Program(jaxpr.replace(outvars=[*smooth, *outs]), program.consts)

    def loss(*xs: Any) -> tuple[jax.Array, list[Any]]:
        out = jaxprs.results(program, xs[:n])
        terms, rest = out[: len(smooth)], out[len(smooth) :]
        if not outs:  # else there is one alone, whose cotangent is 1
            terms = [paired(x, ct) for x, ct in zip(terms, xs[n:], strict=True)]
        return functools.reduce(jnp.add, terms), rest

    call = call_of(like, loss, divided, xs, gradient.wrt)
    (_, out), grads = value_and_grad(call)
    places = *call.roles["argnums"], *call.roles["batch_argnums"]
    by_place = dict(zip(places, grads, strict=False))
    types = divided.results[len(gradient.outs) :]
    pairs = zip(gradient.wrt, types, strict=True)
    grads = [by_place[i].astype(x.dtype) for i, x in pairs]
    return [*out, *grads]


def _unknown(*args: Any) -> None:
    """In place of a function, so that nothing keeps what it closes over."""
