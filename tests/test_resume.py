"""Checkpoints of open windows that do not fit, or were changed, are told.

They are saved as examples/resume.py does. test_examples.py kills that inside of
windows, for each way to accumulate: the run goes on with the same bits.
"""

import hashlib
import pathlib

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ga_optax import testing

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "resume.py"

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.fixture(scope="module")
def resume():
    """The example as a module."""
    return helpers.load(EXAMPLE)


def test_a_run_that_lost_its_accumulator_is_told_by_the_comparison(resume):
    """The twin of what the example prints at its end: `same bits`."""
    good = resume.make_ways(width=8)["multi_steps"].start()
    other = jax.tree.map(jnp.ones_like, good["opt_state"].total)
    lost = good | {"opt_state": good["opt_state"]._replace(total=other)}

    def as_run(state):
        losses = jnp.zeros(2 * resume.K)
        return {"states": {"multi_steps": state}, "losses": {"multi_steps": losses}}

    resume.compare(as_run(good), as_run(good))
    with pytest.raises(AssertionError, match="elements differ in their bits"):
        resume.compare(as_run(lost), as_run(good))


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
