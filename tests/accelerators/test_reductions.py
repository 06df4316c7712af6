"""Gradients reduced inside the backward pass, by the compilers of GPUs and TPUs."""

import re

import jax
import jax.numpy as jnp
import pytest
import targets  # before a backend starts
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._compiled import hlo, machines

K, DEVICES, LAYERS, WIDTH, ROWS = 2, 8, 4, 1024, 256
GRADIENT = 2 * LAYERS * WIDTH * WIDTH * 4
SPLIT = P(None, "data")
# What makes the communication asynchronous: collectives of two leaves stay two, and may
# be fused with a product, or run on the sparse core.
H200 = {
    "xla_gpu_all_reduce_combine_threshold_bytes": 0,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
}
V5E = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_jf_crs_combiner_threshold_in_bytes": 0,
}
OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
# Devices that are no ring reduce-scatter with this, and not only in an all-reduce.
SCATTERS = {OFFLOAD + "nd_reduce_scatter": True}
# Many devices gather small arrays with these, and not by an all-reduce of zeros.
GATHERS = {"xla_tpu_prefer_async_allgather_to_allreduce": True}
GATHERS_V6E = GATHERS | {OFFLOAD + k: True for k in ("all_gather", "2d_all_gather")}
SPARSE_CORE = SCATTERS | {
    OFFLOAD + "all_reduce": True,
    OFFLOAD + "reduce_scatter": True,
    "xla_jf_crs_combiner_threshold_in_bytes": 0,
}
# It combines collectives, and then waits for all of them.
COMBINED = {k: x for k, x in SPARSE_CORE.items() if "combiner" not in k}


def loss(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


def unrolled(params, x):
    for i in range(LAYERS):
        x = x + jnp.tanh(x @ params[f"up{i}"]) @ params[f"down{i}"]
    return jnp.mean(x**2)


def compiled(target, compiler_options, fun=loss, devices=DEVICES, **options):
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, options.get("param_specs", P()))
    names, dims = ("up", "down"), (LAYERS, WIDTH, WIDTH)
    if fun is unrolled:
        names = [f"{name}{i}" for name in names for i in range(LAYERS)]
        dims = dims[1:]
    params = {n: jax.ShapeDtypeStruct(dims, jnp.float32, sharding=place) for n in names}
    rows = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((K * devices * ROWS, WIDTH), jnp.float32, sharding=rows)
    step = ga.value_and_grad(fun, K, data_axis=ga.DataAxis("data", **options))
    with machines.find(target).arguments((params, x)) as shapes:
        lowered = jax.jit(lambda *args: step(*args)).lower(*shapes)
    return lowered.compile(compiler_options=compiler_options)


def hidden(program, in_loops=True):
    """For each asynchronous collective: whether it hides behind a matrix product.

    That is a start, the product, and the end, in this order of the schedule. A
    collective on the sparse core starts where it is given its operands, in an update.
    """
    module = hlo.parse(program.as_text())
    bodies = [
        p.instruction.computation
        for p in module.walk()
        if bool(p.loops) == in_loops and not p.fused
    ]
    found = []
    for body in {id(body): body for body in bodies}.values():
        products, starts, chains = [], {}, {}
        for n, line in enumerate(body.values()):
            inside = module.inside(line)
            if any(x.opcode in ("dot", "convolution") for x in inside):
                products.append(n)
            first = line.operands[0].lstrip("%") if line.operands else ""
            begins = re.fullmatch("(all-reduce|reduce-scatter|call)-start", line.opcode)
            if begins or (first in starts and line.opcode.endswith("-update")):
                starts[line.name] = n
            ends = first in starts and line.opcode.endswith("-done")
            if ends and hlo.num_bytes(line.type) > 1000:  # or it is the value's
                found.append(any(starts[first] < at < n for at in products))
            for x in inside:  # v5e: several fusions with one chain
                if chain := x.attribute(hlo.CHAIN):
                    chains.setdefault(chain, []).append(n)
        found += [any(c[0] < at < c[-1] for at in products) for c in chains.values()]
    return found


