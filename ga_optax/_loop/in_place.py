"""Gradients that are added in place, inside of the backward pass."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._checks import is_on_host
from .._devices import meshes
from .._passes import checkpoints, jaxprs, new_primitive, places, primitives, shared
from .._passes.effects import Reason
from .._passes.primitives import ADD_TO, NEW_REF, PUT
from . import micro_step
from .micro_step import LossProgram, Operands

# == In place or not ===================================================================
# The choice of the gradients that the backward pass adds to the accumulator.
#
# If a model scans over a parameter (stacked layers), the backward pass can add the
# gradient to the accumulator slice by slice, through a reference, so that no second
# gradient tree exists. `arrival` reads off the program of `fun` for which parameters
# these additions have the bits of the plain sum; `reasons_not_in_place` lists the other
# conditions. For the other parameters XLA reuses the buffers by itself.

# A leaf of so small a part of the largest saves no memory. And the gradient of a
# vector, such as a bias, is no matrix product into which XLA could fuse the addition:
# each layer would take one more kernel.
_SMALL = 1000


def reasons_not_in_place(
    program: LossProgram, operands: Operands, scattered: Mapping[int, Any]
) -> list[Reason | None]:
    """For each leaf the reason why it is not added in place; None if it is.

    Args:
      program: that of the loss.
      operands: those of the loop.
      scattered: the gradients that are scattered before they are added, and how.
    """
    off = "" if program.optimize else "optimize=False"
    if not off and not micro_step.HAS_REFS:
        off = f"jax {jax.__version__} is older than 0.11.1"
    if not off and program.multiplies:  # the weight needs the gradient by itself
        off = "weights multiply the gradients"
    largest = max((jaxprs.numbers(x.shape) for x in operands.params), default=0)

    def reason(i: int, total: jax.Array, param: jax.Array) -> Reason | None:
        jaxpr, dtype, arrives = program.jaxpr, total.dtype, program.arrivals[i]
        variable = jaxpr.invars[i]
        if off:
            return Reason(off)
        if arrives is None:
            line = shared.use_of(jaxpr, variable)
            return Reason("used more than once, or not only in sums over rows", line)
        if arrives != "slices":
            why = "no scan runs over the parameter itself: XLA reuses the buffer"
        elif i in scattered and shared.is_cut(jaxpr, i, scattered[i]):
            why = "grad_specs split a dimension that a scan runs over"
        elif jaxprs.numbers(param.shape) * _SMALL < largest:
            why = f"less than 1/{_SMALL} of the largest: added as a whole"
        elif is_on_host(param) and not shared.is_moved_in(jaxpr, variable):
            why = "the parameter lies on the host, and not one move alone reads it"
        elif jnp.finfo(dtype).bits < max(32, jnp.finfo(param.dtype).bits):
            why = f"{dtype} would round too often"
        # The mesh of the gradient: a program may be written without a mesh.
        elif not meshes.same_mesh(jax.typeof(total), variable.aval):
            why = "the accumulator has another mesh"
        else:  # custom rules do not go with effects, such as printing or a collective
            return program.side_effects.reordering
        return Reason(why)

    return list(map(reason, itertools.count(), operands.acc.total, operands.params))


# -- The log ---------------------------------------------------------------------------


def log_in_place(names: Sequence[str], whys: Sequence[Reason | None]) -> None:
    """Logs the leaves with names, added in place or, with the reason, not."""
    pairs = []
    for name, why in zip(names, whys, strict=False):
        what = f"not added in place ({why.why})" if why else "added in place"
        pairs.append((what, f"{name} at {why.line}" if why and why.line else name))
    for what, members in places.by_reason(pairs):
        places.log_sentence(f"Gradients {what}: {members}.")


# == Parameters in the host's memory ===================================================
# Their gradients stay on the device.
#
# JAX moves the gradient of what was moved in back to the host, and nothing is added up
# there. So a stand-in on the device is differentiated, a second operand of the move,
# whose value nothing reads. In a scan over layers it is sliced as the parameter is, and
# its gradient can be added in place.


@jax.custom_jvp
def _stand_in(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x`, which has the derivative of `x + other`."""
    del other
    return x


_stand_in.defjvps(lambda t, *_: t, lambda t, *_: t)


def with_stand_ins(
    program: jaxprs.Program, params: Sequence[jax.Array], rest: Sequence[jax.Array]
) -> tuple[jaxprs.Program, Sequence[jax.Array], Sequence[jax.Array]]:
    """A program of stand-ins for parameters that are moved in, and its arguments."""
    types = {
        i: x.aval.update(memory_space=jax.memory.Space.Device)
        for i, x in enumerate(program.jaxpr.invars[: len(params)])
        if shared.is_moved_in(program.jaxpr, x)
    }
    if not types:
        return program, params, rest

    def differentiated(*args: jax.Array) -> list[Any]:
        some, args = args[: len(params)], args[len(params) :]
        here = jaxprs.put(some, types, args[: len(types)])
        stand_ins = {i: some[i] for i in types}
        return _with_stand_ins(program, [*here, *args[len(types) :]], stand_ins)

    some = jaxprs.put(params, types, micro_step.blank([*types.values()]))
    rest = [*(params[i] for i in types), *rest]
    return jaxprs.program_of(differentiated, *some, *rest), some, rest


