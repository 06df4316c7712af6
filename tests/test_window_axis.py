"""Under `axis_name` collectives see the window, as they do under `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from window_losses import (
    LOSSES,
    ROWS,
    arrays,
    contrastive,
    encode,
    of_each,
    of_the_window,
    random_loss,
    root_of_the_mean,
    split,
    token_mean,
)

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("fast_compilation")

K = 4
FUNS = [pytest.param(fun, id=fun.__name__) for fun in LOSSES]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def off_by(got, due):
    """The largest error of a leaf, relative to that leaf's largest number."""
    assert jax.tree.structure(got) == jax.tree.structure(due)
    got, due = ([x.astype(float) for x in jax.tree.leaves(t)] for t in (got, due))
    pairs = zip(got, due, strict=True)
    return max(float(jnp.max(abs(x - y)) / (jnp.max(abs(y)) + 1e-9)) for x, y in pairs)


def ours(fun, k=K, **options):
    return jax.jit(ga.value_and_grad(fun, k, axis_name=ROWS, **options))


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("fun", FUNS)
def test_value_and_gradients_are_those_of_a_vmapped_axis(fun):
    args = arrays()
    due = jax.jit(of_the_window(fun, K))(*args)
    assert off_by(ours(fun)(*args), due) < 1e-12
    # The twin: collectives that see one micro-batch each.
    assert off_by(jax.jit(of_each(fun, K))(*args), due) > 1e-3


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("seed", range(12))
def test_random_losses_have_the_gradients_of_a_vmapped_axis(seed):
    fun, args = random_loss(seed), arrays(seed)
    due = jax.jit(of_the_window(fun, K))(*args)
    assert off_by(ours(fun)(*args), due) < 1e-10


@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [1, 2, 16])
def test_the_number_of_micro_batches_says_nothing_about_the_loss(k):
    args = arrays()
    due = jax.jit(of_the_window(contrastive, 1))(*args)
    assert off_by(ours(contrastive, k)(*args), due) < 1e-12


@pytest.mark.published  # one of the longest
def test_a_window_goes_through_vmap_and_grad():
    (params, batch), (others, _) = arrays(), arrays(1)
    both = jax.tree.map(lambda *x: jnp.stack(x), params, others)
    got = jax.vmap(ours(contrastive), in_axes=(0, None))(both, batch)
    due = jax.vmap(of_the_window(contrastive, K), in_axes=(0, None))(both, batch)
    assert off_by(got, due) < 1e-12

    def norm(gradient):
        def of(params):
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient(params, batch)))

        return jax.jit(jax.grad(of))(params)

    assert off_by(norm(ours(token_mean)), norm(of_the_window(token_mean, K))) < 1e-10


# -- With the other options ------------------------------------------------------------


@pytest.mark.slow
def test_aux_and_weights_go_with_it():
    params, batch = arrays()

    def fun(p, b):
        z = encode(p, b)
        right = lax.psum(jnp.sum(z > 0), ROWS)
        aux = {
            "mean": jnp.mean(z),
            "sum": right,
            "last": lax.axis_index(ROWS),
            "stack": jnp.max(z),
            "whole": right.astype(float) / lax.psum(jnp.asarray(5.0), ROWS),
        }
        return token_mean(p, b) + contrastive(p, b), aux

    modes = {name: name for name in ("mean", "sum", "last", "stack")} | {
        "whole": "mean"
    }

    def weight(b):
        return 1.0 + jnp.sum(b["mask"]).astype(float)

    def law(p):
        micro = jax.tree.map(lambda x: x.reshape(K, -1, *x.shape[1:]), batch)
        w = jax.vmap(weight)(micro)
        loss, aux = jax.vmap(fun, (None, 0), axis_name=ROWS)(p, micro)
        return jnp.sum(w * loss) / jnp.sum(w), {
            "mean": jnp.sum(w * aux["mean"]) / jnp.sum(w),
            "sum": jnp.sum(aux["sum"]),
            "last": aux["last"][-1],
            "stack": aux["stack"],
            "whole": aux["whole"][0],
        }

    got = ours(fun, has_aux=True, aux=modes, weight_fn=weight)(params, batch)
    due = jax.jit(jax.value_and_grad(law, has_aux=True))(params)
    assert off_by(got, due) < 1e-12
    without = ours(fun, has_aux=True, aux=modes)(params, batch)
    assert off_by(without[0][0], due[0][0]) > 1e-4  # the twin


