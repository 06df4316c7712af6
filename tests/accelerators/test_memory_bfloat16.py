"""The memory of a window of a bfloat16 model: one micro-batch's, and sums outside."""

import jax
import jax.numpy as jnp
import pytest
import targets

import ga_optax as ga
from ga_optax._loop import micro_step

pytestmark = pytest.mark.usefixtures("optax_promotion")

K, ROWS, LENGTH, VOCABULARY, WIDTH, INNER = 8, 4, 256, 2048, 1024, 4096
OUTSIDE = 2 * 4 * VOCABULARY * WIDTH
MATRIX = 4 * WIDTH * INNER
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def loss(params, tokens):
    def low(x):
        return x.astype(jnp.bfloat16)

    @jax.checkpoint
    def layer(h, w):
        return h + jnp.tanh(h @ low(w["up"])) @ low(w["down"]), None

    h = low(params["embedding"])[tokens[:, :-1]]
    h, _ = jax.lax.scan(layer, h, params["layers"])
    logits = (h @ low(params["head"])).astype(jnp.float32)
    found = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(found, tokens[:, 1:, None], -1))


def temporaries(gradient, target, layers, k, options):
    """Those of a step of Adam with k micro-batches."""
    of_layers = {"up": (layers, WIDTH, INNER), "down": (layers, INNER, WIDTH)}
    ends = {"embedding": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    params = targets.shapes(ends | {"layers": of_layers})
    tokens = jax.ShapeDtypeStruct((k * ROWS, LENGTH + 1), jnp.int32)
    program = targets.of_adam(target, gradient, params, tokens, **options)
    return targets.temporaries(program)


@pytest.mark.parametrize(
    ("target", "layers", "options", "held"),
    [
        ("h200", 12, {}, OUTSIDE),
        ("h200", 12, CUBLAS, OUTSIDE),
        # What does not grow with the layers counts less: those sums, a layer's work.
        ("h200", 24, {}, 0),
        ("h200", 24, CUBLAS, 0),
        # Casts of all of 12 layers would fit the fast memory of one micro-batch.
        ("v5e", 16, {}, 0),
        ("v5p", 12, {}, 0),
        ("v6e", 12, {}, 0),
    ],
)
def test_a_window_takes_one_micro_batch_and_the_sums_outside_of_its_scan(
    target, layers, options, held
):
    alone = temporaries(jax.value_and_grad(loss), target, layers, 1, options)
    window = temporaries(ga.value_and_grad(loss, K), target, layers, K, options)
    assert window <= 1.05 * alone + held


def test_casts_that_are_held_through_the_window_would_be_seen(monkeypatch):
    """Those of the embedding and the head, on TPUs: half as large as their sums.

    XLA rounds what it takes up to pages of 4 KiB or less.
    """
    inside = temporaries(ga.value_and_grad(loss, K), "v6e", 12, K, {})
    monkeypatch.setattr(micro_step, "cast_inside", lambda leaves, *_: leaves)
    before = temporaries(ga.value_and_grad(loss, K), "v6e", 12, K, {})
    assert before - inside >= OUTSIDE / 2 - 4096


def test_a_second_gradient_of_the_layers_would_be_seen():
    """The twin: a plain scan."""
    plain = ga.value_and_grad(loss, K, optimize=False)
    alone = temporaries(jax.value_and_grad(loss), "h200", 12, 1, {})
    window = temporaries(plain, "h200", 12, K, {})
    assert window > 1.5 * alone + OUTSIDE + 2 * MATRIX
