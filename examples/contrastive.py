"""A contrastive loss over 512 rows, and over 8 x 64: two views of handwritten digits.

    python examples/contrastive.py

Every image of scikit-learn's digits is split like a chessboard: one view has its white
squares, the other its black ones. Two small networks encode them, and a loss like
CLIP's teaches each view to find its counterpart among those of the whole batch. The
more there are to choose from, the more it learns. Three runs see the same windows of
512 images:

    undivided                 a window is one batch: every view chooses among 512
    8 x 64                    `ga.value_and_grad(loss, 8)`: eight micro-batches of 64,
                              and every view chooses among 512
    8 x 64, each by itself    the same micro-batches, added up by `ga.accumulate`: every
                              view chooses among 64

The table at the end shows the recall at 1 on images that were held out: how often the
most similar of the 360 counterparts is the right one. The first two runs are the same
but for rounding, and the last is worse. The picture is in out/contrastive.png.

The program ends with checks, and exits with 1 if one fails. The bounds are derived from
the rounding of float32, not tuned: see "What must hold" below.

It needs scikit-learn, matplotlib and tqdm: the dependency group `demo`.
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import sklearn.datasets
import tqdm

import ga_optax as ga

mpl.use("Agg")  # draws into files, without a window
import matplotlib.pyplot as plt

STEPS = 300
SEEDS = 3
BATCH = 512  # images in a window
K = 8  # micro-batches in a window
PEAK = 3e-3  # the largest learning rate
EVERY = 10  # steps between two looks at the held-out images

# -- The task: data, networks, loss, optimizer -----------------------------------------


class Pairs(NamedTuple):
    """Both views of images: their white and black squares, floats `[..., 32]`."""

    white: Any
    black: Any


def load_pairs() -> tuple[Pairs, Pairs]:
    """Returns the training set (four fifths) and the held-out set (the rest)."""
    digits: Any = sklearn.datasets.load_digits()
    pixels = (digits["data"] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(pixels))
    is_white = np.indices((8, 8)).sum(axis=0).ravel() % 2 == 0
    train, held_out = (
        Pairs(pixels[rows][:, is_white], pixels[rows][:, ~is_white])
        for rows in np.split(order, [len(order) * 4 // 5])
    )
    return train, held_out


def draw_window(train: Pairs, seed: int, step: int) -> Pairs:
    """The pairs of a step, `[BATCH, 32]`; every run sees the same."""
    key = jax.random.key(seed)
    rows = ga.data.window_indices(key, step, len(train.white), BATCH, K)
    rows = np.asarray(rows).ravel()
    return Pairs(train.white[rows], train.black[rows])


def make_params(seed: int, hidden: int = 128, out: int = 32) -> Any:
    """Two networks of two layers, and the logarithm of the scale of similarities."""

    def network(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return {
            "in": jax.random.normal(first, (32, hidden)) / 32**0.5,
            "bias": jnp.zeros(hidden),
            "out": jax.random.normal(second, (hidden, out)) / hidden**0.5,
        }

    white, black = map(network, jax.random.split(jax.random.key(seed)))
    return {"white": white, "black": black, "scale": jnp.log(jnp.asarray(10.0))}


def encode(params: Any, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """Both views of `[rows, 32]` as vectors of length 1, `[rows, 32]`."""

    def view(p: Any, x: jax.Array) -> jax.Array:
        z = jax.nn.gelu(x @ p["in"] + p["bias"]) @ p["out"]
        return z / jnp.linalg.norm(z, axis=1, keepdims=True)

    return view(params["white"], pairs.white), view(params["black"], pairs.black)


def contrast(
    scale: jax.Array, a: jax.Array, b: jax.Array, all_a: Any, all_b: Any, first: Any
) -> jax.Array:
    """The contrastive loss of rows whose counterparts begin at row `first`."""
    rows = jnp.arange(len(a))
    log_p_b = jax.nn.log_softmax(jnp.exp(scale) * a @ all_b.T)[rows, first + rows]
    log_p_a = jax.nn.log_softmax(jnp.exp(scale) * b @ all_a.T)[rows, first + rows]
    return -jnp.mean(log_p_a + log_p_b) / 2


def batch_loss(params: Any, pairs: Pairs) -> jax.Array:
    """The loss of a batch, whose rows choose among each other."""
    a, b = encode(params, pairs)
    return contrast(params["scale"], a, b, a, b, 0)


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Adam. Its default `eps` would turn rounding errors into steps of full size."""
    return optax.adam(optax.cosine_decay_schedule(PEAK, steps), eps=1e-6)


