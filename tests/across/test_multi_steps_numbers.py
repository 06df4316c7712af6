"""Numbers against NumPy in float64, weights, and faults in any place of a window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from helpers import (
    DROPS,
    SKIPS,
    bits,
    leaves_of,
    times_rate,
    train,
    updates_of,
)

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")

SGD, ADAM = optax.sgd(1.0), optax.adam(0.1)


def counts(state):
    """Steps, skipped micro-steps, skipped windows, micro-steps and fill."""
    s = ga.stats(state)
    assert int(s.skipped) == int(s.skipped_micro_steps) + int(s.skipped_windows)
    numbers = s.steps, s.skipped_micro_steps, s.skipped_windows, s.micro_steps, s.fill
    return tuple(map(int, numbers))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("weights", [None, [3.0, 17.0, 0.0, 256.0]])
def test_what_the_optimizer_sees_is_within_the_derived_bound(dtype, weights):
    rng, w = np.random.default_rng(1), weights or [1.0] * 4
    grads = [jnp.asarray(g, dtype) for g in rng.normal(size=(4, 301))]
    keeps = optax.GradientTransformation(
        lambda params: jnp.zeros(params.shape, jnp.float32),
        lambda updates, state, params=None: (updates, updates),
    )
    seen = updates_of(ga.MultiSteps(keeps, 4), grads, jnp.zeros(301, dtype), weights)
    updates, state = seen[-1]
    dtypes = updates.dtype, state.inner_opt_state.dtype  # float32, and back
    assert dtypes == (dtype, jnp.float32)
    exact = [np.asarray(g, np.float64) for g in grads]
    bound = oracle.sum_error_bound(grads, w, np.finfo(np.float32).eps / 2)
    mean = oracle.weighted_mean(exact, w)
    assert (np.abs(state.inner_opt_state - mean) <= bound).all()


@pytest.mark.grid(3)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("emit", ["counted", "static"])
def test_a_window_of_weight_zero_changes_nothing_and_is_counted(k, emit):
    tx = ga.MultiSteps(optax.adamw(0.1, weight_decay=0.1), k)
    emits = None if emit == "counted" else [False] * (k - 1) + [True]
    params, grads = jnp.array([1.0, 2.0]), [jnp.array([jnp.nan, 1.0])] * k
    after, state = train(tx, grads, params, [0.0] * k, emits)[-1]
    before = params, tx.init(params).inner_opt_state
    assert bits((after, state.inner_opt_state)) == bits(before)
    assert counts(state) == (0, 0, 1, k, 0)
    assert not ga.has_updated(state)


K = 4
GOOD = [jnp.array([float(i), -1.0, 2.0]) for i in range(2 * K)]
FAULTS = pytest.mark.parametrize(
    ("at", "bad"), [(0, np.nan), (1, np.inf), (2, -np.inf), (3, np.nan)]
)


def poison(at, bad):
    return [g.at[0].set(bad) if i == at else g for i, g in enumerate(GOOD)]


@FAULTS
def test_a_bad_micro_batch_stays_in_its_window(at, bad):
    grads, zeros = np.stack(poison(at, bad)), jnp.zeros(3)
    seen = updates_of(ga.MultiSteps(SGD, K), list(jnp.asarray(grads)), zeros)
    for i, (update, _) in enumerate(seen, 1):
        due = -grads[i - K : i].mean(0) if i % K == 0 else 0.0
        np.testing.assert_array_equal(update, due)


@FAULTS
def test_with_skip_not_finite_that_micro_step_never_happened(at, bad):
    tx, grads, params = ga.MultiSteps(ADAM, K, **SKIPS), poison(at, bad), jnp.zeros(3)
    ours = train(tx, grads, params)
    without = train(tx, grads[:at] + grads[at + 1 :], params)

    def kept(params, s):
        return bits((params, s.inner_opt_state, s.total, s.mini_step, s.weight))

    assert kept(*ours[-1]) == kept(*without[-1])
    assert not ga.has_updated(ours[at][1])
    assert bool(ours[at][1].skip_state["should_skip"])
    assert counts(ours[-1][1]) == (1, 1, 0, 2 * K - 1, K - 1)
    assert np.isfinite(ours[-1][0]).all()


@pytest.mark.grid(2, 8)
@FAULTS
@pytest.mark.parametrize("emit", ["counted", "static"])
def test_with_drop_window_that_window_never_happened_and_is_counted(at, bad, emit):
    tx, grads, params = ga.MultiSteps(ADAM, K, **DROPS), poison(at, bad), jnp.zeros(3)
    emits = None if emit == "counted" else ([False] * (K - 1) + [True]) * 2
    ours = train(tx, grads, params, emits=emits)
    without = train(tx, GOOD[K:], params, emits=emits and emits[K:])
    assert bits(ours[K - 1][0]) == bits(params)
    assert not ga.has_updated(ours[K - 1][1])
    assert bool(ours[K - 1][1].drop_state["should_skip"])
    assert bits(ours[-1][0]) == bits(without[-1][0])
    assert counts(ours[-1][1]) == (1, 0, 1, 2 * K, 0)


def test_a_window_of_complex_gradients_is_dropped_for_either_part():
    drop = ga.drop_window_if_not_finite
    for bad in (complex(np.inf, 0), complex(0, np.nan), complex(-np.inf, 0)):
        assert bool(drop({"a": jnp.array([1j, bad], jnp.complex64)}, 0, None)[0])
    for good in ({"a": jnp.ones(2, jnp.complex64), "b": ()}, {"a": jnp.zeros((0, 3))}):
        assert not bool(drop(good, 0, None)[0])


@pytest.mark.parametrize("skips", [False, True])
def test_any_function_may_drop_a_window_also_of_a_run_that_skips(skips):
    def large(updates, step, params):
        del params
        return updates[0] > 5, {"seen": updates[0], "step": step}

    options = {"should_drop_window_fn": large} | (SKIPS if skips else {})
    grads = [jnp.nan] * skips + [100.0, 1.0, 2.0, 4.0]
    tx, due = ga.MultiSteps(optax.sgd(0.1), 2, **options), {"seen": 3.0, "step": 0.0}
    _, state = train(tx, [jnp.array([g], float) for g in grads], jnp.ones(1))[-1]
    assert counts(state) == (1, skips, 1, 4, 0)
    # The mean, as the optimizer sees it, and the steps before it.
    assert {name: float(x) for name, x in state.drop_state.items()} == due


def test_what_a_function_keeps_has_the_dtype_that_it_began_with():
    def keeps(updates, step, params):
        del step, params
        return jnp.bool_(False), {"last": updates[0]}

    tx = ga.MultiSteps(SGD, 2, should_skip_update_fn=keeps)
    state = tx.init(jnp.ones(1))
    _, new = tx.update(jnp.full(1, 3, jnp.bfloat16), state, jnp.ones(1))
    assert bits(new.skip_state) == bits({"last": jnp.float32(3)})


def test_an_optimizer_that_takes_one_dtype_alone_sees_that_of_the_gradients():
    params, opt = jnp.ones(3, jnp.bfloat16), optax.novograd(0.1)
    grads = [params, 3 * params]
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    with pytest.raises((TypeError, ValueError)):  # the twin
        jax.jit(opt.update)(wide, opt.init(params), params)
    due, _ = opt.update(2 * params, opt.init(params), params)
    updates, _ = updates_of(ga.MultiSteps(opt, 2), grads, params)[-1]
    assert bits(updates) == bits(due)


@pytest.mark.grid(2)
@pytest.mark.parametrize("held", range(1, 5))
@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 2.0, 5.0]])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_flush_closes_with_the_mean_over_what_is_held(held, weights, jit):
    params, weights = jnp.array([1.0, 2.0, 3.0]), weights and weights[:held]
    tx, shorter = ga.MultiSteps(ADAM, 5), ga.MultiSteps(ADAM, held)
    still, state = train(tx, GOOD[:held], params, weights)[-1]
    assert bits(still) == bits(params)
    flush = functools.partial(ga.flush, tx)
    flush = jax.jit(flush) if jit else flush
    flushed, state = flush(state, still)
    expected, _ = train(shorter, GOOD[:held], params, weights)[-1]
    np.testing.assert_allclose(flushed, expected, rtol=1e-6)
    assert ga.has_updated(state)
    assert counts(state) == (1, 0, 0, held, 0)
    # And the next window is clean.
    _, state = train(tx, GOOD[:1], flushed, state=state)[-1]
    assert bits(state.total) == bits(GOOD[0])
    assert float(ga.stats(state).weight) == 1


@pytest.mark.parametrize("micro_steps", [0, 2, 4])
@pytest.mark.parametrize("k", [1, 2])
def test_flushing_an_empty_window_changes_no_bit(micro_steps, k):
    tx, params = ga.MultiSteps(optax.adamw(0.1), k), jnp.array([1.0, 2.0, 3.0])
    seen = train(tx, GOOD[:micro_steps], params) or [(params, tx.init(params))]
    params, state = seen[-1]
    for flush in (ga.flush, jax.jit(ga.flush, static_argnums=0)):
        assert bits(flush(tx, state, params)) == bits((params, state))


def test_flush_drops_a_window_that_is_not_finite():
    tx = ga.MultiSteps(SGD, 4, **DROPS)
    params, state = train(tx, poison(1, np.nan)[:3], jnp.zeros(3))[-1]
    params, state = ga.flush(tx, state, params)
    assert (params.any(), counts(state)) == (False, (0, 0, 1, 3, 0))


@pytest.mark.parametrize("weights", [None, [2.0, 1.0, 4.0] * 2])
def test_whoever_counts_windows_end_with_the_same_bits(weights):
    """A state that counts, a static emit, and a traced one of a k not asked for."""
    params, grads = jnp.array([1.0, 2.0, 3.0]), GOOD[:6]
    thirds, longer = [False, False, True] * 2, [False] * 3 + [True, False, True]
    counted = train(ga.MultiSteps(ADAM, 3), grads, params, weights)
    static = train(ga.MultiSteps(ADAM, 3), grads, params, weights, thirds)
    assert bits(counted) == bits(static)
    uneven = train(ga.MultiSteps(ADAM, 2), grads, params, weights, longer)
    assert bits(uneven[-1][0]) != bits(static[-1][0])  # the twin
    traced = train(ga.MultiSteps(ADAM, 2), grads, params, weights, jnp.array(longer))
    assert bits(traced) == bits(uneven)
    assert [bool(ga.has_updated(state)) for _, state in traced] == longer


@pytest.mark.parametrize("emit", [True, False, (True, False)], ids=str)
def test_members_of_an_ensemble_are_as_by_themselves_and_have_a_derivative(emit):
    tx, grads, params = ga.MultiSteps(SGD, 2), jnp.stack(GOOD[1:3]), jnp.ones((2, 3))
    states, emits = jax.vmap(tx.init)(params), jnp.broadcast_to(jnp.array(emit), 2)

    def step(g, state, p, own):
        own = own if isinstance(emit, tuple) else emit  # traced, or static
        return ga.apply_gradients(tx, g, state, p, emit=own, weight=2.0)

    def total(grads):
        new, after = jax.vmap(step)(grads, states, params, emits)
        return jnp.sum(new), (new, after)

    slopes, got = jax.jit(jax.grad(total, has_aux=True))(grads)
    for i, member in enumerate(emits):
        due = train(tx, [grads[i]], params[i], [2.0], [bool(member)])[-1]
        assert bits(jax.tree.map(lambda x, i=i: x[i], got)) == bits(due)
        np.testing.assert_array_equal(slopes[i], -float(member))
    np.testing.assert_array_equal(ga.stats(got[1]).weight, 2.0 * ~emits)


@pytest.mark.parametrize(("before", "after"), [(8, 3), (8, 1), (2, 5)])
def test_a_state_restored_with_another_k_closes_its_window_sensibly(before, after):
    params, held = jnp.zeros(3), before - 1
    _, state = train(ga.MultiSteps(SGD, before), GOOD[:held], params)[-1]
    new, closes_after = ga.MultiSteps(SGD, after), max(after - held, 1)
    seen = train(new, GOOD[held : held + closes_after], params, state=state)
    emitted = [bool(ga.has_updated(state)) for _, state in seen]
    assert emitted == [False] * (closes_after - 1) + [True]
    params, state = seen[-1]
    expected = -np.mean(np.stack(GOOD[: held + closes_after]), 0)
    np.testing.assert_allclose(params, expected, rtol=1e-6)
    assert int(state.mini_step) == 0


@pytest.mark.parametrize("k", [1, 2])
def test_a_state_restored_as_numpy_arrays_gives_the_same_bits(k):
    params, tx = jnp.ones(3, jnp.bfloat16), ga.MultiSteps(ADAM, k)
    *first, last = (x.astype(params.dtype) for x in GOOD[1 : 1 + 2 * k])
    params, state = train(tx, first, params)[-1]
    restored = jax.tree.map(np.asarray, (state, params))
    due = ga.apply_gradients(tx, last, state, params)
    assert bits(ga.apply_gradients(tx, last, *restored)) == bits(due)


@pytest.mark.parametrize(
    ("dtype", "k"),
    [
        (jnp.int8, 127),  # the most of it
        (jnp.uint8, 127),
        (jnp.bfloat16, 300),  # 299 is 300 in it
        (jnp.float16, 2052),  # 2,051 is 2,052 in it
        (float, 1.5),
    ],
)
def test_a_narrow_schedule_closes_the_window_when_it_is_full(dtype, k):
    def schedule(step):
        return k if dtype is float else jnp.full_like(step, k, dtype)

    tx, one, before = ga.MultiSteps(SGD, schedule), jnp.ones(1), np.ceil(k) - 2
    of_before = {"mini_step": jnp.int32(before), "weight": jnp.float32(before)}
    state = tx.init(one)._replace(**of_before)
    seen = train(tx, [one, one], one, state=state)
    assert [bool(ga.has_updated(state)) for _, state in seen] == [False, True]


GRADS, RATES = (2.0, 6.0, np.nan, 4.0), (1.0, 3.0, np.nan, 2.0)


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (3, 1, 5, 4)])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("flushed", [False, True])
def test_the_optimizer_sees_the_mean_of_an_extra_argument(weights, mean, flushed):
    def run(**options):
        k, options = 5 if flushed else 3, SKIPS | options
        tx = ga.MultiSteps(times_rate(), k, use_grad_mean=mean, **options)
        params, step = jnp.zeros(1), jax.jit(functools.partial(ga.apply_gradients, tx))
        state = tx.init(params)
        for g, rate, w in zip(GRADS, RATES, weights, strict=True):
            params, state = step(jnp.array([g]), state, params, weight=w, rate=rate)
        if flushed:
            rest = {} if "mean_argnames" in options else {"rate": RATES[-1]}
            params, state = ga.flush(tx, state, params, **rest)
        return params, state

    kept = [0, 1, 3]  # the micro-step that was skipped has no part in it
    w, g, rate = (np.array(x, float)[kept] for x in (weights, GRADS, RATES))
    seen, mean_rate = np.sum(w * g) / (np.sum(w) if mean else 1), np.sum(w * rate)
    mean_rate /= np.sum(w)
    params, state = run(mean_argnames="rate")
    np.testing.assert_allclose(params, [-seen * mean_rate], rtol=1e-6)
    np.testing.assert_allclose(state.arg_totals["rate"], mean_rate, rtol=1e-6)
    # The twin: without it the last one is seen.
    params, _ = run()
    np.testing.assert_allclose(params, [-seen * RATES[-1]], rtol=1e-6)
    assert abs(mean_rate - RATES[-1]) > 0.01 or weights == (1, 1, 1, 1)


TREES = {
    "empty": {},
    "None": None,
    "None leaf": {"a": None, "b": jnp.ones(2)},
    "scalar": jnp.float32(1.0),
    "0-sized": {"empty": jnp.zeros((0, 4)), "scalar": jnp.float32(1.0)},
    "nested": [jnp.ones((2, 2), jnp.bfloat16), (jnp.ones(3),)],
    "complex": {"z": jnp.ones(2, jnp.complex64)},
}


@pytest.mark.grid(7)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("options", [{}, DROPS], ids=["", "drops"])
def test_any_tree_of_parameters_works(name, k, options):
    params, tx = TREES[name], ga.MultiSteps(optax.sgd(0.5), k, **options)
    after, state = train(tx, [params] * k, params)[-1]
    assert jax.tree.structure(after) == jax.tree.structure(params)
    for a, p in leaves_of(after, params):
        assert a.dtype == p.dtype
        np.testing.assert_array_equal(a, 0.5 * p)
    assert ga.has_updated(state)


@pytest.mark.quick
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_the_norm_of_a_window_is_that_of_what_the_optimizer_saw(k, clip):
    inner = optax.chain(optax.clip_by_global_norm(1e-3), SGD) if clip else SGD
    tx, rng = ga.MultiSteps(inner, k, track_norm=True), np.random.default_rng(0)
    params = {"a": jnp.zeros(15), "b": jnp.zeros(4, jnp.complex64)}
    assert float(ga.grad_norm(tx.init(params))) == 0
    flat = rng.normal(size=(6, 19)) + 1j * rng.normal(size=(6, 19))
    flat[:, :15] = flat[:, :15].real
    grads = [{"a": x[:15].real, "b": x[15:]} for x in flat.astype(np.complex64)]
    seen = train(tx, grads, params)
    norms = [float(ga.grad_norm(state)) for _, state in seen]
    for i, norm in enumerate(norms):
        if (i + 1) % k:
            assert norm == (norms[i - 1] if i else 0)
            continue
        due = np.linalg.norm(flat[i - k + 1 : i + 1].mean(0))
        # A sum of 23 squares, each rounded, of means of k numbers, and a root.
        assert abs(norm - due) <= (23 + k + 3) * np.finfo(np.float32).eps * due
        assert abs(norm - np.linalg.norm(flat[i])) > 1e-3 or k == 1  # the twin
