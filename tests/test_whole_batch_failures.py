"""What is computed whole is said: where a rule fails, and what draws all rows."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_harness import with_rules

import ga_optax as ga
from ga_optax._calls import savings
from ga_optax._partition import custom, writer
from ga_optax._partition.values import RowsMeet

pytestmark = pytest.mark.usefixtures("optax_promotion")
W, X = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)


def loss(w, x):
    return jnp.mean(jnp.cumsum(jnp.tanh(x @ w), axis=1) ** 2)


@jax.custom_jvp
def halved(x):
    return x / 2


halved.defjvp(lambda xs, dots: (xs[0] / 2, dots[0] / 2))


def raising(key, error):
    """For `with_rules`: one rule raises an error."""

    def rule(*args):
        raise error

    return lambda name, plain: rule if name == key else plain


def said(fun=loss, k=4):
    """The warnings of a call, which has the value and gradient of the whole batch."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        got = ga.value_and_grad(fun, k)(W, X)
    want = jax.value_and_grad(fun)(W, X)
    for x, y in zip(got, want, strict=True):
        bound = 200 * 16 * np.finfo(np.float32).eps * np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=bound)
    return [str(x.message) for x in found if "computed whole" in str(x.message)]


@pytest.fixture
def anew(monkeypatch):
    """As if nothing had been said in this process."""
    monkeypatch.setattr(writer, "_failed", set())


@pytest.mark.usefixtures("anew")
def test_a_rule_that_fails_is_said_once_and_the_value_is_right():
    with with_rules(raising("cumsum", TypeError("cumsum got an axis more"))):
        first, *others = said()
        assert others == []
        for words in (
            "The rule of ga_optax for cumsum failed",
            f"with jax {jax.__version__}",
            "TypeError: cumsum got an axis more",
            "test_whole_batch_failures.py",
            "computed whole",
            "the result is right, but takes more memory",
        ):
            assert words in first
        assert not any("failed" in words for words in said())
    with with_rules(raising("tanh", TypeError("another"))):
        assert "for tanh failed" in said()[0]  # each rule once


@pytest.mark.usefixtures("anew")
def test_rows_that_meet_where_they_cannot_are_no_failure():
    with with_rules(raising("cumsum", RowsMeet())):
        assert not any("failed" in words for words in said())
    assert said() == []  # The twin: nothing is broken, and nothing is said.


@pytest.mark.usefixtures("anew")
def test_a_function_with_a_rule_of_its_own_that_fails_is_named(monkeypatch):
    def fails(*args):
        raise KeyError("jvp_jaxpr_fun")

    monkeypatch.setattr(custom, "_with_jvp", fails)
    words = said(lambda w, x: jnp.mean(halved(x @ w) ** 2))
    assert "for custom_jvp_call failed" in words[0]
    assert "KeyError: 'jvp_jaxpr_fun'" in words[0]


# -- What draws all rows ---------------------------------------------------------------


def noisy(w, x, key):
    """Each number that is drawn belongs to one row."""
    keep = jax.random.bernoulli(key, 0.5, (len(x), w.shape[1]))
    return jnp.mean(jnp.where(keep, x @ w, 0))


def drawn(impl, fun=noisy):
    found = ga.batch_dependencies(fun, 4)(W, X, jax.random.key(0, impl=impl))
    return {(note.name, note.size) for note in found.whole}, str(found)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_generators_that_draw_all_rows_are_listed(impl):
    notes, text = drawn(impl)
    assert notes == {("random_bits", 16 * 16)}
    assert "random_bits, computed whole: 256 numbers" in text
    assert "test_whole_batch_failures.py" in text
    # The twin: this one draws its own rows.
    assert drawn("threefry2x32")[0] == set()


def test_so_is_all_else_that_is_computed_for_all_rows_and_read_for_some():
    def shuffled(w, x, key):
        order = jax.random.permutation(key, len(x)).astype(x.dtype)
        return jnp.mean((x @ w) * order[:, None])

    notes, _ = drawn("threefry2x32", shuffled)
    assert {name for name, _ in notes} == {"sort"}


def test_what_is_drawn_for_all_rows_warns_as_soon_as_it_is_large(monkeypatch):
    monkeypatch.setattr(savings, "FEW_BYTES", 0)

    def wide(w, x):
        draws = jax.random.bits(jax.random.key(0, impl="rbg"), (16, 4096))
        return jnp.mean(x @ w) + jnp.mean((draws >> 31).astype(x.dtype) * x[:, :1])

    [words] = said(wide, k=16)
    assert "random_bits" in words
    assert said(wide, k=1) == []
