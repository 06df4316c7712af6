"""Time and memory of losses whose rows meet: contrastive, batch norm, experts.

    python benchmarks/any_loss.py
    python benchmarks/any_loss.py --layers 4 --width 1024 --rows 16384 --target h200

There are k = 8 micro-batches. The gradient of the whole batch is computed undivided; by
`ga.value_and_grad` of the same loss; by two passes written by hand, as GradCache does,
if that can be done; and by a plain scan, whose every micro-batch is a batch of its own:
the gradient of another loss. How far each is from the undivided gradient is in the
table. The sides take turns in one process, so a busy machine slows all of them; a time
is the median over the turns. Temporaries are exact. With `--target` nothing runs: they
are read from programs compiled for a machine that is not here (`make accelerators`).
"""

import collections
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import peers
import record

import ga_optax as ga

K = 8
UNDIVIDED = "undivided"
OURS, PLAIN = peers.OURS, peers.SCAN
HAND = "two passes by hand"
WAYS = (UNDIVIDED, OURS, HAND, PLAIN)
EXACT = WAYS[:-1]

Loss = Callable[[Any, jax.Array], jax.Array]


class Case(NamedTuple):
    """A loss, and the ways to compute the loss over micro-batches.

    Attributes:
      loss: of an undivided batch.
      hand: the value and gradient in two passes, or None.
      params: parameters.
    """

    loss: Loss
    hand: peers.Gradient | None
    params: Any


def encode(layers: Any, x: jax.Array) -> jax.Array:
    """A network of residual layers."""
    return functools.reduce(peers.layer, layers, x)


# -- A contrastive loss ----------------------------------------------------------------


def views(x: jax.Array) -> list[jax.Array]:
    """Both views of rows."""
    return jnp.split(x, 2, axis=1)


def towers(params: Any, x: jax.Array) -> list[jax.Array]:
    """Both views, encoded, as vectors of length 1."""
    encoded = map(encode, (params["first"], params["second"]), views(x))
    return [z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in encoded]


def contrast(a: jax.Array, b: jax.Array) -> jax.Array:
    """The contrastive loss of two views."""
    rows = jnp.arange(len(a))
    log_p_b = jax.nn.log_softmax(10 * a @ b.T)[rows, rows]
    log_p_a = jax.nn.log_softmax(10 * b @ a.T)[rows, rows]
    return -jnp.mean(log_p_a + log_p_b) / 2


def contrastive(params: Any, x: jax.Array) -> jax.Array:
    """The loss of a batch."""
    return contrast(*towers(params, x))


def grad_cache(params: Any, batch: jax.Array) -> tuple[jax.Array, Any]:
    """The contrastive loss as GradCache computes it: Gao et al., 2021.

    Encode all micro-batches; differentiate the loss with respect to what was encoded;
    encode each micro-batch again, to take that back to the parameters.
    """
    split = peers.split(batch, K)
    _, codes = jax.lax.scan(lambda _, x: (None, towers(params, x)), None, split)

    def loss(codes: Any) -> jax.Array:
        return contrast(*(z.reshape(-1, z.shape[-1]) for z in codes))

    value, cotangents = jax.value_and_grad(loss)(codes)

    def back(total: Any, pair: Any) -> Any:
        x, cotangent = pair
        _, pullback = jax.vjp(lambda p: towers(p, x), params)
        return jax.tree.map(jnp.add, total, pullback(cotangent)[0]), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return value, jax.lax.scan(back, zeros, (split, cotangents))[0]


# -- Batch normalisation ---------------------------------------------------------------


def normalised(params: Any, x: jax.Array, layers: int) -> jax.Array:
    """A network whose last layers normalise, each with the statistics of the batch."""
    for i, p in enumerate(params):
        if i >= len(params) - layers:
            x = x - jnp.mean(x, axis=0, keepdims=True)
            x = x / jnp.sqrt(jnp.mean(x**2, axis=0, keepdims=True) + 1e-5)
        x = peers.layer(x, p)
    return jnp.mean(x**4)


