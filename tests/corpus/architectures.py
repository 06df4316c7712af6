"""Small models as people write them: with Flax and Optax, or by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus.losses import entropies as cross_entropy
from corpus.losses import unit

import ga_optax as ga

N, T, D = 8, 6, 8  # rows, tokens, width
WORDS = 11
MODELS = {}  # a name, and a function that returns a loss, parameters and a batch
OTHER = set()  # those whose micro-batches alone have another loss: rows meet, or draws


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def ids(*shape, most=WORDS):
    return np.random.default_rng([1, *shape]).integers(0, most, shape, np.int32)


def of_module(module, *args, method=None):
    """Parameters of a module, of which nothing is 0."""
    started = jax.eval_shape(
        lambda *args: module.init(jax.random.key(0), *args, method=method), *args
    )
    return jax.tree.map(lambda x: 0.3 + 0.3 * drawn(*x.shape), started["params"])


def model(name, other=False):
    def named(make):
        MODELS[name] = make
        if other:
            OTHER.add(name)
        return make

    return named


class Block(nn.Module):
    """A layer of a transformer."""

    @nn.compact
    def __call__(self, x, mask=None):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(nn.LayerNorm()(x))))


class Encoder(nn.Module):
    """A vector for each image: patches, and a token of the class."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(D, (2, 2), 2)(x).reshape(len(x), -1, D)
        first = self.param("class", nn.initializers.normal(), (1, 1, D))
        x = jnp.concatenate([jnp.broadcast_to(first, (len(x), 1, D)), x], 1)
        return nn.LayerNorm()(Block()(x)[:, 0])


# -- Images ----------------------------------------------------------------------------


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width, stride in ((4, 1), (D, 2)):
            y = nn.Conv(width, (3, 3), stride, use_bias=False)(x)
            y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
            y = nn.BatchNorm(use_running_average=False)(nn.Conv(width, (3, 3))(y))
            x = nn.relu(y + nn.Conv(width, (1, 1), stride)(x))
        return nn.Dense(5)(x.mean((1, 2)))


@model("ResNet", other=True)
def resnet():
    net, x = ResNet(), drawn(N, 6, 6, 3)

    def loss(p, batch):
        logits, stats = net.apply({"params": p}, batch[0], mutable=["batch_stats"])
        return cross_entropy(logits, batch[1]).mean() + 0 * len(stats)

    return loss, of_module(net, x), (x, ids(N, most=5))


@model("ViT")
def vit():
    net, x = nn.Sequential([Encoder(), nn.Dense(5)]), drawn(N, 4, 4, 3)
    smoothed = lambda c: optax.smooth_labels(jax.nn.one_hot(c, 5), 0.1)  # noqa: E731

    def loss(p, batch):
        logits = net.apply({"params": p}, batch[0])
        return optax.softmax_cross_entropy(logits, smoothed(batch[1])).mean()

    return loss, of_module(net, x), (x, ids(N, most=5))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return Block()(x, mask), None


class Text(nn.Module):
    """Tokens, by layers that a scan runs over, each in a checkpoint."""

    causal: bool = True

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WORDS, D)
        mask = nn.make_causal_mask(tokens) if self.causal else None
        stacked = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        layers = nn.scan(nn.remat(Layer), in_axes=nn.broadcast, length=2, **stacked)
        x, _ = layers()(embed(tokens), mask)
        return x, embed.attend(nn.LayerNorm()(x))


@model("CLIP", other=True)
def clip():
    image, text = Encoder(), Text()
    x, words = drawn(N, 4, 4, 3), ids(N, T)
    params = {"image": of_module(image, x), "text": of_module(text, words), "t": 1.0}

    def loss(p, batch):
        u = unit(image.apply({"params": p["image"]}, batch[0]))
        v = unit(text.apply({"params": p["text"]}, batch[1])[0].mean(1))
        logits, same = jnp.exp(p["t"]) * u @ v.T, jnp.arange(len(u))
        both = cross_entropy(logits, same) + cross_entropy(logits.T, same)
        return both.mean() / 2

    return loss, params, (x, words)


@model("DETR")
def detr():
    net, x = Block(), drawn(N, 4, D)
    params = {"net": of_module(net, x), "queries": drawn(3, D), "head": drawn(D, 4)}

    def of_one(boxes, due):
        cost = jnp.abs(boxes[:, None] - due).sum(-1)
        i, j = optax.assignment.hungarian_algorithm(jax.lax.stop_gradient(cost))
        return jnp.abs(boxes[i] - due[j]).sum()

    def loss(p, batch):
        memory = net.apply({"params": p["net"]}, batch[0])
        weights = jax.nn.softmax(jnp.einsum("qd,nsd->nqs", p["queries"], memory))
        found = jax.nn.sigmoid(weights @ memory @ p["head"])
        return jax.vmap(of_one)(found, batch[1]).mean()

    return loss, params, (x, np.abs(drawn(N, 2, 4)))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x, t):
        t = nn.Dense(4)(jnp.stack([jnp.sin(t), jnp.cos(t)], -1))[:, None, None]
        high = nn.silu(nn.GroupNorm(2)(nn.Conv(4, (3, 3))(x)) + t)
        low = nn.silu(nn.Conv(D, (3, 3), 2)(high))
        up = nn.ConvTranspose(4, (2, 2), (2, 2))(low)
        return nn.Conv(1, (3, 3))(jnp.concatenate([high, up], -1))


