"""What an index picks of rows, and what is kept once for two shapes of it."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga
from ga_optax._partition import indexing, linear
from ga_optax._window import levels as report

pytestmark = pytest.mark.usefixtures("optax_promotion")
N, WIDTH = 8, 3
RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(WIDTH, WIDTH)), RNG.normal(size=(N, WIDTH))
ORDER = np.array([5, 0, -1, 3, 11, 2])  # one counts from the end, one is outside
STRICT = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS


def unit(w, x):
    z = jnp.tanh(x @ w)
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


def diagonals(w, x):
    """SimCLR's positives, beside and below the diagonal."""
    z = jnp.concatenate([unit(w, x), unit(w, x**2)])
    n, scores = len(x), z @ z.T
    scores = jnp.where(jnp.eye(2 * n, dtype=bool), -9.0, scores)
    positives = jnp.concatenate([jnp.diag(scores, n), jnp.diag(scores, -n)])
    return jnp.mean(jax.nn.logsumexp(scores, 1) - positives)


def picked(w, x, rows=ORDER, **options):
    columns = np.arange(len(rows)) % N
    scores = (x @ w) @ x.T
    index = jnp.stack([jnp.asarray(rows), columns], axis=1)
    numbers = jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    found = jax.lax.gather(scores, index, numbers, (1, 1), **options)
    return jnp.sum(jnp.sin(found))


def filled(w, x):
    return picked(w, x, mode="fill", fill_value=0.5)


def clipped(w, x):
    return picked(w, x, mode="clip")


def rows_inside(w, x):
    return picked(w, x, rows=np.array([5, 0, 3, 3], np.int8), mode=STRICT)


def of_segments(w, x):
    """Some of the rows of two views, in another order."""
    z = jnp.concatenate([x @ w, jnp.sin(x @ w), x])
    return jnp.sum(z[np.array([9, 2, 17])] ** 2) + jnp.mean(z**2)


def of_columns(w, x):
    z = jnp.stack([x @ w, jnp.sin(x)])
    return jnp.sum(z[0, np.array([3, 6])] * z[1, np.array([6, 6])])


FUNCTIONS = (diagonals, filled, clipped, rows_inside, of_segments, of_columns)


def distance(fun, k):
    """The largest distance between both gradients and values."""
    with jax.enable_x64(True):
        args = jnp.asarray(W), jnp.asarray(X)
        step = ga.value_and_grad(fun, k, accumulator_dtype="float64")
        pairs = jax.jit(step)(*args), jax.value_and_grad(fun)(*args)
        found = jax.tree.map(lambda x, y: np.abs(x - y).max(), *pairs)
    return max(map(float, jax.tree.leaves(found)))


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.grid(2)
@pytest.mark.parametrize("fun", FUNCTIONS)
@pytest.mark.parametrize("k", [2, 8])
def test_an_index_into_rows_picks_those_of_the_whole_batch(fun, k):
    assert distance(fun, k) < 1e-12
    # The last of these picks nearly as much as there is.
    if fun is not of_segments or k == 2:
        found = ga.batch_dependencies(fun, k)(W, X)
        assert found.whole == []


def test_only_numbers_that_are_picked_meet():
    found = ga.batch_dependencies(diagonals, 4)(W, X)
    assert sorted(m.type.shape for m in found.meetings) == [(4, WIDTH), (2 * N,)]


def test_without_the_own_part_alone_the_sum_is_wrong(monkeypatch):
    whereabouts = jnp.where

    def everyone(mine, x, y):
        return x if x.dtype != jnp.int32 and x.ndim == 1 else whereabouts(mine, x, y)

    monkeypatch.setattr(indexing.jnp, "where", everyone)
    assert distance(rows_inside, 4) > 1e-3


# -- Kept once -------------------------------------------------------------------------


def as_written(w, x):
    z = unit(w, x)
    return jnp.mean(jax.nn.logsumexp(5 * z @ z.T, axis=1))


