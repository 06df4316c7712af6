"""Draws the results: time and memory against the peers, and communication against k.

    python benchmarks/pictures.py

It only reads the files in benchmarks/results. The pictures are vector graphics with a
transparent background. Their colours show on white and on black, and colour-blind
readers can tell them apart; each way also has its own marker. Each picture contains a
digest of the file that it was drawn from, so a test finds one that is out of date.
"""

import argparse
import hashlib
import pathlib
from typing import Any

import any_loss
import matplotlib as mpl
import memory
import micro_step
import peers
import record

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

OUT = pathlib.Path(__file__).parents[1] / "docs" / "pictures"
GREY = "#7d8590"  # as legible on white as on GitHub's black
BLUE, RED, PINK, GREEN, BROWN = "#0072b2", "#d55e00", "#cc79a7", "#009e73", "#a87b00"

# Okabe and Ito's palette, with a brown for their yellows, too light on white.
STYLES: dict[str, dict[str, Any]] = {
    micro_step.APPLIED: {"color": BLUE, "marker": "o", "linewidth": 2.5, "zorder": 5},
    peers.OURS: {"color": BLUE, "marker": "o", "linewidth": 2.5, "zorder": 5},
    peers.OURS_LOOP: {"color": BLUE, "marker": "s", "linestyle": "--", "zorder": 4},
    peers.MULTI_STEPS: {"color": RED, "marker": "^"},
    peers.MICROBATCHING: {"color": PINK, "marker": "v"},
    peers.SCAN: {"color": GREEN, "marker": "D", "linestyle": "--"},
    peers.SCAN_KEPT: {"color": BROWN, "marker": "X", "linestyle": ":"},
    peers.TWO_PROGRAMS: {"color": BROWN, "marker": "P", "linestyle": ":"},
    peers.OURS_PLAIN: {"color": BLUE, "marker": "x"},
    peers.OURS_TRANSFORMATION: {"color": BLUE, "marker": "d"},
    any_loss.HAND: {"color": BROWN, "marker": "P"},
}
NAMES = {
    micro_step.APPLIED: "ga.apply_gradients",
    peers.OURS: "ga.value_and_grad",
    peers.OURS_PLAIN: "ga.value_and_grad, optimize=False",
    peers.OURS_TRANSFORMATION: "tx.update, apply_updates",
    peers.TWO_PROGRAMS: "two programs, by hand",
    peers.SCAN_KEPT: "scan by hand, rows kept in place",
    peers.SCAN: "scan by hand",
}

plt.rcParams.update(
    {
        "axes.edgecolor": GREY,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.labelcolor": GREY,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": GREY,
        "axes.titlesize": 10,
        "font.size": 9.5,
        "grid.alpha": 0.3,
        "grid.color": GREY,
        "legend.frameon": False,
        "legend.labelcolor": GREY,
        "lines.markersize": 6,
        "savefig.transparent": True,
        "svg.hashsalt": "ga_optax",
        "text.color": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
    }
)


def draw_micro_step(result: dict[str, Any]) -> Any:
    """Draws the time of a micro-step over its floor, by size, window and optimizer."""
    panels = {
        "Adam, k = 8, by size": (
            result["by_size"],
            lambda row: f"{row['million_parameters']:.3g} M",
        ),
        f"Adam, {result['by_k'][0]['million_parameters']:.3g} M, by k": (
            result["by_k"],
            lambda row: f"{row['k']}",
        ),
        "k = 8, by optimizer": (
            result["by_optimizer"],
            lambda row: row["optimizer"].replace("-", "-\n"),
        ),
    }
    figure, axes = _panels(3, sharey=True)
    for ax, (title, (rows, label)) in zip(axes, panels.items(), strict=True):
        joined = ax is not axes[-1]  # optimizers have no order
        for way in rows[0]["over_floor"]:
            style = STYLES[way] | ({} if joined else {"linestyle": "none"})
            heights = [row["over_floor"][way] for row in rows]
            ax.plot(range(len(rows)), heights, label=NAMES.get(way, way), **style)
        ax.axhline(1, color=GREY, linewidth=1.2, zorder=1)
        ax.set_title(title)
        ax.set_xticks(range(len(rows)), [label(row) for row in rows])
        ax.margins(x=0.1)
        ax.set_yscale("log")
    highest = axes[0].get_ylim()[1]
    _ticks(axes[0].yaxis, [t for t in (0.5, 1, 2, 5, 10, 20, 50) if t <= highest])
    for ax in axes:
        ax.set_ylabel("time of a micro-step,\nover the floor (grey)")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2)
    return figure


