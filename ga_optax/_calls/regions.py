"""Regions: the part of a call that runs in a `jax.shard_map` over the data axes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._devices import collectives, meshes
from .._devices.record import DoesNotFitError
from .._passes import jaxprs, primitives
from .._passes.shards import Shard, constraint_on, either
from .call import Call

# == Regions ===========================================================================

REPLICATED: Any = PartitionSpec()


class ManualAxisError(DoesNotFitError):
    """`fun` shards something over a data axis that is bound, or over its mesh."""


def over_mesh(
    call: Call,
    run: Callable[..., Any],
    *others: tuple[Any, Any],
    results: Any,
    check_vma: bool,
    closed_over: Sequence[Any] = (),
) -> Any:
    """`run(call, *others)` in a `shard_map` over the data axes.

    Args:
      call: the call at top level.
      run: the function that each device runs on its part of the call.
      others: further arguments, each with its specs.
      results: the specs of the results; `gradients(call)` are those of gradients.
      check_vma: as for `jax.shard_map`. JAX has no types for an axis beside the mesh,
        nor for a constraint over all of it.
      closed_over: the arrays that `fun` closes over, as far as they are known.
    """
    options, mesh, axes = call.options, call.devices.mesh, call.devices.axes
    operands, specs = call.others, dict.fromkeys(call.others, REPLICATED)
    for role in call.roles:
        operands |= call.leaves(role)
        specs |= dict.fromkeys(call.leaves(role), REPLICATED)
    of_params = [place.spec for place in call.devices.params]
    specs |= zip(call.leaves("argnums"), of_params, strict=True)
    of_batch = [meshes.split_spec(axes, axis) for axis in call.split_axes]
    specs |= zip(call.leaves("batch_argnums"), of_batch, strict=True)
    by = meshes.By.COMPILER if call.devices.inner else meshes.By.US
    inside = call.devices._replace(mesh=None, is_checked=check_vma, by=by, mapped=True)
    values, of_others = [x for x, _ in others], [spec for _, spec in others]
    given = {id(x) for x in operands.values()}
    more = {
        -1 - i: x
        for i, x in enumerate(closed_over)
        if collectives.is_operand(x) and id(x) not in given
    }
    known, perhaps = _dims_of_shards(call, call.others | more)
    operands |= {n: x for n, x in more.items() if n in known or n in perhaps}
    specs |= dict.fromkeys(operands.keys() & more.keys(), REPLICATED)

    def mapped(dims: Mapping[int, int]) -> Callable[[Any], Any]:
        """The function, to which some operands come split along a dimension."""

        def local(leaves: Any, num_real: Any, *others: Any) -> Any:
            shards = {n: Shard(leaves[n], d, axes) for n, d in dims.items()}
            whole = {n: x.whole() for n, x in shards.items()}
            # What fun closes over it sees as it is outside.
            by_id = {id(more.get(n, whole[n])): x for n, x in shards.items()}
            here = call.with_leaves(leaves | whole)._replace(
                options=options._replace(num_real_microbatches=num_real),
                devices=inside._replace(shards=by_id),
            )
            return run(here, *others)

        of_shards = {n: meshes.split_spec(axes, d) for n, d in dims.items()}
        in_and_out = (specs | of_shards, REPLICATED, *of_others), results
        region = collectives.over_mesh(local, mesh, axes, in_and_out, check_vma)
        return lambda args: region(*args)

    args = operands, options.num_real_microbatches, *values
    if not perhaps:
        return mapped(known)(args)
    watched = [operands[n] for n in perhaps]
    return either(mapped(known), mapped(known | perhaps), args, watched, axes)


def _dims_of_shards(
    call: Call, arrays: Mapping[int, Any]
) -> tuple[dict[int, int], dict[int, int]]:
    """The dimensions along which the data axes shard arrays without rows or gradients.

    Returns: the dimensions of arrays that are sharded, and of arrays that may be.
    """
    known: dict[int, int] = {}
    perhaps: dict[int, int] = {}
    axes, devices = call.devices.axes, call.devices.number
    for n, x in arrays.items() if call.options.optimize and devices > 1 else ():
        dims = meshes.dims_that_split(x, devices)
        if not dims or jaxprs.numbers(x.shape) * x.dtype.itemsize < _SMALL:
            continue
        spec = meshes.known_spec(x)
        named = [bool({*meshes.names_in(x)} & {*axes}) for x in spec or ()]
        if any(named):
            known[n] = next((d for d in dims if any(named[d : d + 1])), dims[0])
        elif spec is None:
            perhaps[n] = dims[0]
    return known, perhaps


_SMALL = 2**16  # bytes: what has fewer is gathered once, for a message takes longer


def specs_of_gradients(call: Call) -> Any:
    """The specs of gradients, which come back from the region."""
    specs = [place.spec for place in call.devices.gradients]
    return jax.tree.structure(call.params).unflatten(specs) if specs else ()


def on_mesh(call: Call, xs: list[Any]) -> list[Any]:
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


# -- The errors of JAX about axes ------------------------------------------------------


@contextlib.contextmanager
def errors_explained(call: Call) -> Iterator[None]:
    """Adds to the errors of JAX about axes what to do, in the words of the options."""
    try:
        yield
    except (NameError, NotImplementedError, ValueError) as error:
        text = str(error)
        for words, todo in _ADVICE.items():
            if words in text:
                error.add_note(todo)
        names = [name for name in call.devices.bound if f"'{name}'" in text]
        if names and "manual" in text.lower():
            text = f"{_TAKEN.format(names[0])} JAX says: {error}"
            raise ManualAxisError(text) from error
        raise


_CLOSES = (
    "If fun closes over an array that lies on the mesh, pass it as an argument: one "
    "without a role goes whole to every device."
)

_ADVICE = {
    "unbound axis name": "fun communicates over an axis that is not bound here. With "
    "value_and_grad fun needs no collectives: it sees all rows.",
    "Closing over": f"In terms of ga_optax: {_CLOSES}",
}

# The advice on what names a data axis that is bound: regions, shardings and arrays.
_TAKEN = (
    'With data_axis= and sync="last" fun runs on one device of {0!r}, with its rows. '
    "So a jax.shard_map in fun must not be over {0!r}: leave it out, or leave its "
    "mesh= out, in jax.set_mesh(mesh), and it is over the other axes. A PartitionSpec "
    "must not name {0!r}: take the name out (in Flax out of the logical axis rules, "
    "in Haliax out of the axis mapping; and in your own jax.shard_map pass "
    "check_vma=False), or pass with_sharding_constraint a NamedSharding. "
    + _CLOSES
    + ' Or pass sync="each", or no data_axis, and every micro-batch is reduced.'
)

_CHECKED = (
    "With a jax.shard_map in fun, the one around it, over {!r}, must have "
    "check_vma=False: JAX does not compile the gradient of one in one that checks."
)


def check_no_region(call: Call, jaxpr: Any) -> None:
    """Raises if `fun` maps over an axis of which it has the rows of one device.

    JAX itself raises from 0.12 on, and computes another number before.
    """
    for e in _regions(jaxpr):
        specs = *e.params["in_specs"], *e.params["out_specs"]
        axes = {name for spec in specs for x in spec for name in meshes.names_in(x)}
        if both := axes.intersection(call.devices.bound):
            raise ManualAxisError(_TAKEN.format(min(both)))


def check_regions(call: Call, jaxpr: Any) -> None:
    """Raises if a region of `fun`, over other axes, is one of another mesh.

    `fun` was traced where the data axes were not bound. A rule takes a region over to
    here, and XLA does not compile one that is computed whole, for want of a rule.
    """
    bound, context = call.devices.bound, jax.sharding.get_abstract_mesh()
    found = _regions(jaxpr) if bound else []
    if any(e.params["mesh"] != context for e in found):
        raise ManualAxisError(_TAKEN.format(bound[0]))
    if found and call.devices.is_checked:  # what goes back has types of no region
        raise ManualAxisError(_CHECKED.format(bound[0]))


def _regions(jaxpr: Any) -> list[Any]:
    every = jaxprs.equations(jaxpr)
    return [e for e in every if e.primitive.name == "shard_map"]


def check_not_reduced(call: Call, loss: Any) -> None:
    """Raises if the loss is that of all devices already."""
    reduced = [name for name in call.devices.bound if name not in meshes.varying(loss)]
    if reduced and meshes.checks_varying():
        raise DoesNotFitError(
            "fun must return the loss of one device's micro-batch, but its loss is the "
            f"same on all devices along {reduced[0]!r}: it is reduced already. Take "
            "the psum or pmean out of fun: the window is reduced once, at its end."
        )


# == Sharding constraints ==============================================================
# Sharding constraints where some axes of their mesh are bound.
#
# A model constrains its activations on the whole mesh. Where a program runs on one
# device of some axes (in a `jax.shard_map`), a constraint on these axes already holds,
# and goes. A constraint on the other axes stays.


def constraints_without(jaxpr: core.Jaxpr, axes: meshes.Axes) -> core.Jaxpr:
    """The program without constraints on `axes`, to run inside their `shard_map`."""
    if not axes:
        return jaxpr

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        place = equation.params.get("sharding")
        is_constraint = equation.primitive.name == primitives.CONSTRAINT
        if is_constraint and isinstance(place, NamedSharding):
            mesh = jax.sharding.get_abstract_mesh()
            entries = [meshes.entry_without(entry, axes) for entry in place.spec]
            sharding = NamedSharding(mesh, PartitionSpec(*entries))
            [x], [out] = equation.invars, equation.outvars
            equation = constraint_on(x, out, sharding, equation)
        return [
            jaxprs.with_inner(equation, lambda inner: constraints_without(inner, axes))
        ]

    return jaxprs.changed(jaxpr, change)
