"""Handwritten digits, learned several times over: batches of 64, and 4 x 16.

    python examples/digits.py
    python examples/digits.py --bits     # the table to the last bit
    python examples/digits.py --check    # and what must hold, in a minute more

A small Flax network learns scikit-learn's digits (1,797 images of 8 x 8 pixels) for
100 steps. Every run starts from the same parameters and sees the same windows of 64
examples. The first run uses a window as one batch. The others split it into four
micro-batches of 16, and accumulate. All should be the same run. The table at the end
shows for each the loss, the accuracy, the memory, the time, and whether it is the same
run. With --bits it shows the loss to the last bit, and how far the parameters are from
those of the undivided run. The loss curves are in out/digits.png.

With --check the program ends with checks, and exits with 1 if one fails. The bounds are
derived from the rounding of float32, not tuned: see "What must hold" below.

It needs flax, scikit-learn, matplotlib and tqdm: the dependency group `demo`.
"""

import argparse
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import optax
import sklearn.datasets
import tqdm

import ga_optax as ga

mpl.use("Agg")  # draws into files, without a window

STEPS = 100
BATCH = 64  # examples in a window
K = 4  # micro-batches in a window
PEAK = 5e-3  # the largest learning rate
SEED = 0

# -- The task: data, network, loss, optimizer ------------------------------------------


class Examples(NamedTuple):
    """Images `[..., 8, 8, 1]` of floats from 0 to 1, and labels, int32 `[...]`."""

    images: Any
    labels: Any


