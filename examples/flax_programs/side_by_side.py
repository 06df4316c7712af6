"""Four programs in Flax, plain and accumulated: what a user has to change, in lines.

    python examples/flax_programs/side_by_side.py
    python examples/flax_programs/side_by_side.py --diff      # and shows the lines

Beside this file are an image classifier with batch normalisation, and a language model
whose loss is a mean over tokens, each in Linen and in NNX and with dropout. They are
written as Flax's own examples are. Each has a twin, `*_accumulated.py`, which computes
the batch in four micro-batches. This program counts the lines in which they differ.
Then it trains both on the same batches of scikit-learn's digits and of the standard
library's source. It exits with 1 if a check fails:

    both have the same gradient, with dropout, batch statistics and a mean over tokens
    both learn
    the accumulated program needs less memory

The curves and the memory are in out/flax_programs.png. A run takes one to two minutes
on two CPU cores. For a GPU: `--batch-size 4096`.

It needs flax, matplotlib, scikit-learn and tqdm: the dependency group `demo`.
"""

import argparse
import difflib
import importlib
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import sources
import tqdm
from flax import nnx

mpl.use("Agg")  # draws into files, without a window
import matplotlib.pyplot as plt

NAMES = "linen_classifier", "linen_lm", "nnx_classifier", "nnx_lm"
HERE = pathlib.Path(__file__).parent
DROPOUT = 0.1


def widened(tree: Any) -> Any:
    """The tree with floating leaves in float64."""

    def wide(x: Any) -> Any:
        return x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(lambda x: wide(jnp.asarray(x)), tree)


class Program:
    """One of the programs, and the state that the program's step changes."""

    def __init__(self, name: str, dropout: float, tx: Any) -> None:
        """Starts it."""
        self.module = importlib.import_module(name)
        self.in_linen = name.startswith("linen")
        self.state: Any = self.module.start(dropout, tx)

    def widen(self) -> None:
        """Makes parameters and statistics float64."""
        if self.in_linen:
            self.state = widened(self.state)
        for part in () if self.in_linen else self.state:
            nnx.update(part, widened(nnx.state(part)))
            for _, node in nnx.iter_graph(part):
                if isinstance(node, nnx.Embed):  # it remembers the dtype it began with
                    node.dtype = jnp.dtype(float)

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """The arguments of the step."""
        if self.in_linen:
            return self.state, batch, jax.random.key(1)
        return *self.state, batch

    def step(self, batch: Any) -> float:
        """Trains for a single step, and returns the loss."""
        if self.in_linen:
            self.state, metrics = self.module.train_step(*self.arguments(batch))
            return float(metrics["loss"])
        self.module.train_step(*self.arguments(batch))
        metrics = self.state[2]
        loss = float(metrics.compute()["loss"])
        metrics.reset()
        return loss

    def params(self) -> list[np.ndarray]:
        """Copies of the parameters."""
        if self.in_linen:
            return [np.array(x) for x in jax.tree.leaves(self.state.params)]
        params = nnx.as_pure(nnx.state(self.state[0], nnx.Param))
        return [np.array(x) for x in jax.tree.leaves(params)]

    def temporaries(self, batch: Any) -> int:
        """The bytes that the step allocates besides arguments and results."""
        compiled = self.module.train_step.lower(*self.arguments(batch)).compile()
        return compiled.memory_analysis().temp_size_in_bytes


class Row(NamedTuple):
    """A program in both forms.

    Attributes:
      removed: lines of the plain form that are not in the accumulated one.
      added: and the reverse.
      total: all lines of the plain form.
      off_by: the largest error of an element of the gradient, relative to the largest
        element of its leaf, in float64.
      losses: of both forms.
      temporaries: of both forms, in bytes.
    """

    removed: int
    added: int
    total: int
    off_by: float
    losses: tuple[list[float], list[float]]
    temporaries: tuple[int, int]


def difference(name: str) -> list[str]:
    """The lines that differ, each with its sign."""
    forms = [
        (HERE / f"{form}.py").read_text().splitlines()
        for form in (name, f"{name}_accumulated")
    ]
    plain, accumulated = forms
    lines = [*difflib.unified_diff(plain, accumulated, n=0, lineterm="")][2:]
    return [line for line in lines if line[0] in "+-" and line[1:].strip()]


def gradient(name: str, batch: Any) -> list[np.ndarray]:
    """The gradient of a step, measured by SGD with a rate of 1."""
    with jax.enable_x64(True):
        program = Program(name, DROPOUT, optax.sgd(1.0))
        program.widen()
        old = program.params()
        program.step(widened(batch))
        new = program.params()
    return [x - y for x, y in zip(old, new, strict=True)]


