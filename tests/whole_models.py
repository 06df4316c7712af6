"""Losses in which rows meet, of models as people write them; each returns aux, too."""

import jax
import jax.numpy as jnp
import numpy as np

N, D, E = 12, 6, 4


def arguments(n=N, dtype=np.float64):
    rng = np.random.default_rng(11)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    params = {"in": normal(D, E) * 0.6, "mid": normal(E, E), "out": normal(E, 3)}
    batch = {
        "x": normal(n, D),
        "x2": normal(n, D),
        "c": jnp.asarray(rng.integers(0, 3, n), jnp.int32),
        "m": jnp.asarray(rng.random(n) < 0.7),
    }
    return params, batch


def each_class(logits, labels):
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels]


def attention(p, b):
    """Rows attend to those before them that count."""
    h = jnp.tanh(b["x"] @ p["in"])
    scores = h @ p["mid"] @ h.T / np.sqrt(E).astype(h.dtype)
    sees = jnp.tril(jnp.ones(scores.shape, bool)) & b["m"]
    weights = jax.nn.softmax(jnp.where(sees, scores, -1e9))
    h = h + weights @ h
    return each_class(h @ p["out"], b["c"]).mean(), {"weights": weights, "h": h}


def experts(p, b, capacity=4):
    """Each row goes to its best expert, while there is room; with a balancing term."""
    gates = jax.nn.softmax(b["x"] @ p["in"])
    chosen = jax.nn.one_hot(gates.argmax(1), E, dtype=gates.dtype)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(1) - 1
    fits = place < capacity
    at = jnp.where(fits, place, -1).astype(jnp.int32)
    at = jax.nn.one_hot(at, capacity, dtype=gates.dtype)
    dispatch = chosen[:, :, None] * at[:, None]  # [rows, experts, places]
    inside = jnp.tanh(jnp.einsum("nep,nd->epd", dispatch, b["x2"] @ p["in"]))
    inside = inside * (1 + p["mid"][:, None])
    h = jnp.einsum("nep,epd->nd", dispatch * gates[:, :, None], inside)
    balance = E * (chosen.mean(0) * gates.mean(0)).sum()
    loss = each_class(h @ p["out"], b["c"]).mean() + 0.1 * balance
    return loss, {"dropped": (~fits).sum(), "fits": fits, "load": chosen.sum(0)}


def sinkhorn(p, b):
    """The entropic transport between two views, by four turns."""
    x, y = b["x"] @ p["in"], jnp.tanh(b["x2"] @ p["in"])
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)

    def turn(_, fg):
        f, g = fg
        f = -jax.nn.logsumexp(g[None] - cost, 1)
        return f, -jax.nn.logsumexp(f[:, None] - cost, 0)

    f, g = jax.lax.fori_loop(0, 4, turn, (jnp.zeros(len(x), x.dtype),) * 2)
    plan = jnp.exp(f[:, None] + g[None] - cost)
    return (plan * cost).sum() / len(x), {"f": f, "plan": plan}


def mmd(p, b):
    x, y = b["x"] @ p["in"], b["x2"] @ p["in"]

    def kernel(x, y):
        far = (x**2).sum(1)[:, None] + (y**2).sum(1)[None] - 2 * x @ y.T
        return sum(jnp.exp(-far / s) for s in (1.0, 4.0))

    n, k = len(x), kernel(x, y)
    within = kernel(x, x).sum() + kernel(y, y).sum() - 4 * n
    return within / (n * (n - 1)) - 2 * k.mean(), {"k": k}


def vicreg(p, b):
    x, y = (jnp.tanh(b[name] @ p["in"]) @ p["mid"] for name in ("x", "x2"))
    loss = ((x - y) ** 2).mean()
    for z in (x, y):
        z = z - z.mean(0)
        spread = jnp.sqrt((z**2).sum(0) / (len(z) - 1) + 1e-4)
        c = z.T @ z / (len(z) - 1)
        off = (c**2).sum() - (jnp.diagonal(c) ** 2).sum()
        loss += jax.nn.relu(1 - spread).mean() + off / E
    return loss, {"x": x, "mean": x.mean(0)}


def deep_cluster(p, b):
    """Rows to their nearest prototypes, as equal shares of which as can be (SwAV)."""
    z = b["x"] @ p["in"]
    scores = z @ p["mid"]
    q = jnp.exp(jax.lax.stop_gradient(scores) / 2)
    for _ in range(3):
        q = q / q.sum(0)
        q = q / q.sum(1, keepdims=True)
    other = jax.nn.log_softmax(b["x2"] @ p["in"] @ p["mid"])
    return -(q * other).sum(1).mean(), {"q": q, "share": q.mean(0)}


def average_precision(p, b):
    """A ranking of all rows, smooth."""
    s = (b["x"] @ p["in"]).sum(1)
    above = jax.nn.sigmoid((s[None] - s[:, None]) * 2)
    positive = b["m"].astype(s.dtype)
    rank = 0.5 + above.sum(1)
    of_positives = 0.5 + (above * positive).sum(1)
    loss = 1 - (of_positives / rank * positive).sum() / positive.sum()
    return loss, {"rank": rank}


def dropout(p, b):
    key, other = jax.random.split(jax.random.key(3))
    keep = jax.random.bernoulli(key, 0.7, (len(b["x"]), E))
    h = jnp.where(keep, jnp.tanh(b["x"] @ p["in"]) / 0.7, 0)
    noise = jax.random.normal(other, (len(b["x"]), 3), h.dtype)
    logits = h @ p["out"] + 0.1 * noise
    return each_class(logits, b["c"]).mean(), {"keep": keep, "noise": noise}


def masked_tokens(p, b):
    h = jnp.tanh(b["x"] @ p["in"])
    each = each_class(h @ p["out"], b["c"])
    loss = jnp.where(b["m"], each, 0).sum() / jnp.maximum(b["m"].sum(), 1)
    return loss, {"each": each, "count": b["m"].sum()}


def gradient_penalty(p, b):
    """A critic of two sets, with the norm of its gradient at points in between."""

    def critic(x):
        return (jnp.tanh(x @ p["in"]) @ p["out"]).sum(-1)

    share = jax.random.uniform(jax.random.key(5), (len(b["x"]), 1), b["x"].dtype)
    between = share * b["x"] + (1 - share) * b["x2"]
    slope = jax.grad(lambda x: critic(x).sum())(between)
    norm = jnp.sqrt((slope**2).sum(1) + 1e-6)
    gap = critic(b["x"]).mean() - critic(b["x2"]).mean()
    return jnp.abs(gap) + ((norm - 1) ** 2).mean(), {"norm": norm}


def survival(p, b):
    """Cox: each row against all that come after it in time."""
    time, risk = b["x2"][:, 0], (b["x"] @ p["in"]).sum(1)
    at_risk = time[None] >= time[:, None]
    log_sum = jax.nn.logsumexp(jnp.where(at_risk, risk[None], -1e9), 1)
    events = b["m"].astype(risk.dtype)
    loss = -((risk - log_sum) * events).sum() / events.sum()
    return loss, {"log_sum": log_sum, "at_risk": at_risk.sum(1)}


MODELS = {
    f.__name__: f
    for f in (
        *(attention, experts, sinkhorn, mmd, vicreg, deep_cluster, survival),
        *(average_precision, dropout, masked_tokens, gradient_penalty),
    )
}
