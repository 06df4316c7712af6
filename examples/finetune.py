"""Fine-tuning with frozen parameters: what is not trained needs no accumulator.

    python examples/finetune.py

A network learns scikit-learn's digits (1,797 images of 8 x 8 pixels). Then it has to
read them turned by a quarter, which it cannot. Only low-rank adapters learn that, one
in each layer, with 2 % of the parameters; all others are frozen. A window of 64
examples is accumulated over four micro-batches, in four ways:

    whole, across calls   gradients of all parameters, `optax.partition` freezes most
    whole, inside a call  the same, a window in one call
    split, across calls   the adapters are an argument of their own: theirs alone
    split, inside a call  are the gradients, the accumulator and the optimizer's state

The table shows what each way keeps between two calls, and what it needs at its peak, as
XLA reports it. The numbers are exact. Inside a call XLA may find out by itself that
most of the whole gradient is not used, and leave it out. It does not if gradients are
added in place, as on jax 0.11.1 and newer. The split ways never depend on that.

The program ends with checks, and exits with 1 if one fails: that all ways train the
same adapters, that nothing frozen moves, and that the splits save what they should. The
picture is in out/finetune.png. A run takes a minute on two CPU cores. For a GPU:
`--width 4096 --layers 16 --steps 300`.

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

BATCH = 64  # examples in a window
K = 4  # micro-batches in a window
RANK = 2  # of the adapters
SEED = 0

# -- The task --------------------------------------------------------------------------


class Examples(NamedTuple):
    """Images `[n, 64]` of floats from 0 to 1, and labels, int32 `[n]`."""

    images: Any
    labels: Any


def load_digits(turned: bool) -> tuple[Examples, Examples]:
    """The training set (four fifths) and the held-out set, upright or turned."""
    digits: Any = sklearn.datasets.load_digits()
    images = (digits["images"] / 16).astype(np.float32)
    if turned:
        images = np.rot90(images, axes=(1, 2))
    images, labels = images.reshape(-1, 64), digits["target"].astype(np.int32)
    order = np.random.default_rng(SEED).permutation(len(labels))
    train, held_out = np.split(order, [len(labels) * 4 // 5])
    return (
        Examples(images[train], labels[train]),
        Examples(images[held_out], labels[held_out]),
    )


def draw_window(train: Examples, step: int) -> Examples:
    """The examples of a step, a pure function of its number."""
    key = jax.random.key(SEED)
    rows = np.asarray(ga.data.window_indices(key, step, len(train.labels), BATCH, 1))[0]
    return Examples(train.images[rows], train.labels[rows])


def make_params(layers: int, width: int) -> tuple[Any, Any]:
    """The network, and the adapters, which change nothing at first."""
    rng = np.random.default_rng(SEED)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    network = {
        "in": normal(64, width),
        "hidden": normal(layers, width, width),
        "out": normal(width, 10),
    }
    adapters = {
        "down": normal(layers, width, RANK),
        "up": jnp.zeros((layers, RANK, width)),
    }
    return network, adapters


def predict(network: Any, adapters: Any, images: Any) -> jax.Array:
    """Logits `[n, 10]`. A layer's matrix is `hidden + down @ up`."""

    def layer(h: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
        hidden, down, up = of_layer
        return h + jnp.tanh(h @ hidden + h @ down @ up), None

    stacked = network["hidden"], adapters["down"], adapters["up"]
    h, _ = jax.lax.scan(layer, images @ network["in"], stacked)
    return h @ network["out"]


def digits_loss(network: Any, adapters: Any, batch: Examples) -> jax.Array:
    """The mean cross-entropy over the examples of a batch."""
    logits = predict(network, adapters, batch.images)
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    )


@jax.jit
def accuracy(network: Any, adapters: Any, examples: Examples) -> jax.Array:
    """The fraction of the examples that the network classifies correctly."""
    logits = predict(network, adapters, examples.images)
    return jnp.mean(jnp.argmax(logits, axis=-1) == examples.labels)


