"""Memory, traffic and communication of accumulation on GPUs and TPUs, from compilers.

    python benchmarks/accelerators.py --json benchmarks/results/accelerators.json

The benchmark needs no device, only the compilers, which `make accelerators` installs
into `.venv-accelerators`. All figures are read from the compiled programs and are
exact. Nothing runs, so nothing is timed. Without a device XLA cannot try kernels, so
matrix products on GPUs are Triton's; for a window, cuBLAS's as well.

micro_step  a micro-step whose gradients are arguments: the bytes that it reads and
            writes, over the bytes of the parameters, inside a window and at the end
window      the memory of a step with k micro-batches, and its temporaries over those of
            a step with one
devices     what one device sends in a window, and its temporaries

Compiling takes twenty minutes of CPU time. Each program is kept in `.programs`, by its
content, so a run that was stopped goes on where it was. `--quick` is small.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# libtpu must not lock the machine. The plugin for GPUs must not look for a driver, and
# there is no GPU on which it could time kernels.
os.environ |= {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 " + os.environ.get("XLA_FLAGS", ""),
}

import hlo
import jax
import jax.numpy as jnp
import optax
import peers
import record
import reference_model
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._compiled import plan
from ga_optax._compiled.plan import temporaries

PROGRAMS = pathlib.Path(__file__).parents[1] / ".programs"
COMPILERS = ("libtpu", "jax-cuda12-plugin")
K = 8
TARGETS = ("h200", "v5e", "v5p", "v6e")
# A real GPU picks a library for each matrix product. These programs have one alone.
CUBLAS = "h200+cublas"
CUBLAS_ALONE = "--xla_gpu_enable_triton_gemm=false"
MESHES = {
    8: ("h200:8", "v5e:2x4", "v5p:2x2x2", "v6e:2x4"),
    64: ("v5e:8x8", "v5p:4x4x4", "v6e:8x8"),
    256: ("v5e:16x16", "v5p:4x8x8", "v6e:16x16"),
}
ALONE = "one micro-batch"
SHARDED_SCAN = "plain scan, rows kept in place, sharded"
OURS_AXIS = "ga_optax, data_axis"
OURS_LAST = 'ga_optax, sharded, sync="last"'
OURS_EACH = 'ga_optax, sharded, sync="each"'
OURS_ZERO = 'ga_optax, gradients and state sharded, sync="each"'
# With these TPUs gather, and reduce-scatter, what they would reduce whole.
OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
V5P = {OFFLOAD + "nd_reduce_scatter": True}
V5E = V5P | {"xla_tpu_prefer_async_allgather_to_allreduce": True}
V6E = V5E | {OFFLOAD + "all_gather": True, OFFLOAD + "2d_all_gather": True}
OPTIONS = {"v5e": V5E, "v5p": V5P, "v6e": V6E}
OPTIONED = (SHARDED_SCAN, OURS_LAST, OURS_EACH)
# Compiling takes long: all ways for some machines, and for the others these alone.
ALL_WAYS = ("h200:8", "v5e:2x4")
SCALED = (OURS_AXIS, peers.MULTI_STEPS, SHARDED_SCAN, OURS_LAST, OURS_EACH)

Rows = list[dict[str, Any]]
find = functools.cache(plan.find_machine)


# -- Compiling -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """The text of a compiled program and its memory on one device, in bytes."""

    text: str
    temporaries: int
    arguments: int
    outputs: int
    aliased: int

    @property
    def needed(self) -> int:
        """The bytes that the program needs."""
        return self.temporaries + self.arguments + self.outputs - self.aliased


def compiled(
    target: str, step: Any, *args: Any, options: dict[str, Any] | None = None
) -> Program:
    """Compiles a jitted function for a target, or finds what was compiled before.

    `options` are the compiler's.
    """
    machine, _, library = target.partition("+")
    options = {"xla_gpu_enable_triton_gemm": False} if library else options
    more = CUBLAS_ALONE if library else ""
    with find(machine).arguments(args) as shapes, flags(more):
        lowered = step.lower(*shapes)
    content = [target, str(versions()), lowered.as_text()]
    content += map(str, (options or {}).items())
    name = hashlib.sha256("\n".join(content).encode()).hexdigest()[:24]
    path = PROGRAMS / f"{name}.json.gz"
    if not path.exists():
        start = time.process_time()
        done = lowered.compile(compiler_options=options)
        m = done.memory_analysis()
        program = Program(
            done.as_text(),
            temporaries(m),
            m.argument_size_in_bytes,
            m.output_size_in_bytes,
            m.alias_size_in_bytes,
        )
        print(f"  {target}: {time.process_time() - start:.0f} s", flush=True)
        PROGRAMS.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(vars(program)).encode()))
    return Program(**json.loads(gzip.decompress(path.read_bytes())))


@contextlib.contextmanager
def flags(more: str) -> Iterator[None]:
    """More in `XLA_FLAGS` while a program is traced, where `ga_optax` looks them up."""
    before = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = f"{before} {more}"
    if more:
        jax.clear_caches()
    yield
    os.environ["XLA_FLAGS"] = before
    if more:
        jax.clear_caches()


@functools.cache
def versions() -> dict[str, str]:
    """The versions of the compilers."""
    return {name: importlib.metadata.version(name) for name in COMPILERS}


def donated(step: Callable[..., Any]) -> Any:
    """`step(params, state, ...)`, jitted."""
    return jax.jit(step, donate_argnums=(0, 1))


def shape(dims: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A shape, float32 if not said."""
    return jax.ShapeDtypeStruct(dims, dtype)


