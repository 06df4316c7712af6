"""The program of `fun` as one flat list of equations, which shows every collective."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._devices import collectives
from ga_optax._inside.axis.rules import RULES, is_collective
from ga_optax._passes import ir, places, references
from ga_optax._passes.ir import bind, is_mark, variables

# A scan of more iterations than this with a collective in it is an error: each would
# be a level of its own, which costs a pass over the window and compile time.
LONGEST = 32


def mentions(equation: core.JaxprEqn, axis: str) -> bool:
    """Whether an equation, or one inside it, refers to the axis."""
    marked = any(is_mark(e, axis) for e in ir.within(equation))
    return marked or ir.mentions(equation, axis)


def flat(
    jaxpr: core.Jaxpr, args: Sequence[Any], axis: str, size: int
) -> tuple[core.Jaxpr, Sequence[Any]]:
    """The same program in one list of equations, and the values of its constants.

    Args:
      jaxpr: the program.
      args: values for its constants and its arguments.
      axis: the name of the axis.
      size: its size.
    """
    count = len(jaxpr.constvars)

    def run(*args: Any) -> list[Any]:
        return _opened(ir.Program(jaxpr, args[:count]), args[count:], axis)

    closed: Any = jax.make_jaxpr(run, axis_env=[(axis, size)])(*args)
    return closed.jaxpr, closed.consts


def without_collectives(closed: Any, args: Sequence[Any], axis: str, size: int) -> Any:
    """The same with something linear of the same type for each collective.

    It can be differentiated: JAX transposes an untiled `all_to_all` to another shape.
    """
    program = ir.Program(*flat(closed.jaxpr, [*closed.consts, *args], axis, size))

    def alike(x: jax.Array, out: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.sum(x, dtype=x.dtype), out.aval.shape)

    def rule(equation: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
        if is_collective(equation, axis):
            return list(map(alike, values, equation.outvars))
        if equation.primitive.name == "axis_index":
            return [collectives.zeros(equation.outvars[0].aval)]
        return None

    def run(*args: Any) -> list[Any]:
        return ir.evaluate(program, [*closed.consts, *args], rule)

    return jax.make_jaxpr(run, axis_env=[(axis, size)])(*args)


def _opened(
    program: ir.Program, args: Sequence[Any], axis: str, around: Any = None
) -> list[Any]:
    """The results of a program, with what is inside its equations in the open.

    `around` is the source of the equation that it is inside of.
    """

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
        placed = places.placed(equation, around)
        if ir.kind(equation) == "call" and not references.is_group(equation):
            [inner] = ir.inner(equation)
            return _opened(inner, values, axis, placed.source_info)
        if mentions(equation, axis):
            return _open(equation, values, axis)
        if placed is equation:
            return None
        return bind(program.jaxpr, [placed], placed.invars, placed.outvars, values)

    program = program._replace(jaxpr=references.grouped(program.jaxpr))
    return ir.evaluate(program, args, rule)


def _open(
    equation: core.JaxprEqn, values: list[Any], axis: str
) -> Sequence[Any] | None:
    name, kind = equation.primitive.name, ir.kind(equation)
    if name in (*RULES, "axis_index") or is_mark(equation, axis):
        _check_collective(equation, axis)
        if dimensions := [x for x in ir.axes_of(equation) if isinstance(x, int)]:
            reduce, collective = _REDUCTIONS[name]
            return [collective(reduce(x, dimensions), axis) for x in values]
        return None
    if kind == "checkpoint":
        return _checkpointed(equation, values, axis)
    if kind == "scan" and ir.times(equation) <= LONGEST:
        return _unrolled(ir.scan_of(equation), equation.outvars, values, axis)
    raise NotImplementedError(_not_done(equation, axis))


# Inside of a `jax.vmap`, over its name too, they reduce dimensions of their operands.
_REDUCTIONS = {
    "psum": (jax.lax.reduce_sum, jax.lax.psum),
    "pmax": (jax.lax.reduce_max, jax.lax.pmax),
    "pmin": (jax.lax.reduce_min, jax.lax.pmin),
}


def _checkpointed(equation: core.JaxprEqn, values: list[Any], axis: str) -> list[Any]:
    """A `jax.checkpoint` of each piece between its collectives."""
    [(inside, inner_consts)] = ir.inner(equation)
    values = [*inner_consts, *values]
    size = jax.lax.psum(1, axis)
    program, consts = flat(inside, values, axis, size)
    given = [*program.constvars, *program.invars]
    env = dict(zip(given, [*consts, *values], strict=True))
    level: dict[Any, int] = {}
    pieces: dict[tuple[int, bool], list[core.JaxprEqn]] = {}
    for e in program.eqns:
        alone = mentions(e, axis)
        its = alone + max((level.get(x, 0) for x in variables(e.invars)), default=0)
        level.update(dict.fromkeys(e.outvars, its))
        pieces.setdefault((its, not alone), []).append(e)
    smooth = ir.following(program, given, ("stop_gradient",))
    for (_, several), piece in sorted(pieces.items(), key=lambda item: item[0]):
        others = [
            e.invars for group in pieces.values() if group is not piece for e in group
        ]
        outside = set(variables([*itertools.chain(*others), *program.outvars]))
        made = [v for e in piece for v in e.outvars if v in outside]
        read = [x for e in piece for x in variables(e.invars) if x in env]
        run = functools.partial(bind, program, piece, read, made)
        operands = [env[x] for x in read]
        if several:
            run = ir.checkpointed(equation, run)
        else:  # A stop_gradient inside a checkpoint is not seen from outside.
            operands = [
                x if var in smooth else jax.lax.stop_gradient(x)
                for var, x in zip(read, operands, strict=True)
            ]
        env.update(zip(made, run(operands), strict=True))
    return [_value(x, env) for x in program.outvars]


def _unrolled(
    scan: ir.Scan, results: Sequence[Any], values: list[Any], axis: str
) -> list[Any]:
    """The iterations of a scan, one after the other."""
    consts, carry, slices = scan.split(values)
    slices, stacked = list(map(_along_axis_0, slices)), []
    order = range(scan.length)
    for i in reversed(order) if scan.reverse else order:
        args = [*consts, *carry, *(x[i] for x in slices)]
        out = _opened(scan.body, args, axis)
        carry = out[: scan.num_carry]
        stacked.append(out[scan.num_carry :])
    if scan.reverse:
        stacked.reverse()
    if not stacked:
        made = results[scan.num_carry :]
        return [*carry, *(collectives.zeros(x.aval) for x in made)]
    return [*carry, *(jnp.stack(xs) for xs in zip(*stacked, strict=True))]


def _along_axis_0(x: jax.Array) -> list[jax.Array]:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return list(x)
    # A split, whose gradient is one concatenation, and not a sum of padded slices.
    return [part.squeeze(0) for part in jax.lax.split(x, [1] * len(x))]


def _value(x: Any, env: dict[Any, Any]) -> Any:
    return x.val if isinstance(x, core.Literal) else env[x]


# -- What cannot be done ---------------------------------------------------------------


def _check_collective(equation: core.JaxprEqn, axis: str) -> None:
    axes, groups = ir.axes_of(equation), equation.params.get("axis_index_groups")
    others = [name for name in axes if name != axis and not isinstance(name, int)]
    if others or groups is not None:
        what = f"axes {tuple(axes)}" if groups is None else "axis_index_groups"
        raise NotImplementedError(
            f"A collective must be over axis_name={axis!r} alone, and over all of it, "
            f"but fun calls {equation.primitive.name} with {what}. Split it in two."
        )


def _inside(equation: core.JaxprEqn, axis: str) -> str:
    """The name of the first primitive in an equation that refers to the axis."""
    inside = (e for e in ir.within(equation) if not ir.inner_programs(e))
    return next((e for e in inside if mentions(e, axis)), equation).primitive.name


def _not_done(equation: core.JaxprEqn, axis: str) -> str:
    name, inner = equation.primitive.name, _inside(equation, axis)
    if name == inner:
        return (
            f"A collective over axis_name={axis!r} must be one of "
            f"{', '.join(RULES)}, but fun calls {name}. Write it with those."
        )
    todo = "Take the collective out of it."
    if name == "scan":
        length = equation.params["length"]
        name = f"a scan of {length} iterations"
        todo = f"Unroll those that communicate; up to {LONGEST} are unrolled for you."
    elif name.startswith("custom_"):
        todo = "Take the collective out of the function with the rule."
    elif references.is_group(equation):
        name, todo = "what works on references", "Communicate before it, or after it."
    elif name == "cond":
        todo = "Communicate before it, on all micro-batches, and choose afterwards."
    return (
        f"Collectives over axis_name={axis!r} must be seen one by one, but fun calls "
        f"{inner} inside {name}. {todo}"
    )
