"""The gradient noise scale: unbiased, within its error, free where it is off."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax import testing
from ga_optax._across import noise_scale

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

FROZEN = optax.sgd(0.0)


def run(tx, params, grads, weights=None, **kwargs):
    """The state after micro-steps with these gradients."""
    step = jax.jit(functools.partial(ga.apply_gradients, tx, **kwargs))
    state = tx.init(params)
    for i, g in enumerate(grads):
        weight = None if weights is None else weights[i]
        params, state = step(g, state, params, weight=weight)
    return state


def draw(n, shape=(7,), seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(n, *shape)) + 0.5, jnp.float32)


def numbers(scale):
    leaves = [np.asarray(x, np.float64) for x in scale]
    assert not any(np.isnan(x).any() for x in leaves)
    return leaves


# -- The estimates ---------------------------------------------------------------------


def appendix_a1(grads, small):
    """Equations A.2 and A.3, as they stand in the paper, in float64."""
    grads = np.asarray(grads, np.float64)
    big = small * len(grads)
    g_small = np.mean(np.sum(grads**2, axis=1))
    g_big = np.sum(np.mean(grads, axis=0) ** 2)
    squared_norm = (big * g_big - small * g_small) / (big - small)
    trace = (g_small - g_big) / (1 / small - 1 / big)
    return squared_norm, trace


def rounding(grads, weight):
    """A bound: some sums of n squares each, all terms as large as `weight`·Σ|g|²."""
    size = np.sum(np.square(np.asarray(grads, np.float64)))
    return 4 * grads.size * np.finfo(np.float32).eps * weight * size


@pytest.mark.grid(1, 5)
@pytest.mark.parametrize("use_grad_mean", [True, False])
@pytest.mark.parametrize("weight", [None, 1.0, 16.0])
def test_one_window_gives_the_estimates_of_the_paper(weight, use_grad_mean):
    grads = draw(8)
    tx = ga.MultiSteps(FROZEN, 8, use_grad_mean, track_noise=True)
    weights = None if weight is None else [weight] * 8
    scale = ga.noise_scale(run(tx, grads[0], grads, weights))
    squared_norm, trace = appendix_a1(grads, weight or 1.0)
    bound = rounding(grads, weight or 1.0)
    assert abs(float(scale.squared_norm) - squared_norm) <= bound
    assert abs(float(scale.trace) - trace) <= bound
    assert bool(scale.known)
    # The twin: the other unit is told apart.
    assert abs(trace - appendix_a1(grads, 4.0)[1]) > 100 * bound
    np.testing.assert_allclose(scale.value, trace / squared_norm, rtol=1e-4)
    assert float(scale.window) == 8 * (weight or 1.0)


def test_the_smoothed_estimates_are_averages_with_the_start_corrected():
    grads = draw(40)
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    state = run(tx, grads[0], grads)
    each = np.array([appendix_a1(grads[i : i + 4], 1.0) for i in range(0, 40, 4)])
    weights = noise_scale.DECAY ** np.arange(10)[::-1]
    weights /= weights.sum()
    mean = weights @ each
    deviations = (each - mean).T
    product = weights @ (deviations[0] * deviations[1])
    scale = ga.noise_scale(state)
    bound = max(rounding(grads[i : i + 4], 1.0) for i in range(0, 40, 4))
    assert np.all(np.abs(mean - [scale.squared_norm, scale.trace]) <= bound)
    expected = [*(deviations**2 @ weights), product]
    np.testing.assert_allclose(state.noise.deviation, expected, rtol=1e-3)
    # The twin: a plain mean is another number.
    assert np.max(np.abs(mean - each.mean(axis=0))) > 10 * bound


DIMENSION, K, WINDOWS = 50, 8, 200
SIZES = np.array([1, 2, 3, 4, 8, 16, 5, 9])


@functools.cache
def quadratic(weighted, seeds=20):
    """Noise scales of 20 runs on a quadratic whose ratio is known, and that ratio.

    The loss of an example x is |p - x|²/2, so its gradient is p - x: the mean of x is
    the gradient up to its sign, and the covariance of x is that of the gradient.
    """
    deviation = jnp.linspace(0.5, 2.0, DIMENSION)
    mean = jnp.full(DIMENSION, 0.3)
    sizes = SIZES if weighted else np.full(K, 4)
    tx = ga.MultiSteps(FROZEN, K, track_noise=True)

    def micro_step(carry, i_and_key):
        i, key = i_and_key
        params, state = carry
        size = jnp.asarray(sizes, jnp.float32)[i]
        # The mean of `size` examples, drawn as such.
        noise = jax.random.normal(key, (DIMENSION,)) * deviation / jnp.sqrt(size)
        weight = size if weighted else None
        params, state = ga.apply_gradients(
            tx, params - mean - noise, state, params, weight=weight
        )
        return (params, state), None

    def one(key):
        params = jnp.zeros(DIMENSION)
        keys = jax.random.split(key, K * WINDOWS)
        order = jnp.arange(K * WINDOWS) % K
        carry = (params, tx.init(params))
        return jax.lax.scan(micro_step, carry, (order, keys))[0][1]

    states = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), seeds))
    unit = 1.0 if weighted else 4.0
    ratio = float(jnp.sum(deviation**2) / jnp.sum(mean**2)) / unit
    return states, ratio


# Of 20 intervals that hold with 95 %, fewer than 16 hold with a probability of 0.3 %.
ENOUGH = 16


def hits(scale, ratio):
    assert np.all(scale.known)
    return int(np.sum((scale.low <= ratio) & (ratio <= scale.high)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("weighted", [False, True])
def test_a_known_ratio_lies_in_the_stated_interval_over_20_seeds(weighted):
    states, ratio = quadratic(weighted)
    scale = ga.noise_scale(states)
    assert hits(scale, ratio) >= ENOUGH
    assert np.all(scale.low <= scale.value)
    assert np.all(scale.value <= scale.high)
    # The intervals say something: they are narrow, and another ratio is not in them.
    assert np.all(scale.high - scale.low < ratio)
    assert hits(scale, 2 * ratio) < ENOUGH
    # Nor are they too wide: the values spread about as far as stated (±1.96 σ), which
    # 20 of them tell to a factor of two.
    spread = np.std(scale.value) * 2 * 1.96
    assert 0.5 < spread / np.median(scale.high - scale.low) < 2


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_a_biased_estimator_is_outside_its_interval(weighted):
    # The twin: |g|² itself for |G|², as if the window were the true gradient.
    states, ratio = quadratic(weighted)
    squared_norm, trace, window = np.moveaxis(np.asarray(states.noise.mean), -1, 0)
    biased = jnp.stack([squared_norm + trace / window, trace, window], -1)
    noise = states.noise._replace(mean=biased)
    assert hits(ga.noise_scale(states._replace(noise=noise)), ratio) < ENOUGH


@pytest.mark.exhaustive
def test_unequal_sizes_without_their_weights_are_biased():
    _, ratio = quadratic(True)
    # The twin: the same gradients, squared and counted as if they were of one size.
    rng = np.random.default_rng(0)
    deviation = np.linspace(0.5, 2.0, DIMENSION)
    size = np.resize(SIZES, K * 100)[:, None]
    grads = 0.3 + rng.normal(size=(K * 100, DIMENSION)) * deviation / np.sqrt(size)
    tx = ga.MultiSteps(FROZEN, K, track_noise=True)
    grads = jnp.asarray(grads, jnp.float32)

    def scale_of(weights):
        def step(state, g_and_w):
            g, w = g_and_w
            w = w if weights else None
            return ga.apply_gradients(tx, g, state, grads[0], weight=w)[1], None

        sizes = jnp.asarray(size[:, 0], jnp.float32)
        state = jax.lax.scan(step, tx.init(grads[0]), (grads, sizes))[0]
        return ga.noise_scale(state)

    assert float(scale_of(True).low) <= ratio <= float(scale_of(True).high)
    without = scale_of(False)
    per_example = float(without.value) * float(np.mean(SIZES))
    assert per_example > 1.2 * float(scale_of(True).high)


# -- What enters -----------------------------------------------------------------------


def same(a, b):
    leaves = [jax.tree.leaves(x) for x in (a, b)]
    assert leaves[0]
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.exhaustive
def test_a_skipped_micro_step_was_never_there():
    grads = draw(8)
    with_bad = [grads[0], jnp.full(7, jnp.nan), *grads[1:]]
    tx = ga.MultiSteps(
        FROZEN, 4, should_skip_update_fn=optax.skip_not_finite, track_noise=True
    )
    state = run(tx, grads[0], with_bad)
    assert int(ga.stats(state).skipped_micro_steps) == 1
    same(state.noise, run(tx, grads[0], grads).noise)
    # The twin: a finite one in its place is seen.
    other = run(tx, grads[0], [grads[0], jnp.ones(7), *grads[1:]])
    assert not np.array_equal(other.noise.mean, state.noise.mean)


@pytest.mark.exhaustive
@pytest.mark.parametrize("skip", [None, ga.drop_window_if_not_finite])
def test_a_window_with_a_nan_does_not_enter(skip):
    grads = draw(12)
    bad = grads.at[5].set(jnp.inf)
    tx = ga.MultiSteps(FROZEN, 4, should_drop_window_fn=skip, track_noise=True)
    state = run(tx, grads[0], bad)
    without = jnp.concatenate([grads[:4], grads[8:]])
    expected = run(tx, grads[0], without)
    same(ga.noise_scale(state), ga.noise_scale(expected))
    assert int(ga.noise_scale(state).windows) == 2


@pytest.mark.exhaustive
def test_a_micro_batch_of_weight_0_was_never_there():
    grads = draw(9).at[2].set(jnp.nan)
    weights = [2.0, 3.0, 0.0, 1.0, 2.0, 2.0, 0.0, 5.0, 4.0]
    tx = ga.MultiSteps(
        FROZEN, lambda step: jnp.where(step == 0, 5, 4), track_noise=True
    )
    state = run(tx, grads[0], grads, weights)
    kept = [i for i, w in enumerate(weights) if w]
    fewer = ga.MultiSteps(
        FROZEN, lambda step: jnp.where(step == 0, 4, 3), track_noise=True
    )
    expected = run(fewer, grads[0], grads[jnp.array(kept)], [weights[i] for i in kept])
    same(ga.noise_scale(state), ga.noise_scale(expected))


def test_a_window_of_weight_0_does_not_enter():
    grads = draw(8)
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    state = run(tx, grads[0], grads, [1.0] * 4 + [0.0] * 4)
    same(ga.noise_scale(state), ga.noise_scale(run(tx, grads[0], grads[:4], [1.0] * 4)))


@pytest.mark.exhaustive
def test_flush_counts_the_window_that_it_closes():
    grads = draw(7)
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    state = run(tx, grads[0], grads)
    assert int(ga.noise_scale(state).windows) == 1
    _, flushed = ga.flush(tx, state, grads[0])
    ragged = ga.MultiSteps(
        FROZEN, lambda step: jnp.where(step == 0, 4, 3), track_noise=True
    )
    expected = ga.noise_scale(run(ragged, grads[0], grads))
    assert int(expected.windows) == 2
    for a, b in zip(ga.noise_scale(flushed), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    _, again = ga.flush(tx, flushed, grads[0])
    same(again.noise.mean, flushed.noise.mean)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weight", [None, 3.0])
def test_a_static_emit_and_update_keep_the_same_noise(weight):
    grads = draw(8)
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    counted = run(tx, grads[0], grads, None if weight is None else [weight] * 8)
    params = grads[0]
    state = updated = tx.init(params)
    for i, g in enumerate(grads):
        _, state = jax.jit(functools.partial(ga.apply_gradients, tx, emit=i % 4 == 3))(
            g, state, params, weight=weight
        )
        _, updated = jax.jit(tx.update)(g, updated, params, weight=weight)
    for other in (state, updated):
        for a, b in zip(ga.noise_scale(counted), ga.noise_scale(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.exhaustive
def test_from_optax_leaves_the_open_window_out():
    grads = draw(10)
    theirs = optax.MultiSteps(FROZEN, 4)
    their_state = theirs.init(grads[0])
    for g in grads[:2]:
        _, their_state = theirs.update(g, their_state, grads[0])
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    state = ga.from_optax(their_state, track_noise=True)
    params = grads[0]
    for g in grads[2:]:
        params, state = ga.apply_gradients(tx, g, state, params)
    assert int(ga.stats(state).steps) == 2
    assert int(ga.noise_scale(state).windows) == 1
    same(ga.noise_scale(state), ga.noise_scale(run(tx, grads[0], grads[4:8])))
    assert ga.from_optax(their_state).noise == ()


# -- Trees and dtypes ------------------------------------------------------------------


@pytest.mark.exhaustive
def test_leaves_of_any_kind_are_squared_as_one_vector():
    rng = np.random.default_rng(0)

    def tree():
        z = rng.normal(size=(3, 2)) + 1j * rng.normal(size=(3, 2))
        return {
            "bfloat16": jnp.asarray(rng.integers(-3, 4, 5), jnp.bfloat16),
            "complex": jnp.asarray(z, jnp.complex64),
            "empty": jnp.zeros((0, 3)),
            "none": None,
            "scalar": jnp.asarray(rng.normal(), jnp.float32),
        }

    def flat(t):
        z = np.ravel(t["complex"])
        parts = [np.asarray(t["bfloat16"], float), z.real, z.imag, [t["scalar"]]]
        return np.concatenate([np.asarray(p, np.float64) for p in parts])

    grads = [tree() for _ in range(4)]
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    state = run(tx, grads[0], grads)
    vectors = np.stack([flat(g) for g in grads])
    squared_norm, trace = appendix_a1(vectors, 1.0)
    scale = ga.noise_scale(state)
    bound = rounding(vectors, 1.0)
    assert abs(float(scale.squared_norm) - squared_norm) <= bound
    assert abs(float(scale.trace) - trace) <= bound


@pytest.mark.grid(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_the_states_dtypes_and_structure_do_not_drift(dtype):
    grads = draw(6).astype(dtype)
    tx = ga.MultiSteps(FROZEN, 3, accumulator_dtype=None, track_noise=True)
    shapes = lambda t: jax.tree.map(lambda x: (x.shape, x.dtype), t)  # noqa: E731
    assert shapes(run(tx, grads[0], grads)) == shapes(tx.init(grads[0]))


@pytest.mark.exhaustive
def test_float64_counts_in_float64():
    with jax.enable_x64(True):
        grads = jnp.asarray(draw(8), jnp.float64) + 1e3
        tx = ga.MultiSteps(FROZEN, 8, track_noise=True)
        scale = ga.noise_scale(run(tx, grads[0], grads))
        assert scale.trace.dtype == jnp.float64
        _, trace = appendix_a1(grads, 1.0)
        bound = rounding(grads, 1.0) * np.finfo(np.float64).eps
        assert abs(float(scale.trace) - trace) <= bound / np.finfo(np.float32).eps
        assert abs(trace - 7) < 5


def test_a_fresh_state_can_be_donated():
    params = jnp.ones(3)
    tx = ga.MultiSteps(FROZEN, 2, track_noise=True)
    step = jax.jit(step_of(tx), donate_argnums=(0, 1))
    _, state = step(params, tx.init(params), jnp.ones(3))
    assert int(state.noise.count) == 1


@pytest.mark.exhaustive
def test_inside_a_chain_it_measures_what_reaches_it_and_is_found_under_jit():
    grads, weights = draw(8), [1.0, 2.0, 3.0, 4.0] * 2
    alone = ga.MultiSteps(FROZEN, 4, track_noise=True)
    chain = optax.chain(optax.clip(0.5), alone, optax.scale(2.0))
    state = chain.init(grads[0])
    update = jax.jit(chain.update)
    for g, w in zip(grads, weights, strict=True):
        _, state = update(g, state, grads[0], weight=w)
    clipped = jnp.clip(grads, -0.5, 0.5)
    expected = run(alone, grads[0], clipped, weights)
    testing.assert_trees_bitwise_equal(state[1].noise, expected.noise)
    scale = jax.jit(ga.noise_scale)(state)
    assert int(scale.windows) == 2
    assert float(scale.window) == 10
    # The twin: neither what came before the clipping nor other weights.
    for other in (
        run(alone, grads[0], grads, weights),
        run(alone, grads[0], clipped, weights[::-1]),
    ):
        assert float(scale.trace) != float(ga.noise_scale(other).trace)


# -- Several devices, and checkpoints --------------------------------------------------

SHARDED_SIZE = 4096


def sharded_setup(kind=AxisType.Auto):
    """Integer gradients, whose sums of squares are exact in any order, on 8 devices."""
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    split = NamedSharding(mesh, P("data"))
    rng = np.random.default_rng(0)
    grads = [
        {
            "w": jnp.asarray(rng.integers(-3, 4, (SHARDED_SIZE, 2)), jnp.float32),
            "b": jnp.asarray(rng.integers(-3, 4, 8), jnp.float32),
        }
        for _ in range(8)
    ]
    tx = ga.MultiSteps(optax.sgd(0.125), 4, track_noise=True)
    return tx, grads, [jax.device_put(g, split) for g in grads], split


@pytest.mark.parametrize(
    "kind",
    [AxisType.Auto, AxisType.Explicit],
)
@pytest.mark.published
def test_sharded_parameters_give_the_bits_of_one_device_and_move_scalars_alone(kind):
    tx, grads, sharded, split = sharded_setup(kind)
    expected = run(tx, grads[0], grads)
    state = run(tx, sharded[0], sharded)
    assert state.total["w"].sharding.is_equivalent_to(split, 2)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.noise))
    testing.assert_trees_bitwise_equal(state.noise, expected.noise)
    assert bool(ga.noise_scale(state).known)
    # The twin: one shard that was left out shows.
    fewer = [jax.tree.map(lambda g: g.at[: len(g) // 8].set(0), g) for g in grads]
    assert float(run(tx, grads[0], fewer).noise.mean[0]) != float(state.noise.mean[0])

    # No gradient crosses the network: the squares are summed where they are.
    def moved(tx, arrays):
        step = jax.jit(step_of(tx), donate_argnums=(0, 1))
        program = step.lower(arrays, tx.init(arrays), arrays).compile().as_text()
        found = re.findall(
            r"= (.*?) (?:all-reduce|all-gather|all-to-all|reduce-scatter|"
            r"collective-permute)(?:-start)?\(",
            program,
        )
        return [
            int(np.prod([int(n) for n in dims.split(",") if n], dtype=int))
            for shapes in found
            for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)
        ]

    counts = moved(tx, sharded[0])
    assert counts  # the sums of the shards do
    assert set(counts) == {1}
    assert not moved(ga.MultiSteps(optax.sgd(0.125), 4), sharded[0])


@pytest.mark.grid(1)
@pytest.mark.parametrize("cut", [3, 4, 6])
@pytest.mark.parametrize("on_devices", [1, 8])
def test_through_an_orbax_checkpoint_it_goes_on_with_the_same_bits(
    cut, on_devices, tmp_path
):
    tx, grads, sharded, _ = sharded_setup()
    grads = grads if on_devices == 1 else sharded
    step = jax.jit(functools.partial(ga.apply_gradients, tx))

    def go_on(params, state, part):
        for g in part:
            params, state = step(g, state, params)
        return params, state

    start = (grads[0], tx.init(grads[0]))
    expected = go_on(*start, grads)
    half = go_on(*start, grads[:cut])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "half", half)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "half", half)
    testing.assert_trees_bitwise_equal(restored, half)
    for a, b in zip(*map(jax.tree.leaves, (restored, half)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    testing.assert_trees_bitwise_equal(go_on(*restored, grads[cut:]), expected)
    # The twin: a noise that starts anew has seen less.
    params, state = restored
    forgotten = state._replace(noise=tx.init(params).noise)
    lost = go_on(params, forgotten, grads[cut:])[1]
    assert not np.array_equal(lost.noise.mean, expected[1].noise.mean)


# -- Unknown ---------------------------------------------------------------------------


def assert_unknown(scale, *words):
    numbers(scale)
    assert not bool(scale.known)
    assert float(scale.value) == 0
    assert "unknown" in str(scale)
    for word in words:
        assert word in str(scale)


def test_before_the_first_window_closes_it_is_unknown():
    grads = draw(3)
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    assert_unknown(ga.noise_scale(tx.init(grads[0])), "no window")
    assert_unknown(ga.noise_scale(run(tx, grads[0], grads)), "no window")


@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [1, lambda step: jnp.ones_like(step)])
def test_windows_of_one_micro_step_say_unknown(k):
    grads = draw(5)
    tx = ga.MultiSteps(FROZEN, k, track_noise=True)
    scale = ga.noise_scale(run(tx, grads[0], grads))
    assert_unknown(scale, "no window")
    assert (float(scale.low), float(scale.high)) == (0, np.inf)


@pytest.mark.exhaustive
def test_gradients_of_zero_say_unknown():
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    for n in (8, 40):
        scale = ga.noise_scale(run(tx, jnp.zeros(3), jnp.zeros((n, 3))))
        assert_unknown(scale, f"after {n // 4} windows")
        assert (float(scale.low), float(scale.high)) == (0, np.inf)


def test_an_empty_tree_says_unknown():
    tx = ga.MultiSteps(FROZEN, 2, track_noise=True)
    assert_unknown(ga.noise_scale(run(tx, {}, [{}] * 4)))


def test_noise_without_a_gradient_says_unknown_and_at_least_how_large():
    # Two opposite gradients, so that every window's mean is 0 and |G|² negative.
    g = draw(1)[0]
    tx = ga.MultiSteps(FROZEN, 2, track_noise=True)
    grads = [s * (1 + i / 100) * g for i in range(10) for s in (1, -1)]
    scale = ga.noise_scale(run(tx, g, grads))
    assert float(scale.squared_norm) < 0
    assert_unknown(scale, "not positive")
    assert np.isinf(scale.high)


def test_gradients_without_noise_have_a_scale_of_zero():
    g = jnp.arange(4.0)
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    scale = ga.noise_scale(run(tx, g, [g] * 40))
    assert bool(scale.known)
    assert float(scale.value) == float(scale.low) == float(scale.high) == 0
    assert "infinitely" in str(scale)


@pytest.mark.grid(2)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e25])
def test_gradients_beyond_the_squares_of_float32_give_no_nan(size):
    tx = ga.MultiSteps(FROZEN, 2, track_noise=True)
    scale = ga.noise_scale(run(tx, jnp.zeros(7), size * draw(20)))
    numbers(scale)
    assert (float(scale.low), float(scale.high)) == (0, np.inf)


# -- The program -----------------------------------------------------------------------

BIG = {f"layer_{i}": jnp.ones((400, 400)) for i in range(4)}
BIG_BYTES = sum(p.nbytes for p in jax.tree.leaves(BIG))


def step_of(tx, **kwargs):
    def step(params, state, grads):
        return ga.apply_gradients(tx, grads, state, params, **kwargs)

    return step


def jaxpr(tx, params=BIG, **kwargs):
    return jax.make_jaxpr(step_of(tx, **kwargs))(params, tx.init(params), params)


@pytest.mark.grid(4)
@pytest.mark.parametrize("emit", [None, True, False])
@pytest.mark.parametrize("weight", [None, 2.0])
def test_without_track_noise_nothing_of_it_is_in_the_program(emit, weight, monkeypatch):
    tx = ga.MultiSteps(optax.adam(1e-3), 4)
    assert tx.init(BIG).noise == ()
    program = str(jaxpr(tx, emit=emit, weight=weight))
    assert "reduce_sum" not in program
    for name in ("init", "add", "close", "squared_norm"):
        monkeypatch.delattr(noise_scale, name)
    assert str(jaxpr(tx, emit=emit, weight=weight)) == program


def reductions(program):
    """How many leaves are reduced outside any cond, and inside one."""
    outside = inside = 0
    for eqn in program.eqns:
        if eqn.primitive.name == "reduce_sum":
            outside += eqn.invars[0].aval.size >= 400 * 400
        for branch in eqn.params.get("branches", ()):
            inside += sum(reductions(branch.jaxpr))
        if "jaxpr" in eqn.params:
            inner = eqn.params["jaxpr"]
            more = reductions(getattr(inner, "jaxpr", inner))
            outside, inside = outside + more[0], inside + more[1]
    return outside, inside


def test_a_micro_step_reads_the_gradient_once_more_and_a_step_the_mean():
    tx = ga.MultiSteps(optax.adam(1e-3), 4, track_noise=True)
    assert reductions(jaxpr(tx).jaxpr) == (len(BIG), len(BIG))
    assert reductions(jaxpr(tx, emit=False).jaxpr) == (len(BIG), 0)
    off = ga.MultiSteps(optax.adam(1e-3), 4)
    assert reductions(jaxpr(off).jaxpr) == (0, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("weight", [None, 3.0])
@pytest.mark.parametrize("emit", [None, True, False])
def test_a_micro_step_still_needs_no_temporaries(emit, weight, dtype):
    params = optax.tree.cast(BIG, dtype)

    def temporaries(track_noise):
        tx = ga.MultiSteps(optax.adam(1e-3), 8, track_noise=track_noise)
        arguments = (params, tx.init(params), params)
        step = jax.jit(step_of(tx, emit=emit, weight=weight), donate_argnums=(0, 1))
        return step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    off = temporaries(False)
    assert temporaries(True) <= off + 0.01 * BIG_BYTES
    # Where nothing else needs some: bfloat16 is cast for Adam, and a static emit may
    # need some for the elementwise select by which a weight of 0 prevents the step.
    if dtype == jnp.float32 and not emit:
        assert off <= 0.01 * BIG_BYTES


# -- Bad input and housekeeping --------------------------------------------------------


@pytest.mark.parametrize("value", [1, None, "yes", 0.9])
def test_track_noise_must_be_a_bool(value):
    with pytest.raises(
        TypeError, match=r"track_noise must be a Python bool.*Pass|pass"
    ):
        ga.MultiSteps(FROZEN, 2, track_noise=value)


def test_a_state_without_noise_is_refused_by_name():
    params = jnp.ones(2)
    state = ga.MultiSteps(FROZEN, 2).init(params)
    with pytest.raises(ValueError, match="track_noise=True, but there is none"):
        ga.noise_scale(state)
    with pytest.raises(ValueError, match="none in a EmptyState"):
        ga.noise_scale(optax.EmptyState())
    tx = ga.MultiSteps(FROZEN, 2, track_noise=True)
    for call in (
        lambda: ga.apply_gradients(tx, params, state, params),
        lambda: tx.update(params, state, params),
        lambda: ga.flush(tx, state, params),
    ):
        with pytest.raises(ValueError, match=r"_replace\(noise="):
            call()
    # What the message says to do, works.
    ga.apply_gradients(tx, params, state._replace(noise=tx.init(params).noise), params)


def test_two_states_are_refused_by_path():
    tx = ga.MultiSteps(FROZEN, 2, track_noise=True)
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"there are 2: \[0\].*, \[1\].*Pass the one"):
        ga.noise_scale((state, state))


def test_the_argument_survives_a_copy_and_shows_in_the_repr():
    tx = ga.MultiSteps(FROZEN, 2, track_noise=True)
    cls, arguments = tx.__reduce__()
    assert cls(*arguments).init(jnp.ones(2)).noise != ()
    assert "track_noise=True" in repr(tx)
    assert "track_noise=False" in repr(ga.MultiSteps(FROZEN, 2))


@pytest.mark.exhaustive
def test_the_state_pickles_and_goes_on():
    grads = draw(8)
    tx = ga.MultiSteps(FROZEN, 4, track_noise=True)
    state = pickle.loads(pickle.dumps(run(tx, grads[0], grads[:6])))
    params = grads[0]
    for g in grads[6:]:
        params, state = ga.apply_gradients(tx, g, state, params)
    for a, b in zip(
        ga.noise_scale(state), ga.noise_scale(run(tx, grads[0], grads)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_large_scales_are_written_without_an_exponent():
    numbers = [12345.6, True, 1.0, 1.0, 999.6, np.inf, 65536.0, 9]
    text = str(ga.NoiseScale(*map(jnp.asarray, numbers)))
    assert "is 12346 (95 %: 1000 to inf), after 9 windows of 65536:" in text


@pytest.mark.exhaustive
def test_str_is_a_line_to_read_and_repr_where_there_are_many():
    grads = draw(80)
    tx = ga.MultiSteps(FROZEN, 8, track_noise=True)
    text = str(ga.noise_scale(run(tx, grads[0], grads)))
    assert text.startswith("The noise scale is ")
    assert "after 10 windows of 8" in text
    many = jax.tree.map(lambda x: jnp.stack([x, x]), ga.noise_scale(tx.init(grads[0])))
    assert str(many) == repr(many)
