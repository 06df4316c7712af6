"""The language model example: it learns, and a run that is killed has the same bits."""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import helpers
import jax
import numpy as np
import pytest

import ga_optax as ga

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

pytest.importorskip("orbax.checkpoint")

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "char_lm.py"
char_lm = helpers.load(EXAMPLE)

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


SIZES = {"--layers": 2, "--width": 16, "--heads": 2, "--length": 24, "--batch-size": 16}


def command(folder, steps, *more):
    flags = SIZES | {"--steps": steps, "--num-microbatches": 8, "--out": folder}
    flags["--learning-rate"] = 0.01
    return [*(str(x) for pair in flags.items() for x in pair), *more]


def test_a_run_verifies_learns_draws_and_ends_once(tmp_path, capsys, monkeypatch):
    assert char_lm.main(command(tmp_path, 9, "--save-every", "12")) == 0
    printed = capsys.readouterr().out
    assert "has the gradient of the undivided batch." in printed
    assert "tokens, a window has" in printed
    picture = (tmp_path / "char_lm.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    log = (tmp_path / "log.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert lines[-1]["held_out"] < lines[0]["held_out"] - 0.5
    assert lines[-1]["noise_scale"] > 0

    # The same command has nothing left to do, and another config is refused.
    monkeypatch.setattr(ga, "verify", None)
    assert char_lm.main(command(tmp_path, 9, "--save-every", "12")) == 0
    assert "Continues after micro-step 72" in capsys.readouterr().out
    assert (tmp_path / "log.jsonl").read_text() == log
    with pytest.raises(SystemExit, match="another config"):
        char_lm.main(command(tmp_path, 8, "--save-every", "12"))


def outcome(folder):
    """What a run leaves, but for its speed."""
    lines = [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("tokens_per_second", None)
    with char_lm.open_checkpoints(folder) as checkpoints:
        last = checkpoints.latest_step()
        tree = checkpoints.restore(last, args=char_lm.ocp.args.StandardRestore())
    return lines, last, helpers.bits(tree)


def test_a_run_that_is_killed_goes_on_by_the_same_command_with_the_same_bits(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }

    def start(folder):
        flags = command(tmp_path / folder, 24, "--save-every", "7")
        return subprocess.Popen(
            [sys.executable, str(EXAMPLE), *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    peaceful = start("peaceful")
    assert "Continues" not in peaceful.communicate()[0]
    assert peaceful.returncode == 0

    killed, log = start("killed"), tmp_path / "killed" / "log.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    again = start("killed")
    assert "Continues after micro-step" in again.communicate()[0]
    assert again.returncode == 0
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "peaceful")


def test_a_run_without_weights_is_stopped_before_its_first_step(
    tmp_path, capsys, monkeypatch
):
    verify = ga.verify
    monkeypatch.setattr(ga, "verify", lambda *args, weight_fn: verify(*args))
    assert char_lm.main(command(tmp_path, 9)) == 1
    assert "(WEIGHTS)" in capsys.readouterr().out
    assert not (tmp_path / "log.jsonl").exists()


def test_the_number_of_microbatches_does_not_change_the_run(monkeypatch, tmp_path):
    """In float64 and without dropout, to a bound; without weights it does change.

    The gradient of a window has elements of at most 1, since it is clipped, and each is
    a sum of n terms, one a token, in another order: it is off by about n·eps at most.
    Adam divides it by 1e-8 or more, so a step moves a parameter by 2·rate·n·eps / 1e-8
    too far at most (numerator and denominator). To first order the loss is off by that,
    times the steps, times the sum of the elements of its gradient.
    """
    config = dataclasses.replace(CONFIG, dropout=0.0, steps=3)
    evaluate = functools.cache(char_lm.make_evaluate)  # compiled once
    monkeypatch.setattr(char_lm, "make_evaluate", lambda k, c: evaluate(16, c))
    monkeypatch.setattr(char_lm, "is_exact", lambda *_: True)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: np.asarray(p, np.float64), PARAMS)
        monkeypatch.setattr(
            char_lm, "init_params", lambda _: jax.tree.map(jax.numpy.asarray, params)
        )

        def train(k, name):
            (tmp_path / name).mkdir()
            run = char_lm.Run(config, k, [], 0, tmp_path / name)
            params, log = char_lm.train(run, CORPUS)
            return params, log[-1]["held_out"]

        last, whole = train(2, "whole")
        _, split = train(8, "split")
        loss = functools.partial(char_lm.loss_fn, char_lm.make_model(config))
        grads = jax.jit(jax.grad(loss))(last, first_window())
        apply = ga.apply_gradients
        monkeypatch.setattr(
            ga, "apply_gradients", lambda *args, weight, **kw: apply(*args, **kw)
        )
        _, unweighted = train(8, "unweighted")

    n = config.batch_size * config.length
    error = 2 * config.learning_rate * n * np.finfo(np.float64).eps / 1e-8
    slope = sum(float(np.sum(np.abs(g))) for g in jax.tree.leaves(grads))
    bound = config.steps * error * slope
    off, twin = abs(split - whole), abs(unweighted - whole)
    assert off <= bound < twin / 10


def test_numbers_that_do_not_fit_are_refused(capsys):
    for flags in ("--steps 0", "--num-microbatches 7", "--heads 7", "--num-micro 1"):
        with pytest.raises(SystemExit):
            char_lm.main(flags.split())
        assert "must" in capsys.readouterr().err
