"""How large a batch still pays, as a small network learns handwritten digits.

    python examples/noise_scale.py

The gradient noise scale is the batch size at which the noise of the gradient is as
large as the gradient. Below it, a batch twice as large does nearly the work of two
steps; far above it, most examples repeat what the others said. The accumulation meets
all that is needed to estimate it: `MultiSteps(..., track_noise=True)` keeps it, and
`ga.noise_scale(state)` reads it.

Here a window is 64 examples of scikit-learn's digits, in eight micro-batches. Every 25
steps the estimate is printed, and beside it what it estimates: the same from the
gradient of every example of the training set, which nobody could afford for a large
model. The true |G|² jumps from step to step, so that it is smoothed as the estimate is.
The picture is in out/noise_scale.png.

It needs flax, scikit-learn, matplotlib and tqdm: the dependency group `demo`.
"""

import argparse
import functools
import pathlib
import sys
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import sklearn.datasets
import tqdm

import ga_optax as ga
from ga_optax import data

mpl.use("Agg")  # draws into files, with no window
import matplotlib.pyplot as plt
from matplotlib import ticker

STEPS = 600
BATCH = 64  # examples in a window
K = 8  # micro-batches in a window
EVERY = 25  # steps between two rows
EXACT = 5  # steps between two looks at every example
DECAY = 0.98  # a step, as in `ga.noise_scale`
RATE = 0.1
SEED = 0


class Examples(NamedTuple):
    """Images `[..., 64]` of floats from 0 to 1, and labels, int32 `[...]`."""

    images: Any
    labels: Any


class Row(NamedTuple):
    """What is known after a step; `exact` has seen the whole training set."""

    step: int
    loss: float
    scale: ga.NoiseScale
    exact: float


def load_digits() -> Examples:
    """Returns all 1,797 digits."""
    digits: Any = sklearn.datasets.load_digits()
    return Examples(
        jnp.asarray(digits["data"] / 16, jnp.float32),
        jnp.asarray(digits["target"], jnp.int32),
    )


NETWORK = nn.Sequential([nn.Dense(32), nn.gelu, nn.Dense(10)])


def digits_loss(params: Any, batch: Examples) -> jax.Array:
    """The mean cross-entropy over the examples of a batch."""
    logits: Any = NETWORK.apply(params, batch.images)
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    )


@jax.jit
def look_at_all(params: Any, examples: Examples) -> jax.Array:
    """The true |G|² and tr Σ, `[2]`, from the gradient of every example on its own."""

    def gradient(image: jax.Array, label: jax.Array) -> jax.Array:
        grads = jax.grad(digits_loss)(params, Examples(image[None], label[None]))
        return jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])

    grads = jax.vmap(gradient)(*examples)
    mean = jnp.mean(grads, axis=0)
    trace = jnp.sum(jnp.mean(jnp.square(grads - mean), axis=0))
    return jnp.stack([jnp.sum(jnp.square(mean)), trace])


def train(examples: Examples, steps: int, every: int = EVERY) -> list[Row]:
    """Trains with plain SGD, and looks at the noise scale as it goes."""
    tx = ga.MultiSteps(optax.sgd(RATE), K, track_noise=True)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def window(params: Any, state: Any, key: jax.Array, step: jax.Array) -> Any:
        indices = data.window_indices(key, step, len(examples.labels), BATCH, K)

        def micro_step(carry: Any, rows: jax.Array) -> Any:
            params, state = carry
            batch = Examples(examples.images[rows], examples.labels[rows])
            loss, grads = jax.value_and_grad(digits_loss)(params, batch)
            # The weight makes the answer count examples.
            size = jnp.asarray(BATCH / K, jnp.float32)
            return ga.apply_gradients(tx, grads, state, params, weight=size), loss

        (params, state), losses = jax.lax.scan(micro_step, (params, state), indices)
        return params, state, jnp.mean(losses)

    key = jax.random.key(SEED)
    params: Any = NETWORK.init(jax.random.fold_in(key, 1), examples.images[:1])
    state = tx.init(params)
    rows = []
    exact = np.zeros(2)
    print(f"{'step':>5}{'loss':>8}{'exact':>8}   estimate")
    bar = tqdm.tqdm(range(steps), unit="step", disable=None)
    for i in bar:
        params, state, loss = window(params, state, key, jnp.asarray(i, jnp.int32))
        if i % EXACT == 0:
            # The correction of the start would cancel in the ratio.
            exact = DECAY**EXACT * exact + np.asarray(look_at_all(params, examples))
        if (i + 1) % every == 0:
            row = Row(i + 1, float(loss), ga.noise_scale(state), exact[1] / exact[0])
            rows.append(row)
            bar.write(f"{row.step:5}{row.loss:8.3f}{row.exact:8.1f}   {row.scale}")
    return rows


def draw_picture(path: pathlib.Path, rows: list[Row]) -> None:
    """Draws the estimate with its interval, the exact ratio, and the window."""
    blue, orange, grey = "#2b6cb0", "#dd6b20", "#718096"
    known = [row for row in rows if row.scale.known]
    steps = [row.step for row in known]
    values = [v for row in known for v in (row.exact, float(row.scale.value))]
    bottom, top = 0.5 * min(BATCH, *values), 3 * max(values)
    # What is 0 or inf leaves the picture.
    low = [max(float(row.scale.low), bottom / 10) for row in known]
    high = [min(float(row.scale.high), top * 10) for row in known]
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        axes.fill_between(
            steps, low, high, color=blue, alpha=0.15, lw=0, label="95 % interval"
        )
        axes.plot(
            steps,
            [float(row.scale.value) for row in known],
            "o-",
            color=blue,
            label="ga.noise_scale, from the accumulation",
        )
        axes.plot(
            [row.step for row in rows],
            [row.exact for row in rows],
            color=orange,
            lw=2,
            label="exact, from every example's gradient",
        )
        axes.axhline(BATCH, color=grey, ls="--")
        axes.annotate(
            f"a window: {BATCH} examples",
            (rows[-1].step, BATCH),
            xytext=(0, -5),
            textcoords="offset points",
            ha="right",
            va="top",
            color=grey,
        )
        axes.set(xlabel="step", ylabel="noise scale, examples", yscale="log")
        axes.set(xlim=(0, 1.01 * rows[-1].step), ylim=(bottom, top))
        # 50, 100, 200, 500: an axis of so few decades needs more than powers of ten.
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
        axes.set_title(
            "The noise scale grows as the digits are learned", loc="left", weight="bold"
        )
        axes.legend(frameon=False, loc="upper left")
        axes.grid(axis="y", alpha=0.25)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Trains, prints, draws; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="default: out")
    args = parser.parse_args(argv)
    if args.steps < EVERY:
        parser.error(f"--steps must be at least {EVERY}, but it is {args.steps}.")
    rows = train(load_digits(), args.steps)
    if not any(row.scale.known for row in rows):
        print("The noise scale never became known: take more steps.")
        return 1
    picture = args.out / "noise_scale.png"
    draw_picture(picture, rows)
    first, last = rows[0], rows[-1]
    print(
        f"\nExact: {first.exact:.0f} examples after {first.step} steps, "
        f"{last.exact:.0f} after {last.step}. The window holds {BATCH}. "
        f"{sum(row.scale.low <= row.exact <= row.scale.high for row in rows)} of "
        f"{len(rows)} intervals hold the exact number. The picture is in {picture}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
