"""Checkpoints of open windows: cut anywhere, a run goes on with the same bits.

They are saved as examples/resume.py does; test_examples.py kills that with SIGKILL.
"""

import hashlib
import pathlib
import signal
import textwrap

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ga_optax import testing

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "resume.py"

pytestmark = pytest.mark.usefixtures("optax_promotion")

NAMES = ["multi_steps", "accumulate", "train_state", "nnx"]


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


@pytest.mark.parametrize("place", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_flipped_bytes_are_never_restored_in_silence(place, resume, tmp_path):
    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=40_000).astype(np.float32), "b": np.zeros(3, np.int32)}
    with resume.open_checkpoints(tmp_path) as checkpoints:
        resume.save(checkpoints, 1, tree)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    for i in range(int(place * len(raw)), len(raw))[:64]:
        raw[i] ^= 0xFF
    largest.write_bytes(raw)
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
    program = textwrap.dedent(KILLED_WHILE_SAVING)
    killed = helpers.python("-c", program, tmp_path, cwd=EXAMPLE.parent, timeout=120)
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
