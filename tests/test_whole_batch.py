"""Value, gradients and aux are those of `jax.value_and_grad`, for any loss."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import whole_losses
from helpers import bits
from helpers import mean_of as by_themselves
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._calls import layouts as partitioned
from ga_optax._partition import elementwise

pytestmark = pytest.mark.usefixtures("optax_promotion")
EPS = np.finfo(np.float64).eps


def assert_close(got, want, n):
    """Sums of `n` terms in another order: each leaf is off by `c·n·eps·max|leaf|`."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert jax.tree.leaves(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        if np.issubdtype(y.dtype, np.inexact):
            bound = 200 * n * EPS * max(np.abs(y).max(initial=0), 1e-3)
            np.testing.assert_allclose(x, y, rtol=0, atol=bound)
        else:
            np.testing.assert_array_equal(x, y)


def check(fun, k, n=whole_losses.N, **options):
    with jax.enable_x64(True):
        args = whole_losses.arguments(n)
        has_aux = options.get("has_aux", False)
        want = jax.jit(jax.value_and_grad(fun, has_aux=has_aux))(*args)
        step = ga.value_and_grad(fun, k, accumulator_dtype=jnp.float64, **options)
        assert_close(jax.jit(step)(*args), want, n)


# -- Losses ----------------------------------------------------------------------------


@pytest.mark.grid(2, 8)
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("name", whole_losses.LOSSES)
def test_every_loss_has_the_gradients_of_the_whole_batch(name):
    check(whole_losses.LOSSES[name], 4)


@pytest.mark.published
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.filterwarnings("ignore:.*computed whole")  # 16 part two of a pair
@pytest.mark.parametrize("k", [1, 2, 8, 16])
@pytest.mark.parametrize("name", whole_losses.LOSSES)
def test_every_loss_is_right_for_any_number_of_micro_batches(name, k):
    check(whole_losses.LOSSES[name], k)


@pytest.mark.quick
def test_a_masked_mean_has_the_gradients_of_the_whole_batch():
    check(whole_losses.masked, 8)


def test_a_mean_over_rows_has_the_bits_of_the_loop_without_the_option():
    def signed(x):
        return np.asarray(x) + np.float32(0)

    params, batch = whole_losses.arguments(dtype=np.float32)
    for fun in (whole_losses.mean, whole_losses.classes):
        plain = jax.jit(ga.value_and_grad(fun, 4))(params, batch)
        whole = jax.jit(ga.value_and_grad(fun, 4))(params, batch)
        # XLA gives the zero of an unused parameter either sign.
        assert bits(jax.tree.map(signed, whole[1])) == bits(
            jax.tree.map(signed, plain[1])
        )
        assert bits(whole[0]) == bits(plain[0])


@pytest.mark.slow
def test_an_axis_as_long_as_the_batch_is_not_taken_for_rows():
    def fun(w, x):  # n features, k = n: one row a micro-batch
        h = jnp.tanh(x @ w)
        return ((h - h.mean(1, keepdims=True)) ** 2).mean() + (h.T @ h).std() + w.sum()

    with jax.enable_x64(True):
        w, x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8)))
        step = ga.value_and_grad(fun, 8, accumulator_dtype="float64")
        assert_close(jax.jit(step)(w, x), jax.value_and_grad(fun)(w, x), 8)


# -- What must not be taken apart ------------------------------------------------------


def same(fun, k, w, x):
    """Whether `fun(w, x)` has the value and gradients of the whole batch."""
    with jax.enable_x64(True):
        args = jax.tree.map(_wide, (w, x))
        step = ga.value_and_grad(fun, k, accumulator_dtype="float64")
        assert_close(jax.jit(step)(*args), jax.value_and_grad(fun)(*args), 8)


def _wide(x):
    return x.astype("float64") if jnp.issubdtype(x.dtype, jnp.floating) else x


W, X = np.random.default_rng(1).normal(size=(2, 8, 8)).astype(np.float32)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.01, 0.01),))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*computed whole")
@pytest.mark.parametrize("k", [2, 8])
def test_a_backward_rule_sees_the_cotangent_of_the_whole_batch(k):
    same(lambda w, x: (clipped(x @ w) ** 2).mean(), k, W, X)
    same(lambda w, x: clipped((x @ w).std(0)).sum() + clipped(w).mean(), k, W, X)


