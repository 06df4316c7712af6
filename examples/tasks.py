"""Several tasks in one window: batches visited in turn, one update a round.

    python examples/tasks.py

One network learns three tasks on scikit-learn's digits (1,797 images of 8 x 8 pixels):

    name     which digit is it?                    64 images a round, weight 1
    turn     by how many quarters is it turned?    32 images a round, weight 0.5
    restore  what is under the noise?             128 images a round, weight 2

They share an encoder; each has a head, a loss and a batch size of its own. An update
is to see all three. There are two ways to do so without all batches in memory at once:

    across calls    a micro-step a task, `weight=` its weight: the window is the round
    inside a call   `accumulate` continues one accumulator over the tasks, each with as
                    many micro-batches as it likes

Without accumulation, one call takes the weighted mean of the three losses. Both ways
compute its gradient. An update after each task is another run, with three times as many
steps, and so is a window with equal weights. The table shows how far each gradient is
off, the memory of each call, and what the network learned. The program ends with
checks, and exits with 1 if one fails. The curves are in out/tasks.png. A run takes a
minute on two CPU cores. For a GPU: `--width 4096`.

It needs scikit-learn, matplotlib and tqdm: the dependency group `demo`.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import sklearn.datasets
import tqdm
from jax.flatten_util import ravel_pytree

import ga_optax as ga

mpl.use("Agg")  # draws into files, without a window
import matplotlib.pyplot as plt

SEED = 0

# -- The tasks -------------------------------------------------------------------------


def encode(params: Any, images: Any) -> jax.Array:
    """The shared encoder: features `[n, width]` of images `[n, 64]`."""
    h = jnp.tanh(images @ params["in"])
    return h + jnp.tanh(h @ params["hidden"])


def name_loss(params: Any, batch: Any) -> jax.Array:
    """The mean cross-entropy of the ten digits."""
    logits = encode(params, batch["images"]) @ params["name"]
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    )


def turn_loss(params: Any, batch: Any) -> jax.Array:
    """The mean cross-entropy of the four ways to turn an image."""
    logits = encode(params, batch["images"]) @ params["turn"]
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["turns"])
    )


def restore_loss(params: Any, batch: Any) -> jax.Array:
    """The mean squared error of the pixels that the noise covers."""
    restored = encode(params, batch["noisy"]) @ params["restore"]
    return jnp.mean((restored - batch["images"]) ** 2)


class Task(NamedTuple):
    """A task of the round.

    Attributes:
      loss: a function of the parameters and a batch: a mean over its examples.
      weight: the weight of the task.
      rows: the examples of the task in a round.
      microbatches: the number of micro-batches of these examples inside a call.
    """

    loss: Callable[[Any, Any], jax.Array]
    weight: float
    rows: int
    microbatches: int


TASKS = {
    "name": Task(name_loss, 1.0, 64, 2),
    "turn": Task(turn_loss, 0.5, 32, 1),
    "restore": Task(restore_loss, 2.0, 128, 4),
}
TOTAL = sum(task.weight for task in TASKS.values())


def load_examples() -> tuple[Any, Any]:
    """The training set (four fifths) and the held-out set, for all tasks."""
    digits: Any = sklearn.datasets.load_digits()
    rng = np.random.default_rng(SEED)
    images = (digits["images"] / 16).astype(np.float32)
    turns = rng.integers(4, size=len(images)).astype(np.int32)
    turned = [np.rot90(image, turn) for image, turn in zip(images, turns, strict=True)]
    everything = {
        "images": images.reshape(-1, 64),
        "labels": digits["target"].astype(np.int32),
        "noisy": (images + rng.normal(size=images.shape) / 2).reshape(-1, 64),
        "turned": np.reshape(turned, (-1, 64)),
        "turns": turns,
    }
    everything["noisy"] = everything["noisy"].astype(np.float32)
    order = rng.permutation(len(images))
    train, held_out = np.split(order, [len(images) * 4 // 5])
    return (
        {k: x[train] for k, x in everything.items()},
        {k: x[held_out] for k, x in everything.items()},
    )


def batch_of(task: str, examples: Any) -> Any:
    """The fields of some examples that a task reads."""
    fields = {
        "name": {"images": "images", "labels": "labels"},
        "turn": {"images": "turned", "turns": "turns"},
        "restore": {"images": "images", "noisy": "noisy"},
    }
    return {name: examples[field] for name, field in fields[task].items()}


def draw_round(train: Any, step: int) -> dict[str, Any]:
    """The batches of a round by task: a pure function of its number."""
    batches = {}
    for i, (name, task) in enumerate(TASKS.items()):
        key = jax.random.fold_in(jax.random.key(SEED), i)
        rows = ga.data.window_indices(key, step, len(train["labels"]), task.rows, 1)
        drawn = {k: x[np.asarray(rows)[0]] for k, x in train.items()}
        batches[name] = batch_of(name, drawn)
    return batches


def make_params(width: int) -> Any:
    """The parameters that every run starts from."""
    rng = np.random.default_rng(SEED)
    shapes = {
        "in": (64, width),
        "hidden": (width, width),
        "name": (width, 10),
        "turn": (width, 4),
        "restore": (width, 64),
    }
    return {
        name: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
        for name, shape in shapes.items()
    }


# -- Ways to train them ----------------------------------------------------------------


class Way(NamedTuple):
    """One way to train on a round.

    Attributes:
      init: `params -> state`.
      calls: the names of the tasks in each call.
      call: `(params, state, batches) -> (params, state)`, not jitted.
    """

    init: Callable[[Any], Any]
    calls: list[tuple[str, ...]]
    call: Callable[[Any, Any, Any], tuple[Any, Any]]


def at_once(opt: Any) -> Way:
    """The program before: one loss, the weighted mean of the three."""

    def loss(params: Any, batches: Any) -> jax.Array:
        parts = [
            task.weight * task.loss(params, batches[n]) for n, task in TASKS.items()
        ]
        return sum(parts[1:], parts[0]) / TOTAL

    def call(params: Any, state: Any, batches: Any) -> tuple[Any, Any]:
        return ga.apply_gradients(opt, jax.grad(loss)(params, batches), state, params)

    return Way(opt.init, [tuple(TASKS)], call)


def across_calls(tx: Any, weights: bool = True) -> Way:
    """A task a call. A `MultiSteps` with a k of three makes one update a round."""

    def call(params: Any, state: Any, batches: Any) -> tuple[Any, Any]:
        [(name, batch)] = batches.items()
        grads = jax.grad(TASKS[name].loss)(params, batch)
        weight = TASKS[name].weight if weights else None
        return ga.apply_gradients(tx, grads, state, params, weight=weight)

    return Way(tx.init, [(name,) for name in TASKS], call)


def inside_a_call(opt: Any) -> Way:
    """A round a call, in one accumulator that `accumulate` continues."""

    def call(params: Any, state: Any, batches: Any) -> tuple[Any, Any]:
        acc = ga.accumulator.init(params)
        for name, task in TASKS.items():
            part = task.weight / task.microbatches
            add = ga.accumulate(
                task.loss, task.microbatches, weight_fn=lambda batch, part=part: part
            )
            _, acc = add(acc, params, batches[name])
        grads = ga.accumulator.mean(acc)
        return ga.apply_gradients(opt, grads, state, params)

    return Way(opt.init, [tuple(TASKS)], call)


def in_turn(opt: Any) -> Way:
    """A task a call, with an update in each: something else."""

    def call(params: Any, state: Any, batches: Any) -> tuple[Any, Any]:
        [(name, batch)] = batches.items()
        grads = jax.grad(TASKS[name].loss)(params, batch)
        return ga.apply_gradients(opt, grads, state, params)

    return Way(opt.init, [(name,) for name in TASKS], call)


SAME = "across calls", "inside a call"  # as the program before


def make_ways(opt: Any) -> dict[str, Way]:
    """All of them by name: the program before, two that are the same, two others."""
    accumulated = ga.MultiSteps(opt, len(TASKS))
    return {
        "all at once": at_once(opt),
        "across calls": across_calls(accumulated),
        "inside a call": inside_a_call(opt),
        "without weights": across_calls(accumulated, weights=False),
        "an update a task": in_turn(opt),
    }


# -- What must hold --------------------------------------------------------------------
#
# With the gradients gᵢ of the micro-batches, their weights wᵢ and eps = 2⁻²³, the
# gradient of a round is that of the program before in every element, up to
#
#     2·n·eps · Σ wᵢ·|gᵢ| / Σ wᵢ          for n micro-batches.
#
# examples/digits.py derives the bound, and says why we compare in float64. A step of
# SGD with a rate of 1 shows the gradient that a way gives to its optimizer.

EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # for elements whose gradient is zero


def gradients_off_by(params: Any, batches: Any) -> dict[str, float]:
    """The largest error of each way's gradient in a round, in units of its bound."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, float), params)
        size: Any = 0.0
        n = sum(task.microbatches for task in TASKS.values())
        for name, task in TASKS.items():
            parts = jax.tree.map(
                lambda x, k=task.microbatches: np.split(x, k), batches[name]
            )
            for i in range(task.microbatches):
                part = {k: x[i] for k, x in parts.items()}
                g = ravel_pytree(jax.jit(jax.grad(task.loss))(params, part))[0]
                size += task.weight / task.microbatches / TOTAL * np.abs(g)
        grads = {}
        for name, way in make_ways(optax.sgd(1.0)).items():
            new, state, call = params, way.init(params), jax.jit(way.call)
            for names in way.calls:
                new, state = call(new, state, {n: batches[n] for n in names})
            moved = jax.tree.map(jnp.subtract, params, new)
            grads[name] = np.asarray(ravel_pytree(moved)[0])
    bound = 2 * n * EPS * size + TINY
    exact = grads.pop("all at once")
    return {name: float(np.max(np.abs(g - exact) / bound)) for name, g in grads.items()}


