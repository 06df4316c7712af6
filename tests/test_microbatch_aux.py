"""Aux as the undivided batch would have given it, and weights that come from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax.testing import assert_trees_bitwise_equal

pytestmark = pytest.mark.usefixtures("fast_compilation")

ROWS, WIDTH = 16, 4
KINDS = [AxisType.Auto, AxisType.Explicit]


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


W, X = integers(0, WIDTH), integers(1, ROWS, WIDTH)


def loss(w, x):
    """Every kind of leaf; means over powers of two of integers, so all are exact."""
    scores = x @ w
    return jnp.mean(scores), {
        "mean": jnp.mean(x),
        "rows": jnp.int32(x.shape[0]),
        "positive of features": jnp.sum(x > 0, axis=0, dtype=jnp.int32),
        "mean of features": jnp.mean(x, axis=0),  # WIDTH is the rows of 4 in 16
        "scores": scores,
        "time-major": jnp.stack([scores, 2 * scores, -scores]),
        "flat": x.reshape(-1),
        "right": (scores > 0, None),
    }


def undivided(w=W, x=X):
    return jax.value_and_grad(loss, has_aux=True)(w, x)


# -- "auto" and "concat" ---------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("k", [1, 4, 16])
def test_every_leaf_is_that_of_the_undivided_batch(k):
    got = jax.jit(ga.value_and_grad(loss, k, has_aux=True))(W, X)
    assert_trees_bitwise_equal(got, undivided())
    # Of one call of `accumulate`, it is that of the rows of the call.
    value, _ = jax.jit(ga.accumulate(loss, k, has_aux=True))(
        ga.accumulator.init(W), W, X
    )
    assert_trees_bitwise_equal(value, undivided()[0])


def test_an_axis_is_known_and_not_guessed_from_its_length():
    """The twin: with k = 4 the features are as many as the rows of a micro-batch."""
    (_, aux), _ = jax.jit(ga.value_and_grad(loss, 4, has_aux=True))(W, X)
    one = loss(W, X[:4])[1]
    assert one["scores"].shape == one["mean of features"].shape
    assert aux["scores"].shape == (16,)
    assert aux["mean of features"].shape == (4,)


def test_what_is_joined_is_weighted_by_nothing_and_the_mean_is():
    step = ga.value_and_grad(
        loss, 4, has_aux=True, weight_fn=lambda x: jnp.where(x[0, 0] == X[0, 0], 0, 1)
    )
    (_, aux), _ = jax.jit(step)(W, X)
    assert_trees_bitwise_equal(aux["scores"], undivided()[0][1]["scores"])
    assert float(aux["mean"]) != float(undivided()[0][1]["mean"])


def test_fun_is_traced_again_only_if_a_leaf_may_have_rows():
    traces = []

    def fun(w, x, *keys):
        traces.append(x.shape)
        return loss(w, x)

    def traced(aux):
        traces.clear()
        jax.eval_shape(ga.value_and_grad(fun, 4, has_aux=True, aux=aux), W, X)
        return traces

    assert traced("last") == traced("stack") == [(4, 4)]
    assert traced("auto") == [(4, 4), (16, 4)]


def similarities(w, x):
    return jnp.mean(x @ w), {"table": x @ x.T, "scores": x @ w}


def four_rows(w, x):
    return jnp.mean(x @ w), {"scores": x.reshape(4, WIDTH) @ w}


def flag(w, x):
    return jnp.mean(x @ w), {"finite": jnp.all(jnp.isfinite(x))}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fun", "aux", "error", "message"),
    [
        (similarities, "auto", ValueError, r"\['table'\].*\(4, 4\).*\"concat\", \"sta"),
        (four_rows, "auto", ValueError, r"\['scores'\].*shape \(4,\) for 4 rows.*mean"),
        (flag, "auto", TypeError, r"\['finite'\].*has dtype bool"),
        (loss, "mean", ValueError, r"\['scores'\].*\"concat\".*axis 0.*\"stack\""),
        (loss, "sum", ValueError, r"\['scores'\].*\"concat\".*axis 0.*\"stack\""),
        (flag, "concat", ValueError, r"\['finite'\] of the aux has shape \(\)"),
        (similarities, "concat", ValueError, r"one axis.*\['table'\]"),
    ],
)
def test_what_no_mode_is_right_for_is_refused(fun, aux, error, message):
    if fun is loss:
        aux = dict.fromkeys(undivided()[0][1], "last") | {"scores": aux}
    with pytest.raises(error, match=message):
        ga.value_and_grad(fun, 4, has_aux=True, aux=aux)(W, X)


def test_what_is_named_is_taken_as_it_is():
    def aux(fun, mode):
        return jax.jit(ga.value_and_grad(fun, 4, has_aux=True, aux=mode))(W, X)[0][1]

    whole = undivided()[0][1]
    assert_trees_bitwise_equal(aux(four_rows, "concat")["scores"], whole["scores"])
    np.testing.assert_array_equal(
        aux(four_rows, "mean")["scores"], whole["scores"].reshape(4, 4).mean(0)
    )
    tables = aux(similarities, {"table": "stack", "scores": "auto"})
    assert tables["table"].shape == (4, 4, 4)
    assert int(aux(flag, "sum")["finite"]) == 4


def test_what_is_only_kept_is_not_rounded():
    def bits_met(mode):
        fun = ga.value_and_grad(flag_free, 4, has_aux=True, aux=mode)
        return str(jax.make_jaxpr(fun)(W, X)).count("bitcast_convert_type")

    def flag_free(w, x):
        return jnp.mean(x @ w), jnp.mean(x)

    assert bits_met("last") == bits_met("stack") < bits_met("sum")


# -- On devices ------------------------------------------------------------------------


@pytest.mark.grid(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sync", ["last", "each"])
@pytest.mark.parametrize("k", [1, 2])
def test_rows_of_all_devices_come_in_the_order_of_the_batch(kind, sync, k):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    fun = ga.value_and_grad(
        loss, k, has_aux=True, data_axis=ga.DataAxis("data", mesh=mesh, sync=sync)
    )
    # The twin: an order other than that of the rows would show.
    assert len(set(np.asarray(X @ W).tolist())) > 4
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        w = jax.device_put(W, jax.NamedSharding(mesh, P()))
        compiled = jax.jit(fun).lower(w, x).compile()
        got = compiled(w, x)
    assert_trees_bitwise_equal(*jax.device_get((got, undivided())))
    if sync == "last":  # no row moved
        assert {c.kind for c in ga.audit(compiled, mesh).collectives} == {"all-reduce"}


def test_rows_of_a_strided_split_come_in_the_order_of_the_batch():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        w = jax.device_put(W, jax.NamedSharding(mesh, P()))
        got = jax.jit(ga.value_and_grad(loss, 4, has_aux=True))(w, x)
        stack = ga.value_and_grad(loss, 4, has_aux=True, aux="stack")
        parts = jax.device_get(jax.jit(stack)(w, x)[0][1]["scores"])
    assert_trees_bitwise_equal(*jax.device_get((got, undivided())))
    # The twin: the micro-batches themselves come in another order.
    np.testing.assert_array_equal(parts, (X @ W).reshape(4, 4).T)


def test_inside_a_shard_map_every_device_has_its_rows():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    fun = ga.value_and_grad(loss, 2, has_aux=True, data_axis="data")
    rows = {"scores": P("data"), "time-major": P(None, "data"), "flat": P("data")}
    specs = dict.fromkeys(undivided()[0][1], P()) | rows | {"right": P("data")}
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=((P(), specs), P())
    )
    assert_trees_bitwise_equal(*jax.device_get((jax.jit(mapped)(W, X), undivided())))


# -- The weight from the aux -----------------------------------------------------------


def make_batch():
    mask = np.arange(WIDTH) < 1 + np.arange(ROWS)[:, None] * (WIDTH - 1) // (ROWS - 1)
    return {"x": X, "mask": mask.astype(np.float32)}


def token_loss(w, batch):
    tokens = jnp.sum(jnp.cbrt(batch["mask"]))  # a primitive to count
    error = jnp.square(batch["x"] * w[None]) * batch["mask"]
    return jnp.sum(error) / jnp.maximum(tokens, 1), {"tokens": tokens}


def of_batch(batch):
    return jnp.sum(jnp.cbrt(batch["mask"]))


FROM_AUX = ga.FromAux(lambda aux: aux["tokens"])


def options(weight_fn, **more):
    return {"has_aux": True, "aux": "sum", "weight_fn": weight_fn, **more}


@pytest.mark.quick
def test_the_weight_of_the_aux_is_that_of_a_weight_fn_bit_for_bit():
    w, batch = W + 0.1, make_batch()

    def run(weight_fn):
        fun = ga.value_and_grad(token_loss, 4, **options(weight_fn))
        return jax.jit(fun)(w, batch)

    expected = run(of_batch)
    assert_trees_bitwise_equal(run(FROM_AUX), expected)
    add = jax.jit(ga.accumulate(token_loss, 2, **options(FROM_AUX)))
    acc = ga.accumulator.init(w)
    for half in (slice(0, 8), slice(8, 16)):
        _, acc = add(acc, w, jax.tree.map(lambda x, half=half: x[half], batch))
    assert_trees_bitwise_equal(jax.jit(ga.accumulator.mean)(acc), expected[1])
    # The twin: without weights it is another gradient.
    assert np.any(np.asarray(run(None)[1]) != np.asarray(expected[1]))


def test_nothing_is_computed_twice():
    def roots(weight_fn):
        fun = ga.value_and_grad(token_loss, 4, **options(weight_fn))
        return str(jax.make_jaxpr(fun)(W, make_batch())).count("cbrt")

    assert roots(FROM_AUX) == 1
    assert roots(of_batch) == 2


def test_a_micro_batch_whose_aux_weighs_nothing_changes_nothing():
    batch = make_batch()
    batch["mask"][:4] = 0
    batch["x"] = batch["x"].copy()
    batch["x"][:4] = np.nan
    step = jax.jit(ga.value_and_grad(token_loss, 4, **options(FROM_AUX)))
    (value, aux), grads = step(W, batch)
    rest = jax.tree.map(lambda x: x[4:], batch)
    due, slope = jax.value_and_grad(token_loss, has_aux=True)(W, rest)
    np.testing.assert_allclose(value, due[0], rtol=1e-5)
    np.testing.assert_allclose(grads, slope, rtol=1e-5)
    assert float(aux["tokens"]) == batch["mask"].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_of_the_aux_differs_between_devices(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    fun = ga.value_and_grad(
        token_loss, 2, **options(FROM_AUX, data_axis=ga.DataAxis("data", mesh=mesh))
    )
    with jax.set_mesh(mesh):
        batch = jax.device_put(make_batch(), jax.NamedSharding(mesh, P("data")))
        w = jax.device_put(W, jax.NamedSharding(mesh, P()))
        (value, aux), grads = jax.device_get(jax.jit(fun)(w, batch))
    due, slope = jax.value_and_grad(token_loss, has_aux=True)(W, make_batch())
    np.testing.assert_allclose(value, due[0], rtol=1e-5)
    np.testing.assert_allclose(grads, slope, rtol=1e-5)
    assert aux["tokens"] == due[1]["tokens"]


@pytest.mark.exhaustive
def test_verify_takes_the_weight_of_the_aux():
    args = token_loss, jnp.asarray(W), make_batch(), 4
    assert ga.verify(*args, has_aux=True, weight_fn=FROM_AUX).ok
    assert not ga.verify(*args, has_aux=True).ok


@pytest.mark.quick
@pytest.mark.parametrize(
    ("weight_fn", "has_aux", "error", "message"),
    [
        (FROM_AUX, False, ValueError, "must have an aux to read, but has_aux=False"),
        (ga.FromAux(3), True, TypeError, "must be a function of the aux, but it is 3"),
        (ga.FromAux(lambda aux: -1), True, ValueError, "not negative"),
        (ga.FromAux(lambda aux: jnp.ones(2)), True, ValueError, "must be a scalar"),
    ],
)
def test_a_weight_that_no_aux_can_give_is_refused(weight_fn, has_aux, error, message):
    with pytest.raises(error, match=message):
        ga.value_and_grad(token_loss, 2, has_aux=has_aux, weight_fn=weight_fn)(
            W, make_batch()
        )
    if not has_aux:
        with pytest.raises(error, match=message):
            ga.verify(token_loss, W, make_batch(), 2, weight_fn=weight_fn)