@pytest.mark.slow
def test_what_fills_a_gather_is_not_added_by_each_micro_batch():
    def fun(w, x, fill):
        got = (x @ w).sum(0).at[jnp.asarray([0, 9])]
        return got.get(mode="fill", fill_value=fill).sum()

    for fill in (0, 7.0):
        same(lambda w, x, fill=fill: fun(w, x, fill), 4, W, X)


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.filterwarnings("ignore:.*computed whole")
def test_keys_of_rows_draw_what_they_draw_for_the_whole_batch(impl):
    def fun(w, b):
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 3))(b[1])
        noise = [
            jax.vmap(lambda k: jax.random.normal(k, (8,)))(k) for k in (b[1], keys)
        ]
        return ((b[0] @ w + sum(noise)) ** 2).mean()

    same(fun, 4, W, (X, jax.random.split(jax.random.key(0, impl=impl), 8)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*computed whole")
def test_a_function_of_jax_keeps_its_rule_where_that_is_not_its_derivative():
    def pairs(w, x):
        return jax.scipy.special.xlogy(w[:1] - 1 + 0 * x[:, :1], 2 + x[:, 0] ** 2).sum()

    same(pairs, 4, np.ones_like(W[0]), X)
    same(lambda w, x: (jax.nn.softmax(x @ w, 0) ** 2).mean(), 4, W, X)


@pytest.mark.slow
def test_rows_meet_in_the_extremum_of_a_softmax_inside_a_checkpoint():
    def fun(w, x):
        weights = jax.checkpoint(lambda h: jax.nn.softmax(h @ w, 0))(x)
        return (weights**2).mean() + jax.checkpoint(jax.nn.logsumexp)(weights @ w)

    same(fun, 4, W, X)


@pytest.mark.filterwarnings("error:.*computed whole")
def test_arrays_are_stacked_and_unstacked_along_axes_without_rows():
    def fun(w, x):
        h = jnp.tanh(x @ w)
        first, *rest = jnp.unstack(jnp.stack([h, 2 * h, x], 1), axis=1)
        mean, total = jnp.unstack(jnp.stack([h.mean(0), h.sum(0)]))
        return (first * rest[0] + rest[1]).std() + (mean * total).sum()

    same(fun, 4, W, X)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="this XLA is wrong about such a program without ga_optax, too",
)
@pytest.mark.filterwarnings("ignore:.*computed whole")
def test_rows_are_updated_with_rows_that_the_update_overwrites():
    def fun(w, x):
        h = jnp.tanh(x @ w)
        start = (x[0, 0] > 9).astype("int32")
        z = jax.lax.dynamic_slice(h, (start, start * 0), (3, 8))
        h = jax.lax.dynamic_update_slice(h, z / 2, (2, 0))
        return (jnp.cumsum(h, 1) * x).std()

    same(fun, 8, W, X)


# -- aux -------------------------------------------------------------------------------


@pytest.mark.slow
def test_aux_comes_back_as_fun_returns_it_for_the_whole_batch():
    def fun(p, b):
        h = b["x"] @ p["i"]
        aux = {
            "rows": h,
            "columns": h.T,
            "twice": jnp.concatenate([h, 2 * h]),
            "mean": h.mean(0),
            "count": b["m"].astype(int).sum(),
            "labels": b["c"],
            "kernel": h @ h.T,
            "params": p["s"],
            "number": 3,
            "keys": jax.random.split(jax.random.key(0), 2),
            "order": jnp.argmax(h, 0),
            "running": jnp.cumsum(h, 0),
        }
        return whole_losses.batch_norm(p, b), aux

    def data(out):
        (value, aux), grads = out
        return (value, aux | {"keys": jax.random.key_data(aux["keys"])}), grads

    with jax.enable_x64(True):
        args = whole_losses.arguments()
        want = jax.value_and_grad(fun, has_aux=True)(*args)
        step = ga.value_and_grad(fun, 4, has_aux=True, accumulator_dtype=jnp.float64)
        want[0][1]["number"] = jnp.asarray(3)
        assert_close(data(jax.jit(step)(*args)), data(want), whole_losses.N)


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "leaf",
    [3, True, 2.5, np.float64(2), np.int8(3), np.arange(2), "text", Color.RED, len],
    ids=str,
)
def test_aux_that_is_no_array_of_jax_comes_back_as_it_is(leaf):
    def fun(w, x):
        return jnp.mean((x @ w) ** 2), {"leaf": leaf, "rows": x @ w}

    args = jnp.ones(3), jnp.ones((8, 3))
    due = jax.value_and_grad(fun, has_aux=True)
    step = ga.value_and_grad(fun, 4, has_aux=True)
    assert step(*args)[0][1]["leaf"] is due(*args)[0][1]["leaf"] is leaf
    if isinstance(leaf, int | float | np.generic | np.ndarray):
        want, got = (jax.jit(f)(*args)[0][1]["leaf"] for f in (due, step))
        assert (jax.typeof(got), got.weak_type) == (jax.typeof(want), want.weak_type)
        np.testing.assert_array_equal(got, want)
        return
    # The twin: a loop over micro-batches has to put it together.
    with pytest.raises(TypeError, match=r"leaves of aux must.*\['leaf'\] is"):
        by_themselves(fun, 4, has_aux=True)(*args)
    with pytest.raises(TypeError, match="not a valid JAX type"):
        jax.jit(step)(*args)


