"""Kernels of accelerators, compiled: each micro-batch runs them on its own rows."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
import targets
from helpers import mean_of

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")
ROWS, TIME, HEADS, HEAD, K = 32, 512, 4, 128, 8
WIDTH = HEADS * HEAD


@pytest.fixture
def cudnn(monkeypatch):
    """JAX as if cuDNN were there, which compiles as well without it."""
    attention = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(attention, "check_cudnn_version", lambda: 91300)


def of_cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def flash(q, k, v):
    tpu = pytest.importorskip("jax.experimental.pallas.ops.tpu.flash_attention")
    swap = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    return swap(tpu.flash_attention(*map(swap, (q, k, v)), causal=True))


def splash(q, k, v):
    ops = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"
    masks, kernels = (pytest.importorskip(ops + name) for name in ("mask", "kernel"))
    mask = masks.MultiHeadMask([masks.CausalMask((TIME, TIME))] * HEADS)
    kernel = kernels.make_splash_mha_single_device(mask)
    swap = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    return swap(jax.vmap(kernel)(*map(swap, (q, k, v))))


def loss_of(attend):
    def loss(params, x):
        shape = *x.shape[:2], HEADS, HEAD
        q, k, v = (jnp.reshape(x @ params[name], shape) for name in "qkv")
        y = attend(q, k, v).reshape(x.shape) @ params["out"]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return loss


def compiled(target, step):
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((ROWS, TIME, WIDTH), jnp.bfloat16)
    params = dict.fromkeys(("q", "k", "v", "out"), matrix)
    return targets.compiled(target, step, params, x)


def rows_of_calls(program, name):
    """How many rows the first result of each call of a kernel has."""
    pattern = rf"= \(?\w+\[(\d+),[^=]*custom-call\([^\n]*{name}"
    return {int(n) for n in re.findall(pattern, program.as_text())}


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("target", "attend", "name"),
    [
        ("h200", of_cudnn, "__cudnn"),
        ("v5e", flash, "tpu_custom_call"),
        ("v5e", splash, "tpu_custom_call"),
    ],
)
def test_a_kernel_of_an_accelerator_runs_on_the_rows_of_a_micro_batch(
    target, attend, name
):
    loss = loss_of(attend)
    ours, plain, undivided = (
        compiled(target, step)
        for step in (ga.value_and_grad(loss, K), mean_of(loss, K), jax.grad(loss))
    )
    assert rows_of_calls(ours, name) == {ROWS // K}
    assert rows_of_calls(undivided, name) == {ROWS}  # The twin.
    assert targets.temporaries(ours) <= 1.1 * targets.temporaries(plain)
