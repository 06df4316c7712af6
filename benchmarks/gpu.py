"""The benchmarks of a GPU: tokens a second, memory, and what the additions became.

    python benchmarks/gpu.py --out benchmarks/results
    python benchmarks/gpu.py --parts peak window --out benchmarks/results

There are four parts, and each writes a file of its own, `gpu_PART.json`:

peak        the allocator's peak for each way to do a window of the reference model
            (`reference_model.py`), and what `plan` says of ours. Each way has a process
            of its own, because a peak cannot be reset
window      tokens a second, k = 1 against k = 8 with the same micro-batch; ours also
            without what makes XLA add gradients inside of matrix products
micro_step  Adam on 51 M and 205 M parameters against the floor. `emit=None`, which asks
            the device whether the window is full, against a static `emit`
programs    the optimised HLO: how many kernels only add into a gradient-sized buffer,
            and how many matrix products take the accumulator as their beta = 1 operand

Most of the time goes into compiling. XLA allocates memory to try kernels, which "peak"
sees, unless another run compiled the programs into `JAX_COMPILATION_CACHE_DIR` before;
so it was for the committed file. `--suffix` ends the names of the files, for a run with
other `XLA_FLAGS`.

Without `--out` it only prints. It needs a GPU; with `--tiny` it runs anywhere, to show
that everything works, and never writes.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import hlo
import jax
import jax.numpy as jnp
import micro_step
import optax
import peers
import record
import reference_model
from reference_model import Config

import ga_optax as ga
from ga_optax._passes import table

K = 8
ALONE = "no accumulation"
SEPARATE = "ga_optax, additions by kernels of their own"
INIT = jax.jit(reference_model.init, static_argnums=0)


def check_device(tiny: bool) -> None:
    """Stops without a GPU: numbers of another device would pass for those of a GPU."""
    device = jax.devices()[0]
    if device.platform != "gpu" and not tiny:
        raise SystemExit(
            "These benchmarks need a GPU, but JAX's first device is "
            f"{device.platform}: {device.device_kind}. Install jax[cuda12] or "
            "jax[cuda13] on a machine that has one, or pass --tiny to try it out."
        )


# -- The reference model ---------------------------------------------------------------


class Window:
    """A way to run a window of k micro-batches, with a separate state."""

    def __init__(self, step: Any, state: Any, k: int) -> None:
        """`step(state, batch) -> (state, value)`, donating."""
        self.step, self.state, self.k = step, state, k

    def __call__(self, config: Config) -> float:
        """Runs one window; returns its seconds."""
        key = jax.random.key(1)
        shape = (self.k * config.rows, config.length + 1)
        batch = jax.random.randint(key, shape, 0, config.vocabulary, jnp.int32)
        jax.block_until_ready((self.state, batch))
        start = time.perf_counter()
        self.state, value = self.step(self.state, batch)
        jax.block_until_ready((self.state, value))
        return time.perf_counter() - start


def ways_of(config: Config) -> dict[str, Callable[[], Window]]:
    """By name, a function that makes each way."""
    opt = optax.adam(1e-4)
    loss = functools.partial(reference_model.loss, config)

    def params() -> Any:
        return INIT(config)

    def alone() -> Window:
        start = params()
        step = peers.step_of(jax.value_and_grad(loss), opt)
        return Window(step, (start, opt.init(start)), 1)

    def one_call(way: str) -> Window:
        start = params()
        step = peers.step_of(peers.in_one_call(loss, K, config.rows)[way], opt)
        return Window(step, (start, opt.init(start)), K)

    def separate() -> Window:
        start, gradient = params(), ga.value_and_grad(loss, K)

        def plain(*args: Any) -> Any:
            others = [one for one in table.PASSES if one.name != "products"]
            with mock.patch.object(table, "PASSES", others):
                return gradient(*args)

        step = peers.step_of(plain, opt)
        return Window(step, (start, opt.init(start)), K)

    def many_calls(loop: Any) -> Window:
        return Window(loop, loop.init(params()), K)

    ways: dict[str, Callable[[], Window]] = {ALONE: alone, SEPARATE: separate}
    for way in peers.in_one_call(loss, K, config.rows):
        ways[way] = functools.partial(one_call, way)
    for way, loop in loops_of(config).items():
        ways[way] = functools.partial(many_calls, loop)
    return ways


def loops_of(config: Config) -> dict[str, Any]:
    """The host loops, by name."""
    opt = optax.adam(1e-4)
    loss = functools.partial(reference_model.loss, config)
    counted = peers.HostLoop(loss, ga.MultiSteps(opt, K), K, counts=True)
    return peers.in_many_calls(loss, opt, K) | {peers.OURS_COUNTED: counted}


def measure_peak(config: Config, tiny: bool) -> list[dict[str, Any]]:
    """Measures the allocator's peak over two windows of each way, in new processes."""
    rows, ways, fields = [], list(ways_of(config)), ("peak", "plan", "param")
    for way in [peers.OURS] if tiny else ways:
        command = [sys.executable, __file__, "--peak-of", way]
        child = subprocess.run(
            command + (["--tiny"] if tiny else []), stdout=subprocess.PIPE, text=True
        )
        if child.returncode:
            raise SystemExit(f"The process for {way!r} ended with {child.returncode}.")
        values = json.loads(child.stdout.splitlines()[-1])
        sizes = {name: values[f"{name}_bytes"] for name in fields}
        mb = {name: size and size / 1e6 for name, size in sizes.items()}
        rows.append({"way": way} | values | {"mb": mb})
    print("\nPeak of the allocator, MB")
    record.print_table(
        ["way", "peak", "plan", "parameters"],
        [
            [row["way"], *("-" if x is None else round(x) for x in row["mb"].values())]
            for row in rows
        ],
    )
    return rows