@pytest.mark.parametrize("step", [ga.value_and_grad, by_themselves])
def test_aux_that_is_the_type_of_an_array_is_named(step):
    def fun(w, x):
        return jnp.mean((x @ w) ** 2), {"leaf": jax.ShapeDtypeStruct((2,), float)}

    with pytest.raises(TypeError, match=r"leaves of aux must.*\['leaf'\] is ShapeD"):
        jax.jit(step(fun, 4, has_aux=True))(jnp.ones(3), jnp.ones((8, 3)))


@pytest.mark.parametrize("out", ["text", jax.ShapeDtypeStruct((2,), float)])
def test_a_function_that_returns_no_number_is_told_so_in_its_own_words(out):
    args = jnp.ones(3), jnp.ones((8, 3))
    with pytest.raises(TypeError, match=r"fun must return arrays.*the only leaf") as e:
        ga.microbatch(lambda w, x: out, 4)(*args)
    assert "aux" not in str(e.value)
    assert ga.microbatch(lambda w, x: 3, 4)(*args) == 3  # the twin


# -- Errors ----------------------------------------------------------------------------


def advice(batch, k=2, wrap=ga.value_and_grad):
    """What an error says to do."""
    step = wrap(lambda w, b: jnp.mean(b["x"] @ w), k)
    with pytest.raises(ValueError, match="but") as error:
        step(jnp.ones(3), batch)
    return str(error.value)


WRONG = {
    "num_real_microbatches": ({"x": jnp.ones((0, 3))}, 2),
}


@pytest.mark.parametrize("option", WRONG)
def test_no_error_advises_an_option_that_has_no_place(option):
    for wrap in (ga.value_and_grad, ga.microbatch, ga.batch_dependencies):
        assert option not in advice(*WRONG[option], wrap)
    assert option in advice(*WRONG[option], by_themselves)  # the twin: there it has one


# -- Any function ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "tokens", "batch_norm"])
def test_a_gradient_function_that_is_written_already_runs_over_micro_batches(name):
    with jax.enable_x64(True):
        args = whole_losses.arguments()
        fun = jax.value_and_grad(whole_losses.LOSSES[name])
        got = jax.jit(ga.microbatch(fun, 4))(*args)
        assert_close(got, fun(*args), whole_losses.N)


@pytest.mark.slow
def test_it_may_be_a_gradient_of_the_rows_themselves():
    with jax.enable_x64(True):
        args = whole_losses.arguments()
        batch = {name: x for name, x in args[1].items() if x.dtype == jnp.float64}

        def fun(p, own, b):
            return whole_losses.LOSSES["batch_norm"](p, b | own)

        grads = jax.grad(fun, argnums=(0, 1))
        step = jax.jit(ga.microbatch(grads, 4, batch_argnums=(1, 2)))
        due = grads(args[0], batch, args[1])
        assert any(jnp.any(x != 0) for x in jax.tree.leaves(due[1]))
        assert_close(step(args[0], batch, args[1]), due, whole_losses.N)


def test_the_gradients_of_a_mean_are_sums_that_meet_once_at_the_end():
    fun = jax.value_and_grad(whole_losses.classes)
    found = ga.batch_dependencies(
        lambda p, b: (jnp.zeros([]), fun(p, b)), 4, has_aux=True
    )(*whole_losses.arguments(dtype=np.float32))
    assert (found.meetings, found.whole) == ([], [])
    # Of the gradient that it computes itself; nothing is left to differentiate.
    assert (found.forward_passes, found.backward_passes) == (1, 0)


