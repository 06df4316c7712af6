"""One sequence whose tokens are the rows: what each kind of layer takes.

    python benchmarks/sequence.py --json benchmarks/results/sequence.json
    python benchmarks/sequence.py --longest --json benchmarks/results/longest.json

Each loss reads one sequence, and is written as anyone writes it. It is divided along
the axis of the tokens: `ga.value_and_grad(loss, k, batch_axes=1)`. A row says how far
the gradient is from that of the undivided sequence, and how many bytes of temporaries,
by XLA, and how many products it takes over those of the undivided sequence: with the
default, and with `residual_bytes=0`. Then the decoder of the documentation, over
lengths and numbers of micro-batches. `--longest` asks the compiler of an H200 what a
step of a decoder of a billion parameters takes for long sequences; it needs the
compilers that `make accelerators` installs.
"""

import dataclasses
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import compare
import flax.linen
import jax
import jax.numpy as jnp
import optax
import record
import reference_model
from flax import nnx

import ga_optax as ga

LENGTH, WIDTH, HEADS, WORDS, BLOCKS, K = 1024, 32, 4, 64, 2, 8
Loss = Callable[[Any, Any], jax.Array]
Mix = Callable[[Any, jax.Array, Any], jax.Array]  # of parameters, values, the batch


# == Layers ============================================================================
# What mixes the tokens of `h`, [1, tokens, width].


def heads_of(p: Any, h: jax.Array, names: str = "qkv") -> list[jax.Array]:
    """Queries, keys and values, [1, tokens, heads, width of a head]."""
    return [(h @ p[name]).reshape(*h.shape[:2], HEADS, -1) for name in names]


def attention(p: Any, h: jax.Array, batch: Any, **options: Any) -> jax.Array:
    """JAX's attention, with a causal mask."""
    given: Any = {"is_causal": True} | options
    q, k, v = heads_of(p, h)
    y = jax.nn.dot_product_attention(q, k, v, **given)
    return y.reshape(h.shape) @ p["o"]


def by_hand(
    p: Any, h: jax.Array, allowed: jax.Array, bias: jax.Array | float = 0.0
) -> jax.Array:
    """Attention as papers write it: scores, a mask, a softmax."""
    q, k, v = heads_of(p, h)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + bias
    scores = jnp.where(allowed, scores, -1e9)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return y.reshape(h.shape) @ p["o"]


