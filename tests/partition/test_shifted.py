"""Softmaxes over rows, in the pass that finds maxima: values, costs, infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from corpus import shifts
from helpers import error, of_benchmarks, off

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")
[compare] = of_benchmarks("compare")
N, D, C = 8, 3, 5
# Sums of at most 64 terms, of which each has an exponent of 1,000 at most: 64 · 1,000
# times the rounding of float64.
BOUND = 1e-11

# -- Random programs -------------------------------------------------------------------


def stable(x, axis, where=True, guards=False, stops=True):
    """The exponentials of a softmax by hand, and their sum."""
    most = x.max(axis, keepdims=True)
    most = jnp.where(jnp.isfinite(most), most, 0) if guards else most
    most = jax.lax.stop_gradient(most) if stops else most
    e = jnp.where(where, jnp.exp(x - most), 0)
    return e, e.sum(axis, keepdims=True), most


def by_hand(x, axis, r, mask):
    return jnp.log(stable(x, axis, stops=False)[1]).sum(axis)


def masked(x, axis, r, mask):
    e, total, _ = stable(jnp.where(mask, x, -jnp.inf), axis, mask)
    return (e / jnp.maximum(total, 1e-9) * r).sum(axis) + total.sum(axis)


def guarded(x, axis, r, mask):
    x = jnp.where(mask, x, -jnp.inf)
    e, total, _ = stable(x, axis, mask, guards=True)
    return (e / jnp.maximum(total, 1e-9) * r).sum(axis) + total.sum(axis)


def unmasked(x, axis, r, mask):
    return stable(x, axis, mask)[1].sum(axis)


def weighted(x, axis, r, mask):
    e, total, _ = stable(x, axis)
    return (e * r).sum(axis) / (1 + total.sum(axis))


def of_all(x, axis, r, mask):
    e, total, _ = stable(x, axis)
    return (e * r).sum().reshape(1) / (9 + total.sum())


def less(x, axis, r, mask):
    return (jnp.where(mask, x - x.max(axis, keepdims=True), 0) * r).sum(axis)


def diagonal(x, axis, r, mask):
    return jax.nn.log_softmax(x, axis)[jnp.arange(C), jnp.arange(C)]


def picked(x, axis, r, mask):
    ids = jnp.abs(3 * r[:, :1]).astype(int)
    return jnp.take_along_axis(jax.nn.softmax(x, axis), ids, 1)[:, 0]


def one_column(x, axis, r, mask):
    """Its shift is a number without axes."""
    x, r = (a[:, 0] if axis == 0 else a[0] for a in (x, r))
    return (jax.nn.logsumexp(x) + (jnp.exp(x - x.max()) * r).sum()).reshape(1)


def probabilities(x, axis, r, mask):
    return jax.nn.logsumexp(3 * jnp.exp(jax.nn.log_softmax(x, axis)), axis)


FORMS = {
    "logsumexp": lambda x, axis, r, mask: jax.nn.logsumexp(x, axis),
    "where": lambda x, axis, r, mask: jax.nn.logsumexp(x, axis, where=mask),
    "b": lambda x, axis, r, mask: jax.nn.logsumexp(x, axis, b=jnp.where(mask, r, 0)),
    "everything": lambda x, axis, r, mask: jax.nn.logsumexp(x).reshape(1),
    "softmax": lambda x, axis, r, mask: (jax.nn.softmax(x, axis) * r).sum(axis),
    "softmax, where": lambda x, axis, r, mask: (
        jax.nn.softmax(x, axis, where=mask) * r
    ).sum(axis),
    "labels": lambda x, axis, r, mask: (jnp.abs(r) * jax.nn.log_softmax(x, axis)).sum(
        axis
    ),
    "labels, all": lambda x, axis, r, mask: (
        (r * jax.nn.log_softmax(x, axis)).sum().reshape(1)
    ),
    "log_softmax, where": lambda x, axis, r, mask: jnp.where(
        mask, jax.nn.log_softmax(x, axis, where=mask), 0
    ).sum(axis),
    "masked labels": lambda x, axis, r, mask: jnp.where(
        mask, jax.nn.log_softmax(x, axis), 0
    ).sum(axis),
    **{f.__name__: f for f in (by_hand, masked, guarded, unmasked, weighted, of_all)},
    **{f.__name__: f for f in (less, diagonal, picked, one_column, probabilities)},
}


def spoiled(rng, shape, kind):
    """What is added to logits: infinities, NaN, or numbers far apart."""
    m = np.zeros(shape)
    if kind == "a column":
        m[:, 1] = -np.inf
    elif kind == "pieces":
        m[:2, 1] = m[2:4, 2] = -np.inf
    elif kind == "most":
        m[rng.random(shape) < 0.8] = -np.inf
    elif kind == "infinite":
        m[3, 2] = np.inf
    elif kind == "both":
        m[:, 2] = np.where(np.arange(N) == 3, np.inf, -np.inf)
    elif kind == "NaN":
        m[5, 3] = np.nan
    elif kind == "far":
        m[:4], m[4, 1] = -300, -300
        m[:, 1] -= 700
    return m


KINDS = "none", "a column", "pieces", "most", "infinite", "both", "NaN", "far"


def program(seed):
    """A random loss of such forms, its parameters and batch."""
    rng = np.random.default_rng(seed)
    names, form = list(FORMS), list(FORMS)[seed % len(FORMS)]
    other, kind = rng.choice(names), KINDS[rng.integers(-2, len(KINDS)) % len(KINDS)]
    pairs, turned, ties, finite, added = rng.random(5) < (0.5, 0.3, 0.3, 0.6, 0.5)
    shape = (N, N if pairs else C)
    m, mask = spoiled(rng, shape, kind), rng.random(shape) < 0.6
    mask[:, 2] &= rng.random() < 0.5

    def loss(w, b):
        h = jnp.tanh(b["x"] @ w["a"])
        x = 3 * h @ jnp.tanh(b["y"] @ w["a"]).T if pairs else h @ w["b"]
        x = jnp.round(2 * x) / 2 + 0 * x if ties else x
        x = x + m if added else jnp.where(m == 0, x, m)
        args = [x, 0, b["r"], b["m"]]
        if turned:
            args = [x.T, 1, b["r"].T, b["m"].T]
        first = FORMS[form](*args)
        if finite:
            first = jnp.where(jnp.isfinite(first), first, 0.5)
        first = first * jnp.linspace(1, 2, first.size)
        return first.sum() + (FORMS[other](x, 0, b["r"], b["m"]) ** 2).mean()

    w = {"a": rng.normal(size=(D, 4)), "b": rng.normal(size=(4, C))}
    xs = {key: rng.normal(size=(N, D)) for key in "xy"}
    b = xs | {"r": rng.normal(size=shape), "m": mask}
    return loss, jax.tree.map(jnp.asarray, w), jax.tree.map(jnp.asarray, b)


@pytest.mark.grid(8, 60)
@pytest.mark.usefixtures("float64", "fast_compilation")
@pytest.mark.parametrize("seed", range(200))
def test_a_random_softmax_over_rows_is_that_of_the_undivided_batch(seed):
    """Infinities and NaN stand where JAX has them."""
    loss, *args = program(seed)
    assert error(loss, (2, 4, 8)[seed % 3], *args) < BOUND


OF_INFINITIES = (
    "logsumexp",
    "softmax",
    "where",
    "masked",
    "guarded",
    "log_softmax, where",
)


@pytest.mark.parametrize("form", OF_INFINITIES)
def test_a_column_without_finite_numbers_is_what_jax_makes_of_it(form, float64):
    """0 or NaN, in one column: a mask takes all of another out."""
    rng = np.random.default_rng(1)
    mask, r = rng.random((N, C)) < 0.6, jnp.asarray(rng.normal(size=(N, C)))
    mask[:, 2], far = False, np.where(np.arange(C) == 1, -np.inf, 0)

    def loss(w, x):
        each = FORMS[form](x * w + far, 0, r, mask)
        return jnp.where(jnp.isfinite(each), each, 0.5).sum(), each

    ours = jax.jit(ga.value_and_grad(loss, 4, has_aux=True))
    args = jnp.ones(C), jnp.asarray(rng.normal(size=(N, C)))
    with jax.numpy_rank_promotion("allow"):
        due = jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)
        assert off(ours(*args), due) < BOUND


# -- Shifts and factors of any size ----------------------------------------------------


@pytest.mark.grid(9, 60)
@pytest.mark.usefixtures("float64", "fast_compilation")
@pytest.mark.parametrize("seed", range(300))
def test_where_jax_is_finite_a_random_softmax_is_no_farther_from_the_truth(seed):
    columns, (x, f, mask) = shifts.program(seed)

    def loss(t, batch):
        return columns(t, batch)[0].sum()

    of_jax, info = jax.jit(jax.value_and_grad(loss)), jnp.finfo(x.dtype)
    low = jnp.ones([], x.dtype), (x, f, mask)
    wide = jnp.ones([]), (x.astype(float), f.astype(float), mask)
    due, plain = (np.array(of_jax(*args), float) for args in (wide, low))
    if not (abs(np.array([due, plain])) < float(info.max)).all():
        return
    ours = jax.jit(ga.value_and_grad(loss, (2, 4, 8)[seed // 3 % 3]))
    size = columns(*wide)[1].sum() * np.array([1, 2 * abs(wide[1][0]).max()])
    # N terms are added, and each comes from fewer roundings than that.
    bound = 2 * shifts.N * float(info.eps) * size + abs(plain - due)
    assert (abs(np.array(ours(*low), float) - due) <= bound).all()


@pytest.mark.parametrize("dtype", [*shifts.DTYPES, jnp.float64])
def test_large_factors_overflow_no_sum_that_does_not_in_jax(dtype, float64):
    def loss(t, b):
        return jnp.mean(jax.nn.logsumexp(b[0] * t, axis=0, b=b[1]))

    rows = np.arange(16)[:, None] * np.ones((1, 2), int)
    x = np.where(rows, -80.0, 0) * (8 if dtype == jnp.float64 else 1)
    f = np.where(rows, 0.6, 0) * float(jnp.finfo(dtype).max) + (rows == 0)
    b, one = (jnp.asarray(x, dtype), jnp.asarray(f, dtype)), jnp.ones([], dtype)
    due = jax.value_and_grad(loss)(one, b)
    assert all(map(jnp.isfinite, due))
    for k in (2, 4, 16):
        ours = jax.jit(ga.value_and_grad(loss, k))(one, b)
        # 16 terms, as many roundings of each, relative to the largest of them.
        assert off(ours, due) < 32 * float(jnp.finfo(dtype).eps)


@pytest.mark.quick
def test_what_a_mask_takes_out_after_exp_may_have_any_factor(float64):
    x, keeps = jnp.arange(8.0), jnp.arange(8) % 2 == 0
    f = jnp.where(keeps, 1.0, jnp.nan)

    def loss(t, b):
        a = b[0] * t
        terms = jnp.exp(a - jax.lax.stop_gradient(a.max(0))) * b[1]
        return jnp.where(b[2], terms, 0).sum(0)

    value, grad = jax.jit(ga.value_and_grad(loss, 4))(1.0, (x, f, keeps))
    plain = jax.jit(jax.value_and_grad(loss))
    assert off((value, grad), plain(1.0, (x, jnp.ones(8), keeps))) < BOUND
    both = plain(1.0, (x, f, keeps))
    assert off(value, both[0]) < BOUND
    assert jnp.isnan(both[1])  # as the pages say


# -- Contrastive losses ----------------------------------------------------------------


def unit(x):
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def logits(p, b):
    x, y = (jnp.tanh(x @ w) for x, w in zip(b, p, strict=True))
    return 10 * unit(x) @ unit(y).T


def infonce(p, b):
    x = logits(p, b)
    both = jax.nn.logsumexp(x, 0) + jax.nn.logsumexp(x, 1)
    return (both - 2 * jnp.diag(x)).mean()


def of_integers(p, b):
    x, of = logits(p, b), optax.softmax_cross_entropy_with_integer_labels
    return (of(x, jnp.arange(len(x))) + of(x.T, jnp.arange(len(x)))).mean()


def of_labels(p, b):
    x = logits(p, b)
    labels = 0.9 * jnp.eye(len(x), dtype=x.dtype) + 0.1 / len(x)
    each = optax.softmax_cross_entropy(x, labels)
    return (each + optax.softmax_cross_entropy(x.T, labels)).mean()


def of_logs(p, b):
    x = logits(p, b)
    both = jnp.diag(jax.nn.log_softmax(x, 0)) + jnp.diag(jax.nn.log_softmax(x, 1))
    return -both.mean()


def of_columns(p, b):
    """One direction alone: micro-batches of columns need no other pass."""
    return jax.nn.logsumexp(logits(p, b), 0).mean()


def transport(p, b, rounds=3):
    cost = -logits(p, b)
    f = g = jnp.zeros(len(cost), cost.dtype)
    for _ in range(rounds):
        f = -jax.nn.logsumexp(g[None] - cost, 1)
        g = -jax.nn.logsumexp(f[:, None] - cost, 0)
    return (jnp.exp(f[:, None] + g[None] - cost) * cost).sum()


BOTH = infonce, of_integers, of_labels, of_logs


def views(n=64, d=16, dtype=jnp.float32):
    rng = np.random.default_rng(3)
    shapes = 2 * [(d, d)] + 2 * [(n, d)]
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    return arrays[:2], arrays[2:]


# How often products run, of both views and of all pairs: those of the views forward
# twice and back to the weights, those of the pairs back to both sides. Columns alone
# are split over micro-batches, and `transport` keeps the pairs.
RUNS = dict.fromkeys(BOTH, (2 + 1, 2 + 2))
RUNS |= {of_columns: (1.5 + 1, 1 + 2), transport: (2 + 1, 1 + 2)}


@pytest.mark.parametrize("loss", RUNS)
def test_pairs_are_computed_twice_forward_and_once_back(loss):
    n, d = 64, 32
    found, _ = compare.operations(ga.value_and_grad(loss, 8), *views(n, d))
    of_views, of_pairs = RUNS[loss]
    assert found == of_views * 2 * 2 * n * d * d + of_pairs * 2 * n * n * d


@pytest.mark.parametrize("loss", [infonce, of_logs])
def test_a_micro_batch_may_have_one_row(loss, float64):
    assert error(loss, 8, *views(8, 4, jnp.float64)) < BOUND


# -- Precision, devices and transformations --------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("loss", [infonce, of_labels])
def test_in_low_precision_it_is_as_near_as_the_undivided_batch(loss, dtype):
    """A few numbers of each may be rounded another way: no more than twice as far."""
    p, b = views(dtype=dtype)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (p, b))
        due = jax.jit(jax.value_and_grad(loss))(*wide)
        ways = jax.value_and_grad(loss), ga.value_and_grad(loss, 8)
        undivided, ours = (
            off(jax.tree.map(lambda x: x.astype(jnp.float64), jax.jit(way)(p, b)), due)
            for way in ways
        )
    assert 0 < ours <= 2 * undivided
