"""Products of groups of rows, wherever the rows of a batch are."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error
from jax import lax

import ga_optax as ga

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "float64"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, D, H, E, K = 16, 6, 5, 4, 4
BOUND = 1e-12  # in float64: sums of at most some hundred terms
SIZES = [(5, 0, 7, 4), (1, 2, 3, 2), (16, 0, 0, 0), (0, 0, 0, 0)]


def arguments():
    rng = np.random.default_rng(0)
    shapes = (D, E), (E, D, H), (E, H, D)
    params = [jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5) for s in shapes]
    return params, jnp.asarray(rng.normal(size=(N, D)))


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
