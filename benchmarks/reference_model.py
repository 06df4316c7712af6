"""The reference model, "350M": a decoder with grouped-query attention.

Hidden 1024, 16 heads, 4 key and value heads, intermediate 4096, 24 layers, vocabulary
32768. Parameters and the loss are float32, and arithmetic is bfloat16. The model scans
over its layers and rematerialises them, as one does if memory is short.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of its micro-batches."""

    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    intermediate: int = 4096
    layers: int = 24
    vocabulary: int = 32768
    length: int = 1024  # targets in a row
    rows: int = 8  # of a micro-batch

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.length


TINY = Config(32, 4, 2, 96, 3, 160, 20, 2)


def init(config: Config) -> Any:
    """Random parameters. Those of the layers are stacked."""
    kv = config.hidden // config.heads * config.kv_heads
    wide = (config.hidden, config.intermediate)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (config.hidden, config.hidden),
        "key": (config.hidden, kv),
        "value": (config.hidden, kv),
        "output": (config.hidden, config.hidden),
        "gate": wide,
        "up": wide,
        "down": wide[::-1],
    }
    shapes = {name: (config.layers, *shape) for name, shape in shapes.items()}
    shapes["embedding"] = (config.vocabulary, config.hidden)
    shapes["head"] = (config.hidden, config.vocabulary)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    # Scaled by fan-in; the embedding as if its fan-in were the hidden width.
    params = {
        name: jax.random.normal(key, shape) * config.hidden**-0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params["down"] *= (config.hidden / config.intermediate) ** 0.5
    norms = {f"norm_{name}": jnp.ones((config.layers, config.hidden)) for name in "ab"}
    norms["norm_final"] = jnp.ones(config.hidden)
    layers = {n: params.pop(n) for n in list(params) if n not in ("embedding", "head")}
    layers |= {name: norms.pop(name) for name in ("norm_a", "norm_b")}
    return params | norms | {"layers": layers}


def loss(
    config: Config,
    params: Any,
    tokens: jax.Array,
    pin: Callable[[jax.Array], jax.Array] = lambda h: h,
) -> jax.Array:
    """Mean cross-entropy of the next token; tokens are int32 `[rows, length + 1]`.

    `pin` may set a sharding on activations and logits, whose first axis is the rows.
    """
    return loss_of_pairs(config, params, tokens[:, :-1], tokens[:, 1:], pin)


def loss_of_pairs(
    config: Config,
    params: Any,
    tokens: jax.Array,
    labels: jax.Array,
    pin: Callable[[jax.Array], jax.Array] = lambda h: h,
    apart: Callable[[Any], Any] = lambda fun: fun,
) -> jax.Array:
    """The same of tokens and labels, int32 `[rows, length]`.

    `apart` may run a function of rows of tokens in pieces: the network of a layer, and
    the head with the cross-entropy.
    """
    bfloat16 = jnp.bfloat16
    h = pin(params["embedding"].astype(bfloat16)[tokens])
    turns = _turns(config)

    @jax.checkpoint
    def layer(h: jax.Array, p: Any) -> Any:
        p = {name: x.astype(bfloat16) for name, x in p.items()}
        h = h + _attention(config, p, _norm(h, p["norm_a"]), turns)
        h = h + apart(network)(p, _norm(h, p["norm_b"]))
        return pin(h), None

    def network(p: Any, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]

    def entropies(head: jax.Array, x: Any) -> jax.Array:
        logits = pin(x[0] @ head.astype(bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, x[1])

    h, _ = jax.lax.scan(layer, h, params["layers"])
    h = _norm(h, params["norm_final"].astype(bfloat16))
    return jnp.mean(apart(entropies)(params["head"], (h, labels)))


def _norm(h: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides by the root of the mean square, computed in float32."""
    square = jnp.mean(jnp.square(h.astype(jnp.float32)), axis=-1, keepdims=True)
    return h * jax.lax.rsqrt(square + 1e-6).astype(h.dtype) * scale[None, None, :]


def _turns(config: Config) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angles of rotary positions, `[1, length, 1, half]`."""
    half = config.hidden // config.heads // 2
    rates = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions = jnp.arange(config.length, dtype=jnp.float32)
    angles = (positions[:, None] * rates[None, :])[None, :, None, :]
    return jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)


def _attention(config: Config, p: Any, x: jax.Array, turns: Any) -> jax.Array:
    """Causal attention with rotary positions; JAX's own, without a kernel library."""
    cosine, sine = turns
    width = config.hidden // config.heads

    def heads(name: str) -> jax.Array:
        return (x @ p[name]).reshape(*x.shape[:2], -1, width)

    def turned(y: jax.Array) -> jax.Array:
        a, b = jnp.split(y, 2, axis=-1)
        return jnp.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)

    y = jax.nn.dot_product_attention(
        turned(heads("query")), turned(heads("key")), heads("value"), is_causal=True
    )
    return y.reshape(x.shape) @ p["output"]


def gradient_shapes(params: Any) -> set[tuple[int, ...]]:
    """The shapes of the gradients of matrices: stacked, of one layer, transposed."""
    matrices = [params["embedding"], params["head"]]
    matrices += [x for x in jax.tree.leaves(params["layers"]) if x.ndim == 3]
    shapes = {x.shape for x in matrices} | {x.shape[-2:] for x in matrices}
    return shapes | {(*shape[:-2], shape[-1], shape[-2]) for shape in shapes}
