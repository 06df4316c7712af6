"""Micro-batches, each by itself: `accumulate`, whose groupings have the same bits."""

import functools
import operator

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODES, assert_quotients, in_calls, integers, mean_of, ruled
from jax.custom_derivatives import linear_call
from test_microbatch import MODELS, OPTIMIZE, WIDTH, _layer, _normal, make_batch

import ga_optax as ga
from ga_optax._loop import folds
from ga_optax._passes import effects
from ga_optax.testing import assert_trees_bitwise_equal as assert_same_bits


def positive(x):
    return jnp.sum(x[:, 0] > 0, dtype=jnp.int32)


@pytest.mark.parametrize(
    "options", [{}, {"weight_fn": lambda b: positive(b["y"])}, {"optimize": False}]
)
def test_what_an_empty_accumulator_holds_is_never_read(options):
    fun, params = MODELS["embedded"]
    clean = ga.accumulator.init(params)
    nan = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    dirty = clean._replace(total=nan, weight=jnp.float32(jnp.nan))
    call = jax.jit(ga.accumulate(fun, 2, **options))
    a, b = (call(acc, params, make_batch())[1] for acc in (clean, dirty))
    assert_same_bits(a, b)


def masked(params, batch):
    h, _ = jax.lax.scan(jax.checkpoint(_layer), batch["x"], params["layers"])
    loss = jnp.square(h @ params["out"])[:, 0] * batch["mask"]
    return jnp.sum(loss) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)


def tokens(batch):
    return jnp.sum(batch["mask"])


def token_batch(counts):
    mask = np.zeros((len(counts), 4), np.float32)
    for row, count in zip(mask, counts, strict=True):
        row[:count] = 1
    return {"x": _normal(3, mask.size, WIDTH), "mask": mask.reshape(-1)}


@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", OPTIMIZE)
def test_a_window_of_weight_0_has_value_and_gradients_0(optimize):
    _, params = MODELS["rematerialised"]
    good, none = token_batch([3, 2]), token_batch([0, 0])
    none["x"][:] = np.nan
    add = jax.jit(ga.accumulate(masked, 2, weight_fn=tokens, optimize=optimize))
    start = ga.accumulator.init(params)
    value, acc = add(start, params, none)
    assert not any(map(np.any, jax.tree.leaves((value, ga.accumulator.mean(acc)))))
    _, acc = add(start, params, good)
    assert_same_bits(add(acc, params, none)[1].total, acc.total)
    # The twin: with a weight, the NaN shows.
    assert np.isnan(mean_of(masked, 2)(params, none)[0])


@jax.custom_jvp
def identity(x):
    return x


@identity.defjvp
def _(primals, tangents):
    """A rule in float16, which the loss itself does not show."""
    return primals[0], tangents[0].astype(jnp.float16).astype(jnp.float32)


def ruled_in_a_loop(w, x):
    body = jax.checkpoint(lambda h, x: (h + x * identity(w), 0))
    return jax.lax.scan(body, 0.0, x)[0] / x.shape[0]


@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        (lambda w, x: jnp.mean(x * w.astype(jnp.float32)), jnp.float8_e4m3fn),
        (lambda w, x: jnp.mean(x * w).astype(jnp.bfloat16), jnp.float32),
        (ruled_in_a_loop, jnp.float32),
    ],
    ids=["float8", "bfloat16 loss", "custom_jvp in a scan"],
)
def test_weights_that_count_tokens_do_not_overflow_what_is_narrow(fun, dtype):
    weighted = mean_of(fun, 4, weight_fn=lambda x: jnp.float32(2.0**20))
    _, grad = jax.jit(weighted)(jnp.asarray(1, dtype), jnp.full(8, 32.0))
    assert float(grad) == 32.0


