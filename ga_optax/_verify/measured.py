"""Both gradients in numbers, at every precision."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._devices.collectives import Membership, split_rows
from .._passes import jaxprs, rowwise

# == Wide functions ====================================================================
# A function with every float in float64, in place of the dtypes of the function.
#
# A loss in mixed precision casts to bfloat16 and back, and the rounding hides
# differences that `verify` looks for. So the program of the loss is traced in the
# dtypes of training, and every float of the program is evaluated in float64. Casts to
# bfloat16 then change nothing, and random draws are those of training.

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
        program = jaxprs.Program(program.jaxpr, consts)
        out = jaxprs.evaluate(program, args, self._rule)
        return _widened(program.jaxpr.outvars, out)

    def _rule(self, equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
        """The wide results of an equation, computed in float64 if possible."""
        values = _widened(equation.invars, values)
        if not any(fixed in equation.primitive.name for fixed in _FIXED):
            with contextlib.suppress(Exception):  # of code that refuses float64
                return self._in_float64(equation, values)
        reads: Any = (x for e in jaxprs.within(equation) for x in e.invars)
        dtypes = (x.aval.dtype for x in reads if jaxprs.is_inexact(x))
        dtypes = (np.dtype(jnp.finfo(dtype).dtype) for dtype in dtypes)
        self.low = max((self.low, *dtypes), key=lambda x: float(jnp.finfo(x).eps))
        return _between_casts(lambda *xs: _bound(equation, xs), equation)(*values)

    def _in_float64(self, equation: core.JaxprEqn, values: list[Any]) -> list[Any]:
        params, name = equation.params, equation.primitive.name
        if name.startswith("custom_"):  # the rules are for the dtypes of training
            return self._evaluated(jaxprs.inner(equation)[0], values)
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
        program = jaxprs.Program(getattr(x, "jaxpr", x), getattr(x, "consts", ()))
        types = [_wide_type(v.aval) for v in program.jaxpr.invars]
        closed = jax.make_jaxpr(lambda *xs: self._evaluated(program, xs))(*types)
        return closed if hasattr(x, "consts") else closed.jaxpr


def _widened(atoms: Any, values: Any) -> list[Any]:
    """The wide values of variables and literals."""
    return [
        wide(x) if jaxprs.is_variable(v) else np.asarray(x, wide_dtype(v.aval.dtype))
        for v, x in zip(atoms, values, strict=True)
    ]


def wide(x: Any) -> Any:
    """An array in float64; anything else as it is."""
    return _cast(x, wide_dtype(x.dtype)) if hasattr(x, "dtype") else x


def _bound(equation: core.JaxprEqn, values: Any) -> list[Any]:
    """The results of an equation of these values."""
    invars: Any = [core.Var(x.aval) for x in equation.invars]
    equation, nothing = equation.replace(invars=invars), jaxprs.program_of(tuple)
    ends = invars, equation.outvars
    return jaxprs.bind(nothing.jaxpr, [equation], *ends, values)


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
    return (
        aval.update(dtype=wide_dtype(aval.dtype)) if jaxprs.is_inexact(aval) else aval
    )


# == Both gradients in numbers =========================================================


class Problem(NamedTuple):
    """The arguments of `verify`, checked, as arrays in their own dtypes.

    Attributes:
      params: the parameters.
      batch: the undivided batch.
      key: the key, as a tuple of one; empty if there is none.
      fun: the loss, which returns the weight, too.
      k: the number of micro-batches.
      axes: along which axis each leaf of the batch is split; None if it stays whole.
      x64: True if the caller works under `jax_enable_x64`.
    """

    params: Any
    batch: Any
    key: tuple[Any, ...]
    fun: Callable[..., Any]
    k: int
    axes: Sequence[int | None]
    x64: bool

    def parts(self) -> list[Any]:
        """The leaves of the batch; first of all axes is that of the micro-batches."""
        pairs = zip(jax.tree.leaves(self.batch), self.axes, strict=True)
        near = Membership.NEIGHBOURS
        return [x if d is None else split_rows(x, self.k, d, near) for x, d in pairs]

    def args(self, part: Any) -> tuple[Any, ...]:
        """The arguments of the loss for a micro-batch, or for all rows if None."""
        index, batch = 0 if part is None else part, self.batch
        if part is not None:
            pairs = zip(self.parts(), self.axes, strict=True)
            leaves = (x if d is None else x[part] for x, d in pairs)
            batch = jax.tree.structure(batch).unflatten(leaves)
        keys = jax.tree.map(lambda key: jax.random.fold_in(key, index), self.key)
        return self.params, batch, *keys

    def weights(self) -> np.ndarray:
        """The weight of each micro-batch, in float64: sums in float32 are as right."""
        weight = jax.jit(Wide(lambda *x: self.fun(*x)[1], self.x64))
        return np.array([float(weight(*self.args(i))) for i in range(self.k)])


class Trained(NamedTuple):
    """Both gradients, as training computes them.

    Attributes:
      is_finite: True if the accumulated one is finite, and the mean of the losses.
      ulps: by leaf, how many numbers of its dtype lie between them, at most.
    """

    is_finite: bool
    ulps: list[int]


def compared(value: Any, whole: Any, mean: Any) -> Trained:
    """The comparison of the gradient of all rows with the accumulated one.

    `value` is the accumulated loss.
    """
    out = jax.tree.leaves((value, mean))
    is_finite = all(bool(jnp.isfinite(x).all()) for x in out)
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(mean), strict=True)
    both = ((np.asarray(x), np.asarray(y.astype(x.dtype))) for x, y in pairs)
    return Trained(is_finite, [int(ulps(x, y).max(initial=0)) for x, y in both])


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The distance of two arrays of a dtype, in representable numbers.

    Both zeros are one number. A NaN lies beyond inf, as far as its bits say. Of a
    complex number, it is the larger distance of its two parts.
    """
    if np.iscomplexobj(a):
        return np.maximum(ulps(a.real, b.real), ulps(a.imag, b.imag))
    places = _place(a), _place(b)
    return np.maximum(*places) - np.minimum(*places)


