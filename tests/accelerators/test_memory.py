"""The memory of a window on GPUs and TPUs, and which bytes a device has to have."""

import jax
import jax.numpy as jnp
import pytest
import targets
from corpus.scans import BATCH, K, decoder, nothing
from helpers import mean_of

import ga_optax as ga
from ga_optax._compiled import plan
from ga_optax._window import flat

pytestmark = pytest.mark.usefixtures("optax_promotion")

WIDTH, ROWS = 2048, 4096


def loss(params, x):
    @jax.checkpoint
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    h, _ = jax.lax.scan(layer, x, params)
    return jnp.mean(h**2)


def shapes(layers):
    up, down = (layers, WIDTH, 4 * WIDTH), (layers, 4 * WIDTH, WIDTH)
    return targets.shapes({"up": up, "down": down})


def step_of(layers):
    """A step of the undivided batch, compiled."""
    args = shapes(layers), targets.shapes((ROWS, WIDTH))
    return targets.of_adam("v5e", jax.value_and_grad(loss), *args)


def test_libtpu_checks_what_plan_counts_and_not_the_sum_of_the_parts():
    """It compiles what fits by the total, though it would not by the parts."""
    limit = plan.find_machine("v5e").memory_limit
    memory = step_of(26).memory_analysis()
    rest = memory.argument_size_in_bytes
    rest += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert rest + memory.temp_size_in_bytes > limit
    total = rest + plan.temporaries(memory)
    assert 0.95 * limit < total <= limit
    # The twin: one layer more is too much by the total, too.
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step_of(27)
    layer = (rest - 4 * ROWS * WIDTH) / 26
    assert total + layer + (total - rest) / 26 > limit


@pytest.mark.parametrize("target", ["h200", "v6e"])
def test_a_weighted_mean_takes_no_gradient_of_its_own_before_adam(target):
    def needs(gradient, **options):
        args = shapes(4), targets.shapes((8 * ROWS, WIDTH))
        step = gradient(loss, 8, **options)
        return targets.temporaries(targets.of_adam(target, step, *args))

    def weights(x):
        return jnp.sum(x[:, 0] > 0)

    layer, plain = 4 * 2 * 4 * WIDTH**2, needs(ga.value_and_grad)
    assert needs(mean_of, weight_fn=weights) < plain + layer
    # The twin: a sum by hand takes the gradient of all four once more.
    assert needs(mean_of, weight_fn=weights, optimize=False) > plain + 2 * layer


def test_it_takes_the_temporaries_of_plain_micro_batches_and_one_layers_rows(
    monkeypatch,
):
    loss, args = decoder(6, nothing, width=256, length=128)

    def temporaries(gradient, *k):
        return targets.temporaries(targets.compiled("h200", gradient(loss, *k), *args))

    plain = temporaries(mean_of, K)
    # What the last layer hands to the head is kept of all rows.
    bound = 1.05 * plain + 4 * BATCH * 128 * 256
    assert temporaries(ga.value_and_grad, K) < bound
    assert temporaries(jax.value_and_grad) > 3 * plain
    # The twin: iterations stand one after the other.
    find = flat.SplitScan._find_parts

    def in_the_open(self, graph):
        find(self, graph)
        self.unrolled.update(self.part.values())

    monkeypatch.setattr(flat.SplitScan, "_find_parts", in_the_open)
    assert temporaries(ga.value_and_grad, K) > bound
