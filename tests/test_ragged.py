"""Products of groups of rows, and experts that get all rows sent to them (dropless)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error, mesh_of, off, temporaries
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


def of_groups(p, x, sizes):
    """Of each group, a product that sums over its rows; JAX has no derivative of it."""
    dots = (([0], [0]), ([], []))
    found = ragged(jnp.tanh(x), jnp.sin(x[:, :3]), sizes, dots, 0, ())
    return found + p[0][0, 0]


def of_others(p, x, sizes):
    """Groups along one axis, rows along another: of a factor, and of the other one."""
    h = x * jnp.arange(1.0, N + 1)[:, None, None]
    return ragged(h, p[1], sizes, (([2], [1]), ([], [])))


def of_each(p, x, sizes):
    """Groups of each row."""
    h = x.reshape(N, 3, 2)
    each = jnp.stack([h.swapaxes(1, 2)] * E) * p[1][:, None, :2, :3]
    return ragged(h, each, jnp.minimum(sizes, 1), (([2], [2]), ([0], [1])), 1)


def of_sizes(p, x, sizes):
    """Sizes of each row, as by `jax.vmap`."""
    each = jnp.minimum(sizes, 1 + (x[:, :1] > 0).astype(sizes.dtype))
    h = x.reshape(N, 3, 2)
    right = jnp.stack([h.swapaxes(1, 2)] * E) * p[1][:, None, :2, :3]
    return ragged(h, right, each, (([2], [2]), ([0], [1])), 1)


def summed(p, x, sizes):
    """What is summed over is rows, and no groups."""
    right = jnp.stack([x[:, :3]] * E) * p[1][:, :1, :1]
    return lax.ragged_dot(x.T, right, jnp.minimum(sizes, 2))


def summed_by_other(p, x, sizes):
    """Only the second factor has rows."""
    right = jnp.stack([x[:, :3]] * E)
    return lax.ragged_dot(p[0][:3, :1] * jnp.ones(N), right, jnp.minimum(sizes, 1))


# For GPUs XLA compiles no gradient of `of_each`, not even of all rows.
ON_CPUS = pytest.param(of_each, marks=pytest.mark.cpu)
CASES = [layers, of_groups, of_others, ON_CPUS, of_sizes, summed, summed_by_other]


WIDE = {"accumulator_dtype": "float64"}


@pytest.mark.grid(7, 28)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_products_of_groups_are_those_of_the_whole_batch(case, sizes):
    def loss(p, x):
        found = case(p, x, jnp.asarray(sizes, jnp.int32))
        return (jnp.sin(found) * jnp.arange(found.size).reshape(found.shape)).sum()

    assert error(loss, K, *arguments(), **WIDE) < BOUND
    found = ga.batch_dependencies(loss, K)(*arguments())
    assert "ragged_dot_general" not in {note.name for note in found.whole}


# -- Dropless experts ------------------------------------------------------------------


def dropless(p, x):
    """Rows sorted by their experts, multiplied by groups, and put back."""
    gates = jax.nn.softmax(x @ p[0])
    expert = gates.argmax(1)
    order = jnp.argsort(expert)
    h = layers(p, x[order], jnp.bincount(expert, length=E))
    return (h[jnp.argsort(order)] ** 2 * gates.max(1, keepdims=True)).mean()


def shuffled(p, x):
    """Rows meet others as large as they are: of a mixture."""
    order = jnp.argsort(x[:, 0])
    return (jnp.tanh(jnp.tanh((x + x[order]) @ p[1][0]) @ p[2][0]) ** 2).mean()


@pytest.mark.parametrize("fun", [dropless, shuffled])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_rows_in_another_order_have_the_gradients_of_the_whole_batch(fun, k):
    params, x = arguments()
    want = jax.jit(jax.value_and_grad(fun))(params, x)
    step = jax.jit(ga.value_and_grad(fun, k, **WIDE))
    assert off(step(params, x), want) < BOUND
    assert off(step(params, x.at[0].multiply(1.1)), want) > 1e-6  # the twin


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


def test_dropless_experts_on_four_devices():
    axis = ga.DataAxis("data", mesh=mesh_of())
    assert error(dropless, 2, *arguments(), data_axis=axis, **WIDE) < BOUND
