"""A small language model in Linen: a mean over the tokens, and dropout.

`side_by_side.py --only linen_lm` trains it, and its twin.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import ga_optax as ga

K = 4  # micro-batches


class Transformer(nn.Module):
    """One block, which predicts the next byte."""

    dropout: float

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens `[batch, length]` to logits `[batch, length, 256]`."""
        x = nn.Embed(256, 32)(tokens)
        x += nn.Embed(64, 32)(jnp.arange(tokens.shape[1]))[None]
        attend = nn.MultiHeadDotProductAttention(2)
        h = attend(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x += nn.Dropout(self.dropout, deterministic=False)(h)
        h = nn.Dense(32)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))
        x += nn.Dropout(self.dropout, deterministic=False)(h)
        return nn.Dense(256)(nn.LayerNorm()(x))


def start(dropout: float, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    model = Transformer(dropout)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    params = model.init(keys, jnp.zeros((1, 32), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state: TrainState, batch: Any, dropout_key: jax.Array) -> Any:
    """Trains for a single step."""
    key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = state.apply_fn({"params": params}, inputs, rngs={"dropout": key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.mean(losses, where=targets != 0)

    grad_fn = ga.value_and_grad(loss_fn, K)
    loss, grads = grad_fn(state.params, batch)
    state = state.apply_gradients(grads=grads)
    return state, {"loss": loss}
