"""What the compilers of GPUs and TPUs make of a micro-step: exact, without a device."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
import targets
from helpers import ROOT, python

import ga_optax as ga
from ga_optax._passes import table

pytestmark = pytest.mark.usefixtures("optax_promotion")


def unrolled(layers, x):
    for w in layers:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def added_in_products(window):
    """Matrix products of one H200 that add to what they write to."""
    args = targets.shapes([[(512, 512)] * 4, (64, 512)])
    # A device chooses for each product; here cuBLAS, whose products can add.
    options = {"xla_gpu_enable_triton_gemm": False}
    text = targets.compiled("h200", window, *args, **options).as_text()
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
    params = {"table": (4096, 512), "head": (512, 4096), "layers": layers}
    x = jax.ShapeDtypeStruct((24, 160), jnp.int32)
    step = ga.value_and_grad(functools.partial(model, dtype), 4)
    program = targets.compiled(target, step, targets.shapes(params), x, **options)
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


@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_the_cost_of_a_change_can_be_had_of_their_compilers(target):
    """The script says itself that there is no device."""
    command = "benchmarks/compare.py", "--target", target, "--quick"
    done = python(*command, cwd=ROOT, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="")
    assert (done.returncode, done.stdout) == (0, "2 losses.\n"), done.stderr
