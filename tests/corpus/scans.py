"""Scans in whose bodies rows meet; `random_programs` draws others."""

from typing import NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np

N, D = 6, 3
BOUND = 1e-10  # in float64: some hundred terms, conditioned no worse than 1e3


# -- Bodies: of rows and a total, with a slice of matrices, and what else is given -----


def carried(c, w, p):
    h, a = c
    h = jnp.tanh(h @ w)
    return (h, 0.9 * a + h.mean(0) ** 2), ()


def logged(c, w, p):
    h, a = c
    h = jnp.tanh(h @ w)
    z = jax.nn.logsumexp(h, 1)
    return (h, a + (z**2).mean()), (jnp.sqrt((h**2).sum()), h[:, 0] ** 2)


def centred(c, w, p):
    h, a = c
    h = jnp.tanh(h @ w)
    late = h - h.mean(0)
    return (h, a + jnp.sqrt((late**2).mean())), (late**3).mean(0)


def running(c, w, p):
    """An extremum that is carried, and has no gradient."""
    h, a = c
    h = jnp.tanh(h @ w)
    top = jax.lax.stop_gradient(jnp.maximum(a, h.max(0)))
    return (h, top), jnp.log(jnp.exp(h - top).sum(0))


def fixed(c, w, p):
    """What meets is the same in all iterations, or what came before them."""
    h, a = c
    return (jnp.tanh(h @ w), (h**2).mean(0)), (a, w, 3.0, (p["x"] ** 2).mean(0) * a)


def ring_aside(c, w, p):
    """What meets is carried and read again, but not by rows that are carried."""
    h, a = c
    h = jnp.tanh(h @ w)
    new = jnp.sin(a + (h * a).mean(0) ** 2)
    return (h, new), (new * a, jnp.log1p((h**2).sum()))


def ring(c, w, p):
    h, a = c
    h = jnp.tanh((h - h.mean(0)) @ w)
    return (h, a + jnp.sqrt((h**2).mean())), h.mean() ** 2


def nested(c, w, p):
    """In the loop inside, one carry is late, and nothing in there says so."""

    def body(c, v):
        h, a = c
        h = jnp.tanh(h @ w + v)
        return (h, 0.9 * a), h.mean(0) ** 2

    (h, a), ys = jax.lax.scan(jax.checkpoint(body), c, jnp.arange(2.0))
    return (h, a + ys.sum(0)), a


def nested_ring(c, w, p):
    h, a = c

    def body(c, v):
        c = jnp.tanh(c * v + (h * c).mean(0) ** 2)
        return c, c

    b, ys = jax.lax.scan(body, jnp.ones(D), jnp.arange(2.0))
    return (jnp.tanh(h @ w), a + b), ys


clipped = helpers.with_rule(lambda x: x, lambda _, ct: (jnp.clip(ct, -0.01, 0.01),))


def with_rule(c, w, p):
    """A rule that is not linear: it must see all of its cotangent at once."""
    h, a = c
    h = clipped(jnp.tanh(h @ w))
    return (h, a + jnp.sqrt((h**2).mean())), ((h - h.mean(0)) ** 4).mean()


ON_THE_SIDE = (carried, logged, centred, running, fixed)
RINGS = (ring_aside, ring, nested_ring)
BODIES = (*ON_THE_SIDE, nested, with_rule, *RINGS)


class How(NamedTuple):
    """How a body is scanned."""

    length: int = 3
    remat: bool = False
    reverse: bool = False


def loss_of(body, how=How()):  # noqa: B008
    """A loss that reads all that a scan returns."""

    def loss(p, x):
        def step(c, w):
            return body(c, w, {"x": x})

        h = jnp.tanh(x @ p["i"])
        step = jax.checkpoint(step) if how.remat else step
        start = h, jnp.full(D, 0.5, h.dtype)
        (h, a), ys = jax.lax.scan(step, start, p["w"], reverse=how.reverse)
        return (
            (h**2).mean() + jnp.sin(a).sum() + sum(map(_weighed, jax.tree.leaves(ys)))
        )

    return loss


def _weighed(y):
    """Each iteration counts for something else."""
    each = jnp.arange(1, len(y) + 1, dtype=y.dtype)
    each = each.reshape(-1, *[1] * (y.ndim - 1))
    return jnp.sum(jnp.sin(y) * each) / max(y.size, 1)


def arguments(length, n=N, dtype=jnp.float64):
    rng = np.random.default_rng(length)
    w = rng.normal(size=(length, D, D))
    p = {"i": rng.normal(size=(D, D)), "w": w}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (p, rng.normal(size=(n, D))))


# -- A decoder whose layers have experts -----------------------------------------------

K, BATCH, WIDTH, EXPERTS, WORDS = 8, 32, 64, 4, 256


def decoder(layers, aside, width=WIDTH, length=32):
    """Its loss, with what `aside(rows)` says of each layer, and types of arguments."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    shapes = {
        "qkv": array(layers, width, 3 * width),
        "o": array(layers, width, width),
        "router": array(layers, width, EXPERTS),
        "up": array(layers, EXPERTS, width, 2 * width),
        "down": array(layers, EXPERTS, 2 * width, width),
    }

    @jax.checkpoint
    def body(c, p):
        h, total = c
        h, gates, top = _layer(h, p)
        balance = EXPERTS * (top.mean((0, 1)) * gates.mean((0, 1))).sum()
        return (h, total + balance + aside(h)), balance

    def loss(p, tokens):
        h = p["words"][tokens[:, :-1]]
        (h, total), ys = jax.lax.scan(body, (h, jnp.zeros([])), p["layers"])
        logp = jax.nn.log_softmax(_normal(h) @ p["words"].T)
        logp = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)
        return 0.1 * total - logp.mean() + 0.01 * jnp.log1p(ys).sum()

    p = {"words": array(WORDS, width), "layers": shapes}
    return loss, (p, jax.ShapeDtypeStruct((BATCH, length + 1), jnp.int32))


def _layer(h, p):
    q, k, v = jnp.split(_normal(h) @ p["qkv"], 3, -1)
    a = jnp.einsum("bqd,bkd->bqk", q, k) / 8
    a = jnp.where(jnp.tril(jnp.ones(a.shape[1:], bool)), a, -1e9)
    h = h + jax.nn.softmax(a) @ v @ p["o"]
    x = _normal(h)
    gates = jax.nn.softmax(x @ p["router"])
    top = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
    up = jax.nn.gelu(jnp.einsum("bsd,edf->besf", x, p["up"]))
    out = jnp.einsum("besf,efd->besd", up, p["down"])
    return h + jnp.einsum("besd,bse->bsd", out, top * gates), gates, top


def _normal(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def nothing(h):
    return 0.0


def spread(h):
    """It reads rows after a sum over rows."""
    h = h - h.mean((0, 1))
    return 1e-2 * jnp.sqrt((h * h).mean())
