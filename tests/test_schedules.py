"""Batch-size ramps: every boundary, against counting step by step."""

import functools
import math
import pickle
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ga_optax as ga
from ga_optax import schedules


def megatron(start, end, increment, duration):
    """Megatron-LM's rule for --rampup-batch-size, with exact fractions for its floats.

    Written from its description: increments evenly spread over the first samples.
    """

    def batch_of(seen):
        if seen > duration or start == end:
            return end
        per_increment = Fraction(duration, (end - start) // increment)
        return start + math.floor(seen / per_increment) * increment

    return batch_of


def assert_same(ramp, batch_of, size, steps):
    """Against counting step by step: `batch_of(seen)` is the rule."""
    ks = jax.vmap(ramp)(jnp.arange(steps, dtype=jnp.int32))
    assert ks.dtype == jnp.int32
    seen = 0
    for step, k in enumerate(np.asarray(ks)):
        assert (k * size, ramp.seen(step)) == (batch_of(seen), seen)
        seen += batch_of(seen)


@pytest.mark.slow
@hypothesis.given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 8),
    st.integers(1, 3),
    st.integers(1, 2000),
)
def test_linear_is_megatrons_rule_at_every_step(size, start, n, increment, duration):
    start, increment = start * size, increment * size
    end = start + n * increment
    options = {"microbatch_size": size, "increment": increment}
    ramp = schedules.linear(start, end, duration, **options)
    batch_of = megatron(start, end, increment, duration)
    assert_same(ramp, batch_of, size, 100)


@hypothesis.given(
    st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data()
)
def test_stepwise_follows_what_was_seen_at_every_step(size, ks, data):
    sizes = {"min_size": len(ks) - 1, "max_size": len(ks) - 1}
    draws = st.lists(st.integers(1, 500), unique=True, **sizes)
    boundaries = sorted(data.draw(draws))
    batches = [k * size for k in ks]
    ramp = schedules.stepwise(batches, boundaries, microbatch_size=size)

    def batch_of(seen):
        return batches[sum(seen >= boundary for boundary in boundaries)]

    assert_same(ramp, batch_of, size, 120)


# The sizes and boundaries of `stepwise`, in steps or not, and what each stage is.
STEPS = [
    # A batch that crosses two boundaries skips the stage between.
    ([10, 20, 30], [11, 15], False, (0, 2), (1, 3)),
    # A boundary that is met exactly begins its stage.
    ([10, 20], [29], False, (0, 3), (1, 2)),
    ([10, 20], [30], False, (0, 3), (1, 2)),
    ([10, 20], [31], False, (0, 4), (1, 2)),
    ([20, 40, 80], [50_000, 115_000], True, (0, 50_000, 115_000), (2, 4, 8)),
]


@pytest.mark.parametrize(("batches", "at", "in_steps", "first", "ks"), STEPS)
def test_a_stage_begins_exactly_there(batches, at, in_steps, first, ks):
    options = {"microbatch_size": 10, "boundaries_in_steps": in_steps}
    ramp = schedules.stepwise(batches, at, **options)
    assert ramp == schedules.Ramp(10, first, ks)
    k = jax.jit(ramp)
    for begin, stage in zip(first[1:], ks[1:], strict=True):
        assert int(k(begin - 1)) < int(k(begin)) == int(k(begin + 1)) == stage
    if in_steps:
        assert ramp.seen(115_000) == 50_000 * 20 + 65_000 * 40


def test_a_ramp_of_trillions_of_tokens_is_exact():
    # Llama 3, 16M after 2.87T tokens; sizes far beyond what float32 or int32 can hold.
    million = 10**6
    llama = schedules.stepwise(
        [4 * million, 8 * million, 16 * million],
        [252 * million, 2_870_000 * million],
        microbatch_size=million // 2,
    )
    assert llama.seen(63) == 252 * million
    last = llama.first_steps[-1]
    assert llama.seen(last - 1) < 2_870_000 * million <= llama.seen(last)
    assert int(llama(last - 1)) == 16
    assert int(llama(last)) == 32


def test_k_is_traced_and_clipped_at_both_ends():
    ramp = schedules.stepwise([1, 2], [3], microbatch_size=1)
    assert int(ramp(0)) == 1
    assert int(jax.jit(ramp)(2**31 - 1)) == 2
    assert int(ramp(np.int64(3))) == 2
    assert ramp(jnp.uint8(2)).dtype == jnp.int32
    constant = schedules.linear(4, 4, 10, microbatch_size=2)
    assert constant.first_steps == (0,)
    assert [int(constant(step)) for step in range(3)] == [2, 2, 2]


def test_a_ramp_is_hashable_picklable_and_prints_its_stages():
    ramp = schedules.linear(64, 256, 1000, microbatch_size=64)
    assert pickle.loads(pickle.dumps(ramp)) == ramp
    assert hash(ramp) == hash(schedules.linear(64, 256, 1000, microbatch_size=64))
    assert str(ramp).splitlines()[-1].split() == ["11", "1,152", "4", "256"]


@pytest.mark.quick
@pytest.mark.parametrize(
    "ramp",
    [
        schedules.linear(2, 8, 17, microbatch_size=2),
        schedules.stepwise([2, 6, 4], [5, 30], microbatch_size=2),
        lambda step: 1 + step % 3,
    ],
    ids=["linear", "stepwise", "function"],
)
def test_multi_steps_closes_its_windows_as_the_ramp_says_in_one_program(ramp):
    tx, params = ga.MultiSteps(optax.sgd(1.0), ramp), jnp.zeros(1)
    state, ends = tx.init(params), [0]

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def micro_step(g, state, params):
        return ga.apply_gradients(tx, g, state, params)

    for i in range(30):
        params, state = micro_step(jnp.ones(1), state, params)
        ends += [i + 1] * bool(ga.has_updated(state))
    assert micro_step._cache_size() == 1
    windows = np.diff(ends).tolist()
    assert windows == [int(ramp(step)) for step in range(len(windows))]
    assert len(set(windows)) > 2
    assert int(ga.stats(state).steps) == len(windows)