def compare(name: str, steps: int, size: int, twin: str | None = None) -> Row:
    """Trains both forms of a program. A test passes another `twin`."""
    twin = twin or f"{name}_accumulated"
    data = sources.digits() if "classifier" in name else sources.lines()
    first = sources.batch(data, 0, size)
    whole, accumulated = gradient(name, first), gradient(twin, first)
    errors = [
        np.max(np.abs(x - y))
        / np.max(np.abs(np.concatenate([g.ravel() for g in whole])))
        for x, y in zip(whole, accumulated, strict=True)
    ]
    losses, temporaries = [], []
    for form in (name, twin):
        program = Program(form, DROPOUT, optax.adam(3e-3))
        temporaries.append(program.temporaries(first))
        bar = tqdm.tqdm(range(steps), desc=form, unit="step", disable=None)
        losses.append([program.step(sources.batch(data, i, size)) for i in bar])
    lines = difference(name)
    return Row(
        sum(line[0] == "-" for line in lines),
        sum(line[0] == "+" for line in lines),
        len((HERE / f"{name}.py").read_text().splitlines()),
        max(map(float, errors)),
        (losses[0], losses[1]),
        (temporaries[0], temporaries[1]),
    )


# In float64 the two round about 1e-16 of what they add. What float32 could not tell
# apart anyway, half of its spacing at 1, is far above, and a wrong program far above
# that. `nnx_lm` is off by 1e-8, for Flax's attention takes its softmax in float32.
BOUND = float(np.finfo(np.float32).eps) / 2


def check(rows: dict[str, Row]) -> bool:
    """Prints a line for each check; returns whether all of them hold."""

    def learns(losses: list[float]) -> bool:
        few = max(1, len(losses) // 8)
        return float(np.mean(losses[-few:])) < losses[0]

    off_by = max(row.off_by for row in rows.values())
    checks = {
        f"Both forms have one gradient: off by {off_by:.1e} at most": off_by <= BOUND,
        "Both learn": all(learns(x) for row in rows.values() for x in row.losses),
        "The accumulated form needs less memory": all(
            row.temporaries[1] < row.temporaries[0] for row in rows.values()
        ),
    }
    for name, ok in checks.items():
        print(f"  {'ok' if ok else 'FAILED':8}{name}")
    return all(checks.values())


def print_table(rows: dict[str, Row]) -> None:
    """Prints a row for each program."""
    print(
        f"\n{'':18}{'lines':>6}{'removed':>9}{'added':>7}{'gradient off by':>17}"
        f"{'temporaries, MiB':>20}{'last loss':>17}"
    )
    for name, row in rows.items():
        sizes = " -> ".join(f"{x / 2**20:.2f}" for x in row.temporaries)
        last = " -> ".join(f"{x[-1]:.3f}" for x in row.losses)
        print(
            f"{name:18}{row.total:6}{row.removed:9}{row.added:7}{row.off_by:17.1e}"
            f"{sizes:>20}{last:>17}"
        )
    if "nnx_lm" in rows:
        print("In nnx_lm Flax's attention takes its softmax in float32.")
    print(flush=True)


def draw_picture(path: pathlib.Path, rows: dict[str, Row]) -> None:
    """Plots the losses of both forms, and their memory."""
    blue, orange = "#2b6cb0", "#dd6b20"
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(
            1, len(rows) + 1, figsize=(3 * len(rows) + 3, 3.4), layout="constrained"
        )
        for axis, (name, row) in zip(axes, rows.items(), strict=False):
            axis.plot(row.losses[0], color=blue, label="plain")
            axis.plot(row.losses[1], color=orange, label="accumulated")
            axis.set_title(name, loc="left", weight="bold")
            axis.set(xlabel="step", ylim=(0, None))
        axes[0].set_ylabel("loss")
        axes[0].legend(frameon=False)
        at = np.arange(len(rows))
        for i, color in enumerate((blue, orange)):
            sizes = [row.temporaries[i] / 2**20 for row in rows.values()]
            axes[-1].barh(at + 0.4 * i, sizes, 0.4, color=color)
        axes[-1].set_yticks(at + 0.2, list(rows))
        axes[-1].invert_yaxis()
        axes[-1].set(xlabel="MiB")
        axes[-1].set_title("Temporaries", loc="left", weight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Compares all programs; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--diff", action="store_true", help="show the lines")
    parser.add_argument("--only", choices=NAMES, help="one program")
    parser.add_argument("--steps", type=int, default=60, help="default: 60")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="default: out")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.batch_size < 4 or args.batch_size % 4:
        parser.error(
            "--steps must be at least 1, and --batch-size a multiple of 4, but they "
            f"are {args.steps} and {args.batch_size}."
        )
    start = time.perf_counter()
    names = [args.only] if args.only else NAMES
    for name in names if args.diff else ():
        print(f"\n{name}\n", *difference(name), sep="\n")
    rows = {name: compare(name, args.steps, args.batch_size) for name in names}
    print_table(rows)
    ok = check(rows)
    picture = args.out / "flax_programs.png"
    draw_picture(picture, rows)
    print(f"\n{time.perf_counter() - start:.0f} s; the picture is {picture}.")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
