"""Time and memory of a micro-step, against its floor and against optax.MultiSteps.

    python benchmarks/micro_step.py

The floor of a window of k micro-steps is k additions of the gradient to a donated
accumulator and one plain optimizer step; all parts are measured in this process, whole
windows of every side in turn, and the table gives medians. Only the ratios
mean something on a machine that others use.
"""

import argparse
import collections
import datetime
import functools
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

import ga_optax as ga

OPTIMIZERS = {"adam": optax.adam, "muon": optax.contrib.muon}


class Side:
    """One way to run a window: a donated, jitted call for each micro-step."""

    def __init__(
        self, init: Callable[[], Any], micro_step: Callable[..., Any], grads: Any
    ) -> None:
        """Compiles `micro_step(carry, grads)` and makes the first carry."""
        self.carry = init()
        self.compiled = (
            jax.jit(micro_step, donate_argnums=0).lower(self.carry, grads).compile()
        )
        memory = self.compiled.memory_analysis()
        assert memory is not None
        self.temporaries = memory.temp_size_in_bytes

    def window(self, grads: Any, micro_steps: int) -> float:
        """Runs so many micro-steps; returns seconds."""
        jax.block_until_ready(self.carry)
        start = time.perf_counter()
        for _ in range(micro_steps):
            self.carry = self.compiled(self.carry, grads)
        jax.block_until_ready(self.carry)
        return time.perf_counter() - start


def make_sides(opt: Any, params: Any, grads: Any, k: int) -> dict[str, Side]:
    """All sides, each with parameters and a state of its own."""

    def fresh() -> Any:
        return jax.tree.map(jnp.copy, params)

    def contract(tx: Any) -> Side:
        def micro_step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return Side(lambda: (fresh(), tx.init(params)), micro_step, grads)

    ours = ga.MultiSteps(opt, k)

    def applied(tx: Any) -> Side:
        def micro_step(carry: Any, grads: Any) -> Any:
            params, state = carry
            return ga.apply_gradients(tx, grads, state, params)

        return Side(lambda: (fresh(), tx.init(params)), micro_step, grads)

    return {
        "add": Side(fresh, functools.partial(jax.tree.map, jnp.add), grads),
        "plain step": contract(opt),
        "ga apply_gradients": applied(ours),
        "ga apply_grads, track_noise": applied(ga.MultiSteps(opt, k, track_noise=True)),
        "ga update + apply_updates": contract(ours),
        "optax.MultiSteps": contract(optax.MultiSteps(opt, k)),
    }


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs `args.rounds` windows of every side in turn; returns rows of the table."""
    keys = jax.random.split(jax.random.key(0), args.leaves)
    shape = (args.size, args.size)
    params = {f"layer_{i}": jax.random.normal(key, shape) for i, key in enumerate(keys)}
    grads = jax.tree.map(lambda p: 1e-3 * p, params)
    sides = make_sides(OPTIMIZERS[name](1e-4), params, grads, args.k)

    seconds = collections.defaultdict(list)
    for _ in range(args.rounds + 1):
        for side, runner in sides.items():
            calls = 1 if side == "plain step" else args.k
            seconds[side].append(runner.window(grads, calls) / calls)
    # The first round warms caches and pages.
    time_of = {side: statistics.median(times[1:]) for side, times in seconds.items()}

    floor = time_of["add"] + time_of["plain step"] / args.k
    param_bytes = sum(p.nbytes for p in jax.tree.leaves(params))
    return [
        {
            "optimizer": name,
            "side": side,
            "ms": 1e3 * time_of[side],
            "over_floor": time_of[side] / floor,
            "optax_over_it": time_of["optax.MultiSteps"] / time_of[side],
            "temporaries_mb": runner.temporaries / 1e6,
            "temporaries_percent": 100 * runner.temporaries / param_bytes,
        }
        for side, runner in sides.items()
    ] + [
        {
            "optimizer": name,
            "side": "floor",
            "ms": 1e3 * floor,
            "over_floor": 1.0,
            "optax_over_it": time_of["optax.MultiSteps"] / floor,
            "temporaries_mb": 0.0,
            "temporaries_percent": 0.0,
        }
    ]


def main() -> None:
    """Measures, prints the table, and writes the JSON where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--leaves", type=int, default=20)
    parser.add_argument("--size", type=int, default=1600, help="leaves are size x size")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="windows of each side")
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows here")
    args = parser.parse_args()

    rows = [row for name in args.optimizers for row in measure(name, args)]
    million = args.leaves * args.size**2 / 1e6
    print(f"{million:.1f} M float32 parameters in {args.leaves} leaves, k = {args.k}")
    print(
        f"{'optimizer':10}{'side':28}{'ms/micro-step':>14}{'x floor':>9}"
        f"{'optax/it':>10}{'temporaries':>18}"
    )
    for row in rows:
        print(
            f"{row['optimizer']:10}{row['side']:28}{row['ms']:14.1f}"
            f"{row['over_floor']:9.2f}{row['optax_over_it']:10.1f}"
            f"{row['temporaries_mb']:9.3f} MB {row['temporaries_percent']:4.0f} %"
        )
    if args.json:
        device = jax.devices()[0]
        record = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.date.today().isoformat(),
            "device": f"{device.platform}: {device.device_kind}",
            "python": platform.python_version(),
            "jax": jax.__version__,
            "optax": optax.__version__,
            "rows": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
