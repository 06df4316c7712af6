"""Splits a batch into micro-batches, and joins them again.

On one device a micro-batch holds neighbours: of B rows in k micro-batches, micro-batch
i holds the rows from `i·B/k` up to `(i + 1)·B/k`. On several devices the split is
strided: micro-batch i holds the rows i, i + k, i + 2k, ... So it has as many rows of
every device, however the compiler distributes the batch, and no row moves.

If no mesh is named, the number of devices is unknown until a program is lowered: one
traced program may run on one device and on eight. The split is then a primitive, and
its lowering rule chooses.
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

    If `strided` is None, the lowering of the program chooses.
    """
    x = jnp.asarray(x)
    if strided is None:
        return _operations()[0].bind(x, number=num_microbatches, axis=axis)
    return _split(x, num_microbatches, axis, strided)


def join(x: jax.Array, axis: int, strided: bool | None) -> jax.Array:
    """The inverse of `split`: the rows of all micro-batches, in the batch's order."""
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


# -- Splits chosen by the lowering -----------------------------------------------------


@functools.cache
def can_wait() -> bool:
    """True if the lowering can choose a split; warns if not."""
    try:
        _operations()
    except Exception as error:  # any change of JAX must not break the call
        warnings.warn(
            "If no mesh is named, ga_optax splits a batch into neighbouring rows with "
            f"jax {jax.__version__}: {type(error).__name__}: {error}. On several "
            "devices the batch is then gathered. Name the mesh (jax.set_mesh), or use "
            "a newer ga_optax; optimize=False does the same without this warning.",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _operations() -> tuple[core.Primitive, core.Primitive]:
    """`split` and `join` as primitives; each is the transpose of the other."""
    split = _primitive("ga_optax_split", _split)
    join = _primitive("ga_optax_join", _join)
    _add_transformations(split, transpose=join)
    _add_transformations(join, transpose=split)
    return split, join


def _primitive(name: str, fun: Callable[..., jax.Array]) -> core.Primitive:
    def types(x: Any, **params: Any) -> Any:
        out = jax.eval_shape(functools.partial(fun, strided=False, **params), x)
        return jax.core.ShapedArray(out.shape, out.dtype)

    def lowered(context: Any, x: Any, **params: Any) -> Any:
        devices = getattr(context.module_context, "axis_context", None)
        strided = getattr(devices, "num_devices", 1) > 1
        chosen = functools.partial(fun, strided=strided, **params)
        return mlir.lower_fun(chosen, multiple_results=False)(context, x)

    def evaluated(x: Any, **params: Any) -> jax.Array:
        return fun(x, strided=len(jnp.asarray(x).devices()) > 1, **params)

    primitive = core.Primitive(name)
    primitive.def_impl(evaluated)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, lowered)
    return primitive


def _add_transformations(primitive: core.Primitive, transpose: core.Primitive) -> None:
    def transposed(cotangent: Any, x: Any, **params: Any) -> list[Any]:
        return [transpose.bind(cotangent, **params)]

    def batched(args: Any, dims: Any, **params: Any) -> tuple[jax.Array, int]:
        [x], [dim] = args, dims
        out = primitive.bind(jnp.moveaxis(x, dim, -1), **params)
        return out, out.ndim - 1

    ad.deflinear2(primitive, transposed)
    batching.primitive_batchers[primitive] = batched
