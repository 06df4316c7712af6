"""What a loss creates has rows, too, where that saves something: noise of a generator.

An axis may be as long as the batch by chance: then nothing becomes worse.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import temporaries
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_whole_batch_random import by_vmap, partitioned

import ga_optax as ga
from ga_optax._partition import WHOLE, Rows, created
from ga_optax._passes import ir

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, D, E, K = 24, 5, 7, 4
KEY = jax.random.key(3)


def arguments(n=N, width=E):
    """Parameters of a generator and a critic, and rows."""
    shapes = {"in": (D, width), "mid": (width, width), "out": (width, D), "of": (D, 1)}
    shapes |= {"each": (10, D)}
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=s) / 3) for k, s in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(n, D)))


def noise(x, key=KEY):
    return jax.random.normal(key, (len(x), D))


def generated(p, z):
    return jnp.tanh(jnp.tanh(z @ p["in"]) @ p["mid"]) @ p["out"]


def judged(p, x, y):
    """The loss of rows that were made, and of those of the batch."""
    made, real = ((jnp.tanh(rows) @ p["of"])[:, 0] for rows in (x, y))
    return (jax.nn.softplus(made) + jax.nn.softplus(-real)).mean()


def generator(p, x):
    made = jnp.tanh(generated(p, noise(x))) @ p["of"]
    return jax.nn.softplus(-made).mean()


def both(p, x):
    return judged(p, generated(p, noise(x)), x)


def rematerialised(p, x):
    return judged(p, jax.checkpoint(generated)(p, noise(x)), x)


def with_rules(p, x):
    h = jax.nn.relu(noise(x) @ p["in"])
    return judged(p, h @ p["out"], x)


def in_a_scan(p, x):
    h = jnp.zeros((len(x), len(p["mid"]))) + noise(x)[:, :1]
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["mid"]), None), h, None, 3)
    return judged(p, h @ p["out"], x)


def of_classes(p, x):
    one, two = jax.random.split(KEY)
    which = jax.random.randint(one, (len(x),), 0, 10)
    return judged(p, generated(p, noise(x, two) + p["each"][which]), x)


def of_keys(p, x):
    keys = jax.random.split(KEY, len(x))
    z = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 1), (D,)))(keys)
    return judged(p, generated(p, z), x)


def normalised(p, x):
    h = noise(x) @ p["in"]
    return judged(p, jnp.tanh((h - h.mean(0)) / (h.std(0) + 1)) @ p["out"], x)


def two(p, x):
    apart = generated(p, noise(x)) - generated(p, noise(x, jax.random.key(4)))
    return (apart**2).mean() + judged(p, generated(p, noise(x)), x)


def denoised(p, x):
    one, two = jax.random.split(KEY)
    t = jax.random.randint(one, (len(x),), 0, 9)[:, None] / jnp.arange(1.0, 1 + D)
    h = x * jnp.cos(t) + noise(x, two) + generated(p, jnp.sin(t))
    return ((generated(p, h) - noise(x, two)) ** 2).mean()


def of_numbers_alone(p, x):
    """No row meets a product before all are summed."""
    e = jax.random.normal(KEY, (len(x), len(p["mid"])))
    return jnp.tanh(e * p["mid"][0]).mean() + (x @ p["of"]).mean()


SAVED = [generator, both, rematerialised, with_rules, in_a_scan, of_classes, of_keys]
SAVED += [normalised, two, denoised, of_numbers_alone]


def close(got, want):
    """To rounding in float64, of sums of at most some hundred terms."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if np.abs(np.asarray(x - y)).max() > 1e-12 * (1 + np.abs(np.asarray(y)).max()):
            return False
    return True


def cost(fun, args, k=K):
    """How many numbers a micro-batch computes, and whether rows meet."""
    part = partitioned(fun, k, args)[1]
    return sum(map(ir.computed, part.jaxpr.eqns)), part.meets


def without(monkeypatch):
    """The twin: nothing that is created has rows."""
    monkeypatch.setattr(created, "_LARGE", float("inf"))


@pytest.mark.grid(2, 6)
@pytest.mark.parametrize("k", [1, 4, 24])
@pytest.mark.parametrize("fun", SAVED)
def test_value_and_gradients_are_those_of_the_whole_batch(fun, k):
    with jax.enable_x64(True):
        args = arguments()
        want = jax.jit(jax.value_and_grad(fun))(*args)
        got, part = by_vmap(fun, k, args)
        assert part.failures == []
        assert close(got, want)
        # The twin: other noise.
        other = jax.value_and_grad(fun)(args[0], args[1].at[0].multiply(1.1))
        assert not close(got, other) or fun is generator


@pytest.mark.parametrize("fun", SAVED)
def test_a_micro_batch_computes_its_part_alone(fun, monkeypatch):
    args = arguments(width=64)
    computed, meets = cost(fun, args)
    assert meets == (fun is normalised)
    without(monkeypatch)
    assert cost(fun, args)[0] > 1.1 * computed


# -- An axis that is as long as the batch by chance ------------------------------------


def positions():
    return jnp.sin(jnp.arange(N)[:, None] / jnp.arange(1.0, 1 + D))


def tokens(p, x):
    """A sequence as long as the batch, `[rows, tokens, D]`."""
    return x[:, None, :] * p["each"][:1, None, :]


def table(p, x):
    return (jnp.tanh(tokens(p, x) + positions()) ** 2).mean()


