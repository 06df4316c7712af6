"""Losses of a whole batch, as people write them: no collective, no weight in sight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

N, D, T, E = 16, 6, 5, 4


def arguments(n=N, dtype=np.float64):
    """Parameters and a batch of `n` rows."""
    rng = np.random.default_rng(7)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    params = {
        "i": normal(D, E) * 0.7,
        "t": normal(T, E) * 0.7,
        "u": normal(E, 3),
        "s": jnp.asarray(1.3, dtype),
    }
    batch = {
        "x": normal(n, D),
        "y": normal(n, T),
        "m": jnp.asarray(rng.integers(0, 2, n), dtype).at[0].set(1),
        "c": jnp.asarray(rng.integers(0, 3, n), np.int32),
        "x2": normal(n, D),
    }
    return params, batch


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def standard(z, eps=1e-5):
    return (z - z.mean(0)) / jnp.sqrt(z.var(0) + eps)


def entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def errors(p, b):
    return ((b["x"] @ p["i"]).sum(-1) - b["y"][:, 0]) ** 2


# -- Means, sums and what is linear in them: one forward and one backward pass ---------


def mean(p, b):
    return errors(p, b).mean()


def total(p, b):
    return errors(p, b).sum() + (p["t"] ** 2).sum()


def classes(p, b):
    return entropy(jax.nn.relu(b["x"] @ p["i"]) @ p["u"], b["c"])


def classes_by_index(p, b):
    log = jax.nn.log_softmax(jax.nn.gelu(b["x"] @ p["i"]) @ p["u"])
    return -log[jnp.arange(len(b["c"])), b["c"]].mean()


def masked(p, b):
    return (errors(p, b) * b["m"]).sum() / b["m"].sum()


def where_mean(p, b):
    return errors(p, b).mean(where=b["m"] > 0)


def tokens(p, b):
    ids = jnp.abs(b["y"] * 10).astype(int) % 6
    logits = p["i"][ids].reshape(-1, E) @ p["u"]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, ids.ravel() % 3)
    weights = (ids > 0) * b["m"][:, None]
    return (each.reshape(ids.shape) * weights).sum() / weights.sum()


def dropout(p, b):
    keep = jax.random.bernoulli(jax.random.key(3), 0.8, b["x"].shape)
    return (((b["x"] * keep / 0.8) @ p["i"]) ** 2).mean()


def pairs(p, b):
    h = (b["x"] @ p["i"]).reshape(-1, 2, E)
    return jax.nn.softplus(-(h[:, 0] - h[:, 1]).sum(-1)).mean()


def checkpointed(p, b):
    ws = jnp.stack([p["i"][:E] @ jnp.eye(E)] * 3)
    body = jax.checkpoint(lambda h, w: (jax.nn.relu(h @ w), None))
    h, _ = jax.lax.scan(body, b["x"] @ p["i"], ws)
    return classes(p, b) + (h**2).mean()


# -- Rows meet -------------------------------------------------------------------------


def root(p, b):
    return jnp.sqrt(mean(p, b))


def clip(p, b):
    images = unit(jax.nn.gelu(b["x"] @ p["i"]))
    texts = unit(jnp.tanh(b["y"] @ p["t"]))
    logits, labels = p["s"] * images @ texts.T, jnp.arange(len(images))
    return (entropy(logits, labels) + entropy(logits.T, labels)) / 2


def siglip(p, b):
    images, texts = unit(b["x"] @ p["i"]), unit(b["y"] @ p["t"])
    logits, n = p["s"] * images @ texts.T, len(images)
    return -jnp.sum(jax.nn.log_sigmoid((2 * jnp.eye(n) - 1) * logits)) / n


def simclr(p, b):
    x, n = jnp.concatenate([b["x"], b["x2"]]), len(b["x"])
    z = unit(jax.nn.relu(x @ p["i"]) + 0.01)
    logits = z @ z.T / 0.5 - 1e9 * jnp.eye(2 * n)
    return entropy(logits, (jnp.arange(2 * n) + n) % (2 * n))


def batch_norm(p, b):
    h = jax.nn.relu(standard(b["x"] @ p["i"])) @ p["u"]
    return entropy(standard(h), b["c"])


def experts(p, b):
    gates = jax.nn.softmax(b["x"] @ p["i"])
    top = jax.nn.one_hot(gates.argmax(-1), E)
    return classes(p, b) + 0.5 * E * (top.mean(0) * gates.mean(0)).sum()


def dice(p, b):
    q = jax.nn.sigmoid((b["x"] @ p["i"]).sum(-1))
    return 1 - 2 * (q * b["m"]).sum() / (q.sum() + b["m"].sum())


def hard_triplet(p, b):
    z = unit(b["x"] @ p["i"])
    far = jnp.sqrt(((z[:, None] - z[None]) ** 2).sum(-1) + 1e-6)
    same = b["c"][:, None] == b["c"][None]
    worst = jnp.where(same, far, 0).max(1) - jnp.where(same, 9.0, far).min(1)
    return jax.nn.relu(worst + 0.3).mean()


def barlow(p, b):
    one, two = standard(b["x"] @ p["i"], 0.0), standard(b["x2"] @ p["i"], 0.0)
    c = one.T @ two / len(one)
    off = c - jnp.diag(jnp.diagonal(c))
    return ((jnp.diagonal(c) - 1) ** 2).sum() + 0.1 * (off**2).sum()


def vicreg(p, b):
    z = b["x"] @ p["i"]
    z = z - z.mean(0)
    c = z.T @ z / (len(z) - 1)
    spread = jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-4)).mean()
    return spread + ((c - jnp.diag(jnp.diag(c))) ** 2).sum() + mean(p, b)


def advantages(p, b):
    adv = b["y"][:, 0]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    log = jax.nn.log_softmax(b["x"] @ p["i"] @ p["u"])
    ratio = jnp.exp(jnp.take_along_axis(log, b["c"][:, None], 1)[:, 0] + 1.0)
    return -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv).mean()


def softmax_over_rows(p, b):
    w = jax.nn.softmax((b["x"] @ p["i"]).sum(-1))
    return (w[:, None] * (b["y"] @ p["t"])).sum(0).var()


def largest(p, b):
    return jnp.max((b["x"] @ p["i"]).sum(-1) ** 2) + mean(p, b)


def layers(p, b):
    ws = jnp.stack([p["i"][:E] @ jnp.eye(E)] * 3)

    def body(h, w):
        h = standard(h @ w, 1e-3)
        return jnp.tanh(h), (jax.nn.softmax(h).mean(0) ** 2).sum()

    h, aux = jax.lax.scan(body, b["x"] @ p["i"], ws)
    return (h**2).mean() + aux.sum()


def segments(p, b):
    h = (b["x"] @ p["i"]).sum(-1)
    sums = jax.ops.segment_sum(h, b["c"], 3)
    means = sums / jax.ops.segment_sum(jnp.ones_like(h), b["c"], 3)
    return ((h - means[b["c"]]) ** 2).mean() + (means**2).sum()


def ranked(p, b):
    h = (b["x"] @ p["i"]).sum(-1)
    return (jnp.sort(h) * jnp.linspace(0, 1, len(h))).mean()


def shifted(p, b):
    h = b["x"] @ p["i"]
    return ((h[1:] - h[:-1]) ** 2).mean()


ONE_PASS = {
    f.__name__: f
    for f in (
        *(mean, total, classes, classes_by_index, masked, where_mean, tokens),
        *(dropout, pairs, checkpointed),
    )
}
LEVELS = {
    f.__name__: f
    for f in (
        *(root, clip, siglip, simclr, batch_norm, experts, dice, hard_triplet),
        *(barlow, vicreg, advantages, softmax_over_rows, largest, layers, segments),
        *(ranked, shifted),
    )
}
LOSSES = ONE_PASS | LEVELS
