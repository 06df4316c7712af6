"""Choices by a predicate: a Python bool (no choice in the program) or a traced bool."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ga_optax import accumulator

Predicate = bool | jax.Array
T = TypeVar("T")


def branch(
    predicate: Predicate, do: Callable[[], T], leave: Callable[[], T], run_both: bool
) -> T:
    """Runs `do` if the predicate is true, else `leave`.

    With `run_both` there is no conditional: both run, and one result is selected.
    """
    if isinstance(predicate, bool):
        return do() if predicate else leave()
    if run_both:
        return select(predicate, do(), leave())
    return jax.lax.cond(predicate, _fenced(do), _fenced(leave))


def _fenced(branch: Callable[[], T]) -> Callable[[], T]:
    """`branch` with an optimization barrier around its smallest result.

    XLA's GPU compiler turns a conditional with elementwise branches into selects, so
    both branches would run every time. It keeps a conditional that has a barrier in it.
    """

    def fenced() -> T:
        leaves, structure = jax.tree.flatten(branch())
        smallest = min(range(len(leaves)), key=lambda i: jnp.size(leaves[i]))
        leaves[smallest] = jax.lax.optimization_barrier(leaves[smallest])
        return jax.tree.unflatten(structure, leaves)

    return fenced


def select(predicate: Predicate, on_true: T, on_false: T) -> T:
    """Returns one of two trees; a NaN in the other tree has no effect."""
    if isinstance(predicate, bool):
        return on_true if predicate else on_false
    return jax.tree.map(lambda t, f: jnp.where(predicate, t, f), on_true, on_false)


def by_leaf(choices: Sequence[bool], on_true: T, on_false: T) -> T:
    """Takes each leaf from `on_true` if its choice is true, else from `on_false`."""
    trees = jax.tree.leaves(on_true), jax.tree.leaves(on_false)
    leaves = [t if choice else f for choice, t, f in zip(choices, *trees, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(on_false), leaves)


def both(a: Predicate, b: Predicate) -> Predicate:
    """`a` and `b`."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a & b


def count_if(happened: Predicate, counter: jax.Array) -> jax.Array:
    """The counter, plus 1 if the event happened."""
    return jnp.where(happened, accumulator.increment(counter), counter)


def cast_like(tree: Any, like: Any) -> Any:
    """Casts each leaf to the dtype of the same leaf in `like`, so no state drifts."""

    def cast(x: Any, y: Any) -> Any:
        x, dtype = jnp.asarray(x), jax.dtypes.result_type(y)
        return x if x.dtype == dtype else x.astype(dtype)

    return jax.tree.map(cast, tree, like)
