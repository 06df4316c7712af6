"""Residuals of a window that goes forward alone, as that of a gradient as a program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import array, temporaries

import ga_optax as ga
from ga_optax._passes import jaxprs
from ga_optax._window import kept

pytestmark = pytest.mark.usefixtures("optax_promotion")

K = 4


# -- Losses ----------------------------------------------------------------------------


def layers(number, width=8, rows=16):
    of_one = functools.partial(array, width, width, scale=width**-0.5)
    return [of_one(seed=i) for i in range(number)], array(rows, width)


def norms(ws, x):
    for w in ws:
        h = x @ w
        x = x + jnp.tanh((h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1))
    return jnp.mean(x**2)


def grams(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
        x = x @ (x.T @ x / len(x))
    return jnp.mean(x**2)


def pairs(ws, x):
    y = x[:, ::-1]
    for w in ws:
        x, y = jnp.tanh(x @ w), jnp.tanh(y @ w)
    scores = x @ y.T
    sides = jax.nn.logsumexp(scores, 0) + jax.nn.logsumexp(scores, 1)
    return jnp.mean(sides - 2 * jnp.diagonal(scores))


def crossed(ws, x, seed=0):
    """Each layer reads two of all before, so that lives cross in many ways."""
    rng, before = np.random.default_rng([seed, len(ws)]), [x]
    for w in ws:
        one, two = (before[i] for i in rng.integers(0, len(before), 2))
        h = jnp.tanh(one @ w) + two
        kind = rng.integers(0, 4)
        if kind == 0:
            h = h - h.mean(0)
        elif kind == 1:
            h = h @ (two.T @ h / len(x))
        elif kind == 2:
            h = h * jax.nn.softmax(h, 0)
        before.append(h)
    return sum(jnp.mean(h**2) for h in before)


LOSSES = [norms, grams, pairs, *(functools.partial(crossed, seed=i) for i in range(4))]


def of_aux(fun, **options):
    """`jax.value_and_grad(fun)`, divided as the aux of a loss of nothing."""

    def nothing(*args):
        return jnp.zeros([]), jax.value_and_grad(fun)(*args)

    divided = ga.value_and_grad(nothing, K, has_aux=True, **options)
    return jax.jit(lambda *args: divided(*args)[0][1])


def plans_of(fun, args, monkeypatch, **options):
    """The full plan, and that which is chosen."""
    found = []
    planned = kept.planned

    def noted(*given, **limits):
        found.append(planned(*given, **limits))
        return found[-1]

    monkeypatch.setattr(kept, "planned", noted)
    jax.make_jaxpr(of_aux(fun, **options))(*args)
    return found[-1].unlimited or found[-1], found[-1]


def work(schedule):
    """The scalar operations of what is not cheap, in all levels."""
    runs = [
        schedule.needed(schedule.roots(t), kept.Level(t))[0]
        for t in range(1, schedule.end + 1)
    ]
    rows = [e for some in runs for e in some if schedule.is_of_rows(e)]
    return sum(jaxprs.work(e) for e in rows if not jaxprs.is_cheap(e))


# -- Laws ------------------------------------------------------------------------------


@pytest.fixture(params=["float32", "bfloat16", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


@pytest.mark.grid(3, 12)
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("room", [None, 0, 1, 3])
@pytest.mark.parametrize("fun", LOSSES)
def test_a_divided_gradient_is_the_gradient_whatever_room_there_is(fun, room, dtype):
    ws, x = layers(4)
    ws, x = [w.astype(dtype) for w in ws], x.astype(dtype)
    limit = None if room is None else room * x.nbytes
    found = of_aux(fun, residual_bytes=limit)(ws, x)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (ws, x))
        due = jax.value_and_grad(fun)(*wide)
    # What the order of rows alone changes: sums are taken in another order here.
    plain = jax.jit(jax.value_and_grad(fun))
    orders = [np.random.default_rng(i).permutation(len(x)) for i in range(4)]
    reordered = [plain(ws, x[order]) for order in orders]
    for ours, exact, *theirs in zip(
        *map(jax.tree.leaves, (found, due, *reordered)), strict=True
    ):
        ours, exact, *theirs = (
            np.asarray(a, np.float64) for a in (ours, exact, *theirs)
        )
        more = max(np.abs(one - exact).max() for one in theirs)
        rounding = float(jnp.finfo(dtype).eps) * np.abs(exact).max()
        assert np.abs(ours - exact).max() <= 2 * more + 8 * rounding


@pytest.mark.parametrize("fun", LOSSES)
def test_residuals_fit_and_more_room_is_never_more_work(fun, monkeypatch):
    args = layers(6)
    sizes = [n * args[1].nbytes for n in (0, 1, 2, 4, 8, 10**6)]
    found = [plans_of(fun, args, monkeypatch, residual_bytes=n)[1] for n in sizes]
    for limit, schedule in zip(sizes, found, strict=True):
        assert schedule.peak <= limit
    works = list(map(work, found))
    assert works == sorted(works, reverse=True)
    assert works[-1] < works[0]  # the twin: some room buys something


@pytest.mark.parametrize("fun", LOSSES)
def test_by_default_work_is_at_most_a_third_more(fun, monkeypatch):
    monkeypatch.setattr("ga_optax._window.run.LITTLE", 0)
    full, chosen = plans_of(fun, layers(6), monkeypatch)
    assert work(chosen) <= kept.MOST * work(full)
    assert fun is pairs or chosen.peak < full.peak


def test_the_memory_of_norms_grows_with_the_root_of_their_number(monkeypatch):
    monkeypatch.setattr("ga_optax._window.run.LITTLE", 0)
    peaks = [[x.peak for x in plans_of(norms, layers(n), monkeypatch)] for n in (6, 24)]
    (few, less), (many, root) = peaks
    assert many > 3.5 * few
    assert root < 2.5 * less


def test_scores_of_pairs_are_computed_again_and_never_kept():
    args = layers(1, 8, 1024)
    every = 4 * len(args[1]) ** 2  # the bytes of all scores
    assert temporaries(of_aux(pairs), *args) < every
    assert temporaries(of_aux(pairs, residual_bytes=4 * every), *args) > every


def test_what_a_checkpoint_computes_again_is_not_merged_with_what_it_was():
    def loss(ws, x):
        for w in ws:
            x = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))(x, w)
        return jnp.mean(x**2)

    def barriers(fun, *args):
        return jax.jit(fun).lower(*args).as_text().count("optimization_barrier")

    args = layers(3)
    assert barriers(jax.value_and_grad(loss), *args) == 3
    assert barriers(of_aux(loss), *args) >= 3


def test_sums_are_added_up_at_their_own_level(monkeypatch):
    """A gradient of a late layer is not kept of each micro-batch until the end."""
    _, chosen = plans_of(norms, layers(4), monkeypatch, residual_bytes=10**9)
    sums = [b for b in chosen.buffers if b.kind == "sum" and b.operand.aval.ndim == 2]
    assert len({b.level for b in sums if b.operand.aval.shape == (8, 8)}) == 4
