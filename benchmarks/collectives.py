"""Communication of a window, against the number of micro-batches, on eight devices.

    python benchmarks/collectives.py

The benchmark compiles for eight virtual devices of a CPU, with the batch split over
them and all parameters on each. There is no network to time. The first table has the
bytes that `ga.audit` finds, the operands of all collectives that one device runs in a
window, in units of the gradient. The second table has the work of a device, the
arithmetic of its matrix products over its share: XLA may gather the batch and let every
device compute the whole batch.

The last table compares `logical_devices=8`, which gives the same bits on 1, 2, 4 and 8
devices, with the same micro-batches without the option: the bytes that a device sends,
over a ring's all-reduce of the gradient; the temporaries; and the time of a window.
"""

import collections
import os
import statistics
import time

# If a flag comes twice, XLA takes the last value.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

from typing import Any

import hlo
import jax
import jax.numpy as jnp
import optax
import peers
import record
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

DEVICES = 8
PLAIN, LOGICAL = "all-reduce", "logical_devices=8"


def measure(layers: int, width: int, rows: int, k: int) -> dict[str, dict[str, Any]]:
    """Compiles each way, and counts the communication and arithmetic of a window."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    everywhere, split = (NamedSharding(mesh, spec) for spec in (P(), P("data")))

    def on_all(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree
        )

    def batch_of(rows: int) -> Any:
        return jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=split)

    opt, loss = optax.adam(1e-3), peers.scanned_loss
    params = on_all(jax.eval_shape(lambda: peers.make_params(layers, width)))
    state = params, on_all(jax.eval_shape(opt.init, params))
    ways = {
        peers.OURS: ga.value_and_grad(loss, k, data_axis="data"),
        peers.SCAN: peers.plain_scan(loss, k),
        peers.SCAN_KEPT: peers.plain_scan(loss, k, peers.split_in_place(DEVICES)),
        peers.MICROBATCHING: peers.microbatch(loss, rows // k),
    }
    loop = peers.HostLoop(loss, optax.MultiSteps(opt, k), k)
    multi_state = params, on_all(jax.eval_shape(loop.tx.init, params))
    with jax.set_mesh(mesh):
        programs = {
            way: (peers.step_of(gradient, opt).lower(state, batch_of(rows)), 1)
            for way, gradient in ways.items()
        }
        programs[peers.MULTI_STEPS] = (
            loop.step.lower(multi_state, batch_of(rows // k)),
            k,
        )
        compiled = {way: (p.compile(), calls) for way, (p, calls) in programs.items()}

    share = _flops_alone(loss, params, rows) / DEVICES
    measured = {}
    for way, (program, calls) in compiled.items():
        audit = ga.audit(program, mesh)
        assert audit.total_bytes is not None
        kinds = collections.Counter()
        for c in audit.collectives:
            kinds[c.kind] += calls * (c.times or 0)
        measured[way] = {
            "bytes": calls * audit.total_bytes,
            "over_gradient": calls * audit.total_bytes / peers.tree_bytes(params),
            "collectives": dict(kinds),
            "work_over_share": calls * hlo.dot_flops(program.as_text() or "") / share,
        }
    return measured


def sent(audit: ga.Audit, devices: int) -> float:
    """The bytes that one device sends, if an all-reduce is a ring."""
    others = devices - 1
    factors = {
        "all-reduce": 2 * others / devices,
        "all-to-all": others / devices,
        "all-gather": others,
    }
    return sum(factors[c.kind] * (c.total_bytes or 0) for c in audit.collectives)


def measure_logical(
    layers: int, width: int, rows: int, k: int, devices: int, rounds: int
) -> dict[str, Any]:
    """A window of `DEVICES * k` micro-batches, with logical devices and without."""
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=auto, devices=jax.devices()[:devices]
    )
    everywhere, split = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    params = jax.device_put(peers.make_params(layers, width), everywhere)
    batch = jax.device_put(jnp.ones((rows, width)), split)
    ways = {
        PLAIN: (k * DEVICES // devices, ga.DataAxis("data", mesh=mesh)),
        LOGICAL: (k, ga.DataAxis("data", mesh=mesh, logical_devices=DEVICES)),
    }

    def mean_of(number: int, axis: ga.DataAxis) -> Any:
        add = ga.accumulate(peers.scanned_loss, number, data_axis=axis)

        def gradient(params: Any, batch: jax.Array) -> Any:
            value, acc = add(ga.accumulator.init(params), params, batch)
            return value, ga.accumulator.mean(acc)

        return jax.jit(gradient).lower(params, batch).compile()

    programs = {way: mean_of(*options) for way, options in ways.items()}
    gradient = peers.tree_bytes(params)
    ring = 2 * (devices - 1) / devices * gradient
    wire = {way: sent(ga.audit(p, mesh), devices) for way, p in programs.items()}
    temporaries = {
        way: p.memory_analysis().temp_size_in_bytes for way, p in programs.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in programs}
    for _ in range(rounds):
        for way, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(params, batch))
            seconds[way].append(time.perf_counter() - begin)
    ms = {way: 1e3 * statistics.median(times[1:]) for way, times in seconds.items()}
    return {
        "devices": devices,
        "wire_bytes": wire,
        "ring_bytes": ring,
        "over_ring": {way: x / ring if ring else 0 for way, x in wire.items()},
        "temporaries": temporaries,
        "temporaries_over_gradient": {w: x / gradient for w, x in temporaries.items()},
        "ms": ms,
        "over_all_reduce": {way: x / ms[PLAIN] for way, x in ms.items()},
    }


def _flops_alone(loss: Any, params: Any, rows: int) -> int:
    """The arithmetic of the undivided batch on one device."""
    plain = [
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params),
        jax.ShapeDtypeStruct((rows, params["up"].shape[1]), jnp.float32),
    ]
    program = jax.jit(jax.value_and_grad(loss)).lower(*plain).compile()
    return hlo.dot_flops(program.as_text() or "")


def main() -> None:
    """Prints the table, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--rows", type=int, help="of a window, on all devices")
    parser.add_argument("--k", type=int, nargs="+")
    args = parser.parse_args()
    layers = args.layers or (2 if args.quick else 4)
    width = args.width or (64 if args.quick else 256)
    rows = args.rows or (256 if args.quick else 2048)
    ks = args.k or ([1, 4] if args.quick else [1, 4, 16, 64])

    results: list[dict[str, Any]] = []
    for k in ks:
        measured = measure(layers, width, rows, k)
        results.append({"k": k} | _by_field(measured))
    ways = list(results[0]["bytes"])
    for field, title in (
        ("over_gradient", "bytes on the wire over those of the gradient"),
        ("work_over_share", "matrix products of a device over its share"),
    ):
        print(f"\n{DEVICES} devices, {rows} rows a window: {title}")
        record.print_table(
            ["k", *ways],
            [[r["k"], *(round(r[field][w], 2) for w in ways)] for r in results],
        )
    logical = [
        measure_logical(layers, width, rows, 4, n, rounds=2 if args.quick else 5)
        for n in (1, 2, 4, 8)
    ]
    print(f"\nlogical_devices={DEVICES}, against the same micro-batches without it")
    fields = "over_ring", "temporaries_over_gradient", "over_all_reduce"
    titles = "sent over a ring's", "temporaries over the gradient", "time"
    pairs = [
        (field, title, way)
        for field, title in zip(fields, titles, strict=True)
        for way in (PLAIN, LOGICAL)
    ]
    record.print_table(
        ["devices", *(f"{title}, {way}" for _, title, way in pairs)],
        [
            [r["devices"], *(round(r[field][way], 2) for field, _, way in pairs)]
            for r in logical
        ],
    )
    gradient = peers.tree_bytes(
        jax.eval_shape(lambda: peers.make_params(layers, width))
    )
    content = {"devices": DEVICES, "layers": layers, "width": width, "rows": rows}
    content |= {"gradient_bytes": gradient, "results": results, "logical": logical}
    record.write(args.json, content)


def _by_field(measured: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`{field: {way: value}}` of `{way: {field: value}}`."""
    fields = next(iter(measured.values()))
    return {f: {way: values[f] for way, values in measured.items()} for f in fields}


if __name__ == "__main__":
    main()
