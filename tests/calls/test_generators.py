"""Keys of `rbg` and `unsafe_rbg`: each micro-batch draws from a key of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error, mesh_of, normal, off, put
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._partition import partitioned

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, D, K = 16, 6, 4
IMPLS = ["rbg", "unsafe_rbg"]


@pytest.fixture
def whole_draws():
    ga.config.update("whole_draws", True)
    yield
    ga.config.update("whole_draws", False)


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


def of_columns(p, x, key):
    """Rows are the second axis of what is drawn, and the last."""
    h = jnp.einsum("nd,tde->tne", x, p["a"])
    h = dropped(h, key)
    return (dropped(h.swapaxes(1, 2), jax.random.fold_in(key, 1)) ** 2).mean()


def of_keys(p, x, key):
    """A key for each row, and one of each; XLA draws for all from the first."""
    keys = jax.random.split(key, len(x))
    h = jax.vmap(dropped)(x @ p["a"][0], keys)
    of_each = jax.vmap(lambda key: jax.random.fold_in(key, 3))(keys)
    return (jax.vmap(dropped)(h, of_each) ** 2).mean()


def of_pairs(p, x, key):
    """Two segments of rows, and rows that meet."""
    h = dropped(jnp.concatenate([x @ p["a"][0], jnp.sin(x)]), key)
    return jnp.sqrt((h**2).mean(0)).sum()


def uneven(p, x, key):
    return (dropped((x @ p["a"][0])[1:], key) ** 2).mean()


LOSSES = [plain, over_layers, again, of_columns, of_keys, of_pairs, uneven]


BOUND = 1e-5  # float32, sums of at most a thousand terms: c n eps with c about 1/10


@pytest.mark.grid(4, 14)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("fun", LOSSES)
def test_the_option_asks_for_the_draw_of_the_whole_batch(fun, impl, whole_draws):
    args = arguments(impl=impl)
    assert error(fun, K, *args) < BOUND
    ga.config.update("whole_draws", False)
    assert error(fun, 1, *args) < BOUND
    if fun is not uneven:  # of which all rows are drawn anyway
        assert error(fun, K, *args) > 1e-3  # the twin: another draw


def read_whole(p, x, key):
    """By rows, and by a sort of all."""
    u = jax.random.uniform(key, x.shape)
    gap = (u + 0 * x).sum() - jnp.sort(u.ravel()).sum()
    return (p["a"][0, 0] * x * u).mean(), (gap, u)


def read_by_others(p, x, key):
    """The columns and the rows of one square draw."""
    h = x[:, :1] @ p["a"][0, :1, :1]
    u = jax.random.uniform(key, (len(x), len(x)))
    return (h * u + h.T * u.T).mean(), ((h * 0 + u) - (h.T * 0 + u), u)


@jax.custom_vjp
def masked(h, key):
    return dropped(h, key)


# The backward rule draws the mask again.
masked.defvjp(
    lambda h, key: (dropped(h, key), key), lambda key, ct: (dropped(ct, key), None)
)


@pytest.mark.parametrize("fun", [read_whole, read_by_others])
def test_all_who_read_a_draw_read_the_same(fun, monkeypatch):
    def gap():
        step = jax.jit(ga.value_and_grad(fun, K, has_aux=True))
        (_, (gap, drawn)), _ = step(*arguments())
        return float(jnp.abs(gap).max()), drawn

    found, drawn = gap()
    assert found < 1e-3
    np.testing.assert_array_equal(drawn, fun(*arguments())[1][1])
    monkeypatch.setattr(partitioned, "draws_differ", lambda *_: False)  # the twin
    assert gap()[0] > 1e-3


@pytest.mark.quick
def test_no_two_micro_batches_draw_the_same():
    def fun(w, x, key):
        drawn = jax.random.uniform(key, x.shape)
        return (w * x * drawn).mean(), drawn

    _, x, key = arguments()
    step = jax.jit(ga.value_and_grad(fun, K, has_aux=True))
    drawn = np.asarray(step(jnp.float32(1), x, key)[0][1])
    assert len({part.tobytes() for part in np.split(drawn, K)}) == K


@pytest.mark.parametrize("make", [ga.value_and_grad, ga.microbatch])
def test_a_rule_of_the_users_draws_what_its_function_draws(make):
    """The sum of what is kept of ones, and its gradient, which is the same number."""

    def loss(w, x, key):
        return jnp.sum(masked(w * jnp.ones_like(x), key))

    step = make(loss, K)
    step = step if make is ga.value_and_grad else jax.value_and_grad(step)
    _, x, key = arguments()
    value, grad = jax.jit(step)(jnp.float32(1), x, key)
    assert 0 < value < x.size
    assert abs(value - grad) < 1e-3


@pytest.mark.parametrize("fun", [plain, of_pairs])
def test_micro_batches_draw_the_same_on_any_number_of_devices(fun):
    args, mesh = arguments(), mesh_of()
    step = ga.value_and_grad(fun, 2, data_axis=ga.DataAxis("data", mesh=mesh))
    got = jax.jit(step)(*put(args, mesh, (P(), P("data"), P())))
    one = jax.jit(ga.value_and_grad(fun, 2 * mesh.size))(*args)
    assert off(got, one) < BOUND


@pytest.mark.parametrize("impl", IMPLS)
def test_batch_dependencies_lists_what_micro_batches_draw(impl, request):
    found = ga.batch_dependencies(plain, K)(*arguments(impl=impl))
    text = str(found)
    assert {(x.name, x.nbytes) for x in found.drawn} == {("random_bits", 4 * N * D)}
    assert f"random_bits, drawn by each micro-batch: {4 * N * D} bytes" in text
    assert "another draw of the same distribution" in text.replace("\n", " ")
    assert found.whole == []
    request.getfixturevalue("whole_draws")
    found = ga.batch_dependencies(plain, K)(*arguments(impl=impl))
    assert found.drawn == []
    assert {x.name for x in found.whole} == {"random_bits"}