# -- A micro-step ----------------------------------------------------------------------


def micro_steps(opt: Any) -> dict[str, tuple[Any, tuple[Any, Any]]]:
    """For each way, the state, and the programs inside and at the end of a window.

    The functions take parameters, state and gradients.
    """
    tx, theirs = ga.MultiSteps(opt, K), optax.MultiSteps(opt, K)

    def applied(emit: bool | None) -> Any:
        def step(params: Any, state: Any, grads: Any) -> Any:
            return ga.apply_gradients(tx, grads, state, params, emit=emit)

        return donated(step)

    def transformed(tx: Any) -> Any:
        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return donated(step)

    def add(params: Any, state: Any, grads: Any) -> Any:
        total, opt_state = state
        return params, (jax.tree.map(jnp.add, total, grads), opt_state)

    def update(params: Any, state: Any, grads: Any) -> Any:
        (total, _), opt_state = add(params, state, grads)[1], state[1]
        mean = jax.tree.map(lambda t: t / K, total)
        updates, opt_state = opt.update(mean, opt_state, params)
        zeros = jax.tree.map(jnp.zeros_like, total)
        return optax.apply_updates(params, updates), (zeros, opt_state)

    def by_hand(params: Any) -> Any:
        return params, opt.init(params)

    asks, ours, optaxs = applied(None), transformed(tx), transformed(theirs)
    return {
        peers.OURS_LOOP: (tx.init, (asks, asks)),
        peers.OURS_COUNTED: (tx.init, (applied(False), applied(True))),
        peers.OURS_TRANSFORMATION: (tx.init, (ours, ours)),
        peers.MULTI_STEPS: (theirs.init, (optaxs, optaxs)),
        peers.TWO_PROGRAMS: (by_hand, (donated(add), donated(update))),
    }


