"""A function over micro-batches as one equation, and what runs it.

A function runs as the law has it: the window of a loss, of which only the aux counts. A
gradient is the law's gradient of Σ cotangent · result, or of one scalar result, with
respect to what has rows, too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ga_optax._calls import layouts, rules, whole
from ga_optax._calls.call import Call
from ga_optax._calls.options import ROLES, Argument
from ga_optax._calls.results import check_values
from ga_optax._devices import collectives, meshes
from ga_optax._passes import ir, places, rowwise
from ga_optax._passes.divided import Divided, Gradient, paired


def of_call(call: Call, remat: bool | None, size: int | None = None) -> Any:
    """What `fun` returns for all rows, by an equation that can be differentiated.

    `size` is how many rows a micro-batch has, if that is what was asked for.
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

    if layouts.num_parts(call) == 1:
        return of_args(*call.args, **call.kwargs)
    if not _is_one(call):
        call = call._replace(
            options=options._replace(fun=_with_loss(of_args, call.axes))
        )
        return whole.of_call(call, _in_loop)[0][1]
    xs = _on_mesh(call, list(leaves.values()))
    closed, out = _traced(flat, xs, call)
    axes = (*call.split_axes, *[None] * len(call.others))
    its = Divided.of_program(closed, axes, **over_micro_batches(call, remat), size=size)
    # What fun closes over may be differentiated, too.
    return jax.tree.unflatten(jax.tree.structure(out), its.bind([*closed.consts, *xs]))


def _in_loop(call: Call, trace: layouts.Traced) -> Any:
    """What `whole.divided` returns; with rules it has no second derivatives."""
    rule = rules.rule_in(trace.closed.jaxpr)
    if rule is None:
        return whole.divided(call, trace)
    error = rules.refused(call, rule, "A gradient of microbatch")
    if not call.maps:  # else `fun` is traced once more, of what it is given
        consts = [rules.once(x, error) for x in trace.closed.consts]
        trace = trace._replace(closed=trace.closed.replace(consts=consts))
    leaves = call.leaves("batch_argnums") | call.others
    leaves = {n: rules.once(x, error) for n, x in leaves.items()}
    return whole.divided(call.with_leaves(leaves), trace)


def over_micro_batches(call: Call, remat: bool | None = None) -> dict[str, Any]:
    """What the equation of a call has that is no part of its program."""
    options = call.options
    how = call._replace(args=(), kwargs={}, options=options._replace(fun=_unknown))
    return {
        "name": getattr(options.fun, "__name__", "a function"),
        "number": options.num_microbatches,
        "remat": remat,
        "runs": functools.partial(_run, how),
        "finds": functools.partial(_axes_of_results, how),
    }


