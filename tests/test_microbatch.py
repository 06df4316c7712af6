"""Accumulation inside one call equals the undivided batch, and itself, bit for bit."""

import contextlib
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ga_optax as ga

HAS_REFS = jax.__version_info__ >= (0, 11, 1)
OPTIMIZE = [True, False]
MEAN = jax.jit(ga.accumulator.mean)
BATCH = 16
WIDTH = 6


@contextlib.contextmanager
def float64():
    with jax.enable_x64(True):
        yield


# -- Models, one for each kind of parameter that has its own rule ----------------------


def _normal(seed, *shape, dtype=jnp.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def unrolled(params, batch):
    h = batch["x"]
    for w in params["layers"]:
        h = jnp.tanh(h @ w)
    return jnp.mean(jnp.square(h @ params["out"] - batch["y"]))


def _layer(h, p):
    h = h + jnp.tanh(h @ p["kernel"] + jnp.broadcast_to(p["bias"], h.shape))
    return h * jnp.broadcast_to(p["scale"], h.shape), None


def rematerialised(params, batch):
    h, _ = jax.lax.scan(jax.checkpoint(_layer), batch["x"], params["layers"])
    return jnp.mean(jnp.square(h @ params["out"] - batch["y"]))


def used_twice(params, batch):
    """A scan whose body uses a slice twice, and a parameter that is tied."""

    def layer(h, p):
        return jnp.tanh(h @ p["kernel"]) @ p["kernel"].T * 0.5, None

    h, _ = jax.lax.scan(layer, batch["x"] @ params["tied"], params["layers"])
    return jnp.mean(jnp.square(h @ params["tied"].T))


def scanned_and_used(params, batch):
    """Stacked layers that are scanned over twice, and once more outside."""
    h, _ = jax.lax.scan(_layer, batch["x"], params["layers"])
    h, _ = jax.lax.scan(_layer, h, params["layers"])
    penalty = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params["layers"]))
    return jnp.mean(jnp.square(h @ params["out"])) + 1e-3 * penalty


@jax.jit
def odd(params, batch):
    """Stacked leaves that get a bare product for a gradient, or none at all."""

    def layer(h, p):
        penalty = jnp.sum(p["penalised"] * p["fixed"])
        _ = h @ p["ignored"]
        return jnp.tanh(h @ p["kernel"]) + jax.lax.stop_gradient(p["frozen"]), penalty

    h, penalties = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.mean(jnp.square(h @ params["out"])) - jnp.sum(penalties)


def embedded(params, batch):
    h = params["table"][batch["tokens"]]
    h = jnp.tanh(h.sum(1) @ params["out"]) @ params["out"].T
    return jnp.mean(jnp.square(h @ params["table"].T))


def recurrent(params, batch):
    """A parameter that every iteration of a scan reads, and one that none does."""

    def cell(h, x):
        return jnp.tanh(h @ params["cell"] + x), None

    x = batch["x"]
    h, _ = jax.lax.scan(cell, jnp.zeros_like(x), jnp.stack([x, x * 0.5, x * 0.25]))
    frozen = jax.lax.stop_gradient(params["frozen"])
    return jnp.mean(jnp.square(h)) + jnp.sum(frozen)


def _layers(seed=1, depth=3):
    return {
        "kernel": _normal(seed, depth, WIDTH, WIDTH) * 0.4,
        "bias": _normal(seed + 1, depth, WIDTH) * 0.1,
        "scale": 1 + _normal(seed + 2, depth, WIDTH) * 0.1,
    }


OUT = _normal(7, WIDTH, 3)
MODELS = {
    "unrolled": (
        unrolled,
        {"layers": [_normal(i, WIDTH, WIDTH) * 0.4 for i in range(3)], "out": OUT},
    ),
    "rematerialised": (rematerialised, {"layers": _layers(), "out": OUT}),
    "used_twice": (
        used_twice,
        {"layers": {"kernel": _layers()["kernel"]}, "tied": _normal(3, WIDTH, WIDTH)},
    ),
    "scanned_and_used": (scanned_and_used, {"layers": _layers(), "out": OUT}),
    "odd": (
        odd,
        {
            "layers": {
                "kernel": _layers()["kernel"],
                "ignored": _layers()["kernel"],
                "frozen": _normal(8, 3, 1, WIDTH),
                "penalised": _normal(9, 3, WIDTH),
                "fixed": _normal(9, 3, WIDTH),
            },
            "out": OUT,
        },
    ),
    "embedded": (embedded, {"table": _normal(4, 5, WIDTH), "out": OUT}),
    "recurrent": (
        recurrent,
        {
            "cell": _normal(5, WIDTH, WIDTH),
            "frozen": _normal(6, 3),
            "unused": _normal(6, 3),
        },
    ),
}


def integers(seed, *shape):
    drawn = np.random.default_rng(seed).integers(-9, 9, shape)
    return drawn.astype(np.float32)


def make_batch(size=BATCH, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(size, WIDTH)).astype(np.float32),
        "y": rng.normal(size=(size, 3)).astype(np.float32),
        "tokens": rng.integers(0, 5, size=(size, 4)).astype(np.int32),
    }