def print_peak(config: Config, way: str) -> None:
    """The part of one process of `measure_peak`: two windows, and a line of JSON."""
    planned = planned_bytes(config) if way == peers.OURS else None
    window = ways_of(config)[way]()
    for _ in range(2):
        window(config)
    stats = jax.devices()[0].memory_stats() or {}  # a CPU has none
    shapes = jax.eval_shape(functools.partial(reference_model.init, config))
    param_bytes = peers.tree_bytes(shapes)
    values = {"peak_bytes": stats.get("peak_bytes_in_use"), "plan_bytes": planned}
    print(json.dumps(values | {"param_bytes": param_bytes}))


def planned_bytes(config: Config) -> int | None:
    """The bytes that a window of this library needs, from `plan`."""
    opt, loss = optax.adam(1e-4), functools.partial(reference_model.loss, config)
    params = jax.eval_shape(functools.partial(reference_model.init, config))
    state = params, jax.eval_shape(opt.init, params)
    rows = K * config.rows
    tokens = jax.ShapeDtypeStruct((rows, config.length + 1), jnp.int32)
    plan = ga.plan(
        lambda k: peers.step_of(ga.value_and_grad(loss, k), opt),
        *(state, tokens),
        batch_size=rows,
        candidates=[K],
        memory_limit="1TiB",
    )
    return plan.bytes


def measure_window(config: Config, rounds: int) -> list[dict[str, Any]]:
    """Measures tokens a second, in two groups that fit, each beside k = 1."""
    names = [way for way in ways_of(config) if way != ALONE]
    rows, loops = [], len(loops_of(config))
    for group in (names[:-loops], names[-loops:]):
        rate = tokens_per_second(config, [ALONE, *group], rounds)
        rows += [
            {
                "way": way,
                "tokens_per_second": rate[way],
                "alone_tokens_per_second": rate[ALONE],
                "over_alone": rate[way] / rate[ALONE],
                "over_optax_multi_steps": None,
            }
            for way in group
        ]
    theirs = next(row for row in rows if row["way"] == peers.MULTI_STEPS)
    for row in rows:
        row["over_optax_multi_steps"] = row["over_alone"] / theirs["over_alone"]
    print(f"\nTokens a second, k = {K}, and relative to k = 1 measured beside it")
    record.print_table(
        ["way", "tokens/s", "of k = 1", "over k = 1", "over optax.MultiSteps"],
        [
            [
                row["way"],
                round(row["tokens_per_second"]),
                round(row["alone_tokens_per_second"]),
                round(row["over_alone"], 3),
                round(row["over_optax_multi_steps"], 2),
            ]
            for row in rows
        ],
    )
    return rows


