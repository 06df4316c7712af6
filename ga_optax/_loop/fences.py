"""Fences keep a micro-step one program in every grouping.

A micro-step has the same bits in a loop of any length if XLA compiles it the same way,
whatever is around it. Three of its passes look at what is around it: it moves what does
not change out of loops, it removes loops of one iteration, and on CPUs it compiles
small loops as one function.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax import accumulator
from ga_optax._devices import meshes
from ga_optax._loop import trees
from ga_optax._passes import interpret


def fusion_barrier(tree: Any) -> Any:
    """`tree` behind a barrier: XLA moves and fuses nothing across.

    Without the barrier, XLA would compute values of the parameters alone before a loop
    of several micro-steps, and round these values otherwise than in a loop of one.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):  # jax 0.10 mixes the varying axes of one barrier
        if _is_value(x):
            groups.setdefault(meshes.varying(x), []).append(i)
    for members in groups.values():
        fenced = jax.lax.optimization_barrier([leaves[i] for i in members])
        leaves = interpret.put(leaves, members, fenced)
    return jax.tree.unflatten(structure, leaves)


def _is_value(x: Any) -> bool:
    """True for an array, and not for a reference that `fun` closes over."""
    return isinstance(jax.typeof(x), jax.core.ShapedArray)


def cast_inside(
    leaves: list[jax.Array], narrowed: list[bool], zero: jax.Array
) -> list[jax.Array]:
    """The leaves. XLA casts the leaves that are `narrowed` in each micro-step.

    On TPUs XLA drops barriers, casts such leaves before the loop over micro-batches,
    and holds the casts while the loop runs. XLA cannot do so if the leaves depend on a
    zero that XLA does not know. The subtraction and the cast are one kernel, and x - 0
    is x for every x.
    """
    chosen = [i for i, is_narrowed in enumerate(narrowed) if is_narrowed]
    if not chosen:
        return leaves

    def inside(zero: jax.Array, *xs: jax.Array) -> list[jax.Array]:
        return [x - zero.astype(x.dtype) for x in xs]

    xs = [leaves[i] for i in chosen]
    new = jax.lax.platform_dependent(
        zero, *xs, tpu=inside, default=lambda _, *xs: [*xs]
    )
    return interpret.put(leaves, chosen, new)


def single_step(step: Callable[..., Any], start: Any, batch: list[jax.Array]) -> Any:
    """Runs one micro-step in a conditional that XLA cannot fold on CPUs.

    XLA compiles a branch by itself, as the body of a loop. XLA would inline a loop of
    one iteration, and on CPUs round differently.
    """
    true = jax.lax.platform_dependent(
        cpu=lambda: jax.lax.optimization_barrier(jnp.ones([], bool)),
        default=lambda: jnp.ones([], bool),
    )
    state, collected = if_holds(true, step, start, batch)
    return state, jax.tree.map(lambda x: x[None], collected)


def if_holds(
    predicate: jax.Array, step: Callable[..., Any], start: Any, batch: list[jax.Array]
) -> Any:
    """`step(start, batch)`, or `start` and zeros to collect."""
    step, (_, types) = _traced_once(step, start, batch)
    types, structure = jax.tree.flatten(types)

    def stay() -> Any:
        return start, jax.tree.unflatten(structure, trees.blank(types))

    return jax.lax.cond(predicate, lambda: step(start, batch), stay)


def next_count(count: jax.Array) -> jax.Array:
    """`count + 1`. On CPUs by a sort, which XLA does not fuse into one function.

    In a loop that is one function, XLA adds in another order and contracts other
    products than in operations compiled one by one (jaxlib 0.10 to 0.12).
    """
    return jax.lax.platform_dependent(
        count,
        accumulator.increment(count),
        cpu=lambda *pair: jax.lax.sort(jnp.stack(pair))[1],
        default=lambda _, following: following,
    )


def _traced_once(fun: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """`fun` as a program that is traced, and the types of its results.

    Where it is called, its equations are run; Python and differentiation are done.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(
            structure, interpret.results(closed, jax.tree.leaves(args))
        )

    return run, jax.tree.unflatten(structure, [x.aval for x in closed.jaxpr.outvars])
