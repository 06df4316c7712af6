"""The time of a whole window: this library, its peers, and the sum of the parts.

    python benchmarks/window.py [--json FILE] [--rounds N] [--layers N] [--width N]

A window is k = 8 micro-batches and one Adam step, in one donated jit (or in a host
loop, for `optax.MultiSteps`). The peers take turns in one process, and a time is the
median over the rounds. The parts are measured in the same turns: k gradients of a
micro-batch, k - 1 adds of the gradient tree, and one Adam step. There are two models:
one scans over its layers and rematerialises them, the other unrolls them. Few rows make
a micro-batch bound by memory, and many make it bound by compute.
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import peers
import record

OURS = (peers.OURS, peers.OURS_PLAIN)
PEERS = (peers.SCAN, peers.MICROBATCHING, peers.MULTI_STEPS, peers.TWO_PROGRAMS)


def seconds(call: Any) -> tuple[float, Any]:
    """The seconds until all results of a call are ready, and the results."""
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


def measure(loss: Any, params: Any, rows: int, k: int, rounds: int) -> dict[str, float]:
    """Median seconds of each way to do a window, and of each part."""
    opt = optax.adam(1e-3)
    width = jax.tree.leaves(params)[0].shape[-1]  # the last axis of "down"
    batch = jax.random.normal(jax.random.key(1), (k * rows, width))
    micro = batch[:rows]

    def fresh() -> Any:
        return jax.tree.map(jnp.copy, params)

    ways: dict[str, Any] = {
        way: peers.step_of(gradient, opt)
        for way, gradient in peers.in_one_call(loss, k, rows).items()
    }
    states = {way: (fresh(), opt.init(params)) for way in ways}
    for way, loop in peers.in_many_calls(loss, opt, k).items():
        ways[way], states[way] = loop, loop.init(params)

    gradient = jax.jit(jax.value_and_grad(loss))
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
    update = peers.step_of(lambda params, grads: (jnp.zeros([]), grads), opt)
    total = jax.tree.map(jnp.zeros_like, params)
    update_state = fresh(), opt.init(params)

    times = {name: [] for name in (*ways, "gradient", "add", "update")}
    for turn in range(rounds + 1):
        for way, step in ways.items():
            elapsed, (states[way], _) = seconds(
                lambda step=step, way=way: step(states[way], batch)
            )
            times[way].append(elapsed)
        elapsed, (_, grads) = seconds(lambda: gradient(params, micro))
        times["gradient"].append(elapsed)
        elapsed, total = seconds(lambda t=total, g=grads: add(t, g))
        times["add"].append(elapsed)
        elapsed, (update_state, _) = seconds(
            lambda s=update_state, g=grads: update(s, g)
        )
        times["update"].append(elapsed)
        if turn == 0:
            times = {name: [] for name in times}  # the first turn compiles
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    """Prints a table for each case, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--rows", type=int, nargs="+", help="of a micro-batch")
    args = parser.parse_args()
    k = args.k
    rounds = args.rounds or (1 if args.quick else 7)
    layers = args.layers or (2 if args.quick else 12)
    width = args.width or (32 if args.quick else 512)

    results: list[dict[str, Any]] = []
    for scanned in (True, False):
        loss = peers.scanned_loss if scanned else peers.unrolled_loss
        params = peers.make_params(layers, width, scanned)
        for rows in args.rows or ([4] if args.quick else [4, 256]):
            median = measure(loss, params, rows, k, rounds)
            parts = k * median["gradient"] + (k - 1) * median["add"] + median["update"]
            fastest = min(median[peer] for peer in PEERS)
            kind = "scan over layers" if scanned else "unrolled layers"
            ways = (*OURS, peers.OURS_LOOP, *PEERS)
            print(f"\n{kind}, micro-batches of {rows} rows; parts {parts * 1e3:.0f} ms")
            record.print_table(
                ["way", "ms", "/ parts", "/ fastest peer"],
                [
                    [
                        *(way, round(median[way] * 1e3, 1)),
                        *(round(median[way] / x, 2) for x in (parts, fastest)),
                    ]
                    for way in ways
                ],
            )
            results.append(
                {
                    "model": kind,
                    "rows": rows,
                    "seconds": median,
                    "sum_of_parts": parts,
                    "ratio_to_parts": {w: median[w] / parts for w in ways},
                    "ratio_to_fastest_peer": {w: median[w] / fastest for w in OURS},
                }
            )
    content = {"num_microbatches": k, "rounds": rounds, "layers": layers}
    record.write(args.json, content | {"width": width, "results": results})


if __name__ == "__main__":
    main()
