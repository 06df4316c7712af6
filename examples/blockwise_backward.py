"""A backward pass block by block: one block's gradient beside the accumulator.

    python examples/blockwise_backward.py

`jax.grad` returns the gradient of the whole model, and then it has to lie somewhere.
Here a transformer that reads Python source goes backward one block at a time, from the
last to the first: `jax.vjp` of one block, `ga.blocks.add` of its gradient, and that
gradient is gone before the next one comes. The forward pass keeps what enters each
block; a block computes the rest again when its turn comes. This is what a trainer does
whose model does not fit next to its gradient, or that fetches its blocks one by one.

All layers have the same shapes, so one forward, one backward and one addition are
compiled for all of them.

The script takes one window both ways, `ga.accumulate` and block by block, over the
same micro-batches, and prints for every block how many elements differ. In the first
column the arithmetic is the same: a micro-batch counts by its tokens, and that weight
goes into the backward pass, as the cotangent of the loss. No element differs but in the
embedding: `accumulate` adds the gradient of each token's row to the sum, one after the
other, and this script adds up the rows of a micro-batch first. In the second column
`blocks.add(..., weight=tokens)` multiplies the finished gradient instead: the same
number, rounded elsewhere, so the last bits differ.

Then it prints the memory that both need, and trains for a while, block by block. On a
CPU it exits with 1 if the first column shows more than that; elsewhere the compiler may
fuse a whole model otherwise than its blocks.

It needs flax, matplotlib, orbax-checkpoint and tqdm, as `char_lm.py` does, from which
the corpus comes: the dependency group `demo`.
"""

import argparse
import collections
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Next to this script.  # pyrefly: ignore[missing-import]
from char_lm import PAD, VOCABULARY, count_tokens, draw_window, load_corpus

import ga_optax as ga
from ga_optax import accumulator, blocks

LENGTH = 64  # tokens of an example
HEADS = 4
BATCH = 32  # lines in a window
K = 8  # micro-batches in a window
SEED = 0

# -- The model: blocks of parameters, and a function for each kind ---------------------


def init_params(layers: int, width: int) -> dict[str, Any]:
    """Parameters by block: `embed`, `layer_0` and so on, `head`."""
    keys = iter(jax.random.split(jax.random.key(SEED), 4 * layers + 3))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / np.sqrt(rows)

    params = {
        "embed": {
            "tokens": matrix(VOCABULARY, width),
            "positions": matrix(LENGTH, width),
        }
    }
    for i in range(layers):
        params[f"layer_{i}"] = {
            "attention": matrix(width, 3 * width),
            "down": matrix(4 * width, width),
            "out": matrix(width, width),
            "up": matrix(width, 4 * width),
        }
    params["head"] = {"logits": matrix(width, VOCABULARY)}
    return params


def normalize(x: jax.Array) -> jax.Array:
    """Divides each token by its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def embed(p: Any, tokens: jax.Array) -> jax.Array:
    """Maps tokens `[lines, LENGTH + 1]` to `[lines, LENGTH, width]`."""
    return p["tokens"][tokens[:, :-1]] + p["positions"][None]


def layer(p: Any, x: jax.Array) -> jax.Array:
    """Attention, then two dense layers."""
    lines, length, width = x.shape
    q, k, v = jnp.split(normalize(x) @ p["attention"], 3, axis=-1)
    q, k, v = (y.reshape(lines, length, HEADS, -1) for y in (q, k, v))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(lines, length, width) @ p["out"]
    return x + jax.nn.gelu(normalize(x) @ p["up"]) @ p["down"]


def head(p: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of the tokens that are no padding."""
    targets = tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        normalize(x) @ p["logits"], targets
    )
    total = jnp.sum(jnp.where(targets != PAD, losses, jnp.zeros_like(losses)))
    return total / jnp.maximum(count_tokens(tokens), 1).astype(total.dtype)


