"""What the gradient of the whole batch costs, by loss: memory, passes, time.

    python benchmarks/price.py

Each loss is computed of the undivided batch; by `ga.value_and_grad` in k = 8
micro-batches; and by a plain loop over micro-batches, each by itself, which is another
gradient where rows need one another. Bytes are the temporaries of the compiled program,
and passes are those of `ga.batch_dependencies`. Only the ResNet is run, for its time:
the sides take turns in one process, and a time is the median over the turns.
"""

import collections
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import any_loss
import jax
import jax.numpy as jnp
import peers
import record

import ga_optax as ga

K = 8
UNDIVIDED, OURS, ALONE = any_loss.UNDIVIDED, peers.OURS, "each by itself"
TIMED = "a ResNet"
# LLVM, which takes most of the time to compile, comes after the bytes are known.
UNTIMED: dict[str, Any] = {"xla_backend_optimization_level": 0}

Loss = Callable[[Any, Any], jax.Array]


def normalised(x: jax.Array) -> jax.Array:
    """Rows without the mean of the batch, over its deviation, as Flax computes it."""
    axes = tuple(range(x.ndim - 1))
    mean = jnp.mean(x, axes, keepdims=True)
    square = jnp.mean(x**2, axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)


def norms(params: Any, x: jax.Array, number: int) -> jax.Array:
    """A mean over the rows of a network whose last layers normalise."""
    for i, p in enumerate(params):
        if i >= len(params) - number:
            x = normalised(x)
        x = x + jnp.tanh(x @ p["up"][:, : x.shape[1]])
    return jnp.mean(x**4)


def tokens(params: Any, batch: Any) -> jax.Array:
    """A mean over the tokens of all rows that are not padding."""
    x, mask = batch
    each = jnp.mean(any_loss.encode(params, x) ** 4, axis=-1)
    return jnp.sum(each * mask) / jnp.sum(mask)


