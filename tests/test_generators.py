"""Keys of `rbg` and `unsafe_rbg`: micro-batches draw their part of what XLA draws.

On CPUs with the bits of the whole batch. What other platforms do, which have another
draw, runs here too: `elsewhere` has it that this generator's state cannot seek.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import apart, error, mesh_of, normal, off, put, temporaries
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._partition import Rows, generators

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, D, K = 16, 6, 4
IMPLS = ["rbg", "unsafe_rbg"]


@pytest.fixture
def elsewhere(monkeypatch):
    """As on a platform whose generator cannot begin in the middle."""
    monkeypatch.setattr(generators, "_has_parts", lambda platform: False)


@pytest.fixture
def whole_draws():
    ga.config.update("whole_draws", True)
    yield
    ga.config.update("whole_draws", False)


# -- Bits ------------------------------------------------------------------------------


def parts(way, key, shape, rows, width=32):
    """What each micro-batch draws of numbers of so many bits."""
    cut = generators._Cut(shape, width, "rbg", rows, K)
    return [getattr(cut, way)(key, jnp.int32(i)) for i in range(K)]


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((16, 6), Rows(0)),  # whole blocks
        ((12, 5), Rows(0)),  # not whole ones
        ((3, 8, 5), Rows(1)),
        ((16, 3), Rows(0, 4)),
        ((2, 3, 4), Rows(2)),
        ((40,), Rows(0)),
    ],
)
@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_a_part_has_the_bits_of_the_whole(shape, rows, width, monkeypatch):
    with jax.enable_x64(width == 64):
        key = jnp.array([1, 2, 2**32 - 5, 3], jnp.uint32)  # its count is about to carry
        cut = key, shape, rows, width
        want = parts("of_whole", *cut)
        np.testing.assert_array_equal(parts("from_own_count", *cut), want)
        # The twin: all begin at the first block.
        monkeypatch.setattr(generators, "_advanced", lambda key, blocks: key)
        assert not np.array_equal(parts("from_own_count", *cut), want)


def test_keys_of_micro_batches_are_not_those_that_users_fold_in():
    key = jax.random.key(0, impl="rbg")
    mine = parts("from_own_key", jax.random.key_data(key), (K, 8), Rows(0))
    theirs = [jax.random.bits(jax.random.fold_in(key, i), (1, 8)) for i in range(K)]
    every = [np.asarray(x).tobytes() for x in (*mine, *theirs)]
    assert len(set(every)) == 2 * K


# -- Losses ----------------------------------------------------------------------------


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


@pytest.mark.grid(7, 14)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("fun", LOSSES)
def test_value_and_gradients_are_those_of_the_whole_batch(fun, impl):
    assert error(fun, K, *arguments(impl=impl)) < BOUND


@pytest.mark.cpu
@pytest.mark.grid(3, 6)
@pytest.mark.parametrize("fun", [f for f in LOSSES if f is not uneven])
@pytest.mark.usefixtures("elsewhere")
def test_elsewhere_they_are_of_another_draw_unless_it_is_asked_for(fun, whole_draws):
    assert error(fun, K, *arguments()) < BOUND
    ga.config.update("whole_draws", False)
    assert error(fun, K, *arguments()) > 1e-3  # the twin
    assert error(fun, 1, *arguments()) < BOUND


@pytest.mark.usefixtures("elsewhere")
def test_what_is_drawn_elsewhere_has_the_same_distribution():
    def fun(w, x, key):
        return (w * x).mean(), jax.random.uniform(key, x.shape)

    x, key = jnp.ones((64, 256)), jax.random.key(0, impl="rbg")
    _, drawn = jax.jit(ga.microbatch(fun, 8))(1.0, x, key)
    assert len(np.unique(drawn)) > 0.99 * drawn.size  # no micro-batch draws another's
    bound = 5 / np.sqrt(12 * drawn.size)
    assert abs(drawn.mean() - 0.5) < bound
    assert np.abs(drawn.mean(1) - 0.5).max() < 5 / np.sqrt(12 * 256)


# -- One draw, several readers ---------------------------------------------------------


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


def with_a_rule(p, x, key):
    return (masked(x + p["a"][0, 0], key) ** 2).mean()


def each_reader_for_itself(monkeypatch):
    monkeypatch.setattr(generators.Draws, "divided", lambda self, jaxpr: set())


@pytest.mark.cpu
@pytest.mark.parametrize("fun", [read_whole, read_by_others])
@pytest.mark.usefixtures("elsewhere")
def test_all_who_read_a_draw_read_the_same(fun, monkeypatch):
    def gap():
        step = jax.jit(ga.value_and_grad(fun, K, has_aux=True))
        (_, (gap, drawn)), _ = step(*arguments())
        return float(jnp.abs(gap).max()), drawn

    found, drawn = gap()
    assert found < 1e-3
    np.testing.assert_array_equal(drawn, fun(*arguments())[1][1])
    each_reader_for_itself(monkeypatch)  # the twin
    assert gap()[0] > 1e-3


@pytest.mark.cpu
@pytest.mark.usefixtures("elsewhere")
def test_a_rule_of_the_users_draws_what_its_function_draws(monkeypatch):
    assert error(with_a_rule, K, *arguments()) < BOUND
    each_reader_for_itself(monkeypatch)  # the twin: as the function alone
    assert apart(ga.microbatch(with_a_rule, K), with_a_rule, *arguments()) > 1e-3


# -- Transformations -------------------------------------------------------------------

WAYS = [(0, None), (0, 0), (None, 0)]


@pytest.mark.parametrize(
    ("fun", "ways", "where"),
    [
        *itertools.product([plain, of_columns], WAYS, ["here"]),
        (plain, (0, 0), "elsewhere"),
    ],
)
def test_under_vmap_it_draws_what_the_whole_batch_draws(fun, ways, where, request):
    """With keys for each, XLA draws for all from the first."""
    if where == "elsewhere":
        request.getfixturevalue(where)
    p, x, _ = arguments()
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 3)
    several = jnp.stack([x, x + 1, x - 1]), keys
    given = [v if way == 0 else v[0] for v, way in zip(several, ways, strict=True)]
    ways = None, *ways
    step = ga.value_and_grad(fun, K)
    want = jax.jit(jax.vmap(jax.value_and_grad(fun), ways))(p, *given)
    assert off(jax.jit(jax.vmap(step, ways))(p, *given), want) < BOUND
    if ways == (None, None, 0):  # the twin: a loop has the draws of each key
        each = jax.lax.map(lambda key: step(p, x, key), keys)
        assert off(each, want) > 1e-3


@pytest.mark.grid(3, 5)
@pytest.mark.parametrize("fun", [plain, of_pairs])
@pytest.mark.parametrize("how", ["argument", "axis", "region"])
def test_over_devices_it_draws_what_the_whole_batch_draws(fun, how):
    mesh, specs = mesh_of(), (P(), P("data"), P())
    args = arguments()
    axis = {"argument": None, "axis": ga.DataAxis("data", mesh=mesh), "region": "data"}
    step = ga.value_and_grad(fun, 2, data_axis=axis[how])
    if how == "region":
        specs_of = {"mesh": mesh, "in_specs": specs, "out_specs": P()}
        step = jax.shard_map(step, **specs_of, check_vma=fun is plain)
    want = jax.jit(jax.value_and_grad(fun))(*args)
    assert off(jax.jit(step)(*put(args, mesh, specs)), want) < BOUND


# -- What it takes, and what is said ---------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("fun", [plain, over_layers])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_it_takes_the_memory_of_a_micro_batch(fun, where, request):
    if where == "elsewhere":
        request.getfixturevalue(where)
    args = arguments(512, 128)

    def needs():
        return temporaries(jax.jit(ga.value_and_grad(fun, 8)), *args)

    undivided = temporaries(jax.jit(jax.value_and_grad(fun)), *args)
    one = jax.jit(jax.value_and_grad(fun)), *arguments(64, 128)
    grads = 2 * 4 * 128 * 128 * 2 * 2  # both trees, of the window and of a micro-batch
    assert needs() < temporaries(*one) + grads < undivided / 2
    if where == "elsewhere":  # the twin: all rows of a draw are 262 kB
        alone = needs()
        request.getfixturevalue("whole_draws")
        assert needs() > alone + 512 * 128 * 4 / 2


def test_the_platform_chooses_when_it_is_known():
    drawn = {f"tensor<{N // K * D}xui32>": "cpu"}  # in a row, from its count
    drawn |= {f"tensor<{N // K}x{D}xui32>": "tpu", f"tensor<{N}x{D}xui32>": "cuda"}
    for platform in ("cpu", "tpu", "cuda"):
        traced = jax.jit(ga.value_and_grad(plain, K)).trace(*arguments())
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        calls = [x for x in text.splitlines() if "rng_bit_generator" in x]
        assert calls
        for words, where in drawn.items():
            assert any(words in x for x in calls) == (where == platform)


@pytest.mark.parametrize("impl", IMPLS)
def test_batch_dependencies_lists_what_micro_batches_draw(impl, whole_draws):
    found = ga.batch_dependencies(plain, K)(*arguments(impl=impl))
    assert found.drawn == found.whole == []  # on a CPU
    ga.config.update("whole_draws", False)
    found = ga.batch_dependencies(plain, K)(*arguments(impl=impl))
    text = str(found)
    assert {(x.name, x.nbytes) for x in found.drawn} == {("random_bits", 4 * N * D)}
    assert f"random_bits, drawn by each micro-batch: {4 * N * D} bytes" in text
    assert "another draw of the same distribution" in text.replace("\n", " ")
    assert found.whole == []