class Run(NamedTuple):
    """The results of training in one way.

    Attributes:
      updates: the number of updates of the optimizer.
      losses: the held-out losses by task, one for each line of the log.
      temporaries: the bytes that the largest call allocates.
    """

    updates: int
    losses: dict[str, list[float]]
    temporaries: int


@jax.jit
def held_out_losses(params: Any, batches: Any) -> Any:
    """The loss of each task."""
    return {name: task.loss(params, batches[name]) for name, task in TASKS.items()}


def train(name: str, way: Way, params: Any, rounds: int, every: int) -> Run:
    """Trains a copy of the parameters."""
    train, held_out = load_examples()
    held_out = {task: batch_of(task, held_out) for task in TASKS}
    params = jax.tree.map(jnp.copy, params)
    state = way.init(params)
    first = draw_round(train, 0)
    calls = []
    for names in way.calls:
        batches = {task: first[task] for task in names}
        jitted = jax.jit(way.call, donate_argnums=(0, 1))
        calls.append((names, jitted.lower(params, state, batches).compile()))
    losses: dict[str, list[float]] = {task: [] for task in TASKS}
    for i in tqdm.tqdm(range(rounds), desc=name, unit="round", disable=None):
        batches = draw_round(train, i)
        for names, call in calls:
            params, state = call(params, state, {task: batches[task] for task in names})
        if (i + 1) % every == 0:
            for task, loss in held_out_losses(params, held_out).items():
                losses[task].append(float(loss))
    memory: list[Any] = [call.memory_analysis() for _, call in calls]
    updates = int(optax.tree.get(state, "count"))
    return Run(updates, losses, max(m.temp_size_in_bytes for m in memory))


