"""Memory, matrix products and time of the logits of a language model, in pieces.

    python benchmarks/head.py
    python benchmarks/head.py --targets h200 v5e

A head of 32,000 words reads 4,096 tokens of width 256 that a layer below it made. Its
logits are the largest array of the step. The ways: undivided; `jax.checkpoint` of the
body of a `lax.scan`; a `custom_vjp` whose backward pass computes the logits again, as
MaxText's vocabulary tiling; one whose gradients come in the forward pass, as Liger's
fused loss; and `ga.microbatch` of the loss as it is written. The transpose of a scan
adds gradients up in the parameters' dtype, so k times rounded in bfloat16; all others
in float32, which has half the size of the gradient more there.

Temporaries are exact. Products are the arithmetic of all matrix products that XLA left,
loops as often as they run, in units of tokens x words x width; undivided has three. The
sides take turns in one process, and a time is the median over the turns. The error is
the distance to the undivided gradient, over its norm. What is in bfloat16 is compiled
and does not run, since CPUs imitate its products. With `--targets` the programs are
compiled for machines that are not here (`make accelerators`).
"""

import collections
import functools
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import hlo
import jax
import jax.flatten_util
import jax.numpy as jnp
import record

import ga_optax as ga
from ga_optax._compiled.plan import temporaries

UNDIVIDED = "undivided"
SCAN = "jax.checkpoint in a lax.scan"
TILED = "vocabulary tiling"
FUSED = "fused loss"
OURS = "ga.microbatch"
OURS_CHECKPOINT = "ga.microbatch in jax.checkpoint"
OURS_REMAT = "ga.microbatch, remat=True"
OURS_TOKENS = "ga.microbatch, a loss for each token"
BY_HAND = (TILED, FUSED)  # that add up in float32, as ours do
DTYPES = ("float32", "bfloat16")
SCALE = 0.7  # the loss is not the last thing that is computed

Head = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Sizes(NamedTuple):
    """The sizes of a head, and the number of micro-batches."""

    words: int
    tokens: int
    width: int
    k: int


# -- The ways --------------------------------------------------------------------------


def of_tokens(w: jax.Array, h: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each token."""
    logits = (h @ w).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - picked


def undivided(w: jax.Array, h: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over the tokens."""
    return jnp.mean(of_tokens(w, h, labels))


def cut(k: int, *xs: jax.Array) -> list[jax.Array]:
    """Rows in k pieces."""
    return [x.reshape(k, -1, *x.shape[1:]) for x in xs]


def in_scan(k: int, head: Head) -> Head:
    """The mean over k pieces."""

    def scanned(w: jax.Array, h: jax.Array, labels: jax.Array) -> jax.Array:
        def body(total: jax.Array, piece: Any) -> Any:
            return total + head(w, *piece) / k, None

        return jax.lax.scan(body, jnp.zeros([]), cut(k, h, labels))[0]

    return scanned


def tiled(k: int) -> Head:
    """A head whose backward pass recomputes the logits, and adds up gradients."""

    def forward(*args: Any) -> Any:
        return head(*args), args

    def backward(args: Any, ct: jax.Array) -> Any:
        w, h, labels = args

        def body(dw: jax.Array, piece: Any) -> Any:
            pull = jax.vjp(lambda w, h: undivided(w, h, piece[1]), w, piece[0])[1]
            dw_part, dh = pull(ct / k)
            return dw + dw_part, dh

        start = jnp.zeros(w.shape, jnp.float32)
        dw, dh = jax.lax.scan(body, start, cut(k, h, labels))
        return dw.astype(w.dtype), dh.reshape(h.shape), None

    head = jax.custom_vjp(in_scan(k, undivided))
    head.defvjp(forward, backward)
    return head


def fused(k: int) -> Head:
    """The gradients come with the value, and the backward pass scales them."""

    def forward(w: jax.Array, h: jax.Array, labels: jax.Array) -> Any:
        def body(carry: Any, piece: Any) -> Any:
            loss, (dw, dh) = jax.value_and_grad(undivided, (0, 1))(w, *piece)
            return (carry[0] + loss / k, carry[1] + dw / k), dh / k

        start = jnp.zeros([]), jnp.zeros(w.shape, jnp.float32)
        (loss, dw), dh = jax.lax.scan(body, start, cut(k, h, labels))
        return loss, (dw.astype(w.dtype), dh.reshape(h.shape))

    def backward(grads: Any, ct: jax.Array) -> Any:
        return *((ct * g).astype(g.dtype) for g in grads), None

    head = jax.custom_vjp(in_scan(k, undivided))
    head.defvjp(forward, backward)
    return head


def heads(k: int) -> dict[str, Head]:
    """Every way, by name."""
    ours = functools.partial(ga.microbatch, batch_argnums=(1, 2))
    for_each = ours(of_tokens, k)
    return {
        UNDIVIDED: undivided,
        SCAN: in_scan(k, jax.checkpoint(undivided, prevent_cse=False)),
        TILED: tiled(k),
        FUSED: fused(k),
        OURS: ours(undivided, k),
        OURS_CHECKPOINT: jax.checkpoint(ours(undivided, k)),
        OURS_REMAT: ours(undivided, k, remat=True),
        OURS_TOKENS: lambda *args: jnp.mean(for_each(*args)),
    }


# -- The measurement -------------------------------------------------------------------


def step_of(head: Head) -> Any:
    """The value and gradient of a model that ends in this head, jitted."""

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ params["in"])
        return SCALE * head(params["out"], h, labels) + 1e-3 * jnp.mean(h**2)

    return jax.jit(jax.value_and_grad(loss))


