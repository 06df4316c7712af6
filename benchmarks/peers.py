"""The models that the benchmarks run, and the ways to accumulate that they compare.

A way is a function `gradient(params, batch) -> (value, grads)` over a whole window, or
a host loop that calls a jitted micro-step k times.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax import microbatching

import ga_optax as ga

Gradient = Callable[[Any, jax.Array], tuple[jax.Array, Any]]

OURS = "ga_optax"
OURS_PLAIN = "ga_optax, optimize=False"
OURS_LOOP = "ga.MultiSteps"
OURS_COUNTED = "ga.MultiSteps, static emit"
OURS_TRANSFORMATION = "ga.MultiSteps as a transformation"
SCAN = "plain scan"
MICROBATCHING = "optax.microbatching"
MULTI_STEPS = "optax.MultiSteps"
TWO_PROGRAMS = "two programs"
UNROLLED = "unrolled loop"
SCAN_KEPT = "plain scan, rows kept in place"
IN_ONE_CALL = (OURS, OURS_PLAIN, SCAN, MICROBATCHING)


# -- Models ----------------------------------------------------------------------------


def layer(h: jax.Array, p: Any) -> jax.Array:
    """One residual layer of a multilayer perceptron."""
    return h + jnp.tanh(h @ p["up"]) @ p["down"]


def scanned_loss(params: Any, x: jax.Array) -> jax.Array:
    """The loss of a model that scans over its layers, rematerialised."""
    step = jax.checkpoint(lambda h, p: (layer(h, p), None))
    return jnp.mean(jnp.square(jax.lax.scan(step, x, params)[0]))


def unrolled_loss(params: Any, x: jax.Array) -> jax.Array:
    """The loss of a model of separate layers."""
    for p in params:
        x = layer(x, p)
    return jnp.mean(jnp.square(x))


def make_params(layers: int, width: int, scanned: bool = True) -> Any:
    """Stacked layers, or a list of them; hidden width four times the width."""
    up, down = jax.random.split(jax.random.key(0))
    stacked = {
        "up": jax.random.normal(up, (layers, width, 4 * width)) / width**0.5,
        "down": jax.random.normal(down, (layers, 4 * width, width)) / width,
    }
    if scanned:
        return stacked
    return [jax.tree.map(lambda p, i=i: p[i], stacked) for i in range(layers)]


# -- A window in one call --------------------------------------------------------------


def split(batch: jax.Array, k: int) -> jax.Array:
    """The micro-batches of a window, along a new first axis."""
    return batch.reshape(k, batch.shape[0] // k, *batch.shape[1:])


def split_in_place(devices: int) -> Callable[[jax.Array, int], jax.Array]:
    """A split whose micro-batch i is the i-th part of the rows of each device.

    No row moves. The devices are those of the mesh axis "data".
    """

    def split(batch: jax.Array, k: int) -> jax.Array:
        rest = batch.shape[1:]
        local = batch.reshape(devices, k, -1, *rest).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(
            local.reshape(k, -1, *rest), PartitionSpec(None, "data")
        )

    return split


def plain_scan(
    loss: Callable[..., jax.Array],
    k: int,
    split: Callable[[jax.Array, int], jax.Array] = split,
) -> Gradient:
    """A window written by hand."""

    def gradient(params: Any, batch: jax.Array) -> tuple[jax.Array, Any]:
        def micro_step(carry: Any, x: jax.Array) -> Any:
            return jax.tree.map(
                jnp.add, carry, jax.value_and_grad(loss)(params, x)
            ), None

        zeros = jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(micro_step, zeros, split(batch, k))
        return jax.tree.map(lambda x: x / k, sums)

    return gradient


def unrolled_loop(loss: Callable[..., jax.Array], k: int) -> Gradient:
    """The same as a Python loop under `jax.jit`, with k copies of the model."""

    def gradient(params: Any, batch: jax.Array) -> tuple[jax.Array, Any]:
        sums = jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)
        for x in split(batch, k):
            sums = jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(params, x))
        return jax.tree.map(lambda x: x / k, sums)

    return gradient


def microbatch(loss: Callable[..., jax.Array], rows: int) -> Gradient:
    """Optax's own function, for means, over micro-batches of this many rows."""
    return microbatching.microbatch(
        jax.value_and_grad(loss),
        argnums=1,
        microbatch_size=rows,
        accumulator=microbatching.AccumulationType.MEAN,
    )


def in_one_call(
    loss: Callable[..., jax.Array], k: int, rows: int
) -> dict[str, Gradient]:
    """The ways to do a window of k micro-batches in one call, by name."""
    return {
        OURS: ga.value_and_grad(loss, k),
        OURS_PLAIN: ga.value_and_grad(loss, k, optimize=False),
        SCAN: plain_scan(loss, k),
        MICROBATCHING: microbatch(loss, rows),
    }