def draw_memory(result: dict[str, Any]) -> Any:
    """Draws the memory that a window needs, against the number of micro-batches."""
    rows = result["results"]
    figure, ax = _panels(1, height=4.2)
    ways = (
        *(peers.OURS, peers.OURS_LOOP, peers.SCAN),
        *(peers.MICROBATCHING, peers.MULTI_STEPS, peers.TWO_PROGRAMS),
    )
    _lines(ax, rows, "mb", ways)
    # Every way needs parameters, Adam's two moments and one gradient.
    least = 4 * result["param_bytes"] / 1e6
    ax.axhline(least, color=GREY, linewidth=1.2, zorder=1)
    ax.annotate(
        "parameters, Adam's moments, one gradient",
        (rows[0]["k"], least),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
    )
    highest = max(row["mb"][way] for row in rows for way in ways)
    ax.set_ylim(0.8 * least, 1.1 * highest)
    heights = (100, 200, 300, 500, 700, 1000, 1500, 2000, 3000, 5000)
    low, high = ax.get_ylim()
    ax.set_yscale("log")
    _ticks(ax.yaxis, [t for t in heights if low <= t <= high])
    ax.set_ylabel(f"MB needed; {result['rows']:,} rows a window")
    return figure


def draw_gain(result: dict[str, Any]) -> Any:
    """Draws the memory of a step over the rows of its batch: undivided, and divided."""
    rows = result["by_rows"]
    figure, ax = _panels(1, height=2.6)
    styles = STYLES | {memory.UNDIVIDED: {"color": GREY, "marker": "o"}}
    names = NAMES | {memory.UNDIVIDED: "jax.value_and_grad, the undivided batch"}
    lengths = [row["rows"] for row in rows]
    for way in rows[0]["mb"]:
        heights = [row["mb"][way] for row in rows]
        ax.plot(lengths, heights, label=names.get(way, way), **styles[way])
    ax.set_xlabel("rows of the batch")
    ax.set_ylabel("MB that a step needs")
    _ticks(ax.xaxis, lengths[2:])
    ax.set_ylim(0)
    ax.legend(loc="upper left")
    return figure


def draw_collectives(result: dict[str, Any]) -> Any:
    """Draws the bytes that cross the network in a window, against k."""
    rows = result["results"]
    figure, ax = _panels(1, height=4.2)
    ways = (
        *(peers.OURS, peers.SCAN, peers.SCAN_KEPT),
        *(peers.MICROBATCHING, peers.MULTI_STEPS),
    )
    names = dict(NAMES)
    work = rows[-1]["work_over_share"][peers.SCAN]
    if work > 1.5:
        names[peers.SCAN] += (
            f"; where the line falls, all rows go to all\ndevices, each of which does "
            f"{work:.0f} times its share"
        )
    _lines(ax, rows, "over_gradient", ways, names)
    ax.set_yscale("log")
    _ticks(ax.yaxis, [0.03, 0.1, 0.3, 1, 4, 16, 64])
    ax.set_ylabel(
        f"bytes on the wire a window,\nin gradients; {result['devices']} devices"
    )
    return figure


def draw_accelerators(result: dict[str, Any]) -> Any:
    """Draws the traffic of a window and the temporaries of a call, by target."""
    panels = {
        "passes over the parameters\nin a window of 8 micro-steps": "micro_step",
        "temporaries for scanned dense layers,\nover those of one micro-batch": (
            "window_dense"
        ),
    }
    figure, axes = _panels(2, height=3.4)
    lines: dict[str, Any] = {}
    for ax, (title, part) in zip(axes, panels.items(), strict=True):
        for row in result[part]:
            if row["way"] in STYLES:
                heights, style = row[COMPILED_FIELDS[part]], STYLES[row["way"]]
                style = {"zorder": 3} | style | {"linestyle": "none"}
                name = NAMES.get(row["way"], row["way"])
                targets = [target.replace("+", ",\n") for target in heights]
                drawn = ax.plot(targets, list(heights.values()), label=name, **style)
                lines.setdefault(name, *drawn)
        ax.set_title(title)
        ax.margins(x=0.1)
        ax.set_ylim(0, 1.1 * ax.dataLim.ymax)
    figure.legend(lines.values(), lines, loc="outside lower center")
    return figure


