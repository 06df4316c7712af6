"""Memory and matrix products of layers of experts, by how tokens are sent to them.

    python benchmarks/experts.py
    python benchmarks/experts.py --target h200

Every second layer of a decoder has experts, two of them for each token. Weights are
cast to bfloat16, and each part is in a `jax.checkpoint`. The gradient is computed of
the undivided batch, by `ga.value_and_grad` in k = 8 micro-batches of the same loss, and
with the line of the recipe, if there is one. Nothing runs. Temporaries are exact;
products are the arithmetic of all matrix products that XLA left. On a CPU `ragged_dot`
is a product with all experts: `--target` takes the compiler of a machine that is not
here (`make accelerators`).
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hlo
import jax
import jax.numpy as jnp
import peers
import record
from jax import lax

import ga_optax as ga

K = 8
TOP, CAPACITY = 2, 2  # experts of a token; slots over tokens
UNDIVIDED, OURS, RECIPE = "undivided", peers.OURS, "with the recipe"
# LLVM, which takes most of the time to compile, comes after the bytes are known.
UNTIMED: dict[str, Any] = {"xla_backend_optimization_level": 0}

Part = Callable[[jax.Array, Any], jax.Array]  # of [rows, tokens, width] and parameters


class Sizes(NamedTuple):
    """The sizes of the decoder and of its batch."""

    rows: int = 64
    tokens: int = 256
    width: int = 128
    hidden: int = 512
    experts: int = 8
    words: int = 1024
    heads: int = 4
    layers: int = 6


# -- Experts ---------------------------------------------------------------------------


def routed(x: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
    """The gates of the experts of each token, and which they are."""
    gates = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
    gates, best = lax.top_k(gates, TOP)
    return gates.astype(x.dtype), best


def numbered(chosen: jax.Array, axis: int) -> jax.Array:
    """The number of each token among those of its expert, along an axis."""
    return jnp.sum((jnp.cumsum(chosen, axis) - 1) * chosen, -1)


def by_row(x: jax.Array, p: Any) -> jax.Array:
    """Experts with slots for the tokens of each row, filled by a product."""
    (gates, best), (n, t, _), e = routed(x, p), x.shape, len(p["up"])
    chosen = jax.nn.one_hot(best.reshape(n, t * TOP), e, dtype=jnp.int32)
    place = numbered(chosen, 1).reshape(n, t, TOP)
    place = jax.nn.one_hot(place, CAPACITY * t * TOP // e, dtype=x.dtype)
    chosen = chosen.reshape(n, t, TOP, e).astype(x.dtype)
    send = jnp.einsum("ntke,ntkc->ntec", chosen, place)
    back = jnp.einsum("ntke,ntkc->ntec", chosen * gates[..., None], place)
    h = jnp.einsum("necd,edf->necf", jnp.einsum("ntec,ntd->necd", send, x), p["up"])
    out = jnp.einsum("necf,efd->necd", jax.nn.gelu(h), p["down"])
    return jnp.einsum("ntec,necd->ntd", back, out)


def every(x: jax.Array, p: Any) -> jax.Array:
    """Every expert for every token, weighted."""
    gates, best = routed(x, p)
    chosen = jax.nn.one_hot(best, len(p["up"]), dtype=x.dtype)
    h = jax.nn.gelu(jnp.einsum("ntd,edf->ntef", x, p["up"]))
    weights = jnp.sum(chosen * gates[..., None], 2)
    return jnp.einsum("ntef,efd,nte->ntd", h, p["down"], weights)


def dropless(x: jax.Array, p: Any) -> jax.Array:
    """All tokens, sorted by expert, so that one product serves all."""
    gates, best = routed(x, p)
    tokens, best = x.reshape(-1, x.shape[-1]), best.reshape(-1)
    order = jnp.argsort(best)
    sizes = jnp.bincount(best, length=len(p["up"])).astype(jnp.int32)
    h = jax.nn.gelu(lax.ragged_dot(tokens[order // TOP], p["up"], sizes))
    out = lax.ragged_dot(h, p["down"], sizes)[jnp.argsort(order)]
    return jnp.sum(out.reshape(*gates.shape, -1) * gates[..., None], 2)


def of_slots(p: Any, sent: jax.Array) -> jax.Array:
    """The layers of experts, of `[experts, slots, width]`."""
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", sent, p["up"]))
    return jnp.einsum("ecf,efd->ecd", h, p["down"])


def by_index(x: jax.Array, p: Any) -> jax.Array:
    """Experts with slots for the tokens of all rows, filled by an index."""
    gates, best = routed(x, p)
    tokens, best, e = x.reshape(-1, x.shape[-1]), best.reshape(-1), len(p["up"])
    place = numbered(jax.nn.one_hot(best, e, dtype=jnp.int32), 0)
    sent = jnp.zeros((e, CAPACITY * len(best) // e, x.shape[-1]), x.dtype)
    sent = sent.at[best, place].set(jnp.repeat(tokens, TOP, 0), mode="drop")
    out = of_slots(p, sent).at[best, place].get(mode="fill", fill_value=0)
    return jnp.sum(out.reshape(*gates.shape, -1) * gates[..., None], 2)


# As written, and with the line of the recipe.
KINDS: dict[str, tuple[Part, Part | None]] = {
    "capacity by row, one-hot products": (by_row, None),
    "every expert for every token": (every, None),
    "no token dropped, sorted": (dropless, ga.rowwise(dropless, in_axes=(0, None))),
    "capacity over all tokens, by index": (by_index, None),
}


# -- The decoder -----------------------------------------------------------------------


def normalised(x: jax.Array) -> jax.Array:
    """Each token over its root mean square."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide**2, -1, keepdims=True)
    return (wide * lax.rsqrt(square + 1e-6)).astype(x.dtype)


