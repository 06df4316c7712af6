"""examples/tasks.py: it runs, and its checks tell a wrong build."""

import pathlib

import helpers
import matplotlib.image
import optax
import pytest

import ga_optax as ga

pytestmark = [
    pytest.mark.published,
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
]

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "tasks.py"
SMALL = ["--width", "64", "--rounds", "3"]


@pytest.fixture(scope="module")
def tasks():
    return helpers.load(EXAMPLE)


def test_it_runs_and_both_ways_are_the_program_before(tasks, tmp_path, capsys):
    assert tasks.main([*SMALL, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  ok") == 4
    assert all(name in printed for name in tasks.make_ways(optax.sgd(1.0)))
    assert matplotlib.image.imread(tmp_path / "tasks.png").std() > 0.03


def test_wrong_weights_and_more_updates_are_told(tasks, monkeypatch, tmp_path, capsys):
    make_ways = tasks.make_ways

    def wrong(opt):
        across = tasks.across_calls(ga.MultiSteps(opt, 2))  # two tasks a window
        others = {"across calls": across, "without weights": tasks.inside_a_call(opt)}
        return make_ways(opt) | others

    monkeypatch.setattr(tasks, "make_ways", wrong)
    assert tasks.main([*SMALL, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("  FAILED") == 3


def test_numbers_that_do_not_fit_are_refused(tasks, capsys):
    with pytest.raises(SystemExit) as exit_:
        tasks.main(["--rounds", "0"])
    assert exit_.value.code == 2
    assert "at least 1" in capsys.readouterr().err