COMPILED_FIELDS = {"micro_step": "over_params_window", "window_dense": "over_alone"}


def draw_any_loss(result: dict[str, Any]) -> Any:
    """Draws time and temporaries of losses whose rows meet, over those undivided."""
    rows = result["results"]
    figure, axes = _panels(2)
    names = NAMES | {peers.SCAN: "scan by hand: another loss"}
    fields = {"time": "time_ratio", "temporaries": "memory_ratio"}
    for ax, (title, field) in zip(axes, fields.items(), strict=True):
        for i, way in enumerate(any_loss.WAYS[1:]):
            places = [j for j, row in enumerate(rows) if way in row[field]]
            heights = [rows[j][field][way] for j in places]
            style = STYLES[way] | {"linestyle": "none"}
            beside = [j + 0.12 * (i - 1) for j in places]
            ax.plot(beside, heights, label=names.get(way, way), **style)
        ax.axhline(1, color=GREY, linewidth=1.2, zorder=1)
        ax.set_title(f"{title}, over the undivided batch's (grey)")
        labels = [row["case"].replace(", ", ",\n") for row in rows]
        ax.set_xticks(range(len(rows)), labels)
        ax.margins(x=0.1)
        ax.set_yscale("log")
        lowest, highest = ax.get_ylim()
        ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
        _ticks(ax.yaxis, [t for t in ticks if lowest <= t <= highest])
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2)
    return figure


def _panels(number: int, height: float = 2.6, **options: Any) -> Any:
    """A figure of panels on top of each other, to be read on a screen of 400 pixels."""
    return plt.subplots(number, 1, figsize=(4.8, 0.6 + height * number), **options)


def _lines(
    ax: Any,
    rows: Any,
    field: str,
    ways: tuple[str, ...],
    names: dict[str, str] = NAMES,
) -> None:
    """Draws a line for each way, against k; markers shrink so that all stay visible."""
    ks = [row["k"] for row in rows]
    for way, size in zip(reversed(ways), (9, 8, 7, 6, 6, 6), strict=False):
        style = {"linewidth": 1.5, "zorder": 3, "markersize": size} | STYLES[way]
        heights = [row[field][way] for row in rows]
        ax.plot(ks, heights, label=names.get(way, way), **style)
    ax.set_xscale("log", base=2)
    _ticks(ax.xaxis, ks)
    ax.set_xlabel("micro-batches in a window, k")
    handles, labels = ax.get_legend_handles_labels()
    ax.figure.legend(handles[::-1], labels[::-1], loc="outside lower center")


def _ticks(axis: Any, values: Any) -> None:
    """Shows only these ticks, printed as they are."""
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    axis.set_minor_locator(NullLocator())


PICTURES = {
    "micro_step": ("sweep.json", draw_micro_step),
    "memory": ("memory.json", draw_memory),
    "gain": ("memory.json", draw_gain),
    "collectives": ("collectives.json", draw_collectives),
    "accelerators": ("accelerators.json", draw_accelerators),
    "any_loss": ("any_loss.json", draw_any_loss),
}


def digest(path: pathlib.Path) -> str:
    """The name and the digest of a picture's source file, for the picture."""
    return f"{path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def main() -> None:
    """Draws all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=record.RESULTS)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, (file, draw) in PICTURES.items():
        path = args.results / file
        if not path.exists():
            continue  # the compilers of accelerators are not always there
        figure = draw(record.read(path))
        figure.set_layout_engine("constrained")
        metadata = {"Date": None, "Description": digest(path)}
        figure.savefig(args.out / f"{name}.svg", metadata=metadata)
        plt.close(figure)
        print(args.out / f"{name}.svg")


if __name__ == "__main__":
    main()
