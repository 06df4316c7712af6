"""`rowwise`: a promise of the user's that rows of a function do not need each other.

Where a program will be partitioned, a call is one equation, of a primitive of ours: the
partition calls the function with the rows of a micro-batch. Elsewhere it is the
function itself.

    y = fun(x, w)           rows of y from the same rows of x, and from all of w
    dy = ∂fun(x, w)·dx      the same: an equation of its own, with the rows of y
    dx, dw = ∂fun(x, w)ᵀ·dy     so is its transpose; dw is a sum over rows

So derivatives are those of the function, by its own rules. `jax.vmap` adds a way to
split a call, for along its axis no example needs another.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._checks import check_callable, named_leaves
from ga_optax._passes import closures, ir, primitives, transformable
from ga_optax._passes.primitives import Axes, Way

NAME = primitives.ROWWISE
# Under these axes a program is traced that will be partitioned: there promises are
# kept. (JAX remembers what it has traced by the axes that there are.)
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
        parameters.
      in_axes: where the rows of the positional arguments are: an int, None for what
        goes whole (parameters, and what is no array), or a prefix of the tuple of them,
        as in `jax.vmap`. Keywords go whole.
      out_axes: where they are in the results, which all have them.

    Returns:
      A function with `fun`'s signature and result.

    Raises:
      TypeError, ValueError: if an argument or a result has no such rows.
    """
    check_callable("fun", fun, "of arrays with rows", "Pass what is to run on rows.")

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        axes = _axes("in_axes", in_axes, args)
        n = _length(axes, args)
        if not _is_read():
            out = fun(*args, **kwargs)
            _outs(out_axes, out, n)
            return out
        leaves, structure = jax.tree.flatten(args)
        given = [i for i, d in enumerate(axes) if d is not None]
        fixed = [x if d is None else None for x, d in zip(leaves, axes, strict=True)]

        def flat(*xs: Any) -> Any:
            every = ir.put(fixed, given, xs)
            return fun(*jax.tree.unflatten(structure, every), **kwargs)

        xs = [leaves[i] for i in given]
        own = _Function(flat, xs)
        ins = *(axes[i] for i in given), *(None for _ in own.around)
        way = Way(ins, _outs(out_axes, own.out, n))
        promise = Promise(own, (way,), getattr(fun, "__name__", type(fun).__name__))
        found = bound(promise, [*xs, *own.around])
        return jax.tree.unflatten(jax.tree.structure(own.out), found)

    return call


# -- Arguments -------------------------------------------------------------------------


def _axes(name: str, axes: Any, tree: Any) -> list[int | None]:
    """The axis of the rows of each leaf, from the front; None if it has none."""
    axes = tuple(axes) if isinstance(axes, list) else axes
    try:
        every = jax.tree.broadcast(axes, tree, is_leaf=lambda x: x is None)
        of_leaves = jax.tree.structure(tree).flatten_up_to(every)
    except ValueError:
        raise ValueError(
            f"{name} of rowwise must be an int, None, or a prefix of the tree that it "
            f"is of, but it is {axes!r}, and that is {jax.tree.structure(tree)}. Give "
            "one axis for all, or one for each."
        ) from None
    return [
        _axis(name, axis, leaf, x)
        for axis, (leaf, x) in zip(of_leaves, named_leaves(tree), strict=True)
    ]


def _axis(name: str, axis: Any, leaf: str, x: Any) -> int | None:
    if axis is None and name == "in_axes":
        return None
    shape = getattr(x, "shape", ())
    if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        what = f"shape {shape}" if hasattr(x, "shape") else f"type {type(x).__name__}"
        todo = "Pass None for what goes whole"
        if name == "out_axes":
            todo = "Sum over rows, and return what has none, outside of it"
        raise ValueError(
            f"{name} of rowwise must be axes of rows, but it has {axis!r} for {leaf}, "
            f"of {what}. {todo}."
        )
    return axis % len(shape)