def arguments(sizes: Sizes, dtype: str) -> Any:
    """Parameters, what goes into the layer below, and labels."""
    words, tokens, width, _ = sizes
    keys = jax.random.split(jax.random.key(0), 4)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return (jax.random.normal(key, shape) / width**0.5).astype(dtype)

    params = {"in": normal(keys[0], width, width), "out": normal(keys[1], width, words)}
    labels = jax.random.randint(keys[3], (tokens,), 0, words)
    return params, normal(keys[2], tokens, width) * width**0.5, labels


def measure(sizes: Sizes, dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    """The measurements of each way, by field and way."""
    args = arguments(sizes, dtype)
    below = 2 * 2 * sizes.tokens * sizes.width**2  # the layer below, and its gradient
    one = 2 * sizes.tokens * sizes.words * sizes.width
    measurements: dict[str, dict[str, float]] = collections.defaultdict(dict)
    programs = {}
    for way, head in heads(sizes.k).items():
        programs[way] = program = step_of(head).lower(*args).compile()
        measurements["temporaries"][way] = temporaries(program.memory_analysis())
        measurements["products"][way] = (hlo.dot_flops(program.as_text()) - below) / one
    return measurements | (run(programs, args, rounds) if dtype == "float32" else {})


def run(programs: dict[str, Any], args: Any, rounds: int) -> dict[str, dict[str, Any]]:
    """The seconds and the error of each way."""
    seconds, error, right = collections.defaultdict(list), {}, None
    for turn in range(rounds + 1):
        for way, program in programs.items():
            start = time.perf_counter()
            out = jax.block_until_ready(program(*args))
            elapsed = time.perf_counter() - start
            if turn:  # the first round warms caches and pages
                seconds[way].append(elapsed)
                continue
            grad = jax.flatten_util.ravel_pytree(out[1])[0]
            right = grad if right is None else right
            error[way] = float(jnp.linalg.norm(grad - right) / jnp.linalg.norm(right))
    median = {way: statistics.median(times) for way, times in seconds.items()}
    return {"seconds": median, "error": error}


def measure_for(target: str, sizes: Sizes, dtype: str) -> dict[str, dict[str, float]]:
    """The temporaries of each way on a machine that is not here."""
    compiled = importlib.import_module("accelerators").compiled
    args = jax.eval_shape(lambda: arguments(sizes, dtype))
    ways = heads(sizes.k).items()
    sizes_of = {way: compiled(target, step_of(h), *args).temporaries for way, h in ways}
    return {"temporaries": sizes_of}


def with_ratios(
    measurements: dict[str, dict[str, float]],
) -> dict[str, dict[str, float]]:
    """The measurements, with fields computed from them."""
    size = measurements["temporaries"]
    best = min(size[way] for way in BY_HAND)
    measurements["mb"] = {way: s / 1e6 for way, s in size.items()}
    measurements["over_best"] = {way: s / best for way, s in size.items()}
    if seconds := measurements.get("seconds"):
        whole = seconds[UNDIVIDED]
        measurements["time_ratio"] = {way: s / whole for way, s in seconds.items()}
    return measurements


# -- All of it -------------------------------------------------------------------------

FORMS = {
    "mb": ("MB of temporaries", ".1f"),
    "over_best": ("Temporaries over the best by hand with sums in float32", ".2f"),
    "products": ("Matrix products", ".2f"),
    "time_ratio": ("Time over undivided", ".2f"),
    "error": ("Distance to the undivided gradient, over its norm", ".0e"),
}


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    quick_and_not = {"words": (256, 32_000), "tokens": (64, 4_096)}
    quick_and_not |= {"width": (16, 256), "micro_batches": (4, 16)}
    for name in quick_and_not:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--rounds", type=int, help="calls of each side")
    parser.add_argument("--targets", nargs="*", help="machines to compile for")
    args = parser.parse_args()
    asked = [getattr(args, name) for name in quick_and_not]
    usual = [pair[not args.quick] for pair in quick_and_not.values()]
    sizes = Sizes(*(a or b for a, b in zip(asked, usual, strict=True)))
    versions: dict[str, str] = {}
    if args.targets:
        accelerators = importlib.import_module("accelerators")
        accelerators.without_devices(parser)
        versions = accelerators.versions()
        names = ", ".join(args.targets)
        content: dict[str, Any] = {"device": f"compiled for {names} without a device"}
        columns = {
            f"{target}, {dtype}": with_ratios(measure_for(target, sizes, dtype))
            for target in args.targets
            for dtype in DTYPES
        }
    else:
        rounds = args.rounds or (1 if args.quick else 3)
        content = {"rounds": rounds}
        columns = {d: with_ratios(measure(sizes, d, rounds)) for d in DTYPES}
    rows = rows_of(columns)
    for field, (title, form) in FORMS.items():
        if field in rows[0]:
            print(f"\n{title}; {sizes.tokens:,} tokens, {sizes.words:,} words")
            cells = [[format(x, form) for x in row[field].values()] for row in rows]
            named = [[r["way"], *line] for r, line in zip(rows, cells, strict=True)]
            record.print_table(["way", *rows[0][field]], named)
    record.write(args.json, content | sizes._asdict() | {"results": rows}, versions)


def rows_of(columns: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """The rows of the table: a way, and for each field a number for each column."""
    rows: dict[str, Any] = {}
    for column, fields in columns.items():
        for field, numbers in fields.items():
            for way, number in numbers.items():
                row = rows.setdefault(way, {"way": way})
                row.setdefault(field, {})[column] = number
    return list(rows.values())


if __name__ == "__main__":
    main()
