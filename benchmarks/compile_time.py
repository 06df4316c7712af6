"""How long a window takes to compile, against the number of micro-batches.

    python benchmarks/compile_time.py

A window of k micro-batches and one Adam step is traced, lowered and compiled, without
any cache. The ways take turns in one process, and the table gives medians.
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
    content = {"layers": layers, "width": args.width, "rows": args.rows}
    record.write(args.json, content | {"rounds": rounds, "results": results})


if __name__ == "__main__":
    main()