def layers_of(params: Any) -> list[str]:
    """The names of the layers, first to last."""
    return [f"layer_{i}" for i in range(len(params) - 2)]


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """The whole model in one function; layers compute again what they do not keep."""
    x = embed(params["embed"], tokens)
    for name in layers_of(params):
        x = jax.checkpoint(layer)(params[name], x)
    return head(params["head"], x, tokens)


# -- The pieces: one program for each kind of block ------------------------------------


@jax.jit
def embed_forward(p: Any, tokens: jax.Array) -> jax.Array:
    """The input of the first layer."""
    return embed(p, tokens)


@jax.jit
def layer_forward(p: Any, x: jax.Array) -> jax.Array:
    """The input of the next layer."""
    return layer(p, x)


@jax.jit
def head_backward(p: Any, x: jax.Array, tokens: jax.Array, scale: jax.Array) -> Any:
    """The loss, and `scale` times the gradients for the head and the head's input."""
    loss, pullback = jax.vjp(lambda p, x: head(p, x, tokens), p, x)
    grads, below = pullback(scale.astype(loss.dtype))
    return loss, below, grads


@functools.partial(jax.jit, donate_argnums=2)
def layer_backward(p: Any, x: jax.Array, above: jax.Array) -> Any:
    """The gradients for a layer and for the layer's input; overwrites `above`."""
    _, pullback = jax.vjp(layer, p, x)
    grads, below = pullback(above)
    return below, grads


@jax.jit
def embed_backward(p: Any, tokens: jax.Array, above: jax.Array) -> Any:
    """The gradient for the embedding."""
    _, pullback = jax.vjp(lambda p: embed(p, tokens), p)
    return pullback(above)[0]


# -- Memory ----------------------------------------------------------------------------


class Memory:
    """The peak of memory, in bytes, over the runs of all pieces.

    The memory of a run is that of all live arrays, without the arrays from before the
    first run except the parameters, plus the program's temporaries and the results
    without a donated buffer, from XLA's analysis. `blocks.add` works in place.
    """

    def __init__(self, params: Any) -> None:
        """Leaves out the live arrays, except `params`."""
        gc.collect()
        self.before = _alive() - _size(params)
        self.peak = 0
        self.when = ""
        self.compiled: dict[Any, Any] = {}
        self.calls: collections.Counter[str] = collections.Counter()

    def run(self, piece: Any, *args: Any) -> Any:
        """Calls a jitted function, and counts."""
        name = piece.__name__
        shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(args)]
        key = (name, tuple(shapes))
        if key not in self.compiled:
            self.compiled[key] = piece.lower(*args).compile()
        memory = self.compiled[key].memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        self.count(memory.temp_size_in_bytes + new, name)
        self.calls[name] += 1
        return self.compiled[key](*args)

    def count(self, more: int, name: str) -> None:
        """Notes that `more` bytes were needed beside the arrays that are alive."""
        needed = _alive() - self.before + more
        if needed > self.peak:
            self.peak, self.when = needed, name


