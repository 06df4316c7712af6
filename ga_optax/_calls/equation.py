"""Calls as one equation, and what runs it over micro-batches.

    of_call          `microbatch`: the derivatives of the equation are functions over
                     micro-batches themselves
    of_micro_batch   `value_and_grad`: the program is written when `fun` is traced, and
                     the derivatives are those of `jax.value_and_grad(fun)`. The program
                     has the first derivative of each custom rule, and not the rules,
                     see `second_derivatives`

A function runs like a loss of which only the aux counts. A gradient is that of Σ
cotangent · result, or of one scalar result, also with respect to leaves with rows.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from ga_optax._calls import engine, rows, second_derivatives
from ga_optax._calls.call import Call
from ga_optax._calls.engine import MicroBatch
from ga_optax._calls.options import ROLES, Argument
from ga_optax._calls.results import check_values
from ga_optax._devices import collectives, meshes
from ga_optax._passes import interpret, places, read, rewrite, rowwise
from ga_optax._passes.divided import Divided, Gradient, paired


def of_call(call: Call, remat: bool | None, size: int | None = None) -> Any:
    """Returns the result of `fun` for all rows, by an equation that has derivatives.

    `size` is the number of rows of a micro-batch, if the user gave it.
    """
    options, fun = call.options, call.options.fun
    leaves = call.leaves("batch_argnums") | call.others

    def of_args(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        check_values("What fun returns", out)
        return out

    def flat(*xs: Any) -> Any:
        new = call.with_leaves(dict(zip(leaves, xs, strict=True)))
        return of_args(*new.args, **new.kwargs)

    if call.is_undivided:
        return of_args(*call.args, **call.kwargs)
    if not _is_one(call):
        call = call._replace(
            options=options._replace(fun=_with_loss(of_args, call.devices.bound))
        )
        return engine.value_and_grad(call, _in_loop)[0][1]
    xs = _on_mesh(call, list(leaves.values()))
    closed, out = _traced(flat, xs, call)
    axes = (*call.split_axes, *[None] * len(call.others))
    divided = Divided.of_program(closed, axes, **_parameters(call, remat), size=size)
    # Constants that `fun` closes over are operands, for they may be differentiated.
    results = divided.bind([*closed.consts, *xs])
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _in_loop(micro_batch: MicroBatch) -> Any:
    """The results over micro-batches, without second derivatives if `fun` has rules."""
    call, closed = micro_batch.call, micro_batch.closed
    if (rule := second_derivatives.rule_in(closed.jaxpr)) is None:
        return engine.over_micro_batches(micro_batch)
    error = second_derivatives.refused(call, rule, "A gradient of microbatch")
    once = functools.partial(second_derivatives.once, error=error)
    if not call.devices.maps:  # else `fun` is traced once more
        closed = closed.replace(consts=list(map(once, closed.consts)))
    leaves = call.leaves("batch_argnums") | call.others
    call = call.with_leaves({n: once(x) for n, x in leaves.items()})
    return engine.over_micro_batches(micro_batch._replace(call=call, closed=closed))


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


def of_micro_batch(micro_batch: MicroBatch) -> Any:
    """The value and the gradients, by one equation if anything is traced."""
    call, closed = micro_batch.call, micro_batch.closed
    leaves = call.leaves("argnums") | call.leaves("batch_argnums")
    xs = [*closed.consts, *map(jnp.asarray, leaves.values())]
    traced = any(isinstance(x, jax.core.Tracer) for x in xs)
    rule = second_derivatives.rule_in(closed.jaxpr) if traced else None
    devices = call.devices
    if not traced or (devices.axes and rule is None):
        return engine.over_micro_batches(micro_batch)
    first = len(closed.consts)

    def run(*xs: Any) -> Any:
        new = call.with_leaves(dict(zip(leaves, xs[first:], strict=True)))
        of_xs = closed.replace(consts=list(xs[:first]))
        return engine.over_micro_batches(micro_batch._replace(call=new, closed=of_xs))

    if devices.bound and rule is not None:
        error = second_derivatives.refused(call, rule, "What value_and_grad returns")
        return run(*(second_derivatives.fixed(x, error) for x in xs))
    program, out = jax.make_jaxpr(run, return_shape=True)(*xs)
    operands = [*program.consts, *xs]
    jaxpr = read.live(rewrite.without_constants(program.jaxpr))
    # Only operands that are read stay, so that `jax.jit` drops the others.
    types: list[Any] = [x.aval for x in jaxpr.invars]
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in types]
    pairs = enumerate(zip(jaxpr.invars, is_key, strict=True))
    reads = [i for i, (x, key) in pairs if key or read.num_readers(jaxpr, x)]
    kept = [operands[i] for i in reads]
    jaxpr = rewrite.closing_over(jaxpr, [], [], [jaxpr.invars[i] for i in reads])
    program = core.ClosedJaxpr(jaxpr, [])
    flat = _flat(micro_batch, list(map(jax.typeof, operands)), reads)
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
        exact=rule is None,
        **parameters,
    )
    return jax.tree.unflatten(jax.tree.structure(out), divided.bind(kept, program))


def _flat(
    micro_batch: MicroBatch, types: Sequence[Any], reads: Sequence[int]
) -> Callable[..., list[Any]]:
    """`jax.value_and_grad` of the traced function, whose operands are the last.

    `types` are the types of all operands, `reads` the places of the operands that come.
    """
    jaxpr = rewrite.without_values(micro_batch.closed.jaxpr)
    number, num_params = len(types), len(micro_batch.call.leaves("argnums"))

    def zero(i: int) -> Any:
        return None if i in reads else jnp.zeros(types[i].shape, types[i].dtype)

    unread = number - len(jaxpr.constvars) - len(jaxpr.invars)

    def flat(*some: Any) -> list[Any]:
        xs = interpret.put([*map(zero, range(number))], reads, some)
        args = xs[number - len(jaxpr.invars) :]
        consts = xs[unread : number - len(args)]

        def loss_of(*params: Any) -> tuple[Any, list[Any]]:
            batch = args[num_params:]
            loss, *aux = jax.core.eval_jaxpr(jaxpr, consts, *params, *batch)
            return loss, aux

        loss, pull, aux = jax.vjp(loss_of, *args[:num_params], has_aux=True)
        return [loss, *aux, *pull(jnp.ones_like(loss))]

    return flat


def _at_once(divided: Divided, xs: Sequence[Any]) -> list[Any]:
    """A derivative of all rows of a device at once, which the compiler distributes."""
    return interpret.results(divided.program, xs)


def _on_mesh(call: Call, xs: list[Any]) -> list[Any]:
    """The leaves, constrained along rows to the mesh, if `jax.jit` must know the mesh.

    `jax.jit` does not look for a mesh inside an equation.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in xs)
    devices = call.devices
    if not (traced and isinstance(devices.mesh, Mesh)):
        return xs
    specs: list[Any] = [None] * len(xs)
    for i, (x, axis) in enumerate(zip(xs, call.split_axes, strict=False)):
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * jnp.ndim(x)
        entries[axis] = meshes.as_entry(devices.axes)
        specs[i] = PartitionSpec(*entries)
    return collectives.constrain(xs, specs, devices.mesh)


