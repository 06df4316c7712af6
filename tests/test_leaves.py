"""No kind of leaf takes more bytes than it does by hand: the models of a benchmark."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import ga_optax as ga
from ga_optax.testing import assert_trees_bitwise_equal

BENCHMARKS = str(pathlib.Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import leaves  # noqa: E402
import peers  # noqa: E402

sys.path.remove(BENCHMARKS)

pytestmark = pytest.mark.usefixtures("optax_promotion")

KINDS = leaves.kinds(4)
SCALARS = 1024  # counters and sums of weights, each on a line of the cache of its own


def bytes_of(tree):
    return peers.tree_bytes(tree)


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("name", KINDS)
def test_a_leaf_takes_no_more_temporaries_than_by_hand(name):
    kind = KINDS[name]
    found = {way: side.temporaries for way, side in leaves.sides(kind)}
    # Inside a call the fence at the top of a micro-step copies the micro-batch.
    copied = bytes_of(kind.batch) // leaves.K
    if name == "unrolled layers" and jax.__version_info__ < (0, 11):
        # The schedule of this XLA holds one gradient more before it adds them.
        copied += max(map(bytes_of, jax.tree.leaves(kind.params)))
    assert found[peers.OURS] <= found[peers.SCAN] + copied + SCALARS
    assert found[peers.OURS_LOOP] <= found[peers.TWO_PROGRAMS] + SCALARS


@pytest.mark.grid(1)
@pytest.mark.parametrize("weight", [None, 2.0])
def test_a_poisoned_window_of_an_embedding_leaves_the_next_one_alone(weight):
    """Nothing resets the table between two windows; the first addition clears it."""
    tx = ga.MultiSteps(optax.sgd(1.0), 2)
    params = {"table": jnp.ones((16, 4)), "w": jnp.ones((4, 4))}

    @jax.jit
    def step(params, state, x, poison):
        grads = jax.grad(leaves.embedding)(params, x)
        grads["table"] = grads["table"].at[x].add(poison)
        return ga.apply_gradients(tx, grads, state, params, weight=weight)

    clean = poisoned = tx.init(params)
    for poison in (0.0, jnp.nan):
        _, poisoned = step(params, poisoned, jnp.arange(16), poison)
    clean = clean._replace(gradient_step=poisoned.gradient_step)
    for x in (jnp.arange(4), jnp.arange(2, 9)):
        want, clean = step(params, clean, x, 0.0)
        got, poisoned = step(params, poisoned, x, 0.0)
    assert_trees_bitwise_equal(got, want)
    assert bool(jnp.any(got["table"] != params["table"]))
