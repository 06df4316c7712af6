"""What a window communicates, against the number of micro-batches, on eight devices.

    python benchmarks/collectives.py

It compiles for eight virtual devices of a CPU, with the batch split over them and all
parameters on each. It runs nothing, so it does not measure the network's time. The
first table has the bytes that `ga.audit` finds, the operands of all collectives that
one device runs in a window, in units of the gradient. The second table has the work of
a device, the arithmetic of its matrix products over its share: XLA may gather the batch
and let every device compute all of it.
"""

import collections
import os

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


def measure(layers: int, width: int, rows: int, k: int) -> dict[str, dict[str, Any]]:
    """Compiles each way, and counts what it communicates and computes in a window."""
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
    found = {}
    for way, (program, calls) in compiled.items():
        audit = ga.audit(program, mesh)
        assert audit.total_bytes is not None
        kinds = collections.Counter()
        for c in audit.collectives:
            kinds[c.kind] += calls * (c.times or 0)
        found[way] = {
            "bytes": calls * audit.total_bytes,
            "over_gradient": calls * audit.total_bytes / peers.tree_bytes(params),
            "collectives": dict(kinds),
            "work_over_share": calls * hlo.dot_flops(program.as_text() or "") / share,
        }
    return found


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
        found = measure(layers, width, rows, k)
        results.append({"k": k} | _by_field(found))
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
    gradient = peers.tree_bytes(
        jax.eval_shape(lambda: peers.make_params(layers, width))
    )
    content = {"devices": DEVICES, "layers": layers, "width": width, "rows": rows}
    record.write(args.json, content | {"gradient_bytes": gradient, "results": results})


def _by_field(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`{field: {way: value}}` of `{way: {field: value}}`."""
    fields = next(iter(found.values()))
    return {f: {way: values[f] for way, values in found.items()} for f in fields}


if __name__ == "__main__":
    main()
