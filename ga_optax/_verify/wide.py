"""A function with every float in float64, in place of the dtypes of the function.

A loss in mixed precision casts to bfloat16 and back, and the rounding hides differences
that `verify` looks for. So the program of the loss is traced in the dtypes of training,
and every float of the program is evaluated in float64. Casts to bfloat16 then change
nothing, and random draws are those of training.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._passes import interpret, read, rowwise

# Primitives that read or write the bits of a float, or run code for certain dtypes.
_FIXED = ("bitcast", "callback", "pallas", "ffi", "custom_call", "cudnn", "scaled")


class Wide:
    """A function in float64, as far as the code of the function allows it.

    Attributes:
      low: after tracing, the lowest floating precision that the function still has.
    """

    def __init__(self, fun: Callable[..., Any], x64: bool) -> None:
        """Of `fun`, traced under `jax_enable_x64=x64`."""
        self._fun, self._x64 = fun, x64
        self.low: Any = np.dtype(np.float64)

    def __call__(self, *args: Any) -> Any:
        with jax.enable_x64(self._x64):
            # A new function each time, so that JAX traces it again.
            trace = jax.make_jaxpr(lambda *x: self._fun(*x), return_shape=True)
            program, out = trace(*args)
        results = self._evaluated(program, jax.tree.leaves(args))
        return jax.tree.structure(out).unflatten(results)

    def _evaluated(self, program: Any, args: Any) -> list[Any]:
        """The wide results of a program."""
        consts, args = (list(map(wide, xs)) for xs in (program.consts, args))
        program = read.Program(program.jaxpr, consts)
        out = interpret.evaluate(program, args, self._rule)
        return _widened(program.jaxpr.outvars, out)

    def _rule(self, equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
        """The wide results of an equation, computed in float64 if possible."""
        values = _widened(equation.invars, values)
        if not any(fixed in equation.primitive.name for fixed in _FIXED):
            with contextlib.suppress(Exception):  # of code that refuses float64
                return self._in_float64(equation, values)
        reads: Any = (x for e in read.within(equation) for x in e.invars)
        dtypes = (x.aval.dtype for x in reads if read.is_inexact(x))
        dtypes = (np.dtype(jnp.finfo(dtype).dtype) for dtype in dtypes)
        self.low = max((self.low, *dtypes), key=lambda x: float(jnp.finfo(x).eps))
        return _between_casts(lambda *xs: _bound(equation, xs), equation)(*values)

    def _in_float64(self, equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
        params, name = equation.params, equation.primitive.name
        if name.startswith("custom_"):  # the rules are for the dtypes of training
            return self._evaluated(read.inner(equation)[0], values)
        params = jax.tree.map(self._param, params, is_leaf=lambda x: hasattr(x, "eqns"))
        if name == rowwise.NAME:
            fun = _between_casts(params["promise"].fun, equation)
            params["promise"] = params["promise"]._replace(fun=fun)
        elif name == "reduce_precision":
            return values
        elif "precision" in params:
            params["precision"] = None  # may name a dtype
        return _bound(equation.replace(params=params), values)

    def _param(self, x: Any) -> Any:
        """A parameter of an equation: a wide program, dtype or array, or as it is."""
        if not hasattr(x, "eqns"):
            return wide_dtype(x) if isinstance(x, np.dtype) else wide(x)
        program = read.Program(getattr(x, "jaxpr", x), getattr(x, "consts", ()))
        types = [_wide_type(v.aval) for v in program.jaxpr.invars]
        closed = jax.make_jaxpr(lambda *xs: self._evaluated(program, xs))(*types)
        return closed if hasattr(x, "consts") else closed.jaxpr


def _widened(atoms: Any, values: Any) -> list[Any]:
    """The wide values of variables and literals."""
    return [
        wide(x) if read.is_variable(v) else np.asarray(x, wide_dtype(v.aval.dtype))
        for v, x in zip(atoms, values, strict=True)
    ]


def wide(x: Any) -> Any:
    """An array in float64; anything else as it is."""
    return _cast(x, wide_dtype(x.dtype)) if hasattr(x, "dtype") else x


def _bound(equation: core.JaxprEqn, values: Any) -> list[Any]:
    """The results of an equation of these values."""
    invars: Any = [core.Var(x.aval) for x in equation.invars]
    equation, nothing = equation.replace(invars=invars), interpret.program_of(tuple)
    ends = invars, equation.outvars
    return interpret.bind(nothing.jaxpr, [equation], *ends, values)


def _cast(x: Any, dtype: Any) -> Any:
    """An array of that dtype; itself if it is."""
    return x if x.dtype == dtype else x.astype(dtype)


def _between_casts(fun: Callable[..., Any], e: core.JaxprEqn) -> Callable[..., Any]:
    """A function of wide operands of an equation, with wide results."""
    types: Any = [x.aval for x in e.invars]
    dtypes = [x.dtype for x in types]
    return lambda *xs: list(map(wide, fun(*map(_cast, xs, dtypes))))


def wide_dtype(dtype: Any) -> Any:
    """The dtype in float64 or complex128; the same dtype if it is no float."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return np.dtype(np.complex128 if is_complex else np.float64)


def _wide_type(aval: Any) -> Any:
    if hasattr(aval, "inner_aval"):  # a reference
        return aval.update(inner_aval=_wide_type(aval.inner_aval))
    return aval.update(dtype=wide_dtype(aval.dtype)) if read.is_inexact(aval) else aval
