"""Time of a micro-step over sizes, windows and optimizers, against its floor.

    python benchmarks/sweep.py

It measures for many cases what `micro_step.py` measures in detail for one: Adam from
1 M to 200 M parameters, windows of 1 to 64 micro-steps, and several optimizers. A step
of SGD costs about as much as an add; a step of Muon, or of a stand-in for Shampoo
(`peers.shampoo_like`), costs many times that. The largest case needs 20 GB.
"""

from typing import Any

import micro_step
import peers
import record

SHOWN = (micro_step.APPLIED, peers.TWO_PROGRAMS, micro_step.OPTAX)

# Optimizer, leaves, size of a leaf, k, rounds.
Case = tuple[str, int, int, int, int]
BY_SIZE: list[Case] = [
    ("adam", 4, 500, 8, 15),
    ("adam", 4, 1600, 8, 7),
    ("adam", 20, 1600, 8, 5),
    ("adam", 20, 3200, 8, 3),
]
BY_K: list[Case] = [
    ("adam", 4, 1600, k, 5 if k < 16 else 3) for k in peers.doubling(64)
]
BY_OPTIMIZER: list[Case] = [
    ("sgd", 4, 1024, 8, 7),
    ("adam", 4, 1024, 8, 7),
    ("muon", 4, 1024, 8, 3),
    ("shampoo-like", 4, 512, 8, 9),
]
QUICK: dict[str, list[Case]] = {
    "size": [("adam", 2, 32, 2, 1)],
    "k": [("adam", 2, 32, k, 1) for k in (1, 4)],
    "optimizer": [(name, 1, 32, 2, 1) for name in micro_step.OPTIMIZERS],
}


def measure(case: Case) -> dict[str, Any]:
    """One row: the times of all sides, relative to the floor and `optax.MultiSteps`."""
    name, leaves, size, k, rounds = case
    params, grads = micro_step.make_gradients(leaves, size)
    opt = micro_step.OPTIMIZERS[name](1e-4)
    sides = micro_step.main_sides(opt, params, grads, k)
    del params  # the largest case needs the memory
    time_of = micro_step.take_turns(sides, grads, k, rounds)
    floor = time_of[micro_step.FLOOR] = micro_step.floor_of(time_of, k)
    return {
        "optimizer": name,
        "parameters": leaves * size**2,
        "million_parameters": leaves * size**2 / 1e6,
        "leaves": leaves,
        "k": k,
        "rounds": rounds,
        "ms": {side: 1e3 * t for side, t in time_of.items()},
        "over_floor": {side: time_of[side] / floor for side in SHOWN},
        "optax_over_it": {
            side: time_of[micro_step.OPTAX] / time_of[side] for side in SHOWN
        },
        "temporaries_mb": {side: sides[side].temporaries / 1e6 for side in SHOWN},
    }


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    args = record.make_parser(__doc__).parse_args()
    cases = {"size": BY_SIZE, "k": BY_K, "optimizer": BY_OPTIMIZER}
    content: dict[str, list[dict[str, Any]]] = {}
    for by, group in (QUICK if args.quick else cases).items():
        rows = content[f"by_{by}"] = [measure(case) for case in group]
        print(f"\nA micro-step by {by}: ms, and over the floor")
        record.print_table(
            ["optimizer", "M params", "k", "floor", *SHOWN],
            [
                [
                    *(row["optimizer"], round(row["million_parameters"], 3), row["k"]),
                    round(row["ms"][micro_step.FLOOR], 2),
                    *(
                        f"{row['ms'][side]:.2f} ({row['over_floor'][side]:.2f})"
                        for side in SHOWN
                    ),
                ]
                for row in rows
            ],
        )
    record.write(args.json, content)


if __name__ == "__main__":
    main()