@pytest.mark.slow
def test_each_micro_batch_has_its_own_key_at_every_level():
    params, batch = arrays()

    def fun(p, b, key):
        z = encode(p, b)
        z = z * jax.random.bernoulli(key, 0.5, z.shape).astype(float)
        return jnp.mean((z - lax.pmean(z, ROWS)) ** 3) + jnp.sum(lax.psum(z, ROWS) ** 3)

    key = jax.random.key(0)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(K))

    def law(p, keys):
        micro = jax.tree.map(lambda x: x.reshape(K, -1, *x.shape[1:]), batch)
        return jnp.mean(jax.vmap(fun, (None, 0, 0), axis_name=ROWS)(p, micro, keys))

    got = ours(fun, rng_argnums=2)(params, batch, key)
    law = jax.jit(jax.value_and_grad(law))
    assert off_by(got, law(params, keys)) < 1e-12
    assert off_by(got, law(params, keys[::-1])) > 1e-3  # the twin


def test_a_carry_is_updated_once_from_the_whole_window():
    params, batch = arrays()

    def fun(p, b, old):
        h = b["x"] @ p["w"]
        mean = lax.pmean(jnp.mean(h, 0), ROWS)
        new = {"mean": 0.9 * old["mean"] + 0.1 * mean, "steps": old["steps"] + 1}
        return jnp.mean((h - mean[None]) ** 4), new

    old = {"mean": jnp.ones(6), "steps": jnp.asarray(3)}
    (_, new), _ = ours(fun, carry_argnums=2)(params, batch, old)
    assert new["steps"] == 4
    due = 0.9 + 0.1 * jnp.mean(batch["x"] @ params["w"], 0)
    assert off_by(new["mean"], due) < 1e-12


@pytest.mark.slow
def test_several_arguments_and_bfloat16():
    params, batch = arrays()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    batch = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == float else x, batch
    )

    def fun(w, b, v):
        t = lax.all_gather(b["x"] @ w @ v, ROWS, tiled=True)
        return jnp.mean((b["y"] @ t.T) ** 2, dtype=jnp.float32)

    args = params["w"], batch, params["v"]
    value, grads = ours(fun, argnums=(0, 2))(*args)
    law = of_the_window(lambda p, b: fun(p[0], b, p[1]), K)
    wide = jax.tree.map(lambda x: x.astype(float) if x.dtype != bool else x, args)
    due, _ = law((wide[0], wide[2]), wide[1])
    assert grads[0].dtype == jnp.bfloat16
    assert abs(value - due) < 0.05 * due


@pytest.mark.exhaustive
@pytest.mark.parametrize("fun", [contrastive, root_of_the_mean])
def test_weights_that_count_tokens_stay_out_of_narrow_cotangents(fun):
    params, batch = arrays()
    half = {"x": jnp.float16, "y": jnp.float16, "mask": bool}
    tokens = {"n": jnp.linspace(5e4, 2e5, len(batch["x"]))}

    def narrow(p, b):
        p = jax.tree.map(lambda x: x.astype(jnp.float16), p)
        return fun(p, {name: b[name].astype(half[name]) for name in half}).astype(float)

    def law(fun, mean):
        def loss(p):
            micro = split(batch | tokens, K)
            each = jax.vmap(fun, (None, 0), axis_name=ROWS)(p, micro)
            w = jnp.sum(micro["n"], 1)
            return jnp.sum(w * each) / (jnp.sum(w) if mean else 1.0)

        return jax.jit(jax.grad(loss))(params)

    weight_fn = lambda b: jnp.sum(b["n"])  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):
        _, got = ours(narrow, weight_fn=weight_fn)(params, batch | tokens)
        assert off_by(got, law(fun, mean=True)) < 0.05
        # The twin: Σ w·x, which is divided afterwards, overflows.
        overflown = law(narrow, mean=False)
    assert not all(jnp.isfinite(x).all() for x in jax.tree.leaves(overflown))


# -- Rules of one's own ----------------------------------------------------------------


