"""Is it the same run? Batch 64 undivided, 2 x 32, 4 x 16, 8 x 8 and 64 x 1, in bits.

    python examples/exactness.py

A small network learns scikit-learn's digits for 100 steps, several times over. All runs
start from the same parameters and see the same windows of 64 examples, which are drawn
first and then split. The runs differ in the number of micro-batches, and there are four
ways to accumulate: a hand-written scan, `optax.MultiSteps`, `ga_optax.MultiSteps` and
`ga_optax.value_and_grad`.

The first table shows how far the runs drift apart. Their gradients are the same up to
rounding. So the losses agree in some digits, and their bits differ. How many digits
agree depends on the network and on the number of steps, not on the library.

The second table compares bits. The same eight micro-batches go through `accumulate` in
one, two and eight calls. No bit may differ.

The third table changes the devices. The same 16 micro-batches go through `accumulate`
on one, two, four and eight virtual devices of the CPU, with and without
`logical_devices`. With it, no bit may differ.

All losses are computed by one function from the final parameters: over the last window
as one batch of 64, and over the held-out examples. So if two runs have the same
parameters, bit for bit, their losses have the same bits. The output contains no times:
on one machine, two processes print the same bytes.

The program ends with checks, and exits with 1 if one fails. It needs flax,
scikit-learn, matplotlib and tqdm, like `digits.py`, from which it takes the data: the
dependency group `demo`.
"""

import argparse
import functools
import os
import sys

# Virtual devices must be asked for before JAX starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import digits  # pyrefly: ignore[missing-import]  # found beside this file
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax import accumulator, data

STEPS = 100
BATCH = 64  # examples in a window
SPLITS = (2, 4, 8, 64)  # micro-batches in a window, in addition to 1
GROUPED = 8  # micro-batches that go through `accumulate` in several groupings
GROUPINGS = (1, 2, 8)  # numbers of calls
PLACED = 16  # micro-batches that go through `accumulate` on several devices
LOGICAL = 8  # as many devices as which they are added up
WIDTH = 32

# -- The task --------------------------------------------------------------------------


def loss(params: Any, batch: digits.Examples) -> jax.Array:
    """The mean cross-entropy of a network that scans over its two inner layers.

    It is smooth, so a rounding error stays small. It scans, so there are gradients to
    accumulate in place.
    """

    def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weights), None

    x = jnp.tanh(batch.images.reshape(-1, 64) @ params["first"])
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = x @ params["last"]
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    )


def make_params() -> Any:
    """The parameters that every run starts from."""
    rng = np.random.default_rng(digits.SEED)
    shapes = {"first": (64, WIDTH), "layers": (2, WIDTH, WIDTH), "last": (WIDTH, 10)}
    return {
        name: jnp.asarray(rng.normal(scale=0.2, size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def make_optimizer() -> optax.GradientTransformation:
    """Adam, with an `eps` above the rounding errors; see `digits.make_optimizer`."""
    return optax.adam(1e-3, eps=1e-6)


def draw_window(train: digits.Examples, step: int) -> digits.Examples:
    """The 64 examples of a step, not yet split."""
    rows = data.window_indices(
        jax.random.key(digits.SEED), step, len(train.labels), BATCH, 1
    )
    return jax.tree.map(lambda x: x[np.asarray(rows)[0]], train)


# -- Ways to accumulate ----------------------------------------------------------------


class Way(NamedTuple):
    """A way to train on windows.

    Attributes:
      start: `params -> state`.
      step: `(params, state, window) -> (params, state)`.
    """

    start: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]


def cut(window: Any, parts: int) -> list[Any]:
    """Splits a window `[64, ...]` into `parts` parts of neighbouring rows."""
    leaves, structure = jax.tree.flatten(window)
    parted = zip(*(np.split(np.asarray(x), parts) for x in leaves), strict=True)
    return [jax.tree.unflatten(structure, part) for part in parted]


def by_scan(fun: Callable[..., Any], opt: Any, k: int) -> Way:
    """A hand-written loop: sums in a scan, then multiplies by 1 / k."""

    @jax.jit
    def step(params: Any, state: Any, window: Any) -> tuple[Any, Any]:
        def add(total: Any, batch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.grad(fun)(params, batch)), None

        parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), window)
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        grads = jax.tree.map(lambda t: t * jnp.float32(1 / k), total)
        return digits.apply_updates(opt, grads, state, params)

    return Way(opt.init, step)


