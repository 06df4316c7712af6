"""Sharded parameters that are gathered where they are used: `sync="each"`.

Left to itself the compiler shards activations as the parameters are sharded, over the
axis that splits the batch. Every layer then communicates activations. Here it is told
that a parameter is whole over that axis once it is cast, and sliced if a scan runs over
it: what crosses the network is that, and its gradient, by a reduce-scatter.
"""

from typing import Any

from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from ga_optax._passes import constraints, primitives, read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.read import Program

Entries = tuple[Any, ...]  # of a PartitionSpec, one for each dimension


def gathered(program: Program, facts: Facts) -> Program:
    """The program, whose first arguments are parameters that lie as `facts` says."""
    jaxpr, lies, sharded = program.jaxpr, facts.lies, {}
    if lies is None:
        return program
    params: list[Any] = jaxpr.invars[: len(lies.specs)]
    for x, spec in zip(params, lies.specs, strict=True):
        entries = tuple(spec or ())
        entries += (None,) * (x.aval.ndim - len(entries))
        rest = tuple(constraints.without(entry, lies.axes) for entry in entries)
        if rest != entries:
            sharded[x] = rest
    return program._replace(jaxpr=_used(jaxpr, sharded, lies.mesh))


def _used(jaxpr: core.Jaxpr, sharded: dict[Any, Entries], mesh: Any) -> core.Jaxpr:
    sharded, whole = dict(sharded), dict[Any, core.Var]()

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        ins: list[Any] = equation.invars
        here = [x for x in read.variables(ins) if x in sharded]
        if equation.primitive.name == primitives.CAST and here:
            sharded[equation.outvars[0]] = sharded[ins[0]]
        elif read.kind(equation) in read.THROUGH and here:

            def inside(inner: core.Jaxpr) -> core.Jaxpr:
                pairs: Any = zip(inner.invars, ins, strict=True)
                now = {v: sharded[x] for v, x in pairs if read.is_among(x, sharded)}
                # A scan slices along the leading dimension.
                now = {v: its[len(its) - v.aval.ndim :] for v, its in now.items()}
                return _used(inner, now, mesh)

            return [rewrite.with_inner(equation, inside)]
        elif here:
            if read.inner_programs(equation):
                name = equation.primitive.name
                left_alone(equation, f"{name} gets parameters that are gathered before")
            new = []
            for x in dict.fromkeys(here):
                if x not in whole:
                    whole[x] = core.Var(x.aval)
                    sharding = NamedSharding(mesh, PartitionSpec(*sharded[x]))
                    new.append(constraints.placed(x, whole[x], sharding, equation))
            return [*new, equation.replace(invars=rewrite.rename(ins, whole))]
        return [equation]

    return rewrite.changed(jaxpr, change)