def test_where_no_mesh_is_named_a_call_is_batched_and_differentiated():
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w))  # noqa: E731
    step = mean_of(loss, 2, weight_fn=operator.itemgetter((0, 0)))  # has no signature
    w, x = _normal(0, 3, WIDTH), jnp.tile(jnp.abs(_normal(1, WIDTH)), (8, 1))

    def both(of):
        products = jax.grad(lambda x: jnp.vdot(of(w[0], x)[1], w[1]))
        return jax.vmap(of, (0, None))(w, x), products(x)

    got = jax.jit(lambda: both(step))()
    assert helpers.off(got, both(jax.value_and_grad(loss))) < 1e-6


clipped = ruled(lambda g: jnp.clip(g, -1e-3, 1e-3))
prints = ruled(lambda g: (jax.debug.callback(lambda _: None, jnp.sum(g)), g)[1])
doubled = jax.custom_jvp(lambda h: h)
doubled.defjvp(lambda h, t: (h[0], 2 * t[0]))
transposed = functools.partial(linear_call, lambda _, h: h, lambda _, g: jnp.sin(g), ())


@pytest.mark.grid(2, 4)
@pytest.mark.parametrize("rule", [clipped, prints, doubled, transposed], ids=range(4))
def test_a_rule_does_in_a_window_what_it_does_for_each_micro_batch(rule, monkeypatch):
    """In layers that are scanned, of micro-batches with weights."""
    k, weights = 4, np.float32([1, 100, 3, 7])
    w, x = _normal(0, 3, 4, 4) / 2, _normal(1, 2 * k, 4)

    def fun(w, x, _):
        h, _ = jax.lax.scan(lambda h, w: (rule(jnp.tanh(h @ w)), None), x, w)
        return jnp.mean(rule(h) ** 2)

    of_one = jax.jit(jax.grad(fun))
    parts = [of_one(w, x[2 * i : 2 * i + 2], 0.0) for i in range(k)]
    parts = np.asarray(parts, np.float64)
    due = np.average(parts, axis=0, weights=weights)
    terms = np.average(np.abs(parts), axis=0, weights=weights)
    # Three layers of products and the sum over micro-batches, in any order.
    bound = 64 * np.finfo(np.float32).eps * np.maximum(terms, 1e-3 * np.max(terms))

    def off():
        how = {"batch_argnums": (1, 2), "weight_fn": lambda x, weight: weight[0]}
        got = jax.jit(mean_of(fun, k, **how))(w, x, np.repeat(weights, 2))[1]
        jax.effects_barrier()
        return np.max(np.abs(got - due) / bound)

    assert off() <= 1
    if rule is clipped:  # the twin: a weight goes through what clips
        monkeypatch.setattr(
            effects, "side_effects", lambda *given: effects.SideEffects()
        )
        assert off() > 1


def dropped_out(w, x, rngs):
    mask = jax.random.bernoulli(rngs["dropout"], 0.5, x.shape)
    return jnp.mean(jnp.where(mask, x, 0.0) @ w), mask


@pytest.mark.grid(1)
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_micro_batches_see_keys_of_their_own_in_any_number_of_calls(make_key):
    x, w, rngs = _normal(1, 8, WIDTH), _normal(0, WIDTH), {"dropout": make_key(3)}
    options = {"rng_argnums": 2, "has_aux": True, "aux": "stack"}
    (_, masks), grads = jax.jit(mean_of(dropped_out, 4, **options))(w, x, rngs)
    due = jax.random.fold_in(rngs["dropout"], 2)
    assert_same_bits(masks[2], jax.random.bernoulli(due, 0.5, (2, WIDTH)))
    assert len({np.asarray(m).tobytes() for m in masks}) == 4
    call = jax.jit(ga.accumulate(dropped_out, 2, **options))
    (_, first), acc = call(ga.accumulator.init(w), w, x[:4], rngs)
    (_, second), acc = call(acc, w, x[4:], rngs)
    assert_same_bits(jnp.concatenate([first, second]), masks)
    assert_same_bits(ga.accumulator.mean(acc), grads)


