"""`ga_optax.flax.verify` and `.plan`: losses and steps of modules."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import ga_optax as ga
import ga_optax.flax
from ga_optax import Cause

pytestmark = pytest.mark.usefixtures("fast_compilation")

X = jax.random.normal(jax.random.key(0), (8, 3))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.first(x)))


def loss(model, x):
    return jnp.mean(model(x)[:, 0] ** 2)


def test_batch_normalisation_of_a_module_is_a_cross_example_term():
    model = Model(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))
    report = ga_optax.flax.verify(loss, model, X, 4)
    assert report.cause is Cause.CROSS_EXAMPLE, report
    # The bias before the normalisation has no gradient.
    most = max(report.leaves, key=lambda name: report.leaves[name].relative)
    assert most != "leaf ['first']['bias']" in report.leaves
    # Of running statistics, too.
    assert [*map(id, before)] == [*map(id, jax.tree.leaves(nnx.state(model)))]
    model.eval()
    assert ga_optax.flax.verify(loss, model, X, 4).ok


@pytest.mark.slow
def test_a_module_where_parameters_belong_is_told_of_both_ways_that_work():
    model = Model(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"nnx.merge\(.*, copy=True\)"):
        ga.verify(loss, model, X, 4)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def merged(params, x):
        return loss(nnx.merge(graph, params, rest, copy=True), x)

    assert ga.verify(merged, params, X, 4).cause is Cause.CROSS_EXAMPLE


@pytest.mark.slow
def test_all_options_of_verify_reach_a_loss_of_a_module():
    def noisy(model, batch, key):
        model.dropout.rngs = nnx.Rngs(key)
        h = model.dropout(model.first(batch["x"])) * batch["mask"][:, None]
        return jnp.sum(h**2) / jnp.sum(batch["mask"]), batch

    def masked(model, batch):
        return noisy(model, batch, jax.random.key(0))

    batch = {"x": X, "mask": jnp.asarray([1.0, 1, 1, 1, 1, 0, 0, 1])}
    model = Model(nnx.Rngs(0))
    by_mask = {"has_aux": True, "weight_fn": lambda batch, aux: aux["mask"].sum()}
    verify = ga_optax.flax.verify
    report = verify(noisy, model, batch, 2, rng=jax.random.key(1), **by_mask)
    assert report.cause is Cause.RANDOMNESS, report
    model.eval()
    assert verify(masked, model, batch, 2, **by_mask).ok
    only = verify(masked, model, batch, 2, wrt=nnx.PathContains("bias"), **by_mask)
    assert [*only.leaves] == ["leaf ['first']['bias']", "leaf ['norm']['bias']"]
    report = verify(masked, model, batch, 2, has_aux=True)
    assert report.cause is Cause.WEIGHTS, report
    with pytest.raises(ValueError, match="wrt"):
        verify(masked, model, batch, 2, wrt=nnx.LoRAParam, **by_mask)
