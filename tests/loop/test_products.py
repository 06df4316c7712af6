"""In a bfloat16 model gradients are rounded in the accumulator, and not before."""

import re

import helpers
import jax
import jax.numpy as jnp
import pytest

import ga_optax as ga
from ga_optax._devices import meshes
from ga_optax._loop import micro_step
from ga_optax.testing import assert_trees_bitwise_equal

ROWS, WIDTH, LAYERS, K = 512, 8, 2, 4
NARROW = jnp.bfloat16


def narrow(x):
    return x.astype(NARROW)


def wide(x):
    return x.astype(jnp.float32)


def one_device(monkeypatch):
    monkeypatch.setattr(meshes, "is_open", lambda tree: False)


def text_for(platform, step, *args):
    return jax.jit(step).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_a_product_over_rows_and_positions_runs_on_cpus():
    """XLA:CPU cannot run that of `x @ w` without casts: BF16 x BF16 = F32."""

    def loss(w, x):
        return jnp.mean(wide(x @ narrow(w)) ** 2)

    w, x = jnp.ones((8, 4)), jnp.ones((4, 4, 8), NARROW)
    grads = jax.jit(ga.value_and_grad(loss, 2))(w, x)[1]
    assert_trees_bitwise_equal(grads, jax.grad(loss)(w, x))  # powers of two


KEEP = {  # what does not go on in float32: the dtype of the model, and options
    "a float32 model": (jnp.float32, lambda mesh: {}),
    "a float64 model": (jnp.float64, lambda mesh: {}),
    "a narrow accumulator": (NARROW, lambda mesh: {"accumulator_dtype": NARROW}),
    "what the compiler reduces over devices": (
        NARROW,
        lambda mesh: {"data_axis": ga.DataAxis("data", mesh=mesh, sync="each")},
    ),
    "rows on devices": (NARROW, lambda mesh: {}),
    "none": (NARROW, lambda mesh: {"data_axis": ga.DataAxis("data", mesh=mesh)}),
}


@pytest.mark.quick
@pytest.mark.parametrize("why", KEEP)
def test_what_is_not_rounded_twice_keeps_its_program(why, monkeypatch):
    (dtype, options), mesh = KEEP[why], helpers.mesh_of(2)

    def loss(w, x):
        x = (x + x).astype(dtype)  # something is narrow
        return jnp.mean(wide(x @ w.astype(dtype)) ** 2)

    x = jnp.ones((16, 8), NARROW)
    if "devices" in why or why == "none":
        x = helpers.put(x, mesh, jax.P("data"))

    def program():
        step = ga.value_and_grad(loss, K, **options(mesh))
        with jax.enable_x64(dtype == jnp.float64):
            return str(jax.make_jaxpr(step)(jnp.ones((8, 8), jnp.float32), x))

    new = program()
    helpers.without_pass(monkeypatch, "products")
    old, of_cpus = program(), "= platform_index["  # each has a form for CPUs
    assert new.count(of_cpus) - old.count(of_cpus) == (why == "none")
    assert (new == old) == (why != "none")


def barriers_of_gpus(step, *args):
    """How many fences a program has for GPUs alone."""
    cuda, tpu = (barriers(text_for(name, step, *args)) for name in ("cuda", "tpu"))
    return cuda - tpu


def barriers(text):
    """How many there are once every function stands where it is called."""
    functions = re.split(r"func\.func (?:public|private) @", text)[1:]
    bodies = {body[: body.index("(")]: body for body in functions}

    def inside(body):
        called = re.findall(r" (?:func\.)?call @(\w+)", body)
        return body.count("optimization_barrier") + sum(
            inside(bodies[f]) for f in called
        )

    return inside(bodies["main"])


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("flags", "fences"),
    [
        ("", 1),
        ("--xla_gpu_enable_triton_gemm=false", 0),
        ("--xla_gpu_enable_triton_gemm=false --xla_gpu_enable_triton_gemm=true", 1),
    ],
)
def test_a_product_of_triton_is_added_after_it_and_no_other_sum(
    flags, fences, monkeypatch
):
    """On GPUs, if the matrix is a slice of a scan; a scale's sum stays one kernel."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    one_device(monkeypatch)

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w["matrix"]) * w["scale"][None], None

    def loss(w, h):
        return jnp.mean(jax.lax.scan(layer, h, w)[0] ** 2)

    w = {"matrix": jnp.ones((3, 8, 8)), "scale": jnp.ones((3, 8))}
    step = ga.value_and_grad(loss, 2)
    due = fences if micro_step.HAS_REFS else 0
    assert barriers_of_gpus(step, w, jnp.ones((32, 8))) == due
    # If the compiler may distribute it, it has to take reductions past the addition.
    monkeypatch.undo()
    assert barriers_of_gpus(ga.value_and_grad(loss, 2), w, jnp.ones((32, 8))) == 0
