"""Which rows of a batch are in which micro-batch.

On one device they are neighbours: of B rows in k micro-batches, number i holds those
from `i·B/k` up to `(i + 1)·B/k`. On several devices it is strided, and holds the rows
i, i + k, i + 2k, ... So it has as many rows of every device, however the compiler
distributes the batch, which nobody else can see; and no row moves.

For how many devices a program is compiled is not known before it is lowered, if nothing
names a mesh: one traced program may run on one device and on eight. The split is then
an operation of its own, and JAX asks how to lower it when it knows.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike


def split(
    x: ArrayLike, num_microbatches: int, axis: int, strided: bool | None
) -> jax.Array:
    """`[..., batch, ...]` as `[num_microbatches, ..., micro-batch, ...]`.

    If `strided` is None, it is chosen when the program is lowered.
    """
    x = jnp.asarray(x)
    if strided is None:
        return _operations()[0].bind(x, number=num_microbatches, axis=axis)
    return _split(x, num_microbatches, axis, strided)


def join(x: jax.Array, axis: int, strided: bool | None) -> jax.Array:
    """The reverse of `split`: the rows of all micro-batches, in the batch's order."""
    if strided is None:
        return _operations()[1].bind(x, number=x.shape[0], axis=axis)
    return _join(x, x.shape[0], axis, strided)


def _split(x: jax.Array, number: int, axis: int, strided: bool) -> jax.Array:
    parts = number, x.shape[axis] // number
    parts = parts[::-1] if strided else parts
    x = jnp.reshape(x, (*x.shape[:axis], *parts, *x.shape[axis + 1 :]))
    return jnp.moveaxis(x, axis + strided, 0)


def _join(x: jax.Array, number: int, axis: int, strided: bool) -> jax.Array:
    x = jnp.moveaxis(x, 0, axis + strided)
    rows = number * x.shape[axis + 1 - strided]
    return jnp.reshape(x, (*x.shape[:axis], rows, *x.shape[axis + 2 :]))


# -- Chosen when a program is lowered --------------------------------------------------


@functools.cache
def can_wait() -> bool:
    """Whether a split can be chosen when a program is lowered; warns if not."""
    try:
        _operations()
    except Exception as error:  # Any: what JAX will change is not known.
        warnings.warn(
            "ga_optax splits a batch into neighbouring rows if nothing names its mesh, "
            f"with jax {jax.__version__}: {type(error).__name__}: {error}. On several "
            "devices the batch is gathered then. Name the mesh (jax.set_mesh), or use "
            "a newer ga_optax; optimize=False does the same without this warning.",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _operations() -> tuple[core.Primitive, core.Primitive]:
    """`split` and `join` as primitives; each is the transpose of the other."""
    both = _primitive("ga_optax_split", _split), _primitive("ga_optax_join", _join)
    for mine, other in (both, both[::-1]):
        _with_transformations(mine, other)
    return both


def _primitive(name: str, fun: Callable[..., jax.Array]) -> core.Primitive:
    def types(x: Any, **params: Any) -> Any:
        out = jax.eval_shape(functools.partial(fun, strided=False, **params), x)
        return jax.core.ShapedArray(out.shape, out.dtype)

    def lowered(context: Any, x: Any, **params: Any) -> Any:
        its = getattr(context.module_context, "axis_context", None)
        strided = getattr(its, "num_devices", 1) > 1
        chosen = functools.partial(fun, strided=strided, **params)
        return mlir.lower_fun(chosen, multiple_results=False)(context, x)

    def now(x: Any, **params: Any) -> jax.Array:
        return fun(x, strided=len(jnp.asarray(x).devices()) > 1, **params)

    new = core.Primitive(name)
    new.def_impl(now)
    new.def_abstract_eval(types)
    mlir.register_lowering(new, lowered)
    return new


def _with_transformations(mine: core.Primitive, other: core.Primitive) -> None:
    def transposed(cotangent: Any, x: Any, **params: Any) -> list[Any]:
        return [other.bind(cotangent, **params)]

    def batched(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
        [x], [dim] = args, dims
        out = mine.bind(jnp.moveaxis(x, dim, -1), **params)
        return out, out.ndim - 1

    ad.deflinear2(mine, transposed)
    batching.primitive_batchers[mine] = batched
