"""The micro-batches of a call, added to an accumulator: on a device, and on a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ga_optax import accumulator
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives, meshes
from ga_optax._devices.meshes import Placement
from ga_optax._inside import additions, in_place, trees
from ga_optax._inside.call import Call
from ga_optax._inside.loop import Loop, Operands
from ga_optax._inside.over_devices import all_reduced, of_logical
from ga_optax._inside.program import ManualAxisError, Program
from ga_optax._inside.results import Value, value_of
from ga_optax.accumulator import Accumulator


def fold(
    call: Call, program: Program, acc: Accumulator | None, *, merges: bool
) -> tuple[Value, Accumulator]:
    """Adds the micro-batches of a call to `acc`; `merges` over the bound data axes.

    If `acc` is None, a window begins.
    """
    operands = _operands(call, program, _begun(call) if acc is None else acc)
    structure = jax.tree.structure(call.params)
    if call.options.axis_name is not None:
        # Imported when needed: most windows have no axis.
        from ga_optax._inside import axis

        leaves, carry, done = axis.fold(call, program, operands)
        value = value_of(call, program, leaves, program.carry.unflatten(carry))
        return value, done._replace(total=jax.tree.unflatten(structure, done.total))

    reduced = _reduced_in_last(call) if merges else {}
    loop = _loop(call, program, operands, reduced, acc is None)
    state = of_logical(loop, operands, call) if call.logical else loop(operands)
    if merges and call.axes:
        with jax.named_scope("merge"):
            done = {i: Placement(summed=place.axes) for i, place in call.sent.items()}
            done |= {i: Placement(summed=call.axes) for i in reduced}
            where = [done.get(i, place) for i, place in enumerate(call.where)]
            state = all_reduced(loop, state, call._replace(where=where))
    last = jax.tree.unflatten(program.carry, state.carry)
    value = value_of(call, program, loop.results(state), last)
    total = jax.tree.unflatten(structure, state.acc.total)
    # If the caller does not say either, XLA may sum up whole gradients.
    total = total if call.mesh is None else call.placed(total)
    return value, state.acc._replace(total=total)


def _begun(call: Call) -> Accumulator:
    acc = accumulator.begun(call.params, call.options.accumulator_dtype)
    return acc._replace(total=call.placed(acc.total, -0.0))


def _operands(call: Call, program: Program, acc: Accumulator) -> Operands:
    params, _, keys, carry = (jax.tree.leaves(call.role(n)) for n in call.roles)
    params, carry = list(map(jnp.asarray, params)), list(map(trees.strong, carry))
    flat = acc._replace(total=collectives.vary(jax.tree.leaves(acc.total), call.axes))
    real = call.options.num_real_microbatches
    real = None if real is None else jnp.asarray(real, jnp.int32)
    return Operands(program.consts, params, program.batch, keys, carry, flat, real)


def _reduced_in_last(call: Call) -> dict[int, Placement]:
    """Which sums the last micro-batch reduces over devices, and how."""
    if not (call.options.overlap and call.axes):
        return {}
    pairs = enumerate(zip(call.where, call.merges, strict=True))
    return {i: place for i, (place, merge) in pairs if merge.is_sum}


def _loop(
    call: Call,
    program: Program,
    operands: Operands,
    reduced: dict[int, Placement],
    begins: bool,
) -> Loop:
    """The loop; the last micro-batch reduces some sums over devices."""
    options, sums_already = call.options, any(place.summed for place in call.where)
    off = "" if options.optimize else "optimize=False"
    if off and begins and options.num_microbatches == 1:
        off = "one micro-batch adds to nothing"
    whys = in_place.reasons(off, program, operands, call.sent)
    in_place.report([name for name, _ in named_leaves(call.params)], whys)
    if sums_already and program.multiplies:
        raise ValueError(
            'sync="each" must scale the loss by the weight, but fun has custom_vjp, '
            'float16 or a loss of low precision in it. Use sync="last", or a float32 '
            "loss."
        )
    # Without its arrays: what is differentiated later must not hold tracers.
    program = program._replace(consts=(), batch=[])
    adds = additions.choose(program, operands.acc.total, whys, call.sent)
    # What the compiler reduces over devices in each micro-step would be twice as large.
    once = program.low_precision and not (options.each or call.strided)
    return Loop(
        program,
        options.num_microbatches,
        adds,
        optimize=options.optimize,
        begins=begins,
        last=adds.reduced(program, reduced) if reduced else None,
        rounds_once=once,
        local=call.distributed is False,
        sums_already=sums_already,
        axes=call.axes,
    )


def mean(call: Call, program: Program, acc: Accumulator, params: Any) -> optax.Updates:
    """`accumulator.mean` in the dtypes of the parameters.

    Each leaf is divided in the way that costs least.
    """
    k = call.options.num_microbatches
    weight: int | jax.Array = k
    if call.axes:
        k *= meshes.num_devices(call.axes, None) * (call.logical or 1)
        weight = acc.weight
    known = not program.weighted and call.options.num_real_microbatches is None
    power_of_two = known and k > 1 and k & (k - 1) == 0

    def divided(total: jax.Array, arrival: str | None) -> jax.Array:
        if arrival == "slices":
            return accumulator.average_in_place(total, acc.weight)
        exact = not jnp.iscomplexobj(total) and 1 / k >= jnp.finfo(total.dtype).tiny
        if power_of_two and exact:
            return accumulator.average_by_power_of_two(total, weight)
        return accumulator.average(total, acc.weight)

    leaves, structure = jax.tree.flatten(acc.total)
    of_leaves = leaves, program.arrivals, program.merges, jax.tree.leaves(params)
    with jax.named_scope("mean"):
        each = [
            merge.result(
                total, acc.weight, old, lambda x, came=came: divided(x, came)
            ).astype(jnp.result_type(old))
            for total, came, merge, old in zip(*of_leaves, strict=True)
        ]
    return jax.tree.unflatten(structure, each)


# -- On a mesh -------------------------------------------------------------------------


def over_mesh(call: Call, run: Callable[..., Any], *acc: Accumulator) -> Any:
    """`run(call, *acc)` in a `shard_map` over the data axes.

    JAX has no types for an axis beside the mesh, nor for a constraint over all of it;
    and the program of a micro-batch is written without any for devices.
    """
    if call.options.axis_name is not None or call.options.whole_batch:
        return _over_mesh(call, run, acc, check_vma=False)
    try:
        return _over_mesh(call, run, acc, check_vma=True)
    except ManualAxisError:
        return _over_mesh(call, run, acc, check_vma=False)


def _over_mesh(
    call: Call, run: Callable[..., Any], acc: tuple[Accumulator, ...], check_vma: bool
) -> Any:
    options, mesh, axes = call.options, call.mesh, call.options.axes
    split, params = meshes.split_spec(axes), call.params
    whole: Any = PartitionSpec()
    tree = jax.tree.structure(params)
    where = meshes.placements(params, call.specs, axes, mesh)
    specs = of_grads = tree.unflatten(place.spec for place in where)
    if call.grad_specs is not None:
        given = params, call.grad_specs, axes, mesh, "grad_specs"
        where = meshes.placements(*given)
        of_grads = tree.unflatten(place.spec for place in where)

    places = call.unsplit
    of_params = (specs,) if isinstance(options.argnums, int) else specs
    of_roles = [*of_params, *[whole] * (len(places) - len(of_params))]
    of_batch = [meshes.split_spec(axes, axis) for axis in call.split_axes]
    meshes.check_scatter(params, where, axes, mesh)

    def local(with_role: Any, batch: Any, others: Any, *acc: Accumulator) -> Any:
        others, num_real = others
        inner = call.with_others(others)._replace(mesh=None, specs=specs)
        inner = inner._replace(options=options._replace(num_real_microbatches=num_real))
        if call.grad_specs is not None:
            inner = inner._replace(grad_specs=of_grads)
        with_role = dict(zip(places, with_role, strict=True))
        return run(inner.with_args(with_role).with_batch(batch), *acc)

    # Every other part of the value is the same on all devices.
    value = Value(whole, whole, whole, collected=split)
    result: Any = Accumulator(of_grads, whole, whole) if acc else of_grads
    others = call.others(), options.num_real_microbatches
    given = [call.at(i) for i in places], call.batch, others, *acc
    of_given = of_roles, of_batch, whole, *[result] * len(acc)
    in_and_out = of_given, (value, result)
    return collectives.over_mesh(local, mesh, axes, in_and_out, check_vma)(*given)
