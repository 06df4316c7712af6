"""Keys of `rbg` and `unsafe_rbg`: they draw what the whole batch draws."""

import jax
import jax.numpy as jnp
import pytest
from helpers import error, normal, off

import ga_optax as ga

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, D, K = 16, 6, 4
IMPLS = ["rbg", "unsafe_rbg"]


def arguments(n=N, width=D, impl="rbg"):
    params = [normal(2, width, width, seed=i) / width**0.5 for i in (1, 2)]
    params = dict(zip("ab", params, strict=True))
    return params, normal(n, width), jax.random.key(3, impl=impl)


def dropped(h, key):
    return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0.0)


def layer(h, of):
    w, key = of
    return dropped(jnp.tanh(h @ w), key)


def plain(p, x, key):
    keys = jax.random.split(key)
    return (layer(layer(x, (p["a"][0], keys[0])), (p["b"][0], keys[1])) ** 2).mean()


def over_layers(p, x, key, layer=layer):
    keys = jax.random.split(key)
    h, _ = jax.lax.scan(lambda h, of: (layer(h, of), None), x, (p["a"], keys))
    return (h * jax.random.normal(key, h.shape)).mean()


def again(p, x, key):
    return over_layers(p, x, key, jax.checkpoint(layer))


def of_keys(p, x, key):
    """A key for each row, and one of each; XLA draws for all from the first."""
    keys = jax.random.split(key, len(x))
    h = jax.vmap(dropped)(x @ p["a"][0], keys)
    of_each = jax.vmap(lambda key: jax.random.fold_in(key, 3))(keys)
    return (jax.vmap(dropped)(h, of_each) ** 2).mean()


LOSSES = [plain, over_layers, again, of_keys]


BOUND = 1e-5  # float32, sums of at most a thousand terms: c n eps with c about 1/10


@pytest.mark.grid(4, 8)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("fun", LOSSES)
def test_they_draw_what_the_whole_batch_draws(fun, impl):
    params, x, key = arguments(impl=impl)
    assert error(fun, K, params, x, key) < BOUND
    other = jax.random.fold_in(key, 1)  # the twin: another draw
    got, due = (jax.value_and_grad(fun)(params, x, key) for key in (key, other))
    assert off(got, due) > 1e-3


@pytest.mark.quick
def test_the_report_says_what_is_drawn_whole():
    found = ga.batch_dependencies(plain, K)(*arguments(impl="rbg"))
    assert {x.name for x in found.whole} == {"random_bits"}
    assert ga.batch_dependencies(plain, K)(*arguments(impl="threefry2x32")).whole == []
