"""What follows from sums over rows: quotients, and results that need no rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import ga_optax as ga
from ga_optax._partition import writer
from ga_optax._passes.ir import inner_programs

pytestmark = pytest.mark.usefixtures("optax_promotion")
K, ROWS, IN, OUT = 4, 32, 6, 5


def arguments(seed=0):
    rng = np.random.default_rng(seed)
    batch = {"x": rng.normal(size=(ROWS, IN)), "m": rng.random(ROWS) > 0.4}
    return jnp.asarray(rng.normal(size=(IN, OUT))), jax.tree.map(jnp.asarray, batch)


def masked(h, b):
    return jnp.where(b["m"], (h**2).sum(1), 0).sum() / b["m"].sum()


def metrics_of(h, loss):
    means = h.mean(0)
    centred = h.T @ h / len(h) - jnp.outer(means, means)
    return {
        "perplexity": jnp.exp(loss),
        "root": jnp.sqrt((h**4).mean()),
        "share": (h > 0).sum() / (jnp.abs(h) > 0.1).sum(),
        "largest": h.max() - h.min(),
        "count": (h > 0).sum(),
        "spectrum": jnp.linalg.eigvalsh(centred),
    }


def with_metrics(p, b):
    h = jnp.tanh(b["x"] @ p)
    loss = masked(h, b)
    return loss, metrics_of(h, loss)


def with_metrics_in_the_loss(p, b):
    loss, metrics = with_metrics(p, b)
    return loss + metrics["root"], metrics


def passes(fun, has_aux):
    found = ga.batch_dependencies(fun, K, has_aux=has_aux)(*arguments())
    return found.forward_passes, found.backward_passes


def times(jaxpr, name):
    """How often a primitive runs."""
    found = 0
    for e in jaxpr.eqns:
        inside = sum(times(inner, name) for inner in inner_programs(e))
        length = e.params["length"] if e.primitive.name == "scan" else 1
        found += (e.primitive.name == name) + length * inside
    return found


@pytest.mark.parametrize("fun", [with_metrics, with_metrics_in_the_loss])
@pytest.mark.parametrize("devices", [1, 2])
def test_metrics_of_sums_are_those_of_the_whole_batch(fun, devices):
    over = {}
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
        over = {"data_axis": ga.DataAxis("data", mesh=mesh)}
    with jax.enable_x64(True):
        k, args = K // devices, arguments()
        step = ga.value_and_grad(fun, k, has_aux=True, **over)
        got = jax.jit(step)(*args)
        due = jax.value_and_grad(fun, has_aux=True)(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-10, 1e-12), got, due)


def test_metrics_take_no_pass_of_their_own():
    assert passes(with_metrics, has_aux=True) == (1, 1)
    assert passes(with_metrics_in_the_loss, has_aux=True) == (2, 1)  # the twin


def test_what_needs_no_rows_is_computed_once_after_the_loop():
    def program(fun):
        step = ga.value_and_grad(fun, K, has_aux=True)
        return jax.make_jaxpr(step)(*arguments()).jaxpr

    def each(p, b):  # the twin: it needs rows
        loss, _ = with_metrics(p, b)
        squares = jax.vmap(lambda row: jnp.linalg.eigvalsh(jnp.outer(row, row)))
        return loss, squares(b["x"] @ p)

    assert times(program(with_metrics), "eigh") == 1
    assert times(program(each), "eigh") == K


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


def of_numbers(rng):
    """A form of a sum of rows and of a number that rows add up to."""
    form, c = rng.choice(list(FORMS)), float(rng.choice(NUMBERS))
    x, p = rng.normal(size=(8, 3)), rng.normal(size=3)
    parts = np.zeros(8)
    parts[rng.integers(8)] = c

    def fun(p, b):
        sums = (b["x"] @ p).sum(), b["c"].sum()
        return FORMS[form](*sums), FORMS[form](*map(jax.lax.stop_gradient, sums))

    return fun, (p, {"x": x, "c": parts})


def differs(fun, args):
    """Where the value and the aux are another number, or none."""
    with jax.enable_x64(True):
        step = ga.value_and_grad(fun, K, has_aux=True)
        got, _ = jax.jit(step)(*args)
        due = jax.jit(fun)(*args)
    pairs = zip(got, due, strict=True)
    return [not np.isclose(x, y, 1e-9, 1e-12, equal_nan=True) for x, y in pairs]


@pytest.mark.parametrize("seed", range(24))
def test_a_sum_times_what_is_no_number_is_that_of_the_whole_batch(seed):
    fun, args = of_numbers(np.random.default_rng(seed))
    assert differs(fun, args) == [False, False]


def test_the_parts_of_an_infinite_quotient_would_add_up_to_nan(monkeypatch):
    """The twin: sums that wait are taken as they are."""

    def fun(p, b):
        total = (b["x"] @ p).sum()
        return total / b["c"].sum(), total

    rng = np.random.default_rng(0)
    args = rng.normal(size=3), {"x": rng.normal(size=(8, 3)), "c": np.zeros(8)}
    assert differs(fun, args) == [False, False]
    monkeypatch.setattr(writer, "_is_scaled", lambda *args: False)
    assert differs(fun, args) == [True, False]
