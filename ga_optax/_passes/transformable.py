"""A program with references, which is transformed as a plain one that does the same.

References can be neither batched nor differentiated. No custom rule of JAX serves all
of batching, forward and reverse mode, and allows references; so this is a primitive. It
runs as the program with references, and JAX batches, differentiates and checks
(`checkify`) the plain program.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval

from ga_optax._passes import interpret, primitives

Run = Callable[[Any], Any]


def with_rules_of(plain: Run, run: Run) -> Run:
    """`run`, which JAX transforms as if it were `plain`; both take one tree.

    The result is `plain`, with a warning, if this version of JAX lacks the interfaces.
    """

    def bound(tree: Any) -> Any:
        primitive = _primitive()
        if primitive is None:
            return plain(tree)
        flat, structure = jax.tree.flatten(tree)
        program, shapes = jax.make_jaxpr(run, return_shape=True)(tree)

        def flat_plain(*args: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(plain(jax.tree.unflatten(structure, args)))

        types = tuple(program.out_avals)
        out = primitive.bind(*flat, program=program, plain=flat_plain, types=types)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return bound


@functools.cache
def _primitive() -> core.Primitive | None:
    """The primitive, registered at the first use; None if this JAX cannot do so."""
    try:
        return _registered()
    except Exception as error:  # Any: what JAX will change is not known.
        warnings.warn(
            f"ga_optax adds no gradients in place with jax {jax.__version__}: "
            f"{type(error).__name__}: {error}. Results are the same and take more "
            "memory. Use a newer ga_optax; optimize=False runs the plain loop without "
            "this warning.",
            stacklevel=2,
        )
        return None


def _registered() -> core.Primitive:
    def derived(args: Any, moved: Any, dots: Any, *, plain: Any, **_: Any) -> Any:
        return differentiated(plain, args, moved, dots)

    def batched(_: Any, args: Any, axes: Any, *, plain: Any, **__: Any) -> Any:
        return jax.vmap(plain, in_axes=axes)(*args)

    how = How(
        lambda program, plain, **_: (plain, len(program.in_avals)),
        batched,
        derived,
        types=lambda *args, types, **_: (types, core.no_effects),
    )
    return primitive(primitives.WINDOW, how)


# -- Primitives of ours ----------------------------------------------------------------


def _ran(*args: Any, program: Any, **_: Any) -> Any:
    """The results of a primitive whose parameter `program` is its program."""
    return core.jaxpr_as_fun(program)(*args)


def _types(*_: Any, program: Any, **__: Any) -> tuple[Any, Any]:
    """The types of the results of such a primitive, and the effects."""
    return program.out_avals, program.effects


class How(NamedTuple):
    """The rules of a primitive, whose results are a list.

    Attributes:
      plain: takes the parameters; returns the plain function and the number of its
        operands.
      batched: takes an axis, operands and their axes; returns the results, all batched
        along the first axis.
      derived: takes operands, the numbers of those with tangents, and these tangents;
        returns the results, and tangents by the number of the result.
      run: takes operands, returns results; by default those of the parameter `program`.
      types: the types of the results, and the effects; by default those of `program`.
    """

    plain: Callable[..., Any]
    batched: Callable[..., Sequence[Any]]
    derived: Callable[..., tuple[Any, dict[int, Any]]]
    run: Callable[..., Any] = _ran
    types: Callable[..., tuple[Any, Any]] = _types


def primitive(name: str, how: How) -> core.Primitive:
    """A new primitive with rules."""
    new = core.Primitive(name)

    def batched(axis: Any, xs: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
        if all(d is None for d in dims):
            out = new.bind(*xs, **params)
            return out, [None] * len(out)
        out = how.batched(axis, xs, dims, **params)
        return out, [0] * len(out)

    def derived(xs: Any, dots: Any, **params: Any) -> tuple[Any, Any]:
        moved = [i for i, t in enumerate(dots) if not isinstance(t, ad.Zero)]
        out, tangents = how.derived(xs, moved, [dots[i] for i in moved], **params)
        zeros = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out)
        return out, [tangents.get(i, zero) for i, zero in enumerate(zeros)]

    new.multiple_results = True
    # Newer JAX lowers "high" primitives; those inside are lowered where `run` runs.
    new.is_high = lambda *_, **__: False
    new.def_impl(how.run)
    new.def_effectful_abstract_eval(how.types)
    mlir.register_lowering(
        new, mlir.lower_fun(how.run, multiple_results=True), cacheable=False
    )
    batching.fancy_primitive_batchers[new] = batched
    ad.primitive_jvps[new] = derived
    checked(new, how.plain)
    return new


def in_front(xs: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Operands with their batched axis in front."""
    pairs = zip(xs, dims, strict=True)
    return [x if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]