def measure_micro_step(quick: bool) -> dict[str, Rows]:
    """Reads what a micro-step of each way reads and writes, on each target."""
    # A leaf is larger than the fast memory of a TPU's core.
    side, number = (256, 2) if quick else (8192, 4)
    params = {f"layer_{i}": shape((side, side)) for i in range(number)}
    size = peers.tree_bytes(params)
    rows = []
    for way, (init, programs) in micro_steps(optax.adam(1e-3)).items():
        row: dict[str, Any] = collections.defaultdict(dict, way=way, param_bytes=size)
        for target in TARGETS:
            state = jax.eval_shape(init, params)
            inside, closes = (
                compiled(target, step, params, state, params) for step in programs
            )
            results = {"inside": hlo.traffic(inside.text, min)}
            results["closes"] = hlo.traffic(closes.text, max)
            for where, traffic in results.items():
                row[f"bytes_{where}"][target] = traffic.num_bytes
                row[f"over_params_{where}"][target] = traffic.num_bytes / size
                row[f"kernels_{where}"][target] = traffic.kernels
                row[f"copied_{where}"][target] = traffic.copied
            window = (K - 1) * results["inside"].num_bytes + results["closes"].num_bytes
            row["over_params_window"][target] = window / size
            row["conditionals"][target] = results["inside"].branches
            most = max(inside.temporaries, closes.temporaries)
            row["temporaries"][target] = most
            row["over_params_temporaries"][target] = most / size
        rows.append(row)
    return {"micro_step": rows}


# -- The memory of a window ------------------------------------------------------------


class Model(NamedTuple):
    """A model to compile."""

    loss: Any
    params: Any
    rows_of: Callable[[int], Any]  # the shapes of so many rows
    ways: tuple[str, ...] | None  # None: all


def models(quick: bool) -> dict[str, Model]:
    """The reference model with 12 layers, and a dense one.

    The dense one is the perceptron of `peers`, which scans over its layers, too, and
    has neither attention nor logits. It compiles in a fifth of the time.
    """
    config = reference_model.Config(layers=12)
    config = reference_model.TINY if quick else config
    layers, width, tokens = (2, 64, 8) if quick else (12, 2048, 1024)
    return {
        "dense": Model(
            peers.scanned_loss,
            jax.eval_shape(lambda: peers.make_params(layers, width)),
            lambda n: shape((n * tokens, width)),
            None,
        ),
        "reference": Model(
            functools.partial(reference_model.loss, config),
            jax.eval_shape(lambda: reference_model.init(config)),
            lambda n: shape((n, config.length + 1), jnp.int32),
            (ALONE, *peers.IN_ONE_CALL),
        ),
    }


def steps_of(loss: Any, opt: Any, rows: int) -> dict[str, tuple[Any, Any, int]]:
    """Each way to do a window: the state for parameters, a step, and its rows.

    `rows` are those of a micro-batch in the units of the loss, and a factor in front of
    them says how many micro-batches the step takes.
    """
    alone = {ALONE: jax.value_and_grad(loss)}
    inside = peers.in_one_call(loss, K, rows)
    results = {
        way: (opt.init, peers.step_of(gradient, opt), K if way in inside else 1)
        for way, gradient in (alone | inside).items()
    }
    ours = ga.MultiSteps(opt, K)
    for way, loop in {
        peers.OURS_LOOP: peers.HostLoop(loss, ours, K),
        peers.OURS_TRANSFORMATION: peers.HostLoop(loss, ours, K, applies=False),
        peers.MULTI_STEPS: peers.HostLoop(loss, optax.MultiSteps(opt, K), K),
    }.items():
        results[way] = loop.tx.init, loop.step, 1
    return results


