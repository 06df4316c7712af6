"""Checkpoints of open windows: cut anywhere, a run goes on with the same bits.

They are saved as examples/resume.py does; test_examples.py kills that with SIGKILL.
"""

import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ga_optax as ga
from ga_optax import testing

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "resume.py"

pytestmark = pytest.mark.usefixtures("optax_promotion")

NAMES = ["multi_steps", "accumulate", "train_state", "nnx"]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parent), *filter(None, sys.path)]),
    # Most of the time goes into compiling, and most of that into LLVM's optimizer.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


@pytest.fixture(scope="module")
def resume():
    """The example as a module."""
    return helpers.load(EXAMPLE)


# -- In one process, with the checkpoint on disk between the halves --------------------


def train_one(resume, way, run, numbers):
    """Runs some micro-steps on random data; returns the state and the losses."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(100, 64)).astype(np.float32)
    labels = rng.integers(0, 10, 100).astype(np.int32)
    state, losses = run
    for number in numbers:
        batch = resume.micro_batch(images, labels, number)
        state, loss = way.micro_step(state, batch, (number + 1) % resume.K == 0)
        losses = [*losses, loss]
    return state, losses


@pytest.fixture(scope="module")
def ways(resume):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return resume.make_ways(width=8)


@pytest.mark.published
@pytest.mark.parametrize("name", NAMES)
def test_a_window_that_was_cut_by_a_checkpoint_has_the_same_bits(
    name, resume, ways, tmp_path
):
    way, total = ways[name], 2 * resume.K + 1
    expected = train_one(resume, way, (way.start(), []), range(total))
    cut = int(np.random.default_rng(len(name)).integers(1, total))
    first, losses = train_one(resume, way, (way.start(), []), range(cut))
    with resume.open_checkpoints(tmp_path) as checkpoints:
        resume.save(checkpoints, cut, first)
    with resume.open_checkpoints(tmp_path) as checkpoints:
        restored = resume.restore(checkpoints, checkpoints.latest_step(), way.start())
    testing.assert_trees_bitwise_equal(restored, first)
    got = train_one(resume, way, (restored, losses), range(cut, total))
    testing.assert_trees_bitwise_equal(got, expected)


@pytest.mark.exhaustive
def test_a_checkpoint_without_the_accumulator_is_told_by_the_comparison(resume, ways):
    way = ways["multi_steps"]
    expected, _ = train_one(resume, way, (way.start(), []), range(4))
    half, _ = train_one(resume, way, (way.start(), []), range(2))
    lost = half["opt_state"]._replace(
        total=jax.tree.map(jnp.zeros_like, half["opt_state"].total)
    )
    half = {"params": half["params"], "opt_state": lost}
    got, _ = train_one(resume, way, (half, []), range(2, 4))

    def as_run(state):
        losses = jnp.zeros(2 * resume.K)
        return {"states": {"multi_steps": state}, "losses": {"multi_steps": losses}}

    resume.compare(as_run(expected), as_run(expected))
    with pytest.raises(AssertionError, match="elements differ in their bits"):
        resume.compare(as_run(got), as_run(expected))


# -- Another window length -------------------------------------------------------------

GOOD = [jnp.array([float(i), -2.0 * i, 0.5]) for i in range(1, 9)]


@pytest.mark.published
@pytest.mark.parametrize(("before", "after"), [(8, 3), (2, 5), (4, 1), (1, 4), (1, 1)])
def test_a_checkpoint_of_another_k_closes_its_window_sensibly(
    before, after, resume, tmp_path
):
    old, new = (ga.MultiSteps(optax.sgd(1.0, 0.5), k) for k in (before, after))
    params, held = jnp.zeros(3), before - 1
    fresh = state = old.init(params)
    # Where no window is ever open, a whole step, for its momentum.
    for g in GOOD[: max(held, 1)]:
        params, state = ga.apply_gradients(old, g, state, params)
    like = {"params": jnp.ones(3), "opt_state": fresh}
    with resume.open_checkpoints(tmp_path) as checkpoints:
        resume.save(checkpoints, 1, {"params": params, "opt_state": state})
        if before == 1 < after:
            with pytest.raises(ValueError, match=r"opt_state/total.*nothing"):
                resume.restore(checkpoints, 1, like | {"opt_state": new.init(params)})
        restored = resume.restore(checkpoints, 1, like)
    params, state = restored["params"], restored["opt_state"]
    if before == 1 < after:
        # It holds no accumulator. The error says so, and how to go on.
        with pytest.raises(ValueError, match=r"inner_opt_state.*_replace"):
            ga.apply_gradients(new, GOOD[0], state, params)
        kept = {name: getattr(state, name) for name in ("inner_opt_state", "counters")}
        state = new.init(params)._replace(**kept, gradient_step=state.gradient_step)
    start, momentum = params, state.inner_opt_state[0].trace
    steps, closes_after = int(ga.stats(state).steps), max(after - held, 1)
    for i, g in enumerate(GOOD[held:][:closes_after]):
        params, state = ga.apply_gradients(new, g, state, params)
        assert bool(ga.has_updated(state)) == (i + 1 == closes_after)
    mean = np.mean(np.stack(GOOD[: held + closes_after]), axis=0)
    np.testing.assert_allclose(params, start - (mean + 0.5 * momentum), rtol=1e-6)
    assert (int(ga.stats(state).steps), int(ga.stats(state).fill)) == (steps + 1, 0)


# -- Checkpoints that do not fit -------------------------------------------------------


def files(folder):
    """Every file under a folder, by its digest and the time of its last change."""
    return {
        path.relative_to(folder): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


SAVED = {"params": {"w": np.ones(3, np.float32)}, "opt_state": [np.array(7, np.int32)]}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"w": np.ones(4, np.float32)}, r"params/w .* float32\[4\].* float32\[3\]"),
        # Orbax would convert these without a word.
        ({"w": np.ones(3, np.float16)}, r"params/w .* float16\[3\].* float32\[3\]"),
        ({"v": np.ones(3, np.float32)}, r"params/v .* float32\[3\].* nothing"),
        ({}, r"params/w .* has nothing, but the checkpoint has float32\[3\]"),
    ],
    ids=["shape", "dtype", "missing", "extra"],
)
def test_a_checkpoint_that_does_not_fit_names_the_leaf_and_stays_as_it_is(
    params, message, resume, tmp_path
):
    with resume.open_checkpoints(tmp_path) as checkpoints:
        resume.save(checkpoints, 5, SAVED)
    before = files(tmp_path)
    with resume.open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=message):
            resume.restore(checkpoints, 5, {**SAVED, "params": params})
        assert files(tmp_path) == before
        testing.assert_trees_bitwise_equal(resume.restore(checkpoints, 5, SAVED), SAVED)


def flip(path, start, number=64):
    """Flips every bit of some bytes of a file."""
    raw = bytearray(path.read_bytes())
    for i in range(start, min(start + number, len(raw))):
        raw[i] ^= 0xFF
    path.write_bytes(raw)


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_flipped_bytes_are_never_restored_in_silence(place, resume, tmp_path):
    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=40_000).astype(np.float32), "b": np.zeros(3, np.int32)}
    with resume.open_checkpoints(tmp_path) as checkpoints:
        resume.save(checkpoints, 1, tree)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    flip(largest, int(place * largest.stat().st_size))
    with resume.open_checkpoints(tmp_path) as checkpoints:
        try:  # the twin: Orbax alone may say nothing, and the numbers are others
            alone = checkpoints.restore(1, args=resume.ocp.args.StandardRestore(tree))
        except ValueError:
            alone = tree
        if (alone["w"] != tree["w"]).any() or place == 0.5:
            with pytest.raises(ValueError, match=r"SHA-256 .* changed on the disk"):
                resume.restore(checkpoints, 1, tree)


# -- Killed while it saves -------------------------------------------------------------

KILLED_WHILE_SAVING = """
    import os, pathlib, signal, sys, threading
    import numpy as np, resume

    folder = pathlib.Path(sys.argv[1])
    state = {"w": np.arange(4_000_000, dtype=np.float32)}

    def kill_when_the_files_come():
        while not any(
            path.is_file() and path.relative_to(folder).parts[0] != "1"
            for path in folder.rglob("*")
        ):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    with resume.open_checkpoints(folder) as checkpoints:
        resume.save(checkpoints, 1, state)
        threading.Thread(target=kill_when_the_files_come).start()
        resume.save(checkpoints, 2, {"w": state["w"] + 1})
    print("it was not killed")
"""


@pytest.mark.published
def test_a_process_killed_while_it_saves_leaves_the_last_complete_checkpoint(
    resume, tmp_path
):
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_WHILE_SAVING), str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    leftovers = [path.name for path in tmp_path.iterdir() if path.name != "1"]
    assert leftovers, "nothing was being saved"
    state = {"w": np.arange(4_000_000, dtype=np.float32)}
    with resume.open_checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        restored = resume.restore(checkpoints, 1, state)
        testing.assert_trees_bitwise_equal(restored, state)
        # And the run goes on: the number that was cut off is saved again.
        resume.save(checkpoints, 2, {"w": state["w"] + 1})
        assert checkpoints.latest_step() == 2