def differentiated(
    fun: Callable[..., Any], xs: Sequence[Any], moved: Sequence[int], dots: Any
) -> tuple[Any, dict[int, Any]]:
    """The results of a function, and tangents by number, as in `How.derived`."""
    some = [xs[i] for i in moved]
    out, tangents = jax.jvp(interpret.of_some(fun, xs, moved), some, list(dots))
    return out, dict(enumerate(tangents))


def pushed(
    fun: Callable[..., Any], moving: Sequence[int], smooth: Sequence[int]
) -> Callable[..., list[Any]]:
    """A function of operands and tangents of some; returns tangents of some results."""

    def flat(*both: Any) -> list[Any]:
        n = len(both) - len(moving)
        tangents = differentiated(fun, both[:n], moving, both[n:])[1]
        return [tangents[i] for i in smooth]

    return flat


def transposed(primitive: core.Primitive, rule: Callable[..., Sequence[Any]]) -> None:
    """Gives a primitive a transpose.

    `rule` takes the operands, the numbers of the linear ones, and the cotangents by the
    number of the result; it returns the cotangents of the linear operands.
    """

    def every(cts: Any, *xs: Any, **params: Any) -> list[Any]:
        linear = [i for i, x in enumerate(xs) if ad.is_undefined_primal(x)]
        given = {i: ct for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)}
        back = dict(zip(linear, rule(xs, linear, given, **params), strict=True))
        return [back.get(i) for i in range(len(xs))]

    ad.primitive_transposes[primitive] = every


def checked(primitive: core.Primitive, plain: Callable[..., Any]) -> None:
    """Has `checkify` check a primitive as its jitted `How.plain`."""
    # The table of checks, which no public module names.
    checks = sys.modules[checkify.checkify.__module__].error_checks

    def rule(*args: Any, **params: Any) -> Any:
        fun, number = plain(**params)
        # Before the values, rules have arguments that differ between versions of JAX.
        before, values = args[: len(args) - number], args[len(args) - number :]
        closed: Any = jax.make_jaxpr(jax.jit(fun))(*values)
        errors: list[Any] = []

        def of_function(equation: core.JaxprEqn, values: list[Any]) -> Any:
            check = checks[equation.primitive]
            error, out = check(*before, *values, **equation.params)
            errors.append(error)
            return out

        results = interpret.evaluate(closed, values, of_function)
        [error] = errors
        return error, results

    checks[primitive] = rule


def without_unused(primitive: core.Primitive, only: Callable[..., Any]) -> None:
    """Has JAX leave out results of a primitive that nobody reads.

    `only` takes the parameters of an equation, and the numbers of the results to keep;
    it returns the parameters of the equation with these results alone.
    """

    def rule(used: list[bool], *more: Any) -> tuple[list[bool], Any]:
        equation: core.JaxprEqn = more[-1]  # before it, newer JAX has more to say
        every = [True] * len(equation.invars)
        if all(used):
            return every, equation
        if not any(used) and not equation.effects:
            return [False] * len(every), None
        kept = [i for i, is_used in enumerate(used) if is_used]
        outs, params = [equation.outvars[i] for i in kept], equation.params
        return every, equation.replace(outvars=outs, params=only(**params, kept=kept))

    partial_eval.dce_rules[primitive] = rule
