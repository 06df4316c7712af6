"""The same function with every float in float64, whatever dtypes it asks for.

A loss in mixed precision rounds on purpose: it casts to bfloat16 and back. That hides
what `verify` looks for. So the program of the loss is traced in the dtypes of training,
and each of its floats is evaluated in float64. A cast to bfloat16 then changes nothing,
and what is left is the mathematics of the loss, with the random draws of training.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._passes import interpret, read, rewrite, rowwise

# The equations in place of one, given its operands and its results of other types.
Write = Callable[[core.JaxprEqn, list[Any], list[Any]], Iterable[core.JaxprEqn]]


# Primitives that read or make the bits of a float, or run code for certain dtypes.
_FIXED = ("bitcast", "callback", "pallas", "ffi", "custom_call", "cudnn", "scaled")


class Wide:
    """A function in float64, as far as it can be.

    Attributes:
      low: after tracing, the lowest floating precision that the function still has.
    """

    def __init__(self, fun: Callable[..., Any], x64: bool, as_is: bool = False) -> None:
        """Of `fun`, traced under `jax_enable_x64=x64`; `as_is` changes no dtype."""
        self._fun, self._x64, self._as_is = fun, x64, as_is
        self.low: Any = np.dtype(np.float64)

    def __call__(self, *args: Any) -> Any:
        with jax.enable_x64(self._x64):
            # A new function each time, so that JAX traces it again.
            trace = jax.make_jaxpr(lambda *x: self._fun(*x), return_shape=True)
            program, out = trace(*args)
        inputs = jax.tree.leaves(args)
        if self._as_is:
            self._note(*read.equations(program.jaxpr))
        else:
            program, *inputs = map(self.widened, (program, *inputs))
        return jax.tree.structure(out).unflatten(interpret.results(program, inputs))

    def widened(self, x: Any) -> Any:
        """An array, a dtype or a program in float64; anything else as it is."""
        if hasattr(x, "eqns"):
            jaxpr = _retyped(getattr(x, "jaxpr", x), _wide_type, self._written)
            if not hasattr(x, "consts"):
                return jaxpr
            return x.replace(jaxpr=jaxpr, consts=list(map(self.widened, x.consts)))
        if isinstance(x, np.dtype):
            return wide_dtype(x)
        return cast(x, wide_dtype(x.dtype)) if hasattr(x, "dtype") else x

    def _written(
        self, equation: core.JaxprEqn, ins: list[Any], outs: list[Any]
    ) -> list[core.JaxprEqn]:
        params, name = equation.params, equation.primitive.name
        if any(fixed in name for fixed in _FIXED):
            self._note(*read.within(equation))
            ends = equation.invars, equation.outvars
            bound = functools.partial(
                interpret.bind, interpret.program_of(tuple).jaxpr, [equation], *ends
            )
            run = _between_casts(lambda *xs: bound(xs), equation, outs)
            return _traced(run, ins, outs)
        if name.startswith("custom_"):  # its rules are for the dtypes that it has
            jaxpr, consts = read.inner(equation)[0]
            program = read.Program(self.widened(jaxpr), list(map(self.widened, consts)))
            return _traced(lambda *xs: interpret.results(program, xs), ins, outs)
        params = jax.tree.map(
            self.widened, params, is_leaf=lambda x: hasattr(x, "eqns")
        )
        if name == rowwise.NAME:
            fun = _between_casts(params["promise"].fun, equation, outs)
            params["promise"] = params["promise"]._replace(fun=fun)
        elif name == "reduce_precision":
            params = {"exponent_bits": 11, "mantissa_bits": 52}  # none is lost
        elif "precision" in params:
            params["precision"] = None  # may name a dtype
        return [equation.replace(invars=ins, outvars=outs, params=params)]

    def _note(self, *equations: core.JaxprEqn) -> None:
        """Notes the lowest precision that equations read."""
        reads: Any = (x for e in equations for x in e.invars if read.is_inexact(x))
        dtypes = (np.dtype(jnp.finfo(x.aval.dtype).dtype) for x in reads)
        self.low = max((self.low, *dtypes), key=lambda x: float(jnp.finfo(x).eps))


def cast(x: Any, dtype: Any) -> Any:
    """An array of that dtype; itself if it is."""
    return x if x.dtype == dtype else x.astype(dtype)


def _between_casts(
    fun: Callable[..., Any], equation: core.JaxprEqn, outs: list[Any]
) -> Callable[..., Any]:
    """A function of wide operands of an equation, with wide results."""
    ends: Any = equation.invars, outs
    before, after = ([x.aval.dtype for x in xs] for xs in ends)
    return lambda *xs: list(map(cast, fun(*map(cast, xs, before)), after))


def _traced(fun: Callable[..., Any], ins: Any, outs: Any) -> list[core.JaxprEqn]:
    """Equations that compute what a function does."""
    program = jax.make_jaxpr(fun)(*(x.aval for x in ins)).jaxpr
    pairs = zip([*program.invars, *program.outvars], [*ins, *outs], strict=True)
    return rewrite.renamed(program.eqns, dict(pairs))


def wide_dtype(dtype: Any) -> Any:
    """The dtype to compute in instead of this one."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return np.dtype(np.complex128 if is_complex else np.float64)


def _wide_type(aval: Any) -> Any:
    if hasattr(aval, "inner_aval"):  # a reference
        return aval.update(inner_aval=_wide_type(aval.inner_aval))
    return aval.update(dtype=wide_dtype(aval.dtype)) if read.is_inexact(aval) else aval


def _retyped(
    jaxpr: core.Jaxpr,
    type_of: Callable[[Any], Any],
    write: Write,
) -> core.Jaxpr:
    """The program with variables and literals of other types, from their types."""
    known: dict[Any, Any] = {}

    def new(x: Any) -> Any:
        if isinstance(x, core.Literal):
            aval = type_of(x.aval)
            return core.Literal(np.asarray(x.val, aval.dtype), aval)
        if x not in known:
            known[x] = core.Var(type_of(x.aval))
        return known[x]

    def all_of(atoms: Iterable[Any]) -> list[Any]:
        return list(map(new, atoms))

    def renamed(effects: Iterable[Any]) -> frozenset[Any]:
        """Effects of references, which name a variable of the program."""
        return frozenset(
            x.replace(input=known[x.input]) if getattr(x, "input", None) in known else x
            for x in effects
        )

    eqns = [
        other.replace(effects=renamed(other.effects))
        for e in jaxpr.eqns
        for other in write(e, all_of(e.invars), all_of(e.outvars))
    ]
    ends = ("constvars", "invars", "outvars")
    new_ends = {end: all_of(getattr(jaxpr, end)) for end in ends}
    return jaxpr.replace(eqns=eqns, effects=renamed(jaxpr.effects), **new_ends)