@jax.custom_vjp
def clipped(x, limit):
    """Its cotangent is clipped, which is not linear."""
    return x


clipped.defvjp(
    lambda x, limit: (x, limit),
    lambda limit, ct: (jnp.clip(ct, -limit, limit), jnp.zeros_like(limit)),
)


def clips_rows(p, b):
    h = clipped(encode(p, b), jnp.asarray(2e-3))
    return jnp.mean((h - lax.pmean(jnp.mean(h, 0), ROWS)[None]) ** 4)


def clips_what_is_shared(p, b):
    z = encode(p, b)
    everyone = lax.all_gather(z, ROWS, tiled=True)
    product = everyone.T @ everyone / len(everyone)
    return jnp.mean((z @ clipped(product, jnp.asarray(2.0))) ** 2)


def clips_the_sums(p, b):
    h = clipped(encode(p, b), jnp.asarray(2e-3))
    return lax.psum(jnp.sum(jnp.sin(h)), ROWS) / 9.0


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("fun", [clips_rows, clips_what_is_shared, clips_the_sums])
def test_a_rule_sees_the_cotangent_of_the_mean_over_micro_batches(fun):
    args = arrays()
    got, due = ours(fun)(*args), jax.jit(of_the_window(fun, K))(*args)
    assert off_by(got, due) < 1e-12
    # The twin: that of the sum is clipped elsewhere.
    law = of_the_window(lambda p, b: fun(p, b) * K, K)
    of_sum = jax.tree.map(lambda x: x / K, jax.jit(law)(*args))
    assert off_by(got, of_sum) > 1e-3


# -- Errors ----------------------------------------------------------------------------


@jax.custom_vjp
def reduced(x):
    return lax.psum(x, ROWS)


reduced.defvjp(lambda x: (lax.psum(x, ROWS), None), lambda _, ct: (ct,))


@jax.custom_vjp
def reduced_back(x):
    return x


reduced_back.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, ROWS),))


def in_a_scan(p, b):
    return lax.scan(lambda c, _: (lax.psum(c, ROWS), None), p["t"], None, length=99)[0]


def in_a_while(p, b):
    return lax.while_loop(lambda c: c < 9, lambda c: lax.psum(c, ROWS), p["t"])


def in_a_cond(p, b):
    return lax.cond(p["t"] > 0, lambda t: lax.psum(t, ROWS), lambda t: t, p["t"])


def in_groups(p, b):
    return lax.psum(p["t"], ROWS, axis_index_groups=[[0, 1], [2, 3]])


def through_a_maximum(p, b):
    return lax.pmax(p["t"], ROWS)


def with_a_state(p, b):
    number = jax.ShapeDtypeStruct((), float)
    return lax.psum(p["t"] * io_callback(lambda: np.ones([]), number), ROWS)


@pytest.mark.parametrize(
    ("fun", "parts"),
    [
        (with_a_state, ["io_callback", "pure_callback"]),
        (in_a_scan, ["psum", "scan of 99", "Unroll"]),
        (in_a_while, ["psum", "while", "'rows'"]),
        (in_a_cond, ["psum", "cond"]),
        (lambda p, b: reduced(p["t"]), ["psum", "custom_vjp"]),
        (lambda p, b: reduced_back(p["t"]), ["custom_vjp", "'rows'"]),
        (in_groups, ["psum", "axis_index_groups"]),
        (through_a_maximum, ["pmax", "stop_gradient"]),
    ],
)
def test_what_cannot_be_done_is_an_error_that_names_it(fun, parts):
    with pytest.raises(NotImplementedError) as error:
        ours(fun)(*arrays())
    assert all(part in str(error.value) for part in parts)


def test_the_name_of_an_axis_is_a_string():
    with pytest.raises(TypeError, match="axis_name must be the name"):
        ga.value_and_grad(contrastive, K, axis_name=0)


def test_across_calls_the_window_has_no_axis_and_the_error_says_so():
    acc = ga.accumulator.init(arrays()[0])
    with pytest.raises(NameError, match="value_and_grad"):
        ga.accumulate(contrastive, K)(acc, *arrays())
    with pytest.raises(NameError, match="axis_name="):
        ga.value_and_grad(contrastive, K)(*arrays())