@model("U-Net", other=True)
def unet():
    net, x = UNet(), drawn(N, 4, 4, 1)

    def loss(p, x):
        of_time, of_noise = jax.random.split(jax.random.key(3))
        t = jax.random.uniform(of_time, (len(x),), x.dtype)
        noise = jax.random.normal(of_noise, x.shape, x.dtype)
        keeps = t[:, None, None, None]
        found = net.apply({"params": p}, keeps * x + (1 - keeps) * noise, t)
        return ((found - noise) ** 2).mean()

    return loss, of_module(net, x, x[:, 0, 0, 0]), x


# -- Text, sounds, sequences -----------------------------------------------------------


@model("BERT", other=True)
def bert():
    net, words = Text(causal=False), ids(N, T)

    def loss(p, batch):
        words, hidden = batch
        logits = net.apply({"params": p}, jnp.where(hidden, 0, words))[1]
        return jnp.sum(cross_entropy(logits, words) * hidden) / jnp.sum(hidden)

    return loss, of_module(net, words), (words, ids(N, T, most=3) == 0)


@model("GPT")
def gpt():
    net, words = Text(), ids(N, T + 1)

    def loss(p, words):
        logits = net.apply({"params": p}, words[:, :-1])[1]
        return cross_entropy(logits, words[:, 1:]).mean()

    return loss, of_module(net, words), words


@model("CTC")
def ctc():
    cell = nn.RNN(nn.LSTMCell(D, param_dtype=float))
    net, x = nn.Sequential([cell, nn.Dense(5)]), drawn(N, T, 3)

    def loss(p, batch):
        x, labels = batch
        logits = net.apply({"params": p}, x)
        none = [jnp.zeros(x.shape[:2]), jnp.zeros(labels.shape)]  # is padding
        return optax.ctc_loss(logits, none[0], labels, none[1]).mean()

    return loss, of_module(net, x), (x, 1 + ids(N, 2, most=4))


@model("Mamba")
def mamba():
    x = drawn(N, T, D)
    params = {name: drawn(D, D, seed=i) / 3 for i, name in enumerate("abcd")}

    def loss(p, x):
        keeps, adds = jax.nn.sigmoid(x @ p["a"]), x @ p["b"]
        join = lambda u, v: (u[0] * v[0], v[0] * u[1] + v[1])  # noqa: E731
        _, h = ga.associative_scan(join, (keeps, adds), axis=1)
        return (jnp.tanh((h * (x @ p["c"])) @ p["d"]) ** 2).mean()

    return loss, params, x


# -- Policies, equations, graphs -------------------------------------------------------


@model("GRPO", other=True)
def grpo():
    net, words = Text(), ids(N, T + 1)

    def loss(p, batch):
        words, counts, rewards = batch
        logits = jax.nn.log_softmax(net.apply({"params": p}, words[:, :-1])[1])
        told = jnp.take_along_axis(logits, words[:, 1:, None], 2)[..., 0]
        groups = rewards.reshape(-1, 4)
        gains = groups - groups.mean(1, keepdims=True)
        gains = (gains / (groups.std(1, keepdims=True) + 1e-4)).reshape(-1, 1)
        ratio = jnp.exp(told - jax.lax.stop_gradient(told))
        return -jnp.sum(ratio * gains * counts) / jnp.sum(counts)

    batch = words, (ids(N, T, most=4) > 0) * 1.0, drawn(N, 2)[:, 0]
    return loss, of_module(net, words), batch


@model("PINN")
def pinn():
    net, x = nn.Sequential([nn.Dense(D), nn.tanh, nn.Dense(1)]), drawn(N, 2)

    def loss(p, points):
        u = lambda x: net.apply({"params": p}, x)[0]  # noqa: E731
        curved = jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(points)
        return ((curved + jnp.sin(points).sum(-1)) ** 2).mean()

    return loss, of_module(net, x), x


@model("GNN")
def gnn():
    nodes, edges = drawn(N, 5, D), ids(N, 7, 2, most=5)
    params = {"sent": drawn(D, D) / 3, "kept": drawn(D, D, seed=1) / 3}

    def of_graph(p, nodes, edges):
        for _ in range(2):
            sent = (nodes @ p["sent"])[edges[:, 0]]
            got = jax.ops.segment_sum(sent, edges[:, 1], len(nodes))
            nodes = jnp.tanh(nodes @ p["kept"] + got)
        return nodes.mean()

    def loss(p, batch):
        return (jax.vmap(of_graph, (None, 0, 0))(p, *batch) ** 2).mean()

    return loss, params, (nodes, edges)