def _traced(flat: Callable[..., Any], xs: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """The program, and the types of divided results.

    The region of a mesh has other types, so a program must not have the mesh in types.
    """
    env = [*rowwise.READ, *meshes.of_all_rows(call.devices.axes)]
    flat = places.in_name_of(call.options.fun, flat)
    trace = jax.make_jaxpr(flat, axis_env=env, return_shape=True)
    if call.devices.mesh is None:
        return trace(*xs)
    with meshes.without_mesh():
        return trace(*map(meshes.type_without_mesh, xs))


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
    call = _call(like, _with_loss(divided.flat), divided, xs)
    return engine.value_and_grad(call)[0][1]


def _axes_of_results(like: Call, divided: Divided) -> list[int | None]:
    """The axes of the results that have rows, if rows are divided over devices."""
    axes: list[int | None] = [None] * len(divided.results)

    def run(*xs: Any) -> None:
        call = _call(like, _with_loss(divided.flat), divided, xs)
        if call.devices.mesh is None and call.devices.distributed is False:
            return
        traced = engine.trace(call)
        with contextlib.suppress(Exception):  # then no results have rows
            of_one = engine.partition(traced)
            types, strided = of_one.closed.out_avals, of_one.strided
            by_place = rows.axes_of_results(call, of_one.part, types, strided)
            axes[:] = by_place[1:]

    jax.eval_shape(run, *divided.types)
    return axes


def _gradient(like: Call, divided: Divided, xs: Sequence[Any]) -> list[Any]:
    """The results of a gradient: the loss is the sum of cotangents times results."""
    gradient: Any = divided.of
    n = len(gradient.base.types)
    program = gradient.base.program if gradient.outs else gradient.base.silent
    jaxpr = rewrite.unrounded(program.jaxpr, gradient.given)
    smooth = [jaxpr.outvars[i] for i in gradient.given]
    outs = [program.jaxpr.outvars[i] for i in gradient.outs]
    program = read.Program(jaxpr.replace(outvars=[*smooth, *outs]), program.consts)

    def loss(*xs: Any) -> tuple[jax.Array, list[Any]]:
        out = interpret.results(program, xs[:n])
        terms, rest = out[: len(smooth)], out[len(smooth) :]
        if not outs:  # else there is one alone, whose cotangent is 1
            terms = [paired(x, ct) for x, ct in zip(terms, xs[n:], strict=True)]
        return functools.reduce(jnp.add, terms), rest

    call = _call(like, loss, divided, xs, gradient.wrt)
    (_, out), (grads, of_rows) = engine.value_and_grad(call)
    by_place = dict(zip(call.roles["argnums"], grads, strict=True))
    by_place |= zip(call.roles["batch_argnums"], of_rows, strict=False)
    types = divided.results[len(gradient.outs) :]
    pairs = zip(gradient.wrt, types, strict=True)
    grads = [by_place[i].astype(x.dtype) for i, x in pairs]
    return [*out, *grads]


def _call(
    like: Call,
    fun: Callable[..., Any],
    divided: Divided,
    xs: Sequence[Any],
    wrt: Sequence[int] = (),
) -> Call:
    """A call like another, of a function of arrays, each of which is an argument."""
    split = [i for i, axis in enumerate(divided.axes) if axis is not None]
    moved = [i for i in split if i in wrt]
    params = tuple(i for i in wrt if i not in moved)
    batch = (*moved, *(i for i in split if i not in moved))
    roles: dict[str, tuple[Argument, ...]] = dict.fromkeys(ROLES, ())
    roles |= {"argnums": params, "batch_argnums": batch}
    options = like.options._replace(
        fun=fun, num_microbatches=divided.number, argnums=params, batch_argnums=batch
    )
    devices, number = like.devices, divided.number
    if devices.axes:
        devices = devices.with_params(tuple(xs[i] for i in params))
    call = Call(
        options,
        tuple(xs),
        {},
        roles=roles,
        batch_axes=[divided.axes[i] for i in batch],
        devices=devices.for_arrays(xs, options.optimize),
        rows=len(moved),
        sums=True,
    )
    pairs = zip(call.batch, call.split_axes, strict=True)
    lengths = [jnp.shape(x)[axis] for x, axis in pairs]
    # If one is not even, all have the rows of the batch, see `batches`.
    uneven = [n for n in lengths if isinstance(n, int) and n % number]
    return call.in_pieces(uneven[0], number) if uneven and not devices.axes else call


def _unknown(*args: Any) -> None:
    """In place of a function, so that nothing keeps what it closes over."""


def _with_loss(
    fun: Callable[..., Any], axes: tuple[str, ...] = ()
) -> Callable[..., Any]:
    def with_loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        return collectives.vary(jnp.zeros([]), axes), fun(*args, **kwargs)

    return with_loss