def pretrained(network: Any, adapters: Any, steps: int) -> Any:
    """The network after it has learned the upright digits, all of its parameters."""
    train, _ = load_digits(turned=False)
    opt = optax.adam(1e-3)
    value_and_grad = ga.value_and_grad(digits_loss, K, batch_argnums=2)

    @jax.jit
    def step(network: Any, state: Any, batch: Examples) -> Any:
        _, grads = value_and_grad(network, adapters, batch)
        updates, state = opt.update(grads, state, network)
        return optax.apply_updates(network, updates), state

    state = opt.init(network)
    for i in tqdm.tqdm(range(steps), desc="upright digits", unit="step", disable=None):
        network, state = step(network, state, draw_window(train, i))
    return network


# -- Four ways -------------------------------------------------------------------------


def tuning_loss(adapters: Any, batch: Examples, network: Any) -> jax.Array:
    """The loss, with the trained parameters first and the frozen ones last."""
    return digits_loss(network, adapters, batch)


def whole_loss(params: Any, batch: Examples) -> jax.Array:
    """The loss of one tree of parameters, for a program that trains all of them."""
    return digits_loss(params["network"], params["adapters"], batch)


class Way(NamedTuple):
    """One way to train the adapters.

    Attributes:
      calls: the number of calls for a window.
      start: `(network, adapters) -> (params, state)`: what a call replaces.
      call: `(params, state, network, batch) -> (params, state)`, not jitted.
      adapters: reads the adapters off the parameters.
      network: the same for the network; None if a call cannot change it.
    """

    calls: int
    start: Callable[[Any, Any], tuple[Any, Any]]
    call: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    adapters: Callable[[Any], Any]
    network: Callable[[Any], Any] | None


def make_ways(opt: optax.GradientTransformation) -> dict[str, Way]:
    """The four ways, by name."""
    labels = {"network": "frozen", "adapters": "trained"}
    freeze = optax.partition({"trained": opt, "frozen": optax.set_to_zero()}, labels)
    ways = {}
    for name, tx in (
        ("across calls", ga.MultiSteps(freeze, K)),
        ("inside a call", freeze),
    ):
        ways[f"whole, {name}"] = _whole(tx)
    for name, tx in (("across calls", ga.MultiSteps(opt, K)), ("inside a call", opt)):
        ways[f"split, {name}"] = _split(tx)
    return ways


def _whole(tx: Any) -> Way:
    inside = not isinstance(tx, ga.MultiSteps)
    value_and_grad = ga.value_and_grad(whole_loss, K if inside else 1)

    def start(network: Any, adapters: Any) -> tuple[Any, Any]:
        params = {"network": network, "adapters": adapters}
        return params, tx.init(params)

    def call(params: Any, state: Any, network: Any, batch: Any) -> tuple[Any, Any]:
        del network  # it is in the parameters
        _, grads = value_and_grad(params, batch)
        return ga.apply_gradients(tx, grads, state, params)

    def adapters(params: Any) -> Any:
        return params["adapters"]

    return Way(1 if inside else K, start, call, adapters, lambda p: p["network"])


def _split(tx: Any) -> Way:
    inside = not isinstance(tx, ga.MultiSteps)
    value_and_grad = ga.value_and_grad(tuning_loss, K if inside else 1)

    def start(network: Any, adapters: Any) -> tuple[Any, Any]:
        del network
        return adapters, tx.init(adapters)

    def call(adapters: Any, state: Any, network: Any, batch: Any) -> tuple[Any, Any]:
        _, grads = value_and_grad(adapters, batch, network)
        return ga.apply_gradients(tx, grads, state, adapters)

    return Way(1 if inside else K, start, call, lambda adapters: adapters, None)


