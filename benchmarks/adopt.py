"""What a project takes on that adopts the library: a decoder of 24 layers.

    python benchmarks/adopt.py

A step of Adam over eight micro-batches, by `ga.value_and_grad` and by a scan that is
written by hand, with the layers in a scan and unrolled. Seconds are of the processor,
the least of three turns; MB are temporaries of the compiled step.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import peers
import record

HEADS, WORDS, K = 8, 4096, 8
COLUMNS = {
    "trace and lower, s": "trace",
    "compile, s": "compile",
    "temporaries, MB": "mb",
    "step, s": "step",
}


def init(layers: int, width: int) -> Any:
    """Parameters of separate layers, and the embedding."""
    keys = iter(jax.random.split(jax.random.key(0), 6 * layers + 1))
    shapes = dict.fromkeys("qkvo", (width, width))
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}

    def matrix(shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    of_layers = [{n: matrix(s) for n, s in shapes.items()} for _ in range(layers)]
    return {"layers": of_layers, "words": matrix((WORDS, width))}


def loss(params: Any, text: jax.Array) -> jax.Array:
    """Mean cross entropy of the next word; layers that are stacked are scanned."""

    @jax.checkpoint
    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        q, k, v = ((h @ p[n]).reshape(*h.shape[:2], HEADS, -1) for n in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h = h + y.reshape(h.shape) @ p["o"]
        return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None

    h = params["words"][text[:, :-1]]
    if isinstance(params["layers"], list):
        for p in params["layers"]:
            h, _ = layer(h, p)
    else:
        h, _ = jax.lax.scan(layer, h, params["layers"])
    each = optax.softmax_cross_entropy_with_integer_labels(
        h @ params["words"].T, text[:, 1:]
    )
    return jnp.mean(each)


def measure(gradient: Any, params: Any, text: jax.Array) -> dict[str, Any]:
    """One turn of one way."""
    jax.clear_caches()
    opt = optax.adam(1e-3)
    state = jax.tree.map(jnp.copy, (params, opt.init(params)))
    seconds: dict[str, Any] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = jax.block_until_ready(run()) if name == "step" else run()
        seconds[name] = time.process_time() - start
        return result

    step = peers.step_of(gradient, opt)
    lowered = timed("trace", lambda: step.lower(state, text))
    program = timed("compile", lowered.compile)
    timed("step", lambda: program(state, text))
    temporaries = program.memory_analysis().temp_size_in_bytes
    return seconds | {"mb": temporaries / 1e6}


def main() -> None:
    """Prints the table, and writes the JSON if asked to."""
    args = record.make_parser(__doc__).parse_args()
    layers, width, length, turns = (2, 32, 16, 1) if args.quick else (24, 128, 256, 3)
    unrolled = init(layers, width)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *unrolled["layers"])
    text = jax.random.randint(jax.random.key(1), (4 * K, length + 1), 0, WORDS)
    ways = {
        name: way
        for name, way in peers.in_one_call(loss, K, 4).items()
        if name in (peers.OURS, peers.SCAN)
    }
    rows = []
    for form, params in (
        ("scanned", unrolled | {"layers": stacked}),
        ("unrolled", unrolled),
    ):
        found = {name: [] for name in ways}
        for _ in range(turns):
            for name, way in ways.items():
                found[name].append(measure(way, params, text))
        for name, each in found.items():
            rows.append(
                {"program": f"{name}, {form} layers"}
                | {key: min(turn[key] for turn in each) for key in each[0]}
            )
    record.print_table(
        ["program", *COLUMNS],
        [[r["program"], *(round(r[key], 2) for key in COLUMNS.values())] for r in rows],
    )
    record.write(args.json, {"num_layers": layers, "results": rows})


if __name__ == "__main__":
    main()