def test_statistics_thread_through_micro_batches_in_order():
    """And on through calls."""
    x, w = _normal(0, 8, WIDTH), _normal(1, WIDTH)

    def of(stats, x):
        mean = 0.9 * stats["mean"] + 0.1 * jnp.mean(x, 0)
        return {"mean": mean, "steps": stats["steps"] + 1}

    def fun(w, stats, x):
        loss = jnp.mean((x - jnp.broadcast_to(x.mean(0), x.shape)) @ w)
        return loss, ((of(stats, x),), jnp.max(x))

    options = {"batch_argnums": 2, "carry_argnums": (1,), "has_aux": True}
    options |= {"aux": "last"}
    add, acc = jax.jit(ga.accumulate(fun, 2, **options)), ga.accumulator.init(w)
    start = {"mean": jnp.zeros(WIDTH), "steps": jnp.int32(0)}

    def threaded(x):
        carry = start
        for part in jnp.split(x, 2):
            (_, ((carry,), aux)), _ = add(acc, w, carry, part)
            assert float(aux) == part[2:].max()
        return carry

    expected, one = start, jax.jit(fun)  # the same program, for the same bits
    for part in jnp.split(x, 4):
        _, ((expected,), _) = one(w, expected, part)
    assert_same_bits(threaded(x), expected)
    assert int(expected["steps"]) == 4


def with_aux(w, x):
    top = {"all": jnp.max(x), "each": jnp.max(x, 0).astype(jnp.bfloat16)}
    counts = {"rows": jnp.int32(x.shape[0]), "any": jnp.any(x > 2)}
    return jnp.mean(x @ w), dict.fromkeys(MODES, top) | counts


@pytest.mark.parametrize("weight_fn", [None, lambda x, aux: jnp.sum(x[:, 0] ** 2)])
def test_aux_is_put_together_as_asked_leaf_by_leaf(weight_fn):
    """And the mean of the loss and of the gradient is that by the weights."""
    x, w = integers(8, WIDTH), integers(WIDTH, seed=1)
    micro = x.reshape(4, 2, WIDTH)
    weights = np.array([(m[:, 0] ** 2).sum() if weight_fn else 1.0 for m in micro])
    modes = {mode: mode for mode in MODES} | {"rows": "sum", "any": "sum"}
    assert {*modes.values()} == {*folds.FOLDS}
    options = {"has_aux": True, "weight_fn": weight_fn}
    (value, aux), grad = jax.jit(mean_of(with_aux, 4, aux=modes, **options))(w, x)

    def mean(terms):
        # The terms are halves of integers: their sum is exact, its quotient rounded.
        return np.float32(np.sum(weights * terms) / np.sum(weights))

    of_all = micro.max((1, 2))
    due = (
        mean([(m @ w).mean() for m in micro]),
        np.stack([mean(g) for g in micro.mean(1).T]),
    )
    assert_quotients((value, grad, aux["mean"]["all"]), (*due, mean(of_all)))
    for mode, put_together in MODES.items():
        for name, terms in (("all", of_all), ("each", micro.max(1))):
            found, due = aux[mode][name], put_together(terms, weights)
            assert found.dtype == (jnp.float32 if name == "all" else jnp.bfloat16)
            rounds = float(jnp.finfo(found.dtype).eps) if mode == "mean" else 0
            np.testing.assert_allclose(np.asarray(found, float), due, rtol=rounds)
    assert len({np.asarray(aux[x]["each"]).tobytes() for x in MODES}) == 6  # the twin
    any_of = sum((m > 2).any() for m in micro)
    assert_same_bits([aux["any"], aux["rows"]], list(np.int32([any_of, 8])))