def test_any_function_gives_what_it_gives_for_the_whole_batch():
    def fun(x, w, y):
        return {"rows": x @ w, "order": jnp.argsort(y), "n": len(x), "w": w}

    with jax.enable_x64(True):
        params, batch = whole_losses.arguments()
        args = batch["x"], params["i"], batch["y"][:, 0]
        run = ga.microbatch(fun, 4, batch_argnums=(0, -1))
        want = fun(*args) | {"n": jnp.asarray(whole_losses.N)}
        got = jax.jit(run)(*args)
        assert_close(got, want, whole_losses.N)


def test_the_batch_of_any_function_may_come_by_keyword_and_must_come():
    def fun(w, scale=2.0, x=None):
        return x @ w * scale

    w, x = jnp.arange(3.0), jnp.arange(24.0).reshape(8, 3)
    run = jax.jit(ga.microbatch(fun, 4, batch_argnums=2))
    np.testing.assert_array_equal(run(w, x=x), fun(w, x=x))
    np.testing.assert_array_equal(run(w, 3.0, x), fun(w, 3.0, x))
    for args in ((w,), (w, 3.0)):
        with pytest.raises(ValueError, match=f"names number 2, and {len(args)} came"):
            run(*args)
    with pytest.raises(ValueError, match="names number -3, and 2 came"):
        ga.microbatch(lambda w, x: x @ w, 4, batch_argnums=-3)(w, x)
    with pytest.raises(TypeError, match="fun must be a function"):
        ga.microbatch(None, 4)


def test_a_position_counts_the_arguments_that_came_and_no_defaults():
    def fun(w, x, scale=2.0, *more, power=1):
        return (x @ w * scale) ** power

    w, x = jnp.arange(3.0), jnp.arange(24.0).reshape(8, 3)
    run = jax.jit(ga.microbatch(fun, 4, batch_argnums=-1))
    for args, named in (((w,), {"x": x}), ((w,), {"x": x, "power": 2}), ((w, x), {})):
        np.testing.assert_array_equal(run(*args, **named), fun(*args, **named))
    with pytest.raises(ValueError, match="argument 2 holds none"):  # the twin
        run(w, x=x, scale=3.0)


def test_dependencies_name_what_meets_the_line_and_the_bytes():
    found = ga.batch_dependencies(whole_losses.clip, 4)(
        *whole_losses.arguments(dtype=np.float32)
    )
    text = str(found)
    assert "all rows of [16, 4]" in text
    assert "whole_losses.py" in text
    assert found.kept_bytes == 2 * 16 * 4 * 4
    assert "No row needs another" in str(
        ga.batch_dependencies(whole_losses.mean, 4)(
            *whole_losses.arguments(dtype=np.float32)
        )
    )


# -- Devices ---------------------------------------------------------------------------


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("name", ["masked", "batch_norm", "dropout"])
def test_rows_over_devices_and_micro_batches_keep_their_order(name):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    loss = whole_losses.LOSSES[name]

    def fun(p, b):
        return loss(p, b), b["x"] @ p["i"]

    with jax.enable_x64(True):
        params, batch = whole_losses.arguments()
        want = jax.value_and_grad(fun, has_aux=True)(params, batch)
        split = NamedSharding(mesh, P("data"))
        batch = jax.device_put(batch, split)
        step = ga.value_and_grad(
            fun,
            4,
            has_aux=True,
            accumulator_dtype=jnp.float64,
            data_axis=ga.DataAxis("data", mesh=mesh),
        )
        assert_close(jax.jit(step)(params, batch), want, whole_losses.N)


def frozen(use):
    """A loss of an argument without a role, which is on the mesh as all others are."""

    def fun(w, b, table, key):
        h = jnp.tanh(b["x"] @ w)
        if use == "product":
            h = h * table[0]
        elif use == "index":
            h = h * table[b["id"]]
        elif use == "full_like":
            h = h * jnp.full_like(table, 2)[0] + jnp.imag(table[0] * 1j)
        elif use == "key":
            h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0)
        aux = {"rows": h, "two": jnp.concatenate([h, -h]), "table": table.sum(0)}
        return jnp.std(h), aux

    return fun


USES = ["product", "index", "full_like", "key"]


