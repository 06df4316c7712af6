"""The chex assertions: what they refuse, and what they say."""

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import says, squares

from ga_optax import Cause, testing
from ga_optax._verify.measured import ulps

SAME_BITS = testing.assert_trees_bitwise_equal
DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint32", "bool"]


def from_bits(bits, dtype):
    return np.asarray(bits, f"u{np.dtype(dtype).itemsize}").view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_pass_and_one_flipped_bit_fails(dtype):
    kind = np.dtype(jnp.dtype(dtype))
    a = np.arange(6).reshape(2, 3).astype(kind)
    SAME_BITS({"w": a}, {"w": a.copy()})
    b = a.copy()
    b.view(f"u{kind.itemsize}")[1, 2] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 6 elements .* index \(1, 2\)"):
        SAME_BITS({"w": a}, {"w": b})


def test_the_message_names_leaf_index_both_values_in_hex_and_ulps():
    two = np.nextafter(np.float32(1), np.float32(2), dtype=np.float32)
    a, b = ({"layer": [jnp.zeros(2), jnp.array([[1.0, x]])]} for x in (1.0, two))
    with pytest.raises(AssertionError) as error:
        SAME_BITS(a, b)
    values = "actual 0x3f800000 (1.0), expected 0x3f800001 (1.0000001)"
    for part in ("layer/1", "index (0, 1)", values, "1 ULPs apart"):
        assert part in str(error.value)
    apart = np.float32([0.5, 1.0, 1.0]), np.float32([0.5, two, two + (two - 1) * 2])
    for said in (r"2 of 3 .*the first at index \(1,\)", "1 ULPs apart; at most 3 ULPs"):
        with pytest.raises(AssertionError, match=said):
            SAME_BITS(*apart)


C, KEY = np.array([1 + 2j, 3 + 4j], np.complex64), jax.random.key(1)
EMPTY = "at least one array"


NAN, OTHER = (from_bits([b], np.float32) for b in (0x7FC00000, 0x7FC00001))


@pytest.mark.parametrize("one", [C, KEY, NAN])
def test_complex_numbers_keys_and_nan_equal_themselves(one):
    SAME_BITS(one, one.copy())


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        # A part of complex leaves; of keys the data and the generator.
        (C, C + np.array([0, 1j], C.dtype), r"index \(1,\), imaginary part: .*0x4080"),
        (KEY, jax.random.key(2), "elements differ"),
        (KEY, jax.random.key_data(KEY), "dtypes differ"),
        # Bits count, and not numbers.
        (NAN, OTHER, r"0x7fc00000.*0x7fc00001"),
        (jnp.zeros(1), -jnp.zeros(1), r"0x00000000.*0x80000000.* 0 ULPs"),
        ({}, {}, EMPTY),
        ([None], [None], EMPTY),
        (None, None, EMPTY),
        (jnp.zeros(2), jnp.zeros(2, jnp.bfloat16), "dtypes differ"),
        (jnp.zeros(2), jnp.zeros(3), "shapes differ"),
        (jnp.zeros(2), jnp.zeros((2, 1)), "shapes differ"),
        (jnp.zeros(()), 0.0, "dtypes differ"),
        ({"a": jnp.zeros(2)}, {"b": jnp.zeros(2)}, "structs"),
        ([jnp.zeros(2)], (jnp.zeros(2),), "structs"),
        ({"a": jnp.zeros(2)}, {}, "structs"),
        ("text", "text", "must be arrays"),
    ],
)
def test_what_differs_or_cannot_be_compared_is_refused(a, b, words):
    with pytest.raises(AssertionError, match=words):
        SAME_BITS(a, b)


@hypothesis.given(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_law_ulps_count_the_numbers_between_in_order(x, y):
    """The finite float16 numbers, sorted, are the oracle."""
    a, b = (from_bits([bits], np.float16) for bits in (x, y))
    hypothesis.assume(np.isfinite(a[0]) and np.isfinite(b[0]))
    every = from_bits(np.arange(2**16), np.float16)
    order = np.unique(every[np.isfinite(every)].astype(np.float64))
    apart = np.searchsorted(order, float(a[0])) - np.searchsorted(order, float(b[0]))
    assert int(ulps(a, b)[0]) == abs(apart)


@pytest.mark.parametrize("cause", [Cause.ROUNDING, Cause.SCALE])
def test_what_verify_says_comes_as_warnings_and_as_an_error(cause, monkeypatch):
    ok = cause is Cause.ROUNDING
    report = SimpleNamespace(ok=ok, cause=cause, message="why", warnings=("beware",))
    monkeypatch.setattr(testing, "verify", lambda *args: report)

    def call():
        testing.assert_accumulation_equivalent(squares, jnp.ones(2), jnp.ones(4), 2)

    with pytest.warns(UserWarning, match="beware"):
        call() if ok else says(call, AssertionError, "[SCALE] why")
