"""Time and temporaries for each kind of leaf: embeddings, layers, experts and others.

    python benchmarks/leaves.py

How the gradient of a leaf arrives decides what XLA can make of its addition. It
scatters that of an embedding into the sum row by row; it adds a layer's while a loop
writes it. Each kind is compared inside a call with a scan by hand, and across calls
with a micro-step by hand. Temporaries are exact. The sides take turns, and the table
gives medians: of a micro-step across calls that is an open one.
"""

import collections
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import peers
import record

K, ROWS = 8, 8  # micro-batches, and rows of each
INSIDE = (peers.OURS, peers.SCAN, peers.MICROBATCHING)
ACROSS = (peers.OURS_LOOP, peers.TWO_PROGRAMS, peers.MULTI_STEPS)


class Kind(NamedTuple):
    """A model with one kind of leaf.

    Attributes:
      loss: of the parameters and a batch.
      params: shapes of the parameters.
      batch: the shape of a window.
    """

    loss: Callable[[Any, jax.Array], jax.Array]
    params: Any
    batch: jax.ShapeDtypeStruct


# -- Kinds of leaves -------------------------------------------------------------------


def embedding(p: Any, x: jax.Array) -> jax.Array:
    """A table of which rows are looked up."""
    return jnp.mean(jnp.tanh(p["table"][x] @ p["w"]) ** 2)


def tied_embedding(p: Any, x: jax.Array) -> jax.Array:
    """A table that is looked up, and multiplied by at the end."""
    logits = jnp.tanh(p["table"][x[:, 0]] @ p["w"]) @ p["table"].T
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def bias(p: Any, x: jax.Array) -> jax.Array:
    """A long bias."""
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2)


def convolution(p: Any, x: jax.Array) -> jax.Array:
    """Two convolutions."""
    for kernel in ("first", "second"):
        x = jnp.tanh(jax.lax.conv(x, p[kernel], (1, 1), "SAME"))
    return jnp.mean(x**2)


def experts(p: Any, x: jax.Array) -> jax.Array:
    """Layers of which every row takes a weighted mean."""
    gates = jax.nn.softmax(x @ p["gate"])
    hidden = jnp.tanh(jnp.einsum("rd,edh->reh", x, p["up"]))
    return jnp.mean(jnp.einsum("re,reh,ehd->rd", gates, hidden, p["down"]) ** 2)


def kinds(scale: int) -> dict[str, Kind]:
    """Every kind, with sizes that grow with `scale`."""

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    rows, width = K * ROWS, 16 * scale
    tokens = jax.ShapeDtypeStruct((rows, 4), jnp.int32)
    table = {"table": floats(3000 * scale, width), "w": floats(width, width)}
    wide = {"w": floats(8, 2**14 * scale), "b": floats(2**14 * scale)}
    kernels = {"first": floats(width, 8, 3, 3), "second": floats(width, width, 3, 3)}
    layers, x = 4, floats(rows, 2 * width)
    stacks = {
        scanned: jax.eval_shape(
            lambda s=scanned: peers.make_params(layers, 2 * width, s)
        )
        for scanned in (True, False)
    }
    mixed = {
        "gate": floats(2 * width, 8),
        "up": floats(8, 2 * width, 4 * width),
        "down": floats(8, 4 * width, 2 * width),
    }
    return {
        "embedding": Kind(embedding, table, tokens),
        "tied embedding": Kind(tied_embedding, table, tokens),
        "bias": Kind(bias, wide, floats(rows, 8)),
        "convolution": Kind(convolution, kernels, floats(rows, 8, 8, 8)),
        "scanned layers": Kind(peers.scanned_loss, stacks[True], x),
        "unrolled layers": Kind(peers.unrolled_loss, stacks[False], x),
        "experts": Kind(experts, mixed, x),
    }


# -- Programs --------------------------------------------------------------------------


