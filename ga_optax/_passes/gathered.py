"""Sharded parameters that are gathered where they are used: `sync="each"`.

Left to itself the compiler shards activations as the parameters are sharded, over the
axis that splits the batch. Every layer then communicates activations. A sharding
constraint here says that a parameter is whole over that axis, after the parameter is
cast, and after a scan has sliced the parameter. So the network carries the layer's
parameters in low precision, and a reduce-scatter of their gradients.

A constraint before this one says that each device casts its own part. The compiler
carries constraints back over casts and barriers, and would gather in high precision.
"""

import math
from typing import Any, NamedTuple

from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from ga_optax._devices import meshes
from ga_optax._passes import constraints, primitives, read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.read import Program

Entries = tuple[Any, ...]  # of a PartitionSpec, one for each dimension


class _Specs(NamedTuple):
    """The entries of a parameter while it is sharded, and once it is gathered."""

    sharded: Entries
    gathered: Entries

    def of_last(self, rank: int) -> "_Specs":
        """The entries of the last dimensions; a scan slices along the leading one."""
        sharded, gathered = (x[len(x) - rank :] for x in self)
        return _Specs(sharded, gathered)


def gathered(program: Program, facts: Facts) -> Program:
    """The program with constraints where it uses parameters, its first arguments."""
    jaxpr, sharding, sharded = program.jaxpr, facts.param_sharding, {}
    if sharding is None:
        return program
    params: list[Any] = jaxpr.invars[: len(sharding.specs)]
    for x, spec in zip(params, sharding.specs, strict=True):
        entries = tuple(spec or ())
        entries += (None,) * (x.aval.ndim - len(entries))
        rest = tuple(constraints.without(entry, sharding.axes) for entry in entries)
        if rest != entries:
            sharded[x] = _Specs(entries, rest)
    return program._replace(jaxpr=_gathered(jaxpr, sharded, sharding.mesh))


def _gathered(jaxpr: core.Jaxpr, sharded: dict[Any, _Specs], mesh: Any) -> core.Jaxpr:
    """The program with constraints; `sharded` are variables and their specs."""
    sharded, whole = dict(sharded), dict[Any, core.Var]()

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        ins: list[Any] = equation.invars
        params = [x for x in read.variables(ins) if x in sharded]
        if not params:
            return [equation]
        if equation.primitive.name == primitives.CAST:
            sharded[equation.outvars[0]] = sharded[ins[0]]
            return [equation]
        if read.kind(equation) in read.THROUGH:

            def change_inner(inner: core.Jaxpr) -> core.Jaxpr:
                pairs: Any = zip(inner.invars, ins, strict=True)
                specs = {v: sharded[x] for v, x in pairs if read.is_among(x, sharded)}
                specs = {v: x.of_last(v.aval.ndim) for v, x in specs.items()}
                return _gathered(inner, specs, mesh)

            return [rewrite.with_inner(equation, change_inner)]
        is_table = equation.primitive.name == "gather" and params == ins[:1]
        if is_table and (found := _looked_up(equation, sharded[ins[0]], mesh)):
            return found
        if read.inner_programs(equation):
            name = equation.primitive.name
            left_alone(equation, f"{name} gets parameters that are gathered before")
        new = []
        for x in dict.fromkeys(params):
            for entries in () if x in whole else sharded[x]:
                before, whole[x] = whole.get(x, x), core.Var(x.aval)
                place = NamedSharding(mesh, PartitionSpec(*entries))
                new.append(constraints.placed(before, whole[x], place, equation))
        return [*new, equation.replace(invars=rewrite.rename(ins, whole))]

    return rewrite.changed(jaxpr, change)


def _looked_up(
    equation: core.JaxprEqn, specs: _Specs, mesh: Any
) -> list[core.JaxprEqn] | None:
    """A lookup in each device's columns of a table, such as an embedding; or None.

    What is found is sent to the devices of the rows, if that is less than the table.
    Columns that are also split over another axis are not looked up: the compiler sums
    their gradients whole.
    """
    how, [out] = equation.params, equation.outvars
    table: Any = equation.invars[0].aval
    found: Any = out.aval
    numbers = how["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * found.ndim
    places, parts = iter(numbers.offset_dims), 1
    for d, (before, after) in enumerate(zip(*specs, strict=True)):
        place = None if d in gone else next(places)
        if before == after:
            continue
        if place is None or after or how["slice_sizes"][d] != table.shape[d]:
            return None
        entries[place] = None
        parts *= math.prod(mesh.shape[name] for name in meshes.names_in(before))
    if read.numbers(found.shape) > parts * read.numbers(table.shape):
        return None
    result = core.Var(found)
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return [
        equation.replace(outvars=[result]),
        constraints.placed(result, out, sharding, equation),
    ]
