"""What the compilers of GPUs and TPUs make of a micro-step: exact, without a device."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
import targets
from helpers import python

import ga_optax as ga
from ga_optax._passes import table

pytestmark = pytest.mark.usefixtures("optax_promotion")

# Larger than a TPU's vector memory, so that its temporaries lie where they are counted.
SHAPE, LAYERS = (4096, 4096), 4
PARAMS = {f"layer_{i}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for i in range(LAYERS)}
PARAMS["bias"] = jax.ShapeDtypeStruct(SHAPE[:1], jnp.float32)
BYTES = sum(p.size * p.dtype.itemsize for p in PARAMS.values())
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw, clipped": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1, 9))
    ),
    "sgd": optax.sgd(0.1),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(1e-3),
}
# What computes nothing; a TPU also prefetches to its vector memory.
MOVES = {"parameter", "get-tuple-element", "tuple", "bitcast", "conditional"}
MOVES |= {f"{what}-{when}" for what in ("copy", "slice") for when in ("start", "done")}
MOVES.add("custom-call")  # which concatenates what was prefetched in slices


def micro_step(target, tx, emit=None):
    """A donated micro-step whose gradients are given."""

    def step(params, state, grads):
        return ga.apply_gradients(tx, grads, state, params, emit=emit)

    state = jax.eval_shape(tx.init, PARAMS)
    return targets.compiled(target, step, PARAMS, state, PARAMS, donate_argnums=(0, 1))


def computed(lines):
    """How many leaves these instructions compute: a fusion may compute several."""
    shape = f"[{','.join(map(str, SHAPE))}]"
    results = [re.search(r" = (.*?) ([a-z][\w-]*)\(", line).groups() for line in lines]
    return sum(kind.count(shape) for kind, opcode in results if opcode not in MOVES)


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_runs_inside_one_branch_of_one_conditional(name, target):
    program = micro_step(target, ga.MultiSteps(OPTIMIZERS[name], 8))
    computations = targets.computations(program)
    [conditional] = [
        line
        for lines in computations.values()
        for line in lines
        if " conditional(" in line and "cond" in line
    ]
    branches = re.findall(r"(?:computation=|[{] ?|, )%([\w.-]+)(?=[,}])", conditional)
    leave, step = sorted(
        computed(computations[b]) for b in branches if b in computations
    )
    assert leave == 0
    assert step >= LAYERS
    # And before it the additions alone.
    assert computed(computations["ENTRY"]) == LAYERS


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_transformation_has_no_temporaries(target):
    tx = ga.MultiSteps(optax.adam(1e-3), 8)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS
    program = targets.compiled(target, step, *args, donate_argnums=(0, 1))
    assert targets.temporaries(program) <= 0.01 * BYTES


# -- Inside a call ---------------------------------------------------------------------


def unrolled(layers, x):
    for w in layers:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def added_in_products(window):
    """Matrix products of one H200 that add to what they write to."""
    layers = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    # A device chooses for each product; here cuBLAS, whose products can add.
    options = {"xla_gpu_enable_triton_gemm": False}
    text = targets.compiled("h200", window, layers, x, **options).as_text()
    gemms = [line for line in text.splitlines() if "__cublas" in line]
    assert gemms
    return sum('"beta":1' in line for line in gemms)


def by_hand(layers, x, add=jnp.add):
    def micro_step(total, x):
        return jax.tree.map(add, total, jax.grad(unrolled)(layers, x)), None

    zeros = jax.tree.map(jnp.zeros_like, layers)
    return jax.lax.scan(micro_step, zeros, x.reshape(4, 16, -1))[0]


def test_weight_gradients_are_added_inside_their_matrix_products():
    most = added_in_products(by_hand)
    assert most == 4
    assert added_in_products(lambda *a: ga.value_and_grad(unrolled, 4)(*a)[1]) == most
    # The twin: after a select there is an addition of its own.
    assert not added_in_products(
        functools.partial(by_hand, add=lambda t, g: jnp.where(t[0, 0] == 0, g, t + g))
    )


def model(dtype, params, x):
    def layer(h, w):
        gate, up, down = (w[name].astype(dtype) for name in ("gate", "up", "down"))
        h = h * w["norm"].astype(dtype)
        return h + (jnp.tanh(h @ gate) * (h @ up)) @ down, None

    h = params["table"].astype(dtype)[x]
    h, _ = jax.lax.scan(jax.checkpoint(layer), h, params["layers"])
    logits = (h @ params["head"].astype(dtype)).astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, -1))


def only(what, target, dtype, **options):
    """Kernels that add a part of a gradient, or write one, and sum up nothing."""
    layers = {"gate": (3, 512, 2048), "up": (3, 512, 2048), "down": (3, 2048, 512)}
    layers["norm"] = (3, 512)
    shapes = {"table": (4096, 512), "head": (512, 4096), "layers": layers}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    x = jax.ShapeDtypeStruct((24, 160), jnp.int32)
    step = ga.value_and_grad(functools.partial(model, dtype), 4)
    program = targets.compiled(target, step, params, x, **options)
    kind = r" = f32\[(1,|3,)?((512|2048|4096),)?(512|2048|4096)\]\S* "
    found = re.compile(kind + {"add": "add", "write": "dynamic-update-slice"}[what])
    sums = re.compile(r" (dot|convolution|scatter|reduce)\(|__cublas|calls=.*scatter")
    if what == "write":  # or divide the sum, after the loop
        sums = re.compile(kind + r"(add|divide|multiply)\(|calls=|^ENTRY")
    return sum(
        any(map(found.search, lines)) and not any(map(sums.search, lines))
        for lines in targets.computations(program).values()
    )


@pytest.mark.parametrize(
    ("target", "triton", "dtype", "before"),
    [
        ("h200", False, jnp.bfloat16, 5),
        ("h200", False, jnp.float32, 3),
        ("v5e", None, jnp.bfloat16, 2),
    ],
)
def test_products_add_what_they_compute(target, triton, dtype, before, monkeypatch):
    gpu = {} if triton is None else {"xla_gpu_enable_triton_gemm": triton}
    # The vector of all layers is added by one kernel.
    assert only("add", target, dtype, **gpu) == 1
    # The twin: rounded to bfloat16 first, and merged if they share an operand.
    rest = [one for one in table.PASSES if one.name != "products"]
    monkeypatch.setattr(table, "PASSES", rest)
    assert only("add", target, dtype, **gpu) == before


# -- A micro-step of an embedding ------------------------------------------------------


def looked_up(params, x):
    return jnp.mean(jnp.tanh(params["table"][x] @ params["w"]) ** 2)


TABLE = {
    "table": jax.ShapeDtypeStruct((50_000, 512), jnp.float32),
    "w": jax.ShapeDtypeStruct((512, 512), jnp.float32),
}
TOKENS = jax.ShapeDtypeStruct((8, 4), jnp.int32)


@pytest.mark.parametrize("target", targets.TARGETS)
@pytest.mark.parametrize("emit", [None, False])
def test_a_micro_step_of_an_embedding_has_no_second_table(emit, target):
    tx = ga.MultiSteps(optax.adam(1e-3), 8)

    def step(params, state, x):
        grads = jax.grad(looked_up)(params, x)
        return ga.apply_gradients(tx, grads, state, params, emit=emit)

    state = jax.eval_shape(tx.init, TABLE)
    program = targets.compiled(
        target, step, TABLE, state, TOKENS, donate_argnums=(0, 1)
    )
    table = TABLE["table"].size * 4
    assert targets.temporaries(program) < 0.1 * table

    # The twin: a select after the addition.
    def selected(total, count, params, x):
        grads = jax.grad(looked_up)(params, x)
        return jax.tree.map(lambda t, g: jnp.where(count == 0, g, t + g), total, grads)

    args = TABLE, state.mini_step, TABLE, TOKENS
    program = targets.compiled(target, selected, *args, donate_argnums=0)
    assert targets.temporaries(program) >= table


@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_the_cost_of_a_change_can_be_had_of_their_compilers(target):
    """The script says itself that there is no device."""
    command = "benchmarks/compare.py", "--target", target, "--quick"
    root = pathlib.Path(__file__).parents[2]
    done = python(*command, cwd=root, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="")
    assert (done.returncode, done.stdout) == (0, "2 losses.\n"), done.stderr
