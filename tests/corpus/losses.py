"""Losses of a whole batch, as people write them, and what each costs: `LOSSES`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# No other product has an operand as large as `D·E`, so that passes can be counted.
N, D, E = 12, 13, 17


def arguments(n=N, dtype=np.float64, width=E):
    """Parameters and a batch of `n` rows."""
    rng = np.random.default_rng(7)

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    params = {
        "in": normal(D, width, scale=D**-0.5),
        "mid": normal(width, width, scale=width**-0.5),
        "out": normal(width, 3, scale=width**-0.5),
        "s": jnp.asarray(1.3, dtype),
    }
    batch = {
        "x": normal(n, D),
        "x2": normal(n, D),
        "c": jnp.asarray(rng.integers(0, 3, n), jnp.int32),
        "m": jnp.asarray(rng.random(n) < 0.7).at[0].set(True),
    }
    return params, batch


def hidden(p, x):
    return jnp.tanh(x @ p["in"])


def both(p, b):
    return hidden(p, b["x"]), hidden(p, b["x2"])


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def standard(z, eps=1e-3):
    return (z - z.mean(0)) / jnp.sqrt(z.var(0) + eps)


def entropies(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def far(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1)


# -- Rows do not meet, or in numbers alone ---------------------------------------------


def mean(p, b):
    h = hidden(p, b["x"])
    aux = {"rows": h, "columns": h.T, "twice": jnp.concatenate([h, 2 * h])}
    return (h**2).mean(), aux | {"params": p["s"], "ids": b["c"] + 1}


def total(p, b):
    h = hidden(p, b["x"])
    return (h**2).sum() + (p["mid"] ** 2).sum(), {"count": b["m"].sum()}


def classes(p, b):
    each = entropies(jax.nn.relu(hidden(p, b["x"]) @ p["mid"]) @ p["out"], b["c"])
    return each.mean(), {"each": each}


def masked(p, b):
    """A mean over what counts, and metrics that are computed of sums."""
    each = entropies(hidden(p, b["x"]) @ p["out"], b["c"])
    loss = jnp.where(b["m"], each, 0).sum() / jnp.maximum(b["m"].sum(), 1)
    share = (each > 1).sum() / (each > 0.1).sum()
    aux = {"perplexity": jnp.exp(loss), "root": jnp.sqrt((each**4).mean())}
    return loss, aux | {"share": share, "range": each.max() - each.min()}


def tokens(p, b):
    ids = jnp.abs(b["x2"] * 4).astype(int) % D
    each = entropies(
        p["in"][ids].reshape(-1, p["in"].shape[1]) @ p["out"], ids.ravel() % 3
    )
    weights = (ids > 0) * b["m"][:, None].astype(each.dtype)
    return (each.reshape(ids.shape) * weights).sum() / weights.sum(), None


def dropout(p, b):
    key, other = jax.random.split(jax.random.key(3))
    h = hidden(p, b["x"])
    keep = jax.random.bernoulli(key, 0.7, h.shape)
    noise = jax.random.normal(other, (len(h), 3), h.dtype)
    logits = jnp.where(keep, h / 0.7, 0) @ p["out"] + 0.1 * noise
    return entropies(logits, b["c"]).mean(), {"keep": keep, "noise": noise}


def checkpointed(p, b):
    body = jax.checkpoint(lambda h, w: (jax.nn.relu(h @ w), None))
    h, _ = jax.lax.scan(body, hidden(p, b["x"]), jnp.stack([p["mid"]] * 3))
    return (h**2).mean(), None


# -- Rows meet -------------------------------------------------------------------------


def dice(p, b):
    q = jax.nn.sigmoid(hidden(p, b["x"]).sum(-1))
    return 1 - 2 * (q * b["m"]).sum() / (q.sum() + b["m"].sum()), {"q": q}


def clip(p, b):
    images, texts = map(unit, both(p, b))
    logits, labels = p["s"] * images @ texts.T, jnp.arange(len(images))
    each = entropies(logits, labels) + entropies(logits.T, labels)
    return each.mean() / 2, {"logits": logits}


def simclr(p, b):
    """Positives lie beside and below the diagonal."""
    n, z = len(b["x"]), unit(jnp.concatenate(both(p, b)) + 0.01)
    scores = jnp.where(jnp.eye(2 * n, dtype=bool), -9.0, z @ z.T / 0.5)
    positives = jnp.concatenate([jnp.diag(scores, n), jnp.diag(scores, -n)])
    return (jax.nn.logsumexp(scores, 1) - positives).mean(), None


def batch_norm(p, b):
    h = standard(jnp.tanh(standard(b["x"] @ p["in"])) @ p["mid"])
    return entropies(h @ p["out"], b["c"]).mean(), {"h": h, "mean": h.mean(0)}


def layers(p, b):
    def body(h, w):
        h = standard(h @ w)
        return jnp.tanh(h), (jax.nn.softmax(h).mean(0) ** 2).sum()

    h, aux = jax.lax.scan(body, hidden(p, b["x"]), jnp.stack([p["mid"]] * 3))
    return (h**4).mean() + aux.sum(), {"aux": aux}


def experts(p, b, capacity=8):
    """Each row goes to its best expert, while there is room; with a balancing term."""
    gates = jax.nn.softmax(b["x"] @ p["in"])
    chosen = jax.nn.one_hot(gates.argmax(1), gates.shape[1], dtype=gates.dtype)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(1) - 1
    fits = place < capacity
    at = jnp.where(fits, place, -1).astype(jnp.int32)
    at = jax.nn.one_hot(at, capacity, dtype=gates.dtype)
    dispatch = chosen[:, :, None] * at[:, None]  # [rows, experts, places]
    inside = jnp.tanh(jnp.einsum("nep,nd->epd", dispatch, gates))
    h = jnp.einsum("nep,epd->nd", dispatch, inside * (1 + p["mid"][:, None]))
    balance = gates.shape[1] * (chosen.mean(0) * gates.mean(0)).sum()
    loss = entropies(h @ p["out"], b["c"]).mean() + 0.1 * balance
    return loss, {"dropped": (~fits).sum(), "fits": fits, "load": chosen.sum(0)}


def routed(p, b, capacity=8):
    """By an index, there and back."""
    gate = jax.nn.softmax(b["x"] @ p["in"])
    of_row, n = gate.argmax(1), gate.shape[1]
    chosen = jax.nn.one_hot(of_row, n, dtype=jnp.int32)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(1) - 1
    sent = jnp.zeros((n, capacity, D), gate.dtype)
    sent = sent.at[of_row, place].add(b["x2"], mode="drop")
    inner = jax.nn.gelu(jnp.einsum("ecd,df->ecf", sent, p["in"]))
    return ((inner[of_row, place] * gate.max(1)[:, None]) ** 2).mean(), None


def routed_layers(p, b, capacity=8):
    """The same in two layers, each in a checkpoint that casts its weights."""

    @jax.checkpoint
    def layer(x, w):
        up, down = w.astype(x.dtype), w.mT.astype(x.dtype)
        gate = jax.nn.softmax(x @ p["out"].astype(x.dtype))
        of_row, n = gate.argmax(1), gate.shape[1]
        chosen = jax.nn.one_hot(of_row, n, dtype=jnp.int32)
        place = (jnp.cumsum(chosen, 0) * chosen).sum(1) - 1
        sent = jnp.zeros((n, capacity, x.shape[1]), x.dtype)
        sent = sent.at[of_row, place].add(x, mode="drop")
        inner = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(sent @ up), down)
        return x + inner[of_row, place] * gate.max(1)[:, None], None

    x = jnp.tanh(b["x"] @ p["in"].astype(b["x"].dtype))
    experts = p["mid"] * (1 + p["out"].T[:, :, None])
    x, _ = jax.lax.scan(layer, x, jnp.stack([experts, -experts]))
    return (x.astype(p["mid"].dtype) ** 2).mean(), None


def hard_triplet(p, b):
    z = unit(hidden(p, b["x"]))
    d = jnp.sqrt(far(z, z) + 1e-6)
    same = b["c"][:, None] == b["c"][None]
    worst = jnp.where(same, d, 0).max(1) - jnp.where(same, 9.0, d).min(1)
    return jax.nn.relu(worst + 0.3).mean(), None


def vicreg(p, b):
    x, y = both(p, b)
    loss = ((x - y) ** 2).mean()
    for z in (x, y):
        z = z - z.mean(0)
        spread = jax.nn.relu(1 - jnp.sqrt((z**2).sum(0) / (len(z) - 1) + 1e-4)).mean()
        c = z.T @ z / (len(z) - 1)
        loss += spread + (c**2).sum() - (jnp.diagonal(c) ** 2).sum()
    return loss, {"x": x, "mean": x.mean(0)}


def advantages(p, b):
    adv = b["x2"][:, 0]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    log = jax.nn.log_softmax(hidden(p, b["x"]) @ p["out"])
    ratio = jnp.exp(jnp.take_along_axis(log, b["c"][:, None], 1)[:, 0] + 1.0)
    return -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv).mean(), None


def segments(p, b):
    h = hidden(p, b["x"]).sum(-1)
    sums = jax.ops.segment_sum(h, b["c"], 3)
    means = sums / jax.ops.segment_sum(jnp.ones_like(h), b["c"], 3)
    return ((h - means[b["c"]]) ** 2).mean() + (means**2).sum(), {"means": means}


def hardest(p, b):
    each = entropies(hidden(p, b["x"]) @ p["out"], b["c"])
    return jax.lax.top_k(each, 5)[0].mean(), {"running": jnp.cumsum(each)}


def shifted(p, b):
    h = hidden(p, b["x"])
    return ((h[1:] - h[:-1]) ** 2).mean(), None


def attention(p, b):
    """Rows attend to those before them that count."""
    h = hidden(p, b["x"])
    scores = h @ p["mid"] @ h.T / 4
    sees = jnp.tril(jnp.ones(scores.shape, bool)) & b["m"]
    weights = jax.nn.softmax(jnp.where(sees, scores, -1e9))
    h = h + weights @ h
    return entropies(h @ p["out"], b["c"]).mean(), {"weights": weights, "h": h}


def sinkhorn(p, b):
    """The entropic transport between two views, by four turns."""
    x, y = both(p, b)
    cost = far(x, y) / len(p["mid"])

    def turn(_, fg):
        f, g = fg
        f = -jax.nn.logsumexp(g[None] - cost, 1)
        return f, -jax.nn.logsumexp(f[:, None] - cost, 0)

    f, g = jax.lax.fori_loop(0, 4, turn, (jnp.zeros(len(x), x.dtype),) * 2)
    plan = jnp.exp(f[:, None] + g[None] - cost)
    return (plan * cost).sum() / len(x), {"f": f, "plan": plan}


def survival(p, b):
    """Cox: each row against all that come after it in time."""
    time, risk = b["x2"][:, 0], hidden(p, b["x"]).sum(1)
    at_risk = time[None] >= time[:, None]
    log_sum = jax.nn.logsumexp(jnp.where(at_risk, risk[None], -1e9), 1)
    events = b["m"].astype(risk.dtype)
    return -((risk - log_sum) * events).sum() / events.sum(), {"seen": at_risk.sum(1)}


def gradient_penalty(p, b):
    """A critic of two sets, with the norm of its gradient at points in between."""

    def critic(x):
        return (hidden(p, x) @ p["out"]).sum(-1)

    share = jax.random.uniform(jax.random.key(5), (len(b["x"]), 1), b["x"].dtype)
    slope = jax.grad(lambda x: critic(x).sum())(share * b["x"] + (1 - share) * b["x2"])
    gap = critic(b["x"]).mean() - critic(b["x2"]).mean()
    norm = jnp.sqrt((slope**2).sum(1) + 1e-6)
    return jnp.abs(gap) + ((norm - 1) ** 2).mean(), {"norm": norm}


# -- The table -------------------------------------------------------------------------


class Loss(NamedTuple):
    """A loss of the corpus, and what it costs."""

    fun: Callable  # returns a number and aux
    passes: tuple[int, int] = (1, 1)  # how often it runs forward, and backward
    # The memory, at most, in parts of that of the undivided batch, where activations
    # are what takes memory.
    share: float = 0.3

    def value(self, p, b):
        """Without aux."""
        return self.fun(p, b)[0]


_TWICE = (2, 1)
_TABLE = (
    *map(Loss, (mean, total, classes, masked, tokens)),
    *map(Loss, (dropout, checkpointed, advantages)),
    *(Loss(f, _TWICE) for f in (dice, clip, simclr, hard_triplet, segments, hardest)),
    *(Loss(f, _TWICE) for f in (sinkhorn, survival, gradient_penalty, layers)),
    Loss(batch_norm, share=0.55),  # the rows of each layer are kept
    # What rows have of each other is most of what there is.
    Loss(experts, _TWICE, 0.65),
    Loss(vicreg, _TWICE, 0.7),
    Loss(routed, _TWICE, 0.9),
    Loss(routed_layers, _TWICE, 0.9),
    Loss(attention, _TWICE, 1.0),  # where it counts, the undivided batch runs
    Loss(shifted, _TWICE, 1.5),
)
LOSSES = {row.fun.__name__: row for row in _TABLE}
