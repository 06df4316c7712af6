"""New primitives: an equation of JAX that runs a program of ours."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import checkify
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from . import jaxprs


def _ran(*args: Any, program: Any, **_: Any) -> Any:
    """The results of a primitive whose parameter `program` is its program.

    JAX checks them for NaN if asked to, which `jaxpr_as_fun` turns off.
    """
    return jaxprs.results(program, args)


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
    lowered = mlir.lower_fun(how.run, multiple_results=True)
    mlir.register_lowering(new, lowered, cacheable=False)
    batching.fancy_primitive_batchers[new] = batched
    ad.primitive_jvps[new] = derived
    checked(new, how.plain)
    return new


def differentiated(
    fun: Callable[..., Any], xs: Sequence[Any], moved: Sequence[int], dots: Any
) -> tuple[Any, dict[int, Any]]:
    """The results of a function, and tangents by number, as in `How.derived`."""
    some = [xs[i] for i in moved]
    out, tangents = jax.jvp(jaxprs.of_some(fun, xs, moved), some, list(dots))
    return out, dict(enumerate(tangents))


def valued(fun: Callable[..., Any], moving: Sequence[int]) -> Callable[..., Any]:
    """A function as it is beside its tangents: without the rules that gave these.

    Differentiated once more, a value is differentiated as its rule computes it.
    """

    def flat(*xs: Any) -> Any:
        some = [xs[i] for i in moving]
        return jax.vjp(jaxprs.of_some(fun, xs, moving), *some)[0]

    return flat


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

        results = jaxprs.evaluate(closed, values, of_function)
        [error] = errors
        return error, results

    checks[primitive] = rule