def two_views(w, x):
    z = jnp.concatenate([unit(w, x), unit(w, x**2)])
    return jnp.mean(jax.nn.logsumexp(5 * z @ z.T, axis=1))


@pytest.mark.parametrize("fun", [as_written, two_views])
def test_rows_that_all_need_are_kept_once(fun, monkeypatch):
    def kept():
        with report.recorded() as records:
            jax.eval_shape(ga.value_and_grad(fun, 4), W, X)
        [window] = records
        return [x.kind for x in window.stored]

    assert kept() == ["stack"]
    monkeypatch.setattr("ga_optax._partition.writer._SHAPES", ())
    assert fun is two_views or len(kept()) == 2  # that of the transpose, and the own


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compilation")
def test_plan_counts_what_a_window_keeps_between_its_levels():
    def statistics(w, x):
        for _ in range(4):
            x = jnp.tanh((x - x.mean(0)) @ w)
        return jnp.mean(x**2)

    w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    x = jax.ShapeDtypeStruct((1024, 32), jnp.float32)

    def step(k, limit):
        given = {"residual_bytes": limit}
        return jax.jit(ga.value_and_grad(statistics, k, **given))

    def planned(limit):
        make = functools.partial(step, limit=limit)
        options = {"batch_size": 1024, "candidates": (2, 8, 16, 32)}
        plan = ga.plan(make, w, x, memory_limit=memory, **options)
        return plan.num_microbatches

    memory = helpers.needed(step(16, 10**6).lower(w, x).compile())
    assert planned(10**6) == 16
    assert planned(0) == 8


# -- A sum that a product makes more of ------------------------------------------------

EXPERTS, ROOM, INNER = 4, 8, 8 * WIDTH


def experts(p, x):
    """Rows go to experts by an index, and come back."""
    gate = jax.nn.softmax(x @ p["gate"])
    of_row, weight = gate.argmax(1), gate.max(1)
    chosen = jax.nn.one_hot(of_row, EXPERTS, dtype=jnp.int32)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(1) - 1
    sent = jnp.zeros((EXPERTS, ROOM, WIDTH)).at[of_row, place].add(x, mode="drop")
    inner = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", sent, p["in"]))
    found = jnp.einsum("ecf,efd->ecd", inner, p["out"])[of_row, place]
    return jnp.mean((x + found * weight[:, None]) ** 2)


def sums_of_experts():
    """The shapes of what is summed up, and how far the gradients are off."""
    rng = np.random.default_rng(1)
    shapes = {
        "gate": (WIDTH, EXPERTS),
        "in": (EXPERTS, WIDTH, INNER),
        "out": (EXPERTS, INNER, WIDTH),
    }
    with jax.enable_x64(True):
        p = {name: jnp.asarray(rng.normal(size=s)) for name, s in shapes.items()}
        x = jnp.asarray(rng.normal(size=(N, WIDTH)))
        step = ga.value_and_grad(experts, 4, accumulator_dtype="float64")
        pairs = zip(
            *map(jax.tree.leaves, (step(p, x), jax.value_and_grad(experts)(p, x))),
            strict=True,
        )
        error = max(float(jnp.abs(a - b).max()) for a, b in pairs)
        found = ga.batch_dependencies(experts, 4)(p, x)
    return [m.type.shape for m in found.meetings if m.kind == "sum"], error


def test_of_experts_their_input_is_summed_up_and_not_their_hidden_layer():
    shapes, error = sums_of_experts()
    assert shapes == [(EXPERTS, ROOM, WIDTH)]
    assert error < 1e-12


def test_a_sum_that_waits_for_a_product_is_found(monkeypatch):
    monkeypatch.setattr(linear, "_grows", lambda e, vs: False)
    shapes, error = sums_of_experts()
    assert shapes == [(EXPERTS, ROOM, INNER)]
    assert error < 1e-12
