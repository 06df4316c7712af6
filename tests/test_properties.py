"""Laws of accumulation over random trees, dtypes, weights, groupings and kill points.

A case costs a few calls of programs that were compiled before: trees, dtypes and sizes
are drawn from small sets, and what varies freely are numbers, weights, window lengths,
and where a run is cut. Numbers come from a seed that Hypothesis draws.
"""

import functools
import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ga_optax as ga
from ga_optax import accumulator, data, testing

pytestmark = pytest.mark.usefixtures("optax_promotion")

TREES = {
    "one float32": np.zeros(5, np.float32),
    "nested, mixed": {
        "a": [np.zeros((2, 3), jnp.bfloat16), np.zeros((), np.float32)],
        "b": (np.zeros((0, 2), np.float32), {"c": np.zeros(3, np.float16)}),
    },
    "half": [np.zeros(4, jnp.bfloat16), np.zeros((1, 2), jnp.bfloat16)],
}
WEIGHTS = st.one_of(
    st.integers(0, 5).map(float), st.floats(0.125, 1000.0, width=32), st.just(0.0)
)
SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(["normal", "integers", "wide"])


def random_like(tree, rng, kind):
    """Gradients for a tree, in its dtypes."""

    def leaf(x):
        if kind == "integers":
            values = rng.integers(-8, 9, x.shape)
        else:
            values = rng.normal(size=x.shape)
        if kind == "wide":
            values = values * 2.0 ** rng.integers(-8, 9, x.shape)
        return np.asarray(values).astype(x.dtype)

    return jax.tree.map(leaf, tree)


def through_bytes(tree, like):
    """What a new process reads of what an old one wrote: bytes, in fresh buffers."""
    file = io.BytesIO()
    leaves, structure = jax.tree.flatten(jax.device_get(tree))
    raw = {str(i): np.frombuffer(x.tobytes(), np.uint8) for i, x in enumerate(leaves)}
    np.savez(file, **raw)
    file = io.BytesIO(file.getvalue())
    with np.load(file) as saved:
        read = [
            jnp.asarray(saved[str(i)].view(x.dtype).reshape(x.shape))
            for i, x in enumerate(jax.tree.leaves(like))
        ]
    assert jax.tree.structure(like) == structure
    return jax.tree.unflatten(structure, read)


add = jax.jit(accumulator.add)
mean = jax.jit(accumulator.mean)


def fold(tree, grads, weights):
    acc = accumulator.init(tree)
    for g, w in zip(grads, weights, strict=True):
        acc = add(acc, g, w)
    return acc


@st.composite
def windows(draw, weights=WEIGHTS):
    """A tree, some micro-gradients, and their weights."""
    tree = TREES[draw(st.sampled_from(sorted(TREES)))]
    w = draw(st.lists(weights, min_size=1, max_size=8))
    rng, kind = np.random.default_rng(draw(SEEDS)), draw(KINDS)
    return tree, [random_like(tree, rng, kind) for _ in w], [np.float32(x) for x in w]


def within_the_bound(got, grads, weights):
    """Whether a mean is the weighted mean, in every element of every leaf."""
    columns = [jax.tree.leaves(g) for g in grads]
    weights = [float(w) for w in weights]
    for i, x in enumerate(jax.tree.leaves(got)):
        column = [np.asarray(leaves[i], np.float64) for leaves in columns]
        assert x.dtype == np.float32
        # Half of the spacing at 1 is what one rounding errs by.
        bound = oracle.sum_error_bound(column, weights, 2.0**-24)
        error = np.abs(
            np.asarray(x, np.float64) - oracle.weighted_mean(column, weights)
        )
        if not np.all(error <= bound):
            return False
    return True


@given(windows())
def test_the_mean_is_within_the_derived_bound_of_the_weighted_mean(window):
    tree, grads, weights = window
    assert within_the_bound(mean(fold(tree, grads, weights)), grads, weights)


def test_a_micro_batch_that_is_dropped_is_outside_of_the_bound():
    rng = np.random.default_rng(0)
    tree, weights = TREES["nested, mixed"], [np.float32(w) for w in (1, 3, 2)]
    grads = [random_like(tree, rng, "normal") for _ in weights]
    got = mean(fold(tree, grads, weights))
    assert within_the_bound(got, grads, weights)
    assert not within_the_bound(got, grads[:2], weights[:2])
    assert not within_the_bound(got, grads, [np.float32(1)] * 3)


