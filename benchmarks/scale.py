"""Memory and communication of a large decoder on 64 devices, from the compilers.

    python benchmarks/scale.py --json benchmarks/results/scale.json

The model is `reference_model.py` in the sizes of Llama 3, in rows of 4096 tokens. A
micro-batch has one row a device, and a window 16 micro-batches. The optimizer is Adam.
Parameters and its state lie sharded over all devices, but where a way says otherwise.
Nothing runs: what a device needs and sends is read from the compiled programs, exact.

The benchmark needs no device, only the compilers: `make accelerators` installs both.
Compiling takes an hour of CPU time; what was compiled lies in `.programs`.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import accelerators
import jax
import jax.numpy as jnp
import optax
import peers
import record
import reference_model
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from reference_model import Config

import ga_optax as ga

K, DEVICES, REPLICAS = 16, 64, 8
SIZES = {
    "decoder_1b": Config(2048, 32, 8, 8192, 16, 128256, 4096, 1),
    "decoder_8b": Config(4096, 32, 8, 14336, 32, 128256, 4096, 1),
    "decoder_70b": Config(8192, 64, 8, 28672, 80, 128256, 4096, 1),
}
QUICK = {"quick": Config(256, 4, 2, 512, 2, 512, 128, 1)}
TARGETS = {"H100, 8 hosts of 8": "h100:8x8", "v5p, 4 x 4 x 4": "v5p:4x4x4"}
MAXTEXT = "as MaxText does"
UNPINNED = "no constraints in the model"


class Way(NamedTuple):
    """A way to accumulate.

    Attributes:
      name: the name.
      gradient: the loss and the gradient of a window.
      is_sharded: True if the parameters lie sharded, and not only Adam's state.
      replicas: how many times all parameters lie on the devices, if sharded.
    """

    name: str
    gradient: peers.Gradient
    is_sharded: bool = True
    replicas: int = 1


def ways(config: Config, specs: Any) -> Iterator[Way]:
    """The ways to accumulate, ours last.

    The others leave it to the compiler what is sent. It needs to be told, as trainers
    do, that activations stay split by rows.
    """
    loss = functools.partial(reference_model.loss, config)
    pinned = functools.partial(loss, pin=split_by_rows)
    yield Way(peers.MICROBATCHING, peers.microbatch(pinned, DEVICES))
    yield Way(MAXTEXT, as_maxtext(pinned, specs))
    yield Way(f"{MAXTEXT}, {UNPINNED}", as_maxtext(loss, specs))
    yield Way("ga_optax, no data_axis", ga.value_and_grad(pinned, K))
    for sync in ("each", "last"):
        axis = ga.DataAxis("data", param_specs=specs, sync=sync)
        name = f'ga_optax, param_specs, sync="{sync}"'
        yield Way(name, ga.value_and_grad(loss, K, data_axis=axis))
    # A device of each host has a replica's shard: in a host each micro-step
    # communicates, between hosts the window.
    axis = ga.DataAxis(("replica", "data"), param_specs=specs, sync="each")
    name = f'ga_optax, param_specs, sync="each", {REPLICAS} replicas'
    yield Way(name, ga.value_and_grad(loss, K, data_axis=axis), replicas=REPLICAS)
    for sync in ("each", "last"):
        axis = ga.DataAxis("data", grad_specs=specs, sync=sync)
        name = f'ga_optax, grad_specs, sync="{sync}"'
        yield Way(name, ga.value_and_grad(loss, K, data_axis=axis), is_sharded=False)


def split_by_rows(h: jax.Array) -> jax.Array:
    """Activations, split over the devices by rows."""
    return jax.lax.with_sharding_constraint(h, P("data"))


def as_maxtext(loss: Any, specs: Any) -> peers.Gradient:
    """A scan whose carry has sharded gradients, over every k-th row.

    This is what `gradient_accumulation_loss_and_grad` of MaxText comes down to, for a
    mean over rows of one length.
    """

    def gradient(params: Any, batch: jax.Array) -> tuple[jax.Array, Any]:
        def micro_step(carry: Any, x: jax.Array) -> Any:
            return jax.tree.map(
                jnp.add, carry, jax.value_and_grad(loss)(params, x)
            ), None

        rows = batch.reshape(-1, K, *batch.shape[1:]).swapaxes(0, 1)
        zeros = jax.tree.map(jnp.zeros_like, params)
        zeros = jax.lax.with_sharding_constraint(zeros, specs)
        (value, grads), _ = jax.lax.scan(micro_step, (jnp.zeros([]), zeros), rows)
        grads = jax.lax.with_sharding_constraint(grads, specs)
        return value / K, jax.tree.map(lambda g: g / K, grads)

    return gradient


def step_of(way: Way, opt: Any) -> Any:
    """A step that leaves parameters as they lie."""
    if not way.is_sharded:  # updates are gathered
        gather = optax.stateless(lambda u, _: accelerators.constrained(u))
        opt = optax.chain(opt, gather)
    return opt, peers.step_of(way.gradient, opt)


def measure(config: Config) -> Iterator[dict[str, Any]]:
    """What one device needs and sends in a step, for each target and way."""
    params = jax.eval_shape(lambda: reference_model.init(config))
    specs = accelerators.sharded_last(params, DEVICES)
    rows = accelerators.shape((K * DEVICES, config.length + 1), jnp.int32)
    num_bytes = peers.tree_bytes(params)
    for name, target in TARGETS.items():
        options = accelerators.OPTIONS.get(target[:3])
        limit = accelerators.find(target).memory_limit
        for way in ways(config, specs):
            opt, step = step_of(way, optax.adam(1e-3))
            state = params, jax.eval_shape(opt.init, params)
            mesh = mesh_of(way.replicas)
            whole, split = (
                accelerators.sharded_last(state, n) for n in (2**40, DEVICES)
            )
            layout = split if way.is_sharded else (whole[0], split[1])
            args = accelerators.on_mesh(
                (state, rows), mesh, (layout, P(mesh.axis_names))
            )
            row: dict[str, Any] = {"million_parameters": num_bytes / 4e6}
            row |= {"target": name, "way": way.name, "fits": "no"}
            row |= dict.fromkeys(["needed_gb", "sent_gb", "over_gradient", "kinds"])
            try:
                program = accelerators.compiled(target, step, *args, options=options)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                yield row  # a TPU's compiler makes no program that does not fit
                continue
            kinds = sent(program.text)
            yield row | {
                "needed_gb": program.needed / 1e9,
                "fits": "yes" if program.needed <= limit else "no",
                "sent_gb": kinds.total() / 1e9,
                "over_gradient": kinds.total() / num_bytes,
                "kinds": ", ".join(f"{k} {n / 1e9:.1f}" for k, n in kinds.items()),
            }


def mesh_of(replicas: int) -> AbstractMesh:
    """The mesh of all devices, of which each group has all parameters."""
    if replicas == 1:
        return AbstractMesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    sizes, names = (replicas, DEVICES // replicas), ("replica", "data")
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * 2)


def sent(text: str) -> collections.Counter[str]:
    """The bytes that leave a device in a step, by the kind of the collective.

    All devices stand in a ring: each passes on what it got until all have what they
    need. So each sends a sum twice, and a part of it once.
    """
    kinds: collections.Counter[str] = collections.Counter()
    for c in ga.audit(text).collectives:
        assert c.total_bytes is not None
        n = group_size(c.replica_groups)
        part = (n - 1) / n
        times = {"all-gather": n - 1, "all-reduce": 2 * part, "collective-permute": 1}
        kinds[c.kind] += int(times.get(c.kind, part) * c.total_bytes)
    return kinds


def group_size(groups: str) -> int:
    """The number of devices in a group, as printed in one of three forms."""
    if axes := re.fullmatch(r"mesh\[(.*)\]\s*\{(.*)\}", groups):
        sizes = re.findall(r"('\w+')=(\d+)", axes[1])
        return math.prod(int(size) for axis, size in sizes if axis in axes[2])
    if iota := re.match(r"\[\d+,(\d+)\]", groups):
        return int(iota[1])
    return groups.split("}")[0].count(",") + 1


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--sizes", default=",".join(SIZES), help="some of the sizes")
    args = parser.parse_args()
    accelerators.without_devices(parser)
    sizes = QUICK if args.quick else {n: SIZES[n] for n in args.sizes.split(",")}
    results: dict[str, Any] = {}
    head = ["target", "way", "needed_gb", "fits", "sent_gb", "over_gradient", "kinds"]
    for size, config in sizes.items():
        rows = list(measure(config))
        results[size] = rows
        print(f"\n{size}: {dataclasses.asdict(config)}")
        cells = [[accelerators.cell(row[name]) for name in head] for row in rows]
        record.print_table(head, cells)
    content = {
        "device": "compiled for 64 devices without a device",
        "num_microbatches": K,
    }
    record.write(args.json, content | results, accelerators.versions())


if __name__ == "__main__":
    main()