# -- A mixture of experts --------------------------------------------------------------


def experts(params: Any, x: jax.Array, load: Any) -> tuple[jax.Array, jax.Array]:
    """The loss, and the share of rows that each expert got.

    The term that balances the load is that of Switch Transformers (Fedus et al., 2021,
    eq. 4): Σ share · mean gate, times the number of experts. `load(share)` is the share
    in the whole batch. It has no derivative, so the term is a mean over rows otherwise.
    """
    x = encode(params["layers"], x)
    gates = jax.nn.softmax(x @ params["gate"])
    best = jnp.argmax(gates, axis=1)
    chosen = jax.nn.one_hot(best, gates.shape[1])
    hidden = jnp.tanh(jnp.einsum("rd,edh->reh", x, params["up"]))
    out = jnp.einsum("re,reh,ehd->rd", chosen * gates, hidden, params["down"])
    share = jnp.mean(chosen, axis=0)
    balance = gates.shape[1] * jnp.sum(load(share) * jnp.mean(gates, axis=0))
    return jnp.mean((x + out) ** 2) + balance, share


def experts_batch(params: Any, x: jax.Array) -> jax.Array:
    """The loss of a batch."""
    return experts(params, x, lambda share: share)[0]


def experts_by_hand(params: Any, batch: jax.Array) -> tuple[jax.Array, Any]:
    """One pass for the shares, and one for the gradients."""

    def shares(total: jax.Array, x: jax.Array) -> Any:
        return total + experts(params, x, lambda share: share)[1] / K, None

    start = jnp.zeros(params["gate"].shape[1])
    share, _ = jax.lax.scan(shares, start, peers.split(batch, K))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return experts(params, x, lambda _: share)[0]

    return peers.plain_scan(loss, K)(params, batch)


# -- The measurement -------------------------------------------------------------------


def cases(layers: int, width: int) -> dict[str, Case]:
    """Every case, by name."""
    stack = peers.make_params(2 * layers, width, scanned=False)
    gate, up, down = jax.random.split(jax.random.key(2), 3)
    mixed = {
        "layers": stack[layers:],
        "gate": jax.random.normal(gate, (width, 8)) / width**0.5,
        "up": jax.random.normal(up, (8, width, width)) / width**0.5,
        "down": jax.random.normal(down, (8, width, width)) / width,
    }
    halves = {"first": stack[:layers], "second": stack[layers:]}
    depth = 2 * layers

    def norm(number: int) -> Case:
        return Case(functools.partial(normalised, layers=number), None, stack)

    return {
        "contrastive": Case(contrastive, grad_cache, halves),
        "batch norm, 1 layer": norm(1),
        f"batch norm, {depth} layers": norm(depth),
        "experts": Case(experts_batch, experts_by_hand, mixed),
    }


def ways_of(case: Case) -> dict[str, peers.Gradient]:
    """The ways to compute the gradient of a case."""
    ways: dict[str, peers.Gradient | None] = {
        UNDIVIDED: jax.value_and_grad(case.loss),
        OURS: ga.value_and_grad(case.loss, K),
        HAND: case.hand,
        PLAIN: peers.plain_scan(case.loss, K),
    }
    return {name: way for name, way in ways.items() if way}


def temporaries(program: jax.stages.Compiled) -> int:
    """Their bytes."""
    memory = program.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def batch_of(name: str, rows: int, width: int) -> jax.Array:
    """The batch of a case."""
    columns = 2 * width if name == "contrastive" else width
    return jax.random.normal(jax.random.key(1), (rows, columns))


def memory_row(name: str, bytes_of: dict[str, int]) -> dict[str, Any]:
    """The row of the table for one case, of temporaries alone."""
    return {
        "case": name,
        "temporaries": bytes_of,
        "mb": {way: b / 1e6 for way, b in bytes_of.items()},
        "memory_ratio": {w: b / bytes_of[UNDIVIDED] for w, b in bytes_of.items()},
    }