@pytest.mark.grid(1, 4)
@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="data_axis needs jax 0.9")
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("use", USES)
def test_an_argument_without_a_role_may_lie_on_the_mesh(use, kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),))
    whole, split = (NamedSharding(mesh, spec) for spec in (P(), P("d")))
    fun, key = frozen(use), jax.random.key(0)
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        w, table, x = (draw.normal(size=(n, 3)) for n in (3, 7, 16))
        given = w, {"x": x, "id": draw.integers(0, 7, 16)}, table, key
        want = jax.value_and_grad(fun, has_aux=True)(*jax.tree.map(jnp.asarray, given))
        w, table, key = jax.device_put((w, table, key), whole)
        args = w, jax.device_put(given[1], split), table, key
        axis = {"data_axis": ga.DataAxis("d", mesh=mesh)}
        options = {"has_aux": True, "accumulator_dtype": jnp.float64, **axis}
        step = ga.value_and_grad(fun, 2, **options)
        of_grad = ga.microbatch(jax.value_and_grad(fun, has_aux=True), 2, **axis)
        for run in (step, jax.jit(step), jax.jit(of_grad)):
            assert_close(run(*args), want, 16)
        with jax.set_mesh(mesh):
            assert_close(jax.jit(step)(*args), want, 16)
        found = ga.batch_dependencies(fun, 2, has_aux=True, **axis)(*args)
        assert found.num_microbatches == 8


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="data_axis needs jax 0.9")
@pytest.mark.parametrize("use", ["product", "index"])
@pytest.mark.parametrize("make", [ga.value_and_grad, by_themselves])
def test_who_closes_over_an_array_of_the_mesh_is_told_what_to_do(use, make):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    whole, split = (NamedSharding(mesh, spec) for spec in (P(), P("d")))
    w, table = jax.device_put((jnp.eye(3), jnp.ones((7, 3))), whole)
    batch = {"x": jnp.ones((16, 3)), "id": jnp.zeros(16, int)}
    fun = lambda w, b: frozen(use)(w, b, table, None)[0]  # noqa: E731
    axis = ga.DataAxis("d", mesh=mesh)
    step = make(fun, 2, data_axis=axis)
    told = ValueError, NotImplementedError, UserWarning  # the last if it goes on
    with pytest.raises(told) as raised:
        step(w, jax.device_put(batch, split))
    said = [str(raised.value), *getattr(raised.value, "__notes__", ())]
    assert any("closes over an array that lies on the mesh" in words for words in said)


# -- Comparisons with an extremum ------------------------------------------------------


def attained(w, x):
    """How a row that attains the maximum of its column counts, and how many do."""
    h = jnp.where(x > 0, x @ w, jnp.tanh(x @ w) / 2)
    h = h / (1 + jnp.abs(h).max())
    wins = h == jnp.broadcast_to(h.max(0), h.shape)
    return jnp.sum(jnp.where(wins, h, 0.1 * x)), wins.sum()


def wrong_counts():
    """For how many of six problems another number of rows attains the maximum."""
    step = jax.jit(ga.value_and_grad(attained, 2, has_aux=True))
    wrong = 0
    for seed in range(6):
        w = jax.random.normal(jax.random.key(seed), (4, 4))
        x = jax.random.normal(jax.random.key(99 + seed), (8, 4))
        wrong += int(step(w, x)[0][1] != jax.jit(attained)(w, x)[1])
    return wrong


@pytest.mark.slow
def test_a_row_that_attains_the_maximum_equals_it_in_a_later_level_too(monkeypatch):
    assert wrong_counts() == 0
    # The twin: computed again, it rounds otherwise.
    monkeypatch.setattr(elementwise, "_COMPARES", ())
    assert wrong_counts() > 0


# -- Meshes ----------------------------------------------------------------------------


def ratio(w, x):
    h = jnp.tanh(x @ w)
    return h.sum() / jnp.abs(h).sum()


@pytest.mark.slow
@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("devices", [2, 4])
def test_a_mesh_in_the_context_and_a_region_of_the_user_give_the_whole_batch(devices):
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("data",), axis, devices=jax.devices()[:devices])
    w, x = jnp.ones((4, 4)), jax.random.normal(jax.random.key(0), (16, 4))
    want = jax.value_and_grad(ratio)(w, x)
    step = ga.value_and_grad(ratio, 2, data_axis="data")

    def mapped(check_vma):
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        run = jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs)
        return jax.jit(run)(w, x)

    with jax.set_mesh(mesh):
        batch = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        got = [jax.jit(step)(w, batch)]
    for value, grad in [*got, mapped(False)]:
        bound = 50 * 16 * np.finfo(np.float32).eps * (1 + jnp.abs(grad).max())
        assert abs(value - want[0]) < bound
        assert jnp.abs(grad - want[1]).max() < bound
        # The twin: the mean over devices of their own ratios.
        parts = [ratio(w, part) for part in x.reshape(devices, -1, 4)]
        assert abs(sum(parts) / devices - want[0]) > 100 * bound
    with pytest.raises(ValueError, match="must have check_vma=False"):
        mapped(True)


