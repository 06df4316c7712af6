"""Sharded arrays without a gradient, which are gathered where they are used.

    whole  =  all_gather(part)        in each micro-batch, and of one layer in a scan

In a region over the data axes each device has a part of such an array. A slice or a
cast of the array is one of the part, so a scan over layers gathers one layer at a time.
An equation that reads the array keeps the part as a residual, and gathers again.

Under `jax.jit` the types of automatic axes do not tell the sharding of an argument. So
both programs are traced then, and JAX lowers one by the sharding: `either`.

Below it a program that computes nothing twice, which is compiled alike for one device
and for several.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend.mlir import ir as mlir_ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from .._devices import meshes
from .._devices.meshes import Axes
from . import checkpoints, jaxprs, new_primitive, primitives
from .facts import Facts
from .places import left_alone


class Shard(NamedTuple):
    """A device's part of an array.

    Attributes:
      part: the part.
      dim: the dimension that is split.
      axes: the axes of the mesh that split it.
    """

    part: Any
    dim: int
    axes: Axes

    def whole(self) -> jax.Array:
        """The array, from the parts of all devices."""
        [x] = _gather().bind(self.part, dim=self.dim, axes=self.axes)
        return x

    def of(self, part: Any, dim: int | None = None) -> "Shard":
        """Another array that is split over the same axes."""
        return self._replace(part=part, dim=self.dim if dim is None else dim)


jax.tree_util.register_pytree_node(
    Shard, lambda x: ((x.part,), x[1:]), lambda fields, xs: Shard(*xs, *fields)
)


# -- The pass --------------------------------------------------------------------------


def gathered_at_use(program: jaxprs.Program, facts: Facts) -> jaxprs.Program:
    """The program, some constants of which are gathered where they are used."""
    jaxpr, consts = program.jaxpr, list(program.consts)
    shards = [facts.devices.shards.get(id(x)) for x in consts]
    if not any(shards) or any(map(jaxprs.is_reference, jaxpr.constvars)):
        return program
    pairs = zip(shards, jaxpr.constvars, strict=True)
    types = [jax.typeof(x.part) if x else v.aval for x, v in pairs]
    number = len(types)

    def of_parts(*xs: Any) -> list[Any]:
        values = [s.of(x) if s else x for s, x in zip(shards, xs, strict=False)]
        program = jaxprs.Program(jaxpr, values)
        return _whole(_Reader().run(program, xs[number:]))

    trace = jax.make_jaxpr(of_parts, axis_env=facts.devices.window)
    new: Any = trace(*types, *(x.aval for x in jaxpr.invars))
    parts = [x.part if x else y for x, y in zip(shards, consts, strict=True)]
    return jaxprs.Program(
        jaxprs.with_constants(new.jaxpr, number), [*new.consts, *parts]
    )


class _Reader(NamedTuple):
    """Runs programs, some values of which are a `Shard`.

    Attributes:
      in_loop: True in a loop, which gathers for one iteration at a time, so that no
        order has to be kept.
      in_checkpoint: True if the backward pass computes everything again.
    """

    in_loop: bool = False
    in_checkpoint: bool = False

    def run(self, program: jaxprs.Program, args: Sequence[Any]) -> list[Any]:
        """The results of a program."""
        apply = functools.partial(self.applied, program.jaxpr)
        return jaxprs.evaluate(program, args, apply)

    def applied(
        self, jaxpr: core.Jaxpr, e: core.JaxprEqn, values: list[Any]
    ) -> Sequence[Any] | None:
        """The results of an equation; None if it reads no `Shard`."""
        if not any(isinstance(x, Shard) for x in values):
            return None
        if moved := _moved(e, values):
            return moved
        kind, bodies = jaxprs.kind(e), jaxprs.inner(e)
        if kind == "call":
            return self.run(bodies[0], values)
        if kind == "checkpoint":
            inside = self._replace(in_checkpoint=True)
            body = lambda *xs: _whole(inside.run(bodies[0], xs))  # noqa: E731
            return checkpoints.checkpointed(e, body)(*values)
        if kind == "scan":
            how, inside = jaxprs.scan_of(e), self._replace(in_loop=True)
            consts, carry, slices = how.split(values)
            xs = [*consts, *_whole(carry), *map(_sliced, slices)]
            return jaxprs.scan(how, lambda xs: _whole(inside.run(how.body, xs)), xs)

        def use(*values: Any) -> list[Any]:
            return jaxprs.bind(jaxpr, [e], e.invars, e.outvars, _whole(values))

        if bodies:
            name = e.primitive.name
            left_alone(e, f"{name} gets an array that is gathered before")
        if e.effects or any(map(jaxprs.is_reference, e.invars)):
            return use(*values)
        values = values if self.in_loop else _after_other_operands(values)
        return (use if self.in_checkpoint else jax.checkpoint(use))(*values)


def _whole(xs: Sequence[Any]) -> list[Any]:
    return [x.whole() if isinstance(x, Shard) else x for x in xs]


def _sliced(x: Any) -> Any:
    """An operand over which a scan runs, whose slices have one dimension less."""
    if not isinstance(x, Shard):
        return x
    return x.of(x.part, x.dim - 1) if x.dim else x.whole()


def _after_other_operands(values: Sequence[Any]) -> list[Any]:
    """Operands, whose parts wait until the others are computed.

    Otherwise XLA may gather several layers at once.
    """

    def after(x: Any) -> Any:
        if not isinstance(x, Shard):
            return x
        alike = [
            jax.lax.stop_gradient(y)
            for y in values
            if isinstance(y, jax.core.Tracer)
            and jaxprs.is_inexact(y)
            and meshes.varying(y) == meshes.varying(x.part)  # for jax 0.10
        ]
        return x.of(jax.lax.optimization_barrier((x.part, *alike))[0])

    return list(map(after, values))


def _moved(e: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
    """The parts of an equation's results, computed from the part; or None."""
    [x, *rest], p, name = values, e.params, e.primitive.name
    if not isinstance(x, Shard):
        return None
    d, new = x.dim, {}
    before: Any = e.invars[0].aval
    after: Any = e.outvars[0].aval
    if name in _PLACES and not meshes.explicit_names(before.sharding.mesh):
        return [x]  # the compiler knows the sharding
    if name in ("slice", "dynamic_slice"):
        key = "limit_indices" if name == "slice" else "slice_sizes"
        if p[key][d] != before.shape[d] or after.shape[d] != before.shape[d]:
            return None
        new = {key: tuple(jaxprs.put(p[key], [d], [x.part.shape[d]]))}
    elif name == "transpose":
        d = p["permutation"].index(d)
    elif name in ("squeeze", "unstack"):
        gone = p["dimensions"] if name == "squeeze" else (p["axis"],)
        if d in gone:
            return None
        d -= sum(i < d for i in gone)
    elif name != primitives.CAST or p["new_dtype"].itemsize > before.dtype.itemsize:
        return None
    out = e.primitive.bind(x.part, *rest, **(p | new))
    out = out if e.primitive.multiple_results else [out]
    return [x.of(part, d) for part in out]


