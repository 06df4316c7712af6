"""The error rates of `verify`: right and wrong random losses, in three dtypes.

    python benchmarks/verify_rates.py
    python benchmarks/verify_rates.py --dtypes bfloat16 --first 50 --last 100

A case is a random network (dense, convolution, attention, scan, experts, embedding), a
loss for each token, and a reduction to one number: right for accumulation, or wrong for
a known cause. "bfloat16" is mixed precision: the network computes in
bfloat16, and logits, losses and sums in bfloat16 or float32, at random.

Compiling small programs takes nearly all of the time: an hour on two CPU cores, and a
third of that with XLA_FLAGS=--xla_cpu_use_fusion_emitters=false of jaxlib 0.10. A wrong
answer is printed at once.
"""

# ruff: noqa: D103 - the names of the cases say it

import collections
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import record

import ga_optax as ga
from ga_optax import Cause

DTYPES = ("float32", "bfloat16", "float64")
TOKENS, SIZE, CLASSES = 3, 4, 5
SPLITS = ((2, 4), (4, 2), (4, 4), (8, 2))  # micro-batches, and the rows of each

OK = {Cause.EQUAL, Cause.ROUNDING}


class Model(NamedTuple):
    """A network, a loss for each token, and a batch for them.

    Attributes:
      params: its parameters.
      batch: x [rows, tokens, size], y [rows, tokens], and weights of tokens.
      k: the number of micro-batches.
      logits: of params and batch, [rows, tokens, classes].
      losses: of params and batch, [rows, tokens].
      draw: the random numbers of this case.
    """

    params: Any
    batch: Any
    k: int
    logits: Callable[..., Any]
    losses: Callable[..., Any]
    draw: np.random.Generator


