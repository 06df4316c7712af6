"""The laws of the accumulator, each with what would break it."""

import functools
import re

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from helpers import assert_quotients, bits, leaves_of

import ga_optax as ga
from ga_optax import accumulator

pytestmark = pytest.mark.quick

WEIGHTS = st.lists(st.integers(0, 512), min_size=1, max_size=6)
NAN = jnp.full(3, jnp.nan)
STALE = accumulator.init(NAN)._replace(total=NAN, weight=NAN[0])  # empty


def accumulate(grads, weights=None, *, dtype=jnp.float32, jit=True):
    """The accumulator of a list of gradients."""
    add = jax.jit(accumulator.add) if jit else accumulator.add
    acc = accumulator.init(grads[0], dtype)
    for i, g in enumerate(grads):
        acc = add(acc, g) if weights is None else add(acc, g, weights[i])
    return acc


@pytest.mark.cpu  # GPUs have one NaN
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@hypothesis.given(hnp.arrays(np.uint32, st.sampled_from([(), (0,), (7,), (2, 3)])))
def test_the_mean_of_one_gradient_is_that_gradient_bit_for_bit(jit, pattern):
    # Infinities, payloads of NaN and -0 among them. Additions on a CPU flush subnormal
    # numbers to zero of their sign, and make a signalling NaN a quiet one.
    exponent, mantissa = pattern & 0x7F800000, pattern & 0x007FFFFF
    pattern = np.where(exponent == 0, pattern & 0x80000000, pattern)
    quiet = np.where((exponent == 0x7F800000) & (mantissa != 0), 0x00400000, 0)
    g = jnp.asarray((pattern | quiet).astype(np.uint32).view(np.float32))
    mean = jax.jit(accumulator.mean) if jit else accumulator.mean
    assert bits(mean(accumulate([g], jit=jit))) == bits(g)


def test_the_first_add_overwrites_whatever_an_empty_accumulator_holds():
    g = jnp.array([1.0, -0.0, 3.0])
    assert bits(accumulator.add(STALE, g)[:2]) == bits((g, jnp.float32(1)))
    # The twin: an accumulator that is not empty keeps what it holds.
    held = STALE._replace(count=jnp.ones([], jnp.int32))
    assert np.isnan(accumulator.add(held, g).total).all()


@pytest.mark.parametrize("k", [2, 3, 7, 10, 41])
def test_integer_gradients_accumulate_without_rounding(k):
    rng = np.random.default_rng(k)
    grads = rng.integers(-1000, 1000, (k, 257)).astype(np.float32)
    acc = accumulate(list(jnp.asarray(grads)))
    np.testing.assert_array_equal(acc.total, grads.astype(np.int64).sum(0))
    # XLA's x / scalar is not rounded correctly.
    mean = jax.jit(accumulator.mean)(acc)
    assert_quotients(mean, grads.sum(0) / np.float32(k))


NARROW = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]


@pytest.mark.parametrize("dtype", NARROW)
def test_a_term_that_is_rounded_is_the_term_and_its_code_has_its_derivative(dtype):
    bits, zero = 8 * jnp.dtype(dtype).itemsize, jnp.zeros([], jnp.int32)
    every = np.arange(2**bits, dtype=f"uint{bits}").view(dtype)
    # But NaN, and what is subnormal in float32: XLA's CPU backend takes that for 0.
    with np.errstate(invalid="ignore"):
        every = every[abs(every.astype(np.float32)) >= np.finfo(np.float32).tiny]
    assert len(every) > 2**bits * 0.95
    got = jax.jit(accumulator.rounded)(every, zero)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got, every)))
    some = jnp.asarray(every[50:60])
    for fun in (accumulator.rounded, accumulator.rounded.fun):  # with its rule, without
        _, moved = jax.jvp(lambda x, fun=fun: fun(x, zero), (some,), (some,))
        np.testing.assert_array_equal(moved, some)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("low", [False, True])
def test_gradients_of_low_precision_accumulate_in_float32_unless_told(dtype, low):
    ones = jnp.full(2, 4096, dtype), jnp.ones(2, dtype)
    total = accumulate(ones, dtype=dtype if low else jnp.float32).total
    # bfloat16 has 8 significant bits, float16 11: 4096 + 1 rounds to 4096.
    np.testing.assert_array_equal(np.asarray(total, np.float32), 4096 + (not low))
    assert total.dtype == (dtype if low else jnp.float32)