_PLACES = (primitives.CONSTRAINT, "reshard")


@functools.cache
def _gather() -> core.Primitive:
    """The primitive of `Shard.whole`, which has no effects."""

    def gather(x: Any, *, dim: int, axes: Axes) -> list[jax.Array]:
        return [jax.lax.all_gather(x, axes, axis=dim, tiled=True)]

    def types(x: Any, **how: Any) -> Any:
        jaxpr = jaxprs.program_of(functools.partial(gather, **how), x).jaxpr
        return [out.aval for out in jaxpr.outvars], core.no_effects

    def plain(**how: Any) -> Any:
        return functools.partial(gather, **how), 1

    def batched(_: Any, xs: Any, dims: Any, **how: Any) -> Any:
        return jax.vmap(functools.partial(gather, **how), dims)(*xs)

    def derived(xs: Any, _: Any, dots: Any, **how: Any) -> Any:
        return _gather().bind(*xs, **how), {0: gather(*dots, **how)[0]}

    how = new_primitive.How(plain, batched, derived, gather, types)
    return new_primitive.primitive(primitives.GATHER_PARTS, how)


# -- Chosen when a program is lowered --------------------------------------------------


def either(
    plain: Callable[..., Any],
    other: Callable[..., Any],
    args: Any,
    watched: Sequence[Any],
    axes: Axes,
) -> Any:
    """`plain(args)` or `other(args)`, which are equal, by the sharding of arguments.

    The program is `other` if `axes` of the mesh split most of the elements of the
    `watched` arguments. In `jax.jit` JAX knows this when it lowers the program: for
    arguments of the program, and for results of `with_sharding_constraint`.
    """
    flat = jax.tree.leaves(args)
    closed, shapes = jax.make_jaxpr(plain, return_shape=True)(args)
    both = closed, jax.make_jaxpr(other)(args)
    if any(x.effects or any(map(jaxprs.is_reference, x.jaxpr.constvars)) for x in both):
        return plain(args)
    first, second = (jaxprs.without_constants(x.jaxpr) for x in both)
    consts = [list(x.consts) for x in both]
    n, m = map(len, consts)
    ids = {id(x) for x in watched}
    out = _either().bind(
        *consts[0],
        *consts[1],
        *flat,
        plain=core.ClosedJaxpr(first, ()),
        other=core.ClosedJaxpr(second, ()),
        numbers=(n, m),
        watched=tuple(n + m + i for i, x in enumerate(flat) if id(x) in ids),
        axes=axes,
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


@functools.cache
def _either() -> core.Primitive:
    def plain_one(
        *xs: Any, plain: Any, numbers: tuple[int, int], **_: Any
    ) -> list[Any]:
        n, m = numbers
        return core.jaxpr_as_fun(plain)(*xs[:n], *xs[n + m :])

    def run_other(*xs: Any, other: Any, numbers: tuple[int, int], **_: Any) -> Any:
        return core.jaxpr_as_fun(other)(*xs[numbers[0] :])

    def types(*_: Any, plain: Any, **__: Any) -> Any:
        return list(plain.out_avals), core.no_effects

    def as_plain(plain: Any, numbers: tuple[int, int], **_: Any) -> Any:
        number = len(plain.in_avals) + numbers[1]
        return functools.partial(plain_one, plain=plain, numbers=numbers), number

    def batched(_: Any, xs: Any, dims: Any, **how: Any) -> Any:
        return jax.vmap(functools.partial(plain_one, **how), dims)(*xs)

    def derived(xs: Any, moved: Any, dots: Any, **how: Any) -> Any:
        fun = functools.partial(plain_one, **how)
        return new_primitive.differentiated(fun, xs, moved, dots)

    def lowered(context: Any, *xs: Any, watched: Any, axes: Axes, **how: Any) -> Any:
        sizes = {i: jaxprs.numbers(context.avals_in[i].shape) for i in watched}
        split = sum(n for i, n in sizes.items() if _is_split(xs[i], axes))
        chosen = run_other if 2 * split > sum(sizes.values()) else plain_one
        fun = functools.partial(chosen, **how)
        return mlir.lower_fun(fun, multiple_results=True)(context, *xs)

    how = new_primitive.How(as_plain, batched, derived, plain_one, types)
    new = new_primitive.primitive("ga_optax_either", how)
    mlir.register_lowering(new, lowered, cacheable=False)  # else it sees no argument
    return new


def _is_split(x: Any, axes: Axes) -> bool:
    """True if axes of a mesh are known to split a value of a program in MLIR."""
    try:
        sharding = _sharding(x)
    except (AttributeError, LookupError, TypeError):  # Another JAX may lower otherwise.
        return False
    dims = sharding.split(">, [")[-1].split("], [")[-1].split("replicated")[0]
    return any(re.search(rf'"{name}"(?!=)', dims) for name in axes)


def _sharding(x: Any) -> str:
    """The sharding of a value as a program writes it; "" for a computed value."""
    owner, key = x.owner, "sdy.sharding"
    if isinstance(owner, mlir_ir.Block):
        attributes: Any = owner.owner.attributes["arg_attrs"]
        of_argument = attributes[mlir_ir.BlockArgument(x).arg_number]
        return str(of_argument[key]) if key in of_argument else ""
    is_constraint = owner.name == "sdy.sharding_constraint"
    return str(owner.attributes["sharding"]) if is_constraint else ""


# == Duplicates ========================================================================
# A program that computes nothing twice.
#
# XLA merges equal operations early in a program for several devices, and late in a
# program for a single device. A division by a value that is used twice, for instance,
# stays a division in the first program, and becomes a product with the reciprocal in
# the second. A program without equal operations is compiled alike for both.


def duplicates_merged(program: jaxprs.Program, facts: Facts) -> jaxprs.Program:
    """A program without inner `jit`s, where equal equations are one, also in loops."""
    return program._replace(jaxpr=_merged(program.jaxpr))


def _merged(jaxpr: core.Jaxpr) -> core.Jaxpr:
    equations: list[core.JaxprEqn] = []
    results: dict[Any, list[core.Var]] = {}  # by what equal equations have in common
    merge_inner = functools.cache(_merged)  # a program that is run twice stays one

    def append(key: Any, avals: Any, equation: core.JaxprEqn) -> list[core.Var]:
        """The results of an equation, or of an equal one that is there already."""
        if key is None or key not in results:
            results[key] = list(map(core.Var, avals))
            equations.append(equation.replace(outvars=results[key]))
        return results[key]

    def broadcast(x: Any, like: Any, at: core.JaxprEqn) -> Any:
        """`x` in the shape of a result: otherwise every reader would broadcast `x`."""
        if isinstance(x, core.Literal) or x.aval.shape == like.shape:
            return x
        place = like.sharding if any(like.sharding.spec) else None
        aval = x.aval.update(shape=like.shape, sharding=like.sharding)

        def broadcasted(y: jax.Array) -> jax.Array:
            dims = range(y.ndim)
            return jax.lax.broadcast_in_dim(y, like.shape, dims, out_sharding=place)

        [new] = jaxprs.traced(broadcasted, [x], core.Var(aval), at)
        return append((x, like.shape), [aval], new)[0]

    def visit(jaxpr: core.Jaxpr, names: dict[Any, Any]) -> list[Any]:
        """Appends the equations; `names` maps old variables to new ones."""
        for old in jaxpr.eqns:
            equation = old.replace(invars=jaxprs.rename(old.invars, names))
            if primitives.entry_of(equation).broadcasts and len(equation.invars) > 1:
                aval = old.outvars[0].aval
                invars = [broadcast(x, aval, old) for x in equation.invars]
                equation = equation.replace(invars=invars)
            if _is_inlined(equation):
                [inner] = jaxprs.inner_programs(equation)
                pairs = zip(inner.invars, equation.invars, strict=True)
                outvars = visit(inner, dict(pairs))
            else:
                if jaxprs.kind(equation) not in (None, "call"):
                    equation = jaxprs.with_inner(equation, merge_inner)
                avals = [v.aval for v in equation.outvars]
                outvars = append(_key_of_equation(equation), avals, equation)
            names.update(zip(old.outvars, outvars, strict=True))
        return jaxprs.rename(jaxpr.outvars, names)

    outvars = visit(jaxpr, {})
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _is_inlined(equation: core.JaxprEqn) -> bool:
    """True for a `jit` without shardings or constants, which only names a program."""
    if jaxprs.kind(equation) != "call":
        return False
    [inner] = jaxprs.inner(equation)
    places = [equation.params.get(k, ()) for k in ("in_shardings", "out_shardings")]
    is_placed = any(type(x).__name__ != "UnspecifiedValue" for p in places for x in p)
    if is_placed or inner.consts:
        left_alone(equation, "a jitted function with shardings or constants")
    return not (is_placed or inner.consts)


def _key_of_equation(equation: core.JaxprEqn) -> Any:
    """A key that equal equations share; None for an equation that has no equal."""
    variables = *equation.invars, *equation.outvars
    if any(map(jaxprs.is_reference, variables)):
        return None
    if equation.effects or equation.primitive.name == "rng_uniform":
        if jaxprs.kind(equation) is None:  # equations inside are logged by themselves
            left_alone(equation, f"{equation.primitive.name} does more than compute")
        return None
    return jaxprs.key_of(equation, lambda x: x)


def constraint_on(
    x: Any, result: core.Var, sharding: NamedSharding, at: core.JaxprEqn
) -> core.JaxprEqn:
    """An equation that constrains `x` to a sharding."""

    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding)

    [equation] = jaxprs.traced(constrained, [x], result, at)
    return equation
