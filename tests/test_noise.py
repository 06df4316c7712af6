"""The gradient noise scale: unbiased, within its error, free where it is off."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DROPS, SKIPS, bits, mesh_of, put, train
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_multi_steps_program import ADAM, BIG, applied, compiled, program, trees

import ga_optax as ga
from ga_optax._across import noise_scale

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

FROZEN = optax.sgd(0.0)


def tracking(k, **options):
    return ga.MultiSteps(FROZEN, k, track_noise=True, **options)


def run(tx, params, grads, weights=None, **options):
    """The state after micro-steps with these gradients."""
    return train(tx, grads, params, weights, **options)[-1][1]


def draw(n):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(n, 7)) + 0.5, jnp.float32)


# -- The estimates ---------------------------------------------------------------------


def appendix_a1(grads, small):
    """Equations A.2 and A.3, as they stand in the paper, in float64."""
    grads = np.asarray(grads, np.float64)
    big = small * len(grads)
    g_small = np.mean(np.sum(grads**2, axis=1))
    g_big = np.sum(np.mean(grads, axis=0) ** 2)
    squared_norm = (big * g_big - small * g_small) / (big - small)
    return np.array([squared_norm, (g_small - g_big) / (1 / small - 1 / big)])


def rounding(grads, weight=1.0):
    """A bound: some sums of n squares each, all terms as large as `weight`·Σ|g|²."""
    size = np.sum(np.square(np.asarray(grads, np.float64)))
    return 4 * grads.size * np.finfo(np.float32).eps * weight * size


def assert_estimates(scale, due, bound):
    assert np.all(np.abs(due - [scale.squared_norm, scale.trace]) <= bound)


@pytest.mark.grid(1, 5)
@pytest.mark.parametrize("use_grad_mean", [True, False])
@pytest.mark.parametrize("weight", [None, 1.0, 16.0])
def test_one_window_gives_the_estimates_of_the_paper(weight, use_grad_mean):
    grads, one = draw(8), weight or 1.0
    tx = tracking(8, use_grad_mean=use_grad_mean)
    scale = ga.noise_scale(run(tx, grads[0], grads, weight and [weight] * 8))
    due, bound = appendix_a1(grads, one), rounding(grads, one)
    assert_estimates(scale, due, bound)
    # The twin: the other unit is told apart.
    assert abs(due[1] - appendix_a1(grads, 4.0)[1]) > 100 * bound
    np.testing.assert_allclose(scale.value, due[1] / due[0], rtol=1e-4)
    assert (bool(scale.known), float(scale.window)) == (True, 8 * one)


def test_the_smoothed_estimates_are_averages_with_the_start_corrected():
    grads = draw(40)
    state = run(tracking(4), grads[0], grads)
    each = np.array([appendix_a1(grads[i : i + 4], 1.0) for i in range(0, 40, 4)])
    weights = noise_scale.DECAY ** np.arange(10)[::-1]
    weights /= weights.sum()
    mean = weights @ each
    off = (each - mean).T
    bound = max(rounding(grads[i : i + 4]) for i in range(0, 40, 4))
    assert_estimates(ga.noise_scale(state), mean, bound)
    expected = [*(off**2 @ weights), weights @ (off[0] * off[1])]
    np.testing.assert_allclose(state.noise.deviation, expected, rtol=1e-3)


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
        parts = np.asarray(t["bfloat16"], float), z.real, z.imag, [t["scalar"]]
        return np.concatenate([np.asarray(p, np.float64) for p in parts])

    grads = [tree() for _ in range(4)]
    scale = ga.noise_scale(run(tracking(4), grads[0], grads))
    vectors = np.stack([flat(g) for g in grads])
    assert_estimates(scale, appendix_a1(vectors, 1.0), rounding(vectors))
    with jax.enable_x64(True):
        grads = jnp.asarray(draw(8), jnp.float64) + 1e3
        scale = ga.noise_scale(run(tracking(8), grads[0], grads))
        assert scale.trace.dtype == jnp.float64
        narrower = np.finfo(np.float64).eps / np.finfo(np.float32).eps
        assert_estimates(scale, appendix_a1(grads, 1.0), rounding(grads) * narrower)


DIMENSION, K, WINDOWS = 50, 8, 200
# Of 20 intervals that hold with 95 %, fewer than 16 hold with a probability of 0.3 %.
ENOUGH = 16


def quadratic(weighted):
    """Noise scales of 20 runs on a quadratic whose ratio is known, and that ratio.

    The loss of an example x is |p - x|²/2, so its gradient is p - x: the mean of x is
    the gradient up to its sign, and the covariance of x is that of the gradient.
    """
    deviation, mean = jnp.linspace(0.5, 2.0, DIMENSION), jnp.full(DIMENSION, 0.3)
    sizes = jnp.array([1, 2, 3, 4, 8, 16, 5, 9] if weighted else [4] * K, float)
    tx, params = tracking(K), jnp.zeros(DIMENSION)

    def micro_step(state, i_and_key):
        i, key = i_and_key
        # The mean of so many examples, drawn as such.
        noise = jax.random.normal(key, (DIMENSION,)) * deviation / jnp.sqrt(sizes[i])
        weight, grads = sizes[i] if weighted else None, -mean - noise
        return ga.apply_gradients(tx, grads, state, params, weight=weight)[1], None

    def one(key):
        keys, order = jax.random.split(key, K * WINDOWS), jnp.arange(K * WINDOWS) % K
        return jax.lax.scan(micro_step, tx.init(params), (order, keys))[0]

    states = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 20))
    ratio = float(jnp.sum(deviation**2) / jnp.sum(mean**2))
    return ga.noise_scale(states), ratio if weighted else ratio / 4


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_a_known_ratio_lies_in_the_stated_interval_over_20_seeds(weighted):
    scale, ratio = quadratic(weighted)
    assert np.all(scale.known)

    def hits(ratio):
        return np.sum((scale.low <= ratio) & (ratio <= scale.high))

    assert hits(ratio) >= ENOUGH
    assert np.all((scale.low <= scale.value) & (scale.value <= scale.high))
    # The intervals say something: they are narrow, and another ratio is not in them.
    assert np.all(scale.high - scale.low < ratio)
    assert hits(2 * ratio) < ENOUGH


# -- What enters -----------------------------------------------------------------------

GRADS = draw(12)
BAD = GRADS.at[5].set(jnp.inf)
ZEROS = [2.0, 3.0, 0.0, 1.0, 2.0, 2.0, 0.0, 5.0, 4.0]
KEPT = [i for i, w in enumerate(ZEROS) if w]
RAGGED = lambda first, then: lambda step: jnp.where(step == 0, first, then)  # noqa: E731
# A run, and one without what must not enter: (k, options, gradients, weights).
ENTERS = {
    "a skipped micro-step": (
        (4, SKIPS, [GRADS[0], jnp.full(7, jnp.nan), *GRADS[1:8]], None),
        (4, {}, GRADS[:8], None),
    ),
    "a window with an infinity": (
        (4, {}, BAD, None),
        (4, {}, jnp.concatenate([GRADS[:4], GRADS[8:]]), None),
    ),
    "a dropped window": (
        (4, DROPS, BAD, None),
        (4, {}, jnp.concatenate([GRADS[:4], GRADS[8:]]), None),
    ),
    "a micro-batch of weight 0": (
        (RAGGED(5, 4), {}, GRADS[:9].at[2].set(jnp.nan), ZEROS),
        (RAGGED(4, 3), {}, GRADS[np.array(KEPT)], [ZEROS[i] for i in KEPT]),
    ),
    "a window of weight 0": (
        (4, {}, GRADS[:8], [1.0] * 4 + [0.0] * 4),
        (4, {}, GRADS[:4], [1.0] * 4),
    ),
}


@pytest.mark.grid(2, 5)
@pytest.mark.parametrize("name", ENTERS)
def test_what_is_left_out_was_never_there(name):
    with_it, without = (
        ga.noise_scale(run(tracking(k, **options), GRADS[0], grads, weights))
        for k, options, grads, weights in ENTERS[name]
    )
    assert bits(with_it) == bits(without)


def closed_early(tx, grads):
    return ga.flush(tx, run(tx, grads[0], grads), grads[0])[1]


def emitted(tx, grads):
    closes = [i % 4 == 3 or i == len(grads) - 1 for i in range(len(grads))]
    return run(tx, grads[0], grads, emits=closes)


def pickled(tx, grads):
    state = pickle.loads(pickle.dumps(run(tx, grads[0], grads[:6])))
    return ga.flush(tx, run(tx, grads[0], grads[6:], state=state), grads[0])[1]


@pytest.mark.parametrize("way", [closed_early, emitted, pickled])
def test_every_way_to_close_a_window_keeps_the_same_noise(way):
    grads, tx = GRADS[:7], tracking(4)
    state = way(tx, grads)
    due = ga.noise_scale(run(tracking(RAGGED(4, 3)), grads[0], grads))
    assert int(due.windows) == 2
    for a, b in zip(ga.noise_scale(state), due, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    _, again = ga.flush(tx, state, grads[0])  # an empty window has none
    assert bits(again.noise.mean) == bits(state.noise.mean)


def test_from_optax_leaves_the_open_window_out():
    theirs, tx = optax.MultiSteps(FROZEN, 4), tracking(4)
    state = theirs.init(GRADS[0])
    for g in GRADS[:2]:
        _, state = theirs.update(g, state, GRADS[0])
    assert ga.from_optax(state).noise == ()
    state = run(tx, GRADS[0], GRADS[2:10], state=ga.from_optax(state, track_noise=True))
    due = ga.noise_scale(run(tx, GRADS[0], GRADS[4:8]))
    assert bits(ga.noise_scale(state)) == bits(due)


def test_inside_a_chain_it_measures_what_reaches_it_and_is_found_under_jit():
    grads, weights, alone = GRADS[:8], [1.0, 2.0, 3.0, 4.0] * 2, tracking(4)
    chain = optax.chain(optax.clip(0.5), alone, optax.scale(2.0))
    state = run(chain, grads[0], grads, weights)
    due = run(alone, grads[0], jnp.clip(grads, -0.5, 0.5), weights)
    assert bits(state[1].noise) == bits(due.noise)
    scale = jax.jit(ga.noise_scale)(state)
    assert (int(scale.windows), float(scale.window)) == (2, 10)


@pytest.mark.published
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters_give_the_bits_of_one_device_and_move_scalars_alone(kind):
    """Of integer gradients, whose sums of squares are exact in any order."""
    shapes, rng = {"w": (4096, 2), "b": (8,)}, np.random.default_rng(0)
    grads = [
        {n: jnp.asarray(rng.integers(-3, 4, s), jnp.float32) for n, s in shapes.items()}
        for _ in range(8)
    ]
    sharded = put(grads, mesh_of(8, kind=kind), P("data"))
    tx, plain = (
        ga.MultiSteps(optax.sgd(0.125), 4, track_noise=on) for on in (True, False)
    )
    state = run(tx, sharded[0], sharded)
    split = sharded[0]["w"].sharding
    assert state.total["w"].sharding.is_equivalent_to(split, 2)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.noise))
    assert bits(state.noise) == bits(run(tx, grads[0], grads).noise)

    # No gradient crosses the network: the squares are summed where they are.
    def sent(tx):
        found = ga.audit(compiled(tx, sharded[0])).collectives
        return sum(one.num_bytes for one in found)

    assert 0 < sent(tx) <= 16
    assert sent(plain) == 0


# -- Unknown ---------------------------------------------------------------------------

G = GRADS[0]
OPPOSITE = [s * (1 + i / 100) * G for i in range(10) for s in (1, -1)]
UNKNOWN = {
    "no window yet": (4, GRADS[:3], "no window"),
    "windows of 1": (1, GRADS[:5], "no window"),
    "traced ones": (jnp.ones_like, GRADS[:5], "no window"),
    "few zeros": (4, jnp.zeros((8, 3)), "after 2 windows"),
    "zeros": (4, jnp.zeros((40, 3)), "after 10 windows"),
    "an empty tree": (2, [{}] * 4, "unknown"),
    # Every window's mean is 0, and |G|² negative.
    "no gradient": (2, OPPOSITE, "not positive"),
    **{f"{x:g}": (2, x * GRADS, "") for x in (1e-30, 1e-12, 1e12, 1e25)},
}


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_known_says_so_without_a_nan(name):
    k, grads, words = UNKNOWN[name]
    scale = ga.noise_scale(run(tracking(k), grads[0], grads))
    assert not any(np.isnan(x).any() for x in scale)
    assert np.isinf(scale.high)
    if words:
        assert (bool(scale.known), float(scale.value)) == (False, 0)
        assert "unknown" in str(scale)
        assert words in str(scale)
    if name != "no gradient":  # which is at least so large
        assert float(scale.low) == 0


def test_gradients_without_noise_have_a_scale_of_zero():
    g = jnp.arange(4.0)
    scale = ga.noise_scale(run(tracking(4), g, [g] * 40))
    assert [float(x) for x in (scale.known, scale.value, scale.high)] == [1, 0, 0]
    assert "infinitely" in str(scale)


def test_it_is_written_as_a_line_to_read():
    numbers = [12345.6, True, 1.0, 1.0, 999.6, np.inf, 65536.0, 9]
    text = str(ga.NoiseScale(*map(jnp.asarray, numbers)))
    assert text.startswith("The noise scale is 12346 (95 %: 1000 to inf), after 9 wind")
    many = ga.NoiseScale(*(jnp.asarray([x, x]) for x in numbers))
    assert str(many) == repr(many)


@pytest.mark.parametrize("emit", [None, True, False])
def test_without_track_noise_nothing_of_it_is_in_the_program(emit, monkeypatch):
    tx, options = ga.MultiSteps(ADAM, 4), {"emit": emit, "weight": 2.0}
    assert tx.init(BIG).noise == ()
    text = str(program(applied, tx, BIG, **options))
    assert "reduce_sum" not in text
    for name in ("init", "add", "close", "squared_norm"):
        monkeypatch.delattr(noise_scale, name)
    assert str(program(applied, tx, BIG, **options)) == text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("emit", [None, True, False])
def test_a_micro_step_still_needs_no_temporaries(emit, dtype):
    def needed(track_noise):
        tx = ga.MultiSteps(ADAM, 8, track_noise=track_noise)
        return trees(compiled(tx, optax.tree.cast(BIG, dtype), emit=emit))

    assert needed(True) <= needed(False) + 0.01