def test_a_region_that_checks_is_refused_without_a_data_axis_too():
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis, devices=jax.devices()[:2])
    w, x = jnp.ones((4, 4)), jax.random.normal(jax.random.key(0), (16, 4))
    step = ga.value_and_grad(ratio, 2)

    def mean(w, x):
        return jax.lax.pmean(step(w, x), "data")

    def mapped(check_vma):
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        run = jax.shard_map(mean, mesh=mesh, check_vma=check_vma, **specs)
        return jax.jit(run)(w, x)

    with pytest.raises(ValueError, match="must have check_vma=False"):
        mapped(True)
    parts = [ratio(w, part) for part in x.reshape(2, -1, 4)]
    assert abs(mapped(False)[0] - sum(parts) / 2) < 1e-5


def test_a_sum_in_float16_overflows_where_that_of_the_whole_batch_does():
    def total(w, x):
        return jnp.sum(x * w)

    w, x = jnp.float16(1), jnp.full(8, 5000, jnp.float16)
    value, _ = ga.value_and_grad(total, 4)(w, x)
    assert value.dtype == jnp.float16
    assert value == total(w, x) == 40000


def test_what_must_run_once_is_computed_of_all_rows_and_said():
    def counts(w, x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return ratio(w, x) * io_callback(lambda: np.float32(1), shape)

    w, x = jnp.ones((4, 4)), jnp.ones((16, 4))
    with pytest.warns(UserWarning, match="all rows at once.*calls io_callback"):
        value, _ = ga.value_and_grad(counts, 2)(w, x)
    assert value == ratio(w, x)


def test_axes_of_explicit_type_are_taken_for_parameters_and_refused_for_rows():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), ("data",), explicit, devices=jax.devices()[:2])
    w, x = jnp.ones((4, 4)), jax.random.normal(jax.random.key(0), (16, 4))

    def normalised(w, x):
        h = x @ w
        return jnp.mean(jnp.tanh((h - h.mean(0)) / (h.std(0) + 1)) ** 3)

    step = ga.value_and_grad(normalised, 4)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, P(None, "data"))
        value, grad = jax.jit(step)(sharded, x)
        want = jax.jit(jax.value_and_grad(normalised))(sharded, x)
        assert jax.typeof(grad) == jax.typeof(want[1])
        assert abs(value - want[0]) < 1e-6
        assert jnp.abs(grad - want[1]).max() < 1e-6
        with pytest.raises(ValueError, match="Pass data_axis='data'"):
            jax.jit(step)(w, jax.device_put(x, P("data")))


# -- Derivatives of any function -------------------------------------------------------


EXTREMA = {
    "largest": lambda w, x: jnp.tanh(x @ w).max(0) ** 2,
    "smallest": lambda w, x: x @ w - (x @ w).min(0, keepdims=True),
    "softmax": lambda w, x: jax.nn.softmax(x @ w, axis=0) ** 2,
    "sorted": lambda w, x: jnp.sort(x @ w, 0)[::2] ** 3,
}


def slopes(fun, argnum):
    def total(*args):
        return jnp.sum(fun(*args))

    w, x = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(SHAPES))
    return jax.grad(total, argnum)(w, x)


SHAPES = (4, 3), (8, 4)


@pytest.mark.filterwarnings("ignore:.*computed whole")
@pytest.mark.parametrize("argnum", [0, 1])
@pytest.mark.parametrize("name", EXTREMA)
def test_a_function_over_micro_batches_has_its_derivatives(name, argnum, monkeypatch):
    with jax.enable_x64(True):
        want = slopes(EXTREMA[name], argnum)
        got = slopes(ga.microbatch(EXTREMA[name], 4), argnum)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        if name in ("largest", "smallest"):
            # The twin: arguments that nobody differentiates with respect to.
            monkeypatch.setattr(partitioned, "is_inexact", lambda aval: False)
            wrong = slopes(ga.microbatch(EXTREMA[name], 4), argnum)
            assert np.abs(wrong - want).max() > 1e-2
