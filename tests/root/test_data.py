"""The same examples in every process, for any number of micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mean_of

from ga_optax.data import epoch_indices, window_indices

KEY = jax.random.key(0)
BOTH = [window_indices, epoch_indices]


@pytest.mark.parametrize("draw", BOTH)
def test_the_window_is_drawn_first_and_split_afterwards(draw):
    whole = np.asarray(draw(KEY, 3, 100, 24, 1))
    assert whole.shape == (1, 24)
    assert whole.dtype == np.int32
    assert whole.min() >= 0
    assert whole.max() < 100
    for k in (2, 3, 4, 24):
        window = np.asarray(draw(KEY, 3, 100, 24, k))
        assert window.shape == (k, 24 // k)
        np.testing.assert_array_equal(window.ravel(), whole.ravel())


@pytest.mark.parametrize("draw", BOTH)
def test_steps_and_keys_draw_differently_and_repeatably(draw):
    first = np.asarray(draw(KEY, 0, 1000, 32, 4))
    np.testing.assert_array_equal(first, draw(KEY, 0, 1000, 32, 4))
    assert np.any(first != np.asarray(draw(KEY, 1, 1000, 32, 4)))
    assert np.any(first != np.asarray(draw(jax.random.key(1), 0, 1000, 32, 4)))


def test_an_epoch_sees_every_example_once_and_the_next_in_another_order():
    first, second = (
        np.ravel([epoch_indices(KEY, step, 24, 6, 3) for step in steps])
        for steps in (range(4), range(4, 8))
    )
    for epoch in (first, second):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(24))
    assert np.any(first != second)
    # The twin: with replacement some come twice, and a window may be larger.
    assert window_indices(KEY, 0, 5, 10, 1).shape == (1, 10)
    drawn = np.ravel([window_indices(KEY, step, 24, 6, 3) for step in range(4)])
    assert len(set(drawn.tolist())) < 24
    assert set(np.ravel(window_indices(KEY, 0, 24, 1000, 1))) == set(range(24))


@pytest.mark.parametrize("draw", BOTH)
def test_indices_are_int32_with_64_bits_too(draw):
    want = draw(KEY, 3, 24, 6, 3)
    with jax.enable_x64(True):
        got = draw(KEY, 3, 24, 6, 3)
    assert got.dtype == np.int32
    if draw is window_indices:  # JAX draws permutations of int64 in another way
        np.testing.assert_array_equal(got, want)


def test_what_is_left_over_at_the_end_of_an_epoch_is_not_seen_in_it():
    drawn = [[epoch_indices(KEY, 2 * e + i, 7, 3, 1) for i in (0, 1)] for e in range(8)]
    seen = [set(np.ravel(epoch).tolist()) for epoch in drawn]
    assert all(len(epoch) == 6 for epoch in seen)
    assert len(set.union(*seen)) == 7


def test_row_i_of_the_indices_is_micro_batch_i_of_the_flat_batch():
    window = np.asarray(window_indices(KEY, 0, 50, 8, 4))
    fun = lambda w, ids: (w * ids.mean(), ids)  # noqa: E731
    step = mean_of(fun, 4, has_aux=True, aux="stack")
    (_, batches), _ = step(jnp.ones([]), window.ravel())
    np.testing.assert_array_equal(batches, window)


@pytest.mark.grid(3)
@pytest.mark.parametrize("draw", BOTH)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_a_step_of_any_integer_dtype_draws_the_same_in_one_program(draw, dtype):
    """An epoch has 333 steps, more than fit in 8 bits."""
    traced = jax.jit(lambda key, step: draw(key, step, 1000, 3, 1))
    for step in (0, 5, 127):
        want = draw(KEY, step, 1000, 3, 1)
        np.testing.assert_array_equal(draw(KEY, dtype(step), 1000, 3, 1), want)
        np.testing.assert_array_equal(traced(KEY, jnp.asarray(step, dtype)), want)
    assert traced._cache_size() == 1
    old_style = draw(jax.random.PRNGKey(0), dtype(2), 100, 20, 2)
    assert old_style.shape == (2, 10)


def test_an_epoch_beyond_2_to_the_31_sees_every_example_once():
    first = (2**31 + 2) // 3 * 3  # an epoch has three steps
    epoch, of_two = (
        np.ravel([epoch_indices(KEY, first + i + j, 12, 4, 1) for i in range(3)])
        for j in (0, 1)
    )
    assert sorted(epoch.tolist()) == list(range(12))
    assert sorted(of_two.tolist()) != list(range(12))  # the twin
