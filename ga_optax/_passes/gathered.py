"""Sharded parameters that are gathered where they are used: `sync="each"`.

Left to itself the compiler shards activations as the parameters are sharded, over the
axis that splits the batch. Every layer then communicates activations. A sharding
constraint here says that a parameter is whole over that axis, after the parameter is
cast, and after a scan has sliced the parameter. So the network carries the layer's
parameters in low precision, and a reduce-scatter of their gradients.
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
            sharded[x] = rest
    return program._replace(jaxpr=_gathered(jaxpr, sharded, sharding.mesh))


def _gathered(jaxpr: core.Jaxpr, sharded: dict[Any, Entries], mesh: Any) -> core.Jaxpr:
    """The program with constraints; `sharded` are variables and specs once gathered."""
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
                # A scan slices along the leading dimension.
                specs = {v: x[len(x) - v.aval.ndim :] for v, x in specs.items()}
                return _gathered(inner, specs, mesh)

            return [rewrite.with_inner(equation, change_inner)]
        if read.inner_programs(equation):
            name = equation.primitive.name
            left_alone(equation, f"{name} gets parameters that are gathered before")
        new = []
        for x in dict.fromkeys(params):
            if x not in whole:
                whole[x] = core.Var(x.aval)
                sharding = NamedSharding(mesh, PartitionSpec(*sharded[x]))
                new.append(constraints.placed(x, whole[x], sharding, equation))
        return [*new, equation.replace(invars=rewrite.rename(ins, whole))]

    return rewrite.changed(jaxpr, change)
