"""Batch normalisation with an `axis_name` is that of the undivided batch."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ga_optax as ga
import ga_optax.flax

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

K, ROWS = 4, "rows"
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 3)) + np.arange(16)[:, None], jnp.float32)


class Linen(nn.Module):
    axis: str | None

    @nn.compact
    def __call__(self, x):
        for width in (5, 4):
            x = nn.Dense(width)(x)
            norm = nn.BatchNorm(False, axis_name=self.axis, use_fast_variance=False)
            x = jnp.tanh(norm(x))
        return x


class Nnx(nnx.Module):
    def __init__(self, axis):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, axis_name=axis, use_fast_variance=False, rngs=rngs)
        self.last = nnx.Linear(5, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.norm(self.first(x))))


def linen(axis):
    model = Linen(axis)
    variables = Linen(None).init(jax.random.key(0), X)

    def loss(params, x, stats):
        y, new = model.apply(
            {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return jnp.mean(y**3), new["batch_stats"]

    return loss, variables["params"], variables["batch_stats"]


def of_nnx(axis):
    graph, params, stats = nnx.split(Nnx(axis), nnx.Param, nnx.BatchStat)

    def loss(params, x, stats):
        model = nnx.merge(graph, params, stats, copy=True)
        value = jnp.mean(model(x) ** 3)
        return value, nnx.state(model, nnx.BatchStat)

    return loss, params, stats


def differ(a, b):
    """The largest difference, relative to the largest number of a leaf."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.max(abs(x - y)) / (jnp.max(abs(y)) + 1e-3)) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("make", [linen, of_nnx])
@pytest.mark.parametrize("how", ["carry_argnums", "aux"])
def test_batch_statistics_are_those_of_the_undivided_batch(make, how):
    """In float64, as the gradient of a bias before a normalisation is rounding alone.

    That is a few hundred errors of 1e-16 at most, divided by the 1e-3 of `differ`.
    """
    options = {"carry_argnums": 2} if how == "carry_argnums" else {"has_aux": True}
    loss, *args = make(None)
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: jnp.asarray(x, float), (args[0], X, args[1]))
        due = jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)
        step = ga.value_and_grad(
            make(ROWS)[0], K, axis_name=ROWS, accumulator_dtype=None, **options
        )
        assert differ(jax.jit(step)(*args), due) < 1e-11
        # The twin: statistics of each micro-batch.
        apart = jax.jit(ga.value_and_grad(loss, K, **options))(*args)
        assert differ(apart, due) > 0.1


def test_modules_draw_other_masks_in_every_micro_batch():
    """With an axis a carry does not thread, and streams are in the carry."""
    x = jnp.ones((K, 64))

    def loss(model, x):
        mean = jax.lax.pmean(jnp.mean(x), ROWS)
        masks = model["drop"](x) > 0
        return jnp.mean(model["layer"](x) * mean), masks

    def masks():
        rngs = nnx.Rngs(0)
        model = nnx.Dict(
            drop=nnx.Dropout(0.5, rngs=rngs), layer=nnx.Linear(64, 1, rngs=rngs)
        )
        step = ga_optax.flax.value_and_grad(loss, K, has_aux=True, axis_name=ROWS)
        return nnx.jit(step)(model, x)[0][1]

    found = np.asarray(masks())
    assert len({row.tobytes() for row in found}) == K
    np.testing.assert_array_equal(found, masks())
