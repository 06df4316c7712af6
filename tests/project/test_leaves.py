"""No kind of leaf takes more bytes than it does by hand: the models of a benchmark."""

import jax
import pytest
from helpers import of_benchmarks

leaves, peers = of_benchmarks("leaves", "peers")

pytestmark = pytest.mark.usefixtures("optax_promotion")

KINDS = leaves.kinds(4)
SCALARS = 1024  # counters and sums of weights, each on a line of the cache of its own


@pytest.mark.cpu
@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("name", KINDS)
def test_a_leaf_takes_no_more_temporaries_than_by_hand(name):
    kind = KINDS[name]
    found = {way: side.temporaries for way, side in leaves.sides(kind)}
    # Inside a call the fence at the top of a micro-step copies the micro-batch.
    copied = peers.tree_bytes(kind.batch) // leaves.K
    if name == "unrolled layers" and jax.__version_info__ < (0, 11):
        # The schedule of this XLA holds one gradient more before it adds them.
        copied += max(map(peers.tree_bytes, jax.tree.leaves(kind.params)))
    assert found[peers.OURS] <= found[peers.SCAN] + copied + SCALARS
    assert found[peers.OURS_LOOP] <= found[peers.TWO_PROGRAMS] + SCALARS
