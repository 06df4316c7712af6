"""What rows do in the functions that losses use: each rule is right, and is used."""

import helpers
import jax
import jax.numpy as jnp
import pytest
from whole_programs import D, N, arguments

import ga_optax as ga
from ga_optax._partition import moves, table

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")
# In float64: of at most some thousand terms, conditioned no worse than 1e3.
BOUND = 1e-9


def _half(h):
    return h[: len(h) // 2], h[len(h) // 2 :]


def _recurrence(one, two):
    return one[0] * two[0], two[0] * one[1] + two[1]


# Rows that move: `z[:n], z[n:]`, temporal differences, other rows as negatives.
MOVES = {
    "halves": lambda h, w: _half(h)[0] * _half(h)[1],
    "halves of two views": lambda h, w: _half(jnp.concatenate([h, jnp.sin(h)]))[1] * h,
    "swapped halves": lambda h, w: h * jnp.concatenate(_half(h)[::-1]),
    "split": lambda h, w: sum(jnp.split(h, 3)),
    "strided": lambda h, w: h[::2] * jnp.tanh(h[1::2] @ w),
    "differences": lambda h, w: jnp.tanh(h[1:] @ w) - h[:-1],
    "differences twice": lambda h, w: jnp.diff(h, 2, axis=0) @ w,
    "next rows": lambda h, w: jax.nn.softmax(h[:-1] @ h[1:].T),
    "next sums": lambda h, w: h[1:].sum(0) * h[:-1].T.sum(1) + h[2:].max(0),
    "next labels": lambda h, w: h[1:][jnp.arange(len(h) - 1), 1] * h[:-1].mean(1),
    "dropped": lambda h, w: (
        h[1:] * jax.random.bernoulli(jax.random.key(1), 0.7, h[1:].shape)
    ),
    "running": lambda h, w: jnp.cumsum(h[1:], 0),
    "rows and columns": lambda h, w: jnp.pad(h[1:, 1:], ((0, 1), (1, 2)))[::-1, ::-1],
    "roll": lambda h, w: h * jnp.roll(h, 1, 0),
    "roll far": lambda h, w: h * jnp.roll(h, -5, (0, 1)),
    "flip": lambda h, w: h * jnp.flip(h, 0),
    "pad": lambda h, w: h * jnp.pad(h, ((1, 0), (0, 0)))[:-1],
    "pad between": lambda h, w: jax.lax.pad(h, 0.5, ((-1, 2, 1), (0, 0, 0))),
    "queue": lambda h, w: jax.nn.softmax(h @ jnp.concatenate([h, w, w[:1]]).T),
    "tile": lambda h, w: jnp.tile(h, (2, 1)) @ w,
    "repeat": lambda h, w: jnp.repeat(h, 2, 0) @ w,
    "first": lambda h, w: h - h[0] + h[-2:].sum(0),
    "bits": lambda h, w: h * (h[:1] > 0) * (h > 0)[::-1],
    "scan by doubling": lambda h, w: jax.lax.associative_scan(
        _recurrence, (0.9 * jnp.ones_like(h), h)
    )[1],
}


def _ids(h):
    return jnp.arange(len(h)) * 5 % 3


def _two(h):
    return jax.lax.top_k(h, 2)[1]


def _outer(h):
    return h[:, :, None] * h[:, None, :] + 3 * jnp.eye(D)


# What takes several rules together; one by one they are in `test_whole_batch_table`.
OTHERS = {
    "set": lambda h, w: h.at[jnp.arange(len(h)), _ids(h)].set(0.5) @ w,
    "router": lambda h, w: (
        jnp.zeros_like(h).at[jnp.arange(len(h))[:, None], _two(h)].set(h[:, :2]) @ w
    ),
    "flat router": lambda h, w: (
        jnp.zeros_like(h)
        .at[jnp.repeat(jnp.arange(len(h)), 2), _two(h).reshape(-1)]
        .set(h[:, :2].reshape(-1))
    ),
    "diagonal": lambda h, w: (h @ h.T).at[jnp.diag_indices(len(h))].set(-3.0) @ h,
    "row of an extremum": lambda h, w: h * h[jnp.argmax(h[:, 0])],
    "cumlogsumexp": lambda h, w: jax.lax.cumlogsumexp(h, 0, reverse=True),
    "xlogy": lambda h, w: jax.scipy.special.xlogy(
        h[None, :, 0] ** 2, h[:, None, 1] ** 2
    ),
    "solve one": lambda h, w: jnp.linalg.solve(h.T @ h + jnp.eye(D), h.T).T,
    "inverse": lambda h, w: jnp.linalg.inv(_outer(h))[:, 0],
    "determinant": lambda h, w: h * jnp.linalg.slogdet(_outer(h))[1][:, None],
}
RULES = MOVES | OTHERS


def loss_of(name):
    def fun(w, x):
        h = RULES[name](jnp.tanh(x @ w), w)
        return jnp.sqrt((h**2).sum() + 1) + jnp.sin(h).mean(), h

    return fun


def off(name, k):
    """How far value, gradients and rows are from those of the whole batch."""
    with jax.enable_x64(True):
        [w], batch = arguments(1)
        fun, options = loss_of(name), {"has_aux": True}
        step = ga.value_and_grad(fun, k, **options)
        return helpers.apart(step, jax.value_and_grad(fun, **options), w, batch["x"])


@pytest.mark.grid(2, 8)
@pytest.mark.parametrize("k", [4, 1, 2, N])
@pytest.mark.parametrize("name", RULES)
def test_what_has_a_rule_is_right_and_is_not_computed_whole(name, k):
    assert off(name, k) < BOUND
    [w], batch = arguments(1)
    found = ga.batch_dependencies(loss_of(name), k, has_aux=True)(w, batch["x"])
    assert found.whole == []


def test_halves_of_two_views_stay_where_they_are():
    [w], batch = arguments(1)

    def gathered(name):
        found = ga.batch_dependencies(loss_of(name), 4, has_aux=True)(w, batch["x"])
        return [m.type.shape for m in found.meetings if m.kind == "stack"]

    assert gathered("halves of two views") == []
    assert gathered("roll") == [(N // 4, D)]


def clipped_mean(kernel, x):
    """The mean of clipped gradients of single rows, as in private training."""

    def one(kernel, x):
        found = jax.lax.conv(x[None], kernel, (1, 1), "SAME")
        return jnp.sum(jnp.tanh(found).mean((2, 3)) ** 2)

    grads = jax.vmap(jax.grad(one), (None, 0))(kernel, x)
    norm = jnp.sqrt(jnp.sum(grads**2, (1, 2, 3, 4), keepdims=True) + 1e-6)
    return jnp.mean(grads / jnp.maximum(1, norm), 0)


def test_gradients_of_rows_through_a_convolution_take_the_memory_of_a_few():
    kernel, x = jnp.ones((8, 3, 3, 3)) / 9, jnp.ones((32, 3, 16, 16))
    whole, one = (
        helpers.temporaries(jax.jit(clipped_mean), kernel, rows)
        for rows in (x, x[: len(x) // 8])
    )
    got = helpers.temporaries(jax.jit(ga.microbatch(clipped_mean, 8)), kernel, x)
    assert got < 1.2 * one < 0.5 * whole


def test_without_its_rule_a_convolution_takes_that_of_all(monkeypatch):
    kernel, x = jnp.ones((8, 3, 3, 3)) / 9, jnp.ones((32, 3, 16, 16))
    monkeypatch.setitem(
        table.RULES.known, "conv_general_dilated", lambda w, e, vs: None
    )
    one = helpers.temporaries(jax.jit(clipped_mean), kernel, x[:4])
    got = helpers.temporaries(jax.jit(ga.microbatch(clipped_mean, 8)), kernel, x)
    assert got > 2 * one


# -- Twins -----------------------------------------------------------------------------


def test_rows_in_the_place_of_those_beside_them_are_found(monkeypatch):
    at = moves._at
    monkeypatch.setattr(moves, "_at", lambda x, places, d: at(x, places[::-1], d))
    assert off("halves of two views", 4) > 1e-6
