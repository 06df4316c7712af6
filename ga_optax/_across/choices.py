"""Choices that may be known when the program is traced, and may not.

A predicate is a Python bool, and then there is no choice in the program, or a traced
one.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ga_optax import accumulator

Predicate = bool | jax.Array
T = TypeVar("T")


def branch(
    predicate: Predicate, do: Callable[[], T], leave: Callable[[], T], both: bool
) -> T:
    """`do()` if the predicate holds, else `leave()`: one of them runs.

    With `both` there is no conditional: they both run, and one result is selected.
    """
    if isinstance(predicate, bool):
        return do() if predicate else leave()
    if both:
        return select(predicate, do(), leave())
    return jax.lax.cond(predicate, _fenced(do), _fenced(leave))


def _fenced(way: Callable[[], T]) -> Callable[[], T]:
    """`way` with a barrier around the smallest of its results.

    XLA's GPU compiler makes selects of a conditional with elementwise branches: both
    would run every time. It leaves a conditional alone if there is a barrier in it.
    """

    def run() -> T:
        leaves, structure = jax.tree.flatten(way())
        smallest = min(range(len(leaves)), key=lambda i: jnp.size(leaves[i]))
        leaves[smallest] = jax.lax.optimization_barrier(leaves[smallest])
        return jax.tree.unflatten(structure, leaves)

    return run


def select(predicate: Predicate, on_true: T, on_false: T) -> T:
    """One of two trees, leaf by leaf; a NaN in the other one goes nowhere."""
    if isinstance(predicate, bool):
        return on_true if predicate else on_false
    return jax.tree.map(lambda t, f: jnp.where(predicate, t, f), on_true, on_false)


def by_leaf(which: Sequence[bool], on_true: T, on_false: T) -> T:
    """Two trees of one structure as one: each leaf is that of the first, or not."""
    pairs = zip(which, jax.tree.leaves(on_true), jax.tree.leaves(on_false), strict=True)
    leaves = [t if first else f for first, t, f in pairs]
    return jax.tree.unflatten(jax.tree.structure(on_false), leaves)


def both(a: Predicate, b: Predicate) -> Predicate:
    """`a` and `b`."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def count_if(happened: Predicate, counter: jax.Array) -> jax.Array:
    """A counter, one higher if something happened."""
    return jnp.where(happened, accumulator.increment(counter), counter)


def cast_like(tree: Any, like: Any) -> Any:
    """Gives each leaf the dtype of its leaf in `like`: states must not drift."""

    def cast(x: Any, y: Any) -> Any:
        x, dtype = jnp.asarray(x), jax.dtypes.result_type(y)
        return x if x.dtype == dtype else x.astype(dtype)

    return jax.tree.map(cast, tree, like)
