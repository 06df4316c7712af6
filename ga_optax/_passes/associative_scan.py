"""`associative_scan`: JAX's, of which the partition knows what it computes.

    associative_scan(fn, x)[i]  =  fn(... fn(fn(x[0], x[1]), x[2]) ..., x[i])

JAX writes a recursion over slices of every second element, which does not say so. In a
program that will be partitioned a call is one equation instead: with that recursion as
its program, and beside it the function, of two single elements.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from . import jaxprs, new_primitive, primitives
from .rowwise import is_read

SCAN = primitives.SCAN


def associative_scan(
    fn: Callable[..., Any], elems: Any, reverse: bool = False, axis: int = 0
) -> Any:
    """`jax.lax.associative_scan`, which micro-batches divide along the rows.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, x):  # one sequence, whose tokens are the rows
    ...     decays, states = ga.associative_scan(
    ...         lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (0 * x + w, x)
    ...     )
    ...     return jnp.mean(states**2)
    >>> w, tokens = jnp.float32(0.5), jnp.arange(8.0)
    >>> print("%.3f, %.3f" % jax.jit(ga.value_and_grad(loss, 4))(w, tokens))
    46.604, 111.263

    Use it in place of JAX's function if the scan goes along the rows of the batch, such
    as the tokens of one sequence (`batch_axes=1`): each micro-batch then scans its own
    rows, and starts from what all rows before it give. A scan along another axis needs
    no change. Under `jax.vmap` it is JAX's function: pass `axis` instead.

    **Exactness.** Outside of `value_and_grad` and `microbatch` it is JAX's function,
    and costs nothing. Inside, elements are combined in another order, so results are
    equal to rounding if `fn` is associative, which JAX requires as well.

    Args:
      fn: an associative function of two trees like `elems`, as in JAX: of slices, so
        for any length of `axis`.
      elems: a tree of arrays `[..., n, ...]`, of one length along `axis`.
      reverse: scan from the end; static.
      axis: the axis of the scan; static.

    Returns:
      A tree like `elems`: at each place the combination of all elements up to it.

    Raises:
      TypeError, ValueError: what `jax.lax.associative_scan` raises.
    """
    if not is_read():
        return jax.lax.associative_scan(fn, elems, reverse, axis)
    return scan_as_one(fn, elems, reverse, axis)


def scan_as_one(fn: Any, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """A scan as one equation."""
    plain = jax.lax.associative_scan
    leaves, structure = jax.tree.flatten(elems)

    def scanned(*xs: Any) -> Any:
        return plain(fn, structure.unflatten(xs), reverse, axis)

    def of_two(*xs: Any) -> list[Any]:
        xs = tuple(jnp.expand_dims(x, dim) for x in xs)
        out = fn(structure.unflatten(xs[:n]), structure.unflatten(xs[n:]))
        return [x.squeeze(dim) for x in jax.tree.leaves(out)]

    program: Any = jax.make_jaxpr(scanned)(*leaves)  # raises what JAX raises
    n, dim = len(leaves), axis % jnp.ndim(leaves[0])
    if program.effects or jnp.shape(leaves[0])[dim] < 2:
        return plain(fn, elems, reverse, axis)
    first = functools.partial(jax.lax.index_in_dim, index=0, axis=dim, keepdims=False)
    types = [jax.eval_shape(first, x) for x in program.out_avals]
    pair: Any = jax.make_jaxpr(of_two)(*types, *types)
    known = [*program.jaxpr.constvars, *pair.jaxpr.constvars]
    out = _scan_primitive().bind(
        *leaves,
        *program.consts,
        *pair.consts,
        program=_with_arguments(program, known),
        pair=_with_arguments(pair, known),
        along=dim,
        reverse=reverse,
    )
    return structure.unflatten(out)


def _with_arguments(closed: Any, more: list[Any]) -> Any:
    """A program with more arguments, the last ones, in place of its constants."""
    jaxpr = jaxprs.closing_over(closed.jaxpr, [], [], [*closed.jaxpr.invars, *more])
    return core.ClosedJaxpr(jaxpr, ())


@functools.cache
def _scan_primitive() -> core.Primitive:
    def plain(program: Any, **_: Any) -> tuple[Any, int]:
        return core.jaxpr_as_fun(program), len(program.in_avals)

    def derived(xs: Any, moved: Any, dots: Any, *, program: Any, **_: Any) -> Any:
        return new_primitive.differentiated(core.jaxpr_as_fun(program), xs, moved, dots)

    def batched(_: Any, xs: Any, dims: Any, *, program: Any, **__: Any) -> Any:
        # Jitted, it has the line of its caller.
        return jax.vmap(jax.jit(core.jaxpr_as_fun(program)), dims)(*xs)

    return new_primitive.primitive(SCAN, new_primitive.How(plain, batched, derived))