def load_digits() -> tuple[Examples, Examples]:
    """Returns the training set (four fifths) and the held-out set (the rest)."""
    digits: Any = sklearn.datasets.load_digits()
    images = (digits["images"] / 16).astype(np.float32)[..., None]
    labels = digits["target"].astype(np.int32)
    order = np.random.default_rng(SEED).permutation(len(labels))
    train, held_out = np.split(order, [len(labels) * 4 // 5])
    return (
        Examples(images[train], labels[train]),
        Examples(images[held_out], labels[held_out]),
    )


def draw_window(train: Examples, step: int) -> Examples:
    """The examples of a step, `[K, BATCH / K, ...]`: drawn first, then split.

    They depend only on the seed and the step. So every run sees the same examples, and
    there is no iterator to restore after a restart.
    """
    key = jax.random.key(SEED)
    rows = np.asarray(ga.data.window_indices(key, step, len(train.labels), BATCH, K))
    return Examples(train.images[rows], train.labels[rows])


class Block(nn.Module):
    """A residual convolution, as the body of a scan over layers."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Maps `[batch, height, width, channels]` to the same shape."""
        return x + nn.gelu(nn.Conv(x.shape[-1], (3, 3))(x)), None


class Network(nn.Module):
    """A convolution, two residual ones with stacked parameters, two dense layers.

    It is smooth, without a relu or a maximum. If one of those switches, a rounding
    error in the last bit becomes an error as large as the gradient.
    """

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images `[batch, 8, 8, 1]` to logits `[batch, 10]`."""
        x = nn.gelu(nn.Conv(16, (3, 3), strides=2)(images))
        blocks = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        x, _ = blocks()(x, None)
        x = nn.gelu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


NETWORK = Network()


def digits_loss(params: Any, batch: Examples) -> jax.Array:
    """The mean cross-entropy over the examples of a batch."""
    logits: Any = NETWORK.apply(params, batch.images)
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    )


SCHEDULE = optax.warmup_cosine_decay_schedule(
    init_value=PEAK / 10, peak_value=PEAK, warmup_steps=10, decay_steps=STEPS
)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW, with the learning rate of each step in its state.

    Adam divides a gradient by its size plus `eps`. The default of 1e-8 is no larger
    than the rounding errors here, so Adam would turn them into steps of full size.
    """
    return optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, eps=1e-6)


# -- The runs --------------------------------------------------------------------------


class Side(NamedTuple):
    """One way to train on a window.

    Attributes:
      name: the name in the table.
      calls: the number of calls for a window.
      value_and_grad: `(params, batch) -> (loss, grads)`.
      tx: the optimizer, or a `MultiSteps` around it.
      apply: `(tx, grads, state, params) -> (params, state)`.
    """

    name: str
    calls: int
    value_and_grad: Callable[..., Any]
    tx: Any
    apply: Callable[..., Any]


def apply_updates(tx: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """One update as Optax writes it."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def make_sides(loss: Callable[..., Any], opt: Any) -> list[Side]:
    """All ways to train. The others are compared with the first."""
    whole = jax.value_and_grad(loss)
    theirs, ours = optax.MultiSteps(opt, K), ga.MultiSteps(opt, K)
    scan = ga.value_and_grad(loss, K)
    sides = [
        Side("undivided, 64", 1, whole, opt, apply_updates),
        Side("optax.MultiSteps, 4 x 16", K, whole, theirs, apply_updates),
        Side("ga.MultiSteps, 4 x 16", K, whole, ours, ga.apply_gradients),
        Side("ga.value_and_grad, 4 x 16", 1, scan, opt, apply_updates),
    ]
    plain = ga.value_and_grad(loss, K, optimize=False)
    sides.append(Side("the same, optimize=False", 1, plain, opt, apply_updates))
    return sides


class Run:
    """A run of a side: its compiled call, its parameters, and what it records."""

    def __init__(self, side: Side, params: optax.Params, window: Any) -> None:
        """Compiles the call for batches shaped like those of `window`."""
        self.side = side
        self.start(params)

        # Donated arguments come first, and are returned in the same order. JAX matches
        # donated buffers to outputs of their shapes in that order; otherwise XLA
        # copies.
        def call(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = side.value_and_grad(params, batch)
            params, state = side.apply(side.tx, grads, state, params)
            return params, state, loss

        batch = split(window, side.calls)[0]
        self.call = (
            jax.jit(call, donate_argnums=(0, 1))
            .lower(self.params, self.state, batch)
            .compile()
        )
        self.seconds = 0.0
        self.losses: list[np.float32] = []
        self.learning_rates: list[float] = []
        self.differences: list[float] = []

    def start(self, params: optax.Params) -> None:
        """Copies the parameters, since they will be donated."""
        self.params = jax.tree.map(jnp.copy, params)
        self.state = self.side.tx.init(self.params)

    @property
    def inner(self) -> Any:
        """The state of the optimizer itself, inside a `MultiSteps`, if any."""
        return getattr(self.state, "inner_opt_state", self.state)

    def train(self, window: Any) -> None:
        """Trains on one window, in as many calls as the side needs."""
        batches = jax.device_put(split(window, self.side.calls))
        jax.block_until_ready((batches, self.params))
        losses, start = [], time.perf_counter()
        for batch in batches:
            self.params, self.state, loss = self.call(self.params, self.state, batch)
            losses.append(loss)
        jax.block_until_ready(self.params)
        self.seconds += time.perf_counter() - start
        self.losses.append(np.float32(np.mean(jax.device_get(losses))))

    def record(self, undivided: optax.Params) -> None:
        """Records the learning rate, and the distance to the undivided run."""
        self.learning_rates.append(float(self.inner.hyperparams["learning_rate"]))
        self.differences.append(float(distance(self.params, undivided)))


def split(window: Any, calls: int) -> list[Any]:
    """Splits a window `[K, rows, ...]` into the batches of `calls` calls."""
    batches = jax.tree.map(lambda a: a.reshape(calls, -1, *a.shape[2:]), window)
    return [jax.tree.map(lambda a, i=i: a[i], batches) for i in range(calls)]


def temporaries(compiled: Any) -> int:
    """The bytes that a program allocates in addition to arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def temporaries_of_update(side: Side, params: optax.Params) -> int:
    """The same for the update alone, without the gradient before it."""

    def update(params: Any, state: Any, grads: Any) -> Any:
        return side.apply(side.tx, grads, state, params)

    arguments = params, side.tx.init(params), params
    return temporaries(
        jax.jit(update, donate_argnums=(0, 1)).lower(*arguments).compile()
    )


@jax.jit
def accuracy(params: Any, examples: Examples) -> jax.Array:
    """The fraction of the examples that the network classifies correctly."""
    logits: Any = NETWORK.apply(params, examples.images)
    return jnp.mean(jnp.argmax(logits, axis=-1) == examples.labels)


@jax.jit
def distance(a: optax.Params, b: optax.Params) -> jax.Array:
    """The largest difference between two trees, in any element."""
    return optax.tree.norm(optax.tree.sub(a, b), ord=jnp.inf)


def hexadecimal(x: np.float32) -> str:
    """A float32 in the hexadecimal notation of Python and C, without final zeros."""
    digits, exponent = float(x).hex().split("p")
    return f"{digits.rstrip('0')}p{exponent}"


def ulps(a: optax.Params, b: optax.Params) -> int:
    """The largest number of float32 values between two elements of the trees."""

    def ordered(x: Any) -> np.ndarray:
        bits = np.asarray(x).view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(int(np.max(np.abs(ordered(x) - ordered(y)))) for x, y in pairs)


# -- What must hold --------------------------------------------------------------------
#
# 1. Exactly: the counters, the learning rate of every step, and the dtypes.
#
# 2. One gradient, at given parameters: how far may the gradient that the optimizer gets
#    be from the exact one? Let gᵢ be the gradients of the k micro-batches, and let eps
#    be 2⁻²³, the spacing of float32 at 1. (One rounding errs by at most eps / 2.) Then
#
#        |mean - Σ gᵢ / k|  <=  2·k·eps · Σ |gᵢ| / k          in every element.
#
#    A sum and a division round k times. In any order, the sum errs by at most
#    (k - 1)·(eps / 2)·Σ|gᵢ| (Higham, "Accuracy and Stability of Numerical Algorithms",
#    2002, eq. 4.4). That is a quarter of the bound. Optax's running mean
#    m + (g - m) / n rounds four times in a micro-step (a difference, 1 / n, a product,
#    a sum). By the end of a window that adds up to at most 4·k·(eps / 2)·Σ|gᵢ| / k,
#    which is all of the bound.
#
#    This is checked twice, at the parameters of three steps. The first check is in
#    float32, with gradients that are given as data, so only the accumulation rounds.
#    The second is in float64, with the network itself, against the undivided batch.
#    There the same bound is 2³²·eps(float64)·Σ|gᵢ| / k. The rounding of this network is
#    far below it, and a wrong factor or a lost micro-batch is far above.
#
# 3. The trajectory: rounding errors pass through the optimizer, and come back through
#    the parameters. Their size after 100 steps cannot be derived, but it can be
#    measured without accumulation. In every step, two more undivided runs get the
#    undivided gradient plus, or minus, the bound on its difference to the accumulated
#    one. With g for the gradient of the undivided batch, that bound is
#
#        |g - Σ gᵢ / k|  +  2·k·eps · Σ |gᵢ| / k
#
#    by the triangle inequality. Its first term is measured, and counted twice, because
#    inside a training step XLA may round g and gᵢ differently. Errors of the largest
#    possible size that always have the same sign lead further than real errors, whose
#    signs vary. The rounding of the parameters comes on top: eps / 2 a step, in both
#    runs. In no step may an accumulating run be further away from the undivided one.
#    This is not a proof, so it complements the other two checks.

EPS = float(np.finfo(np.float32).eps)
# XLA may treat smaller numbers as zero.
TINY = float(np.finfo(np.float32).tiny)

digits_grad = jax.jit(jax.grad(digits_loss))


def given_loss(params: jax.Array, batch: jax.Array) -> jax.Array:
    """A loss whose gradient is the mean of the vectors in `batch`; exact for one."""
    return jnp.vdot(params, jnp.mean(batch, axis=0))


def keep_gradient() -> optax.GradientTransformation:
    """An optimizer that changes nothing. Its state is the last gradient."""

    def init(params: Any) -> Any:
        return optax.tree.zeros_like(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del state, params
        return optax.tree.zeros_like(updates), updates

    return optax.GradientTransformation(init, update)


class Checks:
    """Collects the results, by check and side, for one report at the end."""

    def __init__(self) -> None:
        """Starts without results."""
        self.errors: dict[str, dict[str, float]] = {}

    def within(self, what: str, side: Side, error: float) -> None:
        """Records an error in units of the bound; the largest of a side counts."""
        errors = self.errors.setdefault(what, {})
        error = math.inf if math.isnan(error) else float(error)
        errors[side.name] = max(error, errors.get(side.name, 0.0))

    def holds(self, what: str, side: Side, answer: bool) -> None:
        """Records a check without rounding."""
        self.within(what, side, 0.0 if answer else math.inf)

    def report(self) -> bool:
        """Prints a line for each check; returns whether all of them hold."""
        ok = True
        for what, errors in self.errors.items():
            failed = [side for side, error in errors.items() if error > 1]
            worst = max(errors.values())
            measure = f"{worst:.2g} of the bound" if 0 < worst < math.inf else ""
            who = f" in: {', '.join(failed)}" if failed else ""
            line = f"  {'FAILED' if failed else 'ok':8}{what:44}{measure:20}{who}"
            print(line.rstrip())
            ok = ok and not failed
        return ok


class Gradients:
    """The second check: the gradient that the optimizer of each side gets."""

    def __init__(self, params: optax.Params, window: Examples) -> None:
        """Compiles both halves of the check."""
        micro = micro_gradients(params, window)
        self.given = probes(
            given_loss, np.float32(micro[0]), np.float32(micro[:, None])
        )
        params, window = double(params), double(window)
        with jax.enable_x64(True):
            self.double = probes(digits_loss, params, window)

    def check(self, checks: Checks, params: optax.Params, window: Examples) -> None:
        """Compares at these parameters, on this window."""
        micro = micro_gradients(params, window)
        bound, mean = accumulation_bound(micro), np.mean(micro, axis=0)
        for run in self.given:
            given = gradient(run, np.float32(micro[0]), np.float32(micro[:, None]))
            error = float(np.max(np.abs(given - mean) / bound))
            checks.within("mean of given gradients, float32", run.side, error)

        params, window = double(params), double(window)
        with jax.enable_x64(True):
            # Far out on a gelu, float32 has 0, and float64 has a small number.
            bound = accumulation_bound(micro_gradients(params, window))
            gradients = [gradient(run, params, window) for run in self.double]
        for run, grads in zip(self.double, gradients, strict=True):
            error = float(np.max(np.abs(grads - gradients[0]) / bound))
            checks.within("gradient of the network, float64", run.side, error)


def probes(loss: Callable[..., Any], params: Any, window: Any) -> list[Run]:
    """All sides, with the given loss and an optimizer that keeps the gradient."""
    return [Run(side, params, window) for side in make_sides(loss, keep_gradient())]


def gradient(run: Run, params: Any, window: Any) -> np.ndarray:
    """The gradient that the optimizer of a probe gets for a window."""
    run.start(params)
    run.train(window)
    return flat(run.inner)


def micro_gradients(params: optax.Params, window: Examples) -> np.ndarray:
    """The gradients of the micro-batches, each as a vector: `[K, size]`."""
    return np.stack([flat(digits_grad(params, b)) for b in split(window, K)])


def accumulation_bound(micro: np.ndarray) -> np.ndarray:
    """The bound on the error of the mean of these gradients, see above."""
    return 2 * K * EPS * np.mean(np.abs(micro), axis=0) + K * TINY


def flat(tree: Any) -> np.ndarray:
    """All numbers of a tree as one float64 vector."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(double(tree))])


def double(tree: Any) -> Any:
    """The tree as NumPy arrays, floats in float64."""
    return jax.tree.map(
        lambda a: np.asarray(a, np.float64 if a.dtype == np.float32 else a.dtype), tree
    )


@jax.jit
def nudged(params: Any, state: Any, grads: Any, error: jax.Array) -> tuple[Any, Any]:
    """One undivided update, with the error added to the gradient."""
    vector, unravel = jax.flatten_util.ravel_pytree(grads)
    return apply_updates(make_optimizer(), unravel(vector + error), state, params)


class Envelope:
    """The third check: how far rounding alone can lead from the undivided run."""

    def __init__(self, params: optax.Params) -> None:
        """Starts a run with positive errors, and one with negative errors."""
        state = make_optimizer().init(params)
        self.runs = dict.fromkeys((1, -1), (params, state))
        self.bounds: list[float] = []

    def train(self, window: Examples, undivided: optax.Params) -> None:
        """One step; `undivided` are the parameters of the undivided run before it."""
        (whole,) = split(window, 1)
        micro = micro_gradients(undivided, window)
        reordered = np.abs(flat(digits_grad(undivided, whole)) - np.mean(micro, axis=0))
        error = 2 * reordered + accumulation_bound(micro)
        for sign, (params, state) in self.runs.items():
            grads = digits_grad(params, whole)
            self.runs[sign] = nudged(params, state, grads, np.float32(sign * error))

    def record(self, undivided: optax.Params) -> None:
        """Records the bound; `undivided` are that run's parameters after the step."""
        led = max(float(distance(p, undivided)) for p, _ in self.runs.values())
        largest = float(optax.tree.norm(undivided, ord=np.inf))
        self.bounds.append(led + (len(self.bounds) + 1) * EPS * largest)


def check_runs(checks: Checks, runs: list[Run], envelope: Envelope) -> None:
    """The first and the third check, of whole runs."""
    steps = len(envelope.bounds)
    wanted = np.asarray(SCHEDULE(jnp.arange(steps)))
    for run in runs:
        checks.holds("steps of the optimizer", run.side, int(run.inner.count) == steps)
        # In float32, from numbers up to the peak, with fewer than 16 roundings. Another
        # program may order them differently.
        off = np.max(np.abs(np.asarray(run.learning_rates) - wanted))
        checks.within("learning rate of each step", run.side, off / (16 * EPS * PEAK))
        leaves = jax.tree.leaves((run.params, run.state))
        checks.holds(
            "dtypes of parameters and state",
            run.side,
            all(x.dtype in (np.float32, np.int32, np.bool_) for x in leaves),
        )
        if isinstance(run.state, ga.MultiStepsState):
            counters = [int(number) for number in ga.stats(run.state)]
            checks.holds(
                "counters of ga_optax.stats",
                run.side,
                counters == [K * steps, steps, 0, 0, 0, 0],
            )
        if run is not runs[0]:
            ratios = np.divide(run.differences, envelope.bounds)
            checks.within(
                "distance to the undivided run, each step",
                run.side,
                float(np.max(ratios)),
            )


# -- Output ----------------------------------------------------------------------------


def show_progress(bar: tqdm.tqdm, side: Side, step: int, loss: np.float32) -> None:
    """Moves the bar on a terminal; without one, prints a line now and then."""
    bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
    bar.update()
    if bar.disable and (step == 0 or (step + 1) % 25 == 0):
        print(f"{side.name}: step {step + 1}, loss {loss:.4f}", flush=True)


def is_same(a: optax.Params, b: optax.Params) -> bool:
    """True if parameters agree in half of the 24 binary digits of float32.

    Rounding is far below that after 100 steps, and one micro-batch left out far above.
    """
    return bool(optax.tree.norm(optax.tree.sub(a, b)) < 2**-12 * optax.tree.norm(b))


def print_summary(runs: list[Run], held_out: Examples) -> None:
    """Prints a row for each run, for people."""
    reference = runs[0]
    print(
        f"\n{'run':28}{'loss':>8}{'accuracy':>10}{'memory':>10}{'time':>9}  "
        "the same run"
    )
    for run in runs:
        same = "yes" if is_same(run.params, reference.params) else "NO"
        print(
            f"{run.side.name:28}{run.losses[-1]:8.4f}"
            f"{100 * float(accuracy(run.params, held_out)):8.1f} %"
            f"{temporaries(run.call) / 1024:6.0f} KiB{run.seconds:7.2f} s"
            f"  {'-' if run is reference else same}"
        )
    print(
        "Loss: of the last window. Accuracy: of digits that no run has seen. Memory:"
        " what a call\nallocates. The same run: parameters agree in half of float32's"
        " digits. More: --bits."
    )


def print_table(runs: list[Run], held_out: Examples) -> None:
    """Prints a row for each run, to the last bit."""
    reference = runs[0]
    size = sum(p.nbytes for p in jax.tree.leaves(reference.params))
    updates: dict[int, int] = {}  # sides with the same optimizer share one compilation
    print(
        f"\n{'':26}{f'training loss at step {len(reference.losses)}':27}held-  "
        "difference from          temporaries\n"
        f"{'run':26}{'decimal':13}{'hexadecimal':15}out{'undivided':>11}{'ULP':>8}"
        f"{'seconds':>8}{'call':>9}{'update':>8}"
    )
    for run in runs:
        side, loss = run.side, run.losses[-1]
        difference = f"{'-':>9}{'-':>8}"
        if run is not reference:
            num_ulps = ulps(run.params, reference.params)
            difference = f"{run.differences[-1]:9.1e} {num_ulps:7}"
        if id(side.tx) not in updates:
            updates[id(side.tx)] = temporaries_of_update(side, run.params)
        print(
            f"{side.name:26}{loss:<13.9g}{hexadecimal(loss):14}"
            f"{100 * float(accuracy(run.params, held_out)):5.1f} %{difference}"
            f"{run.seconds:8.2f}{temporaries(run.call) / 1024:6.0f} KiB"
            f"{100 * updates[id(side.tx)] / size:5.0f} %"
        )
    print(
        "Held-out: accuracy. Difference: the largest in any parameter; in float32"
        " values (ULP) it\nis large if a parameter is close to 0. Seconds: without"
        " compilation. Temporaries: what a\ncompiled call allocates besides arguments"
        " and results; for its update alone, in percent\nof the parameters."
    )


def draw_picture(path: pathlib.Path, runs: list[Run], bounds: list[float]) -> None:
    """Plots the losses on top of each other, and the differences on a second axis."""
    colors = ["#cdd3dd", "#f4a259", "#2f6db5", "#8cb369", "#1b263b"]
    red = "#a4243b"
    steps = np.arange(1, len(runs[0].losses) + 1)
    figure, loss_axis = plt.subplots(figsize=(9, 5.5), layout="constrained")
    axis = loss_axis.twinx()
    for n, (run, color) in enumerate(zip(runs, colors, strict=False)):
        # Each line is thinner than the last, so all are visible if they coincide.
        loss_axis.plot(
            steps, run.losses, color=color, label=run.side.name, linewidth=10 - 2.2 * n
        )
        if n > 0:
            # A logarithmic axis cannot show a difference of 0.
            away = [d if 0 < d < math.inf else math.nan for d in run.differences]
            style = (0, (4, 3)) if n == len(colors) - 1 else "-"
            axis.plot(steps, away, color=color, linewidth=1.6, linestyle=style)
    if bounds:
        axis.plot(steps, bounds, color=red, linewidth=1.2, linestyle=":")

    def note(text: str, height: float, offset: int, color: str) -> None:
        axis.annotate(
            text,
            (steps[-1], height),
            xytext=(0, offset),
            textcoords="offset points",
            horizontalalignment="right",
            color=color,
        )

    last = [run.differences[-1] for run in runs[1:]]
    if bounds:
        note("as far as rounding alone can lead", bounds[-1], 7, red)
    note("how far apart the parameters are", max(min(last), 1e-9), -16, "#444444")
    loss_axis.set(xlabel="step", ylabel="training loss of the window", ylim=(0, None))
    axis.set(yscale="log", ylim=(1e-9, 1e-2 if max(last) < 1e-2 else None))
    axis.set_ylabel("largest difference to the undivided run, in any parameter")
    for each in (loss_axis, axis):
        each.spines["top"].set_visible(False)
        each.margins(x=0.01)
    loss_axis.legend(loc="upper right", frameon=False)
    loss_axis.set_title(
        "The same training run, whole and in micro-batches", loc="left", weight="bold"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Trains, reports and checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="1 to 100 (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("out"),
        help="folder for the picture (default: %(default)s)",
    )
    parser.add_argument(
        "--check", action="store_true", help="also checks what must hold"
    )
    parser.add_argument(
        "--bits", action="store_true", help="prints losses and distances to the bit"
    )
    args = parser.parse_args(argv)
    if not 1 <= args.steps <= STEPS:
        parser.error(f"--steps must be 1 to {STEPS}, but it is {args.steps}.")
    # By default accelerators round the factors of a product to 8 or 11 bits.
    with jax.default_matmul_precision("highest"):
        return experiment(args.steps, args.out, args.check, args.bits)


def copied(tree: Any) -> Any:
    """A copy of arrays that will be donated."""
    return jax.tree.map(np.array, tree)


def further(checks: Checks, params: Any, windows: list[Any], way: list[Any]) -> Any:
    """The further work of --check: gradients at three steps, and runs with errors."""
    print("Compiling the checks: gradients in float64, and runs with errors ...")
    gradients, envelope = Gradients(params, windows[0]), Envelope(params)
    steps = len(windows)
    print(f"Checking: three gradients, and two runs of {steps} steps ...", flush=True)
    for step, window in enumerate(windows):
        if step in (0, steps // 2, steps - 1):
            gradients.check(checks, way[step], window)
        envelope.train(window, way[step])
        envelope.record(way[step + 1])
    return envelope


def experiment(steps: int, out: pathlib.Path, check: bool, bits: bool) -> int:
    """The whole program, see the top of the file; returns the exit status."""
    train, held_out = load_digits()
    windows = [draw_window(train, 0)]
    key = jax.random.key(SEED, impl="rbg")  # compiles in a fifth of the time
    params = jax.jit(NETWORK.init)(key, windows[0].images[0])
    size = sum(p.size for p in jax.tree.leaves(params))
    print(
        f"{len(train.labels)} digits to learn, {len(held_out.labels)} held out; "
        f"{size:,} parameters. Compiling the undivided run ...",
        flush=True,
    )
    windows += [draw_window(train, step) for step in range(1, steps)]
    way = [copied(params)]  # the parameters of the undivided run before each step
    runs: list[Run] = []
    for side in make_sides(digits_loss, make_optimizer()):
        run = Run(side, params, windows[0])
        # Without a terminal there is no bar.
        with tqdm.tqdm(total=steps, desc=side.name, unit="step", disable=None) as bar:
            for step, window in enumerate(windows):
                run.train(window)
                if not runs:
                    way.append(copied(run.params))
                run.record(way[step + 1])
                show_progress(bar, side, step, run.losses[-1])
        runs.append(run)
    checks = Checks()
    envelope = further(checks, params, windows, way) if check else None

    (print_table if bits else print_summary)(runs, held_out)
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "digits.png"
    bounds = envelope.bounds if envelope else []
    draw_picture(picture, runs, bounds)
    print(f"\nThe loss curves are in {picture}.")
    if envelope is None:
        print("All runs are one run, but for rounding: --check shows the bounds.")
        return 0
    check_runs(checks, runs, envelope)
    if steps == STEPS:
        for run in runs:
            checks.holds(
                "held-out accuracy above 90 %",
                run.side,
                float(accuracy(run.params, held_out)) > 0.9,
            )
    print("What must hold, in units of its bound:")
    if checks.report():
        return 0
    print("This build does not accumulate correctly.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
