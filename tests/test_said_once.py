"""What a call says once in the log, at the level INFO."""

import jax
import jax.numpy as jnp
import pytest

import ga_optax as ga
from ga_optax._calls import words
from ga_optax._loop import in_place

pytestmark = pytest.mark.usefixtures("fast_compilation")

K, ROWS, WIDTH = 4, 64, 16


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@pytest.fixture
def said(caplog):
    """A function that returns what was said since it was called last."""
    forget()
    caplog.set_level("INFO", "ga_optax")

    def records():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    yield records
    forget()


def forget():
    words.what_is_missing.cache_clear()


def run(**options):
    ga.value_and_grad(loss, K, **options)(jnp.eye(WIDTH), jnp.ones((ROWS, WIDTH)))


@pytest.mark.quick
@pytest.mark.parametrize("has_refs", [True, False])
def test_an_old_jax_says_once_what_it_cannot_do(has_refs, said, monkeypatch):
    monkeypatch.setattr(in_place, "HAS_REFS", has_refs)
    run()
    found = said()
    assert len(found) == (not has_refs)
    assert all(jax.__version__ in one and "in place" in one for one in found)
    run()
    assert said() == []


@pytest.mark.quick
def test_whoever_leaves_all_passes_out_is_told_nothing(said, monkeypatch):
    monkeypatch.setattr(in_place, "HAS_REFS", False)
    run(optimize=False)
    assert said() == []
