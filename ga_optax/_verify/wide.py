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
        results = ir.results(program, inputs)
        return jax.tree.unflatten(jax.tree.structure(out), results)

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
    ) -> Iterator[core.JaxprEqn]:
        if any(name in equation.primitive.name for name in _FIXED):
            yield from self._between_casts(equation, ins, outs)
            return
        params = jax.tree.map(
            self.widened, equation.params, is_leaf=lambda x: hasattr(x, "eqns")
        )
        if equation.primitive.name == rowwise.NAME:
            params["promise"] = _between(equation, outs)
        elif equation.primitive.name == "reduce_precision":
            params = {"exponent_bits": 11, "mantissa_bits": 52}  # none is lost
        elif "precision" in params:
            params["precision"] = None  # may name a dtype
        yield equation.replace(invars=ins, outvars=outs, params=params)

    def _between_casts(
        self, equation: core.JaxprEqn, ins: list[Any], outs: list[Any]
    ) -> Iterator[core.JaxprEqn]:
        self.low.update(_floats(equation))
        own_ins = list(map(_own, equation.invars, ins))
        own_outs = list(map(_own, equation.outvars, outs))
        yield from _casts(equation, ins, own_ins)
        yield equation.replace(invars=own_ins, outvars=own_outs)
        yield from _casts(equation, own_outs, outs)


def cast(x: Any, dtype: Any) -> Any:
    """An array of that dtype; itself if it is."""
    return x if x.dtype == dtype else x.astype(dtype)


def _between(equation: core.JaxprEqn, outs: list[Any]) -> Any:
    """What a call promises, of a function between casts."""
    promise = equation.params["promise"]
    ends: Any = equation.invars, outs
    before, after = ([x.aval.dtype for x in xs] for xs in ends)

    def fun(*xs: Any) -> list[Any]:
        return list(map(cast, promise.fun(*map(cast, xs, before)), after))

    return promise._replace(fun=fun)


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


def _own(atom: Any, wide: Any) -> Any:
    """A variable of the type that an atom has; its wide twin if that is the same."""
    return wide if wide.aval == atom.aval else core.Var(atom.aval)


def _casts(
    equation: core.JaxprEqn, olds: list[Any], news: list[Any]
) -> Iterator[core.JaxprEqn]:
    """Casts of variables to others, in the context of an equation."""
    for old, new in zip(olds, news, strict=True):
        if old is not new:
            fun = functools.partial(cast, dtype=new.aval.dtype)
            yield from ir.traced(fun, [old], new, equation)


def _floats(equation: core.JaxprEqn) -> Iterator[np.dtype]:
    """The floating dtypes that an equation reads, or one inside it."""
    read: Iterator[Any] = (x for e in ir.within(equation) for x in e.invars)
    for atom in filter(ir.is_inexact, read):
        yield np.dtype(jnp.finfo(atom.aval.dtype).dtype)
