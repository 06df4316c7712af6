"""Products of groups of rows, and experts that get all rows sent to them (dropless)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error, temporaries
from jax import lax

import ga_optax as ga
from ga_optax._partition import indexing

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "float64"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, D, H, E, K = 16, 6, 5, 4, 4
BOUND = 1e-12  # in float64: sums of at most some hundred terms
SIZES = [(5, 0, 7, 4), (1, 2, 3, 2), (16, 0, 0, 0), (0, 0, 0, 0)]


def arguments(n=N, width=D, hidden=H):
    rng = np.random.default_rng(0)
    shapes = (width, E), (E, width, hidden), (E, hidden, width)
    params = [jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5) for s in shapes]
    return params, jnp.asarray(rng.normal(size=(n, width)))


def ragged(left, right, sizes, dots, ragged=0, group=(0,)):
    numbers = lax.RaggedDotDimensionNumbers(dots, [ragged], list(group))
    return lax.ragged_dot_general(left, right, sizes, numbers)


def layers(p, x, sizes):
    return lax.ragged_dot(jnp.tanh(lax.ragged_dot(x, p[1], sizes)), p[2], sizes)


def of_each(p, x, sizes):
    """Groups of each row, and perhaps sizes, as by `jax.vmap`."""
    h = x.reshape(N, 3, 2)
    each = jnp.stack([h.swapaxes(1, 2)] * E) * p[1][:, None, :2, :3]
    return ragged(h, each, jnp.minimum(sizes, 1), (([2], [2]), ([0], [1])), 1)


CASES = {
    "layers": layers,
    # Of each group, a product that sums over its rows; JAX has no derivative of it.
    "of groups": lambda p, x, sizes: (
        ragged(jnp.tanh(x), jnp.sin(x[:, :3]), sizes, (([0], [0]), ([], [])), 0, ())
        + p[0][0, 0]
    ),
    # Groups along one axis, rows along another: of a factor, and of the other one.
    "of others": lambda p, x, sizes: ragged(
        x * jnp.arange(1.0, N + 1)[:, None, None], p[1], sizes, (([2], [1]), ([], []))
    ),
    "of each": of_each,
    "of sizes": lambda p, x, sizes: of_each(
        p, x, jnp.minimum(sizes, 1 + (x[:, :1] > 0).astype(sizes.dtype))
    ),
    # What is summed over is rows, and no groups; or only the second factor has rows.
    "summed": lambda p, x, sizes: lax.ragged_dot(
        x.T, jnp.stack([x[:, :3]] * E) * p[1][:, :1, :1], jnp.minimum(sizes, 2)
    ),
    "summed by the other": lambda p, x, sizes: lax.ragged_dot(
        p[0][:3, :1] * jnp.ones(N), jnp.stack([x[:, :3]] * E), jnp.minimum(sizes, 1)
    ),
}
# For GPUs XLA compiles no gradient of one, not even of all rows.
NAMES = [
    pytest.param(name, marks=[pytest.mark.cpu] * (name == "of each")) for name in CASES
]
WIDE = {"accumulator_dtype": "float64"}


@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.grid(7, 28)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_products_of_groups_are_those_of_the_whole_batch(name, sizes):
    def loss(p, x):
        found = CASES[name](p, x, jnp.asarray(sizes, jnp.int32))
        return (jnp.sin(found) * jnp.arange(found.size).reshape(found.shape)).sum()

    assert error(loss, K, *arguments(), **WIDE) < BOUND
    found = ga.batch_dependencies(loss, K)(*arguments())
    assert "ragged_dot_general" not in {note.name for note in found.whole}


def dropless(p, x):
    """Rows sorted by their experts, multiplied by groups, and put back."""
    gates = jax.nn.softmax(x @ p[0])
    expert = gates.argmax(1)
    order = jnp.argsort(expert)
    h = layers(p, x[order], jnp.bincount(expert, length=E))
    return (h[jnp.argsort(order)] ** 2 * gates.max(1, keepdims=True)).mean()


@pytest.mark.cpu
def test_dropless_experts_take_the_memory_of_a_micro_batch(monkeypatch):
    params, x = jax.tree.map(jnp.float32, arguments(1024, 32, 128))
    plain = jax.jit(jax.value_and_grad(dropless))
    undivided, one = (temporaries(plain, params, rows) for rows in (x, x[:128]))

    def needs():
        return temporaries(jax.jit(ga.value_and_grad(dropless, 8)), params, x)

    rows = 4 * x.nbytes  # sorted and back, and their cotangents
    assert needs() < one + rows < undivided / 2
    monkeypatch.setattr(indexing, "reorders", lambda *args: False)
    assert needs() > 0.8 * undivided
