"""Time and memory of a micro-step, against its floor and against optax.MultiSteps.

    python benchmarks/micro_step.py

The floor of a window of k micro-steps is k additions of the gradient to a donated
accumulator and one plain optimizer step. All parts are measured in this process: the
sides take turns, a whole window at a time, and the table gives medians. On a machine
that others use, only the ratios mean something.
"""

import collections
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import peers
import record

import ga_optax as ga

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": optax.adam,
    "muon": optax.contrib.muon,
    "sgd": optax.sgd,
    "shampoo-like": peers.shampoo_like,
}
ADD, PLAIN, FLOOR = "add", "plain step", "floor"
APPLIED, OPTAX = "ga apply_gradients", "optax.MultiSteps"


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
        """Runs this many micro-steps; returns seconds."""
        jax.block_until_ready(self.carry)
        start = time.perf_counter()
        for _ in range(micro_steps):
            self.carry = self.compiled(self.carry, grads)
        jax.block_until_ready(self.carry)
        return time.perf_counter() - start


class TwoPrograms:
    """A window by hand: a donated add for each micro-step, then an update."""

    def __init__(self, opt: Any, params: Any, k: int) -> None:
        """Compiles both and makes the first carry."""

        def update(carry: Any) -> Any:
            params, state, total = carry
            mean = jax.tree.map(lambda t: t / k, total)
            updates, state = opt.update(mean, state, params)
            params = optax.apply_updates(params, updates)
            return params, state, jax.tree.map(jnp.zeros_like, total)

        def add(total: Any, grads: Any) -> Any:
            return jax.tree.map(jnp.add, total, grads)

        total = jax.tree.map(jnp.zeros_like, params)
        self.carry = params, opt.init(params), total
        self.add = jax.jit(add, donate_argnums=0).lower(total, params).compile()
        self.update = jax.jit(update, donate_argnums=0).lower(self.carry).compile()
        memory = [p.memory_analysis() for p in (self.add, self.update)]
        self.temporaries = max(m.temp_size_in_bytes for m in memory if m is not None)

    def window(self, grads: Any, micro_steps: int) -> float:
        """Runs a window of this many micro-steps; returns seconds."""
        jax.block_until_ready(self.carry)
        start = time.perf_counter()
        params, state, total = self.carry
        for _ in range(micro_steps):
            total = self.add(total, grads)
        self.carry = self.update((params, state, total))
        jax.block_until_ready(self.carry)
        return time.perf_counter() - start


def contract(tx: Any, params: Any, grads: Any) -> Side:
    """`update` and `apply_updates`."""

    def micro_step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Side(lambda: (params, tx.init(params)), micro_step, grads)


def applied(tx: Any, params: Any, grads: Any, emit: bool | None = None) -> Side:
    """`ga.apply_gradients`."""

    def micro_step(carry: Any, grads: Any) -> Any:
        params, state = carry
        return ga.apply_gradients(tx, grads, state, params, emit=emit)

    return Side(lambda: (params, tx.init(params)), micro_step, grads)


def main_sides(opt: Any, params: Any, grads: Any, k: int) -> dict[str, Any]:
    """The parts of the floor, ours, and the peers, each with its own parameters."""

    def fresh() -> Any:
        return jax.tree.map(jnp.copy, params)

    add = functools.partial(jax.tree.map, jnp.add)
    return {
        ADD: Side(fresh, add, grads),
        PLAIN: contract(opt, fresh(), grads),
        APPLIED: applied(ga.MultiSteps(opt, k), fresh(), grads),
        OPTAX: contract(optax.MultiSteps(opt, k), fresh(), grads),
        peers.TWO_PROGRAMS: TwoPrograms(opt, fresh(), k),
    }


def all_sides(opt: Any, params: Any, grads: Any, k: int) -> dict[str, Any]:
    """The main sides, and the other ways to use ours."""

    def fresh() -> Any:
        return jax.tree.map(jnp.copy, params)

    return main_sides(opt, params, grads, k) | {
        "ga update + apply_updates": contract(ga.MultiSteps(opt, k), fresh(), grads),
    }


def make_gradients(leaves: int, size: int) -> tuple[Any, Any]:
    """Parameters, as square matrices, and gradients for them."""
    keys = jax.random.split(jax.random.key(0), leaves)
    params = {
        f"layer_{i}": jax.random.normal(key, (size, size)) for i, key in enumerate(keys)
    }
    return params, jax.tree.map(lambda p: 1e-3 * p, params)


def take_turns(
    sides: dict[str, Any], grads: Any, k: int, rounds: int
) -> dict[str, float]:
    """Median seconds of a micro-step of each side; the sides take turns."""
    seconds = collections.defaultdict(list)
    for turn in range(rounds + 1):
        for side, runner in sides.items():
            calls = 1 if side == PLAIN else k
            elapsed = runner.window(grads, calls) / calls
            if turn:  # the first round warms caches and pages
                seconds[side].append(elapsed)
    return {side: statistics.median(times) for side, times in seconds.items()}


def floor_of(time_of: dict[str, float], k: int) -> float:
    """Seconds of k adds and one plain step, over k. A window of one needs no add."""
    return time_of[PLAIN] if k == 1 else time_of[ADD] + time_of[PLAIN] / k


def measure(
    name: str, leaves: int, size: int, k: int, rounds: int
) -> list[dict[str, Any]]:
    """Runs `rounds` windows of each side; returns the rows of the table."""
    params, grads = make_gradients(leaves, size)
    sides = all_sides(OPTIMIZERS[name](1e-4), params, grads, k)
    time_of = take_turns(sides, grads, k, rounds)
    temporaries = {side: runner.temporaries for side, runner in sides.items()}

    floor = time_of[FLOOR] = floor_of(time_of, k)
    temporaries[FLOOR] = 0
    return [
        {
            "optimizer": name,
            "side": side,
            "ms": 1e3 * time_of[side],
            "over_floor": time_of[side] / floor,
            "optax_over_it": time_of[OPTAX] / time_of[side],
            "temporaries_mb": temporaries[side] / 1e6,
            "temporaries_percent": 100 * temporaries[side] / peers.tree_bytes(params),
        }
        for side in time_of
    ]


def main() -> None:
    """Measures, prints the table, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adam"])
    parser.add_argument("--leaves", type=int)
    parser.add_argument("--size", type=int, help="leaves are size x size")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--rounds", type=int, help="windows of each side")
    args = parser.parse_args()
    leaves = args.leaves or (2 if args.quick else 20)
    size = args.size or (64 if args.quick else 1600)
    rounds = args.rounds or (1 if args.quick else 5)

    rows = [
        row
        for name in args.optimizers
        for row in measure(name, leaves, size, args.k, rounds)
    ]
    million = leaves * size**2 / 1e6
    print(f"\n{million:.1f} M float32 parameters in {leaves} leaves, k = {args.k}")
    record.print_table(
        ["optimizer", "side", "ms a micro-step", "x floor", "optax / it", "temp. MB"],
        [
            [
                *(row["optimizer"], row["side"], round(row["ms"], 2)),
                *(round(row["over_floor"], 2), round(row["optax_over_it"], 1)),
                round(row["temporaries_mb"], 3),
            ]
            for row in rows
        ],
    )
    content = {"leaves": leaves, "size": size, "k": args.k, "rounds": rounds}
    record.write(args.json, content | {"rows": rows})


if __name__ == "__main__":
    main()
