"""The law for models as people write them, in float64, and its twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpus import architectures
from helpers import error, off

pytestmark = pytest.mark.usefixtures("optax_promotion", "float64")
ALL = sorted(architectures.MODELS)


def of(name):
    loss, *args = architectures.MODELS[name]()
    return loss, *jax.tree.map(jnp.asarray, args)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_model_has_the_gradient_of_the_undivided_batch(name):
    loss, params, batch = of(name)
    numbers = sum(x.size for x in jax.tree.leaves(params)) * architectures.T
    assert error(loss, 4, params, batch) < 100 * numbers * np.finfo(float).eps


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_twin_micro_batches_alone_have_another_loss_where_rows_meet(name):
    loss, params, batch = of(name)
    first = jax.tree.map(lambda x: x[:4], batch)
    last = jax.tree.map(lambda x: x[4:], batch)
    loss = jax.jit(loss)
    alone = (loss(params, first) + loss(params, last)) / 2
    far = off([alone], [loss(params, batch)])
    assert (far > 1e-6) == (name in architectures.OTHER)