def _size(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _alive() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


# -- One window, both ways -------------------------------------------------------------


def call(piece: Any, *args: Any) -> Any:
    """Calls, and counts nothing."""
    return piece(*args)


def add_micro_batch(
    partition: blocks.Partition,
    acc: Any,
    params: Any,
    tokens: jax.Array,
    scale: jax.Array,
    weight: jax.Array | None,
    run: Callable[..., Any] = call,
    note: Callable[[int, str], None] = lambda more, name: None,
) -> tuple[jax.Array, Any]:
    """One micro-step, block by block; returns the loss and the accumulator.

    Args:
      partition: the blocks of `params`.
      acc: the accumulator.
      params: the parameters.
      tokens: the micro-batch.
      scale: the cotangent of the loss.
      weight: for `blocks.add`.
      run: calls a piece.
      note: is told before an addition.
    """

    def add(name: str, grads: Any) -> None:
        nonlocal acc
        note(0, "blocks.add")
        acc = blocks.add(partition, acc, name, grads, weight)

    names = layers_of(params)
    entered = [run(embed_forward, params["embed"], tokens)]
    for name in names:
        entered.append(run(layer_forward, params[name], entered[-1]))

    # No name holds a gradient while the next one is made: it would stay alive.
    loss, above, grads = run(
        head_backward, params["head"], entered.pop(), tokens, scale
    )
    add("head", grads)
    for name in reversed(names):
        del grads
        above, grads = run(layer_backward, params[name], entered.pop(), above)
        add(name, grads)
    del grads
    add("embed", run(embed_backward, params["embed"], tokens, above))
    return loss, acc


@functools.partial(jax.jit, donate_argnums=0)
def gradient(params: Any, window: Any) -> tuple[jax.Array, Any]:
    """The loss and the gradient of a window, by `ga.accumulate`."""
    add = ga.accumulate(loss_fn, K, weight_fn=count_tokens)
    value, acc = add(accumulator.init(params), params, window)
    return value, accumulator.mean(acc)


def divide(total: Any, weight: jax.Array) -> Any:
    """The mean, in the buffers of the sum."""
    return accumulator.mean(accumulator.Accumulator(total, weight, jnp.int32(0)))


def block_by_block(
    partition: blocks.Partition,
    params: Any,
    window: np.ndarray,
    k: int,
    memory: Memory | None = None,
    as_cotangent: bool = True,
) -> tuple[float, Any]:
    """The loss and the gradient of a window, as `ga.accumulate` computes them.

    Args:
      partition: the blocks of `params`.
      params: the parameters.
      window: the tokens of the window, `[lines, LENGTH + 1]`.
      k: the number of micro-batches.
      memory: measures the peak, if not None.
      as_cotangent: whether the tokens of a micro-batch scale the loss, or are the
        weight of the additions.
    """
    acc: Any = accumulator.init(params)
    hooks = (memory.run, memory.count) if memory else ()
    losses, counts = [], []
    for micro_batch in np.split(window, k):
        tokens = jnp.asarray(micro_batch)
        weight = count_tokens(tokens).astype(jnp.float32)
        one = jnp.ones_like(weight)
        scale, weight_or_none = (weight, None) if as_cotangent else (one, weight)
        loss, acc = add_micro_batch(
            partition, acc, params, tokens, scale, weight_or_none, *hooks
        )
        losses.append(float(loss))
        counts.append(float(weight))
    mean = divide(acc.total, jnp.float32(sum(counts)))
    return float(np.average(losses, weights=counts)), mean


class Comparison(NamedTuple):
    """One block of both gradients.

    Attributes:
      name: the block.
      elements: the number of elements.
      different: the number of elements that differ in a bit.
      relative: the norm of the difference over the norm of the gradient.
    """

    name: str
    elements: int
    different: int
    relative: float


def compare(partition: blocks.Partition, one: Any, other: Any) -> list[Comparison]:
    """Compares two gradients, block by block."""
    rows = []
    for name in partition:
        a, b = (
            np.asarray(blocks.flatten(partition, tree, name)[0])
            for tree in (one, other)
        )
        off = np.linalg.norm((a - b).astype(np.float64)) / np.linalg.norm(a)
        different = int(np.sum(a.view(np.uint32) != b.view(np.uint32)))
        rows.append(Comparison(name, a.size, different, float(off)))
    return rows


def agrees(row: Comparison) -> bool:
    """True if the gradient of a block has the same bits.

    A row of the embedding's gradient is a sum over the tokens of the window, in another
    order, so it may differ by the rounding of the sum.
    """
    if row.name == "embed":
        terms = BATCH * LENGTH
        return row.relative <= terms * float(np.finfo(np.float32).eps)
    return row.different == 0


def print_comparison(first: list[Comparison], second: list[Comparison]) -> None:
    """Prints how many elements of each block differ from `ga.accumulate`."""
    print(
        "Elements whose bits differ from those of ga.accumulate, and how far the\n"
        "gradient is off (norms), with the tokens\n\n"
        f"{'block':10}{'elements':>10}{'in the cotangent':>26}{'as weight':>26}"
    )
    for a, b in zip(first, second, strict=True):
        columns = "".join(f"{c.different:15,}{100 * c.relative:9.1g} %" for c in (a, b))
        print(f"{a.name:10}{a.elements:10,}{columns}")


def needed(program: Any) -> int:
    """The bytes that a compiled program needs, from XLA's analysis."""
    sizes = program.memory_analysis()
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        + sizes.temp_size_in_bytes
        - sizes.alias_size_in_bytes
    )