class Side(NamedTuple):
    """A compiled program, and the program's arguments.

    Attributes:
      program: of a carry, and of `inputs`, to a new carry.
      carry: the first; donated if the program donates it.
      inputs: the rest of its arguments.
    """

    program: jax.stages.Compiled
    carry: Any
    inputs: tuple[Any, ...]

    @property
    def temporaries(self) -> int:
        """Their bytes."""
        memory = self.program.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes


def sides(kind: Kind) -> Iterator[tuple[str, Side]]:
    """Every way to add up gradients of this kind of leaf, compiled for shapes."""
    params, batch = kind.params, kind.batch
    ways = peers.in_one_call(kind.loss, K, ROWS)
    for way in INSIDE:
        lowered = jax.jit(ways[way]).lower(params, batch)
        yield way, Side(lowered.compile(), params, (batch,))

    micro = jax.ShapeDtypeStruct((ROWS, *batch.shape[1:]), batch.dtype)
    for way, loop in peers.in_many_calls(kind.loss, optax.adam(1e-3), K).items():
        if isinstance(loop, peers.TwoPrograms):
            carry, inputs, step = params, (params, micro), loop.add
        else:
            carry = params, jax.eval_shape(loop.tx.init, params)
            inputs, step = (micro,), loop.step
        yield way, Side(step.lower(carry, *inputs).compile(), carry, inputs)


def take_turns(sides: dict[str, Side], rounds: int) -> dict[str, float]:
    """Median seconds of a call of each side; the sides take turns."""

    def filled(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.integer):  # tokens, all of them different
            return jnp.arange(shape.size, dtype=shape.dtype).reshape(shape.shape)
        return jnp.full(shape.shape, 0.01).astype(shape.dtype)

    inputs = {way: jax.tree.map(filled, side.inputs) for way, side in sides.items()}
    carries = {way: jax.tree.map(filled, side.carry) for way, side in sides.items()}
    seconds = collections.defaultdict(list)
    for turn in range(rounds + 1):
        for way, side in sides.items():
            start = time.perf_counter()
            out = jax.block_until_ready(side.program(carries[way], *inputs[way]))
            elapsed = time.perf_counter() - start
            if way in ACROSS:
                carries[way] = out[0]
            if turn:  # the first round warms caches and pages
                seconds[way].append(elapsed)
    return {way: statistics.median(times) for way, times in seconds.items()}


def measure(name: str, kind: Kind, rounds: int) -> dict[str, Any]:
    """The row of the table for one kind."""
    compiled = dict(sides(kind))
    time_of = take_turns(compiled, rounds)
    size = peers.tree_bytes(kind.params)

    def over(ways: tuple[str, ...], hand: str) -> dict[str, float]:
        return {way: time_of[way] / time_of[hand] for way in ways}

    return {
        "kind": name,
        "param_bytes": size,
        "param_mb": size / 1e6,
        "temporaries": {way: side.temporaries for way, side in compiled.items()},
        "over_params": {w: side.temporaries / size for w, side in compiled.items()},
        "ms": {way: 1e3 * seconds for way, seconds in time_of.items()},
        "over_hand": over(INSIDE, peers.SCAN) | over(ACROSS, peers.TWO_PROGRAMS),
    }


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--scale", type=int, help="of the sizes")
    parser.add_argument("--rounds", type=int, help="calls of each side")
    args = parser.parse_args()
    scale = args.scale or (1 if args.quick else 8)
    rounds = args.rounds or (1 if args.quick else 21)

    results = [measure(name, kind, rounds) for name, kind in kinds(scale).items()]
    for title, field in (
        ("Temporaries over the parameters", "over_params"),
        ("Time over that by hand", "over_hand"),
    ):
        print(f"\n{title}; k = {K}")
        columns = ["kind", "MB", *INSIDE, *ACROSS]
        record.print_table(
            columns,
            [
                [
                    *(row["kind"], round(row["param_mb"], 1)),
                    *(round(row[field][way], 2) for way in columns[2:]),
                ]
                for row in results
            ],
        )
    content = {"scale": scale, "rounds": rounds, "num_microbatches": K}
    record.write(args.json, content | {"results": results})


if __name__ == "__main__":
    main()