def step_of(gradient: Gradient, opt: Any) -> Any:
    """A step `(state, batch) -> (state, value)`, jitted, that donates the state."""

    def step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        value, grads = gradient(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return jax.jit(step, donate_argnums=0)


# -- A window in k calls ---------------------------------------------------------------


class HostLoop:
    """k calls of one jitted micro-step: `optax.MultiSteps`, or ours."""

    def __init__(
        self,
        loss: Callable[..., jax.Array],
        tx: Any,
        k: int,
        counts: bool = False,
        applies: bool = True,
    ) -> None:
        """`tx` is `optax.MultiSteps(opt, k)` or `ga.MultiSteps(opt, k)`.

        With `counts`, the loop counts micro-steps itself and gives ours a static
        `emit`. A second program then does the last micro-step of a window. If not
        `applies`, ours is a transformation as well: `update` and `apply_updates`.
        """
        self.tx, self.k = tx, k
        if isinstance(tx, ga.MultiSteps) and applies:
            self.step = _applied(loss, tx, emit=False if counts else None)
            self.last = _applied(loss, tx, emit=True) if counts else self.step
        else:
            self.step = self.last = step_of(jax.value_and_grad(loss), tx)

    def init(self, params: Any) -> Any:
        """The state of the loop, with its own copy of the parameters."""
        return jax.tree.map(jnp.copy, params), self.tx.init(params)

    def __call__(self, state: Any, batch: jax.Array) -> Any:
        """One window."""
        *first, last = split(batch, self.k)
        for x in first:
            state, _ = self.step(state, x)
        return self.last(state, last)


def _applied(
    loss: Callable[..., jax.Array], tx: ga.MultiSteps, emit: bool | None
) -> Any:
    """A jitted micro-step: a gradient and `ga.apply_gradients`."""

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, x)
        return ga.apply_gradients(tx, grads, opt_state, params, emit=emit), value

    return jax.jit(step, donate_argnums=0)


class TwoPrograms:
    """A host loop of two programs: gradient and add, then update and reset."""

    def __init__(self, loss: Callable[..., jax.Array], opt: Any, k: int) -> None:
        """Defines both programs; compiles nothing yet."""
        self.opt, self.k = opt, k

        def add(total: Any, params: Any, x: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(jnp.add, total, grads), value

        def update(state: Any, total: Any) -> Any:
            params, opt_state = state
            mean = jax.tree.map(lambda t: t / k, total)
            updates, opt_state = opt.update(mean, opt_state, params)
            state = optax.apply_updates(params, updates), opt_state
            return state, jax.tree.map(jnp.zeros_like, total)

        self.add = jax.jit(add, donate_argnums=0)
        self.update = jax.jit(update, donate_argnums=(0, 1))

    def init(self, params: Any) -> Any:
        """The state of the loop, with its own copy of the parameters."""
        state = jax.tree.map(jnp.copy, params), self.opt.init(params)
        return state, jax.tree.map(jnp.zeros_like, params)

    def __call__(self, state: Any, batch: jax.Array) -> Any:
        """One window."""
        (state, total), value = state, None
        for x in split(batch, self.k):
            total, value = self.add(total, state[0], x)
        return self.update(state, total), value


def in_many_calls(loss: Callable[..., jax.Array], opt: Any, k: int) -> dict[str, Any]:
    """The host loops, by name."""
    return {
        OURS_LOOP: HostLoop(loss, ga.MultiSteps(opt, k), k),
        MULTI_STEPS: HostLoop(loss, optax.MultiSteps(opt, k), k),
        TWO_PROGRAMS: TwoPrograms(loss, opt, k),
    }


# -- An optimizer that costs what Shampoo does -----------------------------------------


def shampoo_like(learning_rate: float) -> optax.GradientTransformation:
    """Shampoo's preconditioner for matrices, without the rest of Shampoo.

    L += G Gᵀ, R += Gᵀ G, update = L^(-1/4) G R^(-1/4), both roots at every step, by
    eigendecomposition; no blocks, no grafting, no momentum. It stands for optimizers
    whose step costs many times a gradient, and is not meant to train with.
    """

    def root(m: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(m)
        return (vectors * jnp.maximum(values, 1e-6)[None, :] ** -0.25) @ vectors.T

    def init(params: Any) -> Any:
        return jax.tree.map(
            lambda p: tuple(1e-6 * jnp.eye(n, dtype=p.dtype) for n in p.shape), params
        )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        leaves, structure = jax.tree.flatten(updates)
        old = structure.flatten_up_to(state)
        sides = [
            (left + g @ g.T, right + g.T @ g)
            for g, (left, right) in zip(leaves, old, strict=True)
        ]
        new = [
            root(left) @ g @ root(right)
            for g, (left, right) in zip(leaves, sides, strict=True)
        ]
        return structure.unflatten(new), structure.unflatten(sides)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.scale(-learning_rate)
    )


def needed(compiled: jax.stages.Compiled) -> int:
    """The bytes that a program needs: arguments, results and temporaries."""
    m = compiled.memory_analysis()
    assert m is not None
    total = m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes
    return total - m.alias_size_in_bytes


def tree_bytes(tree: Any) -> int:
    """The bytes of all leaves, which may be arrays or shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def doubling(last: int) -> list[int]:
    """1, 2, 4, ... up to `last`."""
    return list(itertools.takewhile(lambda k: k <= last, (2**i for i in range(32))))
