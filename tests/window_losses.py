"""Losses over a named axis, and random ones; what they are to equal."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

ROWS = "rows"


def split(batch, k):
    return jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)


def of_the_window(fun, k):
    """The law: micro-batches are the members of a vmapped axis."""

    def loss(params, batch):
        each = jax.vmap(fun, in_axes=(None, 0), axis_name=ROWS)
        return jnp.mean(each(params, split(batch, k)))

    return jax.value_and_grad(loss)


def of_each(fun, k):
    """The twin: every micro-batch is a window of its own."""

    def loss(params, batch):
        one = jax.vmap(fun, in_axes=(None, 0), axis_name=ROWS)
        alone = jax.tree.map(lambda x: x[:, None], split(batch, k))
        return jnp.mean(lax.map(lambda b: one(params, b)[0], alone))

    return jax.value_and_grad(loss)


def arrays(seed=0, rows=16):
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(4, 6))),
        "v": jnp.asarray(rng.normal(size=(6, 5))),
        "t": jnp.asarray(0.3),
    }
    batch = {
        "x": jnp.asarray(rng.normal(size=(rows, 4))),
        "y": jnp.asarray(rng.normal(size=(rows, 5))),
        "mask": jnp.asarray(rng.random(rows) < 0.6),
    }
    return params, batch


def encode(p, b):
    return jnp.tanh(b["x"] @ p["w"]) @ p["v"]


def errors(p, b):
    return jnp.mean((encode(p, b) - b["y"]) ** 2, axis=1)


# -- Losses ----------------------------------------------------------------------------


def token_mean(p, b):
    kept = jnp.where(b["mask"], errors(p, b), 0.0)
    count = lax.psum(jnp.sum(b["mask"]), ROWS).astype(float)
    return jnp.sum(kept) / count * lax.axis_size(ROWS)


def whole_token_mean(p, b):
    kept = jnp.where(b["mask"], errors(p, b), 0.0)
    count = lax.psum(jnp.sum(b["mask"]), ROWS).astype(float)
    return jnp.where(count > 0, lax.psum(jnp.sum(kept), ROWS) / count, 0.0)


def root_of_the_mean(p, b):
    return jnp.sqrt(lax.pmean(jnp.mean(errors(p, b)), ROWS))


def dice(p, b):
    """A ratio of sums: its cotangents are known after all rows."""
    q = jax.nn.sigmoid(jnp.sum(b["x"] @ p["w"], axis=1))
    both = lax.psum(jnp.sum(jnp.where(b["mask"], q, 0.0)), ROWS)
    return 1.0 - 2.0 * both / lax.psum(
        jnp.sum(q) + jnp.sum(b["mask"]).astype(q.dtype), ROWS
    )


def whitened(p, b):
    """What all micro-batches share takes more than what they do not."""
    z = encode(p, b)
    everyone = lax.all_gather(z, ROWS, tiled=True)
    factor = jnp.linalg.cholesky(everyone.T @ everyone + jnp.eye(z.shape[1]))
    return jnp.mean((z @ factor) ** 2) + jnp.sum(jnp.log(jnp.diagonal(factor)))


def contrastive(p, b):
    z = encode(p, b)
    z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
    t = lax.all_gather(z, ROWS, tiled=True)
    logits = jnp.exp(p["t"]) * (b["y"] + z) @ t.T
    own = jnp.arange(len(z)) + lax.axis_index(ROWS).astype(int) * len(z)
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(z)), own])


def normalise(h, mark=lambda h: h):
    h = mark(h)
    mean = lax.pmean(jnp.mean(h, 0), ROWS)
    variance = lax.pmean(jnp.mean((h - mean[None]) ** 2, 0), ROWS)
    return (h - mean[None]) / jnp.sqrt(variance + 1e-3)[None]


def batch_statistics(p, b, mark=lambda h: h):
    h = b["x"] @ p["w"]
    for _ in range(3):
        h = jnp.tanh(normalise(h, mark) @ p["v"] @ p["v"].T)
    return jnp.mean(h**3) + jnp.sum(p["t"] ** 2)


def marked_batch_statistics(p, b):
    return batch_statistics(p, b, lambda h: checkpoint_name(h, ROWS))


def statistics_of_each_example(p, b):
    """As some libraries write them: over the axis of a `vmap` inside, too."""

    def of_one(x, y):
        h = x @ p["w"]
        both = "examples", ROWS
        mean = lax.pmean(h, both)
        h = (h - mean) / jnp.sqrt(lax.pmean((h - mean) ** 2, both) + 1e-5)
        high, low = (f(lax.stop_gradient(h), both) for f in (lax.pmax, lax.pmin))
        return jnp.mean((jnp.tanh(h * (high - low)) @ p["v"] - y) ** 2)

    return jnp.mean(jax.vmap(of_one, axis_name="examples")(b["x"], b["y"]))


def layers(p, b):
    """Collectives in a short scan, in a `jax.checkpoint`, and under `jax.jit`."""

    def layer(h, w):
        h = h @ w
        mean = lax.pmean(jnp.mean(jnp.sin(h), 0), ROWS)
        return jnp.tanh(h - mean[None]), jnp.sum(mean)

    stacked = jnp.stack([p["v"] @ p["v"].T * 0.1] * 3)
    h, means = lax.scan(jax.checkpoint(layer), b["x"] @ p["w"], stacked)
    with jax.named_scope("total"):
        total = jax.jit(lambda h: lax.psum(jnp.sum(h), ROWS))(h)
    return jnp.mean(h**2) * total + jnp.sum(means * jnp.arange(3.0))


def every_collective(p, b):
    n, h = lax.axis_size(ROWS), b["x"] @ p["w"]
    wide = jnp.concatenate([h] * n, 1)
    positive, constant = lax.psum((h > 0, lax.stop_gradient(jnp.max(h))), ROWS)
    there = lax.ppermute(h, ROWS, [(i, (i + 1) % n) for i in range(n)])
    terms = [
        lax.all_gather({"a": h}, ROWS, axis=1)["a"] ** 3,
        lax.all_gather(h, ROWS, axis=1, tiled=True)[:, ::2] ** 2,
        lax.psum_scatter(wide, ROWS, scatter_dimension=1, tiled=True) ** 3,
        lax.psum_scatter(jnp.stack([h] * n), ROWS) ** 2,
        lax.all_to_all(wide, ROWS, 1, 0, tiled=True) * p["t"],
        jnp.sin(lax.all_to_all(jnp.stack([h] * n, 1), ROWS, 1, 2)),
        there * (1.0 + lax.axis_index(ROWS).astype(float)) * h,
        h * positive.astype(float),
        h * lax.pmax(lax.stop_gradient(h), ROWS),
        h * lax.pmin(lax.stop_gradient(h), ROWS) * constant,
        h * lax.pmax(b["mask"].astype(int), ROWS).astype(float)[:, None],
    ]
    return sum(jnp.sum(term) for term in terms)


@jax.custom_vjp
def half_back(x):
    """Its gradient is not its derivative."""
    return x


half_back.defvjp(lambda x: (x, None), lambda _, ct: (ct / 2,))


def with_a_rule(p, b):
    z = half_back(encode(p, b))
    return jnp.mean(jnp.sin(z * lax.pmean(jnp.mean(z, 0), ROWS)[None]))


LOSSES = [
    token_mean,
    whole_token_mean,
    root_of_the_mean,
    dice,
    whitened,
    contrastive,
    batch_statistics,
    marked_batch_statistics,
    statistics_of_each_example,
    layers,
    every_collective,
    with_a_rule,
]


# -- Random losses ---------------------------------------------------------------------

STEPS = [
    lambda h, p: jnp.tanh(h @ p["v"] @ p["v"].T),
    lambda h, p: h - lax.pmean(jnp.mean(h, 0), ROWS)[None],
    lambda h, p: jnp.sin(h * lax.pmean(jnp.mean(h * h), ROWS)),
    lambda h, p: (
        jax.nn.softmax(h @ lax.all_gather(h, ROWS, tiled=True).T)
        @ lax.all_gather(h, ROWS, tiled=True)
    ),
    lambda h, p: h - lax.stop_gradient(lax.pmax(lax.stop_gradient(h), ROWS)),
    lambda h, p: h * (1.0 + lax.axis_index(ROWS).astype(float)),
    lambda h, p: jax.checkpoint(normalise)(h) * p["t"],
    lambda h, p: checkpoint_name(jnp.cos(h), ROWS),
    lambda h, p: jax.jit(
        lambda h: h + lax.ppermute(h, ROWS, [(0, 1), (1, 3), (3, 2), (2, 0)])
    )(h),
    lambda h, p: lax.psum_scatter(
        jnp.stack([h] * lax.axis_size(ROWS)) * jnp.arange(1.0, 5.0)[:, None, None], ROWS
    ),
]


def random_loss(seed):
    """Up to five steps on two ways, which meet, and a way to end."""
    rng = np.random.default_rng(seed)
    ways = rng.integers(len(STEPS), size=(2, rng.integers(1, 4)))
    end = rng.integers(3)

    def loss(p, b):
        start = b["x"] @ p["w"]
        h = start
        other = start * p["t"]
        for i, j in ways.T:
            h, other = STEPS[i](h, p), STEPS[j](other, p)
        out = jnp.mean(jnp.sin(h) * jnp.cos(other))
        if end == 0:
            return out
        mean = lax.pmean(out, ROWS)
        return mean if end == 1 else out * jnp.exp(mean)

    return loss
