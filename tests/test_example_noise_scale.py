"""examples/noise_scale.py: it runs, shows what it says, and its exact side is right."""

import os
import pathlib
import re
import subprocess
import sys

import helpers
import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

import ga_optax as ga

pytestmark = pytest.mark.published

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "noise_scale.py"

# Of 24 intervals of 95 % over one run, which share most of their windows.
ENOUGH = 20


@pytest.fixture(scope="module")
def example():
    """The example as a module."""
    # Optax and Flax promote.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield helpers.load(EXAMPLE)


# The whole run: 600 steps take two seconds, importing and compiling the rest.
def test_the_example_runs_from_the_command_line_and_shows_what_it_says(tmp_path):
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # Without a terminal there are no bar and no control characters.
    assert run.stderr == ""
    assert "\r" not in run.stdout

    rows = re.findall(
        r"^ +(\d+) +(\S+) +(\S+)   The noise scale is (\S+) "
        r"\(95 %: (\S+) to (\S+)\), after (\d+) windows of 64: .*large\.$",
        run.stdout,
        re.MULTILINE,
    )
    steps, losses, exact, values, lows, highs, windows = np.asarray(rows, float).T
    np.testing.assert_array_equal(steps, 25 * np.arange(1, 25))
    np.testing.assert_array_equal(windows, steps)
    # It learns, and the noise scale grows beyond the window on the way.
    assert losses[-1] < 0.25 * losses[0]
    assert exact[0] < 100 < 300 < exact[-1]
    assert np.all((lows <= values) & (values <= highs))
    held = int(np.sum((lows <= exact) & (exact <= highs)))
    assert held >= ENOUGH
    assert f"{held} of 24 intervals hold the exact number" in run.stdout
    # The twin: the intervals tell another number from the right one.
    assert np.sum((lows <= 2 * exact) & (2 * exact <= highs)) < ENOUGH

    picture = matplotlib.image.imread(tmp_path / "noise_scale.png")
    assert picture.shape[0] > 500
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05


def test_the_exact_side_is_the_mean_and_the_spread_of_every_examples_gradient(example):
    """In float64 from one gradient at a time, against the vectorised float32."""
    examples = example.Examples(*(x[:20] for x in example.load_digits()))
    params = example.NETWORK.init(jax.random.key(0), examples.images[:1])
    each = []
    for i in range(20):
        one = example.Examples(examples.images[i : i + 1], examples.labels[i : i + 1])
        grads = jax.tree.leaves(jax.grad(example.digits_loss)(params, one))
        each.append(np.concatenate([np.ravel(g) for g in grads]).astype(np.float64))
    mean = np.mean(each, axis=0)
    trace = np.sum(np.var(each, axis=0))
    # Sums of about 2,700 squares, whose terms are float32 themselves.
    bound = 4 * mean.size * 2.0**-24 * np.mean(np.sum(np.square(each), axis=1))
    squared_norm, spread = np.asarray(example.look_at_all(params, examples))
    assert abs(squared_norm - np.sum(mean**2)) <= bound
    assert abs(spread - trace) <= bound
    # The twin: the mean square without the mean taken off is another number.
    assert abs(np.mean(np.sum(np.square(each), axis=1)) - trace) > bound


def test_the_picture_is_drawn_where_an_interval_has_no_end(example, tmp_path):
    def scale(value, low, high, known=True):
        numbers = [value, known, 1.0, value, low, high, 64.0, 5]
        return ga.NoiseScale(*map(jnp.asarray, numbers))

    rows = [
        example.Row(25, 1.0, scale(80.0, 60.0, 100.0), 75.0),
        example.Row(50, 0.9, scale(0.0, 0.0, np.inf, known=False), 80.0),
        example.Row(75, 0.8, scale(90.0, 0.0, np.inf), 85.0),
    ]
    for i in (3, 1):
        path = tmp_path / f"{i}.png"
        example.draw_picture(path, rows[:i])
        assert matplotlib.image.imread(path).std() > 0.03


def test_a_run_without_an_answer_says_so_and_its_exit_status_is_1(
    example, monkeypatch, tmp_path, capsys
):
    unknown = ga.noise_scale(
        ga.MultiSteps(example.optax.sgd(0.1), 8, track_noise=True).init(jnp.ones(2))
    )
    monkeypatch.setattr(
        example, "train", lambda *_: [example.Row(25, 1.0, unknown, 70.0)]
    )
    assert example.main(["--out", str(tmp_path)]) == 1
    assert "never became known" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_too_few_steps_are_refused(example, capsys):
    with pytest.raises(SystemExit) as exit_:
        example.main(["--steps", "24"])
    assert exit_.value.code == 2
    assert "--steps must be at least 25, but it is 24." in capsys.readouterr().err
