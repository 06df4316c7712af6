"""Runs all benchmarks, then prints one table and draws the pictures: `make bench`.

    python benchmarks/suite.py
    python benchmarks/suite.py --quick --results /tmp/results --pictures /tmp/pictures

Each benchmark runs in a process of its own and writes a file to the folder of results.
The table and the pictures are made from these files alone. The suite takes ten minutes
on two CPU cores, and 20 GB. With `--quick` it shows in a minute that everything runs,
but its numbers mean nothing.
"""

import argparse
import pathlib
import subprocess
import sys
import time
from typing import Any

import any_loss
import micro_step
import peers
import record

ROOT = pathlib.Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"

COMMANDS: dict[str, list[str]] = {
    "memory.json": ["memory.py"],
    "collectives.json": ["collectives.py"],
    "compile_time.json": ["compile_time.py"],
    "micro_step.json": ["micro_step.py", "--optimizers", "adam"],
    # A step of Muon takes seconds, so fewer matrices are enough.
    "micro_step_muon.json": (
        ["micro_step.py", "--optimizers", "muon", "--leaves", "4", "--rounds", "2"]
    ),
    "dispatch.json": ["dispatch.py"],
    "leaves.json": ["leaves.py"],
    "sweep.json": ["sweep.py"],
    "window.json": ["window.py"],
    "any_loss.json": ["any_loss.py"],
    "price.json": ["price.py"],
    "head.json": ["head.py"],
}

COLUMNS = {
    "ga_optax": (micro_step.APPLIED, peers.OURS),
    "optimize=False": (peers.OURS_PLAIN,),
    "ga.MultiSteps": (peers.OURS_LOOP,),
    "optax.MultiSteps": (peers.MULTI_STEPS,),
    "microbatching": (peers.MICROBATCHING,),
    "plain scan": (peers.SCAN,),
    "rows in place": (peers.SCAN_KEPT,),
    "unrolled": (peers.UNROLLED,),
    "two programs": (peers.TWO_PROGRAMS,),
    "two passes": (any_loss.HAND,),
}


def rows_of(results: pathlib.Path) -> list[list[Any]]:
    """The rows of the table: case, k, unit, and a number for each way."""
    names = "sweep", "window", "memory", "collectives", "compile_time", "any_loss"
    sweep, window, memory, collective, compile_time, meeting, dispatch = (
        record.read(results / f"{name}.json") for name in (*names, "dispatch")
    )
    cases: list[tuple[str, int, str, dict[str, float]]] = []
    for group in ("by_size", "by_k", "by_optimizer"):
        for row in sweep[group]:
            size = f"{row['million_parameters']:.3g} M"
            case = f"micro-step, {row['optimizer']}, {size}"
            cases.append((case, row["k"], "x floor", row["over_floor"]))
    for row in dispatch["results"]:
        case = f"a call, {row['leaves']} small leaves"
        cases.append((case, dispatch["k"], "x optax.MultiSteps", row["over_optax"]))
    for row in window["results"]:
        case = f"window, {row['model']}, {row['rows']} rows"
        k = window["num_microbatches"]
        cases.append((case, k, "x sum of parts", row["ratio_to_parts"]))
    for row in meeting["results"]:
        k = meeting["num_microbatches"]
        for what, field in (("time", "time_ratio"), ("memory", "memory_ratio")):
            cases.append((f"{row['case']}: {what}", k, "x undivided", row[field]))
    for name, record_, unit, field in (
        ("memory", memory, "x parameters", "over_params"),
        ("bytes on the wire", collective, "x gradient", "over_gradient"),
        ("work of a device", collective, "x its share", "work_over_share"),
        ("compile", compile_time, "s", "seconds"),
    ):
        cases += [(name, row["k"], unit, row[field]) for row in record_["results"]]
    return [
        [case, k, unit, *(_cell(numbers, names) for names in COLUMNS.values())]
        for case, k, unit, numbers in cases
    ]


def _cell(numbers: dict[str, float], names: tuple[str, ...]) -> str:
    """The number of whichever of these names was measured."""
    values = [numbers[name] for name in names if name in numbers]
    return f"{values[0]:.2f}" if values else "-"


def main() -> None:
    """Runs all benchmarks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small, in a minute")
    parser.add_argument("--results", type=pathlib.Path, default=record.RESULTS)
    parser.add_argument("--pictures", type=pathlib.Path, default=PICTURES)
    args = parser.parse_args()
    if args.quick and (args.results == record.RESULTS or args.pictures == PICTURES):
        parser.error(
            "--quick needs folders of its own, as its numbers mean nothing, but it got "
            f"--results {args.results} and --pictures {args.pictures}. Name others."
        )
    quick = ["--quick"] if args.quick else []
    start = time.perf_counter()
    for name, command in COMMANDS.items():
        # Relative if possible, because the file records the command.
        target = args.results.resolve() / name
        if target.is_relative_to(ROOT):
            target = target.relative_to(ROOT)
        print(
            f"\n[{time.perf_counter() - start:5.0f} s] {' '.join(command)}", flush=True
        )
        run_script([*command, *quick, "--json", str(target)])
    folders = ["--results", str(args.results.resolve())]
    run_script(["pictures.py", *folders, "--out", str(args.pictures.resolve())])
    print(f"\n[{time.perf_counter() - start:5.0f} s] all of it\n")
    record.print_table(["case", "k", "unit", *COLUMNS], rows_of(args.results))


def run_script(command: list[str]) -> None:
    """Runs a script of this folder from the root of the repository."""
    script = pathlib.Path(__file__).parent.relative_to(ROOT) / command[0]
    subprocess.run([sys.executable, str(script), *command[1:]], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
