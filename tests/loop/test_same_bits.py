"""Any grouping of the same micro-batches into calls gives the same bits."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpus.models import WIDTH, draw
from helpers import in_calls, mean_of, normal

import ga_optax as ga
from ga_optax import accumulator
from ga_optax._loop import micro_step
from ga_optax.testing import assert_trees_bitwise_equal

K = 4
GROUPINGS = ([1, 1, 1, 1], [4], [2, 2], [1, 3], [3, 1])


def weight(batch, aux=None):
    return jnp.sum(jnp.abs(batch["y"])) + 0.37


# One row a micro-batch, a matrix that is looked up, attended with and multiplied by.
OPEN = pytest.mark.xfail(
    jax.__version_info__ < (0, 11),
    reason="with jax 0.10 the terms of one gradient add up otherwise in a call of one",
)


@pytest.mark.grid(1, 15)
@pytest.mark.parametrize(
    ("seed", "weight_fn"),
    [
        *((seed, weight_fn) for seed in range(1, 8) for weight_fn in (None, weight)),
        pytest.param(0, weight, marks=OPEN),
    ],
)
def test_groupings_of_a_random_model_agree_bit_for_bit(seed, weight_fn):
    loss, params, batch = draw(seed, K)
    options = {"weight_fn": weight_fn, "has_aux": True}

    def whole():
        return jax.jit(mean_of(loss, K, **options))(params, batch)

    with helpers.by_hand(bool(seed % 2)):
        value, grads = whole()
        with helpers.by_hand(weight_fn is not None):  # which is a branch, and by hand
            assert_trees_bitwise_equal(whole(), (value, grads))
        for grouping in GROUPINGS:
            last, mean = in_calls(loss, params, batch, grouping, **options)
            assert_trees_bitwise_equal(mean, grads)
            if grouping == [K]:
                assert_trees_bitwise_equal(last, value)


FORMS = {
    "backwards": {"reverse": True},
    "two at once": {"unroll": 2},
    "all at once": {"unroll": True},
    "split": {"_split_transpose": True},
}


def in_place_and_by_hand(make, loss, *args):
    got = jax.jit(make(loss, K))(*args)
    with helpers.by_hand():
        return got, jax.jit(make(loss, K))(*args)


@pytest.mark.grid(2, 4)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_scan_of_any_form_has_the_bits_of_the_plain_sum(form, again):
    """Over matrices, scales and shifts, with what it keeps, once and again."""
    shapes = {"matrix": (3, 4, 4), "scale": (3, 4), "shift": (3, 4)}
    params = {n: normal(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}

    def layer(h, p):
        h = jnp.tanh(h @ p["matrix"] * p["scale"][None] + p["shift"][None])
        return h - 0.5 * jnp.mean(h, 0, keepdims=True), jnp.sum(h, 0)

    def loss(params, x):
        h, kept = jax.lax.scan(layer, x, params, **FORMS[form])
        if again:
            h, _ = jax.lax.scan(layer, h, params, **FORMS[form])
        return jnp.mean(h**2) + jnp.sum(kept**2)

    both = in_place_and_by_hand(mean_of, loss, params, normal(2 * K, 4))
    assert_trees_bitwise_equal(*both)


def frozen(p, x, z):
    return jnp.mean(jnp.tanh(x @ (jax.nn.softmax(z) + p)) ** 2)


# How the third argument comes: a function, and the options of `accumulate`.
SOURCES = {
    "argument": (lambda z: frozen, {}),
    "closure": (lambda z: lambda p, x, _: frozen(p, x, z), {}),
    "whole": (lambda z: frozen, {"batch_argnums": (1, 2), "batch_axes": (0, None)}),
    "carry": (lambda z: lambda p, x, z: (frozen(p, x, z), z), {"carry_argnums": 2}),
}


def total_in_calls(source, seed, calls):
    """The sum of gradients of K micro-batches, in so many calls."""
    make, options = SOURCES[source]
    p, x, z = normal(16, 16, seed=seed), normal(24, 16), normal(16, 16, seed=9)

    @jax.jit
    def step(acc, p, x, z):
        return ga.accumulate(make(z), K // calls, **options)(acc, p, x, z)[1]

    acc = ga.accumulator.init(p)
    for part in jnp.split(x, calls):
        acc = step(acc, p, part, z)
    return acc.total


@pytest.mark.grid(2, 4)
@pytest.mark.parametrize("source", SOURCES)
def test_groupings_agree_with_frozen_parameters(source):
    one, two, four = (total_in_calls(source, 0, calls) for calls in (1, 2, 4))
    assert_trees_bitwise_equal(two, one)
    assert_trees_bitwise_equal(four, one)


@pytest.mark.cpu
def test_without_the_fence_around_them_some_grouping_has_other_bits(monkeypatch):
    """The twin: parameters, batch and carry are held, and nothing else."""
    helpers.without_fence_of_consts(monkeypatch)

    def differ(seed):
        one, four = (total_in_calls("argument", seed, n) for n in (1, 4))
        return np.any(one != four)

    assert any(map(differ, range(8)))


def rotated(w, x):
    angles = jnp.arange(WIDTH, dtype=jnp.float32) * 0.377
    cos, sin, h = jnp.cos(angles)[None], jnp.sin(angles)[None], x @ w
    return jnp.tanh(h * cos + jnp.roll(h, 1, 1) * sin)


def agree(loss):
    """Whether a window in one call has the bits of one of as many calls as can be."""
    w, x = normal(WIDTH, WIDTH) / 2, normal(K * 8, WIDTH, seed=1) / 2
    _, grads = jax.jit(mean_of(loss, K))(w, x)
    return np.array_equal(in_calls(loss, w, x, [1] * K)[1], grads)


@pytest.mark.grid(1)
@pytest.mark.parametrize("layer", [rotated, jax.jit(jax.checkpoint(rotated))])
def test_with_a_table_that_the_loss_computes_groupings_agree(layer, monkeypatch):
    def loss(w, x):
        return jnp.mean(layer(w, x) ** 2)

    assert agree(loss)
    # The twin: XLA hoists it out of a loop of several micro-steps, and not out of one.
    helpers.without_pass(monkeypatch, "constants")
    assert agree(loss) != helpers.on_cpus()


@pytest.mark.cpu
def test_without_the_fences_logistic_regression_differs(monkeypatch):
    """The twin: what is compared can differ, and the fences are what makes it agree."""

    def loss(w, x):
        return jnp.mean(jax.nn.softplus(x @ w)) + 0.01 * jnp.sum(w**2)

    def scan(step, start, batch):
        return jax.lax.scan(step, start, [x[None] for x in batch])

    assert agree(loss)
    monkeypatch.setattr(accumulator, "rounded", lambda x, zero: x)
    monkeypatch.setattr(micro_step, "fusion_barrier", lambda tree: tree)
    monkeypatch.setattr(micro_step, "next_count", accumulator.increment)
    monkeypatch.setattr(micro_step, "single_step", scan)
    assert not agree(loss)
