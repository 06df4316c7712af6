"""The same function with every float in float64, whatever dtypes it asks for.

A loss in mixed precision rounds on purpose: it casts to bfloat16 and back. That hides
what `verify` looks for. So the program of the loss is traced in the dtypes of training,
and each of its floats is evaluated in float64. A cast to bfloat16 then changes nothing,
and what is left is the mathematics of the loss, with the random draws of training.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._passes import ir, rowwise

# Primitives that read or make the bits of a float, or run code for certain dtypes.
_FIXED = ("bitcast", "callback", "pallas", "ffi", "custom_call", "cudnn", "scaled")


class Wide:
    """A function in float64, as far as it can be.

    Attributes:
      low: after tracing, the floating dtypes that it still reads.
    """

    def __init__(
        self, fun: Callable[..., Any], *, x64: bool, as_is: bool = False
    ) -> None:
        """Of `fun`, traced under `jax_enable_x64=x64`; `as_is` changes no dtype."""
        self._fun, self._x64, self._as_is = fun, x64, as_is
        self.low: set[np.dtype] = set()

    def __call__(self, *args: Any) -> Any:
        with jax.enable_x64(self._x64):
            program, out = jax.make_jaxpr(self._fun, return_shape=True)(*args)
        inputs = jax.tree.leaves(args)
        if self._as_is:
            self.low.update(*map(_floats, program.eqns))
        else:
            program, *inputs = map(self.widened, (program, *inputs))
        return jax.tree.structure(out).unflatten(ir.results(program, inputs))

    def widened(self, x: Any) -> Any:
        """An array, a dtype or a program in float64; anything else as it is."""
        if hasattr(x, "consts"):
            consts = list(map(self.widened, x.consts))
            return x.replace(jaxpr=self._program(x.jaxpr), consts=consts)
        if hasattr(x, "eqns"):
            return self._program(x)
        if isinstance(x, np.dtype):
            return _wide_dtype(x)
        return cast(x, _wide_dtype(x.dtype)) if hasattr(x, "dtype") else x

    def _program(self, jaxpr: core.Jaxpr) -> core.Jaxpr:
        return ir.retyped(jaxpr, _wide_type, self._written)

    def _written(
        self, equation: core.JaxprEqn, ins: list[Any], outs: list[Any]
    ) -> list[core.JaxprEqn]:
        if any(name in equation.primitive.name for name in _FIXED):
            self.low.update(_floats(equation))
            return _as_it_is(equation, ins, outs)
        params = jax.tree.map(
            self.widened, equation.params, is_leaf=lambda x: hasattr(x, "eqns")
        )
        if equation.primitive.name == rowwise.NAME:
            promise = params["promise"]
            fun = _between_casts(promise.fun, equation, outs)
            params["promise"] = promise._replace(fun=fun)
        elif equation.primitive.name == "reduce_precision":
            params = {"exponent_bits": 11, "mantissa_bits": 52}  # none is lost
        elif "precision" in params:
            params["precision"] = None  # may name a dtype
        return [equation.replace(invars=ins, outvars=outs, params=params)]


def cast(x: Any, dtype: Any) -> Any:
    """An array of that dtype; itself if it is."""
    return x if x.dtype == dtype else x.astype(dtype)


def _between_casts(
    fun: Callable[..., Any], equation: core.JaxprEqn, outs: list[Any]
) -> Callable[..., Any]:
    """A function of wide operands of an equation, with wide results."""
    ends: Any = equation.invars, outs
    before, after = ([x.aval.dtype for x in xs] for xs in ends)

    def run(*xs: Any) -> list[Any]:
        return list(map(cast, fun(*map(cast, xs, before)), after))

    return run


def _as_it_is(
    equation: core.JaxprEqn, ins: list[Any], outs: list[Any]
) -> list[core.JaxprEqn]:
    """An equation in its own dtypes, between casts."""
    ends: Any = equation.invars, equation.outvars
    nothing = ir.program_of(tuple).jaxpr
    fun = functools.partial(ir.bind, nothing, [equation], *ends)
    run = _between_casts(lambda *xs: fun(xs), equation, outs)
    program = jax.make_jaxpr(run)(*(x.aval for x in ins)).jaxpr
    pairs = zip([*program.invars, *program.outvars], [*ins, *outs], strict=True)
    eqns = ir.renamed(program.eqns, dict(pairs))
    return [e.replace(source_info=equation.source_info) for e in eqns]


def _wide_dtype(dtype: Any) -> Any:
    """The dtype to compute in instead of this one."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return np.dtype(np.complex128 if is_complex else np.float64)


def _wide_type(aval: Any) -> Any:
    if hasattr(aval, "inner_aval"):  # a reference
        return aval.update(inner_aval=_wide_type(aval.inner_aval))
    return aval.update(dtype=_wide_dtype(aval.dtype)) if ir.is_inexact(aval) else aval


def _floats(equation: core.JaxprEqn) -> Iterator[np.dtype]:
    """The floating dtypes that an equation reads, or one inside it."""
    read: Iterator[Any] = (x for e in ir.within(equation) for x in e.invars)
    for atom in filter(ir.is_inexact, read):
        yield np.dtype(jnp.finfo(atom.aval.dtype).dtype)
