"""examples/digits.py: it runs, it shows what it says, and it fails where it should."""

import os
import pathlib
import re
import subprocess
import sys

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest

import ga_optax as ga

pytestmark = pytest.mark.published

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "digits.py"

GIVEN = "mean of given gradients, float32"
DOUBLE = "gradient of the network, float64"
DISTANCE = "distance to the undivided run, each step"
STEPS = "steps of the optimizer"
DTYPES = "dtypes of parameters and state"
COUNTERS = "counters of ga_optax.stats"


def test_the_example_runs_from_the_command_line_and_shows_what_it_says(tmp_path):
    # Most of the time goes into compiling, and most of that into LLVM's optimizer.
    environment = os.environ | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [
            sys.executable,
            str(EXAMPLE),
            "--check",
            "--steps",
            "1",
            "--out",
            str(tmp_path),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # Without a terminal there are no bar and no control characters.
    assert run.stderr == ""
    assert "\r" not in run.stdout
    assert "FAILED" not in run.stdout
    # A run trains as soon as it is compiled, and the checks say what they do.
    assert run.stdout.index("undivided, 64: step 1") < run.stdout.index("MultiSteps")
    assert run.stdout.index("the same, optimize=False: step 1") < run.stdout.index(
        "Checking: three gradients"
    )
    for check in (GIVEN, DOUBLE, DISTANCE, STEPS):
        assert re.search(rf"ok +{check}", run.stdout)

    rows = {}
    for line in run.stdout.splitlines():
        row = re.match(
            r"(?P<name>.{25}) (?P<decimal>\S+) +"
            r"(?P<bits>0x1\.\w+p[-+]\d+) +(?P<accuracy>\S+) % +(?P<absolute>\S+) +"
            r"(?P<ulp>\S+) +(?P<seconds>\S+) +(?P<call>\d+) KiB +(?P<update>\d+) %$",
            line,
        )
        if row:
            rows[row["name"].strip()] = row
    names = [
        "undivided, 64",
        "optax.MultiSteps, 4 x 16",
        "ga.MultiSteps, 4 x 16",
        "ga.value_and_grad, 4 x 16",
        "the same, optimize=False",
    ]
    assert list(rows) == names
    for row in rows.values():
        loss = np.float32(float(row["decimal"]))
        assert loss == float.fromhex(row["bits"])  # the decimal tells all bits
        assert 1 < loss < 3
    # The zero updates and two copies, against a constant.
    assert int(rows["optax.MultiSteps, 4 x 16"]["update"]) > 250
    assert int(rows["ga.MultiSteps, 4 x 16"]["update"]) < 5

    picture = matplotlib.image.imread(tmp_path / "digits.png")
    assert picture.shape[0] > 500
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05


@pytest.fixture(scope="module")
def digits():
    """The example, with a network that takes little time to compile."""

    class Linear(nn.Module):
        @nn.compact
        def __call__(self, images):
            return nn.Dense(10)(images.reshape(len(images), -1))

    # Optax and Flax promote.
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        module = helpers.load(EXAMPLE)
        patch.setattr(module, "NETWORK", Linear())
        yield module


def wrong_builds(digits, loss, opt):
    """Sides that are each wrong in one way."""
    k = digits.K
    whole, mean = jax.value_and_grad(loss), ga.value_and_grad(loss, k)

    def update_of_one_less(updates, state, params=None):
        scaled = jax.tree.map(lambda g: g * k / (k - 1), updates)
        return opt.update(scaled, state, params)

    def drop_one(tx, grads, state, params):
        weight = jnp.where(state.mini_step == 2, 0.0, 1.0)
        return ga.apply_gradients(tx, grads, state, params, weight=weight)

    def total(params, batch):
        value, grads = mean(params, batch)
        return value, jax.tree.map(lambda g: g * k, grads)

    def without_the_last(params, batch):
        kept = jax.tree.map(lambda a: a[: len(a) * (k - 1) // k], batch)
        return ga.value_and_grad(loss, k - 1)(params, kept)

    def across(name, tx, apply=ga.apply_gradients):
        return digits.Side(name, k, whole, tx, apply)

    def inside(name, value_and_grad):
        return digits.Side(name, 1, value_and_grad, opt, digits.apply_updates)

    one_less = optax.GradientTransformation(opt.init, update_of_one_less)
    return [
        across("sum", ga.MultiSteps(opt, k, use_grad_mean=False)),
        across("mean over k - 1", ga.MultiSteps(one_less, k)),
        across("bfloat16", ga.MultiSteps(opt, k, accumulator_dtype=jnp.bfloat16)),
        across("no accumulation", ga.MultiSteps(opt, 1)),
        across("micro-batch dropped", ga.MultiSteps(opt, k), drop_one),
        inside("sum inside", total),
        inside("micro-batch dropped inside", without_the_last),
    ]


# Adam does not see the scale of its gradients, so that the run alone would not tell
# a sum from a mean.
WRONG = {
    "sum": {GIVEN, DOUBLE},
    "mean over k - 1": {GIVEN, DOUBLE},
    "bfloat16": {GIVEN, DOUBLE, DISTANCE, DTYPES},
    "no accumulation": {GIVEN, DOUBLE, DISTANCE, STEPS, COUNTERS},
    "micro-batch dropped": {GIVEN, DOUBLE, DISTANCE},
    "sum inside": {GIVEN, DOUBLE},
    "micro-batch dropped inside": {GIVEN, DOUBLE, DISTANCE},
}


def test_each_wrong_build_is_told_from_the_right_ones_and_the_exit_status_is_1(
    digits, monkeypatch, tmp_path, capsys
):
    make_sides = digits.make_sides

    def right_and_wrong(*args):
        undivided, _, across, inside, *_ = make_sides(*args)
        return [undivided, across, inside, *wrong_builds(digits, *args)]

    monkeypatch.setattr(digits, "make_sides", right_and_wrong)
    monkeypatch.setattr(digits, "print_table", lambda *_: None)
    monkeypatch.setattr(digits, "draw_picture", lambda *_: None)
    assert digits.main(["--check", "--steps", "1", "--out", str(tmp_path)]) == 1

    failed = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("  FAILED"):
            found, _, sides = line.partition(" in: ")
            what = re.split("  +", found)[2]
            for side in sides.split(", "):
                failed.setdefault(side, set()).add(what)
    assert failed.keys() == WRONG.keys()  # and none of the right ones
    for side, checks in WRONG.items():
        assert checks <= failed[side], side


@pytest.mark.parametrize("steps", ["0", "101"])
def test_a_number_of_steps_without_a_schedule_is_refused(steps, digits, capsys):
    with pytest.raises(SystemExit) as exit_:
        digits.main(["--steps", steps])
    assert exit_.value.code == 2
    assert f"--steps must be 1 to 100, but it is {steps}." in capsys.readouterr().err
