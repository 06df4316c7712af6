"""An image classifier in NNX, with batch normalisation and dropout.

`side_by_side.py --only nnx_classifier` trains it, and its twin.
"""

from typing import Any

import jax
import optax
from flax import nnx

import ga_optax.flax

K = 4  # micro-batches


class CNN(nnx.Module):
    """A convolution and two dense layers."""

    def __init__(self, dropout: float, rngs: nnx.Rngs) -> None:
        """Makes its layers."""
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.hidden = nnx.Linear(256, 64, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        """Maps images `[batch, 8, 8, 1]` to logits `[batch, 10]`."""
        x = nnx.avg_pool(nnx.gelu(self.norm(self.conv(x))), (2, 2), (2, 2))
        x = nnx.gelu(self.hidden(x.reshape(len(x), -1)))
        return self.out(self.dropout(x, rngs=rngs))


def loss_fn(model: CNN, batch: Any, rngs: nnx.Rngs) -> Any:
    """The mean cross-entropy, and the logits."""
    logits = model(batch["image"], rngs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return loss.mean(), logits


def start(dropout: float, tx: optax.GradientTransformation) -> Any:
    """The objects that a step changes."""
    model = CNN(dropout, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
    )
    return model, optimizer, metrics, nnx.Rngs(1)


@nnx.jit
def train_step(
    model: CNN, optimizer: nnx.Optimizer, metrics: Any, rngs: nnx.Rngs, batch: Any
) -> None:
    """Trains for a single step."""
    grad_fn = ga_optax.flax.value_and_grad(loss_fn, K, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch, rngs)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
