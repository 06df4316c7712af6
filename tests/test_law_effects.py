"""What prints or calls back does so once, with what the whole batch gives it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, put, with_rule
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

import ga_optax as ga

# What is computed whole is a warning, for programs as small as these.
pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, D, K = 8, 3, 4
W, X = 0.1 * jnp.arange(9.0).reshape(D, D), 0.1 * jnp.arange(24.0).reshape(N, D)
SAID = []


def say(*arrays, ordered=False):
    jax.debug.callback(lambda *xs: SAID.append(xs), *arrays, ordered=ordered)


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def of_sums(w, x):
    h = x @ w
    say(h - h.mean(0))
    value = jnp.sqrt(jnp.mean((h - h.mean(0)) ** 2))
    say(value)
    return value


def of_each_row(w, x):
    def one(row):
        say(row @ w)
        return jnp.sum((row @ w) ** 2)

    return jax.vmap(one)(x).mean()


def of_layers(w, x):
    def layer(h, _):
        say(h.sum())
        say(h)
        return jnp.tanh(h @ w), None

    return lax.scan(layer, x, None, length=2)[0].mean()


def of_weights(w, x):
    def power(v, _):
        say(v)
        return jnp.tanh(v), None

    return (x @ lax.scan(power, w, None, length=2)[0]).mean()


def in_a_while(w, x):
    def body(c):
        say(c[1])
        return c[0] + 1, c[1] + 1

    out = lax.while_loop(lambda c: c[0] < 2, body, (0, lax.stop_gradient(w)))
    return loss(w, x) + out[1].sum()


def in_a_branch(w, x):
    lax.cond(w[0, 0] < 1, lambda: say(w), lambda: None)
    lax.cond(w[0, 0] < 1, lambda h: say(h), lambda h: None, x @ w)


def _tell(_, ct):
    say(ct)
    return (ct,)


told = with_rule(lambda h: h, _tell)


def after(*says):
    def fun(w, x):
        for each in says:
            each(w, x)
        return loss(w, x)

    return fun


def by_io(w, x):
    h = lax.stop_gradient(x @ w)
    io_callback(lambda *xs: SAID.append(xs), None, h, ordered=True)


LOSSES = {
    "numbers": after(lambda w, x: say(w.sum())),
    "nothing": after(lambda w, x: say()),
    "rows": after(lambda w, x: say(x @ w)),
    "in order": after(
        lambda w, x: say(x @ w, ordered=True), lambda w, x: say(w, ordered=True)
    ),
    "sums": of_sums,
    "each row": of_each_row,
    "layers": of_layers,
    "weights": of_weights,
    "a while": in_a_while,
    "a branch": after(in_a_branch),
    "cotangents": lambda w, x: jnp.mean(told(x @ told(w)) ** 2),
    "io": after(by_io),
}


def said_by(run, *args):
    """What was said, in the order of what it is."""
    SAID.clear()
    out = jax.block_until_ready(jax.jit(run)(*args))
    jax.effects_barrier()
    found = [[np.asarray(x) for x in arrays] for arrays in SAID]
    return sorted(found, key=lambda xs: (len(xs), [(x.size, x.sum()) for x in xs])), out


def same(got, want):
    """Whether the same was said, as often."""
    shapes = [[[x.shape for x in xs] for xs in said] for said in (got, want)]
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=False)
    return shapes[0] == shapes[1] and all(np.allclose(*xy, atol=1e-6) for xy in pairs)


@pytest.mark.grid(3, 12)
@pytest.mark.parametrize("name", LOSSES)
def test_what_calls_back_does_so_once_with_what_the_whole_batch_gives(name):
    fun = LOSSES[name]
    want, out = said_by(jax.value_and_grad(fun), W, X)
    assert want
    grads, of_fun = jax.value_and_grad(fun), jax.value_and_grad(ga.microbatch(fun, K))
    runs = [ga.value_and_grad(fun, K), ga.microbatch(grads, K), of_fun]
    if name in ("in order", "io"):  # what else is computed again is said again
        runs += [jax.value_and_grad(ga.microbatch(fun, K, remat=True))]
    for run in runs:
        got, result = said_by(run, W, X)
        assert same(got, want), (got, want)
        assert jnp.allclose(result[1], out[1], atol=1e-6)


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("name", ["rows", "numbers", "weights"])
def test_it_does_so_once_on_all_devices(name):
    mesh = mesh_of(2)
    want, _ = said_by(jax.value_and_grad(LOSSES[name]), W, X)
    axis = ga.DataAxis("data", mesh=mesh)
    step = ga.value_and_grad(LOSSES[name], 2, data_axis=axis)
    assert same(said_by(step, W, put(X, mesh, PartitionSpec("data")))[0], want)


def test_the_twin_each_micro_batch_by_itself_says_it_as_often():
    want, _ = said_by(jax.value_and_grad(LOSSES["rows"]), W, X)
    step = ga.accumulate(LOSSES["rows"], K)
    got, _ = said_by(step, ga.accumulator.init(W), W, X)
    assert len(got) == K * len(want)
    assert not same(got, want)
