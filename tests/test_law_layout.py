"""What has rows is a hint: no shape is refused, and the result is right."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga
from ga_optax._calls import layouts

pytestmark = pytest.mark.usefixtures("optax_promotion")
WIDTH = 6


def array(*shape, seed=0):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


W = array(WIDTH, 4)


def distance(loss, *args, k=4, **options):
    got = jax.jit(ga.value_and_grad(loss, k, **options))(*args)
    want = jax.jit(jax.value_and_grad(loss))(*args)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def laid_out(loss, *args, k=4, **options):
    found = ga.batch_dependencies(loss, k, **options)(*args)
    return found.rows, found.given_whole


def test_scalars_and_keys_of_the_batch_go_whole():
    def loss(w, b):
        noise = jax.random.normal(b["key"], b["x"].shape)
        return jnp.mean(((b["x"] + noise) @ w) ** 2) * b["scale"]

    batch = {"x": array(16, WIDTH), "scale": jnp.float32(2), "key": jax.random.key(0)}
    assert distance(loss, W, batch) < 1e-5
    rows, whole = laid_out(loss, W, batch)
    assert list(rows.values()) == [16 * WIDTH * 4]
    assert set(whole) == {"leaf ['key']", "leaf ['scale']"}


def test_a_leaf_of_another_length_is_split_along_its_own_or_goes_whole():
    def loss(w, b):
        own = jnp.mean((b["a"] @ w) ** 2)
        return own + jnp.mean(jnp.abs(b["three"] @ w)) + jnp.mean(b["odd"] @ w)

    batch = {"a": array(16, WIDTH), "three": array(48, WIDTH), "odd": array(7, WIDTH)}
    assert distance(loss, W, batch) < 1e-5
    rows, whole = laid_out(loss, W, batch)
    assert set(rows) == {"leaf ['a']", "leaf ['three']"}
    assert whole == {"leaf ['odd']": 7 * WIDTH * 4}


def test_nodes_and_edges_of_graphs_have_rows_of_their_own():
    def loss(w, b):
        messages = (b["nodes"] @ w)[b["senders"]]
        got = jax.ops.segment_sum(messages, b["to"], num_segments=16)
        return jnp.mean(got**2)

    senders = jnp.asarray(np.random.default_rng(1).integers(0, 16, 40))
    batch = {"nodes": array(16, WIDTH), "senders": senders, "to": jnp.arange(40) % 16}
    assert distance(loss, W, batch) < 1e-5


def test_an_argument_without_a_role_with_the_rows_of_the_batch_is_split():
    def loss(w, x, y, table):
        return jnp.mean((x @ w @ table - y) ** 2)

    args = W, array(16, WIDTH), array(16, 3), array(4, 3)
    assert distance(loss, *args) < 1e-5
    rows, whole = laid_out(loss, *args)
    assert len(rows) == 2
    assert list(whole.values()) == [4 * 3 * 4]


def test_the_rows_of_the_first_leaf_must_be_divided():
    with pytest.raises(ValueError, match=r"num_microbatches=4 must divide the batch"):
        ga.value_and_grad(lambda w, x: jnp.mean(x @ w), 4)(W, array(6, WIDTH))


# -- Traps -----------------------------------------------------------------------------


def of_statistics(w, stats, b):
    return jnp.mean(((b["x"] - stats["mean"]) @ w) ** 2)


def test_who_splits_the_statistics_and_not_the_batch_is_told():
    stats = {"mean": array(8), "var": array(8, seed=1)}
    batch = {"x": array(32, 8), "y": array(32)}
    w = array(8, 4)
    with pytest.warns(UserWarning, match="pass batch_argnums=2"):
        got = ga.value_and_grad(of_statistics, 4)(w, stats, batch)
    np.testing.assert_allclose(got[0], of_statistics(w, stats, batch), rtol=1e-5)
    with warnings.catch_warnings():  # The twin.
        warnings.simplefilter("error")
        assert distance(of_statistics, w, stats, batch, batch_argnums=2) < 1e-5


def test_who_closes_over_the_batch_is_told_to_take_it():
    x = array(16, WIDTH)
    with pytest.raises(ValueError, match="fun must take its batch: what it closes"):
        ga.value_and_grad(lambda w: jnp.mean(x @ w), 4)(W)


def test_a_list_of_numbers_is_no_array():
    batch = {"x": array(4, WIDTH), "y": [1.0, 2.0, 3.0, 4.0]}

    def loss(w, b):
        return jnp.mean((b["x"] @ w).sum(1) - jnp.asarray(b["y"]))

    for run in (lambda f: f, jax.jit):
        with pytest.raises(TypeError, match=r"list of 4 numbers .*jnp\.asarray"):
            run(ga.value_and_grad(loss, 4))(W, batch)


# -- What nobody can partition ---------------------------------------------------------


def test_what_the_partitioner_cannot_do_is_computed_of_all_rows_and_said(monkeypatch):
    def loss(w, x):
        return jnp.mean((x @ w) ** 2), x.shape[0]

    def broken(*args):
        raise KeyError("a parameter that jax renamed")

    args = W, array(16, WIDTH)
    want = jax.value_and_grad(loss, has_aux=True)(*args)
    monkeypatch.setattr(layouts, "partition", broken)
    with pytest.warns(UserWarning, match=r"all rows at once.*KeyError: 'a parameter"):
        got = ga.value_and_grad(loss, 4, has_aux=True)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_error_of_the_users_is_the_users():
    def loss(w, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ga.value_and_grad(loss, 4)(W, array(16, WIDTH))


def test_lists_of_lists_of_arrays_are_batches():
    def loss(w, batch):
        [[x], [y]] = batch
        return jnp.mean((x @ w - y) ** 2)

    assert distance(loss, W, [[array(16, WIDTH)], [array(16, 4)]]) < 1e-5


def test_a_slice_without_rows_comes_back_and_no_rule_fails():
    def loss(w, x):
        h = jnp.tanh(x @ w)
        none = h[:0]
        again = jnp.concatenate([none, h[::-1]])
        return jnp.mean(h**2), (none, none[::-1], again, jnp.argmax(h, 1)[3:3])

    x = array(16, WIDTH)
    (_, aux), _ = jax.jit(ga.value_and_grad(loss, 4, has_aux=True))(W, x)
    _, want = loss(W, x)
    np.testing.assert_allclose(aux[2], want[2], rtol=1e-5)  # a sum of few terms
    assert [a.shape for a in aux] == [a.shape for a in want]
    assert [a.dtype for a in aux] == [a.dtype for a in want]