# -- The runs --------------------------------------------------------------------------

UNDIVIDED, WHOLE, ALONE = "undivided, 512", "8 x 64", "8 x 64, each by itself"


def each_by_itself(params: Any, pairs: Pairs) -> tuple[jax.Array, Any]:
    """The mean of the losses of micro-batches, and of their gradients."""
    add = ga.accumulate(batch_loss, K)
    value, acc = add(ga.accumulator.init(params), params, pairs)
    return value, ga.accumulator.mean(acc)


SIDES: dict[str, Callable[..., Any]] = {
    UNDIVIDED: jax.value_and_grad(batch_loss),
    WHOLE: ga.value_and_grad(batch_loss, K),
    ALONE: each_by_itself,
}


@jax.jit
def recall(params: Any, pairs: Pairs) -> jax.Array:
    """The share of rows whose most similar counterpart is right, in both directions."""
    a, b = encode(params, pairs)
    similarity, right = a @ b.T, jnp.arange(len(a))
    hits = [jnp.argmax(similarity, axis=i) == right for i in (0, 1)]
    return jnp.mean(jnp.stack(hits))


@jax.jit
def distance(a: Any, b: Any) -> jax.Array:
    """The largest difference between two trees, in any element."""
    return optax.tree.norm(optax.tree.sub(a, b), ord=jnp.inf)


class Run(NamedTuple):
    """The records of a run of one side with one seed.

    Attributes:
      recalls: the recall on the held-out images, every `EVERY` steps and at the end.
      differences: the largest difference of a parameter to the undivided run, at every
        step.
    """

    recalls: list[float]
    differences: list[float]