def measure_window(quick: bool) -> dict[str, Rows]:
    """Reads the memory of a step of each way, for each model and target."""
    opt, number, results = optax.adam(1e-3), 2 if quick else 4, {}
    for name, model in models(quick).items():
        rows: Rows = []
        size = peers.tree_bytes(model.params)
        micro = model.rows_of(number).shape[0]
        for way, (init, step, batches) in steps_of(model.loss, opt, micro).items():
            if model.ways and way not in model.ways:
                continue
            row: dict[str, Any] = collections.defaultdict(
                dict, way=way, param_bytes=size
            )
            rows.append(row)
            for target in (*TARGETS, CUBLAS):
                state = model.params, jax.eval_shape(init, model.params)
                program = compiled(target, step, state, model.rows_of(batches * number))
                traffic = hlo.traffic(program.text)
                alone = rows[0]["temporaries"].setdefault(target, program.temporaries)
                # Adam's state and the parameters, as they lie on the device.
                one = rows[0]["aliased"].get(target, program.aliased) / 3
                for field in ("temporaries", "arguments", "outputs", "aliased"):
                    row[field][target] = getattr(program, field)
                row["needed_mb"][target] = program.needed / 1e6
                row["over_alone"][target] = program.temporaries / alone
                row["over_alone_and_one"][target] = program.temporaries / (alone + one)
                row["kernels"][target] = traffic.kernels
                row["copied"][target] = traffic.copied
                row["over_params_copied"][target] = traffic.copied / size
        results[f"window_{name}"] = rows
    return results


# -- Many devices ----------------------------------------------------------------------


def sharded_last(tree: Any, number: int) -> Any:
    """Specs that split the last axis of every leaf that is large enough."""

    def spec(x: Any) -> P:
        split = x.ndim and x.shape[-1] % number == 0
        return P(*[None] * (x.ndim - 1), "data") if split else P()

    return jax.tree.map(spec, tree)


def on_mesh(tree: Any, mesh: AbstractMesh, specs: Any) -> Any:
    """The shapes of a tree, with shardings over the mesh."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
        specs,
    )


def ways_on(number: int, loss: Any, opt: Any, params: Any, rows: int) -> Iterator[Any]:
    """The ways on this many devices: name, state, what is sharded, step, micro-batches.

    `rows` are those of a micro-batch on all devices.
    """
    specs = sharded_last(params, number)
    kept = peers.plain_scan(loss, K, peers.split_in_place(number))
    last, each = (
        ga.DataAxis("data", param_specs=specs, sync=sync) for sync in ("last", "each")
    )
    zero = ga.DataAxis("data", grad_specs=specs, sync="each")
    for way, (sharded, gradient) in {
        peers.SCAN: (False, peers.plain_scan(loss, K)),
        peers.SCAN_KEPT: (False, kept),
        peers.MICROBATCHING: (False, peers.microbatch(loss, rows)),
        peers.OURS: (False, ga.value_and_grad(loss, K)),
        OURS_AXIS: (False, ga.value_and_grad(loss, K, data_axis="data")),
        SHARDED_SCAN: (True, kept),
        OURS_LAST: (True, ga.value_and_grad(loss, K, data_axis=last)),
        OURS_EACH: (True, ga.value_and_grad(loss, K, data_axis=each)),
    }.items():
        yield way, opt.init, sharded, peers.step_of(gradient, opt), K
    # The parameters stay whole, so the updates are gathered.
    whole = optax.chain(opt, optax.stateless(lambda u, _: constrained(u)))
    step = peers.step_of(ga.value_and_grad(loss, K, data_axis=zero), whole)
    yield OURS_ZERO, whole.init, None, step, K
    loop = peers.HostLoop(loss, optax.MultiSteps(opt, K), K)
    yield peers.MULTI_STEPS, loop.tx.init, False, loop.step, 1


def constrained(tree: Any) -> Any:
    """The tree, whole on every device."""
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), tree)


def measure_devices(quick: bool) -> dict[str, Rows]:
    """Reads what one device communicates in a window, for each machine and way."""
    layers, width, tokens = (2, 256, 8) if quick else (4, 1024, 256)
    opt, loss = optax.adam(1e-3), peers.scanned_loss
    params = jax.eval_shape(lambda: peers.make_params(layers, width))
    numbers = [8] if quick else MESHES
    results: dict[str, Rows] = {f"devices_{number}": [] for number in numbers}
    for number, target in [(n, target) for n in numbers for target in MESHES[n]]:
        mesh = AbstractMesh((number,), ("data",), axis_types=(AxisType.Auto,))
        micro = tokens * number
        for way, init, sharded, step, batches in ways_on(
            number, loss, opt, params, micro
        ):
            if way not in SCALED and target not in ALL_WAYS:
                continue
            state = params, jax.eval_shape(init, params)
            whole, split = (sharded_last(state, n) for n in (2**40, number))
            # None: the optimizer's state alone.
            specs = {None: (whole[0], split[1]), True: split, False: whole}[sharded]
            batch = on_mesh(shape((batches * micro, width)), mesh, P("data"))
            args = on_mesh(state, mesh, specs), batch
            tried: dict[str, Any] = {way: None}
            if way in OPTIONED and (options := OPTIONS.get(target[:3])):
                tried[f"{way}, options"] = options
            for name, options in tried.items():
                program = compiled(target, step, *args, options=options)
                size = peers.tree_bytes(params)
                sent = communicated(program.text, K // batches, size)
                sent |= {"needed": program.needed, "needed_mb": program.needed / 1e6}
                results[f"devices_{number}"].append(
                    {"target": target, "way": name} | sent
                )
    return results


def communicated(text: str, calls: int, size: int) -> dict[str, Any]:
    """The bytes that one device sends in `calls` calls, over `size` of the gradient."""
    audit = ga.audit(text)
    assert audit.total_bytes is not None
    kinds: collections.Counter[str] = collections.Counter()
    for c in audit.collectives:
        kinds[c.kind] += calls * (c.total_bytes or 0)
    inside = calls * sum(c.total_bytes or 0 for c in audit.in_loop)
    return {
        "gradient_bytes": size,
        "by_kind": kinds,
        "bytes_in_loop": inside,
        "over_gradient": kinds.total() / size,
        "over_gradient_in_loop": inside / size,
        # What is less than a two-hundredth is the value's.
        "kinds": ", ".join(
            f"{kind} {number / size:.2f}"
            for kind, number in sorted(kinds.items())
            if number >= size / 200
        ),
    }


# -- All of it -------------------------------------------------------------------------


def main() -> None:
    """Prints the tables, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    args = parser.parse_args()
    without_devices(parser)
    content: dict[str, Any] = {
        "device": "compiled for " + ", ".join(TARGETS) + " without a device",
        "num_microbatches": K,
    }
    for measure in (measure_micro_step, measure_devices, measure_window):
        for name, rows in measure(args.quick).items():
            content[name] = rows
            print_rows(name, rows)
    record.write(args.json, content, versions())


