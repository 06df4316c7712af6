"""Random programs and calls, one generator for each class of what has been wrong once.

What no role has and is computed of; custom rules that clip, call back or communicate,
there or back; scans with odd parameters; options across calls.
"""

import contextlib
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mean_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.custom_derivatives import linear_call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._across.request import Request
from ga_optax._passes import known
from ga_optax.testing import assert_trees_bitwise_equal

pytestmark = pytest.mark.usefixtures("optax_promotion")

K, WIDTH, LAYERS = 4, 4, 3
EPS = np.finfo(np.float32).eps
SEEDS = st.integers(0, 9)


def few(share):
    """For laws of which each case compiles several programs."""
    return settings(max_examples=max(1, settings().max_examples // share))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# -- What is computed of what has no role ----------------------------------------------

PREPARED = {
    "softmax": jax.nn.softmax,
    "normalised": lambda z: z * jax.lax.rsqrt(jnp.mean(z * z, -1, keepdims=True)),
    "cumulative": lambda z: jnp.cumsum(z, 0),
    "product": lambda z: z @ z.T,
    "narrow": lambda z: z.astype(jnp.bfloat16).astype(jnp.float32),
    "table": lambda z: jnp.cos(jnp.exp(z)),
}
SOURCES = ["argument", "keyword", "closure", "whole batch", "carry"]


@st.composite
def with_frozen(draw):
    """A loss of parameters, rows, and a third one; where that one comes from."""
    names = draw(st.lists(st.sampled_from([*PREPARED]), min_size=1, max_size=3))
    end = draw(st.sampled_from([jnp.tanh, jnp.sin, jax.nn.softplus]))

    def loss(p, x, z):
        for name in names:
            z = PREPARED[name](z)
        return jnp.mean(end(x @ (0.3 * z + p)) ** 2)

    return loss, draw(st.sampled_from(SOURCES)), draw(SEEDS)


def total_in_calls(loss, source, seed, calls):
    """The sum of gradients of K micro-batches, in so many calls."""
    size = K // calls

    def run(acc, p, x, z):
        if source == "closure":
            return ga.accumulate(lambda p, x: loss(p, x, z), size)(acc, p, x)[1]
        if source == "argument":
            return ga.accumulate(loss, size)(acc, p, x, z)[1]
        if source == "keyword":
            named = lambda p, x, *, z: loss(p, x, z)  # noqa: E731
            return ga.accumulate(named, size)(acc, p, x, z=z)[1]
        if source == "whole batch":
            how = {"batch_argnums": (1, 2), "batch_axes": (0, None)}
            return ga.accumulate(loss, size, **how)(acc, p, x, z)[1]

        def carried(p, x, z):
            return loss(p, x, z), z

        return ga.accumulate(carried, size, carry_argnums=2)(acc, p, x, z)[1]

    p, x, z = (normal(seed + i, rows, 16) for i, rows in enumerate((16, 24, 16)))
    acc, step = ga.accumulator.init(p), jax.jit(run)
    for part in jnp.split(x, calls):
        acc = step(acc, p, part, z)
    return acc.total


@pytest.mark.exhaustive
@few(16)
@given(with_frozen())
def test_groupings_agree_whatever_is_computed_of_what_has_no_role(drawn):
    one, two, four = (total_in_calls(*drawn, calls) for calls in (1, 2, 4))
    assert_trees_bitwise_equal(two, one)
    assert_trees_bitwise_equal(four, one)


def frozen(p, x, z):
    return jnp.mean(jnp.tanh(x @ (jax.nn.softmax(z) + p)) ** 2)


@pytest.mark.parametrize("source", ["argument", "closure"])
def test_groupings_agree_with_frozen_parameters(source):
    one, two, four = (total_in_calls(frozen, source, 0, calls) for calls in (1, 2, 4))
    assert_trees_bitwise_equal(two, one)
    assert_trees_bitwise_equal(four, one)


def test_without_the_fence_around_them_some_grouping_has_other_bits(monkeypatch):
    """The twin: parameters, batch and carry are held, and nothing else."""
    helpers.without_fence_of_consts(monkeypatch)

    def differ(seed):
        one, four = (total_in_calls(frozen, "argument", seed, n) for n in (1, 4))
        return np.any(one != four)

    assert any(map(differ, range(8)))


# -- Custom rules ----------------------------------------------------------------------

DEEDS = {
    "nothing": lambda g: g,
    "clips": lambda g: jnp.clip(g, -1e-3, 1e-3),
    "prints": lambda g: (jax.debug.callback(lambda _: None, jnp.sum(g)), g)[1],
    "in order": lambda g: (
        jax.debug.callback(lambda _: None, jnp.sum(g), ordered=True),
        g,
    )[1],
    "calls": lambda g: jax.pure_callback(
        lambda x: np.asarray(2 * x), g, g, vmap_method="sequential"
    ),
    "sums": lambda g: jax.lax.psum(g, "i"),
}


def with_vjp(there, back):
    @jax.custom_vjp
    def rule(h):
        return there(h)

    rule.defvjp(lambda h: (there(h), None), lambda _, g: (back(g),))
    return rule


def with_jvp(there, back):
    @jax.custom_jvp
    def rule(h):
        return there(h)

    rule.defjvp(lambda h, t: (there(h[0]), 2 * t[0]))
    return rule


def with_transpose(there, back):
    return lambda h: linear_call(lambda _, h: h, lambda _, g: back(g), (), h)


@st.composite
def ruled(draw):
    """A loss with a rule in its layers, the options, and whether it is in a vmap."""
    there = draw(st.sampled_from([name for name in DEEDS if name != "clips"]))
    back = draw(st.sampled_from([*DEEDS]))
    # JAX has no order in a vmap; outside of it there is no axis.
    vmapped = "sums" in (there, back)
    if vmapped and "in order" in (there, back):
        there = back = "sums"
    makes = [with_vjp, with_jvp, with_transpose]
    # JAX cannot batch `linear_call`, and its transpose has no effects.
    quiet = {there, back} <= {"nothing", "clips"}
    make = draw(st.sampled_from(makes if quiet else makes[:2]))
    rule = make(DEEDS[there], DEEDS[back])
    wrap = draw(st.sampled_from([lambda f: f, jax.checkpoint, jax.jit]))
    if {there, back} & {"prints", "in order"} and wrap is jax.checkpoint:
        wrap = jax.jit  # JAX rematerialises no effects
    scans = draw(st.booleans())

    @wrap
    def layer(h, w):
        return rule(jnp.tanh(h @ w))

    def loss(w, batch):
        h, _ = batch
        if scans:
            h = jax.lax.scan(lambda h, w: (layer(h, w), None), h, w)[0]
        else:
            for one in w:
                h = layer(h, one)
        return jnp.mean(h**2)

    weights = {"weight_fn": lambda batch: batch[1][0]} if draw(st.booleans()) else {}
    return loss, weights, vmapped, draw(SEEDS)


def off_by(drawn):
    """How far a window is from one gradient after another, in units of the bound."""
    loss, options, vmapped, seed = drawn
    w, x = normal(seed, LAYERS, WIDTH, WIDTH) / 2, normal(seed + 1, 2 * K, WIDTH)
    weights = jnp.asarray([1.0, 100.0, 3.0, 7.0] if options else [1.0] * K)
    batch = x, jnp.repeat(weights, 2)

    def over(gradient, *args):
        if vmapped:
            both = jax.tree.map(lambda x: jnp.stack([x, x]), args)
            gradient = jax.vmap(gradient, axis_name="i")
            return jax.tree.map(lambda g: g[0], jax.jit(gradient)(*both))
        return jax.jit(gradient)(*args)

    parts = [
        over(jax.grad(loss), w, (x[2 * i : 2 * i + 2], batch[1])) for i in range(K)
    ]
    parts = np.asarray(parts, np.float64)
    due = np.average(parts, axis=0, weights=weights)
    terms = np.average(np.abs(parts), axis=0, weights=weights)
    got = over(mean_of(loss, K, **options), w, batch)[1]
    # Two layers of products and the sum over micro-batches, in any order.
    bound = 64 * EPS * np.maximum(terms, 1e-3 * np.max(terms))
    jax.effects_barrier()
    return np.max(np.abs(got - due) / bound)


@pytest.mark.exhaustive
@few(16)
@given(ruled())
def test_a_rule_does_in_a_window_what_it_does_for_each_micro_batch(drawn):
    assert off_by(drawn) <= 1


def test_a_rule_that_nobody_reads_would_be_seen(monkeypatch):
    """The twin: a weight goes through what clips."""
    rule = with_transpose(DEEDS["nothing"], DEEDS["clips"])

    def loss(w, batch):
        return jnp.mean(rule(batch[0] @ w[0]))

    drawn = loss, {"weight_fn": lambda batch: batch[1][0]}, False, 0
    assert off_by(drawn) <= 1
    monkeypatch.setattr(known, "deeds", lambda jaxpr: known.Deeds())
    assert off_by(drawn) > 1


# -- Scans -----------------------------------------------------------------------------


@st.composite
def scans(draw):
    """A loss that scans over parameters, with rows of a micro-batch, in odd ways."""
    length = draw(st.integers(0, 3))
    rows = draw(st.integers(1, 3))
    how = {
        "reverse": draw(st.booleans()),
        "unroll": draw(st.sampled_from([1, 2, True])),
    }
    how["_split_transpose"] = draw(st.booleans())
    kinds = draw(
        st.sets(st.sampled_from(["matrix", "scale", "shift"]), min_size=1, max_size=3)
    )
    averages, keeps, again = (draw(st.booleans()) for _ in range(3))

    def layer(h, p):
        p, n = p
        if "matrix" in kinds:
            h = h @ p["matrix"]
        if "scale" in kinds:
            h = h * p["scale"][None]
        if "shift" in kinds:
            h = h + p["shift"][None]
        h = jnp.tanh(h) * (1 + n)
        return (h - 0.5 * jnp.mean(h, 0, keepdims=True) if averages else h), jnp.sum(
            h, 0
        ) if keeps else None

    def loss(p, x):
        xs = p, jnp.arange(length, dtype=jnp.float32)
        run = functools.partial(jax.lax.scan, layer, **how)
        h, kept = run(x, xs)
        h = run(h, xs)[0] if again else h
        return jnp.mean(h**2) + (jnp.sum(kept**2) if keeps else 0.0)

    shapes = {"matrix": (WIDTH, WIDTH), "scale": (WIDTH,), "shift": (WIDTH,)}
    seed = draw(SEEDS)
    p = {n: normal(seed, length, *shapes[n]) for n in sorted(kinds)}
    return loss, p, normal(seed + 1, K * rows, WIDTH)


def in_place_and_not(drawn):
    loss, *args = drawn
    got = jax.jit(mean_of(loss, K))(*args)
    with helpers.by_hand():
        return got, jax.jit(mean_of(loss, K))(*args)


@pytest.mark.exhaustive
@few(20)
@given(scans())
def test_any_scan_has_the_bits_of_the_plain_sum(drawn):
    assert_trees_bitwise_equal(*in_place_and_not(drawn))


@pytest.mark.exhaustive
@few(20)
@given(scans())
def test_rows_may_meet_in_any_scan(drawn):
    loss, p, x = drawn
    with jax.enable_x64(True):
        p, x = jax.tree.map(lambda x: x.astype(jnp.float64), (p, x))
        due = jax.jit(jax.value_and_grad(loss))(p, x)
        got = jax.jit(ga.value_and_grad(loss, K))(p, x)
    for a, b in zip(*map(jax.tree.leaves, (got, due)), strict=True):
        assert a.shape == b.shape
        largest = np.max(np.abs(b), initial=1e-30)
        assert np.all(np.abs(a - b) <= 1e5 * np.finfo(np.float64).eps * largest)


# -- Options across calls --------------------------------------------------------------


@st.composite
def runs(draw):
    """Options of `MultiSteps`, dtypes, a mesh, weights, and which gradients are bad."""
    skips = draw(st.sampled_from(["", "skip", "drop"]))
    options = {
        "": {},
        "skip": {"should_skip_update_fn": optax.skip_not_finite},
        "drop": {"should_drop_window_fn": ga.drop_window_if_not_finite},
    }[skips]
    options["use_grad_mean"] = draw(st.booleans())
    narrow = draw(st.booleans())
    sums = [jnp.float32, jnp.bfloat16, None] if narrow else [jnp.float32, None]
    options["accumulator_dtype"] = draw(st.sampled_from(sums))
    k, calls = draw(st.integers(1, 3)), 5
    flags = st.lists(st.booleans(), min_size=calls, max_size=calls)
    bad = draw(flags) if skips else [False] * calls
    weights = [None] * calls
    if options["use_grad_mean"] and draw(st.booleans()):
        numbers = st.sampled_from([0.0, 1.0, 3.0])
        weights = draw(st.lists(numbers, min_size=calls, max_size=calls))
    dtype = jnp.bfloat16 if narrow else jnp.float32
    explicit, jits = draw(st.booleans()), draw(st.booleans())
    return k, options, dtype, bad, weights, explicit, jits, draw(SEEDS)


def both_ways(drawn):
    """The parameters after each call, by `update` and by `apply_gradients`."""
    k, options, dtype, bad, weights, explicit, jits, seed = drawn
    tx = ga.MultiSteps(optax.adam(0.1), k, **options)

    def updated(grads, state, params, weight):
        updates, state = tx.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    def applied(grads, state, params, weight):
        return ga.apply_gradients(tx, grads, state, params, weight=weight)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def placed(x):
        x = x.astype(dtype)
        if not explicit:
            return x
        return jax.device_put(x, NamedSharding(mesh, P("data", None)))

    def run(step):
        step = jax.jit(step) if jits else step
        params = placed(normal(seed, 8, 4))
        state, found = tx.init(params), []
        for i, (its, weight) in enumerate(zip(bad, weights, strict=True)):
            g = normal(seed + i + 1, 8, 4)
            g = placed(g.at[0, 0].set(jnp.nan) if its else g)
            params, state = step(g, state, params, weight)
            found.append((np.asarray(params, np.float32), ga.stats(state)))
        return found

    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        return run(updated), run(applied)


def assert_both_ways_agree(drawn):
    for (a, counts), (b, others) in zip(*both_ways(drawn), strict=True):
        # XLA may contract a product and a sum of the optimizer in one of the two.
        eps = float(jnp.finfo(drawn[2]).eps)
        np.testing.assert_allclose(a, b, rtol=0, atol=4 * eps * np.max(np.abs(b)))
        assert_trees_bitwise_equal(counts, others)


@pytest.mark.exhaustive
@few(16)
@given(runs())
def test_update_and_apply_gradients_agree_with_any_options(drawn):
    assert_both_ways_agree(drawn)


@pytest.mark.slow
def test_updates_that_are_applied_otherwise_would_be_seen(monkeypatch):
    """The twin."""
    options = {"use_grad_mean": True, "accumulator_dtype": jnp.float32}
    drawn = 2, options, jnp.float32, [False] * 5, [None] * 5, False, True, 0
    assert_both_ways_agree(drawn)
    step = Request.with_step
    twice = lambda self, x: step(self, 2 * x if self.applies else x)  # noqa: E731
    monkeypatch.setattr(Request, "with_step", twice)
    with pytest.raises(AssertionError):
        assert_both_ways_agree(drawn)