def _length(axes: Sequence[int | None], args: Any) -> Any:
    """How many rows the arguments have."""
    pairs = zip(axes, named_leaves(args), strict=True)
    rows = [(leaf, x.shape, x.shape[d]) for d, (leaf, x) in pairs if d is not None]
    if not rows:
        raise ValueError(
            "An argument of rowwise must have rows, but in_axes gives none an axis. "
            "Say where they are; keywords have none, so pass them by position."
        )
    for leaf, shape, n in rows:
        if n != rows[0][2]:
            raise ValueError(
                "Arguments of rowwise must have as many rows, but {} has shape {} and "
                "{} has shape {}. Say in in_axes where rows are, and None for what "
                "goes whole.".format(*rows[0][:2], leaf, shape)
            )
    return rows[0][2]


def _outs(out_axes: Any, out: Any, n: Any) -> Axes:
    """The axes of results, which must have so many rows."""
    axes: Any = _axes("out_axes", out_axes, out)
    for d, (leaf, x) in zip(axes, named_leaves(out), strict=True):
        if x.shape[d] != n:
            raise ValueError(
                f"A result of rowwise must have the {n} rows of the arguments, but "
                f"{leaf} has shape {x.shape}, with rows along axis {d}. Say in "
                "out_axes where they are, and sum over rows outside of it."
            )
    return tuple(axes)


def _is_read() -> bool:
    """Whether the program that is traced will be partitioned."""
    try:
        return bool(jax.lax.axis_size(READ[0][0]))
    except NameError:
        return False


# -- The function ----------------------------------------------------------------------


class _Function:
    """A function of a flat list, and its programs, by the types of its operands.

    Attributes:
      out: the types of its results, in their tree.
      around: what is traced, and closed over; these come last among its operands.
    """

    def __init__(self, fun: Callable[..., Any], xs: Sequence[Any]) -> None:
        config: Any = jax.config
        self._fun = fun
        self._x64 = config.jax_enable_x64
        self._precision = config.jax_default_matmul_precision
        self._promotion = config.jax_numpy_dtype_promotion
        closed, self.out = jax.make_jaxpr(fun, return_shape=True)(*xs)
        self.around = [x for x in closed.consts if isinstance(x, jax.core.Tracer)]
        self._programs = {_types([*xs, *self.around]): closed}

    def __call__(self, *operands: Any) -> list[Any]:
        types, known = _types(operands), self._known(operands)
        if types not in self._programs:
            with (
                jax.enable_x64(self._x64),
                jax.default_matmul_precision(self._precision),
                jax.numpy_dtype_promotion(self._promotion),
            ):
                self._programs[types] = jax.make_jaxpr(self._again)(*operands)
        closed = self._programs[types]
        # What is found in no closure, such as what an object holds, is a constant.
        new = [x for x in closed.consts if id(x) not in known]
        if any(isinstance(x, jax.core.Tracer) for x in new):
            raise ValueError("it closes over something else than at all rows")
        consts = [known.get(id(x), x) for x in closed.consts]
        args = operands[: len(closed.in_avals)]
        return jax.core.eval_jaxpr(closed.jaxpr, consts, *args)

    def _again(self, *operands: Any) -> Any:
        """The function of operands of another number of rows."""
        fun = closures.replaced(self._fun, self._known(operands))
        return fun(*operands[: len(operands) - len(self.around)])

    def _known(self, operands: Sequence[Any]) -> dict[int, Any]:
        """What stands for what it closes over, by the id of that."""
        last = operands[len(operands) - len(self.around) :]
        return dict(zip(map(id, self.around), last, strict=True))


def _types(xs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(jax.typeof, xs))


# -- The primitive ---------------------------------------------------------------------


class Promise(NamedTuple):
    """What an equation promises.

    Attributes:
      fun: the function of its operands, as a list.
      ways: the ways to split it; each is right by itself.
      name: that of the user's function.
    """

    fun: Callable[..., list[Any]]
    ways: tuple[Way, ...]
    name: str

    def of(self, fun: Callable[..., Any], ins: Any, outs: Any) -> "Promise":
        """That of a function whose operands and results are some of these, in order."""
        both = [(*way.ins, *way.outs) for way in self.ways]
        ways = (Way(*(tuple(x[i] for i in side) for side in (ins, outs))) for x in both)
        return self._replace(fun=fun, ways=tuple(ways))


