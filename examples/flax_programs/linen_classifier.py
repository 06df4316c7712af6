"""An image classifier in Linen, with batch normalisation and dropout.

`side_by_side.py --only linen_classifier` trains it, and its twin.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state


class CNN(nn.Module):
    """A convolution and two dense layers."""

    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        """Maps images `[batch, 8, 8, 1]` to logits `[batch, 10]`."""
        x = nn.Conv(16, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.avg_pool(nn.gelu(x), (2, 2), (2, 2))
        x = nn.gelu(nn.Dense(64)(x.reshape(len(x), -1)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    """Flax's, with the running statistics."""

    batch_stats: Any


def start(dropout: float, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    model = CNN(dropout)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
    )


@jax.jit
def train_step(state: TrainState, batch: Any, dropout_key: jax.Array) -> Any:
    """Trains for a single step."""
    key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params: Any) -> Any:
        logits, changed = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss.mean(), (changed["batch_stats"], logits)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (batch_stats, logits)), grads = grad_fn(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    return state, {"loss": loss, "accuracy": accuracy}
