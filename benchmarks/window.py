"""How long a whole window takes: this library, its peers, and the sum of the parts.

    python benchmarks/window.py [--json FILE] [--rounds N] [--layers N] [--width N]

One window is k = 8 micro-batches and one Adam step, in one donated jit (a host loop for
`optax.MultiSteps`). The peers take turns in one process; a time is the median over the
rounds. The parts, measured in the same turns, are k gradients of a micro-batch, k - 1
adds of the gradient tree, and one Adam step. Two models, layers under a scan with
rematerialisation and layers unrolled; with few rows a micro-batch is bound by memory,
with many by compute.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import microbatching

import ga_optax as ga

K = 8
OURS = ("ga_optax", "ga_optax, by hand")
PEERS = ("plain scan", "optax.microbatching", "optax.MultiSteps")


def layer(h, p):
    """One residual layer of a multilayer perceptron."""
    return h + jnp.tanh(h @ p["up"]) @ p["down"]


def scanned_loss(params, x):
    """The loss of a model that scans over its layers, rematerialised."""
    step = jax.checkpoint(lambda h, p: (layer(h, p), None))
    return jnp.mean(jnp.square(jax.lax.scan(step, x, params)[0]))


def unrolled_loss(params, x):
    """The loss of a model of separate layers."""
    for p in params:
        x = layer(x, p)
    return jnp.mean(jnp.square(x))


def make_params(layers, width, scanned):
    """Stacked layers, or a list of them; hidden width four times the width."""
    up, down = jax.random.split(jax.random.key(0))
    stacked = {
        "up": jax.random.normal(up, (layers, width, 4 * width)) / width**0.5,
        "down": jax.random.normal(down, (layers, 4 * width, width)) / width,
    }
    if scanned:
        return stacked
    return [jax.tree.map(lambda p, i=i: p[i], stacked) for i in range(layers)]


def plain_scan(loss):
    """The window that one writes by hand."""

    def gradient(params, batch):
        def micro_step(carry, x):
            value, total = carry
            v, g = jax.value_and_grad(loss)(params, x)
            return (value + v, jax.tree.map(jnp.add, total, g)), None

        zeros = jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)
        split = batch.reshape(K, -1, batch.shape[-1])
        sums, _ = jax.lax.scan(micro_step, zeros, split)
        return jax.tree.map(lambda x: x / K, sums)

    return gradient


def peer_microbatch(loss, rows):
    """Optax's own, for means."""
    return microbatching.microbatch(
        jax.value_and_grad(loss),
        argnums=1,
        microbatch_size=rows,
        accumulator=microbatching.AccumulationType.MEAN,
    )


def in_one_jit(gradient, opt):
    """A window in one donated call."""

    def step(state, batch):
        params, opt_state = state
        value, grads = gradient(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return jax.jit(step, donate_argnums=0)


def host_loop(loss, opt):
    """A window of k calls, with `optax.MultiSteps`."""
    multi = optax.MultiSteps(opt, K)
    step = in_one_jit(jax.value_and_grad(loss), multi)

    def window(state, batch):
        value = None
        for x in batch.reshape(K, -1, batch.shape[-1]):
            state, value = step(state, x)
        return state, value

    return window, multi


def seconds(call):
    """How long a call takes, to the end of what it started."""
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


def measure(loss, params, rows, rounds):
    """Median seconds of each way to do a window, and of the parts of one."""
    opt = optax.adam(1e-3)
    width = jax.tree.leaves(params)[0].shape[-1]  # of "down", which ends on it
    batch = jax.random.normal(jax.random.key(1), (K * rows, width))
    micro = batch[:rows]
    ways: dict[str, Callable[..., Any]] = {
        "ga_optax": in_one_jit(ga.value_and_grad(loss, K), opt),
        "ga_optax, by hand": in_one_jit(
            ga.value_and_grad(loss, K, in_place=False), opt
        ),
        "plain scan": in_one_jit(plain_scan(loss), opt),
        "optax.microbatching": in_one_jit(peer_microbatch(loss, rows), opt),
    }
    states = {way: (jax.tree.map(jnp.copy, params), opt.init(params)) for way in ways}
    ways["optax.MultiSteps"], multi = host_loop(loss, opt)
    states["optax.MultiSteps"] = jax.tree.map(jnp.copy, params), multi.init(params)

    gradient = jax.jit(jax.value_and_grad(loss))
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
    update = in_one_jit(lambda params, grads: (jnp.zeros([]), grads), opt)
    total = jax.tree.map(jnp.zeros_like, params)
    update_state = jax.tree.map(jnp.copy, params), opt.init(params)

    times = {name: [] for name in (*ways, "gradient", "add", "update")}
    for turn in range(rounds + 1):
        for way, step in ways.items():
            taken, (states[way], _) = seconds(
                lambda step=step, way=way: step(states[way], batch)
            )
            times[way].append(taken)
        taken, (_, grads) = seconds(lambda: gradient(params, micro))
        times["gradient"].append(taken)
        taken, total = seconds(lambda t=total, g=grads: add(t, g))
        times["add"].append(taken)
        taken, (update_state, _) = seconds(lambda s=update_state, g=grads: update(s, g))
        times["update"].append(taken)
        if turn == 0:
            times = {name: [] for name in times}  # the first turn compiled
    return {name: statistics.median(t) for name, t in times.items()}


def main():
    """Prints a table, and writes it as JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 256])
    args = parser.parse_args()

    results = []
    for scanned in (True, False):
        loss = scanned_loss if scanned else unrolled_loss
        params = make_params(args.layers, args.width, scanned)
        for rows in args.rows:
            median = measure(loss, params, rows, args.rounds)
            parts = K * median["gradient"] + (K - 1) * median["add"] + median["update"]
            fastest = min(median[peer] for peer in PEERS)
            kind = "scan over layers" if scanned else "unrolled layers"
            print(f"\n{kind}, micro-batches of {rows} rows; parts {parts * 1e3:.0f} ms")
            print(f"{'':22}{'ms':>8}{'/ parts':>10}{'/ fastest peer':>16}")
            for way in (*OURS, *PEERS):
                t = median[way]
                print(f"{way:22}{t * 1e3:8.0f}{t / parts:10.2f}{t / fastest:16.2f}")
            results.append(
                {
                    "model": kind,
                    "rows": rows,
                    "seconds": median,
                    "sum_of_parts": parts,
                    "ratio_to_parts": {w: median[w] / parts for w in (*OURS, *PEERS)},
                    "ratio_to_fastest_peer": {w: median[w] / fastest for w in OURS},
                }
            )
    if args.json:
        record = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": jax.devices()[0].device_kind,
            "versions": {
                "jax": jax.__version__,
                "optax": optax.__version__,
                "python": sys.version.split()[0],
            },
            "command": " ".join(["python", *sys.argv]),
            "num_microbatches": K,
            "rounds": args.rounds,
            "layers": args.layers,
            "width": args.width,
            "results": results,
        }
        with open(args.json, "w") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    main()
