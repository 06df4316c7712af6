"""A micro-step at its limit: what it reads and writes on GPUs and TPUs, to the byte."""

import jax
import jax.numpy as jnp
import optax
import pytest
import targets
from helpers import of_benchmarks

import ga_optax as ga

[hlo] = of_benchmarks("hlo")

pytestmark = pytest.mark.usefixtures("optax_promotion")

# A leaf is larger than the fast memory of a TPU's core, where a sum could stay.
LEAVES = 2
PARAMS = {
    f"layer_{i}": jax.ShapeDtypeStruct((8192, 8192), jnp.float32) for i in range(LEAVES)
}
BYTES = LEAVES * 4 * 8192**2
# The sum is read and written, and the gradient read. Where the window closes, so are
# parameters and Adam's two moments, and the sum once more.
INSIDE, CLOSES = 3, 10


def compiled(target, tx, update):
    args = PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS
    return targets.compiled(target, update, *args, donate_argnums=(0, 1))


def passes(program, pick):
    """How often it passes over the parameters, and its kernels and branches."""
    traffic = hlo.traffic(program.as_text(), pick)
    assert traffic.copied <= 1e-6 * BYTES  # scalars
    return round(traffic.num_bytes / BYTES, 4), traffic.kernels, traffic.branches


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("emit", [None, False, True])
def test_a_micro_step_reads_and_writes_what_it_must(emit, target):
    tx = ga.MultiSteps(optax.adam(1e-3), 8)

    def step(params, state, grads):
        return ga.apply_gradients(tx, grads, state, params, emit=emit)

    program = compiled(target, tx, step)
    # With a static `emit` nothing asks the device what runs next.
    asks = 1 if emit is None else 0
    if emit is not True:
        times, kernels, branches = passes(program, min)
        assert (times, branches) == (INSIDE, asks)
        assert kernels <= LEAVES
    if emit is not False:
        times, kernels, branches = passes(program, max)
        assert (times, branches) == (CLOSES, asks)
        assert kernels <= 2 * LEAVES
    assert targets.temporaries(program) <= 1e-3 * BYTES


@pytest.mark.parametrize(("target", "due"), [("h200", 9), ("v5e", 11)])
def test_an_optimizer_in_every_micro_step_would_be_seen(target, due):
    """The twin: `optax.MultiSteps`, whose updates are computed and thrown away."""
    tx = optax.MultiSteps(optax.adam(1e-3), 8)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = compiled(target, tx, step)
    assert passes(program, min)[0] == passes(program, max)[0] == due
