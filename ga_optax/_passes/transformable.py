"""A program with references, which is transformed as a plain one that does the same.

References can be neither batched nor differentiated. No custom rule of JAX serves all
of batching, forward and reverse mode, and holds references; so this is a primitive. It
is run as the program with references, and batched, differentiated and checked
(`checkify`) as the plain one.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from ga_optax._passes import ir

Run = Callable[[Any], Any]


def with_rules_of(plain: Run, run: Run, typed: bool = False) -> Run:
    """`run`, which is transformed as if it were `plain`; both of one argument, a tree.

    If `typed`, its results have the types of `plain`, too: sums that were reduced in a
    reference are the same on all devices, and its type does not say so. The result is
    `plain` itself, with a warning, if this version of JAX lacks what that takes.
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
        if typed:
            types = tuple(jax.make_jaxpr(plain)(tree).out_avals)
        out = primitive.bind(*flat, program=program, plain=flat_plain, types=types)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return bound


@functools.cache
def _primitive() -> core.Primitive | None:
    """The primitive, made when it is first used; None if JAX has no such rules."""
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
    from jax.experimental import checkify
    from jax.interpreters import ad, batching, mlir

    def run(*args: Any, program: Any, **_: Any) -> Any:
        return core.jaxpr_as_fun(program)(*args)

    def derived(args: Any, tangents: Any, *, plain: Any, **_: Any) -> Any:
        moved = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]

        def of_moved(*some: jax.Array) -> list[jax.Array]:
            new = dict(zip(moved, some, strict=True))
            return plain(*[new.get(i, x) for i, x in enumerate(args)])

        return jax.jvp(of_moved, [args[i] for i in moved], [tangents[i] for i in moved])

    new = core.Primitive("ga_optax_window")
    new.multiple_results = True
    new.def_impl(run)
    new.def_abstract_eval(lambda *args, types, **_: types)
    checks = sys.modules[checkify.checkify.__module__].error_checks
    mlir.register_lowering(new, mlir.lower_fun(run, multiple_results=True))
    batching.primitive_batchers[new] = _batched
    ad.primitive_jvps[new] = derived
    checks[new] = functools.partial(_checked, checks)
    return new


def _batched(args: Any, axes: Any, *, plain: Any, **_: Any) -> tuple[Any, Any]:
    out = jax.vmap(plain, in_axes=axes)(*args)
    return out, [0] * len(out)


def _checked(checks: Any, *args: Any, program: Any, plain: Any, **_: Any) -> Any:
    """What `checkify` makes of the plain program: what it makes of a jitted function.

    Before the values, its rules have arguments that differ between versions of JAX.
    """
    number = len(args) - len(program.in_avals)
    before, values = args[:number], args[number:]
    closed: Any = jax.make_jaxpr(jax.jit(plain))(*values)
    errors: list[Any] = []

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Any:
        check = checks[equation.primitive]
        error, out = check(*before, *values, **equation.params)
        errors.append(error)
        return out

    results = ir.evaluate(closed, values, rule)
    [error] = errors  # of the jitted function
    return error, results
