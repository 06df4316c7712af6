"""The language model example: it learns, it repeats itself, and its check can fail."""

import dataclasses
import functools
import pathlib

import helpers
import jax
import numpy as np
import pytest

import ga_optax as ga

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

char_lm = helpers.load(pathlib.Path(__file__).parents[1] / "examples" / "char_lm.py")

CONFIG = char_lm.Config(
    layers=2, width=16, heads=2, length=24, steps=6, batch_size=16, learning_rate=1e-2
)
CORPUS = char_lm.load_corpus(CONFIG.length)

PARAMS = char_lm.init_params(CONFIG)

pytestmark = [
    pytest.mark.published,
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
]


def first_window():
    key = char_lm.make_key(CONFIG, "windows")
    return char_lm.draw_window(CORPUS.train, key, 0, CONFIG.batch_size)


def test_every_line_starts_with_a_newline_and_is_padded_at_its_end():
    lines = np.concatenate(CORPUS)
    assert lines.shape[1] == CONFIG.length + 1
    assert np.all(lines[:, 0] == char_lm.NEWLINE)
    padding = lines == char_lm.PAD
    np.testing.assert_array_equal(padding, np.maximum.accumulate(padding, axis=1))
    counts = np.count_nonzero(~padding[:, 1:], axis=1)
    assert counts.min() == 2
    assert counts.max() == CONFIG.length


def test_padding_changes_no_loss_and_no_token_sees_what_follows():
    tokens = first_window()
    model = char_lm.make_model(CONFIG)

    @jax.jit
    def evaluate(tokens):
        logits = model.apply(PARAMS, tokens[:, :-1])
        return logits, char_lm.loss_fn(model, PARAMS, tokens)

    later = tokens.copy()
    later[:, 10:] = 7
    (logits, loss), (changed, _) = evaluate(tokens), evaluate(later)
    assert helpers.bits(logits[:, :10]) == helpers.bits(changed[:, :10])
    assert helpers.bits(logits[:, 10:]) != helpers.bits(changed[:, 10:])

    # By hand: every token that is no padding counts the same.
    logits = np.asarray(logits, np.float64)
    losses = np.log(np.sum(np.exp(logits), axis=-1, keepdims=True)) - logits
    real = np.argwhere(tokens[:, 1:] != char_lm.PAD)
    by_hand = np.array([losses[i, j, tokens[i, j + 1]] for i, j in real])
    # n terms are added, each of them the logarithm of a sum of 256.
    bound = (len(by_hand) + 256) * np.finfo(np.float32).eps * np.mean(by_hand)
    assert abs(float(loss) - np.mean(by_hand)) <= bound
    assert abs(np.sum(by_hand) / tokens[:, 1:].size - np.mean(by_hand)) > 100 * bound


def test_a_whole_run_checks_learns_draws_and_repeats_itself(
    tmp_path, capsys, monkeypatch
):
    train, runs = char_lm.train, []
    monkeypatch.setattr(
        char_lm, "train", lambda *args: runs.append((args, train(*args))) or runs[0][1]
    )
    for name in ("make_step", "make_evaluate"):  # compiled once
        monkeypatch.setattr(char_lm, name, functools.cache(getattr(char_lm, name)))
    sizes = "--quick --width 16 --length 24 --steps 9 --batch-size 16"
    status = char_lm.main(
        [*sizes.split(), "--num-microbatches", "4", "--out", str(tmp_path)]
    )
    printed = capsys.readouterr().out
    assert status == 0  # the check of the gradient holds
    assert "weighted by tokens" in printed
    assert "mean of means" in printed
    assert "step     9   held-out loss" in printed
    assert (tmp_path / "char_lm.png").read_bytes().startswith(b"\x89PNG")

    [(args, run)] = runs
    assert list(run.held_out) == list(range(10))
    assert run.held_out[9] < run.held_out[0] - 0.5

    again = train(*args)
    assert again.losses == run.losses
    assert again.held_out == run.held_out
    assert helpers.bits(again.params) == helpers.bits(run.params)
    config, corpus, params, k = args
    other = train(config, corpus, jax.tree.map(lambda p: -p, params), k)
    assert helpers.bits(other.params) != helpers.bits(run.params)


def test_the_check_fails_where_the_weights_are_left_out():
    window = first_window()
    broken = char_lm.check_gradient(CONFIG, PARAMS, window, 4, weight_fn=None)
    assert not broken.ok
    assert len(set(broken.counts)) > 1
    assert sum(broken.counts) == np.count_nonzero(window[:, 1:])
    # What it calls the mean of means is what comes of leaving the weights out: off by
    # much, and the same but for rounding in float64.
    unweighted, mean_of_means = broken.relative
    assert mean_of_means > 1e-3
    assert abs(unweighted - mean_of_means) < 1e-9 * mean_of_means


def test_the_number_of_microbatches_does_not_change_the_run(monkeypatch):
    """In float64 and without dropout, to a bound; without weights it does change.

    The gradient of a window has elements of at most 1, since it is clipped, and each is
    a sum of n terms, one a token, in another order: it is off by about n·eps at most.
    Adam divides it by 1e-8 or more, so a step moves a parameter by 2·rate·n·eps / 1e-8
    too far at most (numerator and denominator). To first order the loss is off by that,
    times the steps, times the sum of the elements of its gradient.
    """
    config = dataclasses.replace(CONFIG, dropout=0.0, steps=3)
    model = char_lm.make_model(config)
    evaluate = functools.cache(char_lm.make_evaluate)  # compiled once
    monkeypatch.setattr(char_lm, "make_evaluate", evaluate)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: np.asarray(p, np.float64), PARAMS)
        whole, split = (char_lm.train(config, CORPUS, params, k) for k in (1, 4))
        grads = jax.jit(jax.grad(functools.partial(char_lm.loss_fn, model)))(
            whole.params, first_window()
        )
        value_and_grad = ga.value_and_grad
        monkeypatch.setattr(
            ga, "value_and_grad", lambda *a, weight_fn, **kw: value_and_grad(*a, **kw)
        )
        unweighted = char_lm.train(config, CORPUS, params, 4)

    n = config.batch_size * config.length
    error = 2 * config.learning_rate * n * np.finfo(np.float64).eps / 1e-8
    slope = sum(float(np.sum(np.abs(g))) for g in jax.tree.leaves(grads))
    bound = config.steps * error * slope
    off, twin = (
        abs(run.held_out[config.steps] - whole.held_out[config.steps])
        for run in (split, unweighted)
    )
    assert off <= bound < twin / 10


def test_numbers_that_do_not_fit_are_refused(capsys):
    for flags in ("--steps 0", "--num-microbatches 7", "--heads 7"):
        with pytest.raises(SystemExit):
            char_lm.main(flags.split())
        assert "must" in capsys.readouterr().err