def print_memory(params: Any, window: np.ndarray, whole: Any, memory: Memory) -> None:
    """Prints the memory of each way, and the method of counting."""
    tree = _size(params)
    micro = jax.jit(jax.value_and_grad(loss_fn)).lower(
        params, window[: len(window) // K]
    )
    rows = {
        "jax.grad, and one addition": needed(micro.compile()) + tree,
        "ga.accumulate": needed(whole),
        f"block by block (most in {memory.when})": memory.peak,
    }
    print(
        "\nMemory. For a program what XLA reports: arguments, results, temporaries;\n"
        "for jax.grad the accumulator too. Block by block the most, over all calls,\n"
        "of the arrays that are alive, with temporaries and new results of the call.\n"
        "All hold parameters and accumulator: "
        f"2 x {tree / 2**20:.2f} MiB.\n\n{'':46}{'in all':>10}{'beside both':>16}"
    )
    for name, size in rows.items():
        beside = (size - 2 * tree) / 2**20
        print(f"{name:46}{size / 2**20:6.2f} MiB{beside:12.2f} MiB")
    print("If it accumulates in place, ga.accumulate has no second tree either.")


def train(
    partition: blocks.Partition, params: Any, lines: np.ndarray, steps: int, k: int
) -> list[float]:
    """Trains block by block; returns the loss of each step."""
    opt = optax.adam(3e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, params)
    state = opt.init(params)
    losses = []
    for i in range(steps):
        window = draw_window(lines, jax.random.key(SEED), i, BATCH)
        loss, grads = block_by_block(partition, params, window, k)
        params, state = update(params, state, grads)
        losses.append(loss)
        if (i + 1) % 10 == 0:
            print(f"step {i + 1:4}   loss {loss:.3f} nats a byte", flush=True)
    return losses


def main(argv: list[str] | None = None) -> int:
    """Compares, prints, trains; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="default: 8")
    parser.add_argument("--width", type=int, default=128, help="default: 128")
    parser.add_argument("--steps", type=int, default=20, help="default: 20")
    args = parser.parse_args(argv)
    if args.layers < 1 or args.width < 1 or args.width % HEADS:
        parser.error(
            f"--layers must be at least 1 and --width a multiple of {HEADS}, but they "
            f"are {args.layers} and {args.width}."
        )

    corpus = load_corpus(LENGTH)
    params = init_params(args.layers, args.width)
    partition = blocks.partition(params, 1)
    window = draw_window(corpus.train, jax.random.key(SEED), 0, BATCH)

    memory = Memory(params)
    _, by_block = block_by_block(partition, params, window, K, memory)
    _, weighted = block_by_block(partition, params, window, K, as_cotangent=False)
    whole = jax.jit(gradient).lower(params, window).compile()
    _, expected = whole(params, window)
    same = compare(partition, expected, by_block)
    print_comparison(same, compare(partition, expected, weighted))
    print_memory(params, window, whole, memory)
    del by_block, weighted, expected

    print(f"\n{len(memory.compiled)} programs for {len(partition)} blocks. Training:\n")
    train(partition, params, corpus.train, args.steps, K)
    if not all(map(agrees, same)) and jax.default_backend() == "cpu":
        print("Bits differ where the arithmetic is the same.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
