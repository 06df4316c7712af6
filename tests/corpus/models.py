"""Random models whose rows do not meet, of layers as people write them."""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 8


def norm(h, gain):
    centred = h - jnp.mean(h, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.var(h, -1, keepdims=True) + 1e-5) * gain[None]


def convolved(h, p, b):
    numbers = "NWC", "WIO", "NWC"
    args = h[..., None], p["v"][:3, None], (1,), "SAME", None, None, numbers
    out = jax.lax.conv_general_dilated(*args)
    return jax.nn.silu(out).mean(-1) * p["g"][None]


def attended(h, p, b):
    q, k, v = (h[:, :, None] * p[name][0][None, None] for name in ("w", "v", "u"))
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 3.0)
    return (weights @ v).mean(-1) @ p["w"]


def scanned(h, p, b):
    def layer(h, w):
        return jnp.tanh(norm(h, w[0]) @ w) * w[1][None] + h, None

    layers = jnp.stack([p["w"], p["v"]]) * 0.5
    return jax.lax.scan(jax.checkpoint(layer), h, layers)[0]


def stacked(h, p, b):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) + h, None), h, p["layers"])[0]


PIECES = (
    lambda h, p, b: jnp.tanh(h @ p["w"] + p["g"][None]),  # dense
    lambda h, p, b: h * p["g"][None] + p["b"][None],  # scaled
    lambda h, p, b: jax.nn.gelu(norm(h, p["g"]) @ p["w"]),  # normed
    lambda h, p, b: jax.nn.silu(h @ p["w"]) * (h @ p["v"]) + h,  # gated
    convolved,
    attended,
    lambda h, p, b: h + p["w"][b["i"]],  # embedded
    scanned,
    stacked,
    lambda h, p, b: h * jnp.exp(p["g"])[None] + p["b"][None],  # sampled
)


def spectral(p):
    v = p["g"]
    for _ in range(2):
        v = p["w"].T @ (p["w"] @ v)
        v = v / jnp.linalg.norm(v)
    return jnp.linalg.norm(p["w"] @ v)


PENALTIES = (
    lambda p: jnp.float32(0),
    lambda p: 0.01 * sum(jnp.sum(x**2) for x in jax.tree.leaves(p)),
    spectral,
    lambda p: 0.5 * jnp.sum(p["b"] ** 2 + jnp.exp(2 * p["g"]) - 2 * p["g"]),
)
HEADS = (
    lambda h, p, b: jnp.mean((h @ p["head"] + p["bias"] - b["y"]) ** 2),
    lambda h, p, b: jnp.mean(jax.nn.softplus(-jnp.sign(b["y"]) * (h @ p["head"]))),
    lambda h, p, b: jnp.sum(p["head"]) * jnp.mean(h) + p["bias"] * jnp.mean(b["y"]),
)


def draw(seed, k):
    """A random model: the loss with aux, parameters, a batch for k micro-batches."""
    rng = np.random.default_rng(seed)
    pieces = [PIECES[i] for i in rng.integers(len(PIECES), size=rng.integers(0, 4))]
    shared = rng.random() < 0.3
    punish = PENALTIES[rng.integers(len(PENALTIES))]
    head = HEADS[rng.integers(len(HEADS))]
    rows = k * int(rng.choice([1, 2, 4]))

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32)

    def parameters():
        square = {name: normal(WIDTH, WIDTH) for name in "wvu"}
        vectors = {name: normal(WIDTH) for name in "gb"}
        return square | vectors | {"layers": normal(3, WIDTH, WIDTH)}

    params = {f"piece_{i}": parameters() for i in range(1 if shared else 4)}
    params |= {"head": normal(WIDTH), "bias": normal()}
    batch = {
        "x": normal(rows, WIDTH),
        "y": normal(rows),
        "i": jnp.asarray(rng.integers(0, WIDTH, rows)),
    }

    def loss(params, batch):
        h = batch["x"]
        for i, piece in enumerate(pieces):
            h = piece(h, params["piece_0" if shared else f"piece_{i}"], batch)
        value = head(h, params, batch) + punish(params["piece_0"])
        return value, {"scaled": value * 1.7, "of rows": jnp.mean(batch["x"]) * value}

    return loss, params, batch