LEAVES = st.builds(
    np.zeros,
    st.sampled_from([(), (0,), (3,), (2, 2)]),
    st.sampled_from(
        [np.dtype(np.float32), np.dtype(np.float16), jnp.dtype("bfloat16")]
    ),
)
ANY_TREE = st.recursive(
    LEAVES | st.none(),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), children, max_size=3)
        | st.tuples(children, children)
    ),
    max_leaves=5,
).filter(jax.tree.leaves)


@given(ANY_TREE, SEEDS, KINDS, st.lists(WEIGHTS, min_size=1, max_size=3), st.data())
def test_an_accumulator_of_any_tree_survives_a_kill(tree, seed, kind, weights, draw):
    rng = np.random.default_rng(seed)
    weights = [np.float32(w) for w in weights]
    grads = [random_like(tree, rng, kind) for _ in weights]
    killed_before = draw.draw(st.integers(0, len(weights) - 1))
    acc = expected = accumulator.init(tree)
    for i, (g, w) in enumerate(zip(grads, weights, strict=True)):
        if i == killed_before:
            acc = through_bytes(acc, accumulator.init(tree))
        acc, expected = accumulator.add(acc, g, w), accumulator.add(expected, g, w)
    testing.assert_trees_bitwise_equal(acc, expected)
    assert within_the_bound(accumulator.mean(acc), grads, weights)


@given(windows(), st.data())
def test_micro_batches_of_weight_0_change_no_bit_wherever_they_are(window, draw):
    tree, grads, weights = window
    expected = fold(tree, grads, weights)
    at = draw.draw(st.integers(0, len(grads)))
    bad = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), tree)
    got = fold(
        tree,
        [*grads[:at], bad, *grads[at:]],
        [*weights[:at], np.float32(0), *weights[at:]],
    )
    # An accumulator of weight 0 holds 0, and 0 + (-0) is 0: the sign of a zero is all
    # that may differ, and only where weight 0 comes first. Adding 0 takes it away.
    got, expected = (
        jax.tree.map(lambda x: np.asarray(x) + np.zeros_like(x), acc._replace(count=0))
        for acc in (got, expected)
    )
    testing.assert_trees_bitwise_equal(got, expected)


@given(windows(st.just(1.0)), st.data())
def test_integers_add_up_to_the_same_bits_in_any_order_and_any_halves(window, draw):
    tree, grads, weights = window
    rng = np.random.default_rng(draw.draw(SEEDS))
    grads = [random_like(tree, rng, "integers") for _ in grads]
    expected = mean(fold(tree, grads, weights))
    order = draw.draw(st.permutations(range(len(grads))))
    at = draw.draw(st.integers(0, len(grads)))
    halves = [
        fold(tree, [grads[i] for i in part], [weights[i] for i in part])
        for part in (order[:at], order[at:])
    ]
    testing.assert_trees_bitwise_equal(mean(accumulator.merge(*halves)), expected)


# -- Inside a call: groupings and kill points ------------------------------------------

WINDOW, ROWS, FEATURES = 6, 2, 3
PARAMS = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=FEATURES), jnp.float32),
    "layers": jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 3)), jnp.float32),
}


def model_loss(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    error = jnp.square(x @ params["w"] - batch["y"]) * batch["mask"]
    return jnp.sum(error) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)


def kept(batch):
    return jnp.sum(batch["mask"])


@functools.cache
def grouped(num_microbatches, weighted):
    weight_fn = kept if weighted else None
    return jax.jit(ga.accumulate(model_loss, num_microbatches, weight_fn=weight_fn))


def random_batch(seed):
    rng = np.random.default_rng(seed)
    rows = WINDOW * ROWS
    return {
        "x": rng.normal(size=(rows, FEATURES)).astype(np.float32),
        "y": rng.normal(size=rows).astype(np.float32),
        "mask": rng.integers(0, 2, rows).astype(np.float32),
    }


def run_groups(batch, groups, killed_after, weighted, lost=()):
    """The window in calls of so many micro-batches each, killed after some of them."""
    acc, at = accumulator.init(PARAMS), 0
    for call, size in enumerate(groups):
        part = {name: x[at * ROWS : (at + size) * ROWS] for name, x in batch.items()}
        if call not in lost:
            _, acc = grouped(size, weighted)(acc, PARAMS, part)
        at += size
        if call in killed_after:
            acc = through_bytes(acc, accumulator.init(PARAMS))
    return acc


@st.composite
def groupings(draw):
    cuts = draw(st.sets(st.integers(1, WINDOW - 1)))
    edges = [0, *sorted(cuts), WINDOW]
    return [b - a for a, b in itertools.pairwise(edges)]