def of_rows(w, x):
    return jnp.mean(x @ w), {"scores": x @ w, "mean": jnp.mean(x)}


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_rows_of_different_examples_are_not_added_up(mode):
    x, w = integers(16, 4), integers(4, seed=1)
    words = r"\['scores'\].*shape \(4,\) for 4 rows.*stack"
    with pytest.raises(ValueError, match=words):
        mean_of(of_rows, 4, has_aux=True, aux=mode)(w, x)
    # An axis that is as long, and no rows: here of the features.
    features = mean_of(lambda w, x: (jnp.mean(x @ w), x.mean(0)), 4, has_aux=True)
    (_, mean), _ = features(w, x)
    assert_same_bits(mean, x.mean(0))
    # And what is named is taken as it is.
    aux = {"scores": "stack", "mean": mode}
    (_, parts), _ = mean_of(of_rows, 4, has_aux=True, aux=aux)(w, x)
    assert_same_bits(parts["scores"], (x @ w).reshape(4, 4))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("dtype", "due"),
    [
        *((jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.float32)),
        *((jnp.int8, jnp.int32), (jnp.uint8, jnp.uint32), (jnp.bool_, jnp.int32)),
    ],
)
def test_a_sum_keeps_a_floating_dtype_and_is_added_up_in_32_bits(dtype, due):
    def fun(w, x):
        return jnp.mean(x * w), jnp.ones([], dtype)

    step = jax.jit(mean_of(fun, 1024, has_aux=True, aux="sum"))
    (_, total), _ = step(jnp.float32(1), jnp.ones(1024))
    assert total.dtype == due
    assert float(total) == 1024  # bfloat16 alone would stop at 256


def token_losses(w, batch):
    tokens = jnp.sum(jnp.cbrt(batch["mask"]))  # a primitive to count
    error = jnp.square(batch["x"] * w[None]) * batch["mask"]
    return jnp.sum(error) / jnp.maximum(tokens, 1), {"tokens": tokens}


@pytest.mark.quick
def test_the_weight_of_the_aux_is_that_of_the_batch_bit_for_bit():
    """And what it and the loss need is computed once."""
    w, lengths = integers(4) + np.float32(0.1), 1 + np.arange(16)[:, None] // 5
    batch = {"x": integers(16, 4), "mask": np.float32(np.arange(4) < lengths)}
    # One weighs nothing, and changes nothing whatever it holds.
    batch["mask"][4:8], batch["x"][4:8] = 0, np.nan
    options = {"has_aux": True, "aux": "sum"}

    def run(weight_fn, roots):
        fun = mean_of(token_losses, 4, weight_fn=weight_fn, **options)
        assert str(jax.make_jaxpr(fun)(w, batch)).count("cbrt") == roots
        return jax.jit(fun)(w, batch)

    expected = run(lambda batch, aux: jnp.sum(jnp.cbrt(batch["mask"])), roots=2)
    assert np.isfinite(expected[1]).all()
    of_aux = lambda batch, aux: aux["tokens"]  # noqa: E731
    assert_same_bits(run(of_aux, roots=1), expected)
    options["weight_fn"] = of_aux
    _, mean = in_calls(token_losses, w, batch, [2, 2], **options)
    assert_same_bits(mean, expected[1])


@pytest.mark.slow
@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("optimize", OPTIMIZE)
@pytest.mark.parametrize("weight_fn", [None, lambda x, aux: 1.0 + x[0, 0] ** 2])
def test_only_the_real_micro_batches_count(weight_fn, optimize):
    """Whatever the others hold; one program for any number of them."""
    rows = _normal(1, 8, WIDTH)
    layers = _normal(0, 2, WIDTH, WIDTH) * 0.3

    def fun(layers, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)
        aux = {"rows": jnp.sum(x**2), "last": x[0, 0], "most": -jnp.sum(x[0] ** 2)}
        return jnp.mean(h**2), aux

    how = {"weight_fn": weight_fn, "has_aux": True, "optimize": optimize}
    how["aux"] = {"rows": "sum", "last": "last", "most": "max"}
    traces = []

    @jax.jit
    def step(number, layers, x):
        traces.append(number)
        return mean_of(fun, 4, num_real_microbatches=number, **how)(layers, x)

    for real in range(1, 5):
        x = rows.copy()
        x[2 * real :] = np.nan
        got = step(np.int32(real), layers, x)
        due = jax.jit(mean_of(fun, real, **how))(layers, rows[: 2 * real])
        assert helpers.off(got, due) <= 64 * np.finfo(np.float32).eps
        assert due[0][1]["most"] < 0
    assert len(traces) == 1
    (value, aux), grads = step(np.int32(0), layers, np.full_like(rows, np.nan))
    assert float(value) == float(aux["rows"]) == float(jnp.sum(jnp.abs(grads))) == 0
