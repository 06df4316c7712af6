"""Sharded parameters that are gathered where they are used: `sync="each"`.

Left to itself the compiler shards activations as the parameters are sharded, over the
axis that splits the batch. Every layer then communicates activations. Here it is told
that a parameter is whole over that axis once it is cast, and sliced if a scan runs over
it: what crosses the network is that, and its gradient, by a reduce-scatter.
"""

from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from ga_optax._devices import meshes
from ga_optax._passes import ir, known
from ga_optax._passes.facts import Facts
from ga_optax._passes.ir import Program
from ga_optax._passes.notes import left_alone

Entries = tuple[Any, ...]  # of a PartitionSpec, one for each dimension


def gathered(program: Program, facts: Facts) -> Program:
    """The program; of its first arguments, parameters, `specs` says how they lie."""
    jaxpr = program.jaxpr

    def rest(entry: Any) -> Any:
        return meshes.as_entry(
            tuple(n for n in meshes.names_in(entry) if n not in facts.axes)
        )

    sharded = {}
    params: list[Any] = jaxpr.invars[: len(facts.specs)]
    for x, spec in zip(params, facts.specs, strict=True):
        entries = tuple(spec or ())
        entries += (None,) * (x.aval.ndim - len(entries))
        if any(rest(entry) != entry for entry in entries):
            sharded[x] = tuple(map(rest, entries))
    return program._replace(jaxpr=_used(jaxpr, sharded, facts.mesh))


def _used(jaxpr: core.Jaxpr, sharded: dict[Any, Entries], mesh: Any) -> core.Jaxpr:
    sharded, whole = dict(sharded), {}
    equations: list[core.JaxprEqn] = []

    def gather(x: Any, reader: core.JaxprEqn) -> Any:
        if isinstance(x, core.Literal) or x not in sharded:
            return x
        if x not in whole:
            sharding = NamedSharding(mesh, PartitionSpec(*sharded[x]))
            constrain = jax.make_jaxpr(
                lambda y: jax.lax.with_sharding_constraint(y, sharding)
            )
            like = jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
            [equation] = constrain(like).jaxpr.eqns
            whole[x] = core.Var(x.aval)
            ends = {"invars": [x], "outvars": [whole[x]]}
            equations.append(equation.replace(**ends, source_info=reader.source_info))
        return whole[x]

    for equation in jaxpr.eqns:
        ins = equation.invars
        here = {
            i for i, x in enumerate(ins) if isinstance(x, core.Var) and x in sharded
        }
        if equation.primitive.name == known.CAST and here:
            sharded[equation.outvars[0]] = sharded[ins[0]]
        elif ir.kind(equation) in ir.THROUGH and here:

            def inside(inner: core.Jaxpr, here=here, ins=ins) -> core.Jaxpr:
                own: list[Any] = inner.invars
                now = {}
                for i in here:  # a scan slices along the leading dimension
                    entries = sharded[ins[i]]
                    now[own[i]] = entries[len(entries) - own[i].aval.ndim :]
                return _used(inner, now, mesh)

            equation = ir.with_inner(equation, inside)
        elif here:
            if ir.inner_programs(equation):
                name = equation.primitive.name
                left_alone(equation, f"{name} gets parameters that are gathered before")
            equation = equation.replace(invars=[gather(x, equation) for x in ins])
        equations.append(equation)
    return jaxpr.replace(eqns=equations)
