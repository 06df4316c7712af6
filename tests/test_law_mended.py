"""Losses whose numbers were wrong once, or of a kind that easily goes wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import apart, with_rule
from jax import lax

import ga_optax as ga

# What is computed whole is a warning, for programs as small as these.
pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
BOUND = 1e-10
N, D, K = 8, 4, 4


def arguments(n=N):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape)) for shape in ((D, D), (n, D))]


def off(fun, n=N, k=K):
    """How far value and gradients are off, in both ways."""
    with jax.enable_x64(True):
        args, grads = arguments(n), jax.value_and_grad(fun)
        step = ga.value_and_grad(fun, k, accumulator_dtype="float64")
        return max(apart(run, grads, *args) for run in (step, ga.microbatch(grads, k)))


# -- What others read too --------------------------------------------------------------


def before(w, x, reverse=False):
    """Sums over all rows before each: the carry is a result, too."""
    scan = lax.scan(lambda c, r: (c + r, c), jnp.zeros(D), x @ w, reverse=reverse)
    return jnp.sin(scan[1]).sum()


def swapped(w, x):
    def add(c, r):
        return (c[1] + r, c[0]), None

    first, second = lax.scan(add, (jnp.zeros(D), jnp.ones(D)), x @ w)[0]
    return jnp.sin(first).sum() + jnp.cos(second).sum()


def kept(w, x):
    scan = lax.scan(lambda c, r: (c, (r, c)), (x @ w).sum(0), jnp.sin(x @ w))
    return sum(jnp.sin(y).sum() for y in jax.tree.leaves(scan))


def sorted_with(w, x):
    """An extremum that a sort returns behind integers."""
    _, y = lax.sort((jnp.array([2, 0, 3, 1]), (x @ w).max(0)), num_keys=1)
    return (jnp.sin(y) * jnp.arange(D)).sum()


def counted(w, x):
    def body(c, _):
        return (c[0] + 1, c[1] * (x @ w).max(0)), None

    times, y = lax.scan(body, (0, jnp.ones(D)), None, length=2)[0]
    return jnp.sin(y).sum() * times


# -- What an index picks ---------------------------------------------------------------

ORDER = np.array([5, 0, -1, 3, 11, 2])  # one counts from the end, one is outside


def picked(w, x, rows=ORDER, **options):
    scores = jnp.tanh(x @ w) @ x.T
    index = jnp.stack([jnp.asarray(rows), np.arange(len(rows)) % N], axis=1)
    numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    return jnp.sum(jnp.sin(lax.gather(scores, index, numbers, (1, 1), **options)))


def of_columns(w, x):
    z = jnp.stack([x @ w, jnp.sin(x)])
    return jnp.sum(z[0, np.array([3, 6])] * z[1, np.array([6, 6])])


def filled_sum(fill):
    def fun(w, x):
        found = (x @ w).sum(0).at[jnp.asarray([0, 9])]
        return found.get(mode="fill", fill_value=fill).sum() ** 2

    return fun


def behind_a_transpose(w, x):
    index = lax.broadcasted_iota(int, (N, N), 0)
    index = lax.reshape(index, (N, N), dimensions=(1, 0))[:, 3]
    return jnp.sin((x @ w)[index, 1]).sum()


def overwritten(w, x):
    """Rows are updated with rows that the update overwrites."""
    h = jnp.tanh(x @ w)
    start = (x[0, 0] > 9).astype("int32")
    z = lax.dynamic_slice(h, (start, start * 0), (3, D))
    return (jnp.cumsum(lax.dynamic_update_slice(h, z / 2, (2, 0)), 1) * x).std()


# -- What must not be taken apart ------------------------------------------------------


def square_batch(w, x):
    """As many features as rows: an axis as long as the batch is not one of rows."""
    h = jnp.tanh(x @ jnp.concatenate([w, -w], 1))
    return ((h - h.mean(1, keepdims=True)) ** 2).mean() + (h.T @ h).std() + w.sum()


def attained(w, x):
    """Rows that attain an extremum are found, however XLA rounds in another level."""
    h = jnp.where(x > 0, x @ w, jnp.tanh(x @ w) / 2)
    h = h / (1 + jnp.abs(h).max())
    return jnp.where(h == jnp.broadcast_to(h.max(0), h.shape), h, 0.1 * x).sum()


LOSSES = {
    "sums behind": lambda w, x: before(w, x, reverse=True),
    "filled entries": lambda w, x: picked(w, x, mode="fill", fill_value=0.5),
    "clipped entries": lambda w, x: picked(w, x, mode="clip"),
    "entries inside": lambda w, x: picked(
        w, x, np.array([5, 0, 3, 3], np.int8), mode="promise_in_bounds"
    ),
    "a sum filled with 0": filled_sum(0.0),
    "a sum filled with 7": filled_sum(7.0),
}
_BY_NAME = (before, swapped, kept, sorted_with, counted, of_columns, behind_a_transpose)
_BY_NAME += (overwritten, square_batch, attained)
LOSSES |= {f.__name__: f for f in _BY_NAME}


@pytest.mark.grid(10, len(LOSSES))
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_easily_wrong_is_that_of_the_undivided_batch(name):
    assert off(LOSSES[name]) < BOUND


# -- An index that counts rows, unless a dtype cannot ----------------------------------

CASTS = {  # how many rows, the dtypes of their index, and whether rows meet
    "bool": (8, [int, bool], True),
    "int4": (16, [int, jnp.int4], True),
    "int8": (128, [int, jnp.int8], False),
    "uint8, wraps": (512, [int, jnp.uint8], True),
    "an iota that begins again": (512, [jnp.uint8], True),
    "uint8": (256, [int, jnp.uint8], False),
    "bfloat16": (256, [int, jnp.bfloat16], False),
    "float8, rounds": (32, [int, jnp.float8_e4m3fn], True),
    "float16, rounds": (4096, [int, jnp.float16], True),
    "there and back": (512, [int, jnp.int32, jnp.bfloat16, jnp.float32], True),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_that_changes_numbers_counts_no_rows(name):
    n, (first, *dtypes), meets = CASTS[name]

    def fun(w, x):
        index = lax.iota(first, n)
        for dtype in (*dtypes, int):
            index = index.astype(dtype)
        return jnp.sin((x @ w)[index, 1]).sum()

    with jax.enable_x64(True):
        found = ga.batch_dependencies(fun, K)(*arguments(n))
    assert bool(found.meetings or found.whole) == meets
    if "rounds" not in name and "back" not in name:  # XLA may leave out the rounding
        assert off(fun, n) < BOUND


# -- Factors that are no numbers -------------------------------------------------------

NUMBERS = [0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan, 1e-300]
FORMS = {
    "over": lambda s, c: s / c,
    "times": lambda s, c: s * c,
    "over, and more": lambda s, c: 3 * (s / c) - 2,
    "times the inverse": lambda s, c: s * (1 / c),
    "of two": lambda s, c: s / c + s,
    "a function of it": lambda s, c: jnp.exp(-s / c),
    "chosen": lambda s, c: jnp.where(c == 0, 0.0, s / c),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_sum_times_what_is_no_number_is_that_of_the_undivided_batch(name):
    def fun(p, b):
        sums = (b["x"] @ p).sum(), b["c"].sum()
        return FORMS[name](*sums), FORMS[name](*map(lax.stop_gradient, sums))

    with jax.enable_x64(True):
        step = jax.jit(ga.value_and_grad(fun, K, has_aux=True))
        rng = np.random.default_rng(0)
        p, x = jnp.asarray(rng.normal(size=3)), jnp.asarray(rng.normal(size=(8, 3)))
        for number in NUMBERS:
            args = p, {"x": x, "c": jnp.zeros(8).at[5].set(number)}
            np.testing.assert_allclose(step(*args)[0], jax.jit(fun)(*args), 1e-9, 1e-12)


# -- Backward rules of the user's run once, with the cotangent of the whole batch ------


def sine(of_cotangent):
    """sin, whose backward rule does something to the cotangent."""
    return with_rule(jnp.sin, lambda x, ct: (of_cotangent(ct) * jnp.cos(*x),))


RULES = {
    "linear": sine(lambda ct: jnp.zeros_like(ct).at[:1].add(2 * ct[:1])),
    "clips": sine(lambda ct: jnp.clip(ct, -0.01, 0.01)),
    "adds a number": sine(lambda ct: ct + 1),
    "fills": sine(lambda ct: jnp.where(ct > 0, ct, 0.3)),
    "is one at zero": sine(jnp.exp),
    "scales by the largest": sine(lambda ct: ct / jnp.abs(ct).max()),
}
OF_RULES = {
    "statistics": lambda g, w, x: jnp.mean((x @ w - g((x @ w).mean(0))) ** 2),
    "rows": lambda g, w, x: jnp.mean(g(x @ w) ** 2),
    "fewer rows": lambda g, w, x: jnp.mean(g(jnp.tanh(x @ w)[1:]) ** 2),
    "parameters": lambda g, w, x: jnp.mean((x @ g(w)) ** 2),
    "parameters in a loop": lambda g, w, x: jnp.mean(
        lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ g(w)), x) ** 2
    ),
    "sorted rows": lambda g, w, x: jnp.mean(g(jnp.sort(x @ w, 0)) ** 2),
    "a branch": lambda g, w, x: lax.cond(
        w.sum() > 9, g, lambda h: g(2 * h), (x @ w).mean(0)
    ).sum(),
    "numbers with few exponents": lambda g, w, x: jnp.mean(
        g(x.astype(jnp.float16).astype(x.dtype) @ w) ** 2
    ),
}


@pytest.mark.grid(1, len(OF_RULES))
@pytest.mark.parametrize("of", OF_RULES)
def test_rules_get_the_cotangent_of_the_whole_batch_once(of):
    def fun(w, x):
        return sum(OF_RULES[of](rule, w, x) for rule in RULES.values())

    assert off(fun) < BOUND


best = with_rule(
    lambda x: (x.max(0), x.argmax(0), x.max(0) > 0),
    lambda saved, cts: (
        jnp.zeros_like(saved[0]).at[saved[1], jnp.arange(D)].set(jnp.tanh(cts[0]) + 1),
    ),
    saves=lambda x: (x, x.argmax(0)),
)
scaled = with_rule(
    lambda x: (x / x.max(), x.max()),
    lambda top, cts: ((cts[0] / top).at[0].add(top),),
    saves=jnp.max,
)


def _few_back(x, ct):
    both = jnp.stack([*x, jnp.cos(*x)], 1).reshape(2 * N, -1)
    return (ct * (both[:N] + both[N:]),)


few_meet = with_rule(jnp.sin, _few_back)


def of_best(w, x):
    top, at, is_above = best(x @ w)
    return (top * (1 + at) * is_above).sum()


def of_scaled(w, x):
    y, top = scaled(x @ w)
    return jnp.mean((y * top) ** 2)


@pytest.mark.parametrize(
    "fun", [of_best, of_scaled, lambda w, x: jnp.mean(few_meet(x @ w) ** 2)]
)
def test_a_rule_of_several_results_or_in_which_rows_meet_runs_once(fun):
    assert off(fun, k=2) < BOUND


# -- Gradients that are differentiated again -------------------------------------------

steps = jax.custom_jvp(lambda x: jnp.round(4 * x) / 4)
steps.defjvp(lambda xs, ts: (steps(*xs), ts[0]))
answered = jax.custom_jvp(lambda x: jnp.sin(x))
answered.defjvps(lambda t, ans, x: t * ans)
backwards = jax.custom_vjp(lambda x: jnp.round(4 * x) / 4)
backwards.defvjp(lambda x: (backwards(x), x), lambda x, ct: (ct * jnp.cos(x),))
other = jax.custom_vjp(lambda x: jnp.round(4 * x) / 4)  # whose rule does not call it
other.defvjp(lambda x: (jnp.sin(x), None), lambda _, ct: (ct,))


@pytest.mark.parametrize("rule", [steps, answered, backwards, other], ids=range(4))
def test_the_derivative_of_a_gradient_has_the_rule_that_a_rule_calls_for(rule):
    def loss(w, x):
        return jnp.mean(rule(jnp.tanh(x @ w)) ** 2)

    with jax.enable_x64(True):
        step = ga.value_and_grad(loss, K, accumulator_dtype="float64")
        ours = jax.jacrev(lambda w, x: step(w, x)[1])
        assert apart(ours, jax.jacrev(jax.grad(loss)), *arguments()) < BOUND


# -- What newer JAX lowers later -------------------------------------------------------

FOUND = {
    "insert": lambda w, x: jnp.mean(jnp.insert(jnp.sin(x @ w), 3, w[0], 0) ** 2),
    "searchsorted": lambda w, x: jnp.mean(
        jnp.sin(x @ w) * jnp.searchsorted(jnp.sort(w[0]), w[1])
    ),
    "nonzero": lambda w, x: jnp.mean(
        jnp.sin(x @ w)[:, jnp.nonzero(w[0] > 0, size=2)[0]] ** 2
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_lowered_later_may_stand_in_a_gradient_under_jit(name):
    assert off(FOUND[name]) < BOUND
