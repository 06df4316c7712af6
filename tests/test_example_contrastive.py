"""examples/contrastive.py: it runs, shows what it says, and fails where it should."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import helpers
import jax
import matplotlib.image
import pytest

import ga_optax as ga

pytestmark = pytest.mark.published

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "contrastive.py"
CHECKS = [
    "8 x 64: gradient of the window, float64",
    "each by itself: another gradient",
    "8 x 64: distance to the undivided run",
    "each by itself: another run",
]


# Most of the time goes into compiling.
def test_the_example_runs_from_the_command_line_and_shows_what_it_says(tmp_path):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    options = ["--steps", "2", "--seeds", "2", "--out", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
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
    assert re.findall(r"^  (\w+) +(.+?)(?:  .*)?$", run.stdout, re.MULTILINE) == [
        ("ok", check) for check in CHECKS
    ]
    rows = re.findall(
        r"^(.{22})  (\S+) % +(\S+)  (\S+) +(\S+) +(\d+) KiB$", run.stdout, re.MULTILINE
    )
    undivided, whole, alone = rows
    names = ["undivided, 512", "8 x 64", "8 x 64, each by itself"]
    assert [row[0].strip() for row in rows] == names
    assert undivided[1:4] == whole[1:4]
    assert float(whole[4]) < 1e-4 < float(alone[4])
    assert 4 * int(whole[5]) < int(undivided[5])

    picture = matplotlib.image.imread(tmp_path / "contrastive.png")
    assert picture.shape[0] > 500
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05


@pytest.fixture(scope="module")
def example():
    """The example as a module."""
    # Optax promotes.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield helpers.load(EXAMPLE)


def half_of_the_gradient(example, params, pairs):
    a, b = example.encode(params, pairs)
    others = jax.lax.stop_gradient((a, b))
    return example.contrast(params["scale"], a, b, *others, 0)


def without_a_micro_batch(example, params, pairs):
    a, b = example.encode(params, pairs)
    kept = len(a) - len(a) // example.K
    mean = example.contrast(params["scale"], a[:kept], b[:kept], a, b, 0)
    return mean * (kept / len(a))


@pytest.mark.parametrize(
    ("wrong", "alone", "found"),
    [
        (half_of_the_gradient, "undivided, 512", CHECKS),
        (without_a_micro_batch, "8 x 64, each by itself", [CHECKS[0], CHECKS[2]]),
    ],
)
def test_what_is_wrong_is_found_and_the_exit_status_is_1(
    wrong, alone, found, example, monkeypatch, tmp_path, capsys
):
    loss = functools.partial(wrong, example)
    side = ga.value_and_grad(loss, example.K)
    monkeypatch.setitem(example.SIDES, example.WHOLE, side)
    # If the undivided batch stands for plain accumulation, nothing differs.
    monkeypatch.setitem(example.SIDES, example.ALONE, example.SIDES[alone])
    monkeypatch.setattr(example, "draw_picture", lambda *_: None)
    assert example.main(["--steps", "1", "--seeds", "1", "--out", str(tmp_path)]) == 1
    failed = re.findall(r"^  FAILED +(.+?)  ", capsys.readouterr().out, re.MULTILINE)
    assert failed == found


@pytest.mark.parametrize("option", ["--steps", "--seeds"])
def test_less_than_one_is_refused(option, example, capsys):
    with pytest.raises(SystemExit) as exit_:
        example.main([option, "0"])
    assert exit_.value.code == 2
    assert f"{option} must be at least 1, but it is 0." in capsys.readouterr().err