def assert_same_bits(a, b):
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    assert leaves
    for x, y in zip(leaves, others, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        # Bytes, so that -0 and 0 differ; the first line is for the message.
        np.testing.assert_array_equal(x, y, strict=True)
        assert x.tobytes() == y.tobytes()


def largest_error(a, b):
    """The largest error, relative to the largest entry of the leaf it is in."""
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    assert leaves
    return max(
        float(np.max(np.abs(np.asarray(x, "f8") - np.asarray(y, "f8"))))
        / max(float(np.max(np.abs(np.asarray(y, "f8")))), 1e-30)
        for x, y in zip(leaves, others, strict=True)
    )


# -- Equal to the undivided batch ------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_it_equals_the_undivided_batch_to_twelve_digits_in_float64(name, optimize):
    fun, params = MODELS[name]
    with float64():
        params, batch = (
            jax.tree.map(
                lambda x: jnp.asarray(x, jnp.int32 if x.dtype == np.int32 else "f8"), t
            )
            for t in (params, make_batch())
        )
        undivided = jax.jit(jax.value_and_grad(fun))
        expected = undivided(params, batch)
        # All four in place; by hand differs from that in bits alone, tested below.
        for k in (1, 2, 4, 8) if optimize else (4,):
            got = jax.jit(ga.value_and_grad(fun, k, optimize=optimize))(params, batch)
            assert jax.tree.structure(got) == jax.tree.structure(expected)
            assert largest_error(got, expected) < 1e-12
        # The twins: a dropped micro-batch, and the sum for the mean.
        less = {name: x[: BATCH // 2] for name, x in batch.items()}
        assert largest_error(undivided(params, less), expected) > 1e-3
        total = jax.tree.map(lambda x: x * 2, expected)
        assert largest_error(total, expected) > 0.5


def linear(w, batch):
    return jnp.mean(batch["x"] @ w)


@pytest.mark.grid(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_it_is_within_the_derived_bound_of_the_exact_mean(dtype, k):
    """The gradient of a mean of w·x is the mean of x: its terms are known exactly."""
    x = jnp.asarray(_normal(0, BATCH, WIDTH), dtype)
    w = jnp.zeros(WIDTH, dtype)
    grads = jax.jit(ga.value_and_grad(linear, k))(w, {"x": x})[1]
    assert grads.dtype == dtype
    x = np.asarray(x, "f8")
    # In the dtype: m - 1 sums in a micro-batch and its result, and the result of all.
    # In float32: k - 1 sums and a division. The terms x/m are exact, m a power of two.
    unit = float(jnp.finfo(dtype).eps) / 2
    roundings = (BATCH // k + 1) * unit + k * float(jnp.finfo("float32").eps) / 2
    # Two of them make up for the products of roundings.
    bound = (roundings + 2 * unit) * np.sum(np.abs(x), 0) / BATCH
    assert np.all(np.abs(np.asarray(grads, "f8") - x.mean(0)) <= bound)
    # The twins: half of the batch dropped, and a wrong normaliser.
    assert np.any(np.abs(x[: BATCH // 2].mean(0) - x.mean(0)) > bound)
    assert np.any(np.abs(x.sum(0) / (BATCH - 4) - x.mean(0)) > bound)


@pytest.mark.grid(4)
@pytest.mark.parametrize("optimize", OPTIMIZE)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_integer_terms_give_the_bits_of_the_undivided_batch(optimize, k):
    def fun(params, x):
        h, _ = jax.lax.scan(lambda h, w: (h + x * w, None), x, params["layers"])
        # A mean over examples of integers: exact, for a power of two of them.
        return jnp.sum(h @ params["out"]) / x.shape[0]

    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (BATCH, 4)).astype(np.float32)
    params = {
        "layers": rng.integers(-9, 9, (3, BATCH // k, 4)).astype(np.float32)[:, :1],
        "out": rng.integers(-9, 9, (4,)).astype(np.float32),
    }

    def broadcast(params, x):
        shape = (params["layers"].shape[0], *x.shape)
        layers = jnp.broadcast_to(params["layers"], shape)
        return fun({**params, "layers": layers}, x)

    expected = jax.jit(jax.value_and_grad(broadcast))(params, x)
    got = jax.jit(ga.value_and_grad(broadcast, k, optimize=optimize))(params, x)
    assert_same_bits(got, expected)


# -- The same bits ---------------------------------------------------------------------


def in_groups(fun, params, batch, k, groups, **options):
    """A window of k micro-batches by `groups` calls of `accumulate`."""
    call = jax.jit(ga.accumulate(fun, k // groups, **options), donate_argnums=0)
    acc = ga.accumulator.init(params)
    size = jax.tree.leaves(batch)[0].shape[0] // groups
    for i in range(groups):
        part = {name: x[i * size :][:size] for name, x in batch.items()}
        _, acc = call(acc, params, part)
    return acc


def row_count(batch):
    return jnp.sum(batch["y"][:, 0] > 0, dtype=jnp.int32)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("name", "weighted", "rows"),
    [(name, False, rows) for name in MODELS for rows in (1, 2)]
    + [(name, True, 2) for name in ("unrolled", "rematerialised", "odd")],
)
def test_groupings_and_paths_agree_bit_for_bit(name, weighted, rows):
    fun, params = MODELS[name]
    # Micro-batches of one row are the hard case: products that no sum follows.
    batch = make_batch(8 * rows)
    options = {"weight_fn": row_count} if weighted else {}
    step = jax.jit(ga.value_and_grad(fun, 8, **options))
    expected = step(params, batch)
    for groups in (2, 4, 8) if name == "rematerialised" else (8,):
        acc = in_groups(fun, params, batch, 8, groups, **options)
        assert int(acc.count) == 8
        assert_same_bits(MEAN(acc), expected[1])
    if not weighted:  # a weight of 0 leaves the backward pass in place out: a branch
        with helpers.by_hand():
            plain = jax.jit(ga.value_and_grad(fun, 8))(params, batch)
            acc = in_groups(fun, params, batch, 8, 8)
        assert_same_bits(plain, expected)
        assert_same_bits(MEAN(acc), expected[1])
    # The twin: the same micro-batches in another order have other bits.
    turned = step(params, {name: x[::-1].copy() for name, x in batch.items()})
    pairs = zip(jax.tree.leaves(turned), jax.tree.leaves(expected), strict=True)
    assert any(np.any(x != y) for x, y in pairs)


def adds_in_place(step, *args):
    return "freeze" in str(jax.make_jaxpr(step)(*args))


@pytest.mark.skipif(not HAS_REFS, reason="references came with jax 0.11.1")
def test_only_what_has_the_same_bits_is_summed_in_place():
    for name, (fun, params) in MODELS.items():
        here = name in ("rematerialised", "odd")
        step = ga.value_and_grad(fun, 2)
        assert adds_in_place(step, params, make_batch()) == here, name
    fun, params = MODELS["rematerialised"]
    # A matrix product over one row is a bare product; a bias of one row likewise.
    step = ga.value_and_grad(fun, BATCH)
    assert not adds_in_place(step, params, make_batch())
    step = ga.value_and_grad(fun, 2, optimize=False)
    assert not adds_in_place(step, params, make_batch())


@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [3, 6])
def test_groupings_agree_where_k_is_no_power_of_two(k):
    fun, params = MODELS["rematerialised"]
    batch = make_batch(2 * k)
    expected = jax.jit(ga.value_and_grad(fun, k))(params, batch)[1]
    acc = in_groups(fun, params, batch, k, k)
    assert_same_bits(MEAN(acc), expected)


@pytest.mark.exhaustive
def test_parameters_after_fifty_steps_of_adam_agree_bit_for_bit():
    fun, params = MODELS["rematerialised"]
    opt = optax.adam(1e-2)
    batches = [make_batch(16, seed) for seed in range(50)]

    @jax.jit
    def update(grads, opt_state, params):
        with jax.numpy_dtype_promotion("standard"):  # optax promotes its count
            updates, opt_state = opt.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def train(gradient):
        mine = jax.tree.map(jnp.asarray, params)
        opt_state = opt.init(mine)
        for batch in batches:
            mine, opt_state = update(gradient(mine, batch), opt_state, mine)
        return mine

    def whole(k):
        step = jax.jit(ga.value_and_grad(fun, k))
        return lambda params, batch: step(params, batch)[1]

    def by_hand(params, batch):
        with helpers.by_hand():  # which a cache must not hide
            return jax.jit(ga.value_and_grad(fun, 8))(params, batch)[1]

    def by_calls(groups):
        call = jax.jit(ga.accumulate(fun, 8 // groups), donate_argnums=0)
        mean = MEAN

        def gradient(params, batch):
            acc = ga.accumulator.init(params)
            size = 16 // groups
            for i in range(groups):
                part = {name: x[i * size :][:size] for name, x in batch.items()}
                _, acc = call(acc, params, part)
            return mean(acc)

        return gradient

    expected = train(whole(8))
    assert largest_error(expected, params) > 0.1
    for gradient in (by_hand, by_calls(1), by_calls(2), by_calls(8)):
        assert_same_bits(train(gradient), expected)
    # The twin: another split has the same gradients to seven digits, and other bits.
    assert largest_error(train(whole(4)), expected) > 0


@pytest.mark.exhaustive
def test_what_an_empty_accumulator_holds_is_never_read():
    fun, params = MODELS["rematerialised"]
    batch = make_batch()
    clean = ga.accumulator.init(params)
    dirty = ga.accumulator.Accumulator(
        jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params),
        jnp.float32(jnp.nan),
        jnp.int32(0),
    )
    for options in ({}, {"weight_fn": row_count}, {"optimize": False}):
        call = jax.jit(ga.accumulate(fun, 2, **options))
        a, b = (call(acc, params, batch)[1] for acc in (clean, dirty))
        assert_same_bits(a, b)


# -- Weights ---------------------------------------------------------------------------


def masked(params, batch):
    h, _ = jax.lax.scan(jax.checkpoint(_layer), batch["x"], params["layers"])
    loss = jnp.square(h @ params["out"])[:, 0] * batch["mask"]
    return jnp.sum(loss) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)


def tokens(batch):
    return jnp.sum(batch["mask"])


def token_batch(counts, size=512):
    mask = np.zeros((len(counts), size), np.float32)
    for row, count in zip(mask, counts, strict=True):
        row[:count] = 1
    return {"x": _normal(3, mask.size, WIDTH), "mask": mask.reshape(-1)}


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_token_counts_as_weights_give_the_undivided_gradient(optimize):
    _, params = MODELS["rematerialised"]
    batch = token_batch([1, 512, 37, 200])
    with float64():
        params, batch = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64), (params, batch)
        )
        expected = jax.jit(jax.value_and_grad(masked))(params, batch)
        weighted = ga.value_and_grad(masked, 4, weight_fn=tokens, optimize=optimize)
        assert largest_error(jax.jit(weighted)(params, batch), expected) < 1e-12
        means = jax.jit(ga.value_and_grad(masked, 4, optimize=optimize))(params, batch)
        # One token weighs as much as 512 of them in the mean of means.
        assert largest_error(means[1], expected[1]) > 0.05


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", OPTIMIZE)
@pytest.mark.parametrize("poisoned", [0, 2, 3])
def test_a_micro_batch_of_weight_0_changes_nothing_though_it_is_nan(optimize, poisoned):
    _, params = MODELS["rematerialised"]
    counts = [5, 9, 3, 7]
    counts[poisoned] = 0
    batch = token_batch(counts, 16)
    clean = batch["x"].copy()
    batch["x"][poisoned * 16 : (poisoned + 1) * 16] = np.nan
    step = jax.jit(ga.value_and_grad(masked, 4, weight_fn=tokens, optimize=optimize))
    value, grads = step(params, batch)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves((value, grads)))
    assert_same_bits((value, grads), step(params, {**batch, "x": clean}))
    # The twin: with a weight, the NaN shows.
    assert np.isnan(jax.jit(ga.value_and_grad(masked, 4))(params, batch)[0])


@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_a_window_of_weight_0_has_value_and_gradients_0(optimize):
    _, params = MODELS["rematerialised"]
    batch = token_batch([0, 0], 4)
    batch["x"][:] = np.nan
    step = jax.jit(ga.value_and_grad(masked, 2, weight_fn=tokens, optimize=optimize))
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(step(params, batch)))
    acc = ga.accumulator.init(params)
    call = jax.jit(ga.accumulate(masked, weight_fn=tokens, optimize=optimize))
    good = token_batch([3], 4)
    _, acc = call(acc, params, good)
    _, after = call(acc, params, token_batch([0], 4))
    assert_same_bits(after.total, acc.total)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def test_a_backward_pass_that_is_not_linear_sees_the_cotangent_of_the_mean():
    """Were the weight its cotangent, a clipped gradient would be clipped elsewhere."""

    def fun(w, x):
        return jnp.mean(clipped(x @ w))

    x, w = _normal(0, 8, WIDTH), _normal(1, WIDTH)
    weighted = ga.value_and_grad(fun, 2, weight_fn=lambda x: jnp.float32(x.shape[0]))
    plain = ga.value_and_grad(fun, 2)
    # Equal weights that are a power of two: exact.
    assert_same_bits(jax.jit(weighted)(w, x)[1], jax.jit(plain)(w, x)[1])
    # The twin: the cotangent 4 does not give four times the gradient.
    _, pullback = jax.vjp(fun, w, x)
    one, four = (pullback(jnp.float32(weight))[0] for weight in (1, 4))
    assert largest_error(four, 4 * one) > 0.1


def test_weights_that_a_bfloat16_loss_could_not_hold_are_exact():
    def fun(w, x):
        return jnp.mean(x * w).astype(jnp.bfloat16)

    x = np.repeat(np.float32([[1.0], [3.0]]), 257, 0)
    step = ga.value_and_grad(
        fun, 2, weight_fn=lambda x: jnp.where(x[0, 0] == 1, 257.0, 255.0)
    )
    grads = jax.jit(step)(jnp.float32(1.0), x)[1]
    assert float(grads) == (257 * 1 + 255 * 3) / 512


# -- Keys, carry, aux ------------------------------------------------------------------


def dropped_out(w, x, rngs):
    mask = jax.random.bernoulli(rngs["dropout"], 0.5, x.shape)
    return jnp.mean(jnp.where(mask, x, 0.0) @ w), mask


def test_micro_batches_see_different_keys_and_the_same_ones_again():
    x, w = np.ones((8, WIDTH), np.float32), _normal(0, WIDTH)
    rngs = {"dropout": jax.random.key(3)}
    step = jax.jit(
        ga.value_and_grad(dropped_out, 4, rng_argnums=2, has_aux=True, aux="stack")
    )
    (value, masks), grads = step(w, x, rngs)
    assert masks.shape == (4, 2, WIDTH)
    assert len({np.asarray(m).tobytes() for m in masks}) == 4
    assert_same_bits(step(w, x, rngs), ((value, masks), grads))
    expected = jax.random.bernoulli(jax.random.fold_in(rngs["dropout"], 2), 0.5, (2, 6))
    assert_same_bits(masks[2], expected)
    other = step(w, x, {"dropout": jax.random.key(4)})
    assert np.any(np.asarray(other[0][1]) != np.asarray(masks))


@pytest.mark.grid(1)
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_calls_of_accumulate_draw_the_keys_of_one_value_and_grad(make_key):
    x, w, rngs = _normal(1, 8, WIDTH), _normal(0, WIDTH), {"dropout": make_key(3)}
    options = {"rng_argnums": 2, "has_aux": True, "aux": "stack"}
    (_, masks), grads = jax.jit(ga.value_and_grad(dropped_out, 4, **options))(
        w, x, rngs
    )
    call = jax.jit(ga.accumulate(dropped_out, 2, **options))
    acc = ga.accumulator.init(w)
    (_, first), acc = call(acc, w, x[:4], rngs)
    (_, second), acc = call(acc, w, x[4:], rngs)
    assert_same_bits(jnp.concatenate([first, second]), masks)
    assert_same_bits(ga.accumulator.mean(acc), grads)


def normalised(w, stats, x):
    mean = 0.9 * stats["mean"] + 0.1 * jnp.mean(x, 0)
    new = {"mean": mean, "steps": stats["steps"] + 1}
    loss = jnp.mean((x - jnp.broadcast_to(x.mean(0), x.shape)) @ w)
    return loss, (new, jnp.max(x))


@pytest.mark.parametrize("as_tuple", [False, True])
def test_statistics_thread_through_the_micro_batches_in_order(as_tuple):
    x, w = _normal(0, 8, WIDTH), _normal(1, WIDTH)
    stats = {"mean": jnp.zeros(WIDTH), "steps": jnp.int32(0)}

    def fun(w, stats, x):
        loss, (new, aux) = normalised(w, stats, x)
        return loss, ((new,) if as_tuple else new, aux)

    step = ga.value_and_grad(
        fun,
        4,
        batch_argnums=2,
        carry_argnums=(1,) if as_tuple else 1,
        has_aux=True,
        aux="last",
    )
    (_, (carry, aux)), _ = jax.jit(step)(w, stats, x)
    carry = carry[0] if as_tuple else carry
    expected = stats
    one = jax.jit(normalised)
    for i in range(4):
        expected = one(w, expected, x[2 * i : 2 * i + 2])[1][0]
    assert_same_bits(carry, expected)
    assert int(carry["steps"]) == 4
    assert float(aux) == x[6:].max()
    # The twin: in another order they differ.
    reverse = jax.jit(step)(w, stats, x[::-1].copy())[0][1][0]
    reverse = reverse[0] if as_tuple else reverse
    assert largest_error(reverse["mean"], expected["mean"]) > 1e-3


def test_a_carry_without_aux_comes_back_beside_the_loss():
    def fun(w, count, x):
        return jnp.mean(x @ w), count + 1

    x, w = _normal(0, 8, WIDTH), _normal(1, WIDTH)
    options = {"batch_argnums": 2, "carry_argnums": 1}
    (_, count), _ = ga.value_and_grad(fun, 4, **options)(w, 0, x)
    assert int(count) == 4
    acc = ga.accumulator.init(w)
    (_, count), acc = ga.accumulate(fun, 2, **options)(acc, w, 0, x[:4])
    (_, count), acc = ga.accumulate(fun, 2, **options)(acc, w, count, x[4:])
    assert int(count) == 4


def with_aux(w, x):
    return jnp.mean(x @ w), {
        "rows": jnp.int32(x.shape[0]),
        "positive": jnp.sum(x[:, 0] > 0, dtype=jnp.int32),
        "any": jnp.any(x > 2),
        "top": jnp.max(x),
        "parts": (jnp.sum(x), x[0].astype(jnp.bfloat16)),
    }


def first_weight(x):
    return jnp.sum(x[:, 0] > 0)


@pytest.mark.grid(1)
@pytest.mark.parametrize("weight_fn", [None, first_weight])
def test_aux_is_put_together_as_asked_leaf_by_leaf(weight_fn):
    x, w = integers(0, 8, WIDTH), integers(1, WIDTH)
    micro = x.reshape(4, 2, WIDTH)
    weights = np.array([float(first_weight(m)) if weight_fn else 1.0 for m in micro])
    modes = {
        "rows": "sum",
        "positive": "mean",
        "any": "sum",
        "top": "last",
        "parts": ("mean", "stack"),
    }
    options = {"has_aux": True, "weight_fn": weight_fn}
    step = jax.jit(ga.value_and_grad(with_aux, 4, aux=modes, **options))
    (value, aux), _ = step(w, x)

    def mean(terms):
        # The terms are halves of integers: their sum is exact, its quotient rounded.
        return np.float32(np.sum(weights * terms) / np.sum(weights))

    assert value == mean([(m @ w).mean() for m in micro])
    assert aux["rows"].dtype == jnp.int32
    assert int(aux["rows"]) == 8
    assert aux["positive"].dtype == jnp.float32
    assert aux["positive"] == mean([(m[:, 0] > 0).sum() for m in micro])
    assert int(aux["any"]) == sum(bool((m > 2).any()) for m in micro)
    assert float(aux["top"]) == micro[3].max()
    assert aux["parts"][0] == mean([m.sum() for m in micro])
    # The twin: the last is not the mean.
    assert aux["parts"][0] != micro[3].sum()
    assert aux["parts"][1].dtype == jnp.bfloat16
    assert_same_bits(aux["parts"][1], jnp.asarray(micro[:, 0], jnp.bfloat16))
    prefix = {**modes, "parts": "mean"}
    parts = ga.value_and_grad(with_aux, 4, aux=prefix, **options)(w, x)[0][1]["parts"]
    assert parts[1].dtype == jnp.bfloat16
    assert parts[1].shape == (WIDTH,)


# -- Arguments -------------------------------------------------------------------------


def test_argnums_batch_argnums_and_keywords_are_those_of_jax():
    def fun(inputs, w, flag, b, targets, *, scale, power=1):
        assert flag == "yes"
        prediction = inputs @ w["w"] + b
        return scale * jnp.mean((prediction - targets) ** power)

    # Integers and halves, means over powers of two: exact.
    x, y = integers(0, 8, WIDTH), integers(1, 8)
    args = (x, {"w": integers(2, WIDTH)}, "yes", np.float32(0.5), y)
    options = {"scale": jnp.float32(3.0), "power": 2}
    for argnums in (1, (1, 3), (3, 1), (-2,), [1]):
        expected = jax.value_and_grad(fun, argnums)(*args, **options)
        step = ga.value_and_grad(fun, 4, argnums=argnums, batch_argnums=(0, -1))
        got = step(*args, **options)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        assert_same_bits(got, expected)
        params = (
            args[argnums] if isinstance(argnums, int) else [args[i] for i in argnums]
        )
        params = params if isinstance(argnums, int) else tuple(params)
        acc = ga.accumulator.init(params)
        call = ga.accumulate(fun, 4, argnums=argnums, batch_argnums=(0, -1))
        assert_same_bits(
            ga.accumulator.mean(call(acc, *args, **options)[1]),
            got[1] if isinstance(argnums, int) else tuple(got[1]),
        )


@pytest.mark.quick
def test_the_function_is_traced_once_for_any_number_of_micro_batches():
    _, params = MODELS["rematerialised"]
    for k, options in ((1, {}), (8, {}), (8, {"weight_fn": row_count})):
        traces = []

        def fun(params, batch, traces=traces):
            traces.append(0)
            return rematerialised(params, batch)

        step = jax.jit(ga.value_and_grad(fun, k, **options))
        step(params, make_batch())
        step(params, make_batch(seed=1))
        assert len(traces) == 1
        call = jax.jit(ga.accumulate(fun, k, **options))
        acc = ga.accumulator.init(params)
        for seed in range(3):
            _, acc = call(acc, params, make_batch(seed=seed))
        assert len(traces) == 2


@pytest.mark.grid(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_parameters_of_low_precision_accumulate_in_float32(dtype, optimize):
    """4096 ones add up to 256 in bfloat16."""

    def fun(params, x):
        def layer(h, p):
            return h + jnp.sum(p * x), None

        return jax.lax.scan(layer, jnp.zeros([], dtype), params)[0]

    params = jnp.ones((2, 1), dtype)
    call = ga.accumulate(fun, 4096, optimize=optimize)
    x = jnp.ones(4096, dtype)
    _, acc = jax.jit(call)(ga.accumulator.init(params), params, x)
    assert acc.total.dtype == jnp.float32
    assert float(acc.total[0, 0]) == 4096
    low = ga.accumulator.init(params, None)
    assert jax.jit(call)(low, params, x)[1].total.dtype == dtype


def test_complex_parameters_work_as_in_jax():
    def fun(w, x):
        return jnp.mean(jnp.square(jnp.abs(x.astype(jnp.complex128) @ w)))

    with float64():
        w = jnp.asarray(_normal(0, WIDTH) + 1j * _normal(1, WIDTH), jnp.complex128)
        x = jnp.asarray(_normal(2, 8, WIDTH), jnp.float64)
        expected = jax.grad(fun)(w, x)
        got = ga.value_and_grad(fun, 4)(w, x)[1]
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-12)
        # The twin: JAX's convention is the conjugate of the other one.
        assert np.any(np.abs(got.conj() - expected) > 1e-3)


def test_nothing_to_differentiate_is_nothing():
    value, grads = ga.value_and_grad(lambda p, x: jnp.mean(x), 2)({}, np.ones(4))
    assert grads == {}
    assert float(value) == 1


# -- Composition -----------------------------------------------------------------------


def in_float64(*trees):
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.int32 if x.dtype == np.int32 else "f8"), trees
    )


def summed(fun, weight_fn):
    """What `ga.value_and_grad(fun, 4)` is, written out."""

    def undivided(params, batch):
        if weight_fn is None:
            return jax.value_and_grad(fun)(params, batch)
        parts = [{n: x[4 * i : 4 * i + 4] for n, x in batch.items()} for i in range(4)]
        weights = [weight_fn(part).astype("f8") for part in parts]
        terms = [jax.value_and_grad(fun)(params, part) for part in parts]

        def mean(*xs):
            return sum(w * x for w, x in zip(weights, xs, strict=True)) / sum(weights)

        return jax.tree.map(mean, *terms)

    return undivided


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "weight_fn", [pytest.param(None, marks=pytest.mark.published), row_count]
)
def test_an_ensemble_under_vmap_has_the_gradients_of_its_members(weight_fn):
    fun, params = MODELS["rematerialised"]
    with float64():
        params, batch = in_float64(params, make_batch())
        step = ga.value_and_grad(fun, 4, weight_fn=weight_fn)
        members = jax.tree.map(lambda p: jnp.stack([p, p * 0.5]), params)
        expected = jax.jit(
            lambda members, batch: jax.lax.map(
                lambda member: summed(fun, weight_fn)(member, batch), members
            )
        )(members, batch)
        outside = jax.jit(jax.vmap(step, in_axes=(0, None)))(members, batch)
        inside = jax.vmap(jax.jit(step), in_axes=(0, None))(members, batch)
        nested = jax.vmap(jax.vmap(step, in_axes=(0, None)), in_axes=(None, 0))
        batches = jax.tree.map(lambda x: x[None], batch)
        nested = jax.tree.map(lambda x: x[0], jax.jit(nested)(members, batches))
        for got in (outside, inside, nested):
            assert largest_error(got, expected) < 1e-12
        # The twin: the members differ.
        swapped = jax.tree.map(lambda x: x[::-1], expected)
        assert largest_error(swapped, expected) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "weight_fn", [pytest.param(None, marks=pytest.mark.published), row_count]
)
def test_grad_through_it_is_the_grad_through_the_undivided_batch(weight_fn):
    fun, params = MODELS["rematerialised"]
    with float64():
        params, batch = in_float64(params, make_batch())

        def outer(step):
            def norm(params):
                value, grads = step(params, batch)
                return value + sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

            return norm

        step = ga.value_and_grad(fun, 4, weight_fn=weight_fn)
        expected = jax.jit(jax.grad(outer(summed(fun, weight_fn))))(params)
        got = jax.jit(jax.grad(outer(step)))(params)
        # The second derivative has the roundings of the first twice.
        assert largest_error(got, expected) < 2e-12
        members = jax.tree.map(lambda p: p[None], params)
        ensemble = jax.jit(jax.vmap(jax.grad(outer(step))))(members)
        ensemble = jax.tree.map(lambda x: x[0], ensemble)
        assert largest_error(ensemble, expected) < 2e-12
        # The twin: the gradient of the loss alone.
        assert largest_error(jax.jit(jax.grad(fun))(params, batch), expected) > 1e-3


@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [3, 4])
def test_what_is_exactly_0_has_the_derivative_of_the_undivided_batch(k):
    """A loss of 0 with gradients of 0, and weights whose sum is 1."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)), jnp.float32)

    def fun(w, batch):
        errors = (batch["x"] @ w) ** 2 + batch["x"] @ w
        return jnp.sum(errors * batch["weight"]) / jnp.sum(batch["weight"])

    def outer(step):
        def total(w, weight):
            value, grads = step(w, {"x": x, "weight": weight})
            return value + jnp.sum(grads**2)

        return jax.jit(jax.grad(total, argnums=(0, 1)))

    step = ga.value_and_grad(fun, k, weight_fn=lambda batch: jnp.sum(batch["weight"]))
    weight = jnp.array([1, 1, 2, 4, 1, 1, 1, 1, 1, 1, 1, 1]) / 16
    for w in (jnp.zeros(3), jnp.ones(3)):
        got, expected = (
            f(w, weight) for f in map(outer, (step, jax.value_and_grad(fun)))
        )
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_forward_mode_and_hessian_vector_products_are_those_of_the_whole(optimize):
    fun, params = MODELS["rematerialised"]
    with float64():
        params, batch = in_float64(params, make_batch())
        ones = jax.tree.map(jnp.ones_like, params)

        def slope(step):
            def grads(params):
                return step(params, batch)[1]

            return jax.jit(lambda p: jax.jvp(grads, (p,), (ones,))[1])(params)

        expected = slope(jax.value_and_grad(fun))
        got = slope(ga.value_and_grad(fun, 4, optimize=optimize))
        assert largest_error(got, expected) < 2e-12
        assert largest_error(jax.grad(fun)(params, batch), expected) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("weight_fn", [None, row_count])
def test_grad_of_a_vmap_over_batches_is_the_sum_of_their_gradients(weight_fn):
    """The weight is the same for all of them, and the gradient is not."""
    fun, params = MODELS["rematerialised"]
    with float64():
        params, batch = in_float64(params, make_batch())
        batches = jax.tree.map(lambda x: jnp.stack([x, x[::-1] * 2]), batch)

        def total(step):
            def losses(params):
                return jnp.sum(jax.vmap(step, in_axes=(None, 0))(params, batches)[0])

            return jax.jit(jax.grad(losses))(params)

        expected = total(summed(fun, weight_fn))
        got = total(ga.value_and_grad(fun, 4, weight_fn=weight_fn))
        assert largest_error(got, expected) < 1e-12
        assert largest_error(jax.grad(fun)(params, batch), expected) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "optimize", [True, pytest.param(False, marks=pytest.mark.published)]
)
def test_no_tracer_outlives_a_call(optimize):
    fun, params = MODELS["rematerialised"]
    with jax.checking_leaks():
        step = ga.value_and_grad(fun, 4, optimize=optimize, weight_fn=row_count)
        jax.jit(step)(params, make_batch())
        jax.jit(jax.grad(lambda p: step(p, make_batch())[0]))(params)


@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_a_stack_of_no_layers_has_an_empty_gradient(optimize):
    fun, params = MODELS["rematerialised"]
    params = {**params, "layers": jax.tree.map(lambda p: p[:0], params["layers"])}
    step = ga.value_and_grad(fun, 4, optimize=optimize)
    value, grads = jax.jit(step)(params, make_batch())
    due, slope = jax.value_and_grad(fun)(params, make_batch())
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, slope)
    assert abs(value - due) < BATCH * WIDTH * jnp.finfo(jnp.float32).eps


@pytest.mark.exhaustive
def test_integers_booleans_and_keys_pass_under_vmap_and_grad():
    """Operands that have no derivative, in the loop that has rules of its own."""
    _, params = MODELS["rematerialised"]

    def fun(params, batch, keys, carry, flag):
        x = jnp.where(flag, batch["x"], jnp.zeros_like(batch["x"]))
        x = jnp.where(jax.random.bernoulli(keys["a"], 0.5, x.shape), x, -x)
        loss = rematerialised(params, {**batch, "x": x})
        return loss, (carry + 1, batch["tokens"])

    def norm(params, key, flag):
        options = {"rng_argnums": 2, "carry_argnums": 3, "has_aux": True}
        step = ga.value_and_grad(fun, 4, aux="stack", **options)
        out = step(params, make_batch(), {"a": key}, jnp.int32(5), flag)
        (_, (carry, tokens)), grads = out
        return sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)), (carry, tokens)

    keys = jax.random.split(jax.random.key(0), 2)
    flags = jnp.array([True, False])
    out = []
    for optimize in OPTIMIZE:
        slope = jax.vmap(jax.grad(norm, has_aux=True), in_axes=(None, 0, 0))
        with helpers.by_hand(optimize):
            out.append(jax.jit(slope)(params, keys, flags))
    # Under vmap and grad one and the same program.
    assert_same_bits(out[0], out[1])
    grads, (carry, tokens) = out[0]
    assert np.array_equal(carry, [9, 9])
    assert np.array_equal(tokens[1].reshape(BATCH, 4), make_batch()["tokens"])
    # The twin: another key and flag have another gradient.
    first, second = (jax.tree.map(lambda g, i=i: g[i], grads) for i in range(2))
    assert largest_error(first, second) > 0.1


@pytest.mark.exhaustive
def test_printing_and_collectives_are_left_alone(capfd):
    fun, params = MODELS["rematerialised"]

    def printing(params, batch):
        loss = fun(params, batch)
        jax.debug.print("the number is {}", params["number"])
        return loss

    params = {**params, "number": np.float32(7.5)}
    got = jax.jit(ga.value_and_grad(printing, 4))(params, make_batch())
    with helpers.by_hand():
        expected = jax.jit(ga.value_and_grad(fun, 4))(params, make_batch())
    assert_same_bits(got, expected)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("the number is 7.5") == 4

    def over_members(params, batch):
        return jax.lax.pmean(fun(params, batch), "members")

    step = jax.vmap(
        ga.value_and_grad(over_members, 4), in_axes=(0, None), axis_name="members"
    )
    members = jax.tree.map(lambda p: np.stack([p, p * 0.5]), params)
    value, _ = jax.jit(step)(members, make_batch())
    # One mean for both; each alone has another one.
    assert value[0] == value[1]
    alone = jax.jit(jax.value_and_grad(fun))(params, make_batch())[0]
    assert abs(value[0] - alone) > 1e-3


def test_it_closes_over_tracers():
    def outer(scale, x):
        def fun(w, x):
            return scale * jnp.mean(x @ w)

        return jnp.sum(ga.value_and_grad(fun, 2)(jnp.ones(WIDTH), x)[1])

    x = integers(0, 8, WIDTH)
    slope = jax.jit(jax.grad(outer))(jnp.float32(2.0), x)
    assert float(slope) == x.mean(0).sum() != 0


@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_donated_inputs_and_a_scan_over_steps_change_nothing(optimize):
    fun, params = MODELS["rematerialised"]
    batch = make_batch()
    step = ga.value_and_grad(fun, 4, optimize=optimize)

    def descend(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, step(params, batch)[1])

    expected = jax.tree.map(jnp.asarray, params)
    for _ in range(3):
        expected = jax.jit(descend, donate_argnums=0)(expected, batch)

    def scan(params):
        return jax.lax.scan(lambda p, _: (descend(p, batch), None), params, length=3)[0]

    assert_same_bits(jax.jit(scan)(jax.tree.map(jnp.asarray, params)), expected)


def test_it_has_the_name_and_documentation_of_the_function():
    def fun(w, x):
        """What it is."""
        return jnp.mean(x * w)

    step = ga.value_and_grad(fun, 2)
    assert step.__name__ == "fun"
    assert step.__doc__ == "What it is."
    ga.value_and_grad(functools.partial(fun), 2)(jnp.float32(1.0), jnp.ones(2))


def test_a_weight_and_an_aux_may_be_plain_numbers():
    def loss(w, x):
        return w * jnp.mean(x), {"rows": x.shape[0]}

    fun = ga.value_and_grad(
        loss, 2, has_aux=True, aux="sum", weight_fn=lambda x: float(x.shape[0])
    )
    (value, aux), grad = jax.jit(fun)(jnp.float32(3.0), jnp.arange(8.0))
    assert (float(value), int(aux["rows"]), float(grad)) == (10.5, 8, 3.5)


@pytest.mark.parametrize("optimize", OPTIMIZE)
@pytest.mark.quick
def test_the_compiled_program_does_not_grow_with_the_number_of_micro_batches(optimize):
    """So that compiling it takes no longer; a loop written out grows with each."""
    params = {"layers": _normal(0, 3, WIDTH, WIDTH), "out": _normal(1, WIDTH)}

    def loss(params, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
        return jnp.mean(jnp.square(h @ params["out"]))

    def instructions(fun, k):
        x = _normal(2, 4 * k, WIDTH)
        text = jax.jit(fun).lower(params, x).compile().as_text()
        return sum(" = " in line for line in text.splitlines())

    ours = [
        instructions(ga.value_and_grad(loss, k, optimize=optimize), k)
        for k in (4, 16, 64)
    ]
    assert max(ours) <= min(ours) + 8  # constants more or less, of the loop's bounds

    def written_out(k):
        def fun(params, x):
            parts = jnp.split(x, k)
            return sum(jax.grad(loss)(params, part)["out"] for part in parts)

        return fun

    assert instructions(written_out(16), 16) > 2 * instructions(written_out(4), 4)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_the_sum_of_small_integers_in_aux_does_not_wrap(dtype):
    def fun(w, x):
        return jnp.mean(x * w), jnp.asarray(100, dtype)

    step = jax.jit(ga.value_and_grad(fun, 8, has_aux=True, aux="sum"))
    (_, total), _ = step(jnp.float32(1), jnp.ones(8))
    assert total.dtype.itemsize == 4
    assert float(total) == 8 * float(fun(1.0, 1.0)[1])


def test_the_mean_of_an_accumulator_of_low_precision_does_not_vanish():
    """1 / k is subnormal in float16 from 2^15 micro-batches on."""
    k = 2**15
    step = ga.value_and_grad(
        lambda w, x: jnp.mean(x * w), k, accumulator_dtype=jnp.float16
    )
    _, grad = jax.jit(step)(jnp.float32(1), jnp.full(k, 1.0))
    assert float(grad) > 0


def half_rounded(w, x):
    return jnp.mean(jax.lax.reduce_precision(x * w, 5, 10))


@jax.custom_jvp
def identity(x):
    return x


@identity.defjvp
def _(primals, tangents):
    """A rule in float16, which the loss itself does not show."""
    return primals[0], tangents[0].astype(jnp.float16).astype(jnp.float32)


def ruled(w, x):
    return jnp.mean(x * identity(w))


def ruled_in_a_loop(w, x):
    return (
        jax.lax.scan(jax.checkpoint(lambda h, x: (h + x * identity(w), 0)), 0.0, x)[0]
        / x.shape[0]
    )


@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        (lambda w, x: jnp.mean(x * w.astype(jnp.float32)), jnp.float16),
        (lambda w, x: jnp.mean(x * w.astype(jnp.float32)), jnp.float8_e4m3fn),
        (half_rounded, jnp.float32),
        (ruled, jnp.float32),
        (ruled_in_a_loop, jnp.float32),
    ],
    ids=["float16", "float8", "reduce_precision", "custom_jvp", "custom_jvp in a scan"],
)
def test_weights_that_count_tokens_do_not_overflow_what_is_narrow(fun, dtype):
    weighted = ga.value_and_grad(fun, 4, weight_fn=lambda x: jnp.float32(2.0**20))
    _, grad = jax.jit(weighted)(jnp.asarray(1, dtype), jnp.full(8, 32.0))
    assert float(grad) == 32.0