def check(runs: dict[str, Run], off: dict[str, float], rounds: int) -> bool:
    """Prints a line for each check; returns whether all of them hold."""
    most = max(off[name] for name in SAME)
    least = min(error for name, error in off.items() if name not in SAME)
    whole, across = runs["all at once"], runs["across calls"]
    checks = {
        "Both ways give the gradient of the program before: "
        f"{most:.2g} of the bound": most <= 1,
        f"and the others do not: {least:.2g} times the bound": least > 1,
        "They make one update a round": all(runs[n].updates == rounds for n in SAME),
        "A task a call needs less memory than all at once": (
            across.temporaries < whole.temporaries
        ),
    }
    for name, ok in checks.items():
        print(f"  {'ok' if ok else 'FAILED':8}{name}")
    return all(checks.values())


# -- Output ----------------------------------------------------------------------------


def print_table(runs: dict[str, Run], off: dict[str, float]) -> None:
    """Prints a row for each way."""
    heads = "".join(f"{task:>10}" for task in TASKS)
    print(f"\n{'':18}{'updates':>8}{'gradient off by':>22}{'temporaries':>14}{heads}")
    for name, run in runs.items():
        error = f"{off[name]:.1e} x the bound" if name in off else ""
        losses = "".join(f"{run.losses[task][-1]:10.4f}" for task in TASKS)
        size = f"{run.temporaries / 2**10:,.0f} KiB"
        print(f"{name:18}{run.updates:8}{error:>22}{size:>14}{losses}")
    print(f"{'':62}(held-out losses)\n", flush=True)