def grouped(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Half as many keys and values as queries."""
    q, k, v = heads_of(p, h)
    y = jax.nn.dot_product_attention(q, k[:, :, ::2], v[:, :, ::2], is_causal=True)
    return y.reshape(h.shape) @ p["o"]


def packed(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Tokens of one document alone see each other."""
    segment = batch["segment"]
    own = segment[:, None, :, None] == segment[:, None, None, :]
    return by_hand(p, h, own & jnp.tril(jnp.ones((h.shape[1],) * 2, bool)))


def alibi(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """A bias by distance."""
    place = jnp.arange(h.shape[1])
    slopes = 2.0 ** -jnp.arange(1.0, HEADS + 1)
    bias = -slopes[:, None, None] * (place[:, None] - place[None, :])
    return by_hand(p, h, place[:, None] >= place[None, :], bias)


def rope(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Rotary positions."""
    q, k, v = heads_of(p, h)
    y = jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)
    return y.reshape(h.shape) @ p["o"]


def turned(x: jax.Array) -> jax.Array:
    """Heads turned by the angles of their positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cosine, sine = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)


def cross(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Queries of this sequence, keys and values of another one, which has no rows."""
    [q], (k, v) = heads_of(p, h, "q"), heads_of(p, batch["other"], "kv")
    y = jax.nn.dot_product_attention(q, k, v)
    return attention(p, h + y.reshape(h.shape), batch)


def convolution(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Each channel over the last four tokens."""
    return jax.lax.conv_general_dilated(
        h,
        p["taps"][:, None, :],
        (1,),
        [(3, 0)],
        feature_group_count=WIDTH,
        dimension_numbers=("NWC", "WIO", "NWC"),
    )


def shift(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """A mixture with the token before."""
    before = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return (h * p["mix"] + before * (1 - p["mix"])) @ p["o"]


def recurrent(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """A scan over time, with the state of a recurrent network."""

    def step(state: jax.Array, x: jax.Array) -> Any:
        state = jnp.tanh(x + state @ p["o"])
        return state, state

    start = jnp.zeros((h.shape[0], WIDTH))
    return jax.lax.scan(step, start, (h @ p["q"]).swapaxes(0, 1))[1].swapaxes(0, 1)


def linear(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Linear attention by running sums."""
    q, k, v = heads_of(p, h)
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    kv = jnp.cumsum(jnp.einsum("bthd,bthe->bthde", k, v), axis=1)
    y = jnp.einsum("bthd,bthde->bthe", q, kv)
    norm = jnp.einsum("bthd,bthd->bth", q, jnp.cumsum(k, axis=1))
    return (y / norm[..., None]).reshape(h.shape) @ p["o"]


def state_space(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """A diagonal state whose decay depends on the token, by a scan over time."""
    decay, new = jax.nn.sigmoid(h @ p["q"]), h @ p["k"]

    def step(state: jax.Array, x: Any) -> Any:
        a, b = x
        state = a * state + (1 - a) * b
        return state, state

    pairs = decay.swapaxes(0, 1), new.swapaxes(0, 1)
    y = jax.lax.scan(step, jnp.zeros((h.shape[0], WIDTH)), pairs)[1]
    return (y.swapaxes(0, 1) * jax.nn.silu(h @ p["v"])) @ p["o"]


def experts(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Attention, and a mixture of four experts of which each token takes one."""
    h = h + attention(p, h, batch)
    gates = jax.nn.softmax(h @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 4) * gates
    y = jnp.einsum("btw,ewf->btef", h, p["experts"])
    return jnp.einsum("btef,bte->btf", jax.nn.gelu(y), chosen)


def dropped(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Attention, and dropout behind it."""
    h = attention(p, h, batch)
    return jnp.where(jax.random.bernoulli(batch["key"], 0.9, h.shape), h / 0.9, 0)


def linen(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Flax linen's attention."""
    mask = flax.linen.make_causal_mask(jnp.ones(h.shape[:2]))
    layer: Any = flax.linen.MultiHeadDotProductAttention(HEADS)
    return layer.apply({"params": p["linen"]}, h, mask=mask)


def of_nnx(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """Flax NNX's attention."""
    layer = nnx.merge(_nnx()[0], p["nnx"])
    mask = nnx.make_causal_mask(jnp.ones(h.shape[:2]))
    return layer(h, mask=mask, decode=False)


@functools.cache
def _nnx() -> Any:
    return nnx.split(nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0)))


def by_scan(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """A decay and a running sum by `ga.associative_scan`."""

    def joined(one: Any, two: Any) -> Any:
        return one[0] * two[0], one[1] * two[0] + two[1]

    pair = jax.nn.sigmoid(h @ p["q"]), h @ p["k"]
    return ga.associative_scan(joined, pair, axis=1)[1] @ p["o"]


def window(p: Any, h: jax.Array, batch: Any) -> jax.Array:
    """A causal mask over the last 64 tokens."""
    return attention(p, h, batch, local_window_size=(64, 0))


LAYERS: dict[str, Mix] = {
    "`dot_product_attention`, causal": attention,
    "labels by slices": attention,
    "inputs and labels by slices": attention,
    "sliding window": window,
    "grouped queries": grouped,
    "packed segments": packed,
    "positions by a table": attention,
    "RoPE": rope,
    "ALiBi": alibi,
    "Flax linen's attention": linen,
    "Flax NNX's attention": of_nnx,
    "cross-attention to another sequence": cross,
    "causal convolution": convolution,
    "token shift": shift,
    "`lax.scan` over time": recurrent,
    "linear attention by `cumsum`": linear,
    "a state-space layer by `lax.scan`": state_space,
    "a mixture of experts": experts,
    "dropout": dropped,
    "`ga.associative_scan`": by_scan,
}


def cases(length: int = LENGTH) -> Iterator[tuple[str, compare.Case]]:
    """All losses, by name."""
    for name, mix in LAYERS.items():
        yield name, (loss_of(name, mix), *arguments(length))


def loss_of(name: str, mix: Mix) -> Loss:
    """The mean cross-entropy of the next token, of two blocks."""

    @jax.checkpoint
    def block(h: jax.Array, p: Any, batch: Any) -> jax.Array:
        norm = jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
        h = h + mix(p, h * norm, batch)
        return h + jax.nn.gelu(h @ p["up"]) @ p["down"]

    def loss(params: Any, batch: Any) -> jax.Array:
        tokens, labels = batch["tokens"], batch["labels"]
        if name == "inputs and labels by slices":
            tokens, labels = tokens[:, :-1], tokens[:, 1:]
        h = params["embedding"][tokens]
        if name == "positions by a table":
            h = h + params["places"][: h.shape[1]]
        for p in params["blocks"]:
            h = block(h, p, batch)
        logits = h @ params["embedding"].T
        if name == "labels by slices":
            logits, labels = logits[:, :-1], tokens[:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(each)

    return loss


def arguments(length: int) -> tuple[Any, Any]:
    """Parameters of all layers, and one sequence."""
    keys = map(jax.random.key, itertools.count())

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    def block() -> Any:
        p: Any = {name: matrix(WIDTH, WIDTH) for name in "qkvo"}
        p |= {"up": matrix(WIDTH, 4 * WIDTH), "down": matrix(4 * WIDTH, WIDTH)}
        p |= {"router": matrix(WIDTH, 4), "experts": matrix(4, WIDTH, WIDTH)}
        p |= {"taps": matrix(4, WIDTH), "mix": jnp.linspace(0, 1, WIDTH)}
        layer: Any = flax.linen.MultiHeadDotProductAttention(HEADS)
        p["linen"] = layer.init(next(keys), jnp.zeros((1, 2, WIDTH)))["params"]
        return p | {"nnx": jax.tree.map(jnp.asarray, _nnx()[1])}

    params = {"blocks": [block() for _ in range(BLOCKS)]}
    params |= {"embedding": matrix(WORDS, WIDTH), "places": matrix(length, WIDTH)}
    tokens = jax.random.randint(next(keys), (1, length + 1), 0, WORDS)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    batch["segment"] = jnp.arange(length)[None] * 5 // length
    batch["other"] = jax.random.normal(next(keys), (1, 48, WIDTH))
    return params, batch | {"key": jax.random.key(7)}


AXES = {"tokens": 1, "labels": 1, "segment": 1, "other": None, "key": None}


# == What it takes =====================================================================


def taken(fun: Callable[..., Any], *args: Any) -> dict[str, int]:
    """The bytes of temporaries, by XLA, and the operations of matrix products."""
    nbytes = compare.temporaries(jax.jit(fun).lower(*args).compile())
    return {"bytes": nbytes, "products": compare.operations(fun, *args)[0]}


def of_case(case: compare.Case) -> dict[str, float]:
    """Bytes and products over those of the undivided sequence, and the distance."""
    loss, params, batch = case
    undivided = jax.value_and_grad(loss)
    whole, row = taken(undivided, params, batch), {}
    for name, limit in (("default", None), ("0", 0)):
        options = {"batch_axes": AXES, "residual_bytes": limit}
        ours = ga.value_and_grad(loss, K, **options)
        found = taken(ours, params, batch)
        row |= {f"{what}, {name}": found[what] / whole[what] for what in whole}
        if limit is None:
            pair = jax.jit(ours)(params, batch), jax.jit(undivided)(params, batch)
            row["apart"] = max(map(_apart, *map(jax.tree.leaves, pair)))
    return row


def _apart(x: jax.Array, y: jax.Array) -> float:
    """The largest difference over the largest number; a gradient may be about zero."""
    return float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-3))


def of_decoder(length: int) -> Iterator[dict[str, Any]]:
    """Megabytes, and products over those of the undivided sequence, by k."""
    config = reference_model.Config(128, 4, 4, 512, 4, 4096, length, 1)
    params = reference_model.init(config)
    tokens = jax.random.randint(jax.random.key(1), (2, 1, length), 0, 4096)
    loss = functools.partial(reference_model.loss_of_pairs, config)
    whole = taken(jax.value_and_grad(loss), params, *tokens)
    yield {"tokens": length, "k": 1, "MB": whole["bytes"] / 1e6, "products": 1.0}
    for k, limit in itertools.product((8, 32), (None, 0)):
        options = {"batch_argnums": (1, 2), "batch_axes": 1, "residual_bytes": limit}
        found = taken(ga.value_and_grad(loss, k, **options), params, *tokens)
        over = found["products"] / whole["products"]
        row = {"tokens": length, "k": k, "residual_bytes": limit}
        yield row | {"MB": found["bytes"] / 1e6, "products": over}


# == The longest sequence ==============================================================

UNDIVIDED, PIECES, ROWS = "undivided", "logits and networks in pieces", "tokens as rows"
MUCH = 10**10  # the bytes with which no layer runs forward a third time
# What fits into 64 GB, or just does not: the way, the tokens, k, and `residual_bytes`.
LONGEST: tuple[tuple[str, int, int, int | None], ...] = (
    (UNDIVIDED, 10240, 1, None),
    (UNDIVIDED, 12288, 1, None),
    (PIECES, 8192, 32, None),
    (PIECES, 10240, 32, None),
    (ROWS, 57344, 64, None),
    (ROWS, 65536, 64, None),
    (ROWS, 65536, 64, MUCH),
)


def longest() -> Iterator[dict[str, Any]]:
    """What a step with Adam takes of an H200, with a billion parameters, by way."""
    accelerators = importlib.import_module("accelerators")
    billion = importlib.import_module("scale").SIZES["decoder_1b"]
    for way, length, k, limit in LONGEST:
        config = dataclasses.replace(billion, length=length)
        loss = functools.partial(reference_model.loss_of_pairs, config)
        tokens = accelerators.shape((1, length), jnp.int32)
        params = jax.eval_shape(functools.partial(reference_model.init, config))
        args = params, tokens, tokens
        whole, _ = compare.operations(jax.value_and_grad(loss), *args)
        gradient = counted = jax.value_and_grad(loss)
        if way == PIECES:
            apart = functools.partial(in_pieces, k=k)
            gradient = jax.value_and_grad(functools.partial(loss, apart=apart))
            apart = jax.checkpoint  # the same products, in the open
            counted = jax.value_and_grad(functools.partial(loss, apart=apart))
        elif way == ROWS:
            options = {"batch_argnums": (1, 2), "batch_axes": 1}
            gradient = ga.value_and_grad(loss, k, **options, residual_bytes=limit)
            counted = gradient
        over = compare.operations(counted, *args)[0] / whole
        state = jax.eval_shape(optax.adam(1e-3).init, params)
        program = accelerators.compiled(
            "h200", step_of(gradient), params, state, tokens, tokens
        )
        row = {"way": way, "tokens": length, "k": k, "residual_bytes": limit}
        yield row | {"GB": program.needed / 1e9, "products": over}


def in_pieces(fun: Callable[..., Any], k: int) -> Callable[..., Any]:
    """A function of tokens, in pieces whose values are computed again."""
    return jax.checkpoint(ga.microbatch(fun, k, batch_axes=1))


def step_of(gradient: Callable[..., Any]) -> Any:
    """A step of Adam."""
    opt = optax.adam(1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        value, grads = gradient(params, tokens, labels)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


# == Tables ============================================================================


def printed(rows: list[dict[str, Any]]) -> None:
    """Prints a table, with numbers in two decimals."""
    head = list(dict.fromkeys(name for row in rows for name in row))

    def cell(x: Any) -> Any:
        if isinstance(x, float):
            return f"{x:.1e}" if 0 < x < 1e-3 else f"{x:.2f}"
        return "" if x is None else x

    print()
    record.print_table(head, [[cell(row.get(name)) for name in head] for row in rows])


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--only", default="", help="a word of the names of layers")
    parser.add_argument("--longest", action="store_true", help="by H200's compiler")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is computed whole is in the table
        if args.longest:
            results["longest"] = list(longest())
        else:
            chosen = (
                x for x in cases(64 if args.quick else LENGTH) if args.only in x[0]
            )
            some = itertools.islice(chosen, 1 if args.quick else None)
            results["layers"] = [{"layer": name} | of_case(case) for name, case in some]
            lengths = (64,) if args.quick else (1024, 2048)
            results["decoder"] = [row for n in lengths for row in of_decoder(n)]
    for rows in results.values():
        printed(rows)
    record.write(args.json, {"K": K, **results})


if __name__ == "__main__":
    main()
