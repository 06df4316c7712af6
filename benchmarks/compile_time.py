"""The time to compile a window, against micro-batches, and to trace it, by its size.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --trace
    python benchmarks/compile_time.py --trace --devices 8

A window of k micro-batches and one Adam step is traced, lowered and compiled, without
any cache. The ways take turns in one process, and the table gives medians. Larger
programs of many leaves are traced and lowered alone, without an optimizer, in seconds
of the processor: this is the time of the passes, which must be linear in the program.
Losses whose rows meet are compared with the plain micro-batches of another loss and
with the undivided loss, also in lines of the program. Networks of many norms take
minutes; `--norms 10 20 40 100 --resnet` measures them too.

With `--trace` nothing is compiled. To trace and lower programs of many kinds takes so
many times as long as their limit: a plain scan, or the undivided batch where rows meet;
on several devices, a trainer's step with sharded parameters over its own scan. These
are medians of turns.
"""

import collections
import functools
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import any_loss
import jax
import jax.numpy as jnp
import optax
import peers
import record

import ga_optax as ga

SIDE = 8  # of an image
WIDTH = 8  # of the large programs
WAYS = (peers.OURS, peers.SCAN, peers.MICROBATCHING, peers.UNROLLED)


def seconds(loss: Any, params: Any, way: str, rows: int, k: int) -> float:
    """The seconds from the Python function to the compiled program, in one way."""
    jax.clear_caches()
    opt = optax.adam(1e-3)
    state = params, jax.eval_shape(opt.init, params)
    batch = jax.ShapeDtypeStruct((k * rows, params["up"].shape[1]), jnp.float32)
    ways = peers.in_one_call(loss, k, rows)
    ways[peers.UNROLLED] = peers.unrolled_loop(loss, k)
    step = peers.step_of(ways[way], opt)
    start = time.perf_counter()
    step.lower(state, batch).compile()
    return time.perf_counter() - start


# -- Large programs --------------------------------------------------------------------