def learned_table(p, x):
    return (jnp.tanh(tokens(p, x) + generated(p, positions())) ** 2).mean()


def mask(p, x):
    weights = jnp.tril(jnp.ones((N, N)))
    weights = weights / weights.sum(1, keepdims=True)
    h = tokens(p, x) + positions()
    return (jnp.einsum("st,btd->bsd", weights, h) ** 2).mean()


def random_features(p, x):
    directions = jax.random.normal(KEY, (N, E))
    return (jnp.cos(x @ p["in"] @ directions.T) ** 2).mean()


def labels(p, x):
    logits = jnp.tanh(x @ p["in"]) @ jnp.tanh(x @ p["in"]).T
    return -(jnp.eye(len(x)) * jax.nn.log_softmax(logits)).sum(1).mean()


def numbered(p, x):
    logits = jnp.tanh(x @ p["in"]) @ jnp.tanh(x @ p["in"]).T
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.arange(N)[:, None], 1)
    return -own.mean()


def dropped(p, x):
    h = jnp.tanh(x @ p["in"])
    return ((h * jax.random.bernoulli(KEY, 0.9, h.shape)) @ p["out"]).mean()


def mixed(p, x):
    share = jax.random.uniform(KEY, (len(x), 1))
    return (generated(p, share * x + (1 - share) * x[::-1]) ** 2).mean()


CHANCE = [table, learned_table, mask, random_features, labels, numbered, dropped, mixed]


@pytest.mark.grid(2)
@pytest.mark.parametrize("fun", CHANCE)
def test_by_chance_nothing_becomes_worse(fun, monkeypatch):
    with jax.enable_x64(True):
        args = arguments()
        assert close(by_vmap(fun, K, args)[0], jax.value_and_grad(fun)(*args))
        ours = cost(fun, args)
        without(monkeypatch)
        assert ours == cost(fun, args)


def test_a_table_by_chance_does_not_keep_noise_from_having_rows(monkeypatch):
    def fun(p, x):
        return learned_table(p, x) + generator(p, x)

    args = arguments()
    computed, meets = cost(fun, args)
    assert not meets
    without(monkeypatch)
    assert computed < cost(fun, args)[0]


# -- In a window -----------------------------------------------------------------------


@pytest.mark.parametrize("fun", [generator, both, denoised, of_keys])
def test_it_takes_the_memory_of_a_micro_batch(fun, monkeypatch):
    args = jax.tree.map(jnp.float32, arguments(n=256, width=128))

    def needs():
        return temporaries(jax.jit(ga.value_and_grad(fun, 8)), *args)

    undivided = temporaries(jax.jit(jax.value_and_grad(fun)), *args)
    assert 0 < needs() < undivided / 2  # with the gradients, and their sum
    without(monkeypatch)
    assert needs() > 0.8 * undivided


@pytest.mark.grid(1, 4)
@pytest.mark.parametrize("fun", [both, normalised])
@pytest.mark.parametrize("how", ["argument", "axis"])
@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="data_axis needs jax 0.9")
def test_over_devices_it_draws_what_the_whole_batch_draws(fun, how):
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    with jax.enable_x64(True):
        params, x = arguments()
        want = jax.jit(jax.value_and_grad(fun))(params, x)
        params = jax.device_put(params, NamedSharding(mesh, P()))
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        over = {"data_axis": ga.DataAxis("data", mesh=mesh)} if how == "axis" else {}
        step = ga.value_and_grad(fun, 3, accumulator_dtype="float64", **over)
        assert close(jax.jit(step)(params, x), want)


def test_noise_in_the_aux_is_drawn_in_parts_and_comes_back_whole(monkeypatch):
    def fun(p, x):
        z = jax.random.uniform(KEY, (len(x), D))
        return judged(p, z, x), {"noise": z, "table": jnp.eye(len(x))}

    args = jax.tree.map(jnp.float32, arguments())
    (_, want), _ = jax.value_and_grad(fun, has_aux=True)(*args)
    (_, got), _ = jax.jit(ga.value_and_grad(fun, K, has_aux=True))(*args)
    jax.tree.map(np.testing.assert_array_equal, got, want)

    def layouts():
        return partitioned(lambda p, x: list(fun(p, x)[1].values()), K, args)[1].layouts

    assert all(isinstance(layout, Rows) for layout in layouts())
    without(monkeypatch)
    assert layouts() == [WHOLE, WHOLE]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_rows_draw_the_same_bits(impl):
    """Generators that cannot draw a part draw all, and each row its own."""

    def fun(p, x):
        keys = jax.random.split(jax.random.key(0, impl=impl), len(x))
        if impl == "rbg":
            keys = jax.random.split(jax.random.key(0), len(x))
        z = jax.vmap(lambda key: jax.random.bits(key, (2,)))(keys)
        one = jax.random.key(1, impl=impl)
        z = jnp.concatenate([z, jax.random.bits(one, (len(x), 2))], 1)
        return (x @ p["in"]).mean(), {"bits": z ^ jnp.uint32(x[:, :1] > 0)}

    args = jax.tree.map(jnp.float32, arguments())
    step = jax.jit(ga.value_and_grad(fun, K, has_aux=True))
    (_, got), _ = step(*args)
    (_, want), _ = jax.value_and_grad(fun, has_aux=True)(*args)
    np.testing.assert_array_equal(got["bits"], want["bits"])
    assert len(np.unique(want["bits"])) == want["bits"].size  # it would show