def _place(x: np.ndarray) -> np.ndarray:
    """The place of each number among all of its dtype, with both zeros at 2⁶³."""
    bits = x.copy().view(f"u{x.dtype.itemsize}").astype(np.uint64)
    sign, zero = np.uint64(1 << (8 * x.dtype.itemsize - 1)), np.uint64(1 << 63)
    return np.where(bits & sign, zero - (bits & ~sign), zero + bits)


class Comparison(NamedTuple):
    """G, the gradient of all rows, and M, the weighted mean of gᵢ, in float64.

    Attributes:
      losses: the loss of all rows, and the weighted mean of those of micro-batches.
      sizes: ‖x‖ of each leaf of the gradient and, last, of the loss; a line for each
        micro-batch, and the last one for all rows.
      terms: ‖G‖ + Σ |wᵢ|·‖gᵢ‖ of each leaf, for weights that add up to 1.
      off: ‖G - M‖ of each leaf.
      factor: the c for which c·M is as large as G.
      rest: ‖G - c·M‖ of each leaf.
    """

    losses: Any
    sizes: Any
    terms: Any
    off: Any
    factor: Any
    rest: Any


def comparing(problem: Problem) -> tuple[Callable[..., Any], Wide]:
    """A function of the data and of weights, and the loss and gradient in float64.

    The weights add up to 1. Weight 0 excludes NaN. The gradients of micro-batches are
    computed one at a time.
    """
    gradient = Wide(jax.value_and_grad(lambda *x: problem.fun(*x)[0]), problem.x64)

    def leaves(problem: Problem, part: Any) -> list[Any]:
        loss, grads = gradient(*problem.args(part))
        return [*jax.tree.leaves(grads), loss]

    def norms(xs: list[Any], ys: list[Any], c: Any) -> jax.Array:
        pairs = zip(xs, ys, strict=True)
        return jnp.stack([jnp.linalg.norm((x - c * y).ravel()) for x, y in pairs])

    @jax.jit
    def compared(params: Any, batch: Any, key: Any, weights: jax.Array) -> Comparison:
        given = problem._replace(params=params, batch=batch, key=key)

        def step(sums: list[Any], i: Any) -> tuple[list[Any], Any]:
            part, w = leaves(given, i), weights[i]
            pairs = zip(sums, part, strict=True)
            return [x + jnp.where(w == 0, 0, w * y) for x, y in pairs], size(part)

        whole = leaves(given, None)
        zeros = list(map(jnp.zeros_like, whole))
        size = functools.partial(norms, ys=zeros, c=0)
        mean, of_parts = jax.lax.scan(step, zeros, jnp.arange(problem.k))
        sizes, w = jnp.stack([*of_parts, size(whole)]), jnp.append(weights, 1)[:, None]
        terms = jnp.where(w == 0, 0, w * sizes).sum(0)
        factor = norm(size(whole)[:-1]) / norm(size(mean)[:-1])
        off, rest = (norms(whole, mean, c)[:-1] for c in (1, factor))
        return Comparison((whole[-1], mean[-1]), sizes, terms[:-1], off, factor, rest)

    return compared, gradient


def norm(norms: Any) -> Any:
    """‖x‖ of all leaves together, from the norms of each."""
    return (norms**2).sum() ** 0.5
