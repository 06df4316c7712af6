"""`rowwise`: a promise of the user's that rows of a function do not need each other.

    rowwise(f)(x)[i]  =  f(x[i : i + 1])[0]

The promise is one equation, with derivatives.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._checks import check_callable, named_leaves
from . import effects, jaxprs, new_primitive, primitives
from .primitives import Axes, Factor, Split

# == The promise =======================================================================
# `rowwise`: a promise of the user's that rows of a function do not need each other.
#
# Where a program will be partitioned, a call is one equation, of a primitive of ours:
# the partition calls the function with the rows of a micro-batch. Elsewhere a call is
# the function itself.
#
#     y = fun(x, w)           rows of y from the same rows of x, and from all of w
#     dy = ∂fun(x, w)·dx      an equation too, which splits along the rows of y
#     dx, dw = ∂fun(x, w)ᵀ·dy     the transpose is another; dw is a sum over rows
#
# So the derivatives follow the function's own rules. Under `jax.vmap` a call is the
# function itself, without the promise.

NAME = primitives.ROWWISE

# A program that will be partitioned is traced under this axis, by which a call knows.
# (JAX caches traced functions by the axes around.)
READ = [("rows are read", 1)]


def rowwise(
    fun: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """`fun`, with the promise that its rows do not need each other.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> import ga_optax as ga
    >>> @ga.rowwise
    ... def ranks(x):  # NumPy's code, into which JAX cannot see
    ...     out = jax.ShapeDtypeStruct(x.shape, jnp.int32)
    ...     return jax.pure_callback(lambda x: np.int32(np.argsort(x, 1)), out, x)
    >>> def loss(w, x):
    ...     return jnp.mean((x * ranks(x)) @ w)
    >>> w, x = jnp.ones(3), jnp.arange(12.0).reshape(4, 3)
    >>> print(jax.jit(ga.value_and_grad(loss, 2))(w, x)[1])
    [ 0.   5.5 13. ]

    For code that cannot be read, such as a kernel, a call of a library or a callback,
    and for what can be read but tells nothing, such as tokens sorted by expert. Without
    a promise that is computed of all rows in each micro-batch. With it, `fun` is called
    with the rows of the micro-batch alone.

    **Exactness.** Outside of `value_and_grad` and `microbatch` it is `fun`, under any
    transformation of JAX, and costs nothing. Its derivatives are by `fun`'s own rules.
    Inside, the result is right if the promise holds: row i of each result needs row i
    of the arguments that have rows, and nothing else of them. `verify` finds a promise
    that does not hold.

    Args:
      fun: a function that JAX can trace, for any number of rows. It may close over
        parameters, but not over what a `jax.grad` in the loss differentiates.
      in_axes: where the rows of the positional arguments are, 0 by default: an int,
        None for what goes whole (parameters, and what is no array), or a prefix of the
        tuple of them, as in `jax.vmap`. Keywords go whole.
      out_axes: where they are in the results, which all have them; 0 by default.

    Returns:
      A function with `fun`'s signature and result.

    Raises:
      TypeError, ValueError: if an argument or a result has no such rows.
    """
    check_callable("fun", fun, "of arrays with rows", "Pass what is to run on rows.")

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        axes, n = _axes("in_axes", in_axes, args)
        if not is_read():
            out = fun(*args, **kwargs)
            _axes("out_axes", out_axes, out, n)
            return out
        leaves, structure = jax.tree.flatten((args, kwargs))
        axes += (None,) * (len(leaves) - len(axes))  # keywords go whole
        is_traced = [isinstance(x, jax.core.Tracer) for x in leaves]
        pairs = zip(axes, is_traced, strict=True)
        given = [i for i, (d, traced) in enumerate(pairs) if traced or d is not None]

        def flat(*xs: Any) -> Any:
            every, named = structure.unflatten(jaxprs.put(leaves, given, xs))
            return fun(*every, **named)

        xs = [leaves[i] for i in given]
        function = _Function(flat, xs)
        outs, _ = _axes("out_axes", out_axes, function.out, n)
        ins = *(axes[i] for i in given), *(None for _ in function.captured)
        name = getattr(fun, "__name__", type(fun).__name__)
        promise = Split(Factor(ins, outs), function, name)
        results = bound(promise, *xs, *function.captured)
        return jax.tree.unflatten(jax.tree.structure(function.out), results)

    return call


# -- Arguments -------------------------------------------------------------------------


def _axes(name: str, axes: Any, tree: Any, rows: Any = None) -> tuple[Axes, Any]:
    """The axis of the rows of each leaf, None for a whole leaf; and the number of rows.

    All leaves with rows must have the same number, which is `rows` if given.
    """
    axes = tuple(axes) if isinstance(axes, list) else axes
    try:
        every = jax.tree.broadcast(axes, tree, is_leaf=lambda x: x is None)
        of_leaves = jax.tree.structure(tree).flatten_up_to(every)
    except ValueError:
        raise ValueError(
            f"{name} of rowwise must be an int, None, or a prefix of the tree "
            f"{jax.tree.structure(tree)}, but it is {axes!r}. Give one axis for all "
            "leaves, or one for each."
        ) from None
    numbers = list[int | None]()
    for axis, (leaf, x) in zip(of_leaves, named_leaves(tree), strict=True):
        shape = getattr(x, "shape", ())
        if axis is None and name == "in_axes":
            numbers.append(None)
            continue
        is_axis = isinstance(axis, int) and -len(shape) <= axis < len(shape)
        if not is_axis or (rows is not None and shape[axis] != rows):
            what = f"shape {shape}" if hasattr(x, "shape") else f"{type(x)}"
            number = "rows" if rows is None else f"the same {rows} rows"
            raise ValueError(
                f"{name} of rowwise must be axes of {number}, but it has {axis!r} for "
                f"{leaf}, of {what}. Pass None in in_axes for a leaf without rows. "
                "Return rows alone: sum over them outside of rowwise."
            )
        numbers.append(axis % len(shape))
        rows = shape[axis]
    if rows is None:
        raise ValueError(
            "An argument of rowwise must have rows, but in_axes gives none an axis. "
            "Say where they are; keywords have none, so pass them by position."
        )
    return tuple(numbers), rows


def is_read() -> bool:
    """True if the program that is traced will be partitioned."""
    try:
        return bool(jax.lax.axis_size(READ[0][0]))
    except NameError:
        return False


# -- The function ----------------------------------------------------------------------


class _Function:
    """A function of a flat list, and its programs, by the types of the operands.

    Attributes:
      out: the types of the results, in their tree.
      captured: the traced values that the function closes over: its last operands.
    """

    def __init__(self, fun: Callable[..., Any], xs: Sequence[Any]) -> None:
        config: Any = jax.config
        self._fun = fun
        self._x64 = config.jax_enable_x64
        self._precision = config.jax_default_matmul_precision
        self._promotion = config.jax_numpy_dtype_promotion
        closed, self.out = jax.make_jaxpr(fun, return_shape=True)(*xs)
        self.captured = [x for x in closed.consts if isinstance(x, jax.core.Tracer)]
        self._programs = {tuple(map(jax.typeof, xs)): closed}

    def __call__(self, *operands: Any) -> list[Any]:
        number = len(operands) - len(self.captured)
        xs, values = operands[:number], operands[number:]
        if (types := tuple(map(jax.typeof, xs))) not in self._programs:
            with (
                jax.enable_x64(self._x64),
                jax.default_matmul_precision(self._precision),
                jax.numpy_dtype_promotion(self._promotion),
            ):
                self._programs[types] = self._traced(xs)
        closed = self._programs[types]
        known = dict(zip(map(id, self.captured), values, strict=True))
        unknown = [x for x in closed.consts if id(x) not in known]
        if any(isinstance(x, jax.core.Tracer) for x in unknown):
            raise ValueError("it closes over other values than when it gets all rows")
        consts = [known.get(id(x), x) for x in closed.consts]
        return jax.core.eval_jaxpr(closed.jaxpr, consts, *xs)

    def _traced(self, xs: Sequence[Any]) -> Any:
        """The program, whose constants are the traced values; these may have ended."""
        try:
            return jax.make_jaxpr(self._fun)(*xs)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(
                "it closes over what a jax.grad in the loss differentiates, which must "
                "be an argument"
            ) from error


# -- The primitive ---------------------------------------------------------------------


def bound(promise: Split, *xs: Any) -> list[Any]:
    """The results of a function of which a user promises something: one equation."""
    program: Any = jax.make_jaxpr(promise.fun)(*xs)
    return _primitive().bind(*xs, promise=promise, program=program)


@functools.cache
def _primitive() -> core.Primitive:
    def plain(promise: Split, program: Any) -> tuple[Any, int]:
        return promise.fun, len(program.in_avals)

    how = new_primitive.How(plain, _batched, _derived)
    new = new_primitive.primitive(NAME, how)
    new_primitive.transposed(new, _transposed)
    return new


def _batched(axis: Any, xs: Any, dims: Any, *, promise: Split, program: Any) -> Any:
    return jax.vmap(promise.fun, dims, axis_name=axis.name)(*xs)


def _derived(xs: Any, moved: Any, dots: Any, *, promise: Split, program: Any) -> Any:
    if program.effects or not is_read():  # so that nothing happens twice
        return new_primitive.differentiated(promise.fun, xs, moved, dots)
    if effects.rule_in(program.jaxpr) is None:
        out = _primitive().bind(*xs, promise=promise, program=program)
    else:
        value = new_primitive.valued(promise.fun, moved)
        out = bound(promise._replace(fun=value), *xs)
    smooth, n = [i for i, x in enumerate(out) if jaxprs.is_inexact(x)], len(xs)
    fun = new_primitive.pushed(promise.fun, moved, smooth)
    dot = promise.of_some(fun, [*range(n), *moved], [n + i for i in smooth])
    return out, dict(zip(smooth, bound(dot, *xs, *dots), strict=True))


def _transposed(xs: Any, linear: Any, cts: Any, *, promise: Split, program: Any) -> Any:
    n = len(xs)

    def back(*operands: Any) -> list[Any]:
        def wanted(*some: Any) -> list[Any]:
            out = promise.fun(*jaxprs.put(operands[:n], linear, some))
            return [out[i] for i in cts]

        types = [jax.typeof(operands[i]) for i in linear]
        return list(jax.linear_transpose(wanted, *types)(list(operands[n:])))

    # Zeros in place of the linear operands, with their shapes in this call.
    zeros = [jnp.zeros_like(program.in_avals[i]) for i in linear]
    new = promise.of_some(back, [*range(n), *(n + i for i in cts)], linear)
    return bound(new, *jaxprs.put(xs, linear, zeros), *cts.values())
