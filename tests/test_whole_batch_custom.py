"""Backward rules of the user's run once, with the cotangents of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga
from ga_optax._partition import custom, writer

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, K = 12, 4
RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(4, 3)), RNG.normal(size=(N, 4))


def with_rule(of_cotangent):
    """sin, whose backward rule does something to the cotangent."""

    @jax.custom_vjp
    def fun(x):
        return jnp.sin(x)

    def backward(x, ct):
        return (of_cotangent(ct) * jnp.cos(x),)

    fun.defvjp(lambda x: (jnp.sin(x), x), backward)
    return fun


RULES = {
    "linear": with_rule(lambda ct: jnp.zeros_like(ct).at[:1].add(2 * ct[:1])),
    "clips": with_rule(lambda ct: jnp.clip(ct, -0.01, 0.01)),
    "adds a number": with_rule(lambda ct: ct + 1),
    "fills": with_rule(lambda ct: jnp.where(ct > 0, ct, 0.3)),
    "is one at zero": with_rule(jnp.exp),
}


def of_rows(g, w, x):
    return jnp.mean(g(x @ w) ** 2)


def of_fewer_rows(g, w, x):
    return jnp.mean(g(jnp.tanh(x @ w)[1:]) ** 2)


def of_parameters(g, w, x):
    return jnp.mean((x @ g(w)) ** 2)


def of_statistics(g, w, x):
    return jnp.mean((x @ w - g((x @ w).mean(0))) ** 2)


def of_sorted_rows(g, w, x):
    return jnp.mean(g(jnp.sort(x @ w, 0)) ** 2)


def in_a_branch(g, w, x):
    mean = (x @ w).mean(0)
    return jax.lax.cond(w.sum() > 9, g, lambda h: g(2 * h), mean).sum()


LOSSES = (
    of_rows,
    of_fewer_rows,
    of_parameters,
    of_statistics,
    of_sorted_rows,
    in_a_branch,
)


def distance(loss, rule, dtype=float):
    def fun(w, x):
        return loss(rule, w, x.astype(dtype).astype(float))

    with jax.enable_x64(True):
        args = jnp.asarray(W), jnp.asarray(X)
        step = ga.value_and_grad(fun, K, accumulator_dtype="float64")
        got, want = jax.jit(step)(*args)[1], jax.grad(fun)(*args)
        return float(np.abs(got - want).max())


@pytest.mark.grid(1, 4)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_gets_the_cotangent_of_the_whole_batch_once(name, loss):
    assert distance(loss, RULES[name]) < 1e-12


@pytest.mark.parametrize("loss", [of_rows, of_parameters])
def test_so_does_one_beside_numbers_with_few_exponents(loss):
    rule = RULES["clips"]
    assert distance(loss, rule, jnp.float16) < 1e-12

    def parts(w):  # The twin: a rule that sees the half of a cotangent clips less.
        return loss(rule, w, jnp.asarray(X, jnp.float16).astype(float)) / 2

    with jax.enable_x64(True):
        of_half, of_all = jax.grad(parts)(W), jax.grad(lambda w: 2 * parts(w))(W)
        assert np.abs(2 * of_half - of_all).max() > 1e-3


def test_if_a_number_that_is_added_counts_as_linear_it_is_added_by_all(monkeypatch):
    monkeypatch.setattr(custom, "_is_linear", lambda w, rule: True)
    assert distance(of_statistics, RULES["adds a number"]) > 1e-3


def test_a_rule_of_a_function_that_also_returns_numbers_of_rows():
    @jax.custom_vjp
    def best(x):
        return x.max(0), x.argmax(0), x.max(0) > 0

    def forward(x):
        return best(x), (x, x.argmax(0))

    def backward(saved, cts):
        x, at = saved
        return (jnp.zeros_like(x).at[at, jnp.arange(3)].set(jnp.tanh(cts[0]) + 1),)

    best.defvjp(forward, backward)

    def loss(_, w, x):
        largest, at, is_above = best(x @ w)
        return (largest * (1 + at) * is_above).sum()

    assert distance(loss, None) < 1e-12


def of_both(w, x):
    @jax.custom_vjp
    def scaled(x):
        return x / x.max(), x.max()

    def backward(largest, cts):
        return ((cts[0] / largest).at[0].add(largest),)

    scaled.defvjp(lambda x: (scaled(x), x.max()), backward)
    y, largest = scaled(x @ w)
    return jnp.mean((y * largest) ** 2)


def test_a_rule_of_two_results_runs_once(monkeypatch):
    assert distance(lambda _, w, x: of_both(w, x), None) < 1e-12
    # The twin: its first gives what it adds again.
    bound = writer.Writer.bound

    def twice(w, e, xs):
        first, *rest = bound(w, e, xs)
        return [first, *bound(w, e, xs)[1:]] if rest else [first]

    monkeypatch.setattr(writer.Writer, "bound", twice)
    assert distance(lambda _, w, x: of_both(w, x), None) > 1e-3
