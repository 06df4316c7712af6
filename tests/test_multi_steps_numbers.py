"""Numbers against NumPy in float64, weights, and faults in any place of a window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from helpers import mean_of

import ga_optax as ga
from ga_optax import accumulator

pytestmark = pytest.mark.usefixtures("optax_promotion")


def apply_all(tx, grads, params, *, weights=None, emits=None):
    """Micro-steps through apply_gradients; returns (params, state) after each."""
    state = tx.init(params)
    step = jax.jit(functools.partial(ga.apply_gradients, tx), static_argnames="emit")
    seen = []
    for i, g in enumerate(grads):
        kwargs = {} if weights is None else {"weight": weights[i]}
        if emits is not None:
            kwargs["emit"] = emits[i]
        params, state = step(g, state, params, **kwargs)
        seen.append((params, state))
    return seen


def update_all(tx, grads, params, *, weights=None):
    """Micro-steps through update; returns (updates, state) after each."""
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for i, g in enumerate(grads):
        kwargs = {} if weights is None else {"weight": weights[i]}
        updates, state = update(g, state, params, **kwargs)
        params = optax.apply_updates(params, updates)
        seen.append((updates, state))
    return seen


# -- Against the oracle ----------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [3, 17, 0, 256], [0.25, 0.5, 1.75, 8.125]])
def test_in_float64_a_run_agrees_with_the_oracle_to_twelve_digits(weights):
    rng, k = np.random.default_rng(0), 4
    schedule = lambda t: 0.1 / (1 + t)  # noqa: E731
    start, grads = rng.normal(size=5), rng.normal(size=(3 * k, 5))
    reference = oracle.Adam(start, schedule)
    w = weights or [1] * k
    for window in range(3):
        reference.step(oracle.weighted_mean(grads[k * window :][:k], w))

    with jax.enable_x64(True):
        tx = ga.MultiSteps(optax.adam(schedule), k)
        repeated = None if weights is None else [float(x) for x in weights] * 3
        params, state = apply_all(
            tx, jnp.asarray(grads), jnp.asarray(start), weights=repeated
        )[-1]
        assert params.dtype == jnp.float64
        assert int(ga.stats(state).steps) == 3
        np.testing.assert_allclose(params, reference.p, rtol=1e-12)

    # The twin: one micro-batch dropped from the last window.
    wrong = oracle.Adam(start, schedule)
    for window in range(3):
        n = k - (window == 2)
        wrong.step(oracle.weighted_mean(grads[k * window :][:n], w[:n]))
    assert np.abs(wrong.p - reference.p).max() > 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("weights", [None, [3.0, 17.0, 0.0, 256.0]])
def test_what_the_optimizer_sees_is_within_the_derived_bound(dtype, weights):
    rng = np.random.default_rng(1)
    grads = [jnp.asarray(g, dtype) for g in rng.normal(size=(4, 301))]
    keeps = optax.GradientTransformation(
        lambda params: jnp.zeros(params.shape, jnp.float32),
        lambda updates, state, params=None: (updates, updates),
    )
    tx = ga.MultiSteps(keeps, 4)
    state = update_all(tx, grads, jnp.zeros(301, dtype), weights=weights)[-1][1]
    assert state.inner_opt_state.dtype == jnp.float32
    seen = np.asarray(state.inner_opt_state, np.float64)
    w = weights or [1.0] * 4
    exact = oracle.weighted_mean([np.asarray(g, np.float64) for g in grads], w)
    bound = oracle.sum_error_bound(grads, w, np.finfo(np.float32).eps / 2)
    assert (np.abs(seen - exact) <= bound).all()
    # The twin: Optax's mean over three, and the mean of means.
    for wrong in ([*w[:3], 0.0], [1.0] * 4 if weights else [1.0, 2.0, 1.0, 1.0]):
        off = oracle.weighted_mean([np.asarray(g, np.float64) for g in grads], wrong)
        assert not (np.abs(seen - off) <= bound).all()


@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [2, 3, 4, 7, 41])
def test_integer_gradients_give_the_bits_of_the_single_batch(k):
    # Σ over n·k examples of integers, divided once by each of the two: the loss that is
    # a mean over micro-batches of equal sums.
    rng = np.random.default_rng(k)
    grads = rng.integers(-512, 512, (k, 64)).astype(np.float32) * k
    single = jnp.asarray(grads.sum(0) / k)  # an integer: exact
    params = jnp.asarray(rng.normal(size=64), jnp.float32)
    big = apply_all(ga.MultiSteps(optax.adam(1e-2), 1), [single] * 3, params)
    tx = ga.MultiSteps(optax.adam(1e-2), k)
    ours = apply_all(tx, list(jnp.asarray(grads)) * 3, params)
    np.testing.assert_array_equal(ours[-1][0], big[-1][0])
    # The twin: Optax's running mean rounds in every micro-step.
    if k == 41:
        theirs = optax.MultiSteps(optax.sgd(1.0), k)
        state = theirs.init(params)
        for g in jnp.asarray(grads):
            updates, state = jax.jit(theirs.update)(g, state, params)
        assert (np.asarray(-updates) != np.asarray(single)).any()


def test_4096_ones_in_bfloat16_sum_to_4096():
    one = jnp.ones(3, jnp.bfloat16)
    tx = ga.MultiSteps(optax.sgd(1.0), 4096, use_grad_mean=False)

    def body(state, _):
        updates, state = tx.update(one, state, one)
        return state, updates

    state, updates = jax.jit(lambda s: jax.lax.scan(body, s, None, length=4096))(
        tx.init(one)
    )
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(updates[-1], np.float32), -4096.0)
    np.testing.assert_array_equal(np.asarray(updates[:-1], np.float32), 0.0)
    # The twin: in bfloat16 the sum stops at 256.
    low = ga.MultiSteps(optax.sgd(1.0), 4096, False, None, jnp.bfloat16)
    state = low.init(one)
    step = jax.jit(low.update)
    for _ in range(300):
        _, state = step(one, state, one)
    np.testing.assert_array_equal(np.asarray(state.total, np.float32), 256.0)


def test_the_inner_optimizer_sees_float32_of_bfloat16_gradients():
    seen = []

    def spy(updates, state, params=None):
        del params
        seen.append(updates.dtype)
        return updates, state

    tx = ga.MultiSteps(optax.GradientTransformation(optax.init_empty_state, spy), 2)
    g = jnp.ones(2, jnp.bfloat16)
    updates, _ = tx.update(g, tx.init(g), g)
    assert jnp.float32 in seen
    assert updates.dtype == jnp.bfloat16


# -- Weights ---------------------------------------------------------------------------


def token_problem():
    """A linear model with a token-masked mean loss over rows of unequal length."""
    rng = np.random.default_rng(0)
    counts = [3, 17, 0, 256]
    x = jnp.asarray(rng.normal(size=(4, 256, 6)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(4, 256)), jnp.float32)
    mask = jnp.arange(256)[None] < jnp.array(counts)[:, None]

    def loss(p, x, y, mask):
        error = jnp.where(mask, jnp.square(x @ p - y), 0.0)
        return jnp.sum(error) / jnp.maximum(jnp.sum(mask), 1)

    return counts, x, y, mask, loss, jnp.asarray(rng.normal(size=6), jnp.float32)


def test_token_counts_as_weights_give_the_undivided_batch():
    counts, x, y, mask, loss, p = token_problem()
    grads = [jax.grad(loss)(p, x[i], y[i], mask[i]) for i in range(4)]
    undivided = jax.grad(loss)(p, x, y, mask)
    tx = ga.MultiSteps(optax.sgd(1.0), 4)

    def error(weights):
        params, state = apply_all(tx, grads, p, weights=weights)[-1]
        assert int(ga.stats(state).steps) == 1
        return np.abs(np.asarray(p - params) - np.asarray(undivided)).max()

    # 276 terms of at most `largest`: 2 (n + 1) eps Σ|terms| / n, and the update's own.
    largest = float(jnp.abs(x).max() ** 2 * 60)
    bound = 2 * 277 * np.finfo(np.float32).eps / 2 * largest
    assert error([float(n) for n in counts]) < bound
    assert error([n / 276 for n in counts]) < bound  # fractions of the window
    # The twin: the mean of means.
    assert error(None) > 10 * bound


@pytest.mark.grid(5)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("emit", ["counted", "static"])
def test_a_window_of_weight_zero_changes_nothing_and_is_counted(k, emit):
    tx = ga.MultiSteps(optax.adamw(0.1, weight_decay=0.1), k)
    grads = [jnp.array([jnp.nan, 1.0])] * k
    emits = None if emit == "counted" else [False] * (k - 1) + [True]
    params = jnp.array([1.0, 2.0])
    before = tx.init(params)
    after, state = apply_all(tx, grads, params, weights=[0.0] * k, emits=emits)[-1]
    np.testing.assert_array_equal(after, params)
    for a, b in zip(
        *map(jax.tree.leaves, (state.inner_opt_state, before.inner_opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    stats = ga.stats(state)
    assert (int(stats.steps), int(stats.skipped_windows), int(stats.fill)) == (0, 1, 0)
    assert not ga.has_updated(state)
    # The twin: with a weight the same window is a step.
    moved, _ = apply_all(tx, grads, params, weights=[1.0] * k, emits=emits)[-1]
    assert (np.asarray(moved) != np.asarray(params)).any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("weight", [-1.0, -1, np.nan])
def test_a_traced_weight_that_is_none_makes_its_window_nan(weight):
    w, x = jnp.ones(2), jnp.ones((4, 2))

    @jax.jit
    def inside(weight):
        def loss(w, x):
            return jnp.sum(jnp.mean(x, 0) * w)

        return mean_of(loss, 2, weight_fn=lambda x: weight)(w, x)

    @jax.jit
    def added(weight):
        acc = accumulator.add(accumulator.init(w), w, 2.0)
        return accumulator.mean(accumulator.add(acc, w, weight))

    def across(weight, **options):
        tx = ga.MultiSteps(optax.sgd(1.0), 2, **options)
        weights = [jnp.asarray(2, jnp.result_type(weight)), weight]
        applied, updated = apply_all(tx, [w, w], w, weights=weights)[-1], None
        if not options:
            updated = update_all(tx, [w, w], w, weights=weights)[-1][0]
        return applied[0], updated, ga.stats(applied[1]).skipped_windows

    for way in (inside, added, lambda weight: across(weight)[:2]):
        for leaf in jax.tree.leaves(way(jnp.asarray(weight))):
            assert jnp.isnan(leaf).all()
        for leaf in jax.tree.leaves(way(jnp.zeros_like(weight))):  # the twin
            assert jnp.isfinite(leaf).all()
    drop = {"should_drop_window_fn": ga.drop_window_if_not_finite}
    params, _, dropped = across(jnp.asarray(weight), **drop)
    np.testing.assert_array_equal(params, w)
    assert dropped == 1


# -- Faults ----------------------------------------------------------------------------

K = 4
GOOD = [jnp.array([float(i), -1.0, 2.0]) for i in range(2 * K)]


def poison(at, bad):
    return [g.at[0].set(bad) if i == at else g for i, g in enumerate(GOOD)]


@pytest.mark.grid(1, 5)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", range(K))
def test_a_bad_micro_batch_stays_in_its_window(at, bad):
    params = jnp.zeros(3)
    tx = ga.MultiSteps(optax.sgd(1.0), K)
    seen = update_all(tx, poison(at, bad), params)
    for i in (*range(K - 1), *range(K, 2 * K - 1)):
        np.testing.assert_array_equal(seen[i][0], 0.0)
    # That window's emit is what the undivided batch gives.
    expected = -np.mean(np.stack(poison(at, bad)[:K]), 0)
    np.testing.assert_array_equal(seen[K - 1][0], expected)
    # The next one is clean.
    np.testing.assert_array_equal(seen[-1][0], -np.mean(np.stack(GOOD[K:]), 0))
    # The twin: Optax emits NaN inside the window, for ever after.
    theirs = optax.MultiSteps(optax.sgd(1.0), K)
    state = theirs.init(params)
    for g in poison(at, bad):
        updates, state = theirs.update(g, state, params)
    assert np.isnan(np.asarray(updates)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", range(K))
def test_with_skip_not_finite_that_micro_step_never_happened(at, bad):
    kwargs = {"should_skip_update_fn": optax.skip_not_finite}
    params = jnp.zeros(3)
    tx = ga.MultiSteps(optax.adam(0.1), K, **kwargs)
    grads = poison(at, bad)
    ours = apply_all(tx, grads, params)
    without = apply_all(tx, grads[:at] + grads[at + 1 :], params)
    # Parameters and inner state have the bits of the run without that micro-batch.
    np.testing.assert_array_equal(ours[-1][0], without[-1][0])
    a, b = ours[-1][1], without[-1][1]
    for x, y in zip(
        jax.tree.leaves((a.inner_opt_state, a.total, a.mini_step, a.weight)),
        jax.tree.leaves((b.inner_opt_state, b.total, b.mini_step, b.weight)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
    assert not ga.has_updated(ours[at][1])
    stats = ga.stats(a)
    assert int(stats.skipped_micro_steps) == int(stats.skipped) == 1
    assert int(stats.micro_steps) == 2 * K - 1
    assert np.isfinite(ours[-1][0]).all()


@pytest.mark.grid(1, 7)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", range(K))
@pytest.mark.parametrize("emit", ["counted", "static"])
def test_with_drop_window_that_window_never_happened_and_is_counted(at, bad, emit):
    params = jnp.zeros(3)
    tx = ga.MultiSteps(
        optax.adam(0.1), K, should_drop_window_fn=ga.drop_window_if_not_finite
    )
    emits = None if emit == "counted" else ([False] * (K - 1) + [True]) * 2
    ours = apply_all(tx, poison(at, bad), params, emits=emits)
    without = apply_all(tx, GOOD[K:], params, emits=emits and emits[K:])
    np.testing.assert_array_equal(ours[K - 1][0], params)
    assert not ga.has_updated(ours[K - 1][1])
    assert bool(ours[K - 1][1].drop_state["should_skip"])
    np.testing.assert_array_equal(ours[-1][0], without[-1][0])
    stats = ga.stats(ours[-1][1])
    assert (int(stats.steps), int(stats.skipped_windows)) == (1, 1)
    assert int(stats.skipped) == 1
    assert int(stats.micro_steps) == 2 * K
    # The twin: without the function the fault reaches the parameters.
    assert not np.isfinite(
        apply_all(ga.MultiSteps(optax.adam(0.1), K), poison(at, bad), params)[-1][0]
    ).all()


def test_a_window_of_complex_gradients_is_dropped_for_either_part():
    skip = ga.drop_window_if_not_finite
    for bad in (complex(np.inf, 0), complex(0, np.nan)):
        assert bool(skip({"a": jnp.array([1j, bad], jnp.complex64)}, 0, None)[0])
    assert not bool(skip({"a": jnp.ones(2, jnp.complex64), "b": ()}, 0, None)[0])
    assert not bool(skip({"a": jnp.zeros((0, 3))}, 0, None)[0])


# -- flush, emit, k that changes -------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("held", range(1, 5))
@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 2.0, 5.0]])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_flush_closes_with_the_mean_over_what_is_held(held, weights, jit):
    params = jnp.array([1.0, 2.0, 3.0])
    weights = weights and weights[:held]
    tx = ga.MultiSteps(optax.adam(0.1), 5)
    open_params, state = apply_all(tx, GOOD[:held], params, weights=weights)[-1]
    np.testing.assert_array_equal(open_params, params)
    flush = functools.partial(ga.flush, tx)
    flushed, state = (jax.jit(flush) if jit else flush)(state, open_params)
    shorter = ga.MultiSteps(optax.adam(0.1), held)
    expected, _ = apply_all(shorter, GOOD[:held], params, weights=weights)[-1]
    np.testing.assert_allclose(flushed, expected, rtol=1e-6)
    assert ga.has_updated(state)
    stats = ga.stats(state)
    assert (int(stats.steps), int(stats.fill), float(stats.weight)) == (1, 0, 0)
    # And the next window is clean.
    again, _ = ga.flush(tx, *ga.apply_gradients(tx, GOOD[0], state, flushed)[::-1])
    assert np.isfinite(again).all()
    seen = jax.jit(tx.update)(GOOD[0], state, flushed)[1].total
    np.testing.assert_array_equal(seen, GOOD[0])


@pytest.mark.parametrize("micro_steps", [0, 2, 4])
def test_flushing_an_empty_window_changes_no_bit(micro_steps):
    tx = ga.MultiSteps(optax.adamw(0.1), 2)
    params = jnp.array([1.0, 2.0, 3.0])
    state = tx.init(params)
    if micro_steps:
        params, state = apply_all(tx, GOOD[:micro_steps], params)[-1]
    for flush in (ga.flush, jax.jit(ga.flush, static_argnums=0)):
        after = flush(tx, state, params)
        for a, b in zip(*map(jax.tree.leaves, (after, (params, state))), strict=True):
            np.testing.assert_array_equal(a, b)


def test_flushing_a_window_that_is_never_open_changes_nothing():
    tx = ga.MultiSteps(optax.sgd(1.0), 1)
    params, state = jnp.ones(3), tx.init(jnp.ones(3))
    assert ga.flush(tx, state, params) == (params, state)


def test_flush_drops_a_window_that_is_not_finite():
    tx = ga.MultiSteps(
        optax.sgd(1.0), 4, should_drop_window_fn=ga.drop_window_if_not_finite
    )
    params = jnp.zeros(3)
    params, state = apply_all(tx, poison(1, np.nan)[:3], params)[-1]
    params, state = ga.flush(tx, state, params)
    np.testing.assert_array_equal(params, 0.0)
    assert int(ga.stats(state).skipped_windows) == 1
    assert int(ga.stats(state).fill) == 0


@pytest.mark.parametrize("weights", [None, [2.0, 1.0, 4.0] * 2])
def test_a_host_loop_that_counts_gives_the_bits_of_the_state_that_counts(weights):
    params = jnp.array([1.0, 2.0, 3.0])
    tx = ga.MultiSteps(optax.adam(0.1), 3)
    counted = apply_all(tx, GOOD[:6], params, weights=weights)
    static = apply_all(
        tx, GOOD[:6], params, weights=weights, emits=[False, False, True] * 2
    )
    for a, b in zip(*map(jax.tree.leaves, (counted, static)), strict=True):
        np.testing.assert_array_equal(a, b)
    # The twin: a window one micro-batch longer.
    longer = apply_all(
        tx, GOOD[:6], params, weights=weights, emits=[False] * 3 + [True, False, True]
    )
    assert (np.asarray(longer[-1][0]) != np.asarray(static[-1][0])).any()


@pytest.mark.parametrize("weights", [None, [2.0, 1.0, 4.0] * 2])
def test_a_traced_emit_ends_windows_where_a_static_one_does(weights):
    params = jnp.array([1.0, 2.0, 3.0])
    tx = ga.MultiSteps(optax.adam(0.1), 2)  # a k that is not asked for
    emits = [False, False, False, True, True, False]
    static = apply_all(tx, GOOD[:6], params, weights=weights, emits=emits)

    state, traced = tx.init(params), []
    step = jax.jit(functools.partial(ga.apply_gradients, tx))
    for i, g in enumerate(GOOD[:6]):
        kwargs = {} if weights is None else {"weight": weights[i]}
        params, state = step(g, state, params, emit=jnp.array(emits[i]), **kwargs)
        traced.append((params, state))
    for a, b in zip(*map(jax.tree.leaves, (traced, static)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [bool(ga.has_updated(state)) for _, state in traced] == emits
    # The twin: windows as k has them.
    counted = apply_all(tx, GOOD[:6], GOOD[0], weights=weights)
    assert [bool(ga.has_updated(s)) for _, s in counted] != emits
    one = ga.MultiSteps(optax.sgd(0.1), 1)  # it has nothing to hold a window in
    with pytest.raises(ValueError, match="must hold an accumulator"):
        ga.apply_gradients(one, g, one.init(g), g, emit=jnp.array(True))


# -- The mean of extra arguments -------------------------------------------------------


def times_rate():
    """An optimizer that returns minus the gradient times the extra argument `rate`."""

    def update(updates, state, params=None, *, rate, **extra_args):
        del params, extra_args
        return jax.tree.map(lambda g: -g * rate, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


GRADS, RATES = (2.0, 6.0, np.nan, 4.0), (1.0, 3.0, np.nan, 2.0)


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (3, 1, 5, 4)])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("flushed", [False, True])
def test_the_optimizer_sees_the_mean_of_an_extra_argument(weights, mean, flushed):
    def train(**options):
        tx = ga.MultiSteps(
            times_rate(), 5 if flushed else 3, mean, optax.skip_not_finite, **options
        )
        params = jnp.zeros(1)
        state = tx.init(params)
        step = jax.jit(functools.partial(ga.apply_gradients, tx))
        for g, rate, w in zip(GRADS, RATES, weights, strict=True):
            params, state = step(jnp.array([g]), state, params, weight=w, rate=rate)
        if flushed:
            rest = {} if options else {"rate": RATES[-1]}
            params, state = jax.jit(functools.partial(ga.flush, tx))(
                state, params, **rest
            )
        return params, state

    kept = [0, 1, 3]  # the micro-step that was skipped has no part in it
    w, g, rate = (np.array(x, float)[kept] for x in (weights, GRADS, RATES))
    total, mean_rate = np.sum(w * g), np.sum(w * rate) / np.sum(w)
    seen = total / np.sum(w) if mean else total
    params, state = train(mean_argnames="rate")
    np.testing.assert_allclose(params, [-seen * mean_rate], rtol=1e-6)
    np.testing.assert_allclose(state.arg_totals["rate"], mean_rate, rtol=1e-6)
    # The twin: without it the last one is seen.
    params, _ = train()
    np.testing.assert_allclose(params, [-seen * RATES[-1]], rtol=1e-6)
    assert abs(mean_rate - RATES[-1]) > 0.01 or weights == (1, 1, 1, 1)


def test_the_mean_of_one_extra_argument_is_that_one():
    tx = ga.MultiSteps(times_rate(), 1, mean_argnames=("rate",))
    params, state = jnp.zeros(1), tx.init(jnp.zeros(1))
    for rate in (0.5, 3.0):
        params, state = ga.apply_gradients(tx, jnp.ones(1), state, params, rate=rate)
        assert float(state.arg_totals["rate"]) == rate
    assert float(params[0]) == -3.5


@pytest.mark.parametrize("emit", [True, False, None])
def test_vmap_and_reverse_mode_go_through_a_static_emit(emit):
    tx = ga.MultiSteps(optax.adam(0.1), 1 if emit is None else 2)
    params = jnp.ones((2, 3))
    state = jax.vmap(tx.init)(params)
    step = functools.partial(ga.apply_gradients, tx, emit=emit)

    def loss(grads):
        after, _ = jax.vmap(step)(grads, state, params)
        return jnp.sum(after)

    slope = jax.jit(jax.grad(loss))(jnp.ones((2, 3)))
    assert np.isfinite(slope).all()


@pytest.mark.parametrize(("before", "after"), [(8, 3), (8, 1), (2, 5)])
def test_a_state_restored_with_another_k_closes_its_window_sensibly(before, after):
    params = jnp.zeros(3)
    held = before - 1
    old = ga.MultiSteps(optax.sgd(1.0), before)
    _, state = apply_all(old, GOOD[:held], params)[-1]
    new = ga.MultiSteps(optax.sgd(1.0), after)
    closes_after = max(after - held, 1)
    for i, g in enumerate(GOOD[held : held + closes_after]):
        updates, state = jax.jit(new.update)(g, state, params)
        assert bool(ga.has_updated(state)) == (i + 1 == closes_after)
    expected = -np.mean(np.stack(GOOD[: held + closes_after]), 0)
    np.testing.assert_allclose(updates, expected, rtol=1e-6)
    assert int(state.mini_step) == 0


def test_a_schedule_of_k_is_read_once_a_window():
    tx = ga.MultiSteps(optax.sgd(1.0), lambda step: jnp.where(step < 2, 1, 3))
    seen = [bool(ga.has_updated(s)) for _, s in apply_all(tx, GOOD, jnp.zeros(3))]
    assert seen == [True, True, False, False, True, False, False, True]


# -- Trees -----------------------------------------------------------------------------


@pytest.mark.grid(10)
@pytest.mark.parametrize(
    "params",
    [
        {},
        None,
        {"a": None, "b": jnp.ones(2)},
        jnp.float32(1.0),
        {"empty": jnp.zeros((0, 4)), "scalar": jnp.float32(1.0)},
        [jnp.ones((2, 2), jnp.bfloat16), (jnp.ones(3),)],
        {"z": jnp.ones(2, jnp.complex64)},
    ],
    ids=["empty", "None", "None leaf", "scalar", "0-sized", "nested", "complex"],
)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("skip", [None, ga.drop_window_if_not_finite])
def test_any_tree_of_parameters_works(params, k, skip):
    tx = ga.MultiSteps(optax.sgd(0.5), k, should_drop_window_fn=skip)
    state = tx.init(params)
    after = params
    for _ in range(k):
        after, state = jax.jit(functools.partial(ga.apply_gradients, tx))(
            params, state, after
        )
    assert jax.tree.structure(after) == jax.tree.structure(params)
    for a, p in zip(*map(jax.tree.leaves, (after, params)), strict=True):
        assert a.dtype == p.dtype
        np.testing.assert_array_equal(a, 0.5 * p)
    assert ga.has_updated(state)


# -- The norm of the gradient ----------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_the_norm_of_a_window_is_that_of_what_the_optimizer_saw(k, clip):
    inner = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1))
    tx = ga.MultiSteps(inner if clip else optax.sgd(0.1), k, track_norm=True)
    rng = np.random.default_rng(0)
    params = {"a": jnp.zeros((5, 3)), "b": jnp.zeros(4)}
    state, seen = tx.init(params), []
    step = jax.jit(functools.partial(ga.apply_gradients, tx))
    assert float(ga.grad_norm(state)) == 0
    for _ in range(2 * k):
        grads = {name: rng.normal(size=p.shape) for name, p in params.items()}
        seen = [*seen, np.concatenate([grads[n].ravel() for n in ("a", "b")])]
        before = ga.grad_norm(state)
        params, state = step(jax.tree.map(jnp.float32, grads), state, params)
        norm = float(ga.grad_norm(state))
        if not ga.has_updated(state):
            assert norm == before
            continue
        due = np.linalg.norm(np.mean(seen, axis=0))
        # A sum of 19 squares, each rounded, of means of k numbers, and a root.
        assert abs(norm - due) <= (19 + k + 3) * np.finfo(np.float32).eps * due
        assert abs(norm - np.linalg.norm(seen[-1])) > 1e-3 or k == 1  # the twin
        seen = []


@pytest.mark.quick
def test_a_window_without_a_step_keeps_the_norm_and_without_track_norm_there_is_none():
    drop = ga.drop_window_if_not_finite
    options = {"should_drop_window_fn": drop, "track_norm": True}
    tx = ga.MultiSteps(optax.sgd(0.1), 1, **options)
    params, state = jnp.zeros(2), tx.init(jnp.zeros(2))
    for grads in (jnp.array([3.0, 4.0]), jnp.array([jnp.nan, 0.0])):
        params, state = ga.apply_gradients(tx, grads, state, params)
    assert float(ga.grad_norm(state)) == 5
    plain = ga.MultiSteps(optax.sgd(0.1), 2)
    with pytest.raises(ValueError, match="track_norm=True"):
        ga.grad_norm(plain.init(params))

    def program(tx):
        return str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))

    assert "sqrt" not in program(plain)  # nothing in the program, either
    assert "sqrt" in program(ga.MultiSteps(optax.sgd(0.1), 2, track_norm=True))
    with pytest.raises(ValueError, match="_replace\\(grad_norm="):
        tx.update(params, plain.init(params), params)
    with pytest.raises(TypeError, match="track_norm must be a Python bool"):
        ga.MultiSteps(optax.sgd(0.1), 2, track_norm=1)