class Run(NamedTuple):
    """The results of training in one way, and the memory.

    Attributes:
      adapters: the adapters after the last step.
      moved: whether a bit of a frozen parameter changed.
      curve: the accuracy on held-out, turned digits, by step.
      kept: the bytes of parameters and optimizer state, which live between two calls.
      peak: the bytes of a call, with the arguments.
    """

    adapters: Any
    moved: bool
    curve: dict[int, float]
    kept: int
    peak: int


def nbytes(tree: Any) -> int:
    """The bytes of a tree's leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def train(name: str, way: Way, network: Any, adapters: Any, steps: int) -> Run:
    """Trains copies of the adapters on turned digits."""
    turned, held_out = load_digits(turned=True)
    params, state = jax.tree.map(jnp.copy, way.start(network, adapters))
    # The whole trees hold the network themselves.
    frozen = network if way.network is None else None
    kept = nbytes((params, state, frozen))

    def split(i: int) -> list[Any]:
        parts = [np.split(x, way.calls) for x in draw_window(turned, i)]
        return [Examples(*part) for part in zip(*parts, strict=True)]

    lowered = jax.jit(way.call, donate_argnums=(0, 1)).lower(
        params, state, frozen, split(0)[0]
    )
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    curve = {0: float(accuracy(network, adapters, held_out))}
    every = max(1, steps // 8)
    for i in tqdm.tqdm(range(steps), desc=name, unit="step", disable=None):
        for batch in split(i):
            params, state = compiled(params, state, frozen, batch)
        if (i + 1) % every == 0:
            curve[i + 1] = float(accuracy(network, way.adapters(params), held_out))
    moved = way.network is not None and any(
        np.any(a != b)
        for a, b in zip(
            *map(jax.tree.leaves, (way.network(params), network)), strict=True
        )
    )
    return Run(way.adapters(params), moved, curve, kept, peak)


# -- What must hold --------------------------------------------------------------------
#
# The gradient of the adapters is that of the undivided batch in every element, up to
# 2·k·eps · Σ |gᵢ| / k  with the gradients gᵢ of the k micro-batches and eps = 2⁻²³.
# examples/digits.py derives the bound, and says why we compare in float64. A step of
# SGD with a rate of 1 shows the gradient that a way gives to its optimizer.

EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # for elements whose gradient is zero


def off_by(way: Way, network: Any, adapters: Any) -> float:
    """The largest error of a way's gradient in one window, in units of the bound.

    Args:
      way: from `make_ways(optax.sgd(1.0))`.
      network: the network.
      adapters: adapters whose gradient is not zero.
    """
    window = draw_window(load_digits(turned=True)[0], 0)
    grad = jax.jit(jax.grad(tuning_loss))
    with jax.enable_x64(True):
        network, adapters = jax.tree.map(
            lambda x: jnp.asarray(x, float), (network, adapters)
        )
        parts = zip(*(np.split(x, K) for x in window), strict=True)
        each = [grad(adapters, Examples(*part), network) for part in parts]
        undivided = grad(adapters, window, network)
        params, state = way.start(network, adapters)
        call = jax.jit(way.call)
        for part in zip(*(np.split(x, way.calls) for x in window), strict=True):
            params, state = call(params, state, network, Examples(*part))
        grad = jax.tree.map(jnp.subtract, adapters, way.adapters(params))
        grad, undivided, *each = (ravel_pytree(g)[0] for g in (grad, undivided, *each))
    size = np.mean(np.abs(each), axis=0)
    return float(np.max(np.abs(grad - undivided) / (2 * K * EPS * size + TINY)))


def check(runs: dict[str, Run], errors: dict[str, float], frozen: int) -> bool:
    """Prints a line for each check; returns whether all of them hold."""
    whole, split = runs["whole, across calls"], runs["split, across calls"]
    checks = {
        "The gradient of the adapters is that of the undivided batch: "
        f"{max(errors.values()):.2g} of the bound": max(errors.values()) <= 1,
        "No bit of a frozen parameter moved": not any(r.moved for r in runs.values()),
        "Across calls, the split keeps one tree of the frozen size less: the "
        "accumulator": whole.kept - split.kept == frozen,
        "and needs more than one less at its peak: the gradient, too": (
            whole.peak - split.peak > frozen
        ),
    }
    for name, ok in checks.items():
        print(f"  {'ok' if ok else 'FAILED':8}{name}")
    return all(checks.values())


def print_table(runs: dict[str, Run]) -> None:
    """Prints a row for each way."""
    print(f"\n{'':24}{'kept between calls':>20}{'at the peak':>14}   read, turned")
    for name, run in runs.items():
        *_, last = run.curve.values()
        kept, peak = (f"{size / 2**20:,.2f} MiB" for size in (run.kept, run.peak))
        print(f"{name:24}{kept:>20}{peak:>14}{100 * last:12.1f} %")
    print(flush=True)


def draw_picture(path: pathlib.Path, runs: dict[str, Run], frozen: int) -> None:
    """Plots what the adapters learn, and the memory of each way."""
    blue, orange, grey = "#2b6cb0", "#dd6b20", "#718096"
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.2), layout="constrained"
        )
        shades = "#cbd5e0", "#90cdf4", "#4299e1", blue
        for (name, run), color, lw in zip(
            runs.items(), shades, (9, 6, 3, 1), strict=True
        ):
            steps, fractions = list(run.curve), list(run.curve.values())
            left.plot(steps, fractions, color=color, lw=lw, label=name)
        left.set(xlabel="step", ylabel="turned digits that are read", ylim=(0, 1))
        left.set_title("Four ways to train the same", loc="left", weight="bold")
        left.legend(frameon=False)
        left.grid(axis="y", alpha=0.25)

        rows = np.arange(len(runs))
        for sizes, color, label in (
            ([run.peak for run in runs.values()], orange, "at the peak of a call"),
            ([run.kept for run in runs.values()], blue, "kept between calls"),
        ):
            right.barh(rows, np.divide(sizes, 2**20), color=color, label=label)
        right.axvline(frozen / 2**20, color=grey, ls="--", label="frozen parameters")
        right.set_yticks(rows, list(runs))
        right.invert_yaxis()
        right.set(xlabel="MiB")
        right.set_title("What each needs", loc="left", weight="bold")
        right.legend(frameon=False, loc="lower right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Learns, fine-tunes in four ways, and checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, usual in (("layers", 4), ("width", 256), ("steps", 100)):
        parser.add_argument(
            f"--{name}", type=int, default=usual, metavar="N", help=f"default: {usual}"
        )
    parser.add_argument("--out", type=pathlib.Path, default="out", help="default: out")
    args = parser.parse_args(argv)
    if min(args.layers, args.width, args.steps) < 1:
        parser.error(
            "Layers, width and steps must be at least 1, but they are "
            f"{args.layers}, {args.width} and {args.steps}."
        )

    start = time.perf_counter()
    network, adapters = make_params(args.layers, args.width)
    network = pretrained(network, adapters, args.steps)
    frozen = nbytes(network)
    upright, turned = (
        100 * float(accuracy(network, adapters, load_digits(turned)[1]))
        for turned in (False, True)
    )
    print(
        f"The network ({frozen / 2**20:.2f} MiB) reads {upright:.1f} % of the upright "
        f"digits, and {turned:.1f} % if they are turned. The adapters: "
        f"{nbytes(adapters) / 2**20:.2f} MiB."
    )
    probes = make_ways(optax.sgd(1.0))
    away = dict(adapters, up=adapters["down"].swapaxes(1, 2))  # where it is not zero
    errors = {name: off_by(way, network, away) for name, way in probes.items()}
    ways = make_ways(optax.adam(1e-2, eps=1e-6))
    runs = {
        name: train(name, way, network, adapters, args.steps)
        for name, way in ways.items()
    }
    print_table(runs)
    ok = check(runs, errors, frozen)
    picture = args.out / "finetune.png"
    draw_picture(picture, runs, frozen)
    print(f"\n{time.perf_counter() - start:.0f} s; the picture is {picture}.")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
