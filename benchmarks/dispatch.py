"""The overhead of a call besides arithmetic: small models, against optax.MultiSteps.

    python benchmarks/dispatch.py

A micro-step of a small model is a call of a jitted, donated function, and spends nearly
all of its time on passing leaves: of the parameters, the gradients and the state. The
sides take turns in one process. The times are processor times, since other processes
use the machine too, and a time is the median over the turns.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import micro_step
import optax
import peers
import record

import ga_optax as ga

LEAVES = (1, 20, 200)
SIZE = 4  # leaves are SIZE x SIZE
K = 8


class Side:
    """One way to run micro-steps, through `jax.jit`."""

    def __init__(self, tx: Any, params: Any, call: Callable[..., Any]) -> None:
        """Makes the state; the first call compiles."""
        self.params = jax.tree.map(jnp.copy, params)
        self.state = tx.init(self.params)
        self.state_leaves = len(jax.tree.leaves(self.state))
        self.step = jax.jit(call, donate_argnums=(0, 1))

    def seconds(self, grads: Any, calls: int) -> float:
        """Of the processor, for a call."""
        jax.block_until_ready(self.params)
        start = time.process_time()
        for _ in range(calls):
            self.params, self.state = self.step(self.params, self.state, grads)
        jax.block_until_ready(self.params)
        return (time.process_time() - start) / calls


def contract(tx: Any) -> Callable[..., Any]:
    """`update` and `apply_updates`."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def sides(params: Any) -> dict[str, Side]:
    """Optax, and ours in both ways."""
    ours = ga.MultiSteps(optax.adam(1e-3), K)
    theirs = optax.MultiSteps(optax.adam(1e-3), K)

    def applied(params: Any, state: Any, grads: Any) -> Any:
        return ga.apply_gradients(ours, grads, state, params)

    return {
        peers.MULTI_STEPS: Side(theirs, params, contract(theirs)),
        peers.OURS_LOOP: Side(ours, params, contract(ours)),
        micro_step.APPLIED: Side(ours, params, applied),
    }


def measure(leaves: int, calls: int, rounds: int) -> dict[str, Any]:
    """The row of the table for so many leaves, by turns of so many calls."""
    params = [jnp.full((SIZE, SIZE), 1.0 + i) for i in range(leaves)]
    grads = jax.tree.map(lambda p: 1e-3 * p, params)
    ways = sides(params)
    turns = [
        {way: side.seconds(grads, calls) for way, side in ways.items()}
        for _ in range(rounds + 1)
    ][1:]  # the first turn compiles
    median = {way: statistics.median(turn[way] for turn in turns) for way in ways}
    return {
        "leaves": leaves,
        "calls": calls,
        "state_leaves": {way: side.state_leaves for way, side in ways.items()},
        "us": {way: 1e6 * seconds for way, seconds in median.items()},
        "over_optax": {way: x / median[peers.MULTI_STEPS] for way, x in median.items()},
    }


def main() -> None:
    """Measures, prints the table, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, help="turns of each side")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 21)
    results = [
        measure(leaves, K if args.quick else max(K, 640 // leaves), rounds)
        for leaves in LEAVES
    ]
    print(f"\nMicroseconds of the processor for a call; leaves of {SIZE} x {SIZE}")
    names = list(results[0]["us"])
    record.print_table(
        ["leaves", *names, *(f"{way} / Optax" for way in names[1:])],
        [
            [
                *(row["leaves"], *(round(row["us"][way], 1) for way in names)),
                *(round(row["over_optax"][way], 2) for way in names[1:]),
            ]
            for row in results
        ],
    )
    content = {"size": SIZE, "k": K, "rounds": rounds}
    record.write(args.json, content | {"results": results})


if __name__ == "__main__":
    main()
