"""Gradients that meet inside the backward pass, by the compilers of GPUs and TPUs."""

import re

import jax
import jax.numpy as jnp
import pytest
import targets  # before a backend starts
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax import _hlo, _target

K, DEVICES, LAYERS, WIDTH, ROWS = 2, 8, 4, 1024, 256
GRADIENT = 2 * LAYERS * WIDTH * WIDTH * 4
MESH = AbstractMesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
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
SPARSE_CORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
}


def loss(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


def compiled(target, compiler_options, **options):
    spec = options.get("param_specs", P())
    matrix = jax.ShapeDtypeStruct(
        (LAYERS, WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(MESH, spec)
    )
    rows = NamedSharding(MESH, P("data"))
    x = jax.ShapeDtypeStruct((K * DEVICES * ROWS, WIDTH), jnp.float32, sharding=rows)
    step = ga.value_and_grad(loss, K, data_axis=ga.DataAxis("data", **options))
    with _target.find(target).arguments(({"up": matrix, "down": matrix}, x)) as shapes:
        lowered = jax.jit(lambda *args: step(*args)).lower(*shapes)
    return lowered.compile(compiler_options=compiler_options)


def hidden(program):
    """For each asynchronous collective in a loop: whether it hides behind a product.

    That is a start, a matrix product, and the end, in this order of the schedule.
    """
    module = _hlo.parse(program.as_text())
    bodies = [
        p.instruction.computation for p in module.walk(into_fusions=False) if p.loops
    ]
    found = []
    for body in {id(body): body for body in bodies}.values():
        products, starts, chains = [], {}, {}
        for n, line in enumerate(body.values()):
            inside = module.inside(line)
            if any(x.opcode in ("dot", "convolution") for x in inside):
                products.append(n)
            first = line.operands[0].lstrip("%") if line.operands else ""
            if re.fullmatch("(all-reduce|reduce-scatter|call)-start", line.opcode):
                starts[line.name] = n
            elif first in starts and line.opcode.endswith("-update"):
                starts[line.name] = starts[first]
            elif first in starts and line.opcode.endswith("-done"):
                found.append(any(starts[first] < at < n for at in products))
            for x in inside:  # v5e: several fusions with one chain
                if chain := x.attribute(_hlo.CHAIN):
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
        ("v5p:2x2x2", SPARSE_CORE, {}, [True]),
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


def test_without_overlap_nothing_communicates_in_a_loop():
    program = compiled("h200:8", H200)
    assert hidden(program) == []
    assert not ga.audit(program).in_loop


@pytest.mark.parametrize("target", ["h200:8", "v5e:2x4", "v6e:2x4"])
def test_a_sharded_sum_takes_an_eighth_and_sends_one_gradient_a_micro_batch(target):
    whole = compiled(target, {})
    program = compiled(target, {}, grad_specs=SPLIT, sync="each")
    inside = ga.audit(program).in_loop
    assert {c.kind for c in inside} == {"reduce-scatter"}
    assert sum(c.total_bytes for c in inside) == K * GRADIENT
    if target == "h200:8":
        program = compiled(target, H200, grad_specs=SPLIT, sync="each")
        assert hidden(program) == [True, True]
    saved = needed(whole) - needed(program)
    # But for the gradient of a layer, and its part.
    assert saved >= GRADIENT * (1 - 1 / DEVICES - 1.25 / LAYERS)


def needed(program):
    memory = program.memory_analysis()
    return targets.temporaries(program) + memory.output_size_in_bytes