@pytest.mark.exhaustive
@given(SEEDS, groupings(), st.sets(st.integers(0, WINDOW - 1)), st.booleans())
def test_any_grouping_killed_anywhere_gives_the_same_bits(
    seed, groups, killed_after, weighted
):
    batch = random_batch(seed)
    expected = run_groups(batch, [WINDOW], (), weighted)
    got = run_groups(batch, groups, killed_after, weighted)
    testing.assert_trees_bitwise_equal(got, expected)
    assert int(got.count) == WINDOW


def test_a_call_that_is_lost_or_out_of_order_would_be_seen():
    batch = random_batch(0)
    expected = run_groups(batch, [WINDOW], (), False)
    got = run_groups(batch, [2, 2, 2], {0}, False, lost={1})
    with pytest.raises(AssertionError, match="elements differ in their bits"):
        testing.assert_trees_bitwise_equal(got, expected)
    other = {name: x[::-1] for name, x in batch.items()}
    with pytest.raises(AssertionError, match="elements differ in their bits"):
        testing.assert_trees_bitwise_equal(
            run_groups(other, [2, 2, 2], {0}, False), expected
        )


# -- Across calls: kill points, window lengths, weights --------------------------------

OPT = optax.adam(0.1)


@jax.jit
def micro_step(params, state, grads, weight, lengths):
    """Window lengths are data, so that one program serves them all."""
    tx = ga.MultiSteps(OPT, lambda step: lengths[step % lengths.shape[0]])
    return ga.apply_gradients(tx, grads, state, params, weight=weight)


def run_micro_steps(tree, grads, weights, lengths, killed_before, forget=False):
    like = ga.MultiSteps(OPT, lambda step: 2).init(tree)
    params, state = jax.tree.map(jnp.asarray, (tree, like))
    emitted = []
    for i, (g, w) in enumerate(zip(grads, weights, strict=True)):
        if i in killed_before:
            params, state = through_bytes((params, state), (tree, like))
            if forget:
                state = state._replace(mini_step=jnp.zeros_like(state.mini_step))
        params, state = micro_step(params, state, g, w, lengths)
        emitted.append(bool(ga.has_updated(state)))
    return params, state, emitted


LENGTHS = st.lists(st.integers(1, 4), min_size=3, max_size=3).map(
    lambda ks: np.asarray(ks, np.int32)
)


@pytest.mark.exhaustive
@given(windows(), LENGTHS, st.sets(st.integers(0, 7)))
def test_a_run_killed_anywhere_ends_in_the_same_bits(window, lengths, killed_before):
    tree, grads, weights = window
    expected = run_micro_steps(tree, grads, weights, lengths, ())
    got = run_micro_steps(tree, grads, weights, lengths, killed_before)
    testing.assert_trees_bitwise_equal(got, expected)

    # And the steps are where a count by hand puts them.
    step, held, total, by_hand = 0, 0, 0.0, []
    for w in weights:
        held, total = held + 1, total + w
        closes = held >= lengths[step % len(lengths)]
        by_hand.append(bool(closes and total > 0))
        step += by_hand[-1]
        if closes:
            held, total = 0, 0.0
    assert got[2] == by_hand
    assert int(ga.stats(got[1]).steps) == step
    assert int(ga.stats(got[1]).fill) == held


def test_a_restart_that_forgets_the_window_would_be_seen():
    tree = TREES["one float32"]
    rng = np.random.default_rng(0)
    grads = [random_like(tree, rng, "normal") for _ in range(4)]
    arguments = tree, grads, [np.float32(1)] * 4, np.asarray([4, 4, 4], np.int32), {2}
    expected = run_micro_steps(*arguments)
    assert expected[2] == [False, False, False, True]
    with pytest.raises(AssertionError):
        testing.assert_trees_bitwise_equal(
            run_micro_steps(*arguments, forget=True), expected
        )


# -- Data ------------------------------------------------------------------------------


@given(SEEDS, st.integers(0, 2**31 - 1), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_a_window_has_the_same_examples_however_it_is_split(seed, step, k):
    key = jax.random.key(np.uint32(seed))
    for draw in (data.window_indices, data.epoch_indices):
        whole = draw(key, jnp.int32(step), 50, 12, 1)
        split = draw(key, jnp.int32(step), 50, 12, k)
        assert split.shape == (k, 12 // k)
        testing.assert_trees_bitwise_equal(split.reshape(1, 12), whole)