def measure_for(target: str, layers: int, width: int, rows: int) -> Iterator[Any]:
    """The rows of the table for a machine that is not here."""
    compiled = importlib.import_module("accelerators").compiled
    # The functions do not know the width; parameters and batch are shapes alone.
    params = jax.eval_shape(
        lambda: {name: case.params for name, case in cases(layers, width).items()}
    )
    for name, case in cases(layers, 8).items():
        batch = jax.eval_shape(functools.partial(batch_of, name, rows, width))
        programs = {
            way: compiled(target, jax.jit(gradient), params[name], batch)
            for way, gradient in ways_of(case).items()
        }
        yield memory_row(name, {w: p.temporaries for w, p in programs.items()})


def measure(name: str, case: Case, rows: int, rounds: int) -> dict[str, Any]:
    """The row of the table for one case."""
    width = jax.tree.leaves(case.params)[0].shape[-1]
    batch = batch_of(name, rows, width)
    programs = {
        way: jax.jit(gradient).lower(case.params, batch).compile()
        for way, gradient in ways_of(case).items()
    }
    seconds, grads = collections.defaultdict(list), {}
    for turn in range(rounds + 1):
        for way, program in programs.items():
            start = time.perf_counter()
            out = jax.block_until_ready(program(case.params, batch))
            elapsed = time.perf_counter() - start
            if turn:  # the first round warms caches and pages
                seconds[way].append(elapsed)
            else:
                grads[way] = jax.flatten_util.ravel_pytree(out[1])[0]
    time_of = {way: statistics.median(times) for way, times in seconds.items()}
    whole = grads[UNDIVIDED]
    bytes_of = {way: temporaries(program) for way, program in programs.items()}
    return memory_row(name, bytes_of) | {
        "seconds": time_of,
        "time_ratio": {w: t / time_of[UNDIVIDED] for w, t in time_of.items()},
        "difference": {
            way: float(jnp.linalg.norm(g - whole) / jnp.linalg.norm(whole))
            for way, g in grads.items()
        },
    }


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--layers", type=int, help="of a tower; twice that elsewhere")
    parser.add_argument("--width", type=int)
    parser.add_argument("--rows", type=int, help="of the batch")
    parser.add_argument("--rounds", type=int, help="calls of each side")
    parser.add_argument("--target", help="a machine to compile for, such as h200")
    args = parser.parse_args()
    layers = args.layers or (1 if args.quick else 4)
    width = args.width or (16 if args.quick else 256)
    rows = args.rows or (64 if args.quick else 2048)
    rounds = args.rounds or (1 if args.quick else 7)

    content: dict[str, Any] = {"layers": layers, "width": width, "rows": rows}
    versions = None
    if args.target:
        accelerators = importlib.import_module("accelerators")
        accelerators.without_devices(parser)
        versions = accelerators.versions()
        content["device"] = f"compiled for {args.target} without a device"
        results = list(measure_for(args.target, layers, width, rows))
    else:
        content["rounds"] = rounds
        all_ = cases(layers, width).items()
        results = [measure(name, case, rows, rounds) for name, case in all_]
    for title, field, form in (
        ("Time over the undivided batch's", "time_ratio", ".2f"),
        ("MB of temporaries", "mb", ".1f"),
        ("Distance to the undivided gradient, over its norm", "difference", ".0e"),
    ):
        if field not in results[0]:
            continue
        print(f"\n{title}; {rows} rows, k = {K}")
        record.print_table(
            ["case", *WAYS],
            [
                [row["case"]]
                + [
                    format(row[field][w], form) if w in row[field] else "-"
                    for w in WAYS
                ]
                for row in results
            ],
        )
    content |= {"num_microbatches": K, "results": results}
    record.write(args.json, content, versions)


if __name__ == "__main__":
    main()
