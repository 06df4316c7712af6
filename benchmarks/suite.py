"""Runs all benchmarks, then prints one table and draws the pictures: `make bench`.

    python benchmarks/suite.py
    python benchmarks/suite.py --quick --results /tmp/results --pictures /tmp/pictures

Each benchmark runs in a process of its own and writes a file to the folder of results.
The table and the pictures are made from these files alone. Each line has the limit, the
best peer, ours, and the script that prints more. The suite takes ten minutes on two CPU
cores, and 20 GB. With `--quick` it shows in a minute that everything runs, but its
numbers mean nothing.
"""

import argparse
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import any_loss
import head
import micro_step
import peers
import price
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
    "small.json": ["small.py"],
    "any_loss.json": ["any_loss.py"],
    "price.json": ["price.py"],
    "head.json": ["head.py"],
    "adopt.json": ["adopt.py"],
    "experts.json": ["experts.py"],
}

COLUMNS = ["figure", "unit", "limit", "peer", "ga_optax", "printed by"]
MOST = 4 / 3  # the work of two forward passes and one backward, over one of each


class Line(NamedTuple):
    """A line of the table.

    Attributes:
      figure: what was measured.
      unit: the unit.
      limit: the number of the work that has to be done alone, if it is known; where
        rows meet, the memory of micro-batches each by itself.
      peer: the number of the best peer, if there is one.
      ours: the number of ga_optax.
      script: the script that measured it.
    """

    figure: str
    unit: str
    limit: float | None
    peer: float | None
    ours: float
    script: str

    @property
    def cells(self) -> list[str]:
        """The texts of the line."""
        numbers = self.limit, self.peer, self.ours
        shown = ["-" if x is None else f"{x:.2f}" for x in numbers]
        return [self.figure, self.unit, *shown, f"python benchmarks/{self.script}"]


def lines_of(results: pathlib.Path) -> Iterator[Line]:
    """The lines of the table, from a folder of results."""

    def read(name: str) -> dict[str, Any]:
        return record.read(results / f"{name}.json")

    sweep = read("sweep")
    for row in [*sweep["by_size"], *sweep["by_k"], *sweep["by_optimizer"]]:
        size = f"{row['million_parameters']:.3g} M, k = {row['k']}"
        figure, of = f"micro-step, {row['optimizer']}, {size}", row["over_floor"]
        peer, ours = of[peers.MULTI_STEPS], of[micro_step.APPLIED]
        yield Line(figure, "x floor", 1, peer, ours, "sweep.py")
    for row in read("dispatch")["results"]:
        figure, of = f"a call, {row['leaves']} small leaves", row["over_optax"]
        ours = of[micro_step.APPLIED]
        yield Line(figure, "x optax.MultiSteps", None, 1, ours, "dispatch.py")
    for row in read("window")["results"]:
        figure = f"window, {row['model']}, {row['rows']} rows"
        of = row["ratio_to_parts"]
        peer = min(of[peers.MICROBATCHING], of[peers.SCAN])
        yield Line(figure, "x sum of parts", None, peer, of[peers.OURS], "window.py")
    for row in read("memory")["results"]:
        figure, of = f"memory of a step, k = {row['k']}", row["over_params"]
        peer = min(of[peers.MICROBATCHING], of[peers.SCAN])
        yield Line(figure, "x parameters", None, peer, of[peers.OURS], "memory.py")
    for row in read("collectives")["results"]:
        figure, of = f"gradients sent, k = {row['k']}", row["over_gradient"]
        peer, ours = of[peers.SCAN_KEPT], of[peers.OURS]
        yield Line(figure, "x gradient", 1, peer, ours, "collectives.py")
    compile_time = read("compile_time")
    for row in [*compile_time["large"], *compile_time["rows_meet"]]:
        figure, seconds = f"trace and lower, {row['program']}", row["seconds"]
        ours = seconds[peers.OURS] / seconds[peers.SCAN]
        yield Line(figure, "x plain scan", None, 1, ours, "compile_time.py")
    for row in read("any_loss")["results"]:
        time_, memory = row["time_ratio"], row["memory_ratio"]
        for what, limit, of in (
            ("time", MOST, time_),
            ("memory", memory[peers.SCAN], memory),
        ):
            figure = f"{row['case']}: {what}"
            peer, ours = of.get(any_loss.HAND), of[peers.OURS]
            yield Line(figure, "x undivided", limit, peer, ours, "any_loss.py")
    for row in read("price")["results"]:
        figure, of = f"memory, {row['case']}", row["of_undivided"]
        limit, ours = of[price.ALONE], of[peers.OURS]
        yield Line(figure, "x undivided", limit, None, ours, "price.py")
    for row in read("experts")["results"]:
        figure, ours = f"memory, {row['experts']}", row["of_undivided"][peers.OURS]
        yield Line(figure, "x undivided", None, None, ours, "experts.py")
    ways = {row["way"]: row["over_best"] for row in read("head")["results"]}
    for dtype, ours in ways[head.OURS].items():
        figure = f"memory of a head in {dtype}"
        yield Line(figure, "x best by hand", None, 1, ours, "head.py")


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
    if args.results == record.RESULTS:
        run_script(["result_tables.py"])
    folders = ["--results", str(args.results.resolve())]
    run_script(["pictures.py", *folders, "--out", str(args.pictures.resolve())])
    print(f"\n[{time.perf_counter() - start:5.0f} s] all of it\n")
    record.print_table(COLUMNS, [line.cells for line in lines_of(args.results)])


def run_script(command: list[str]) -> None:
    """Runs a script of this folder from the root of the repository."""
    script = pathlib.Path(__file__).parent.relative_to(ROOT) / command[0]
    subprocess.run([sys.executable, str(script), *command[1:]], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
