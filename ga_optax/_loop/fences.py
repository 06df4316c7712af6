"""What keeps a micro-step one program in every grouping.

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
from ga_optax._passes import ir


def fusion_barrier(tree: Any) -> Any:
    """`tree`, which XLA computes before what reads it, and fuses nothing across.

    Without it, XLA would compute what depends on the parameters alone before a loop of
    several micro-steps, and round it in another way than in a loop of one.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):  # jax 0.10 mixes the varying axes of one barrier
        if _is_value(x):
            groups.setdefault(meshes.varying(x), []).append(i)
    for members in groups.values():
        fenced = jax.lax.optimization_barrier([leaves[i] for i in members])
        leaves = ir.put(leaves, members, fenced)
    return jax.tree.unflatten(structure, leaves)


def _is_value(x: Any) -> bool:
    """Whether it is an array, and not a reference that `fun` closes over."""
    return isinstance(jax.typeof(x), jax.core.ShapedArray)


def cast_inside(
    leaves: list[jax.Array], narrowed: list[bool], zero: jax.Array
) -> list[jax.Array]:
    """The leaves; XLA casts those that are `narrowed` in each micro-step.

    On TPUs it drops barriers, casts such leaves before the loop over micro-batches, and
    holds what comes out for as long as that runs. It cannot do so with what depends on
    a zero that it does not know. The subtraction and the cast are one kernel, and x - 0
    is x, whatever it is.
    """
    chosen = [i for i, its in enumerate(narrowed) if its]
    if not chosen:
        return leaves

    def inside(zero: jax.Array, *xs: jax.Array) -> list[jax.Array]:
        return [x - zero.astype(x.dtype) for x in xs]

    xs = [leaves[i] for i in chosen]
    new = jax.lax.platform_dependent(
        zero, *xs, tpu=inside, default=lambda _, *xs: [*xs]
    )
    return ir.put(leaves, chosen, new)


def alone(step: Callable[..., Any], start: Any, batch: list[jax.Array]) -> Any:
    """One micro-step, which XLA compiles by itself, as it does the body of a loop.

    XLA removes a loop of one micro-step. On CPUs it cannot tell that this conditional
    has one way; elsewhere that is not needed, and the predicate is known.
    """
    state, collected = if_holds(true(), step, start, batch)
    return state, jax.tree.map(lambda x: x[None], collected)


def if_holds(
    predicate: jax.Array, step: Callable[..., Any], start: Any, batch: list[jax.Array]
) -> Any:
    """`step(start, batch)`, or `start` and zeros to collect."""
    step, (due, types) = ir.traced_once(step, start, batch)
    types, structure = jax.tree.flatten(types)

    def stay() -> Any:
        def kept(x: jax.Array, due: Any) -> jax.Array:  # a sum may have been reduced
            same = x.shape == due.shape and meshes.varying(x) == meshes.varying(due)
            return x if same else trees.blank([due])[0]

        state = jax.tree.map(kept, start, due)
        return state, jax.tree.unflatten(structure, trees.blank(types))

    return jax.lax.cond(predicate, lambda: step(start, batch), stay)


def true() -> jax.Array:
    """True, which XLA does not know on CPUs."""
    return jax.lax.platform_dependent(
        cpu=lambda: jax.lax.optimization_barrier(jnp.ones([], bool)),
        default=lambda: jnp.ones([], bool),
    )


def next_count(count: jax.Array) -> jax.Array:
    """`count + 1`; on CPUs by a sort.

    That keeps XLA from compiling a loop as one function, in which it adds in another
    order and contracts other products than in operations compiled one by one.
    """
    return jax.lax.platform_dependent(
        count,
        accumulator.increment(count),
        cpu=lambda *pair: jax.lax.sort(jnp.stack(pair))[1],
        default=lambda _, following: following,
    )