def without_devices(parser: argparse.ArgumentParser) -> None:
    """Sets JAX up to compile alone; an error if a compiler is not installed."""
    try:
        versions()
    except importlib.metadata.PackageNotFoundError as missing:
        parser.error(
            f"it needs {' and '.join(COMPILERS)}, but {missing.name} is not there. "
            "`make accelerators` installs both into .venv-accelerators: run it with "
            "that Python."
        )
    jax.config.update("jax_platforms", "cpu")  # where constants lie
    jax.config.update("jax_enable_compilation_cache", False)  # it cannot load them


def print_rows(name: str, rows: Rows) -> None:
    """Prints a table, or one table a field if rows have a number for each target."""
    if name.startswith("devices"):
        head = ["target", "way", "over_gradient", "over_gradient_in_loop", "kinds"]
        print(f"\n{name}")
        record.print_table(head, [[cell(row[name]) for name in head] for row in rows])
        return
    for field in rows[0]:
        if field == "needed_mb" or field.startswith("over"):
            print(f"\n{name}: {field}")
            targets = list(rows[0][field])
            cells = [[cell(row[field].get(t, "-")) for t in targets] for row in rows]
            named = [[row["way"], *line] for row, line in zip(rows, cells, strict=True)]
            record.print_table(["way", *targets], named)


def cell(value: Any) -> Any:
    """A number of a table, rounded; a dash for None."""
    value = "-" if value is None else value
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