def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Images after a convolution."""
    numbers, strides = ("NHWC", "HWIO", "NHWC"), (stride, stride)
    return jax.lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=numbers
    )


def convolutions(params: Any, images: jax.Array, norm: bool) -> jax.Array:
    """A ResNet of five blocks, whose eleven convolutions may each be normalised."""
    of = normalised if norm else lambda x: x
    x = jax.nn.relu(of(convolved(images, params["stem"])))
    for first, second in params["blocks"]:
        stride = first.shape[-1] // x.shape[-1]  # half the size, twice the channels
        h = jax.nn.relu(of(convolved(x, first, stride)))
        h = of(convolved(h, second))
        short = jnp.tile(x[:, ::stride, ::stride], stride)
        x = jax.nn.relu(short + h)
    return jnp.mean(jnp.mean(x, (1, 2)) ** 2)


def resnet(channels: int) -> Any:
    """Its parameters."""
    keys = iter(jax.random.split(jax.random.key(3), 11))

    def kernel(take: int, give: int) -> jax.Array:
        return jax.random.normal(next(keys), (3, 3, take, give)) / (9 * take) ** 0.5

    sizes = [channels * n for n in (1, 1, 1, 2, 2, 4)]
    blocks = [(kernel(a, b), kernel(b, b)) for a, b in itertools.pairwise(sizes)]
    return {"stem": kernel(3, channels), "blocks": blocks}


def cases(rows: int, width: int, layers: int = 50) -> dict[str, tuple[Loss, Any, Any]]:
    """Every loss with its parameters and its batch, by name."""
    stack = peers.make_params(layers, width, scanned=False)
    ten = stack[:10]
    x, draw = jax.random.normal(jax.random.key(1), (rows, width)), jax.random.normal
    sentences = draw(jax.random.key(2), (rows // 8, 8, width))
    mask = jnp.arange(8) < 1 + jnp.arange(rows // 8)[:, None] % 8
    # Of one size: XLA's CPU backend takes minutes to compile smaller convolutions.
    network, images = resnet(16), draw(jax.random.key(4), (8 * K, 16, 16, 3))
    mixed = any_loss.cases(3, width)["experts"].params
    found: dict[str, tuple[Loss, Any, Any]] = {
        "a mean": (peers.unrolled_loss, ten, x),
        "a mean over tokens": (tokens, ten, (sentences, mask)),
        "contrastive": (
            any_loss.contrastive,
            {"first": ten[:5], "second": ten[5:]},
            jnp.concatenate([x, x], axis=1),
        ),
        "experts": (any_loss.experts_batch, mixed, x),
    }
    for number, some in ((1, ten), (10, ten), (layers, stack)):
        loss = functools.partial(norms, number=number)
        found[f"batch norm, {number} of {len(some)} layers"] = loss, some, x
    for norm in (False, True):
        name = f"{TIMED}, {'11 batch norms' if norm else 'a mean'}"
        loss = functools.partial(convolutions, norm=norm)
        found[name] = loss, network, images
    return found


def alone(loss: Loss) -> Any:
    """The mean of the gradients of micro-batches, each by itself, in a plain loop."""

    def gradient(params: Any, batch: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(
                jnp.add, total, jax.value_and_grad(loss)(params, part)
            ), None

        zeros = jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)
        parts = jax.tree.map(lambda x: peers.split(x, K), batch)
        sums, _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / K, sums)

    return gradient


def seconds(programs: dict[str, Any], args: Any, rounds: int) -> dict[str, float]:
    """The median time of each, over calls in turn; the first round warms up."""
    times = collections.defaultdict(list)
    for turn in range(rounds + 1):
        for way, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            if turn:
                times[way].append(time.perf_counter() - start)
    return {way: statistics.median(each) for way, each in times.items()}


def measure(name: str, loss: Loss, args: Any, rounds: int) -> dict[str, Any]:
    """The row of the tables for one loss."""
    ways = {
        UNDIVIDED: jax.value_and_grad(loss),
        ALONE: alone(loss),
        OURS: ga.value_and_grad(loss, K),
    }
    options = {} if name.startswith(TIMED) else UNTIMED
    programs = {
        way: jax.jit(gradient).lower(*args).compile(options)
        for way, gradient in ways.items()
    }
    nbytes = {way: any_loss.temporaries(program) for way, program in programs.items()}
    report = ga.batch_dependencies(loss, K)(*args)
    row: dict[str, Any] = {
        "case": name,
        "mb": {way: n / 1e6 for way, n in nbytes.items()},
        "of_undivided": {way: n / nbytes[UNDIVIDED] for way, n in nbytes.items()},
        "forward": report.forward_passes,
        "backward": report.backward_passes,
    }
    if name.startswith(TIMED):
        took = seconds(programs, args, rounds)
        row["time"] = {way: t / took[UNDIVIDED] for way, t in took.items()}
        row["over_alone"] = took[OURS] / took[ALONE]
    return row


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    args = record.make_parser(__doc__).parse_args()
    rows, width, layers, rounds = (64, 8, 11, 1) if args.quick else (4096, 64, 50, 5)
    results = [
        measure(name, loss, operands, rounds)
        for name, (loss, *operands) in cases(rows, width, layers).items()
    ]
    ways = (UNDIVIDED, ALONE, OURS)
    print(f"MB of temporaries, in percent of the undivided batch's; {K} micro-batches")
    record.print_table(
        ["loss", *ways, f"{ALONE}, %", f"{OURS}, %", "forward", "backward"],
        [
            [row["case"], *(f"{row['mb'][way]:.1f}" for way in ways)]
            + [f"{row['of_undivided'][way]:.0%}" for way in ways[1:]]
            + [str(row["forward"]), str(row["backward"])]
            for row in results
        ],
    )
    timed = [row for row in results if "time" in row]
    print("\nTime, over the undivided batch's")
    record.print_table(
        ["loss", *ways[1:], f"{OURS} over {ALONE}"],
        [
            [
                row["case"],
                *(f"{row['time'][way]:.2f}" for way in ways[1:]),
                f"{row['over_alone']:.2f}",
            ]
            for row in timed
        ],
    )
    content = {"rows": rows, "width": width, "num_microbatches": K}
    record.write(args.json, content | {"results": results, "timed": timed})


if __name__ == "__main__":
    main()