class Trainer:
    """All sides, compiled once for all seeds."""

    def __init__(self, steps: int, train: Pairs, held_out: Pairs) -> None:
        """Compiles every side for windows of `train`."""
        self.steps, self.train, self.held_out = steps, train, held_out
        opt = self.opt = make_optimizer(steps)

        def step(gradient: Any, params: Any, state: Any, pairs: Pairs) -> Any:
            loss, grads = gradient(params, pairs)
            updates, state = opt.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        def nudged(error: jax.Array, params: Any, state: Any, pairs: Pairs) -> Any:
            grads = jax.grad(batch_loss)(params, pairs)
            vector, unravel = jax.flatten_util.ravel_pytree(grads)
            updates, state = opt.update(unravel(vector + error), state, params)
            return optax.apply_updates(params, updates), state

        params, window = make_params(0), draw_window(train, 0, 0)
        self.calls = {
            name: jax.jit(functools.partial(step, gradient))
            .lower(params, opt.init(params), window)
            .compile()
            for name, gradient in SIDES.items()
        }
        self.nudged = jax.jit(nudged)

    def look_at(self, step: int) -> bool:
        """True if the recall is measured after this step."""
        return (step + 1) % EVERY == 0 or step + 1 == self.steps

    def run(
        self, seed: int, checks: "Checks", bar: tqdm.tqdm
    ) -> tuple[dict[str, Run], list[float]]:
        """Trains all sides with a seed; returns the runs, and the third check's bound.

        Gradients are checked in the first step, in the middle and at the end.
        """
        start = make_params(seed), self.opt.init(make_params(seed))
        states = dict.fromkeys(self.calls, start)
        envelope = dict.fromkeys((1, -1), start)
        runs = {name: Run([], []) for name in states}
        bounds: list[float] = []
        for i in range(self.steps):
            window = draw_window(self.train, seed, i)
            undivided = states[UNDIVIDED][0]
            if i in (0, self.steps // 2, self.steps - 1):
                checks.gradients(undivided, window)
            reach = reordering(undivided, window)
            envelope = {
                sign: self.nudged(np.float32(sign * reach), *state, window)
                for sign, state in envelope.items()
            }
            loss: Any = None
            for name, call in reversed(self.calls.items()):  # the undivided run last
                *state, loss = call(*states[name], window)
                states[name] = tuple(state)
            undivided = states[UNDIVIDED][0]
            for name, (params, _) in states.items():
                runs[name].differences.append(float(distance(params, undivided)))
                if self.look_at(i):
                    runs[name].recalls.append(float(recall(params, self.held_out)))
            led = max(float(distance(p, undivided)) for p, _ in envelope.values())
            largest = float(optax.tree.norm(undivided, ord=np.inf))
            bounds.append(led + (i + 1) * EPS * largest)
            show_progress(bar, seed, i, loss)
        return runs, bounds


# -- What must hold --------------------------------------------------------------------
#
# 1. One gradient, at given parameters. Give the rows of each micro-batch their own copy
#    of the parameters, and let Gᵢ be the gradient of the undivided loss with respect to
#    copy i. The gradient is Σ Gᵢ, and accumulation adds these terms one by one:
#
#        |accumulated - Σ Gᵢ|  <=  2·k·eps · Σ |Gᵢ|           in every element,
#
#    with eps = 2⁻²³, the spacing of float32 at 1. (A sum of k terms, in any order, errs
#    by at most (k - 1)·(eps / 2)·Σ|Gᵢ|: Higham, "Accuracy and Stability of Numerical
#    Algorithms", 2002, eq. 4.4.) It is checked in float64 against the undivided batch,
#    at the parameters of three steps. There the rounding of the networks is far below
#    this bound, and a missing term or a wrong factor is far above. Of
#    micro-batches each by itself the bound must not hold.
#
# 2. The trajectory. Rounding errors come back through the parameters. As in
#    examples/digits.py, two more undivided runs get in every step the gradient plus, or
#    minus, as much as the accumulated one may differ:
#
#        2·|undivided - Σ Gᵢ|  +  2·k·eps · Σ |Gᵢ|            measured in float32,
#
#    and eps / 2 a step for the rounding of the parameters, in both runs. In no step may
#    the run of 8 x 64 be further away from the undivided one.
#
# 3. After all steps, for every seed: each by itself, the recall is lower.

EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # XLA may treat smaller numbers as zero


def of_copies(copies: Any, window: Pairs) -> jax.Array:
    """The undivided loss, with a copy of the parameters for each micro-batch."""
    split = jax.tree.map(lambda x: x.reshape(K, -1, *x.shape[1:]), window)
    a, b = jax.vmap(encode)(copies, split)
    a, b = a.reshape(BATCH, -1), b.reshape(BATCH, -1)

    def loss(scale: jax.Array, i: jax.Array) -> jax.Array:
        own_a, own_b = (jax.lax.dynamic_slice_in_dim(x, i, BATCH // K) for x in (a, b))
        return contrast(scale, own_a, own_b, a, b, i)

    each = jax.vmap(loss)(copies["scale"], jnp.arange(0, BATCH, BATCH // K))
    return jnp.mean(each)


@jax.jit
def terms(params: Any, window: Pairs) -> jax.Array:
    """The gradients with respect to each copy, `[K, size]`."""
    copies = jax.tree.map(lambda p: jnp.stack([p] * K), params)
    return jax.vmap(flat)(jax.grad(of_copies)(copies, window))


@jax.jit
def undivided_gradient(params: Any, window: Pairs) -> jax.Array:
    """The gradient of the undivided batch as one vector."""
    return flat(jax.grad(batch_loss)(params, window))


def flat(tree: Any) -> jax.Array:
    """All numbers of a tree as one vector."""
    return jax.flatten_util.ravel_pytree(tree)[0]


def rounding(parts: np.ndarray) -> np.ndarray:
    """The bound on the error of a sum of these terms, see above."""
    return 2 * K * EPS * np.sum(np.abs(parts), axis=0) + K * TINY


def reordering(params: Any, window: Pairs) -> np.ndarray:
    """The bound on the difference of two gradients of one window, in float32."""
    parts = np.asarray(terms(params, window), np.float64)
    difference = np.abs(undivided_gradient(params, window) - np.sum(parts, axis=0))
    return 2 * difference + rounding(parts)


class Checks:
    """Collects errors in units of their bounds, and what else must hold."""

    def __init__(self) -> None:
        """Starts without results."""
        self.of_gradient = dict.fromkeys([ALONE, WHOLE], 0.0)
        self.of_run = dict.fromkeys([ALONE, WHOLE], 0.0)
        self.worse: list[bool] = []

    def gradients(self, params: Any, window: Pairs) -> None:
        """The first check, in float64 at these parameters."""
        with jax.enable_x64(True):
            params, window = jax.tree.map(np.float64, (params, window))
            bound = rounding(np.asarray(terms(params, window)))
            exact = undivided_gradient(params, window)
            for name, worst in self.of_gradient.items():
                grad = flat(jax.jit(SIDES[name])(params, window)[1])
                error = float(np.max(np.abs(grad - exact) / bound))
                self.of_gradient[name] = max(worst, error)

    def run(self, runs: dict[str, Run], bounds: list[float], complete: bool) -> None:
        """The second check of a seed's runs; the third if they are complete."""
        for name, worst in self.of_run.items():
            error = float(np.max(np.divide(runs[name].differences, bounds)))
            self.of_run[name] = max(worst, error)
        if complete:
            last = {name: run.recalls[-1] for name, run in runs.items()}
            self.worse.append(last[ALONE] < min(last[UNDIVIDED], last[WHOLE]))

    def report(self) -> bool:
        """Prints a line for each check; returns whether all of them hold."""
        alone, whole = self.of_gradient[ALONE], self.of_gradient[WHOLE]
        far, near = self.of_run[ALONE], self.of_run[WHOLE]
        lines: list[tuple[str, bool, float | None]] = [
            ("8 x 64: gradient of the window, float64", whole <= 1, whole),
            ("each by itself: another gradient", alone > 1, alone),
            ("8 x 64: distance to the undivided run", near <= 1, near),
            ("each by itself: another run", far > 1, far),
        ]
        if self.worse:
            what = "each by itself: lower recall, every seed"
            lines.append((what, all(self.worse), None))
        for what, ok, error in lines:
            measure = "" if error is None else f"{error:.2g} of the bound"
            line = f"  {'ok' if ok else 'FAILED':8}{what:46}{measure}"
            print(line.rstrip())
        return all(ok for _, ok, _ in lines)


# -- Output ----------------------------------------------------------------------------


def show_progress(bar: tqdm.tqdm, seed: int, step: int, loss: Any) -> None:
    """Moves the bar on a terminal; without one, prints a line now and then."""
    bar.set_postfix_str(f"seed {seed}, loss {loss:.4f}", refresh=False)
    bar.update()
    if bar.disable and (step + 1) % 100 == 0:
        print(f"seed {seed}, step {step + 1}: loss {loss:.4f}", flush=True)


def print_table(trainer: Trainer, runs: list[dict[str, Run]]) -> None:
    """Prints a row for each side."""
    columns = "mean", "of each seed", "from undivided", "of a step"
    print(
        f"\n{'':24}{'recall at 1, held out':26}{'difference':>14}{'temporaries':>14}\n"
        "{:24}{:9}{:17}{:>14}{:>14}".format("run", *columns)
    )
    for name, call in trainer.calls.items():
        recalls = [100 * of_seed[name].recalls[-1] for of_seed in runs]
        difference = max(of_seed[name].differences[-1] for of_seed in runs)
        memory: Any = call.memory_analysis()
        print(
            f"{name:24}{f'{np.mean(recalls):.1f} %':9}"
            f"{'  '.join(f'{x:.1f}' for x in recalls):17}"
            f"{f'{difference:.1e}' if name != UNDIVIDED else '-':>14}"
            f"{memory.temp_size_in_bytes / 1024:10.0f} KiB"
        )


GREY = "#7d8590"  # as legible on white as on black
# Okabe and Ito's palette, which colour-blind readers can tell apart.
STYLES: dict[str, dict[str, Any]] = {
    UNDIVIDED: {"color": "#56b4e9", "linewidth": 6},
    ALONE: {"color": "#d55e00", "linewidth": 2},
    WHOLE: {"color": "#0072b2", "linewidth": 2, "linestyle": (0, (3, 2))},
}


def draw_picture(
    path: pathlib.Path,
    trainer: Trainer,
    runs: list[dict[str, Run]],
    bounds: list[list[float]],
) -> None:
    """Draws the recall, and how far apart the runs are; every seed is a line."""
    steps = np.arange(1, trainer.steps + 1)
    looks = [i + 1 for i in range(trainer.steps) if trainer.look_at(i)]
    colours = ["axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color"]
    colours += ["xtick.color", "ytick.color", "grid.color"]
    with plt.rc_context(dict.fromkeys(colours, GREY)):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(10, 4.6), layout="constrained"
        )
        for of_seed, bound in zip(runs, bounds, strict=True):
            for name, run in of_seed.items():
                style = STYLES[name]
                recalls = [100 * x for x in run.recalls]
                left.plot(looks, recalls, **style, alpha=0.8)
                if name != UNDIVIDED:
                    away = [x or np.nan for x in run.differences]  # no logarithm of 0
                    right.plot(steps, away, color=style["color"], linewidth=1.5)
            right.plot(steps, bound, color=GREY, linewidth=1.2, linestyle=":")
        left.set_title("Recall at 1 on held-out images, %", loc="left")
        right.set_title("Largest difference from the undivided run", loc="left")
        right.set_yscale("log")
        for axis in (left, right):
            axis.set_xlabel("step")
            axis.grid(axis="y", alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        lines = [left.plot([], [], **STYLES[name])[0] for name in SIDES]
        lines += right.plot([], [], color=GREY, linewidth=1.2, linestyle=":")
        names = [*SIDES, "as far as rounding alone can lead"]
        figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, transparent=True)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Trains, reports and checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="default: out")
    args = parser.parse_args(argv)
    for name in ("steps", "seeds"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name} must be at least 1, but it is {getattr(args, name)}."
            )
    # By default accelerators round the factors of a product to 8 or 11 bits.
    with jax.default_matmul_precision("highest"):
        return experiment(args.steps, args.seeds, args.out)


def experiment(steps: int, seeds: int, out: pathlib.Path) -> int:
    """The whole program, see the top of the file; returns the exit status."""
    train, held_out = load_pairs()
    size = flat(make_params(0)).size
    print(
        f"{len(train.white)} images to learn, {len(held_out.white)} held out; "
        f"{size:,} parameters. Compiling ...",
        flush=True,
    )
    trainer, checks = Trainer(steps, train, held_out), Checks()
    runs, bounds = [], []
    with tqdm.tqdm(total=steps * seeds, unit="step", disable=None) as bar:
        for seed in range(seeds):
            of_seed, bound = trainer.run(seed, checks, bar)
            checks.run(of_seed, bound, complete=steps >= STEPS)
            runs.append(of_seed)
            bounds.append(bound)
    print_table(trainer, runs)
    picture = out / "contrastive.png"
    draw_picture(picture, trainer, runs, bounds)
    print(f"\nThe picture is in {picture}. What must hold:")
    if checks.report():
        return 0
    print("This build does not accumulate correctly.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
