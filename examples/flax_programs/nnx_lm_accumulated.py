"""A small language model in NNX: a mean over the tokens, and dropout.

`side_by_side.py --only nnx_lm` trains it, and its twin.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import ga_optax.flax

K = 4  # micro-batches


class Transformer(nnx.Module):
    """One block, which predicts the next byte."""

    def __init__(self, dropout: float, rngs: nnx.Rngs) -> None:
        """Makes its layers."""
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.positions = nnx.Embed(64, 32, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(32, rngs=rngs) for _ in range(3)])
        self.attend = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.up = nnx.Linear(32, 128, rngs=rngs)
        self.down = nnx.Linear(128, 32, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(32, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens `[batch, length]` to logits `[batch, length, 256]`."""
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        mask = nnx.make_causal_mask(tokens)
        x += self.dropout(self.attend(self.norms[0](x), mask=mask))
        x += self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))
        return self.out(self.norms[2](x))


def loss_fn(model: Transformer, batch: Any) -> jax.Array:
    """The mean cross-entropy of the tokens that are no padding."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets)
    return jnp.mean(losses, where=targets != 0)


def start(dropout: float, tx: optax.GradientTransformation) -> Any:
    """The objects that a step changes."""
    model = Transformer(dropout, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


@nnx.jit
def train_step(
    model: Transformer, optimizer: nnx.Optimizer, metrics: Any, batch: Any
) -> None:
    """Trains for a single step."""
    grad_fn = ga_optax.flax.value_and_grad(loss_fn, K)
    loss, grads = grad_fn(model, batch)
    metrics.update(loss=loss)
    optimizer.update(model, grads)
