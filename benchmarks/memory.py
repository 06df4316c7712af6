"""The memory of a window, against the number of micro-batches, and of a batch by rows.

    python benchmarks/memory.py

A window has a fixed number of rows and one Adam step. The model scans over its layers
and rematerialises them. A program needs temp + argument + output - alias, from XLA's
analysis, to the byte and without running anything. A host loop needs the memory of its
largest program, plus all other arrays on the device. The loop holds one micro-batch at
a time, while one call holds the whole window. By rows, micro-batches have one size.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import peers
import record


def measure(layers: int, width: int, rows: int, k: int) -> dict[str, int]:
    """The bytes that each way needs for a window of k micro-batches."""
    opt = optax.adam(1e-3)
    params = jax.eval_shape(lambda: peers.make_params(layers, width))
    state = params, jax.eval_shape(opt.init, params)
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    micro = jax.ShapeDtypeStruct((rows // k, width), jnp.float32)
    loss = peers.scanned_loss

    sizes = {
        way: peers.needed(peers.step_of(gradient, opt).lower(state, batch).compile())
        for way, gradient in peers.in_one_call(loss, k, rows // k).items()
    }
    for way, loop in peers.in_many_calls(loss, opt, k).items():
        if isinstance(loop, peers.TwoPrograms):
            add = peers.needed(loop.add.lower(params, params, micro).compile())
            update = peers.needed(loop.update.lower(state, params).compile())
            sizes[way] = max(add + peers.tree_bytes(state[1]), update)
        else:
            start: Any = params, jax.eval_shape(loop.tx.init, params)
            sizes[way] = peers.needed(loop.step.lower(start, micro).compile())
    return sizes


def by_rows(layers: int, width: int, rows: int) -> list[dict[str, Any]]:
    """MB that a step needs: undivided, and in micro-batches of `rows / 16`."""
    size = rows // 16
    found = []
    for k in peers.doubling(16):
        one, many = (measure(layers, width, k * size, n) for n in (1, k))
        mb = {UNDIVIDED: one[peers.SCAN]} | {way: many[way] for way in IN_ONE_CALL}
        found.append({"rows": k * size, "mb": {way: b / 1e6 for way, b in mb.items()}})
    return found


UNDIVIDED = "undivided"
IN_ONE_CALL = peers.SCAN, peers.MICROBATCHING, peers.OURS


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--rows", type=int, help="of a window")
    parser.add_argument("--k", type=int, nargs="+")
    args = parser.parse_args()
    layers = args.layers or (2 if args.quick else 12)
    width = args.width or (64 if args.quick else 512)
    rows = args.rows or (256 if args.quick else 16384)
    ks = args.k or ([1, 4] if args.quick else peers.doubling(64))

    params = jax.eval_shape(lambda: peers.make_params(layers, width))
    param_bytes = peers.tree_bytes(params)
    results: list[dict[str, Any]] = []
    for k in ks:
        sizes = measure(layers, width, rows, k)
        results.append(
            {
                "k": k,
                "bytes": sizes,
                "mb": {way: b / 1e6 for way, b in sizes.items()},
                "over_params": {way: b / param_bytes for way, b in sizes.items()},
            }
        )
    ways = list(results[0]["bytes"])
    print(f"\nMB needed; {param_bytes / 1e6:.1f} of parameters, {rows} rows a window")
    record.print_table(
        ["k", *ways], [[r["k"], *(round(r["mb"][w], 1) for w in ways)] for r in results]
    )
    sizes = by_rows(layers, width, rows)
    print(f"\nMB needed; micro-batches of {rows // 16} rows")
    record.print_table(
        ["rows", *sizes[0]["mb"]],
        [[r["rows"], *(round(mb, 1) for mb in r["mb"].values())] for r in sizes],
    )
    content = {"layers": layers, "width": width, "rows": rows, "by_rows": sizes}
    content |= {"param_bytes": param_bytes, "results": results}
    record.write(args.json, content)


if __name__ == "__main__":
    main()