def _on_mesh(call: Call, xs: list[Any]) -> list[Any]:
    """Leaves, of which those with rows say where these lie, if `jax.jit` has to know.

    It does not look for a mesh inside an equation.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in xs)
    if not (traced and isinstance(call.mesh, Mesh)):
        return xs
    specs: list[Any] = [None] * len(xs)
    for i, (x, axis) in enumerate(zip(xs, call.split_axes, strict=False)):
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * jnp.ndim(x)
        entries[axis] = meshes.as_entry(call.options.axes)
        specs[i] = PartitionSpec(*entries)
    return collectives.constrain(xs, specs, call.mesh)


def _traced(flat: Callable[..., Any], xs: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """The program, and the types of its results.

    In the region of a mesh types name that otherwise, so it must not be in a program.
    """
    env = [*rowwise.READ, *meshes.of_all_rows(call.options.axes)]
    flat = places.in_name_of(call.options.fun, flat)
    trace = jax.make_jaxpr(flat, axis_env=env, return_shape=True)
    if call.mesh is None:
        return trace(*xs)
    with meshes.without_mesh():
        return trace(*map(layouts.type_of, xs))


def _is_one(call: Call) -> bool:
    """Whether it can be one equation: JAX has one program for all devices."""
    options, mesh = call.options, call.mesh
    if not options.axes:
        return True
    plain = not (options.each or options.scatters)
    return plain and mesh is not None and not meshes.explicit_names(mesh)


def _run(how: Call, its: Divided, xs: Sequence[Any]) -> list[Any]:
    """The results of an equation, over micro-batches."""
    if isinstance(of := its.of, Gradient):
        return _gradient(how, its, of, xs)
    call = _call(how, _with_loss(its.flat), its, xs)
    return whole.of_call(call)[0][1]


def _axes_of_results(how: Call, its: Divided) -> list[int | None]:
    """Where its results have rows, if devices may have them between them."""
    axes: list[int | None] = [None] * len(its.results)

    def run(*xs: Any) -> None:
        call = _call(how, _with_loss(its.flat), its, xs)
        if call.mesh is None and call.distributed is False:
            return
        trace = layouts.traced(call)
        if not isinstance(trace.part, Exception):
            axes[:] = layouts.axes_of_results(call, trace)[1:]

    jax.eval_shape(run, *its.types)
    return axes


def _gradient(how: Call, its: Divided, of: Gradient, xs: Sequence[Any]) -> list[Any]:
    """Those of a gradient: as that of a loss, the sum of cotangents times results."""
    n = len(of.base.types)
    program = of.base.program if of.outs else of.base.silent
    jaxpr = ir.unrounded(program.jaxpr, of.given)
    smooth = [jaxpr.outvars[i] for i in of.given]
    outs = [program.jaxpr.outvars[i] for i in of.outs]
    program = ir.Program(jaxpr.replace(outvars=[*smooth, *outs]), program.consts)

    def loss(*xs: Any) -> tuple[jax.Array, list[Any]]:
        out = ir.results(program, xs[:n])
        terms, rest = out[: len(smooth)], out[len(smooth) :]
        if not outs:  # else there is one alone, whose cotangent is 1
            terms = [paired(x, ct) for x, ct in zip(terms, xs[n:], strict=True)]
        return functools.reduce(jnp.add, terms), rest

    call = _call(how, loss, its, xs, of.wrt)
    (_, out), (grads, of_rows) = whole.of_call(call)
    found = dict(zip(call.roles["argnums"], grads, strict=True))
    found |= zip(call.roles["batch_argnums"], of_rows, strict=False)
    due = its.results[len(of.outs) :]
    grads = [found[i].astype(x.dtype) for i, x in zip(of.wrt, due, strict=True)]
    return [*out, *grads]


def _call(
    how: Call,
    fun: Callable[..., Any],
    its: Divided,
    xs: Sequence[Any],
    wrt: Sequence[int] = (),
) -> Call:
    """A call like another, of a function of arrays, each of which is an argument."""
    split = [i for i, axis in enumerate(its.axes) if axis is not None]
    rows = [i for i in split if i in wrt]
    params = tuple(i for i in wrt if i not in rows)
    batch = (*rows, *(i for i in split if i not in rows))
    roles: dict[str, tuple[Argument, ...]] = dict.fromkeys(ROLES, ())
    roles |= {"argnums": params, "batch_argnums": batch}
    options = how.options._replace(
        fun=fun, num_microbatches=its.number, argnums=params, batch_argnums=batch
    )
    return Call(
        options,
        tuple(xs),
        {},
        roles=roles,
        batch_axes=[its.axes[i] for i in batch],
        mesh=how.mesh,
        rows=len(rows),
        sums=True,
    )


def _unknown(*args: Any) -> None:
    """In place of a function, so that nothing keeps what it closes over."""


def _with_loss(
    fun: Callable[..., Any], axes: tuple[str, ...] = ()
) -> Callable[..., Any]:
    def with_loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        return collectives.vary(jnp.zeros([]), axes), fun(*args, **kwargs)

    return with_loss