def tokens_per_second(
    config: Config, group: list[str], rounds: int
) -> dict[str, float]:
    """The median over the rounds; each way does K micro-batches in its turn."""
    ways = ways_of(config)
    windows = {way: ways[way]() for way in group}
    seconds = collections.defaultdict(list)
    for turn in range(rounds + 1):
        for way, window in windows.items():
            elapsed = sum(window(config) for _ in range(K // window.k))
            if turn:  # the first turn compiles
                seconds[way].append(elapsed)
    return {
        way: K * config.tokens / statistics.median(times)
        for way, times in seconds.items()
    }


# -- The micro-step --------------------------------------------------------------------


class Counted:
    """`ga.apply_gradients` with a static `emit`: the host counts, without a cond."""

    def __init__(self, opt: Any, params: Any, grads: Any, k: int) -> None:
        """Compiles a program for the last micro-step, and one for those before it."""
        tx = ga.MultiSteps(opt, k)
        side = functools.partial(micro_step.applied, tx, params, grads)
        self.first, self.last = side(emit=False), side(emit=True)
        self.carry = self.first.carry
        self.last.carry = None  # the two programs share one state
        self.temporaries = max(self.first.temporaries, self.last.temporaries)

    def window(self, grads: Any, micro_steps: int) -> float:
        """Runs a window of so many micro-steps; returns seconds."""
        jax.block_until_ready(self.carry)
        start = time.perf_counter()
        for _ in range(micro_steps - 1):
            self.carry = self.first.compiled(self.carry, grads)
        self.carry = self.last.compiled(self.carry, grads)
        jax.block_until_ready(self.carry)
        return time.perf_counter() - start


def measure_micro_steps(tiny: bool, rounds: int) -> list[dict[str, Any]]:
    """Measures Adam in two sizes: the floor, both forms of `emit`, and the peers."""
    rows = []
    for leaves, size in [(2, 32)] if tiny else [(20, 1600), (20, 3200)]:
        params, grads = micro_step.make_gradients(leaves, size)
        opt = optax.adam(1e-4)
        sides = micro_step.main_sides(opt, params, grads, K)
        sides["ga, static emit"] = Counted(opt, params, grads, K)
        time_of = micro_step.take_turns(sides, grads, K, rounds)
        floor = time_of[micro_step.FLOOR] = micro_step.floor_of(time_of, K)
        rows += [
            {
                "optimizer": "adam",
                "million_parameters": leaves * size**2 / 1e6,
                "side": side,
                "ms": 1e3 * seconds,
                "over_floor": seconds / floor,
                "optax_over_it": time_of[micro_step.OPTAX] / seconds,
                "temporaries_mb": sides[side].temporaries / 1e6 if side in sides else 0,
            }
            for side, seconds in time_of.items()
        ]
    print(f"\nA micro-step of Adam, k = {K}")
    record.print_table(
        ["side", "M params", "ms", "x floor", "optax / it"],
        [
            [
                *(row["side"], round(row["million_parameters"], 1)),
                *(round(row["ms"], 3), round(row["over_floor"], 2)),
                round(row["optax_over_it"], 1),
            ]
            for row in rows
        ],
    )
    return rows


# -- The programs ----------------------------------------------------------------------


def read_programs(config: Config) -> list[dict[str, Any]]:
    """Counts what the additions of a micro-step became in the program of each way."""
    opt = optax.adam(1e-4)
    loss = functools.partial(reference_model.loss, config)
    params = jax.eval_shape(functools.partial(reference_model.init, config))
    shapes = reference_model.gradient_shapes(params)
    state = params, jax.eval_shape(opt.init, params)

    def tokens(rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, config.length + 1), jnp.int32)

    micro = tokens(config.rows)
    lowered: dict[str, tuple[Any, int | None]] = {
        way: (peers.step_of(gradient, opt).lower(state, tokens(K * config.rows)), K)
        for way, gradient in peers.in_one_call(loss, K, config.rows).items()
    }
    loops = loops_of(config)
    add = loops[peers.TWO_PROGRAMS].add
    lowered[peers.TWO_PROGRAMS] = add.lower(params, params, micro), None
    counted = loops[peers.OURS_COUNTED]
    start = params, jax.eval_shape(counted.tx.init, params)
    lowered[peers.OURS_COUNTED] = counted.step.lower(start, micro), None

    rows, fields = [], [f.name for f in dataclasses.fields(hlo.Adds)]
    for way, (program, k) in lowered.items():
        adds = hlo.count_adds(program.compile().as_text(), shapes, k)
        values = dict.fromkeys(fields) if adds is None else dataclasses.asdict(adds)
        rows.append({"way": way} | values)
    print("\nKernels a micro-step (-: the loop over micro-batches was not found)")
    record.print_table(
        ["way", *(name.replace("_", " ") for name in fields)],
        [["-" if cell is None else cell for cell in row.values()] for row in rows],
    )
    return rows


# -- All of it -------------------------------------------------------------------------


def main() -> None:
    """Runs the parts that `--parts` names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = ("peak", "window", "micro_step", "programs")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--out", type=pathlib.Path, help="write gpu_PART.json here")
    parser.add_argument("--suffix", default="", help="of the names of the files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small, anywhere")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = reference_model.TINY if args.tiny else Config()
    if args.peak_of:
        check_device(args.tiny)
        print_peak(config, args.peak_of)
        return
    if args.tiny and args.out:
        parser.error(
            "--tiny measures nothing, so it writes nothing, but it got --out "
            f"{args.out}. Leave one of them out."
        )
    rounds = 1 if args.tiny else args.rounds
    measures: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "peak": lambda: measure_peak(config, args.tiny),
        "window": lambda: measure_window(config, rounds),
        "micro_step": lambda: measure_micro_steps(args.tiny, rounds),
        "programs": lambda: read_programs(config),
    }
    for part in parts:
        if part not in args.parts:
            continue
        # As soon as this process asks JAX for its devices, it takes the GPU's memory.
        # The processes of "peak" need that memory, and check the device themselves.
        if part != "peak":
            check_device(args.tiny)
        rows = measures[part]()
        if args.out:
            check_device(tiny=False)
            content = {"k": K, "model": dataclasses.asdict(config), "rounds": rounds}
            content |= {"xla_flags": os.environ.get("XLA_FLAGS", ""), "results": rows}
            record.write(args.out / f"gpu_{part}{args.suffix}.json", content)


if __name__ == "__main__":
    main()
