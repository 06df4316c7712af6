"""Sharding constraints where some axes of their mesh are bound.

A model constrains its activations on the whole mesh. Where a program runs on one device
of some axes (in a `jax.shard_map`), a constraint on these axes already holds, and goes.
A constraint on the other axes stays.
"""

from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from ga_optax._devices import meshes
from ga_optax._passes import interpret, known, rewrite


def without_axes(jaxpr: core.Jaxpr, axes: meshes.Axes) -> core.Jaxpr:
    """The program without constraints on `axes`, to run inside their `shard_map`."""
    if not axes:
        return jaxpr

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        place = known.constrained_to(equation)
        if isinstance(place, NamedSharding):
            equation = _without(equation, place, axes)
        return [rewrite.with_inner(equation, lambda inner: without_axes(inner, axes))]

    return rewrite.changed(jaxpr, change)


def _without(
    equation: core.JaxprEqn, place: NamedSharding, axes: meshes.Axes
) -> core.JaxprEqn:
    mesh = jax.sharding.get_abstract_mesh()
    spec = PartitionSpec(*(without(entry, axes) for entry in place.spec))
    sharding = NamedSharding(mesh, spec)
    [out] = equation.outvars
    return placed(equation.invars[0], out, sharding, equation)


def without(entry: Any, axes: meshes.Axes) -> Any:
    """An entry of a spec without some axes."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    names = meshes.names_in(entry)
    return meshes.as_entry(tuple(name for name in names if name not in axes))


def placed(
    x: Any, result: core.Var, sharding: NamedSharding, at: core.JaxprEqn
) -> core.JaxprEqn:
    """An equation that constrains `x` to a sharding."""

    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding)

    [equation] = interpret.traced(constrained, [x], result, at)
    return equation
