"""Which argument is what: by position, by keyword, and split along which axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("fast_compilation")

K, ROWS, WIDTH = 4, 16, 3
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=WIDTH), jnp.float32)
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=ROWS), jnp.float32)
KEY = jax.random.key(0)


def loss(w, x, y, rngs):
    kept = jax.random.bernoulli(rngs["dropout"], 0.5, x.shape)
    return jnp.mean((jnp.where(kept, x, 0) @ w - y) ** 2)


def positive(x, y):
    return jnp.sum(y > 0)


@pytest.mark.exhaustive
def test_keywords_with_a_role_are_what_positions_with_it_are():
    positions = {"batch_argnums": (1, 2), "rng_argnums": 3}
    some = {"batch_argnames": "y", "rng_argnames": "rngs"}
    every = {
        "batch_argnums": (),
        "batch_argnames": ("x", "y"),
        "rng_argnames": ["rngs"],
    }

    def run(options, args, key=KEY):
        place = {1: "x", 2: "y", 3: "rngs"}
        given = (W, X, Y, {"dropout": key})
        named = {place[i]: given[i] for i in place if i >= args}
        call = ga.value_and_grad(loss, K, weight_fn=positive, **options)
        acc = ga.accumulator.init(W)
        add = ga.accumulate(loss, K, weight_fn=positive, **options)
        one = jax.jit(call)(*given[:args], **named)
        return bits((one, jax.jit(add)(acc, *given[:args], **named)))

    expected = run(positions, 4)
    assert run(some, 2) == run(every, 1) == expected
    # The twin: another key has another mask.
    assert run(every, 1, jax.random.key(1)) != expected


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_a_batch_axis_may_be_any_axis(axis):
    """Integers, so the order of a sum does not matter."""
    x = jnp.asarray(RNG.integers(-4, 4, (ROWS, 4, WIDTH)), jnp.float32)

    def fun(w, batch):
        rows = jnp.moveaxis(batch["x"], axis, 0)
        assert rows.shape == (ROWS // K, 4, WIDTH)
        return jnp.mean(rows @ w * batch["y"][:, None]), rows

    batch = {"x": jnp.moveaxis(x, 0, axis), "y": jnp.round(Y)}
    w = jnp.round(4 * W)
    axes = {"x": axis, "y": 0}
    step = ga.value_and_grad(fun, K, has_aux=True, aux="stack", batch_axes=axes)
    (value, rows), grads = jax.jit(step)(w, batch)
    (due, _), slope = jax.value_and_grad(
        lambda w: (jnp.mean(x @ w * batch["y"][:, None]), 0), has_aux=True
    )(w)
    assert bits((value, grads)) == bits((due, slope))
    # The same members, whatever the axis.
    assert bits(rows) == bits(x.reshape(K, ROWS // K, 4, WIDTH))
    # And along axis 0 nothing is transposed.
    program = str(jax.make_jaxpr(step)(w, batch)).partition("scan[")[0]
    assert ("transpose" in program) == (axis != 0)


def test_what_has_no_axis_goes_whole_and_as_it_came():
    table = jnp.arange(float(ROWS))  # as long as the batch

    def fun(w, batch, shared, *, extra):
        assert batch["train"] is True
        assert batch["name"] == "a name"
        assert shared is table
        assert extra["whole"].shape == (ROWS,)
        rows = extra["split"] * batch["scale"] * shared.sum() + extra["whole"].sum()
        return jnp.mean(batch["x"] @ w + rows)

    batch = {"x": X, "scale": 0.5, "train": True, "name": "a name", "none": None}
    axes = {"x": 0, "scale": None, "train": None, "name": None, "none": 0}
    extra = {"split": Y, "whole": Y}
    step = ga.value_and_grad(
        fun,
        K,
        batch_argnums=(1, 2),
        batch_argnames="extra",
        batch_axes=[axes, None, {"split": 0, "whole": None}],
    )
    # Not under jit: there the arguments come traced.
    value, grads = step(W, batch, table, extra=extra)
    due, slope = jax.value_and_grad(fun)(W, batch, table, extra=extra)
    # Two sums of at most 2·16·3 terms of which each is below 2·16².
    bound = 2 * ROWS * WIDTH * np.finfo(np.float32).eps * 2 * ROWS**2
    assert abs(value - due) < bound
    assert np.all(np.abs(grads - slope) < bound)
    # The twin: another row in the sum.
    assert abs(value - fun(W, batch, table, extra=extra | {"whole": Y + 1})) > bound


@pytest.mark.grid(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sync", ["last", "each"])
def test_any_axis_may_lie_on_devices_and_no_row_moves(kind, sync):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    table = jnp.arange(float(ROWS))

    def fun(w, batch, rngs=None):
        size = jnp.sum(batch["table"]) * batch["scale"]
        return jnp.mean((batch["x"].T @ w) ** 2 * size)

    axes = {"x": 1, "table": None, "scale": None}
    data_axis = ga.DataAxis("data", sync=sync)
    step = ga.value_and_grad(
        fun, K, data_axis=data_axis, batch_axes=axes, rng_argnames="rngs"
    )

    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    x = put(X.T, P(None, "data"))
    batch = {"x": x, "table": put(table, P()), "scale": 0.5}
    with jax.set_mesh(mesh):
        traced = jax.jit(lambda w, x, t, key: step(w, batch | {"x": x}, rngs=key))
        args = put(W, P()), x, batch["table"], put(KEY, P())
        compiled = traced.lower(*args).compile()
        value, grads = compiled(*args)
        audit = ga.audit(compiled, mesh)
    kinds = {c.kind for c in audit.collectives}
    assert kinds == {"all-reduce"}
    due, slope = jax.value_and_grad(fun)(W, batch | {"x": X.T, "table": table})
    # c·n·eps for sums over the rows in another order.
    bound = 4 * ROWS * np.finfo(np.float32).eps
    assert abs(value - due) <= bound * abs(due)
    assert np.all(np.abs(grads - slope) <= bound * np.max(np.abs(slope)))
    half = fun(W, batch | {"x": X[: ROWS // 2].T, "table": table})
    assert abs(half - due) > bound * abs(due)


def test_inside_a_shard_map_what_has_no_axis_may_be_shared():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def fun(w, batch):
        return jnp.mean(batch["x"].T @ w) * batch["scale"]

    step = ga.value_and_grad(
        fun, K, data_axis="data", batch_axes={"x": 1, "scale": None}
    )
    specs = {"x": P(None, "data"), "scale": P()}
    local = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs), out_specs=P())
    batch = {"x": jnp.round(X.T), "scale": jnp.float32(2)}
    w = jnp.round(4 * W)
    got = jax.jit(local)(w, batch)
    assert bits(got) == bits(jax.value_and_grad(fun)(w, batch))


@pytest.mark.exhaustive
def test_a_second_call_outside_of_jit_warns_once():
    step = ga.value_and_grad(lambda w, x: jnp.mean(x @ w), K)
    jitted = jax.jit(step)
    for _ in range(2):
        jitted(W, X)  # a warning would be an error
        jax.jit(jax.vmap(step, in_axes=(None, 0)))(W, X[None])
    step(W, X)
    with pytest.warns(UserWarning, match="outside of jax.jit again"):
        step(W, X)
    step(W, X)
    with jax.disable_jit():
        again = ga.value_and_grad(lambda w, x: jnp.mean(x @ w), 2)
        again(W, X)
        again(W, X)


def test_a_key_in_the_batch_raises_with_and_without_an_axis():
    batch = {"x": jnp.ones((4, 2)), "key": jax.random.key(0)}

    def fun(w, batch):
        return jnp.mean(batch["x"] * w)

    with pytest.raises(ValueError, match="name them in rng_argnums"):
        ga.value_and_grad(fun, 2)(1.0, batch)
    axes = {"x": 0, "key": None}
    with pytest.raises(ValueError, match="must differ between micro-batches"):
        ga.value_and_grad(fun, 2, batch_axes=axes)(1.0, batch)