class Case(NamedTuple):
    """The arguments of `verify`, and the causes that are right."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    causes: set[Cause]


# -- Networks: random parameters, and a function of them and x -------------------------

ACTIVATIONS = (jnp.tanh, jax.nn.gelu, jax.nn.silu, jax.nn.relu, jax.nn.softplus)


def dense(p: Any, x: Any, act: Any) -> Any:
    return act(x @ p["a"] + p["bias"]) @ p["c"]


def linear(p: Any, x: Any, act: Any) -> Any:
    return x @ p["c"] + p["last"]


def normalised(p: Any, x: Any, act: Any) -> Any:
    h = x @ p["a"]
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        h.var(-1, keepdims=True) + jnp.asarray(1e-3, h.dtype)
    )
    return act(h * p["bias"]) @ p["c"]


def convolution(p: Any, x: Any, act: Any) -> Any:
    h = jax.lax.conv_general_dilated(
        x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return act(h) @ p["c"]


def attention(p: Any, x: Any, act: Any) -> Any:
    q, k, v = (x @ w for w in p["layers"])
    return act(jax.nn.softmax(q @ k.mT, -1) @ v) @ p["c"]


def layers(p: Any, x: Any, act: Any) -> Any:
    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        return h + act(h @ w), None

    return jax.lax.scan(layer, x, p["layers"])[0] @ p["c"]


def experts(p: Any, x: Any, act: Any) -> Any:
    gates = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 3, dtype=gates.dtype)
    out = jnp.einsum("bti,eij->btej", x, p["layers"])
    return jnp.einsum("bte,btej->btj", gates * chosen, act(out)) @ p["c"]


def embedding(p: Any, x: Any, act: Any) -> Any:
    ids = (jnp.abs(x[..., 0]) * 4).astype(jnp.int32) % 9
    return act(p["table"][ids]) @ p["c"]


NETWORKS = (
    *(dense, linear, normalised, convolution, attention, layers, experts, embedding),
)


def parameters(r: np.random.Generator) -> dict[str, np.ndarray]:
    """The parameters of all networks; most have a gradient of zero, which is right."""
    shapes = {
        "a": (SIZE, SIZE),
        "bias": (SIZE,),
        "c": (SIZE, CLASSES),
        "last": (CLASSES,),
        "kernel": (3, SIZE, SIZE),
        "layers": (3, SIZE, SIZE),
        "router": (SIZE, 3),
        "table": (9, SIZE),
    }
    return {name: r.normal(size=shape) / 1.5 for name, shape in shapes.items()}


# -- Losses of a token -----------------------------------------------------------------


def cross_entropy(logits: Any, y: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)[..., 0]


def squares(logits: Any, y: Any) -> Any:
    return jnp.sum((logits - jax.nn.one_hot(y, CLASSES, dtype=logits.dtype)) ** 2, -1)


def logistic(logits: Any, y: Any) -> Any:
    return jax.nn.softplus(jnp.where(y % 2 == 0, logits[..., 0], -logits[..., 0]))


def huber(logits: Any, y: Any) -> Any:
    error = jnp.abs(logits[..., 1] - y.astype(logits.dtype))
    return jnp.where(error < 1, error**2 / 2, error - jnp.asarray(0.5, error.dtype))


LOSSES = (cross_entropy, squares, logistic, huber)


def model(r: np.random.Generator, dtype: str) -> Model:
    """A random one."""
    store = jnp.dtype("float64" if dtype == "float64" else "float32")

    def pick(*dtypes: str) -> Any:
        return jnp.dtype(r.choice(dtypes) if dtype == "bfloat16" else dtype)

    half, full = "bfloat16", "float32"
    of_params, of_inputs = pick(full, full, half), pick(full, full, half)
    of_network, of_logits, of_sums = pick(half), pick(half, full), pick(half, full)
    network = NETWORKS[r.integers(len(NETWORKS))]
    act = ACTIVATIONS[r.integers(len(ACTIVATIONS))]
    loss = LOSSES[r.integers(len(LOSSES))]
    k, rows = SPLITS[r.integers(len(SPLITS))]
    counts = r.permutation(np.arange(k) * rows * TOKENS // k + 1)
    mask = np.zeros((k, rows * TOKENS))
    for row, count in zip(mask, counts, strict=True):
        row[r.permutation(rows * TOKENS)[:count]] = 1
    shape = (k * rows, TOKENS)
    batch = {
        "x": jnp.asarray(r.normal(size=(*shape, SIZE)), of_inputs),
        "y": jnp.asarray(r.integers(0, CLASSES, shape), jnp.int32),
        "mask": jnp.asarray(mask.reshape(shape), store),
        "weight": jnp.asarray(r.uniform(0.1, 2, shape) ** 2, store),
    }

    def logits(params: Any, batch: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(of_network), params)
        return network(params, batch["x"].astype(of_network), act).astype(of_logits)

    def losses(params: Any, batch: Any) -> Any:
        return loss(logits(params, batch), batch["y"]).astype(of_sums)

    params = {name: jnp.asarray(x, of_params) for name, x in parameters(r).items()}
    return Model(params, batch, k, logits, losses, r)


# -- One number of them: right for accumulation ----------------------------------------

Way = Callable[[Model], tuple[Callable[..., Any], dict[str, Any]]]


def count_kept(batch: Any) -> Any:
    return batch["mask"].sum()


def weighed(batch: Any) -> Any:
    return batch["weight"].sum()


def weighted_mean(losses: Any, weights: Any) -> Any:
    weights = weights.astype(losses.dtype)
    total = jnp.maximum(weights.sum(), jnp.asarray(1e-3, losses.dtype))
    return (losses * weights).sum() / total


def penalty(params: Any) -> Any:
    squares = (jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(params))
    return 0.01 * functools.reduce(jnp.add, squares)


def plus(loss: Any, term: Any) -> Any:
    return loss + term.astype(loss.dtype)


def mean(m: Model) -> Any:
    return lambda p, b: m.losses(p, b).mean(), {}


def mean_over_rows(m: Model) -> Any:
    return lambda p, b: m.losses(p, b).sum() / len(b["y"]), {}


def mean_of_maxima_of_rows(m: Model) -> Any:
    return lambda p, b: m.losses(p, b).max(1).mean(), {}


def mean_of_contrasts_in_rows(m: Model) -> Any:
    return lambda p, b: jax.nn.logsumexp(m.losses(p, b), 1).mean(), {}


def mean_and_penalty(m: Model) -> Any:
    return lambda p, b: plus(m.losses(p, b).mean(), penalty(p)), {}


def mean_and_constant(m: Model) -> Any:
    def loss(p: Any, b: Any) -> Any:
        losses = m.losses(p, b)
        return losses.mean() + jax.lax.stop_gradient(losses.std())

    return loss, {}


def mean_with_aux(m: Model) -> Any:
    return lambda p, b: (m.losses(p, b).mean(), m.logits(p, b)), {"has_aux": True}


def mean_with_idle_key(m: Model) -> Any:
    return lambda p, b, key: m.losses(p, b).mean(), {"rng": jax.random.key(1)}


def tokens(m: Model) -> Any:
    return lambda p, b: weighted_mean(m.losses(p, b), b["mask"]), {
        "weight_fn": count_kept
    }


def tokens_by_a_multiple(m: Model) -> Any:
    return tokens(m)[0], {"weight_fn": lambda b: 0.3 * (b["mask"] > 0).sum()}


def tokens_and_penalty(m: Model) -> Any:
    of_tokens = tokens(m)[0]
    return lambda p, b: plus(of_tokens(p, b), penalty(p)), {"weight_fn": count_kept}


def fractions(m: Model) -> Any:
    def loss(p: Any, b: Any) -> Any:
        return weighted_mean(m.losses(p, b), b["weight"])

    return loss, {"weight_fn": weighed}


def softmax_weights(m: Model) -> Any:
    def loss(p: Any, b: Any) -> Any:
        return weighted_mean(m.losses(p, b), jnp.exp(-b["weight"]))

    return loss, {"weight_fn": lambda b: jnp.exp(-b["weight"]).sum()}


def dropout(losses: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.7, losses.shape), losses, 0)


def dropout_by_row(m: Model) -> Any:
    m.batch["key"] = jax.random.split(jax.random.key(2), len(m.batch["y"]))
    return lambda p, b: jax.vmap(dropout)(m.losses(p, b), b["key"]).mean(), {}


RIGHT: tuple[Way, ...] = (
    *(mean, mean_over_rows, mean_of_maxima_of_rows, mean_of_contrasts_in_rows),
    *(mean_and_penalty, mean_and_constant, mean_with_aux, mean_with_idle_key),
    *(tokens, tokens_by_a_multiple, tokens_and_penalty, fractions, softmax_weights),
    dropout_by_row,
)

# -- Wrong, by cause -------------------------------------------------------------------


def total(m: Model) -> Any:
    return lambda p, b: m.losses(p, b).sum(), {}


def total_and_penalty(m: Model) -> Any:
    return lambda p, b: plus(m.losses(p, b).sum(), penalty(p)), {}


def total_over_whole_batch(m: Model) -> Any:
    return lambda p, b: m.losses(p, b).sum() / m.batch["y"].size, {}


def mean_divided_by_k(m: Model) -> Any:
    rows = len(m.batch["y"])
    return lambda p, b: m.losses(p, b).mean() / (rows // len(b["y"])), {}


def mean_divided_by_rows(m: Model) -> Any:
    return lambda p, b: m.losses(p, b).mean() / len(b["y"]), {}


def mean_times_root_of_rows(m: Model) -> Any:
    return lambda p, b: m.losses(p, b).mean() * len(b["y"]) ** 0.5, {}


def weighted_tokens_divided_by_k(m: Model) -> Any:
    rows, of_tokens = len(m.batch["y"]), tokens(m)[0]
    return lambda p, b: of_tokens(p, b) / (rows // len(b["y"])), {
        "weight_fn": count_kept
    }


def no_weights(m: Model) -> Any:
    return tokens(m)[0], {}


def no_fractions(m: Model) -> Any:
    return fractions(m)[0], {}


def no_weights_and_penalty(m: Model) -> Any:
    return tokens_and_penalty(m)[0], {}


def weights_of_the_rest(m: Model) -> Any:
    return tokens(m)[0], {"weight_fn": lambda b: (1 - b["mask"]).sum()}


def weights_of_others(m: Model) -> Any:
    return fractions(m)[0], {"weight_fn": count_kept}


def weights_beside_mean(m: Model) -> Any:
    return mean(m)[0], {"weight_fn": count_kept}


def batch_statistics(m: Model) -> Any:
    def loss(p: Any, b: Any) -> Any:
        losses = m.losses(p, b)
        scale = jnp.sqrt(losses.var() + jnp.asarray(0.1, losses.dtype))
        return jnp.tanh((losses - losses.mean()) / scale).mean()

    return loss, {}


def contrastive(m: Model) -> Any:
    def loss(p: Any, b: Any) -> Any:
        h = m.logits(p, b).mean(1)
        return -jnp.diagonal(jax.nn.log_softmax(h @ jnp.tanh(h).T)).mean()

    return loss, {}


def balance(m: Model) -> Any:
    def loss(p: Any, b: Any) -> Any:
        shares = jax.nn.softmax(m.logits(p, b)).mean((0, 1))
        return plus(m.losses(p, b).mean(), 0.1 * (shares**2).sum())

    return loss, {}


def root_of_mean(m: Model) -> Any:
    return lambda p, b: jnp.sqrt((m.losses(p, b) ** 2).mean()), {}


def log_of_mean(m: Model) -> Any:
    return lambda p, b: jax.nn.logsumexp(m.losses(p, b)), {}


def maximum(m: Model) -> Any:
    return lambda p, b: m.losses(p, b).max(), {}


def deviation(m: Model) -> Any:
    def loss(p: Any, b: Any) -> Any:
        losses = m.losses(p, b)
        return losses.mean() + 0.01 * losses.std()

    return loss, {}


def product_of_means(m: Model) -> Any:
    return (
        lambda p, b: (
            m.losses(p, b).mean() * m.logits(p, b).mean().astype(m.losses(p, b).dtype)
        ),
        {},
    )


def by_position(m: Model) -> Any:
    def loss(p: Any, b: Any) -> Any:
        losses = m.losses(p, b)
        return (losses.sum(1) * jnp.arange(len(losses), dtype=losses.dtype)).mean()

    return loss, {}


def by_neighbour(m: Model) -> Any:
    def loss(p: Any, b: Any) -> Any:
        losses = m.losses(p, b).sum(1)
        return (losses * jnp.roll(losses, 1)).mean()

    return loss, {}


def one_key(m: Model) -> Any:
    return lambda p, b: dropout(m.losses(p, b), jax.random.key(3)).mean(), {}


def key_of_the_batch(m: Model) -> Any:
    def loss(p: Any, b: Any, key: Any) -> Any:
        return dropout(m.losses(p, b), key).mean()

    return loss, {"rng": jax.random.key(4)}


def numpys_randomness(m: Model) -> Any:
    return lambda p, b: m.losses(p, b).mean() * float(m.draw.uniform(0.5, 1)), {}


def time_major(m: Model) -> Any:
    """A recurrent network over axis 0."""
    rows = len(m.batch["y"])
    x = m.draw.normal(size=(rows, 6, SIZE))  # [time, batch, size]
    y = jnp.asarray(m.draw.integers(0, CLASSES, (rows, 6)), jnp.int32)
    m.batch.clear()
    m.batch.update(x=jnp.asarray(x, m.params["a"].dtype), y=y)

    def step(p: Any, h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ p["a"] + x)
        return h, h

    def loss(p: Any, b: Any) -> Any:
        hidden = jax.lax.scan(
            functools.partial(step, p), jnp.zeros_like(b["x"][0]), b["x"]
        )[1]
        # One token a row, so that no network mixes the examples along axis 1.
        one = {"x": hidden.reshape(-1, 1, SIZE), "y": b["y"].reshape(-1, 1)}
        return m.losses(p, one).mean()

    return loss, {}


WRONG: dict[Cause, tuple[Way, ...]] = {
    Cause.SCALE: (
        *(total, total_and_penalty, total_over_whole_batch, mean_divided_by_k),
        *(mean_divided_by_rows, mean_times_root_of_rows, weighted_tokens_divided_by_k),
    ),
    Cause.WEIGHTS: (
        *(no_weights, no_fractions, no_weights_and_penalty, weights_of_the_rest),
        *(weights_of_others, weights_beside_mean),
    ),
    Cause.CROSS_EXAMPLE: (
        *(batch_statistics, contrastive, balance, root_of_mean, log_of_mean, maximum),
        *(deviation, product_of_means, by_neighbour),
    ),
    Cause.RANDOMNESS: (*(by_position, one_key, key_of_the_batch, numpys_randomness),),
    Cause.AXIS: (time_major,),
}


# -- The rates -------------------------------------------------------------------------


def make_case(dtype: str, kind: str, number: int) -> Case:
    """Case `number` of the right or the wrong ones."""
    r = np.random.default_rng([DTYPES.index(dtype), kind == "wrong", number])
    m = model(r, dtype)
    ways = [(cause, way) for cause, losses in WRONG.items() for way in losses]
    causes, ways_of_kind = OK, RIGHT
    if kind == "wrong":
        cause, way = ways[number % len(ways)]
        causes = {cause}
    else:
        way = ways_of_kind[number % len(ways_of_kind)]
    fun, options = way(m)
    return Case(way.__name__, (fun, m.params, m.batch, m.k), options, causes)


def ask(dtype: str, kind: str, number: int) -> tuple[Case, ga.Report]:
    """A case, and the answer of `verify`."""
    with jax.enable_x64(dtype == "float64"):
        case = make_case(dtype, kind, number)
        return case, ga.verify(*case.arguments, **case.options)


def outcome(case: Case, report: ga.Report) -> str:
    """One word for how good an answer is."""
    if report.cause in case.causes:
        return "right"
    if report.cause is Cause.UNDETERMINED:
        return "undetermined"
    if case.causes == OK:
        return "false alarm"
    return "miss" if report.ok else "other cause"


OUTCOMES = ("right", "undetermined", "false alarm", "miss", "other cause")


def main() -> None:
    """Prints the table, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--kinds", nargs="+", default=("right", "wrong"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=200)
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)  # nothing is timed
    numbers = range(args.first, min(args.last, 2) if args.quick else args.last)
    rows = []
    for dtype in args.dtypes:
        for kind in args.kinds:
            counts: collections.Counter[str] = collections.Counter()
            start = time.monotonic()
            for number in numbers:
                case, report = ask(dtype, kind, number)
                answer = outcome(case, report)
                counts[answer] += 1
                if answer != "right":
                    print(dtype, kind, number, case.name, report.cause.name, flush=True)
                if number % 50 == 49:
                    jax.clear_caches()
            print(dtype, kind, f"{time.monotonic() - start:.0f} s", flush=True)
            rows.append([dtype, kind, len(numbers), *(counts[x] for x in OUTCOMES)])
    columns = ["dtype", "losses", "cases", *OUTCOMES]
    record.print_table(columns, rows)
    record.write(args.json, {"columns": columns, "rows": rows})


if __name__ == "__main__":
    main()
