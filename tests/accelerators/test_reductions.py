"""Sharded sums and sharded parameters, by the compilers of GPUs and TPUs."""

import collections

import jax
import jax.numpy as jnp
import pytest
import targets  # before a backend starts
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._compiled import audit, plan

K, DEVICES, LAYERS, WIDTH, ROWS = 2, 8, 4, 1024, 256
GRADIENT = 2 * LAYERS * WIDTH * WIDTH * 4
SPLIT = P(None, "data")
# So that collectives of two leaves stay two, and each hides behind a product.
H200 = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 0}
OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
# Devices that are no ring reduce-scatter with this, and not only in an all-reduce.
SCATTERS = {OFFLOAD + "nd_reduce_scatter": True}
# Many devices gather small arrays with these, and not by an all-reduce of zeros.
GATHERS = {"xla_tpu_prefer_async_allgather_to_allreduce": True}
GATHERS_V6E = GATHERS | {OFFLOAD + k: True for k in ("all_gather", "2d_all_gather")}


def loss(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)


def compiled(target, compiler_options, devices=DEVICES, **options):
    mesh = AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, options.get("param_specs", P()))
    dims = LAYERS, WIDTH, WIDTH
    one = jax.ShapeDtypeStruct(dims, jnp.float32, sharding=place)
    params = {"up": one, "down": one}
    rows = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((K * devices * ROWS, WIDTH), jnp.float32, sharding=rows)
    step = ga.value_and_grad(loss, K, data_axis=ga.DataAxis("data", **options))
    with plan.find_machine(target).arguments((params, x)) as shapes:
        lowered = jax.jit(lambda *args: step(*args)).lower(*shapes)
    return lowered.compile(compiler_options=compiler_options)


def hidden(program):
    """For each asynchronous collective in a loop: whether it hides behind a product."""
    module, found = audit.parse_hlo(program.as_text()), []
    loops = [p.instruction.computation for p in module.walk() if p.loops]
    for body in {id(body): body for body in loops}.values():
        products, starts = [], {}
        for n, line in enumerate(body.values()):
            fused = [p.instruction for name in line.called for p in module.walk(name)]
            if any(x.opcode in ("dot", "convolution") for x in (line, *fused)):
                products.append(n)
            if line.opcode.endswith("-start"):
                starts[line.name] = n
            first = line.operands[0].lstrip("%") if line.operands else ""
            ends = first in starts and line.opcode.endswith("-done")
            if ends and "scatter" in first:
                found.append(any(starts[first] < at < n for at in products))
    return found


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


@pytest.mark.parametrize(
    ("target", "options"), [("h200:8", {}), ("v5p:2x2x2", SCATTERS)]
)
def test_what_a_model_casts_is_gathered_in_bfloat16(target, options):
    """Layers, twice a micro-batch. What a table is read for goes to its rows."""
    words, length, low = 8192, 16, jnp.bfloat16

    def of_tokens(params, tokens):
        def layer(h, w):
            return h + jnp.tanh(h @ w.astype(low)), None

        h = params["table"].astype(low)[tokens]
        h = jax.lax.scan(jax.checkpoint(layer), h, params["layers"])[0]
        return jnp.mean(h.astype(jnp.float32) ** 2)

    mesh = AbstractMesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    shapes = {"table": (words, WIDTH), "layers": (LAYERS, WIDTH, WIDTH)}
    specs = {"table": P(None, "data"), "layers": P(None, None, "data")}
    params = {
        name: jax.ShapeDtypeStruct(
            dims, jnp.float32, sharding=NamedSharding(mesh, specs[name])
        )
        for name, dims in shapes.items()
    }
    place = NamedSharding(mesh, P("data"))
    tokens = jax.ShapeDtypeStruct((K * 64, length), jnp.int32, sharding=place)

    def of_axis(axis):
        step = ga.value_and_grad(of_tokens, K, data_axis=axis)
        with plan.find_machine(target).arguments((params, tokens)) as args:
            lowered = jax.jit(lambda *args: step(*args)).lower(*args)
        return ga.audit(lowered.compile(compiler_options=options))

    each = ga.DataAxis("data", param_specs=specs, sync="each")
    sent = collections.Counter()
    for c in of_axis(each).in_loop:
        sent[c.kind] += c.total_bytes
    layers = LAYERS * WIDTH * WIDTH * 2 // DEVICES
    ids = 64 * length * 4 // DEVICES
    assert sent["all-gather"] == K * (2 * layers + ids)
    assert sent["all-to-all"] == 2 * K * 64 // DEVICES * length * WIDTH * 2

    # With sync="last" all is gathered once, and each device casts its part before.
    once = of_axis(ga.DataAxis("data", param_specs=specs))
    whole = (words + LAYERS * WIDTH) * WIDTH * 2
    sent = [c.total_bytes for c in once.collectives if c.kind == "all-gather"]
    assert sum(sent) == whole // DEVICES
    assert not [c for c in once.in_loop if c.num_bytes > 1000]


def needed(program):
    memory = program.memory_analysis()
    return targets.temporaries(program) + memory.output_size_in_bytes
