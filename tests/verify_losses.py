"""Losses as people write them, and the cause that `verify` must name for each.

A loss here is a way to make one number of a number for each row, in a program of some
kind. `CAUSES` says what each way gets; `programs` are the kinds.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax import Cause

ROWS, SIZE = 16, 4


def arrays(seed=0):
    """Parameters, and a batch whose micro-batches of any size hold other counts."""
    draw = np.random.default_rng(seed)
    params = {
        "layers": draw.normal(size=(2, SIZE, SIZE)) / 2,
        "v": draw.normal(size=SIZE),
    }
    batch = {
        "x": draw.normal(size=(ROWS, SIZE)),
        "y": draw.normal(size=ROWS),
        "weight": draw.uniform(0.1, 2, size=ROWS) * 2.0 ** (np.arange(ROWS) % 5),
        "mask": np.arange(ROWS) % 7 < 3,
    }
    return jax.tree.map(
        lambda x: jnp.asarray(x, bool if x.dtype == bool else jnp.float32),
        (params, batch),
    )


# -- Programs: an error for each row ---------------------------------------------------


def _layer(h, w):
    return jnp.tanh(h @ w), None


def plain(params, batch):
    h = batch["x"]
    for w in params["layers"]:
        h, _ = _layer(h, w)
    return (h @ params["v"] - batch["y"]) ** 2


def scanned(params, batch):
    h, _ = jax.lax.scan(_layer, batch["x"], params["layers"])
    return (h @ params["v"] - batch["y"]) ** 2


def checkpointed(params, batch):
    h, _ = jax.lax.scan(jax.checkpoint(_layer), batch["x"], params["layers"])
    return (jax.checkpoint(jnp.matmul)(h, params["v"]) - batch["y"]) ** 2


def mapped(params, batch):
    def of_one(x, y):
        return scanned(params, {"x": x[None], "y": y[None]})[0]

    return jax.vmap(of_one)(batch["x"], batch["y"])


def in_bfloat16(params, batch):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
    return scanned(*half)


PROGRAMS = plain, scanned, checkpointed, mapped, in_bfloat16

# -- Ways to make one number of them ---------------------------------------------------


def count(batch, dtype):
    return jnp.sum(batch["mask"].astype(dtype))


def mean(errors, params, batch):
    return jnp.mean(errors)


def mean_and_penalty(errors, params, batch):
    return jnp.mean(errors) + penalty(errors, params)


def penalty(errors, params):
    return jnp.sum(params["v"] ** 2).astype(errors.dtype)


def total(errors, params, batch):
    return jnp.sum(errors)


def total_and_penalty(errors, params, batch):
    return jnp.sum(errors) + penalty(errors, params)


def mean_and_total(errors, params, batch):
    return jnp.mean(errors) + jnp.sum(jnp.sin(errors))


def divided_twice(errors, params, batch):
    return jnp.mean(errors) / len(batch["y"])


def times_the_root(errors, params, batch):
    return jnp.mean(errors) * len(batch["y"]) ** 0.5


def masked(errors, params, batch):
    kept = jnp.where(batch["mask"], errors, jnp.zeros_like(errors))
    return jnp.sum(kept) / count(batch, errors.dtype)


def masked_and_penalty(errors, params, batch):
    return masked(errors, params, batch) + penalty(errors, params)


def masked_beside_its_like(errors, params, batch):
    """Two counts of the same: one weight is right for both."""
    return masked(errors, params, batch) + masked(jnp.sin(errors), params, batch)


def kept_from_below(errors, params, batch):
    below = jnp.maximum(count(batch, errors.dtype), jnp.ones_like(errors[0]))
    return jnp.sum(errors * batch["mask"].astype(errors.dtype)) / below


def normalised_weights(errors, params, batch):
    weight = batch["weight"].astype(errors.dtype)
    return jnp.sum(weight / jnp.sum(weight) * errors)


def softmax_weights(errors, params, batch):
    return jnp.sum(jax.nn.softmax(batch["y"]).astype(errors.dtype) * errors)


def of_two_counts(errors, params, batch):
    """A ratio of a ratio: the weights are products of two counts."""
    weight = jnp.sum(batch["weight"]).astype(errors.dtype)
    return masked(errors, params, batch) / weight


def two_ratios(errors, params, batch):
    """Each needs weights of its own."""
    return masked(errors, params, batch) + normalised_weights(errors, params, batch)


def ratio_and_mean(errors, params, batch):
    return masked(errors, params, batch) + jnp.mean(jnp.sin(errors))


def product_of_means(errors, params, batch):
    return jnp.mean(errors) * jnp.mean(jnp.sin(errors))


def deviation(errors, params, batch):
    return jnp.std(errors)


def root_of_mean(errors, params, batch):
    return jnp.sqrt(jnp.mean(errors))


def largest(errors, params, batch):
    return jnp.max(errors)


def softmax_of_errors(errors, params, batch):
    return jnp.sum(jax.nn.softmax(errors) * errors)


def advantages(errors, params, batch):
    """Rewards that are normalised over the batch, which no parameter is in."""
    reward = batch["y"].astype(errors.dtype)
    return jnp.mean((reward - jnp.mean(reward)) / jnp.std(reward) * errors)


def neighbours(errors, params, batch):
    return jnp.mean((errors[1:] - errors[:-1]) ** 2)


def sorted_by_size(errors, params, batch):
    return jnp.mean(jnp.sort(errors)[: len(errors) // 2])


def by_position(errors, params, batch):
    return jnp.mean(jnp.arange(len(errors), dtype=errors.dtype) * errors)


def dropped(errors, params, batch):
    keep = jax.random.bernoulli(jax.random.key(1), 0.5, errors.shape)
    return jnp.mean(jnp.where(keep, errors, jnp.zeros_like(errors)))


CAUSES = {
    Cause.ROUNDING: (mean, mean_and_penalty),
    Cause.SCALE: (
        *(total, total_and_penalty, mean_and_total, divided_twice, times_the_root),
    ),
    Cause.WEIGHTS: (
        *(masked, masked_and_penalty, masked_beside_its_like, kept_from_below),
        *(normalised_weights, softmax_weights, of_two_counts),
    ),
    Cause.CROSS_EXAMPLE: (
        *(two_ratios, ratio_and_mean, product_of_means, deviation, root_of_mean),
        *(largest, softmax_of_errors, advantages, neighbours, sorted_by_size),
    ),
    Cause.RANDOMNESS: (by_position, dropped),
}
CASES = [(way, cause) for cause, ways in CAUSES.items() for way in ways]


def loss_of(way, program):
    """The loss that makes one number of a program in one way."""

    def loss(params, batch):
        return way(program(params, batch), params, batch)

    return loss