@pytest.mark.parametrize(
    ("target", "options", "specs", "due"),
    [
        ("h200:8", H200, {}, [True, False]),
        ("h200:8", {}, {}, []),
        ("h200:8", H200, {"param_specs": SPLIT}, [True, False]),
        ("v5e:2x4", V5E, {}, [True, True]),
        ("v5e:2x4", {}, {}, []),
        ("v5e:2x4", V5E, {"param_specs": SPLIT}, []),
        ("v5p:2x2x2", SPARSE_CORE, {}, [True, True]),
        ("v5p:2x2x2", COMBINED, {}, [False]),
        ("v5p:2x2x2", SPARSE_CORE, {"param_specs": SPLIT}, [True, True]),
        ("v6e:2x4", SPARSE_CORE, {}, [True, True]),
        ("v6e:2x4", SPARSE_CORE, {"param_specs": SPLIT}, [True, True]),
    ],
)
def test_the_last_backward_pass_hides_the_reduction(target, options, specs, due):
    program = compiled(target, options, overlap=True, **specs)
    assert sorted(hidden(program), reverse=True) == due
    inside = [c for c in ga.audit(program).in_loop if c.num_bytes > GRADIENT / 100]
    kinds = {"reduce-scatter" if specs else "all-reduce"}
    assert {c.kind for c in inside} == kinds
    assert sum(c.total_bytes for c in inside) >= GRADIENT * (LAYERS - 1) / LAYERS


@pytest.mark.parametrize(
    ("target", "options", "specs", "due"),
    [
        ("h200:8", H200, {}, 7),
        ("h200:8", H200, {"param_specs": P("data")}, 7),
        ("v5e:2x4", V5E, {}, 7),
        ("v5p:2x2x2", SPARSE_CORE, {}, 7),
        ("v6e:2x4", SPARSE_CORE, {}, 7),
        ("v6e:2x4", SPARSE_CORE, {"param_specs": P("data")}, 7),
    ],
)
def test_so_it_does_for_layers_that_no_scan_runs_over(target, options, specs, due):
    """Of all eight matrices at most seven: behind the last one there is no work."""

    def count(**more):
        program = compiled(target, options, unrolled, **specs, **more)
        sent = [c for c in ga.audit(program).collectives if c.kind != "all-gather"]
        assert sum(c.total_bytes for c in sent) == GRADIENT + 4  # the loss
        return sum(hidden(program, in_loops=False))

    assert count(overlap=True) == due
    assert count() == 0  # the twin: it starts when all is done


def test_without_overlap_nothing_communicates_in_a_loop():
    program = compiled("h200:8", H200)
    assert hidden(program) == []
    assert not ga.audit(program).in_loop


@pytest.mark.parametrize("target", ["h200:8", "v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_a_sharded_sum_takes_an_eighth_and_sends_one_gradient_a_micro_batch(target):
    options = SCATTERS if target.startswith("v5p") else {}
    whole = compiled(target, options)
    program = compiled(target, options, grad_specs=SPLIT, sync="each")
    inside = ga.audit(program).in_loop
    assert {c.kind for c in inside} == {"reduce-scatter"}
    assert sum(c.total_bytes for c in inside) == K * GRADIENT
    if target == "h200:8":
        program = compiled(target, H200, grad_specs=SPLIT, sync="each")
        assert hidden(program) == [True, True]
    saved = needed(whole) - needed(program)
    # But for the gradient of a layer, and its part.
    assert saved >= GRADIENT * (1 - 1 / DEVICES - 1.25 / LAYERS)


@pytest.mark.parametrize(
    ("target", "devices", "options"),
    [
        ("h200:8", 8, {}),
        ("v5e:2x4", 8, {}),
        ("v5p:2x2x2", 8, SCATTERS),
        ("v5e:8x8", 64, GATHERS | SCATTERS),
        ("v5p:4x4x4", 64, SCATTERS),
        ("v6e:8x8", 64, GATHERS_V6E | SCATTERS),
    ],
)
def test_sharded_parameters_are_gathered_and_gradients_reduce_scattered(
    target, devices, options
):
    """One gradient and two gathers a micro-batch, of bfloat16 on TPUs."""

    def inside(compiler_options):
        axis = {"param_specs": SPLIT, "sync": "each"}
        program = compiled(target, compiler_options, devices=devices, **axis)
        found = [c for c in ga.audit(program).in_loop if c.num_bytes > 1000]
        sent = sum(c.total_bytes for c in found) / (K * GRADIENT)
        return sent, {c.kind for c in found}

    due = 1 + (2 if target == "h200:8" else 1) / devices
    assert inside(options) == (due, {"all-gather", "reduce-scatter"})
    if options:  # the twin: what XLA chooses by itself
        if GATHERS.items() <= options.items():
            assert inside({}) == (3, {"all-reduce"})
        else:
            assert inside({}) == (due, {"all-gather", "all-reduce"})


def needed(program):
    memory = program.memory_analysis()
    return targets.temporaries(program) + memory.output_size_in_bytes
