"""One law for each function: what it equals, what it is called with, what it costs."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mean_of, products, temporaries

import ga_optax as ga

K, ROWS, WIDTH, LAYERS = 4, 64, 64, 3

# -- What it is called with ------------------------------------------------------------

BATCH = {"batch_argnums": 1, "batch_argnames": (), "batch_axes": 0, "data_axis": None}
ROWS_OF = {"num_microbatches": None, "microbatch_size": None} | BATCH
OF = {"argnums": 0, "has_aux": False}
SIGNATURES = {
    ga.value_and_grad: ROWS_OF
    | OF
    | {"residual_bytes": None, "accumulator_dtype": jnp.float32, "optimize": True},
    ga.batch_dependencies: ROWS_OF | OF | {"residual_bytes": None},
    ga.microbatch: ROWS_OF,
    ga.accumulate: {"num_microbatches": 1, "optimize": True, "weight_fn": None}
    | BATCH
    | OF
    | {"aux": "mean", "num_real_microbatches": None}
    | dict.fromkeys(["rng_argnums", "rng_argnames", "carry_argnums"], ()),
}


@pytest.mark.quick
@pytest.mark.parametrize("fun", SIGNATURES, ids=lambda fun: fun.__name__)
def test_functions_of_rows_share_their_words(fun):
    _, *rest = inspect.signature(fun).parameters.values()
    assert {p.name: p.default for p in rest} == SIGNATURES[fun]
    assert [p.name for p in rest if p.kind != p.KEYWORD_ONLY] == ["num_microbatches"]


NUMBER = dict.fromkeys(
    [
        "gradient_accumulation_steps",
        "accumulate_grad_batches",
        "every_k",
        "every_k_schedule",
        "n_accum",
    ],
    "num_microbatches",
)
EVERYWHERE = NUMBER | {"in_axes": "batch_axes"}
EACH = ["weight_fn", "aux", "rng_argnums", "rng_argnames", "carry_argnums"]
LAW = dict.fromkeys([*EACH, "num_real_microbatches"], "ga_optax.accumulate")
LAW |= {"whole_batch": "always that of the whole batch", "axis_name": "Leave it out"}
OF_EACH = dict.fromkeys(
    ["whole_batch", "axis_name", "residual_bytes"], "ga_optax.value_and_grad"
)
OF_EACH |= {
    "microbatch_size": "num_microbatches",
    "accumulator_dtype": "ga_optax.accumulator.init",
}
WORDS = [
    *((ga.value_and_grad, *one) for one in (EVERYWHERE | LAW).items()),
    *((ga.accumulate, *one) for one in (EVERYWHERE | OF_EACH).items()),
    *((ga.microbatch, *one) for one in EVERYWHERE.items()),
    *((ga.batch_dependencies, *one) for one in EVERYWHERE.items()),
]


@pytest.mark.quick
@pytest.mark.parametrize(("fun", "word", "instead"), WORDS)
def test_a_word_of_others_gets_the_one_to_use(fun, word, instead):
    with pytest.raises(TypeError) as raised:
        fun(jnp.mean, **{word: 2})
    assert f"{fun.__name__} must be among num_microbatches, " in str(raised.value)
    _, came, todo = str(raised.value).partition(f" but {word} came. ")
    assert came
    assert instead in todo


@pytest.mark.quick
def test_a_word_of_nobody_is_pythons_to_refuse():
    """The twin: a word is explained only if something is known of it."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        ga.value_and_grad(jnp.mean, 2, rows=3)


# -- What it equals --------------------------------------------------------------------


def error(p, b):
    return jnp.mean((jnp.tanh(b["x"] @ p["w"]) @ p["v"] - b["y"]) ** 2, 1)


def masked_mean(p, b):
    return jnp.sum(error(p, b) * b["mask"]) / jnp.sum(b["mask"])


def contrastive(p, b):
    z = b["x"] @ p["w"]
    z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
    logits = z @ (b["y"] @ p["v"].T).T
    return jnp.mean(jax.nn.logsumexp(logits, 1) - jnp.diagonal(logits))


def batch_norm(p, b):
    h = b["x"] @ p["w"]
    h = (h - h.mean(0)[None]) / jnp.sqrt(h.var(0) + 1e-5)[None]
    return jnp.mean((jnp.tanh(h) @ p["v"] - b["y"]) ** 2)


def balance(p, b):
    share = jax.nn.softmax(b["x"] @ p["w"])
    chosen = jax.nn.one_hot(share.argmax(1), WIDTH, dtype=share.dtype)
    return error(p, b).mean() + WIDTH * jnp.sum(share.mean(0) * chosen.mean(0))


def deviation(p, b):
    return jnp.std(error(p, b))


def hardest(p, b):
    return jax.lax.top_k(error(p, b), 5)[0].mean()


