"""What micro-batches save by the estimate, and by what XLA needs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_whole_batch_created as created
import whole_losses
import whole_models
from helpers import temporaries

import ga_optax as ga
from ga_optax._calls import savings
from ga_optax._partition import WHOLE, Argument, Axis, Rows, partition

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
    pytest.mark.filterwarnings("ignore:.* micro-batches need about"),
]
K, WIDTH, ROWS = 8, 64, 1024


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Sizes at which activations are what takes memory."""
    for module in (whole_losses, whole_models):
        monkeypatch.setattr(module, "E", WIDTH)
        monkeypatch.setattr(module, "D", WIDTH)


def estimated(fun, args, has_aux=False):
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *xs: jax.tree.leaves(fun(*tree.unflatten(xs))))(
        *leaves
    )
    jaxpr, n = closed.jaxpr, len(jax.tree.leaves(args[0]))
    given = [
        *(Argument(x.aval, WHOLE) for x in jaxpr.constvars),
        *(Argument(x.aval, WHOLE, True) for x in jaxpr.invars[:n]),
        *(Argument(x.aval, Rows(0)) for x in jaxpr.invars[n:]),
    ]
    part = partition(jaxpr, given, Axis("rows", K, 32))
    found = ga.batch_dependencies(fun, K, has_aux=has_aux)(*args)
    return savings.estimate(closed, part, n, found.peak_bytes or found.kept_bytes)


def needed(fun, args, has_aux=False):
    """What a window needs of what the undivided batch does."""
    steps = (
        ga.value_and_grad(fun, K, has_aux=has_aux),
        jax.value_and_grad(fun, has_aux=has_aux),
    )
    ours, undivided = (temporaries(jax.jit(step), *args) for step in steps)
    return ours / undivided


def of_rows(module, name, n=ROWS):
    return module.arguments(n, np.float32)


# -- Losses that save little -----------------------------------------------------------

P = {"in": jnp.ones((32, 256)) / 9, "mid": jnp.ones((256, 256)) / 256}
X = jax.random.normal(jax.random.key(0), (ROWS // 2, 32))


def sorted_rows(p, x):
    return (jnp.tanh(jnp.sort(jnp.tanh(x @ p["in"]), 0) @ p["mid"]) ** 2).mean()


def permuted(p, x):
    h = jnp.tanh(x @ p["in"])[jax.random.permutation(jax.random.key(0), len(x))]
    return (jnp.tanh(h @ p["mid"]) ** 2).mean()


def mixed_by_frequency(p, x):
    h = jnp.fft.fft(x @ p["in"], axis=0).real
    return (jnp.tanh(h @ p["mid"]) ** 2).mean()


def with_factors(p, x):
    h = x @ p["in"]
    kernel = h @ h.T / 1000 + jnp.eye(len(h))
    return jnp.log(jnp.diagonal(jnp.linalg.cholesky(kernel))).sum()


def until_all_are_done(p, x):
    h = x @ p["in"]

    def body(c):
        return jnp.tanh(c[0] @ p["mid"] + h), c[1] + 1

    start = jnp.zeros_like(h), 0
    end, _ = jax.lax.while_loop(lambda c: (c[1] < 9) & (c[0].max() < 9), body, start)
    return (jnp.tanh(jax.lax.stop_gradient(end) @ p["mid"] + h) ** 2).mean()


LITTLE = [sorted_rows, permuted, mixed_by_frequency, with_factors, until_all_are_done]


@pytest.mark.grid(2)
@pytest.mark.parametrize("fun", LITTLE)
def test_what_saves_little_is_known_with_its_line(fun):
    found = estimated(fun, (P, X))
    assert needed(fun, (P, X)) > 0.6
    assert found.is_little(K)
    assert all("test_savings.py" in x.line for x in found.lines)
    text = savings.said(found, K)
    assert "computed whole" in text
    assert "Write that with other functions" in text


# -- Losses of the corpora -------------------------------------------------------------

OF = {"losses": whole_losses.LOSSES, "models": whole_models.MODELS}
MODULES = {"losses": whole_losses, "models": whole_models}
FEW_ROWS = ("experts", "sinkhorn", "hard_triplet")  # all pairs, or all places


def corpora():
    return [(kind, name) for kind, every in OF.items() for name in every]


def rows_of(name):
    return 256 if name in FEW_ROWS else ROWS


@pytest.mark.grid(3, 10)
@pytest.mark.parametrize(("kind", "name"), corpora())
def test_no_loss_is_told_of_that_saves_much_and_all_are_that_save_little(kind, name):
    fun, has_aux = OF[kind][name], kind == "models"
    args = MODULES[kind].arguments(rows_of(name), np.float32)
    if kind == "losses" and name in ("layers", "checkpointed"):
        pytest.skip("their layers are as wide as they were written")
    found, need = estimated(fun, args, has_aux), needed(fun, args, has_aux)
    if need > 0.6:
        assert found.ratio > savings.ENOUGH
    if need < 0.45:
        assert found.ratio <= savings.ENOUGH


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "fun", [f for f in created.SAVED if f is not created.normalised]
)
def test_noise_for_a_generator_is_no_reason(fun, monkeypatch):
    args = jax.tree.map(jnp.float32, created.arguments(ROWS, WIDTH))
    assert estimated(fun, args).ratio <= savings.ENOUGH
    if fun is created.generator:  # the twin: noise that is drawn whole
        created.without(monkeypatch)
        found = estimated(fun, args)
        assert found.ratio > savings.ENOUGH
        assert any("dot_general of all rows" in x.name for x in found.lines)


# -- What is said ----------------------------------------------------------------------


def test_toys_are_not_told_of():
    found = estimated(sorted_rows, (P, X[:16]))
    assert found.ratio > savings.ENOUGH
    assert not found.is_little(K)
    assert found._replace(undivided=2**20).ratio > 0  # the twin: it is by its size
    assert found._replace(undivided=2**20, window=2**20).is_little(K)


def test_what_is_kept_between_levels_is_named_if_nothing_is_whole():
    found = savings.Savings(2**21, 2**21, ())
    stored = [types.SimpleNamespace(nbytes=n, line=f"a.py:{n}") for n in (3, 9)]
    text = savings.said(found, K, stored)
    assert "at a.py:9; a.py:3." in text
    assert "residual_bytes=0" in text
    assert "8 micro-batches need about 2.0 MiB" in text
    assert "100% of what the undivided batch needs" in text


@pytest.mark.quick
def test_sizes_that_are_left_open_have_no_estimate():
    [n] = jax.export.symbolic_shape("n")
    args = P, jax.ShapeDtypeStruct((n, 32), jnp.float32)

    def traced(*args):
        return jax.make_jaxpr(lambda a, b, x: sorted_rows({"in": a, "mid": b}, x))(
            *args
        )

    of_open = traced(*args[0].values(), args[1])
    of_known = traced(*P.values(), X)
    given = [Argument(x.aval, WHOLE) for x in of_known.jaxpr.invars]
    part = partition(of_known.jaxpr, given, Axis("rows", 1, 32))
    assert savings.estimate(of_open, part, 2) is None
    assert savings.estimate(of_known, part, 2) is not None  # the twin