@hypothesis.given(WEIGHTS, st.integers(0, 2**32 - 1), st.data())
def test_the_mean_is_the_weighted_mean_of_the_oracle_and_so_is_that_of_halves(
    weights, seed, data
):
    grads = np.random.default_rng(seed).normal(size=(len(weights), 5))
    grads = list(jnp.asarray(grads, jnp.float32))
    cut = data.draw(st.integers(0, len(grads)))
    halves, add = [accumulator.init(grads[0])] * 2, jax.jit(accumulator.add)
    for i, g in enumerate(grads):
        halves[i >= cut] = add(halves[i >= cut], g, weights[i])
    bound = oracle.sum_error_bound(grads, weights, np.finfo(np.float32).eps / 2)
    for acc in (accumulate(grads, weights), accumulator.merge(*halves)):
        off = np.abs(accumulator.mean(acc) - oracle.weighted_mean(grads, weights))
        assert (off <= bound).all()
        assert int(acc.count) == len(grads)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("order", [1, -1])
def test_weight_zero_changes_no_bit_whatever_the_gradient_holds(bad, order):
    grads = [jnp.array([1.5, -0.0]), jnp.array([bad, bad])][::order]
    acc = accumulate(grads, [2.0, 0.0][::order])
    np.testing.assert_array_equal(acc.total, [3.0, 0.0])
    assert int(acc.count) == 2
    # The twin: with a weight it is seen.
    assert not np.isfinite(accumulate(grads, [1.0, 1.0]).total).any()


@pytest.mark.quick
def test_a_window_of_weight_zero_has_mean_zero_and_no_weight_counts_one():
    acc = accumulate([jnp.array([jnp.nan, 1.0])] * 3, [0.0, 0.0, 0.0])
    for empty in (acc, STALE._replace(weight=jnp.float32(0))):
        np.testing.assert_array_equal(accumulator.mean(empty), 0.0)
    with jax.debug_nans(True):  # nothing is divided by 0
        accumulator.mean(accumulator.init(jnp.ones(2)))
    acc = accumulator.add(accumulate([jnp.array([4.0])]), jnp.array([1.0]), 3)
    np.testing.assert_array_equal(accumulator.mean(acc), [7.0 / 4.0])


def test_without_a_weight_nothing_is_multiplied():
    acc = accumulator.init(jnp.zeros(4))
    jaxpr = str(jax.make_jaxpr(accumulator.add)(acc, jnp.zeros(4)))
    assert " mul " not in jaxpr
    assert " mul " in str(jax.make_jaxpr(accumulator.add)(acc, jnp.zeros(4), 2.0))


def test_merging_is_commutative_and_an_empty_one_changes_no_bit():
    draws = np.random.default_rng(0).normal(size=(2, 4, 3))
    a, b = (accumulate(list(jnp.asarray(x, jnp.float32))) for x in draws)
    for left, right in [
        (accumulator.merge(a, b), accumulator.merge(b, a)),
        (accumulator.merge(a, STALE), a),
        (accumulator.merge(STALE, a), a),
    ]:
        assert list(map(bits, left)) == list(map(bits, right))
    assert bits(accumulator.merge(a, b).total) != bits(a.total)


@pytest.mark.parametrize("weights", [None, [2.0, 6.0]])
def test_complex_gradients_accumulate_by_parts(weights):
    grads = np.array([[1 + 2j, np.inf + 1j], [3 - 2j, 1 + 1j]], np.complex64)
    acc = accumulate(list(jnp.asarray(grads)), weights)
    assert acc.total.dtype == jnp.complex64
    mean = np.asarray(accumulator.mean(acc))
    # (2 (1 + 2j) + 6 (3 - 2j)) / 8, and inf + 1j keeps its finite part.
    assert mean[0] == (2 + 0j if weights is None else 2.5 - 1j)
    assert mean[1].real == np.inf
    assert mean[1].imag == 1


FLOORS = """
float32 float32 -> float32, bfloat16 float32 -> float32, float32 bfloat16 -> bfloat16
bfloat16 None -> bfloat16, float64 float32 -> float64, float32 float64 -> float64
complex64 float32 -> complex64, complex64 bfloat16 -> complex64
complex128 float32 -> complex128, complex64 float64 -> complex128
int32 None -> float32, int8 bfloat16 -> bfloat16
"""


@pytest.mark.parametrize("row", re.split(", |\n", FLOORS.strip()))
def test_float32_is_a_floor_and_other_dtypes_are_taken_as_they_are(row):
    leaf, dtype, expected = row.replace(" ->", "").split()
    with jax.enable_x64(True):
        acc = accumulator.init(jnp.zeros(2, leaf), None if dtype == "None" else dtype)
        assert acc.total.dtype == expected


OF_LEAVES = {"norms": None, "tables": jnp.bfloat16, "heads": {"out": "float32"}}


def summed(params, batch, dtype):
    step = jax.jit(ga.value_and_grad(both, 1024, accumulator_dtype=dtype))
    return step(params, batch)[1]