def _with_stand_ins(
    program: jaxprs.Program, args: Sequence[Any], of: Mapping[int, jax.Array]
) -> list[Any]:
    """The results of a program, some of whose arguments have stand-ins, by place."""
    if not of:
        return jaxprs.results(program, args)
    stand_in_of: Any = {program.jaxpr.invars[i]: x for i, x in of.items()}

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
        pairs = enumerate(equation.invars)
        its = {i: stand_in_of[x] for i, x in pairs if jaxprs.is_among(x, stand_in_of)}
        if not its:
            return None
        if equation.primitive.name == PUT:
            ins, outs = equation.invars, equation.outvars
            moved = jaxprs.bind(program.jaxpr, [equation], ins, outs, values)
            return jaxprs.put(
                moved, its, [_stand_in(moved[i], x) for i, x in its.items()]
            )
        [body] = jaxprs.inner(equation)  # `shared.is_moved_in` knows of no other

        def inside(xs: Sequence[Any]) -> list[Any]:
            num = len(body.jaxpr.invars)
            return _with_stand_ins(
                body, xs[:num], dict(zip(its, xs[num:], strict=True))
            )

        xs = [*values, *its.values()]
        if jaxprs.kind(equation) == "scan":
            return jaxprs.scan(jaxprs.scan_of(equation), inside, xs)
        if jaxprs.kind(equation) == "checkpoint":
            return checkpoints.checkpointed(equation, lambda *xs: inside(xs))(*xs)
        return inside(xs)

    return jaxprs.evaluate(program, args, rule)


# == Sending ===========================================================================
# Gradients that are scattered over devices inside of the backward pass.
#
# The backward pass adds a gradient to a reference, slice by slice if the model scans
# over layers. Here each slice is scattered first: the program of the backward pass runs
# equation by equation, and a function gets each gradient in place of the reference.

# Adds a gradient, or a slice of it, to the reference that `write_gradients` got.
Write = Callable[[Any, jax.Array], None]


def write_gradients(
    backward: Callable[..., list[jax.Array]],
    types: Sequence[Any],
    refs: Sequence[Any],
    writes: Sequence[Write],
) -> list[jax.Array]:
    """`backward(*references)`, with `writes` in place of the additions to references.

    Args:
      backward: adds a gradient to each reference, and does nothing else with it.
      types: the types of these gradients.
      refs: a reference for each of `writes`; in a scan over slices of the gradient,
        `writes` get the slices of the reference.
      writes: a function of the reference and of the gradient.
    """
    program = jaxprs.program_of(
        lambda: backward(*map(jax.new_ref, micro_step.blank(types)))
    )
    equations = program.jaxpr.eqns
    new_refs = [e for e in equations if e.primitive.name == NEW_REF][: len(types)]
    rest = [e for e in equations if e not in new_refs]
    invars = [e.outvars[0] for e in new_refs]
    jaxpr = program.jaxpr.replace(invars=invars, eqns=rest)
    return _write(program._replace(jaxpr=jaxpr), writes, refs)


def _write(
    program: jaxprs.Program, writes: Sequence[Write | None], args: Sequence[Any]
) -> list[Any]:
    """The results of a program. `writes` is None for an argument of another kind."""
    write_of: Any = dict(zip(program.jaxpr.invars, writes, strict=True))

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
        ins = equation.invars
        inner = [write_of.get(x) if jaxprs.is_variable(x) else None for x in ins]
        if not any(inner):
            return None
        if equation.primitive.name == ADD_TO:
            inner[0](*values)  # pyrefly: ignore[not-callable]
            return ()
        # A jitted function, or a scan: see `is_cut`.
        [body] = jaxprs.inner(equation)
        inside = functools.partial(_write, body, inner)
        if jaxprs.kind(equation) == "scan":
            return jaxprs.scan(jaxprs.scan_of(equation), inside, values)
        return inside(values)

    return jaxprs.evaluate(program, args, rule)


# == Loops with references =============================================================
# A program with references, which is transformed as a plain one that does the same.
#
# References can be neither batched nor differentiated. No custom rule of JAX serves all
# of batching, forward and reverse mode, and allows references; so this is a primitive.
# It runs as the program with references, and JAX batches, differentiates and checks
# (`checkify`) the plain program.

Run = Callable[[Any], Any]


def with_rules_of(plain: Run, run: Run) -> Run:
    """`run`, which JAX transforms as if it were `plain`; both take one tree."""

    def bound(tree: Any) -> Any:
        flat, structure = jax.tree.flatten(tree)
        program, shapes = jax.make_jaxpr(run, return_shape=True)(tree)

        def flat_plain(*args: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(plain(jax.tree.unflatten(structure, args)))

        out = _primitive().bind(*flat, program=program, plain=flat_plain)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return bound


@functools.cache
def _primitive() -> core.Primitive:
    """The primitive, registered at the first use."""

    def derived(args: Any, moved: Any, dots: Any, *, plain: Any, **_: Any) -> Any:
        return new_primitive.differentiated(plain, args, moved, dots)

    def batched(_: Any, args: Any, axes: Any, *, plain: Any, **__: Any) -> Any:
        return jax.vmap(plain, in_axes=axes)(*args)

    how = new_primitive.How(
        lambda program, plain, **_: (plain, len(program.in_avals)),
        batched,
        derived,
        types=lambda *_, program, **__: (program.out_avals, core.no_effects),
    )
    return new_primitive.primitive(primitives.WINDOW, how)