def of_leaves(number: int) -> tuple[Any, Any]:
    """A loss of so many vectors, and their shapes."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for scale, shift in zip(params[::2], params[1::2], strict=True):
            x = jnp.tanh(x * scale + shift)
        return jnp.mean(jnp.square(x))

    return loss, [jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)] * number


def of_layers(number: int) -> tuple[Any, Any]:
    """A loss of so many separate dense layers, and the shapes of their matrices."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x))

    return loss, [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * number


def of_terms(number: int) -> tuple[Any, Any]:
    """A loss with one term for each of many separate matrices."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return sum((jnp.mean(jnp.square(x @ w)) for w in params), jnp.zeros([]))

    return loss, of_layers(number)[1]


def of_blocks(number: int) -> tuple[Any, Any]:
    """A loss of so many separate transformer blocks, and their shapes."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        squares = jnp.mean(jnp.square(x), -1, keepdims=True)
        return x * jax.lax.rsqrt(squares + 1e-6) * scale

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            h = norm(x, p["first"])
            q, k, v = h @ p["q"], h @ p["k"], h @ p["v"]
            x = x + jax.nn.softmax(q @ k.T) @ v @ p["out"]
            x = x + jax.nn.gelu(norm(x, p["second"]) @ p["up"]) @ p["down"]
        return jnp.mean(jnp.square(x))

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    block = {name: shape(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    block |= {"up": shape(WIDTH, 4 * WIDTH), "down": shape(4 * WIDTH, WIDTH)}
    block |= {"first": shape(1, WIDTH), "second": shape(1, WIDTH)}
    return loss, [block] * number


def traced(model: tuple[Any, Any], way: str, k: int = 4, rows: int = 4) -> float:
    """The processor's seconds to trace and lower a window."""
    loss, params = model
    gradient = jax.jit(peers.in_one_call(loss, k, rows)[way])
    jax.clear_caches()
    start = time.process_time()
    gradient.lower(params, jax.ShapeDtypeStruct((k * rows, WIDTH), jnp.float32))
    return time.process_time() - start


def of_large_programs(quick: bool, rounds: int) -> list[dict[str, Any]]:
    """Seconds to trace and lower each program, the least of some rounds."""
    leaves = [20] if quick else [100, 1000, 5000]
    models = {f"{n} leaves": of_leaves(n) for n in leaves}
    models["dense layers"] = of_layers(3 if quick else 300)
    models["matrices in terms"] = of_terms(3 if quick else 800)
    models["transformer blocks"] = of_blocks(1 if quick else 30)
    ways, results = (peers.OURS, peers.SCAN), []
    traced(of_leaves(2), peers.OURS)  # imports, and warms up
    for name, model in models.items():
        rows = [[traced(model, way) for way in ways] for _ in range(rounds)]
        ours, scan = map(min, zip(*rows, strict=True))
        results.append(
            {
                "program": name,
                "seconds": {peers.OURS: ours, peers.SCAN: scan},
                "over_plain_scan": ours / scan,
            }
        )
    return results


# -- Losses whose rows meet ------------------------------------------------------------


def of_norms(number: int) -> tuple[Any, Any]:
    """A loss of so many separate dense layers with batch norms, and their shapes."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            h = x @ w
            centred = h - jnp.mean(h, 0, keepdims=True)
            var = jnp.mean(jnp.square(centred), 0, keepdims=True)
            x = x + jnp.tanh(centred * jax.lax.rsqrt(var + 1e-5))
        return jnp.mean(jnp.square(x))

    return loss, of_layers(number)[1]


def of_resnet(stages: Sequence[int]) -> tuple[Any, Any]:
    """The loss of a residual network in Flax; (3, 4, 6, 3) makes a ResNet-50."""
    from flax import linen

    conv = functools.partial(linen.Conv, use_bias=False)
    norm = functools.partial(linen.BatchNorm, use_running_average=False)

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = linen.relu(norm()(conv(WIDTH, (3, 3))(x)))
            for i, blocks in enumerate(stages):
                for j in range(blocks):
                    strides, n = (2, 2) if i and not j else (1, 1), WIDTH * 2**i
                    h = linen.relu(norm()(conv(n, (1, 1))(x)))
                    h = linen.relu(norm()(conv(n, (3, 3), strides)(h)))
                    h = norm()(conv(4 * n, (1, 1))(h))
                    if not j:
                        x = norm()(conv(4 * n, (1, 1), strides)(x))
                    x = linen.relu(x + h)
            return linen.Dense(10)(jnp.mean(x, (1, 2)))

    network, image = Network(), jnp.zeros((1, SIDE, SIDE, 3))
    shapes = jax.eval_shape(network.init, jax.random.key(0), image)
    stats = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes["batch_stats"])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        variables = {"params": params, "batch_stats": stats}
        logits, _ = network.apply(variables, x, mutable=["batch_stats"])
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    return loss, shapes["params"]


def of_meetings(args: Any) -> list[dict[str, Any]]:
    """Seconds to trace and lower each loss, and the lines of its program."""
    norms = [2] if args.quick else args.norms
    models: dict[str, Any] = {
        f"{n} batch norms": (of_norms(n), (WIDTH,)) for n in norms
    }
    blocks = 1 if args.quick else 30
    models[f"{blocks} blocks, attention over rows"] = of_blocks(blocks), (WIDTH,)
    if args.quick or args.resnet:
        stages = (1,) if args.quick else (3, 4, 6, 3)
        models["ResNet of " + str(stages)] = of_resnet(stages), (SIDE, SIDE, 3)
    return [
        {"program": name} | of_meeting(model, shape)
        for name, (model, shape) in models.items()
    ]


def of_meeting(
    model: tuple[Any, Any], shape: tuple[int, ...], k: int = 4, rows: int = 4
) -> dict[str, Any]:
    """A row of the table: ours, micro-batches of another loss, and undivided."""
    loss, params = model
    x = jax.ShapeDtypeStruct((k * rows, *shape), jnp.float32)
    ways = {
        peers.OURS: ga.value_and_grad(loss, k),
        peers.SCAN: peers.plain_scan(loss, k),
        any_loss.UNDIVIDED: jax.value_and_grad(loss),
    }
    row: dict[str, Any] = {"seconds": {}, "lines": {}}
    for way, gradient in ways.items():
        jax.clear_caches()
        start = time.process_time()
        with warnings.catch_warnings():
            # Four rows a micro-batch save little memory; here only the time counts.
            warnings.filterwarnings("ignore", "Each of .* micro-batches computes")
            lowered = jax.jit(gradient).lower(params, x)
        row["seconds"][way] = time.process_time() - start
        row["lines"][way] = len(lowered.as_text().splitlines())
    for what in ("seconds", "lines"):
        ratio = row[what][peers.OURS] / row[what][peers.SCAN]
        row[f"{what}_over_plain_scan"] = ratio
    return row


# -- Ratios to trace -------------------------------------------------------------------


def of_network(number: int, how: str) -> tuple[Any, Any]:
    """A loss of so many layers: with relu, rematerialised, or in a scan."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w) if how == "relu" else jnp.tanh(x @ w)

    step = jax.checkpoint(layer) if how == "remat" else layer

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if how == "scanned":
            x = jax.lax.scan(lambda x, w: (step(x, w), None), x, params)[0]
        else:
            x = functools.reduce(step, params, x)
        return jnp.mean(jnp.square(x))

    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    stack = jax.ShapeDtypeStruct((number, WIDTH, WIDTH), jnp.float32)
    return loss, stack if how == "scanned" else [shape] * number


def of_sharded(sync: str, k: int, rows: int) -> tuple[Any, Any]:
    """A step with sharded parameters: ours, and a trainer's own over a scan."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    spec = jax.sharding.PartitionSpec(None, "data")
    place, whole = (
        jax.sharding.NamedSharding(mesh, x)
        for x in (spec, jax.sharding.PartitionSpec())
    )
    opt = optax.adam(1e-3)
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=place)] * 8
    loss, _ = of_layers(8)
    axis = ga.DataAxis("data", mesh=mesh, param_specs=[spec] * 8, sync=sync)

    def by_hand(params: Any, x: jax.Array) -> Any:
        def gathered(params: Any, x: jax.Array) -> jax.Array:
            return loss(jax.lax.with_sharding_constraint(params, whole), x)

        value, grads = peers.plain_scan(gathered, k)(params, x)
        return value, jax.lax.with_sharding_constraint(grads, place)

    def lowered(gradient: Any) -> Any:
        state = params, jax.eval_shape(opt.init, params)
        x = jax.ShapeDtypeStruct((k * rows * mesh.size, WIDTH), jnp.float32)
        return lambda: peers.step_of(gradient, opt).lower(state, x)

    ours = ga.value_and_grad(loss, k, data_axis=axis)
    return lowered(ours), lowered(by_hand)


def ways_to_trace(quick: bool, k: int = 4, rows: int = 4) -> dict[str, tuple[Any, Any]]:
    """By program, functions that trace and lower: ours, and the limit."""

    def lowered(model: tuple[Any, Any], shape: Any, limit: Any) -> tuple[Any, Any]:
        loss, params = model
        x = jax.ShapeDtypeStruct((k * rows, *shape), jnp.float32)
        ours, other = ga.value_and_grad(loss, k), limit(loss)
        return (
            lambda: jax.jit(ours).lower(params, x),
            lambda: jax.jit(other).lower(params, x),
        )

    def scan(loss: Any) -> Any:
        return peers.plain_scan(loss, k)

    if jax.device_count() > 1:
        both = ("last", "each")
        return {f'a step, sync="{x}"': of_sharded(x, k, rows) for x in both}
    few = [1] if quick else [8, 32]
    models = {f"{n} terms": of_terms(n) for n in ([3] if quick else [200, 800])}
    models |= {f"{n} layers": of_layers(n) for n in few}
    models |= {how: of_network(few[0], how) for how in ("relu", "remat", "scanned")}
    ways = {name: lowered(x, (WIDTH,), scan) for name, x in models.items()}
    image, cases = (SIDE, SIDE, 3), any_loss.cases(2, WIDTH)
    meet = {"batch norm": (of_norms(few[0]), (WIDTH,))}
    meet |= {"ResNet block": (of_resnet((1,)), image)}
    for name, width in (("contrastive", 2 * WIDTH), ("experts", WIDTH)):
        meet[name] = (cases[name].loss, cases[name].params), (width,)
    for name, (model, shape) in meet.items():
        ways[f"{name}, rows meet"] = lowered(model, shape, jax.value_and_grad)
    return ways


def print_traces(quick: bool, only: str, rounds: int) -> None:
    """Prints how long ours takes to trace and to lower, over the limit."""
    table = []
    for name, ways in ways_to_trace(quick).items():
        if only not in name:
            continue
        times: list[list[float]] = [[], []]
        for turn in range(rounds + 1):
            for i, way in enumerate(ways):
                jax.clear_caches()
                start = time.process_time()
                way()
                if turn:  # the first turn imports and warms up
                    times[i].append(time.process_time() - start)
        ours, limit = map(statistics.median, times)
        ms = [round(1e3 * x) for x in (ours, limit)]
        table.append([name, *ms, round(ours / limit, 2)])
    record.print_table(["program", "ms", "limit", "ratio"], table)


def print_meetings(rows: list[dict[str, Any]]) -> None:
    """Prints the table of them."""
    ways = list(rows[0]["seconds"])
    print("\nThe same where rows meet, and lines of the programs")
    record.print_table(
        ["program", *(f"{way}, {unit}" for unit in ("s", "lines") for way in ways)],
        [
            [
                *(r["program"], *(round(r["seconds"][way], 2) for way in ways)),
                *(r["lines"][way] for way in ways),
            ]
            for r in rows
        ],
    )


def main() -> None:
    """Prints the table, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--k", type=int, nargs="+")
    parser.add_argument("--norms", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--resnet", action="store_true", help="a ResNet-50 of Flax")
    parser.add_argument("--trace", action="store_true", help="ratios to trace, alone")
    parser.add_argument("--devices", type=int, default=1, help="of --trace")
    parser.add_argument("--only", default="", help="a word of the names of programs")
    args = parser.parse_args()
    if args.trace:
        count = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Each of .* micro-batches computes")
            print_traces(args.quick, args.only, args.rounds or 5)
        return
    ks = args.k or ([2] if args.quick else peers.doubling(64))
    rounds = args.rounds or (1 if args.quick else 3)
    layers = args.layers or (1 if args.quick else 4)

    params = jax.eval_shape(lambda: peers.make_params(layers, args.width))
    results: list[dict[str, Any]] = []
    for k in ks:
        times = collections.defaultdict(list)
        for turn in range(rounds + 1):
            for way in WAYS:
                elapsed = seconds(peers.scanned_loss, params, way, args.rows, k)
                if turn:  # the first turn imports and warms up
                    times[way].append(elapsed)
        median = {way: statistics.median(t) for way, t in times.items()}
        over = {way: t / median[peers.SCAN] for way, t in median.items()}
        results.append({"k": k, "seconds": median, "over_plain_scan": over})
    print(f"\nSeconds to compile; a model of {layers} scanned layers")
    record.print_table(
        ["k", *WAYS],
        [[r["k"], *(round(r["seconds"][way], 2) for way in WAYS)] for r in results],
    )
    large = of_large_programs(args.quick, rounds)
    print("\nSeconds of the processor to trace and lower large programs")
    record.print_table(
        ["program", *large[0]["seconds"], "ratio"],
        [
            [
                r["program"],
                *(round(x, 2) for x in r["seconds"].values()),
                round(r["over_plain_scan"], 2),
            ]
            for r in large
        ],
    )
    rows_meet = of_meetings(args)
    print_meetings(rows_meet)
    content = {"layers": layers, "width": args.width, "rows": args.rows}
    content |= {"rounds": rounds, "results": results, "large": large}
    content |= {"rows_meet": rows_meet}
    record.write(args.json, content)


if __name__ == "__main__":
    main()