def attention(x: jax.Array, p: Any) -> jax.Array:
    """Causal attention."""
    query, key, value = (jnp.einsum("ntd,dhe->nthe", x, p[name]) for name in "qkv")
    out = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return jnp.einsum("nthe,hed->ntd", out, p["o"])


def network(x: jax.Array, p: Any) -> jax.Array:
    """The layers that all tokens go through."""
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def loss_of(experts: Part, dtype: Any = jnp.bfloat16) -> Any:
    """The loss of a decoder with such experts in every second layer."""

    def layer(part: Part, x: jax.Array, p: Any) -> jax.Array:
        run = jax.checkpoint(lambda x, p: part(normalised(x), p))
        return x + run(x, p)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda w: w.astype(dtype), params)
        x = p["words"][tokens[:, :-1]]
        for i, of_layer in enumerate(p["layers"]):
            x = layer(attention, x, of_layer["attention"])
            x = layer(experts if i % 2 else network, x, of_layer["network"])
        logits = (normalised(x) @ p["words"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], 2)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return loss


def arguments(sizes: Sizes) -> tuple[Any, jax.Array]:
    """The parameters, and tokens."""
    _, _, d, f, e, words, heads, layers = sizes
    keys = iter(jax.random.split(jax.random.key(0), 8 * layers + 2))

    def normal(fan: int, *shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / fan**0.5

    def layer(*each: int) -> Any:
        around = {name: normal(d, d, heads, d // heads) for name in "qkv"}
        inside = {"up": normal(d, *each, d, f), "down": normal(f, *each, f, d)}
        inside |= {"router": normal(d, d, e)} if each else {}
        around["o"] = normal(d, heads, d // heads, d)
        return {"attention": around, "network": inside}

    params = {
        "words": normal(d, words, d),
        "layers": [layer(*[e] * (i % 2)) for i in range(layers)],
    }
    shape = sizes.rows, sizes.tokens + 1
    return params, jax.random.randint(next(keys), shape, 0, words)


# -- The measurement -------------------------------------------------------------------


def ways(kind: str, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """The ways to compute the gradient."""
    written, other = KINDS[kind]
    loss = loss_of(written, dtype)
    found = {UNDIVIDED: jax.value_and_grad(loss), OURS: ga.value_and_grad(loss, K)}
    if other is not None:
        found[RECIPE] = ga.value_and_grad(loss_of(other, dtype), K)
    return found


def compiled(target: str | None, step: Any, args: Any) -> tuple[int, int]:
    """The bytes of temporaries and the arithmetic of matrix products."""
    if target:
        program = importlib.import_module("accelerators").compiled(target, step, *args)
        return program.temporaries, 0
    with warnings.catch_warnings():
        # What the recipe is for; the table has both.
        warnings.filterwarnings("ignore", "Each of .* micro-batches computes")
        done = step.lower(*args).compile(UNTIMED)
    return done.memory_analysis().temp_size_in_bytes, hlo.dot_flops(done.as_text())


def measure(
    sizes: Sizes, target: str | None, only: str = ""
) -> Iterator[dict[str, Any]]:
    """The rows of the table of kinds with a word in their names."""
    args = jax.eval_shape(functools.partial(arguments, sizes))
    for kind in filter(lambda name: only in name, KINDS):
        found = {
            way: compiled(target, jax.jit(step), args)
            for way, step in ways(kind).items()
        }
        whole, products = found[UNDIVIDED]
        row: dict[str, Any] = {"experts": kind}
        row["mb"] = {way: n / 1e6 for way, (n, _) in found.items()}
        row["of_undivided"] = {way: n / whole for way, (n, _) in found.items()}
        if products:
            row["products"] = {way: n / products for way, (_, n) in found.items()}
        yield row


FORMS = {
    "mb": ("MB of temporaries", ".0f"),
    "products": ("Products over those of the undivided batch", ".2f"),
}


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--target", help="a machine to compile for, such as h200")
    parser.add_argument("--only", default="", help="a word of the names of experts")
    args = parser.parse_args()
    sizes = Sizes(16, 16, 16, 32, 4, 32, 2, 2) if args.quick else Sizes()
    content: dict[str, Any] = {"num_microbatches": K} | sizes._asdict()
    versions = None
    if args.target:
        accelerators = importlib.import_module("accelerators")
        accelerators.without_devices(parser)
        versions = accelerators.versions()
        content["device"] = f"compiled for {args.target} without a device"
    results = list(measure(sizes, args.target, args.only))
    names = UNDIVIDED, OURS, RECIPE
    for field, (title, form) in FORMS.items():
        if field not in results[0]:
            continue
        cells = [
            [format(row[field][n], form) if n in row[field] else "-" for n in names]
            for row in results
        ]
        print(f"\n{title}; {K} micro-batches")
        rows = [[r["experts"], *line] for r, line in zip(results, cells, strict=True)]
        record.print_table(["experts", *names], rows)
    record.write(args.json, content | {"results": results}, versions)


if __name__ == "__main__":
    main()