def bound(promise: Promise, xs: Sequence[Any]) -> list[Any]:
    program: Any = jax.make_jaxpr(promise.fun)(*xs)
    return _primitive().bind(*xs, promise=promise, program=program)


@functools.cache
def _primitive() -> core.Primitive:
    how = transformable.How(
        transformable.ran,
        lambda *_, program, **__: (program.out_avals, program.effects),
        lambda promise, program: (promise.fun, len(program.in_avals)),
        _batched,
        _derived,
    )
    new = transformable.primitive(NAME, how)
    transformable.transposed(new, _transposed)
    transformable.without_unused(new, _only)
    return new


def _batched(
    axis: Any, args: Any, dims: Any, *, promise: Promise, program: Any
) -> list[Any]:
    front = (0,) * len(program.out_avals)
    xs = transformable.in_front(args, dims)
    ins = tuple(None if d is None else 0 for d in dims)
    ways = [
        Way(_behind(way.ins, ins), _behind(way.outs, front)) for way in promise.ways
    ]
    if not program.effects:  # such as a sum over the axis
        ways.append(Way(ins, front))
    fun = jax.vmap(promise.fun, ins, axis_name=axis.name)
    return bound(Promise(fun, tuple(ways), promise.name), xs)


def _behind(axes: Axes, new: Axes) -> Axes:
    """Axes behind those that are new at the front."""
    pairs = zip(axes, new, strict=True)
    return tuple(d if d is None or first is None else d + 1 for d, first in pairs)


def _derived(
    args: Any, moved: list[int], dots: Any, *, promise: Promise, program: Any
) -> Any:
    smooth = [i for i, x in enumerate(program.out_avals) if ir.is_inexact(x)]
    n = len(args)

    def both(*operands: Any) -> Any:
        xs, ts = operands[:n], list(operands[n:])
        of_moved = ir.of_some(promise.fun, xs, moved)
        return jax.jvp(of_moved, [xs[i] for i in moved], ts)

    if program.effects or not _is_read():  # so that nothing happens twice
        out, tangents = both(*args, *dots)
        return out, dict(enumerate(tangents))
    out = _primitive().bind(*args, promise=promise, program=program)
    dot = promise.of(
        lambda *xs: [both(*xs)[1][i] for i in smooth],
        [*range(n), *moved],
        [n + i for i in smooth],
    )
    return out, dict(zip(smooth, bound(dot, [*args, *dots]), strict=True))


def _transposed(
    args: Any, linear: Any, given: Any, *, promise: Promise, program: Any
) -> list[Any]:
    known = [i for i in range(len(args)) if i not in linear]
    n = len(given)

    def back(*operands: Any) -> list[Any]:
        xs = ir.put(args, [*known, *linear], operands[n:])

        def wanted(*every: Any) -> list[Any]:
            out = promise.fun(*every)
            return [out[i] for i in given]

        of_linear = ir.of_some(wanted, xs, linear)
        types = [jax.typeof(xs[i]) for i in linear]
        return list(jax.linear_transpose(of_linear, *types)(list(operands[:n])))

    # Zeros have the shapes that what is linear has where it is called.
    types: Any = [program.in_avals[i] for i in linear]
    zeros = [jnp.zeros(x.shape, x.dtype) for x in types]
    xs = [*given.values(), *(args[i] for i in known), *zeros]
    places = [*(len(args) + i for i in given), *known, *linear]
    return bound(promise.of(back, places, linear), xs)


def _only(promise: Promise, program: Any, kept: Sequence[int]) -> dict[str, Any]:
    """The parameters of an equation with some of its results."""
    n = len(program.in_avals)

    def fun(*xs: Any) -> list[Any]:
        return list(map(promise.fun(*xs).__getitem__, kept))

    new = promise.of(fun, range(n), [n + i for i in kept])
    outs = [program.jaxpr.outvars[i] for i in kept]
    live = program.replace(jaxpr=ir.live(program.jaxpr.replace(outvars=outs)))
    return {"promise": new, "program": live}
