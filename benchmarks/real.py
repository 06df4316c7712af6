"""Models as people write them, whose rows meet: what `compare.py --counted` reads.

Experts by index, packed sequences and scans: what rows need of each other is a large
part of the batch, so that the plan decides what the call takes.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ga_optax as ga

K, HEADS = 8, 4
# A loss, parameters, a batch, and options of `value_and_grad`.
Case = tuple[Callable[..., jax.Array], Any, Any, dict[str, Any]]
Layer = Callable[[Any, jax.Array, jax.Array], jax.Array]


def attention(p: Any, h: jax.Array, same: jax.Array | None = None) -> jax.Array:
    """Causal attention; `same` says which tokens are of one segment."""
    shape = *h.shape[:2], HEADS, -1
    q, k, v = ((h @ p[name]).reshape(shape) for name in "qkv")
    mask = None if same is None else same[:, None]
    y = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
    return h + y.reshape(h.shape) @ p["o"]


def dense(p: Any, h: jax.Array) -> jax.Array:
    """A network for each token."""
    return h + jax.nn.gelu(h @ p["up"][0]) @ p["down"][0]


def products(w: Any, sent: jax.Array) -> jax.Array:
    """The networks of the experts, for what was sent to them."""
    inner = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", sent, w["up"]))
    return jnp.einsum("ecf,efd->ecd", inner, w["down"])


def by_index(p: Any, h: jax.Array, run: Any = products, factor: int = 2) -> jax.Array:
    """Each token goes to its two best experts, by index, there and back."""
    x = h.reshape(-1, h.shape[-1])
    tokens, number = len(x), len(p["up"])
    size = 2 * factor * tokens // number
    gates = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
    gate, expert = jax.lax.top_k(gates, 2)
    fl = expert.T.reshape(-1)
    hits = jax.nn.one_hot(fl, number, dtype=jnp.int32)
    at = (jnp.cumsum(hits, 0) * hits).sum(1) - 1
    twice = jnp.concatenate([x, x])
    sent = jnp.zeros((number, size, x.shape[1]), x.dtype)
    sent = sent.at[fl, at].set(twice, mode="drop")
    out = run({name: p[name] for name in ("up", "down")}, sent)
    out = out.at[fl, at].get(mode="fill", fill_value=0)
    out = out * gate.T.reshape(-1, 1).astype(out.dtype)
    return h + (out[:tokens] + out[tokens:]).reshape(h.shape)


def one_hot(p: Any, h: jax.Array) -> jax.Array:
    """Each token goes to its best expert, by products with one-hot numbers."""
    x = h.reshape(-1, h.shape[-1])
    number = len(p["up"])
    gates = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
    chosen = jax.nn.one_hot(gates.argmax(1), number)
    size = 2 * len(x) // number
    at = jax.nn.one_hot((jnp.cumsum(chosen, 0) * chosen).sum(1) - 1, size)
    dispatch = (chosen[:, :, None] * at[:, None]).astype(x.dtype)
    out = products(p, jnp.einsum("nec,nd->ecd", dispatch, x))
    weight = (gates * chosen).sum(1)[:, None].astype(x.dtype)
    return h + (jnp.einsum("nec,ecd->nd", dispatch, out) * weight).reshape(h.shape)


def parameters(
    layers: int, width: int, hidden: int, experts: int, words: int
) -> dict[str, Any]:
    """Parameters of so many layers, in float32."""
    keys = iter(jax.random.split(jax.random.key(0), 8 * layers + 1))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    def layer() -> dict[str, jax.Array]:
        p = {name: matrix(width, width) for name in "qkvo"}
        p |= {"up": matrix(experts, width, hidden), "router": matrix(width, experts)}
        return p | {"down": matrix(experts, hidden, width)}

    every = [layer() for _ in range(layers)]
    return {"embedding": matrix(words, width), "layers": every}


def loss_of(
    layer: Callable[..., jax.Array], dtype: Any = jnp.float32, scanned: bool = False
) -> Callable[..., jax.Array]:
    """The mean cross-entropy of a token; `layer(i, p, h, where segments start)`."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        h, seg = params["embedding"][tokens], tokens == 0
        if scanned:
            stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])
            h, _ = jax.lax.scan(lambda h, p: (layer(0, p, h, seg), None), h, stacked)
        else:
            for i, p in enumerate(params["layers"]):
                h = layer(i, p, h, seg)
        logits = (h @ params["embedding"].T).astype(jnp.float32)
        labels = (tokens * 7 + 1) % len(params["embedding"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean()

    return loss


def cases(
    rows: int = 64, length: int = 256, is_low: bool = True
) -> Iterator[tuple[str, Case]]:
    """The models, by name; large ones compute in bfloat16, or in float32."""
    remat, low = jax.checkpoint, jnp.bfloat16 if is_low else jnp.float32
    pieces = ga.microbatch(products, K, batch_axes=1)
    words = 1024
    big = parameters(6, 128, 512, 8, words)
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, words)
    for name, run in (("", products), (", over slots", pieces)):
        experts = remat(functools.partial(by_index, run=run))

        def mixed(i: int, p: Any, h: Any, _: Any, experts: Any = experts) -> Any:
            h = remat(attention)(p, h)
            return experts(p, h) if i % 2 else remat(dense)(p, h)

        yield f"experts by index{name}", (loss_of(mixed, low), big, tokens, {})
    small = parameters(2, 64, 128, 4, 256)
    few = jax.random.randint(jax.random.key(1), (16, 64), 0, 256)
    looped = loss_of(lambda i, p, h, _: one_hot(p, attention(p, h)))
    yield "one-hot experts in a loop", (looped, small, few, {})
    scanned = loss_of(lambda i, p, h, _: by_index(p, attention(p, h)), scanned=True)
    yield "experts by index in a scan", (scanned, small, few, {})

    def block(i: int, p: Any, h: Any, starts: Any) -> Any:
        @remat
        def layer(p: Any, h: Any) -> Any:
            seg = jnp.cumsum(starts, 1)
            same = seg[:, :, None] == seg[:, None, :]
            return dense(p, attention(p, h, same))

        return layer(p, h)

    along = {"batch_axes": 1}
    for number, size in ((1, 4 * length), (16, length // 4)):
        packed = jax.random.randint(jax.random.key(2), (number, size), 0, 256)
        name = f"{number} packed sequence{'s' * (number > 1)} of {size}"
        yield name, (loss_of(block, low), small, packed, along)
