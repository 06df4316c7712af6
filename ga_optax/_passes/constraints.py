"""Sharding constraints where some axes of their mesh are bound.

A model says where its activations lie on the whole mesh. A program that runs on one
device of some axes has no say in those: what the constraint asks of them holds already.
What it asks of the other axes stays.
"""

from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from ga_optax._devices import meshes
from ga_optax._passes import ir, known


def without_axes(jaxpr: core.Jaxpr, axes: meshes.Axes) -> core.Jaxpr:
    """The program, in which no constraint names `axes`, inside their `shard_map`."""
    if not axes or not any(map(known.constrained_to, ir.equations(jaxpr))):
        return jaxpr
    equations = []
    for equation in jaxpr.eqns:
        place = known.constrained_to(equation)
        if isinstance(place, NamedSharding):
            equation = _without(equation, place, axes)
        equation = ir.with_inner(equation, lambda inner: without_axes(inner, axes))
        equations.append(equation)
    return jaxpr.replace(eqns=equations)


def _without(
    equation: core.JaxprEqn, place: NamedSharding, axes: meshes.Axes
) -> core.JaxprEqn:
    def kept(entry: object) -> object:
        if entry is PartitionSpec.UNCONSTRAINED:
            return entry
        names = meshes.names_in(entry)
        return meshes.as_entry(tuple(name for name in names if name not in axes))

    here = jax.sharding.get_abstract_mesh()
    sharding = NamedSharding(here, PartitionSpec(*map(kept, place.spec)))
    [out] = equation.outvars
    return placed(equation.invars[0], out, sharding)


def placed(x: Any, result: core.Var, sharding: NamedSharding) -> core.JaxprEqn:
    """An equation whose result is `x`, which is to lie so."""

    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding)

    [equation] = ir.traced(constrained, [x], result)
    return equation
