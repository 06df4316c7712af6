"""The processor's time of a gradient of a small model, against a plain scan.

    python benchmarks/small.py

In a small model much of the time is not that of matrix products: slices of stacked
layers, fences, draws of random numbers. Each way computes the gradient of k
micro-batches in one call, and the ways take turns in one process. The times are those
of the processor, since other processes use the machine too, and a time is the least of
all turns. A micro-batch of the scan by hand has a key of its own, so it draws other
numbers than the undivided batch.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import peers
import record
import reference_model

import ga_optax as ga

K = 8
PIXELS, LATENT, HIDDEN = 64, 32, 256  # of the autoencoder


class Model(NamedTuple):
    """A loss and its arguments.

    Attributes:
      loss: the loss of parameters, arrays with rows, and a key.
      params: the parameters.
      batch: the arrays with rows.
      key: the key, or None.
    """

    loss: Callable[..., jax.Array]
    params: Any
    batch: Any
    key: Any = None


def decoder(rows: int) -> Model:
    """A decoder of four scanned layers, of sequences of 64 tokens."""
    config = reference_model.Config(64, 4, 4, 256, 4, 512, 64, rows)
    tokens = jax.random.randint(jax.random.key(1), (2, rows, 64), 0, 512)

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        del key
        return reference_model.loss_of_pairs(config, params, *batch)

    return Model(loss, reference_model.init(config), tuple(tokens))


def autoencoder(rows: int) -> Model:
    """A variational autoencoder, whose latent variables are drawn."""
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def loss(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p["in"])
        mean, log_std = h @ p["mean"], h @ p["log_std"]
        z = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        again = jnp.tanh(z @ p["out"]) @ p["pixels"]
        divergence = jnp.exp(2 * log_std) + jnp.square(mean) - 1 - 2 * log_std
        return jnp.mean(jnp.square(again - x).sum(-1) + divergence.sum(-1) / 2)

    params = {
        "in": matrix(PIXELS, HIDDEN),
        "mean": matrix(HIDDEN, LATENT),
        "log_std": matrix(HIDDEN, LATENT) / 8,
        "out": matrix(LATENT, HIDDEN),
        "pixels": matrix(HIDDEN, PIXELS),
    }
    x = jax.random.normal(next(keys), (rows, PIXELS))
    return Model(loss, params, x, jax.random.key(7))


MODELS: dict[str, tuple[Callable[[int], Model], int]] = {
    "a decoder of four scanned layers, 4 sequences": (decoder, 4),
    "an autoencoder with draws, 64 rows": (autoencoder, 64),
    "the same, 256 rows": (autoencoder, 256),
}


def by_scan(model: Model) -> Callable[..., Any]:
    """The scan by hand; a micro-batch has a key of its own."""

    def split(window: Any, k: int) -> Any:
        batch, key = window
        keys = None if key is None else jax.random.split(key, k)
        return jax.tree.map(lambda x: peers.split(x, k), batch), keys

    scan: Any = peers.plain_scan(lambda p, x: model.loss(p, *x), K, split)
    return lambda params, batch, key: scan(params, (batch, key))


def measure(name: str, rounds: int, calls: int) -> dict[str, Any]:
    """The row of a model: milliseconds of the processor, by way."""
    make, rows = MODELS[name]
    model = make(K * rows)
    args = model.params, model.batch, model.key
    ways = {
        peers.OURS: ga.value_and_grad(model.loss, K),
        peers.SCAN: by_scan(model),
        "undivided": jax.value_and_grad(model.loss),
    }
    steps = {way: jax.jit(fun) for way, fun in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):  # the first turn compiles
        for way, step in steps.items():
            start = time.process_time()
            outs = [step(*args) for _ in range(calls)]
            jax.block_until_ready(outs)
            times[way].append((time.process_time() - start) / calls)
    least = {way: min(some[1:]) for way, some in times.items()}
    return {
        "model": name,
        "ms": {way: 1e3 * x for way, x in least.items()},
        "over_scan": least[peers.OURS] / least[peers.SCAN],
        "over_undivided": least[peers.OURS] / least["undivided"],
    }


def main() -> None:
    """Measures, prints the table, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    args = parser.parse_args()
    rounds, calls = (1, 1) if args.quick else (30, 5)
    names = list(MODELS)[1:2] if args.quick else list(MODELS)
    results = [measure(name, rounds, calls) for name in names]
    ways = list(results[0]["ms"])
    print(f"\nMilliseconds of the processor for the gradient of {K} micro-batches")
    record.print_table(
        ["a micro-batch of", *ways, "over the scan", "over undivided"],
        [
            [
                *(row["model"], *(round(row["ms"][way], 2) for way in ways)),
                *(round(row[name], 2) for name in ("over_scan", "over_undivided")),
            ]
            for row in results
        ],
    )
    record.write(args.json, {"k": K, "rounds": rounds, "results": results})


if __name__ == "__main__":
    main()