LOSSES = [masked_mean, contrastive, batch_norm, balance, deviation, hardest]


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("loss", LOSSES)
def test_any_loss_has_the_gradient_of_the_undivided_batch(loss, k):
    with jax.enable_x64(True):
        x, y = (normal(i, ROWS, n, dtype="f8") for i, n in enumerate((6, 5)))
        batch = {"x": x, "y": y, "mask": (y[:, 0] > 0).astype(x.dtype)}
        params = {n: normal(i, *s, dtype="f8") for i, (n, s) in enumerate(SHAPES)}

        def off(make, *options):
            step = jax.jit(make(loss, *options))
            pairs = zip(*map(jax.tree.leaves, (step(params, batch), due)), strict=True)
            return max(np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in pairs)

        due = jax.value_and_grad(loss)(params, batch)
        assert off(ga.value_and_grad, k) < 1e-12
        if k > 1:  # the twin: each micro-batch by itself
            assert off(mean_of, k) > 1e-3


SHAPES = [("w", (6, WIDTH)), ("v", (WIDTH, 5))]

# -- What a mean costs -----------------------------------------------------------------


def square(h):
    return jnp.mean(jnp.square(h.astype(jnp.float32)))


def scanned(p, x, layer=lambda h, w: jnp.tanh(h @ w)):
    return square(jax.lax.scan(lambda h, w: (layer(h, w), None), x, p["w"])[0])


def unrolled(p, x):
    for w in p["w"]:
        x = jnp.tanh(x @ w)
    return square(x)


def rematerialised(p, x):
    return scanned(p, x, jax.checkpoint(lambda h, w: jnp.tanh(h @ w)))


def dropout(p, x, key):
    return scanned(p, jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0))


def relu(p, x):
    return scanned(p, x, lambda h, w: jax.nn.relu(h @ w))


def embedded(p, x):
    rows = jnp.clip(jnp.abs(x * 4).astype(jnp.int32), 0, WIDTH - 1)
    return scanned(p, p["table"][rows].mean(1))


def bfloat16(p, x):
    return scanned({"w": p["w"].astype(jnp.bfloat16)}, x.astype(jnp.bfloat16))


MEANS = [scanned, unrolled, rematerialised, dropout, relu, embedded, bfloat16]


def arguments(fun):
    params = {"w": normal(0, LAYERS, WIDTH, WIDTH) / 4}
    if fun is embedded:
        params["table"] = normal(1, WIDTH, WIDTH)
    key = [jax.random.key(0)] if fun is dropout else []
    return params, normal(2, 4 * ROWS, WIDTH), *key


@pytest.mark.grid(3, 7)
@pytest.mark.parametrize("fun", MEANS)
def test_a_mean_costs_what_micro_batches_by_themselves_cost(fun):
    """The same passes over the rows, the same products, and their temporaries."""
    args = arguments(fun)
    keys = {"rng_argnums": 2} if fun is dropout else {}

    def costs(step):
        text = jax.jit(step).lower(*args).compile().as_text()
        return products(step, *args), text.count(" dot(")

    law, each = ga.value_and_grad(fun, K), mean_of(fun, K, **keys)
    assert costs(law) == costs(each)
    needs = [temporaries(jax.jit(step), *args) for step in (law, each)]
    assert 0 < needs[0] <= 1.01 * needs[1]
    # The twin: where rows meet, the forward pass runs once more.
    met = ga.value_and_grad(lambda *args: jnp.sqrt(fun(*args)), K, residual_bytes=0)
    assert products(met, *args) > products(each, *args)


@pytest.mark.parametrize("held", [False, True])
def test_gradients_of_bfloat16_models_are_rounded_once(held):
    """By `u = eps / 2` of what comes out if parameters are held in bfloat16.

    Sums of the same terms in another order differ by `n·eps·Σ|terms|` in float32. The
    terms are those of rows: `jax.grad` of each, of which each product is rounded.
    """
    params, x = arguments(bfloat16)
    if held:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    step, acc = ga.accumulate(bfloat16, K), ga.accumulator.init(params)
    _, acc = jax.jit(step)(acc, params, x)
    sums = np.asarray(ga.accumulator.mean(acc)["w"], np.float64)
    terms = jax.vmap(jax.grad(bfloat16), (None, 0))(params, x[:, None])["w"]
    size = np.mean(np.abs(np.asarray(terms, np.float64)), 0)
    rounding = float(jnp.finfo(jnp.bfloat16).eps) / 2 if held else 0.0
    bound = rounding * np.abs(sums) + len(x) * np.finfo(np.float32).eps * size

    def off(gradient):
        got = np.asarray(jax.jit(gradient)(params, x)["w"], np.float64)
        return np.max(np.abs(got - sums) / bound)

    assert off(lambda p, x: ga.value_and_grad(bfloat16, K)(p, x)[1]) <= 1
    # The twin: they are added up in bfloat16.
    twin = mean_of(bfloat16, K, accumulator_dtype=jnp.bfloat16)
    assert off(lambda p, x: twin(p, x)[1]) > 1