def test_what_all_micro_batches_share_is_not_added_up_without_a_word():
    params, batch = arrays()

    def fun(p, b):
        z = encode(p, b)
        rows = lax.psum(jnp.sum(b["x"][:, 0] > -99, dtype=jnp.int32), ROWS)
        return jnp.mean(z**2), {"rows": rows, "own": jnp.ones([], jnp.int32)}

    with pytest.raises(ValueError, match=r"\['rows'\] of the aux is a collective"):
        ours(fun, has_aux=True)(params, batch)
    modes = {"rows": "last", "own": "auto"}
    (_, aux), _ = ours(fun, has_aux=True, aux=modes)(params, batch)
    assert (int(aux["rows"]), int(aux["own"])) == (len(batch["x"]), K)


def test_a_key_does_not_thread_through_a_window_and_raises():
    params, batch = arrays()

    def fun(p, b, key):
        return jnp.mean(lax.pmean(encode(p, b), ROWS)), jax.random.split(key)[0]

    with pytest.raises(TypeError, match=r"is a PRNG key\. Name it in rng_argnums"):
        ours(fun, carry_argnums=2)(params, batch, jax.random.key(0))


# -- At the edges ----------------------------------------------------------------------


def no_layers(p, b):
    def layer(h, _):
        return h - lax.pmean(h, ROWS), 2.0 * h

    h, stacked = lax.scan(layer, encode(p, b), None, length=0)
    return jnp.mean(h**2) + jnp.sum(stacked)


def exchanged(p, b):
    parts = jnp.stack([b["x"] @ p["w"]] * K, 1)
    own = 1.0 + lax.axis_index(ROWS).astype(float)
    return jnp.sum(jnp.sin(own * lax.all_to_all(parts, ROWS, 1, 2)))


def below_the_largest(p, b):
    h = encode(p, b)
    return jnp.mean((h - lax.pmax(lax.stop_gradient(h), ROWS)) ** 2)


def test_a_scan_of_no_iterations_may_communicate():
    args = arrays()
    due = jax.jit(of_the_window(lambda p, b: jnp.mean(encode(p, b) ** 2), K))(*args)
    assert off_by(ours(no_layers)(*args), due) < 1e-12


def test_an_exchange_of_another_shape_goes_with_weights():
    params, batch = arrays()
    weight_fn = lambda b: 1.0 + jnp.sum(b["mask"]).astype(float)  # noqa: E731

    def law(p):
        micro = split(batch, K)
        w = jax.vmap(weight_fn)(micro)
        each = jax.vmap(exchanged, (None, 0), axis_name=ROWS)(p, micro)
        return jnp.sum(w * each) / jnp.sum(w)

    # JAX differentiates it over a vmapped axis, and not over an axis that is bound.
    got = ours(exchanged, weight_fn=weight_fn)(params, batch)
    assert off_by(got, jax.jit(jax.value_and_grad(law))(params)) < 1e-12
    assert off_by(got, ours(exchanged)(params, batch)) > 1e-4  # the twin


def test_an_extremum_starts_with_a_value_and_not_with_an_infinity():
    args = arrays()
    due = jax.jit(of_the_window(below_the_largest, K))(*args)
    with jax.debug_infs(True):
        assert off_by(ours(below_the_largest)(*args), due) < 1e-12
        # The twin: infinities do stop it.
        with pytest.raises(FloatingPointError):
            ours(lambda p, b: below_the_largest(p, b) / 0.0)(*args)


def test_the_extremum_inside_a_checkpoint_has_no_derivative():
    def softmax(h):
        top = lax.pmax(lax.stop_gradient(h.max(0, keepdims=True)), ROWS)
        z = jnp.exp(h - top)
        return z / lax.psum(z.sum(0, keepdims=True), ROWS)

    def fun(w, x):
        return (jax.checkpoint(lambda h: softmax(h @ w))(x) ** 2).mean()

    def due(w, x):
        return (jax.nn.softmax(x @ w, 0) ** 2).mean()

    w, x = np.random.default_rng(0).normal(size=(2, 8, 8))
    step = ga.value_and_grad(fun, K, axis_name=ROWS, accumulator_dtype="float64")
    assert off_by(jax.jit(step)(w, x), jax.value_and_grad(due)(w, x)) < 1e-12
