"""NNX transforms inside of `fun`: all is as without them, and as NNX has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mesh_of
from test_flax import K, in_float64, one_after_another

import ga_optax.flax

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

ROWS, WIDTH = 16, 3
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros([], jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.norm(jnp.tanh(self.linear(x)))


@nnx.split_rngs(splits=2)
@nnx.vmap
def of_two(rngs):
    return Block(rngs)


def apply(block, x):
    return block(x)


def over_layers(apply):
    return nnx.scan(apply, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)


def looped(block, x):
    def body(_, carry):
        block, x = carry
        return block, nnx.remat(apply)(block, x)

    return nnx.fori_loop(0, 2, body, (block, x))[1]


def chosen(block, x):
    remat = nnx.remat(apply)
    return nnx.cond(block.calls[...] >= 0, remat, remat, block.linear, x)


single, stacked = Block, of_two
TRANSFORMS = {
    "remat": (single, nnx.remat(apply), apply),
    "jit": (single, nnx.jit(apply), apply),
    "scan_of_remat": (stacked, over_layers(nnx.remat(apply)), over_layers(apply)),
    "remat_of_scan": (stacked, nnx.remat(over_layers(apply)), over_layers(apply)),
    "loop_of_remat": (single, looped, lambda b, x: b(b(x))),
    "cond_of_remat": (single, chosen, lambda block, x: block.linear(x)),
}


def of_rows(loss, **options):
    return ga_optax.flax.value_and_grad(loss, K, accumulator_dtype=None, **options)


def run(make, call, of, **options):
    """Value, gradients and the variables after a call, as numbers."""
    model = in_float64(make(nnx.Rngs(0)))

    def loss(model, x):
        return jnp.mean(call(model, x) ** 3)

    with jax.set_mesh(mesh_of(2)):
        out = nnx.jit(of(loss, **options))(model, jnp.asarray(X))
    return jax.device_get(nnx.as_pure((out, nnx.state(model))))


def assert_close(ours, due):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12, 1e-12), ours, due)
    assert any(np.any(x != 0) for x in jax.tree.leaves(due[0][1]))


@pytest.mark.cpu
@pytest.mark.grid(1, 4)
@pytest.mark.parametrize("options", [{}, {"data_axis": "data"}], ids=["", "data_axis"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_inside_is_as_in_nnx(name, options):
    make, transformed, plain = TRANSFORMS[name]
    with jax.enable_x64(True):
        ours = run(make, transformed, of_rows, **options)
        due = run(make, transformed, nnx.value_and_grad)
        assert_close(ours, due)
        # And of each micro-batch by itself, as without the transform.
        apart = run(make, transformed, one_after_another, **options)
        assert_close(apart, run(make, plain, one_after_another, **options))
        if "cond" not in name:  # the twin: its layer alone has no statistics
            with pytest.raises(AssertionError):
                assert_close(apart, due)