def draw_picture(path: pathlib.Path, runs: dict[str, Run], every: int) -> None:
    """Plots the held-out losses of each task."""
    styles = {
        "all at once": {"color": "#cbd5e0", "lw": 8},
        "across calls": {"color": "#90cdf4", "lw": 5},
        "inside a call": {"color": "#2b6cb0", "lw": 1.5},
        "without weights": {"color": "#dd6b20", "lw": 1.5, "ls": "--"},
        "an update a task": {"color": "#9b2c2c", "lw": 1.5, "ls": ":"},
    }
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(
            1, len(TASKS), figsize=(12, 4), layout="constrained"
        )
        for axis, (task, spec) in zip(axes, TASKS.items(), strict=True):
            for name, run in runs.items():
                rounds = every * (np.arange(len(run.losses[task])) + 1)
                axis.plot(rounds, run.losses[task], label=name, **styles[name])
            title = f"{task}, weight {spec.weight:g}"
            axis.set_title(title, loc="left", weight="bold")
            axis.set(xlabel="round", ylabel="held-out loss", yscale="log")
            axis.grid(axis="y", alpha=0.25)
        axes[0].legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Trains in each way, and checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, usual in (("width", 128), ("rounds", 200)):
        parser.add_argument(
            f"--{name}", type=int, default=usual, metavar="N", help=f"default: {usual}"
        )
    parser.add_argument("--out", type=pathlib.Path, default="out", help="default: out")
    args = parser.parse_args(argv)
    if min(args.width, args.rounds) < 1:
        parser.error(
            "Width and rounds must be at least 1, but they are "
            f"{args.width} and {args.rounds}."
        )
    start, every = time.perf_counter(), max(1, args.rounds // 20)
    params = make_params(args.width)
    off = gradients_off_by(params, draw_round(load_examples()[0], 0))
    runs = {
        name: train(name, way, params, args.rounds, every)
        for name, way in make_ways(optax.adam(2e-3, eps=1e-6)).items()
    }
    print_table(runs, off)
    ok = check(runs, off, args.rounds)
    picture = args.out / "tasks.png"
    draw_picture(picture, runs, every)
    print(f"\n{time.perf_counter() - start:.0f} s; the picture is {picture}.")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
