"""examples/finetune.py: it runs, and each of its checks tells a wrong build."""

import pathlib

import helpers
import jax
import jax.numpy as jnp
import matplotlib.image
import optax
import pytest

import ga_optax as ga

pytestmark = [
    pytest.mark.published,
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
]

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "finetune.py"
SMALL = ["--layers", "2", "--width", "32", "--steps", "3"]


@pytest.fixture(scope="module")
def finetune():
    return helpers.load(EXAMPLE)


def test_it_runs_and_shows_what_the_splits_save(finetune, tmp_path, capsys):
    assert finetune.main([*SMALL, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  ok") == 4
    assert all(name in printed for name in finetune.make_ways(optax.sgd(1.0)))
    assert matplotlib.image.imread(tmp_path / "finetune.png").std() > 0.03


def test_the_whole_tree_in_place_of_the_split_and_a_lost_micro_batch_are_told(
    finetune, monkeypatch, tmp_path, capsys
):
    make_ways = finetune.make_ways

    def wrong(opt):
        ways = make_ways(opt)
        inside = ways["split, inside a call"]

        def without_the_last(adapters, state, network, batch):
            kept = jax.tree.map(lambda x: x[: -len(x) // finetune.K], batch)
            return inside.call(adapters, state, network, kept)

        def everything_moves(params, state, network, batch):
            params, state = ways["whole, inside a call"].call(
                params, state, network, batch
            )
            return jax.tree.map(lambda p: p * 1.001, params), state

        return ways | {
            "split, across calls": ways["whole, across calls"],
            "split, inside a call": inside._replace(call=without_the_last),
            "whole, inside a call": ways["whole, inside a call"]._replace(
                call=everything_moves
            ),
        }

    monkeypatch.setattr(finetune, "make_ways", wrong)
    assert finetune.main([*SMALL, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("  FAILED") == 4


def test_sizes_that_do_not_fit_are_refused(finetune, capsys):
    with pytest.raises(SystemExit) as exit_:
        finetune.main(["--steps", "0"])
    assert exit_.value.code == 2
    assert "at least 1" in capsys.readouterr().err


def test_the_accumulator_of_a_split_holds_the_trained_part_alone(finetune):
    network, adapters = finetune.make_params(2, 16)
    state = ga.MultiSteps(optax.adam(1e-3), 4).init(adapters)
    assert helpers.nbytes(state.total) == helpers.nbytes(adapters)
    assert helpers.nbytes(network) > helpers.nbytes(adapters)
    assert jnp.all(state.total["up"] == 0)
