"""How long a window takes to compile, against micro-batches, and to trace, by its size.

    python benchmarks/compile_time.py

A window of k micro-batches and one Adam step is traced, lowered and compiled, without
any cache. The ways take turns in one process, and the table gives medians. Larger
programs of many leaves are traced and lowered alone, without an optimizer, in seconds
of the processor: that is what the passes cost, and it is to grow as the program does.
"""

import collections
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import peers
import record

WIDTH = 8  # of the large programs
WAYS = (peers.OURS, peers.SCAN, peers.MICROBATCHING, peers.UNROLLED)


def seconds(loss: Any, params: Any, way: str, rows: int, k: int) -> float:
    """How long one way takes from the Python function to the compiled program."""
    jax.clear_caches()
    opt = optax.adam(1e-3)
    state = params, jax.eval_shape(opt.init, params)
    batch = jax.ShapeDtypeStruct((k * rows, params["up"].shape[1]), jnp.float32)
    ways = peers.in_one_call(loss, k, rows)
    ways[peers.UNROLLED] = peers.unrolled_loop(loss, k)
    step = peers.step_of(ways[way], opt)
    start = time.perf_counter()
    step.lower(state, batch).compile()
    return time.perf_counter() - start


# -- Large programs --------------------------------------------------------------------


def of_leaves(number: int) -> tuple[Any, Any]:
    """A loss of so many vectors, and their shapes."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for scale, shift in zip(params[::2], params[1::2], strict=True):
            x = jnp.tanh(x * scale + shift)
        return jnp.mean(jnp.square(x))

    return loss, [jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)] * number


def of_layers(number: int) -> tuple[Any, Any]:
    """A loss of so many separate dense layers, and the shapes of their matrices."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x))

    return loss, [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * number


def of_blocks(number: int) -> tuple[Any, Any]:
    """A loss of so many separate transformer blocks, and their shapes."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        squares = jnp.mean(jnp.square(x), -1, keepdims=True)
        return x * jax.lax.rsqrt(squares + 1e-6) * scale

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            h = norm(x, p["first"])
            q, k, v = h @ p["q"], h @ p["k"], h @ p["v"]
            x = x + jax.nn.softmax(q @ k.T) @ v @ p["out"]
            x = x + jax.nn.gelu(norm(x, p["second"]) @ p["up"]) @ p["down"]
        return jnp.mean(jnp.square(x))

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    block = {name: shape(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    block |= {"up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
    block |= {"first": shape(1, WIDTH), "second": shape(1, WIDTH)}
    return loss, [block] * number


def traced(model: tuple[Any, Any], way: str, k: int = 4, rows: int = 4) -> float:
    """How long the processor takes to trace and lower a window."""
    loss, params = model
    gradient = jax.jit(peers.in_one_call(loss, k, rows)[way])
    jax.clear_caches()
    start = time.process_time()
    gradient.lower(params, jax.ShapeDtypeStruct((k * rows, WIDTH), jnp.float32))
    return time.process_time() - start


def of_large_programs(quick: bool, rounds: int) -> list[dict[str, Any]]:
    """Seconds to trace and lower each program, the least of some rounds."""
    leaves = [20] if quick else [100, 1000, 5000]
    models = {f"{n} leaves": of_leaves(n) for n in leaves}
    models["dense layers"] = of_layers(3 if quick else 300)
    models["transformer blocks"] = of_blocks(1 if quick else 30)
    ways, results = (peers.OURS, peers.SCAN), []
    traced(of_leaves(2), peers.OURS)  # imports, and warms up
    for name, model in models.items():
        rows = [[traced(model, way) for way in ways] for _ in range(rounds)]
        ours, scan = map(min, zip(*rows, strict=True))
        results.append(
            {
                "program": name,
                "seconds": {peers.OURS: ours, peers.SCAN: scan},
                "over_plain_scan": ours / scan,
            }
        )
    return results


def main() -> None:
    """Prints the table, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--k", type=int, nargs="+")
    args = parser.parse_args()
    ks = args.k or ([2] if args.quick else peers.doubling(64))
    rounds = args.rounds or (1 if args.quick else 3)
    layers = args.layers or (1 if args.quick else 4)

    params = jax.eval_shape(lambda: peers.make_params(layers, args.width))
    results: list[dict[str, Any]] = []
    for k in ks:
        times = collections.defaultdict(list)
        for turn in range(rounds + 1):
            for way in WAYS:
                taken = seconds(peers.scanned_loss, params, way, args.rows, k)
                if turn:  # the first turn imports and warms up
                    times[way].append(taken)
        median = {way: statistics.median(t) for way, t in times.items()}
        over = {way: t / median[peers.SCAN] for way, t in median.items()}
        results.append({"k": k, "seconds": median, "over_plain_scan": over})
    print(f"\nSeconds to compile; a model of {layers} scanned layers")
    record.print_table(
        ["k", *WAYS],
        [[r["k"], *(round(r["seconds"][way], 2) for way in WAYS)] for r in results],
    )
    large = of_large_programs(args.quick, rounds)
    print("\nSeconds of the processor to trace and lower large programs")
    record.print_table(
        ["program", *large[0]["seconds"], "ratio"],
        [
            [
                r["program"],
                *(round(x, 2) for x in r["seconds"].values()),
                round(r["over_plain_scan"], 2),
            ]
            for r in large
        ],
    )
    content = {"layers": layers, "width": args.width, "rows": args.rows}
    content |= {"rounds": rounds, "results": results, "large": large}
    record.write(args.json, content)


if __name__ == "__main__":
    main()