def added(params, batch, dtype):
    acc = accumulator.init(params, dtype)
    _, acc = jax.jit(ga.accumulate(both, 1024))(acc, params, batch)
    return acc.total


def stepped(params, batch, dtype):
    options = {"use_grad_mean": False, "accumulator_dtype": dtype}
    tx = ga.MultiSteps(optax.sgd(-1.0), 1024, **options)

    def step(state, row):
        updates, state = tx.update(jax.grad(both)(params, row), state, params)
        return state, updates

    return jax.tree.map(lambda x: x[-1], jax.lax.scan(step, tx.init(params), batch)[1])


def both(params, x):
    return jnp.sum(x) * sum(map(jnp.sum, jax.tree.leaves(params)))


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("way", [summed, added, stepped])
def test_a_prefix_names_the_dtype_of_each_part_of_the_sum(way):
    """A sum of ones stops at 256 in bfloat16, and a gradient of ones does not."""
    params = {"norms": [jnp.ones(2)] * 2, "tables": jnp.ones(3)}
    params["heads"] = {"out": {"w": jnp.ones(2, jnp.bfloat16)}}
    due = {"norms": 1024, "tables": 256, "heads": 1024}
    for dtype, numbers in ((OF_LEAVES, due), (jnp.bfloat16, dict.fromkeys(due, 256))):
        found = way(params, jnp.ones(1024), dtype)
        for name, number in numbers.items():
            for x in jax.tree.leaves(found[name]):
                np.testing.assert_array_equal(np.asarray(x, float), number, name)


def test_a_new_sum_lies_where_its_parameter_does_and_shares_its_array_in_a_program():
    """Arrays of one type may lie on different devices."""
    params = [jax.device_put(jnp.ones(3), d) for d in jax.devices()[:2]] * 2
    for x, total in zip(params, accumulator.begun(params, None).total, strict=True):
        assert x.devices() == total.devices()
    made = jax.make_jaxpr(lambda p: accumulator.begun(p, None).total)(params)
    assert len({*made.jaxpr.outvars}) == 1
    assert {*map(float, jax.tree.leaves(accumulator.begun(1.0, None)))} == {0.0}


def test_every_way_to_divide_has_the_derivative_of_a_division():
    """Also where it selects: for totals of 0, and for a weight of 1."""
    total = jnp.array([[0.0, -0.0, 3.0]])

    @functools.partial(jax.jit, static_argnums=0)
    def slopes(way, weight):
        return jax.jacrev(way, argnums=(0, 1))(total, weight)

    for weight in (1.0, 3.0):
        expected = slopes(jnp.true_divide, weight)
        for way in (accumulator.divide, accumulator.average):
            for a, b in leaves_of(slopes(way, weight), expected):
                np.testing.assert_allclose(a, b, rtol=1e-6)
    # A window of weight 0 has the mean 0, whatever its total is.
    assert not any(map(np.any, slopes(accumulator.average, 0.0)))


def test_the_mean_of_a_weight_of_1_is_the_total_also_where_it_is_subnormal():
    total = jnp.asarray(np.uint32([1, 0x007FFFFF]).view(np.float32))
    acc = accumulator.Accumulator(total, jnp.float32(1), jnp.int32(1))
    assert bits(jax.jit(accumulator.mean)(acc)) == bits(total)


@pytest.mark.parametrize("weight", [-1.0, -1, np.nan])
def test_a_traced_weight_that_is_none_makes_the_mean_nan(weight):
    weight = jnp.asarray(weight)
    acc = accumulate([jnp.ones(2)] * 2, [jnp.full_like(weight, 2), weight])
    assert np.isnan(acc.weight)
    assert np.isnan(accumulator.mean(acc)).all()
    zero = jnp.zeros_like(weight)  # the twin
    acc = accumulate([jnp.ones(2)] * 2, [jnp.full_like(weight, 2), zero])
    np.testing.assert_array_equal(accumulator.mean(acc), 1)


def test_a_count_that_is_full_stays_so():
    most = jnp.int32(np.iinfo(np.int32).max)
    acc = accumulate([jnp.ones(2)])._replace(count=most)
    assert int(accumulator.add(acc, jnp.ones(2)).count) == int(most)


def test_a_donated_add_works_in_place():
    acc = accumulator.init({"w": jnp.zeros((512, 512))})
    grads = {"w": jnp.ones((512, 512))}
    compiled = jax.jit(accumulator.add, donate_argnums=0).lower(acc, grads).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * grads["w"].nbytes
    # The twin: a sum with a zero tree, as a reset pass would make it, is two passes.
    pointer = acc.total["w"].unsafe_buffer_pointer()
    assert compiled(acc, grads).total["w"].unsafe_buffer_pointer() == pointer