def across_calls(fun: Callable[..., Any], tx: Any, k: int, apply: Any) -> Way:
    """Our or Optax's `MultiSteps`, with a call for each micro-batch."""

    @jax.jit
    def call(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        return apply(tx, jax.grad(fun)(params, batch), state, params)

    def step(params: Any, state: Any, window: Any) -> tuple[Any, Any]:
        for part in cut(window, k):
            params, state = call(params, state, part)
        return params, state

    return Way(tx.init, step)


def inside_a_call(fun: Callable[..., Any], opt: Any, k: int) -> Way:
    """`ga_optax.value_and_grad`, with the whole window in one call."""

    @jax.jit
    def step(params: Any, state: Any, window: Any) -> tuple[Any, Any]:
        _, grads = ga.value_and_grad(fun, k)(params, window)
        return digits.apply_updates(opt, grads, state, params)

    return Way(opt.init, step)


def make_ways(fun: Callable[..., Any], opt: Any, k: int) -> dict[str, Way]:
    """All ways to accumulate k micro-batches."""
    if k == 1:
        undivided = across_calls(fun, opt, 1, digits.apply_updates)
        return {"undivided": undivided}
    optax_own = optax.MultiSteps(opt, k)
    return {
        "scan by hand": by_scan(fun, opt, k),
        "optax.MultiSteps": across_calls(fun, optax_own, k, digits.apply_updates),
        "ga.MultiSteps": across_calls(
            fun, ga.MultiSteps(opt, k), k, ga.apply_gradients
        ),
        "ga.value_and_grad": inside_a_call(fun, opt, k),
    }


def make_groupings(fun: Callable[..., Any], opt: Any) -> dict[str, Way]:
    """The same eight micro-batches in every grouping.

    All of them share one compiled program for the update. If it were compiled together
    with the gradient, XLA might fuse the two differently in each program, and then
    round a product and a sum once or twice.
    """
    mean = jax.jit(accumulator.mean)
    update = jax.jit(functools.partial(digits.apply_updates, opt))

    def grouped(calls: int) -> Way:
        accumulate = jax.jit(ga.accumulate(fun, GROUPED // calls))

        def step(params: Any, state: Any, window: Any) -> tuple[Any, Any]:
            acc = accumulator.init(params)
            for part in cut(window, calls):
                _, acc = accumulate(acc, params, part)
            return update(mean(acc), state, params)

        return Way(opt.init, step)

    return {
        f"accumulate, {calls} x {GROUPED // calls}": grouped(calls)
        for calls in GROUPINGS
    }


def make_placed(fun: Callable[..., Any], opt: Any) -> dict[str, Way]:
    """The same 16 micro-batches on several numbers of devices, and as other sums."""
    update = jax.jit(functools.partial(digits.apply_updates, opt))

    def on(devices: int, logical: int | None, k: int) -> Way:
        auto = (AxisType.Auto,)
        mesh = jax.make_mesh(
            (devices,), ("data",), axis_types=auto, devices=jax.devices()[:devices]
        )
        data_axis = ga.DataAxis("data", mesh=mesh, logical_devices=logical)
        accumulate = ga.accumulate(fun, k, data_axis=data_axis)

        @jax.jit
        def gradient(params: Any, window: Any) -> Any:
            _, acc = accumulate(accumulator.init(params), params, window)
            return accumulator.mean(acc)

        def step(params: Any, state: Any, window: Any) -> tuple[Any, Any]:
            everywhere, split = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
            args = jax.device_put(params, everywhere), jax.device_put(window, split)
            return update(jax.device_get(gradient(*args)), state, params)

        return Way(opt.init, step)

    of, ways = f"{LOGICAL} logical devices", {}
    for devices in (8, 4, 2, 1):
        ways[f"{of} on {devices}"] = on(devices, LOGICAL, PLACED // LOGICAL)
    for devices in (8, 4, 2, 1):
        ways[f"no logical devices, on {devices}"] = on(devices, None, PLACED // devices)
    ways["4 logical devices on 4"] = on(4, 4, PLACED // 4)
    ways[f"{of}, {2 * PLACED} micro-batches"] = on(8, LOGICAL, 2 * PLACED // 8)
    return ways


def train(way: Way, params: Any, windows: list[Any]) -> tuple[Any, Any]:
    """Trains on all windows; returns parameters and state."""
    state = way.start(params)
    for window in windows:
        params, state = way.step(params, state, window)
    return params, state


# -- What must hold --------------------------------------------------------------------
#
# 1. The same micro-batches give the same bits of parameters and optimizer state, after
#    all steps, for every grouping into calls, and for the
#    same logical devices on any number of devices.
#
# 2. The accumulation alone, on gradients that are given as data. With integers, neither
#    the sum nor the quotient of a multiple of k rounds, and each of our ways gives the
#    bits of the undivided batch. With random numbers, each way is within the bound of
#    `digits.py`,
#
#        |mean - Σ gᵢ / k|  <=  2·k·eps · Σ |gᵢ| / k          in every element
#
#    (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, eq. 4.4).
#
# 3. The network: in float64, `verify` finds that the micro-batches have the gradient of
#    the undivided batch. So what the first table shows is rounding.


def is_same(a: Any, b: Any) -> bool:
    """True if two trees have the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def given_means(k: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The mean that each way computes of given gradients, `[64, n]`."""
    params = jnp.zeros(rows.shape[1])
    ways = make_ways(digits.given_loss, digits.keep_gradient(), k)
    states = {name: train(way, params, [rows])[1] for name, way in ways.items()}
    return {
        name: np.asarray(getattr(state, "inner_opt_state", state))
        for name, state in states.items()
    }


def check_given(failures: list[str], splits: Sequence[int]) -> dict[str, bool]:
    """The second check; returns which ways have the bits of the undivided batch."""
    rng = np.random.default_rng(digits.SEED)
    # Multiples of 64, so that the mean of any number of rows is an integer.
    integers = 64 * rng.integers(-500, 500, (BATCH, 256))
    floats = rng.normal(size=(BATCH, 256))
    rows = np.concatenate([integers, floats], axis=1).astype(np.float32)
    exact, terms = (
        np.mean(x[:, 256:], axis=0, dtype=np.float64) for x in (rows, np.abs(rows))
    )
    same: dict[str, bool] = {}
    (undivided,) = given_means(1, rows).values()
    for k in splits:
        # The mean of a micro-batch rounds, too: once a row, and in the division.
        bound = digits.EPS * (2 * k + BATCH // k + 1) * terms
        for name, mean in given_means(k, rows).items():
            equal = is_same(mean[:256], undivided[:256])
            same[name] = same.get(name, True) and equal
            if not np.all(np.abs(mean[256:] - exact) <= bound):
                failures.append(f"the mean of given gradients, {name}, k = {k}")
    failures += [
        f"integer gradients do not have the bits of the undivided batch: {name}"
        for name, answer in same.items()
        if name.startswith("ga.") and not answer
    ]
    return same


def check_network(failures: list[str], params: Any, window: Any) -> None:
    """The third check, at one set of parameters."""
    report = ga.verify(loss, params, window, GROUPED)
    if not report.ok:
        failures.append(f"verify: {report.message}")


# -- Output ----------------------------------------------------------------------------


def experiment(steps: int, splits: Sequence[int]) -> int:
    """The whole program, see the top of the file; returns the exit status."""
    training, held_out = digits.load_digits()
    windows = [draw_window(training, step) for step in range(steps)]
    params, opt = make_params(), make_optimizer()
    evaluate = jax.jit(loss)

    def losses(params: Any) -> tuple[np.float32, np.float32]:
        train_loss = evaluate(params, windows[-1])
        return np.float32(train_loss), np.float32(evaluate(params, held_out))

    failures: list[str] = []
    undivided: Any = None
    print(
        f"{'':38}training loss after {steps} steps   validation loss"
        f"\n{'run':12}{'how':26}{'decimal':14}{'hexadecimal':16}"
        f"{'decimal':14}{'hexadecimal':16}{'largest ULP difference':>22}"
    )
    for k in (1, *splits):
        for name, way in make_ways(loss, opt, k).items():
            end, _ = train(way, params, windows)
            undivided = end if k == 1 else undivided
            num_ulps = "-" if k == 1 else f"{digits.ulps(end, undivided):,}"
            numbers = "".join(
                f"{x:<14.9g}{digits.hexadecimal(x):16}" for x in losses(end)
            )
            print(f"{f'{k} x {BATCH // k}':12}{name:26}{numbers}{num_ulps:>22}")
    print(
        "ULP: float32 values between a parameter and that of the undivided run. There"
        " are many if it is close to 0.\n"
    )

    print(f"The same {GROUPED} micro-batches of {BATCH // GROUPED}, in other groupings")
    print(f"{'calls x micro-batches':38}{'decimal':14}{'hexadecimal':16}same bits")
    reference: Any = None
    for name, way in make_groupings(loss, opt).items():
        end = train(way, params, windows)
        reference = end if reference is None else reference
        same = is_same(end, reference)
        if not same:
            failures.append(f"the bits of {name}")
        train_loss, _ = losses(end[0])
        print(
            f"{name:38}{train_loss:<14.9g}{digits.hexadecimal(train_loss):16}"
            f"{'yes' if same else 'NO'}"
        )
    print("Compared: all parameters and the optimizer's state.\n")

    print(f"The same {PLACED} micro-batches of {BATCH // PLACED}, on other devices")
    print(f"{'devices':38}{'decimal':14}{'hexadecimal':16}same bits")
    reference = None
    for name, way in make_placed(loss, opt).items():
        end = train(way, params, windows)
        reference = end if reference is None else reference
        same = is_same(end, reference)
        if name.startswith(f"{LOGICAL} logical devices on") and not same:
            failures.append(f"the bits of {name}")
        train_loss, _ = losses(end[0])
        print(
            f"{name:38}{train_loss:<14.9g}{digits.hexadecimal(train_loss):16}"
            f"{'yes' if same else 'no'}"
        )
    print()

    print("Integer gradients: the bits of the undivided batch, for every k?")
    for name, answer in check_given(failures, splits).items():
        print(f"{name:38}{'yes' if answer else 'no'}")

    check_network(failures, params, windows[0])
    print("\nIn float64, the accumulated gradient is that of the undivided batch:")
    print("FAILED" if any("verify" in failure for failure in failures) else "yes")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def main(argv: list[str] | None = None) -> int:
    """Trains, prints and checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument(
        "--splits",
        type=int,
        nargs="+",
        default=SPLITS,
        metavar="K",
        help="micro-batches in a window of 64 (default: 2 4 8 64)",
    )
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, but it is {args.steps}.")
    for k in args.splits:
        if k < 2 or BATCH % k:
            parser.error(
                f"--splits must be divisors of {BATCH} from 2, but one is {k}."
            )
    # By default accelerators round the factors of a product to 8 or 11 bits.
    with jax.default_matmul_precision("highest"):
        return experiment(args.steps, args.splits)


if __name__ == "__main__":
    sys.exit(main())
