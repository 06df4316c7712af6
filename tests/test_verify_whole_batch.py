"""`verify(whole_batch=True)`: the loss as it is written, whatever its rows know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window_losses import arrays, encode, errors

import ga_optax as ga
from ga_optax import Cause, testing
from ga_optax._verify import api

pytestmark = pytest.mark.usefixtures("fast_compilation")

K = 4


def in_float32(tree):
    return jax.tree.map(lambda x: x if x.dtype == bool else x.astype("float32"), tree)


PARAMS, BATCH = in_float32(arrays(rows=8))


def masked(p, b):
    return jnp.sum(jnp.where(b["mask"], errors(p, b), 0.0)) / jnp.sum(
        b["mask"], dtype=jnp.float32
    )


def normalised(p, b):
    h = encode(p, b)
    h = (h - jnp.mean(h, 0)[None]) / jnp.sqrt(jnp.var(h, 0) + 1e-3)[None]
    return jnp.mean(h**3)


def contrastive(p, b):
    z = encode(p, b)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(z @ z.T)))


def total(p, b):
    return jnp.sum(errors(p, b))


@pytest.mark.slow
@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("fun", "cause"),
    [
        (masked, Cause.WEIGHTS),
        (normalised, Cause.CROSS_EXAMPLE),
        (contrastive, Cause.CROSS_EXAMPLE),
        (total, Cause.SCALE),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_accumulation_gets_wrong_is_right_over_the_whole_batch(fun, cause):
    report = ga.verify(fun, PARAMS, BATCH, K)
    assert report.cause is cause, report
    report = ga.verify(fun, PARAMS, BATCH, K, whole_batch=True)
    assert report.ok, report
    assert report.dtype == "float64"
    assert report.relative < 1e-13


@pytest.mark.slow
def test_has_aux_and_the_assertion_take_it_too():
    def with_aux(p, b):
        z = encode(p, b)
        return normalised(p, b), z

    testing.assert_accumulation_equivalent(
        with_aux, PARAMS, BATCH, K, has_aux=True, whole_batch=True
    )


@pytest.mark.slow
def test_one_key_draws_the_masks_of_the_whole_batch():
    def dropped(p, b, key):
        z = encode(p, b)
        return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, z.shape), z, 0.0) ** 3)

    options = {"rng": jax.random.key(0)}
    report = ga.verify(dropped, PARAMS, BATCH, K, **options)
    assert report.cause is Cause.RANDOMNESS, report
    assert "whole_batch=True" in report.fix
    report = ga.verify(dropped, PARAMS, BATCH, K, whole_batch=True, **options)
    assert report.ok, report
    assert report.dtype == "float64"
    assert report.relative < 1e-13


def by_drawn_weights(p, b):
    each = errors(p, b)
    return jnp.mean(each * jax.random.uniform(jax.random.key(3), each.shape))


def neighbours(p, b):
    z = encode(p, b)
    return jnp.mean((z[1:] - z[:-1]) ** 2)


@pytest.mark.slow
@pytest.mark.grid(2)
@pytest.mark.parametrize("fun", [by_drawn_weights, neighbours, normalised, contrastive])
def test_the_fix_that_is_offered_mends_it(fun):
    report = ga.verify(fun, PARAMS, BATCH, K)
    assert report.cause in (Cause.RANDOMNESS, Cause.CROSS_EXAMPLE), report
    assert "whole_batch=True" in report.fix
    assert ga.verify(fun, PARAMS, BATCH, K, whole_batch=True).ok


@pytest.mark.slow
def test_it_is_not_offered_where_a_loss_communicates():
    """The twin: `whole_batch` takes no axis."""

    def fun(p, b):
        z = jax.lax.pmean(jnp.mean(encode(p, b)), "rows")
        return neighbours(p, b) + z

    report = ga.verify(fun, PARAMS, BATCH, K, axis_name="rows")
    assert report.cause is Cause.CROSS_EXAMPLE, report
    assert "whole_batch" not in report.fix


def test_a_gradient_that_is_not_that_of_the_whole_batch_is_found(monkeypatch):
    """The twin: no report is right by itself."""

    def off(*args, **options):
        run = right(*args, **options)

        def doubled(*args):
            value, grads = run(*args)
            return value, jax.tree.map(lambda g: g * np.float32(1.001), grads)

        return doubled

    right = api.value_and_grad
    monkeypatch.setattr(api, "value_and_grad", off)
    report = ga.verify(normalised, PARAMS, BATCH, K, whole_batch=True)
    assert report.cause is Cause.UNDETERMINED, report
    assert "0.1%" in report.message
    assert "report it" in report.fix


def test_numbers_that_are_not_jaxs_are_randomness_here_too():
    draw = np.random.default_rng(0)

    def fun(p, b):
        return normalised(p, b) * float(draw.uniform(0.5, 1))

    report = ga.verify(fun, PARAMS, BATCH, K, whole_batch=True)
    assert report.cause is Cause.RANDOMNESS, report


def test_a_nan_is_named_as_that_of_the_undivided_batch():
    def fun(p, b):
        return jnp.log(-jnp.abs(normalised(p, b)))

    report = ga.verify(fun, PARAMS, BATCH, K, whole_batch=True)
    assert report.cause is Cause.NOT_FINITE, report
    assert "of the undivided batch" in report.message


@pytest.mark.parametrize(
    "options", [{"weight_fn": lambda b: b["mask"].sum()}, {"axis_name": "rows"}]
)
def test_what_it_does_not_need_is_refused(options):
    with pytest.raises(ValueError, match="must be left out"):
        ga.verify(masked, PARAMS, BATCH, K, whole_batch=True, **options)
