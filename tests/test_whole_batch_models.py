"""Models whose rows meet: value, gradients and aux are those of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import whole_models
from helpers import mean_of as by_themselves
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_whole_batch import assert_close
from whole_models import MODELS, N

import ga_optax as ga

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
DIVISORS = (1, 2, 3, 4, 6, 12)


def over_micro_batches(fun, k, **options):
    given = {"has_aux": True, "accumulator_dtype": "float64"}
    return jax.jit(ga.value_and_grad(fun, k, **(given | options)))


def apart(fun, k):
    """Micro-batches, each by itself, with the aux of the last."""
    return jax.jit(by_themselves(fun, k, has_aux=True, aux="last"))


def check(fun, k):
    with jax.enable_x64(True):
        args = whole_models.arguments()
        want = jax.jit(jax.value_and_grad(fun, has_aux=True))(*args)
        assert_close(over_micro_batches(fun, k)(*args), want, N)


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_value_gradients_and_aux_of_the_whole_batch(name):
    check(MODELS[name], 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", DIVISORS)
@pytest.mark.parametrize("name", MODELS)
def test_models_do_for_any_number_of_micro_batches(name, k):
    check(MODELS[name], k)


@pytest.mark.slow
def test_micro_batches_by_themselves_give_others():
    """The twin."""
    with jax.enable_x64(True):
        args = whole_models.arguments()
        for name in ("attention", "masked_tokens", "sinkhorn"):
            want = jax.value_and_grad(MODELS[name], has_aux=True)(*args)
            got = apart(MODELS[name], 4)(*args)
            far = jax.tree.map(lambda x, y: jnp.abs(x - y).max(), got[1], want[1])
            assert max(jax.tree.leaves(far)) > 1e-3


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [3, N])
def test_dropout_masks_and_noise_are_those_of_the_whole_batch_bit_for_bit(k):
    args = whole_models.arguments(dtype=np.float32)
    fun = MODELS["dropout"]
    (_, want), _ = jax.value_and_grad(fun, has_aux=True)(*args)
    (_, got), _ = over_micro_batches(fun, k, accumulator_dtype="float32")(*args)
    assert want["keep"].sum() not in (0, want["keep"].size)
    np.testing.assert_array_equal(got["keep"], want["keep"])
    np.testing.assert_array_equal(got["noise"], want["noise"])
    # The twin: a micro-batch that draws for itself draws the same in each.
    (_, other), _ = by_themselves(fun, k, has_aux=True, aux="stack")(*args)
    assert (other["keep"].reshape(want["keep"].shape) != want["keep"]).any()


# -- Batch normalisation ---------------------------------------------------------------


def as_float64(tree):
    def wide(x):
        is_number = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float64) if is_number else x

    return jax.tree.map(wide, tree)


def equinox_loss(mode):
    """A network with batch normalisation in two layers, and its state as aux."""
    eqx = pytest.importorskip("equinox")

    class Network(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        last: eqx.nn.Linear
        again: eqx.nn.BatchNorm

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.first = eqx.nn.Linear(whole_models.D, N, key=one)  # as long as rows
            self.norm = eqx.nn.BatchNorm(N, "batch", mode=mode)
            self.last = eqx.nn.Linear(N, 3, key=two)
            self.again = eqx.nn.BatchNorm(3, "batch", mode=mode)

        def __call__(self, x, state):
            h, state = self.norm(self.first(x), state)
            return self.again(self.last(jnp.tanh(h)), state)

    model, state = eqx.nn.make_with_state(Network)(jax.random.key(0))
    params, static = eqx.partition(as_float64(model), eqx.is_inexact_array)

    def fun(params, b, state):
        run = jax.vmap(eqx.combine(params, static), (0, None), (0, None), "batch")
        out, state = run(b["x"], state)
        return jnp.mean(out**3) + each_mean(out, b), (state, out)

    return fun, params, as_float64(state)


def each_mean(out, b):
    return whole_models.each_class(out, b["c"]).mean()


def differs(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(x - y).max()) for x, y in pairs if x.dtype == jnp.float64)


def assert_same(got, want):
    """Equal to the rounding of the largest gradient: that of a bias is rounding alone.

    Forty sums of n terms after one another, there and back.
    """
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want[1]))
    types, due = (list(map(_type, jax.tree.leaves(tree))) for tree in (got, want))
    assert types == due
    assert differs(got, want) < 40 * N * np.finfo(np.float64).eps * max(largest, 1)


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [4, 1, 2, N])
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_equinox_keeps_the_statistics_of_the_whole_batch(mode, k):
    with jax.enable_x64(True):
        fun, params, state = equinox_loss(mode)
        args = params, whole_models.arguments()[1], state
        want = jax.jit(jax.value_and_grad(fun, has_aux=True))(*args)
        (_, (new, _)), _ = want
        assert differs(new, state) > 1e-3  # it was updated
        got = over_micro_batches(fun, k)(*args)
        assert_same(got, want)
        # The twin: those of the last micro-batch.
        (_, (last, _)), _ = apart(fun, k)(*args)
        assert (differs(last, new) > 1e-3) == (k > 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", [1, 2, N])
@pytest.mark.parametrize("fast_variance", [True, False])
def test_linen_keeps_them_for_any_number_of_micro_batches(k, fast_variance):
    nn = pytest.importorskip("flax.linen")
    options = {"use_fast_variance": fast_variance, "param_dtype": jnp.float64}

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (N, 3):
                x = nn.Dense(width, param_dtype=jnp.float64)(x)
                x = jnp.tanh(nn.BatchNorm(False, momentum=0.5, **options)(x))
            return x

    def fun(params, b, stats):
        variables = {"params": params, "batch_stats": stats}
        out, new = Network().apply(variables, b["x"], mutable=["batch_stats"])
        return jnp.mean(out**3) + each_mean(out, b), (new["batch_stats"], out)

    with jax.enable_x64(True):
        batch = whole_models.arguments()[1]
        variables = Network().init(jax.random.key(0), batch["x"])
        args = variables["params"], batch, variables["batch_stats"]
        want = jax.jit(jax.value_and_grad(fun, has_aux=True))(*args)
        assert_same(over_micro_batches(fun, k)(*args), want)


# -- What nothing is known of ----------------------------------------------------------


def in_a_region(p, b):
    """A user's `shard_map` over two devices, with a sum over them."""
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])

    def product(x, w):
        return jax.lax.psum(x @ w, "model")

    specs = {"in_specs": (P(None, "model"), P("model")), "out_specs": P()}
    h = jax.shard_map(product, mesh=mesh, **specs)(b["x"], p["in"])
    h = jnp.tanh(h - h.mean(0))
    return each_mean(h @ p["out"], b), h


def under_vmap(p, b):
    """An ensemble under `vmap`, each member normalised over the rows."""

    def member(scale, x):
        h = jax.vmap(lambda x: jnp.tanh(x @ p["in"] * scale))(x)
        h = jax.vmap(lambda h: h - jax.lax.pmean(h, "rows"), axis_name="rows")(h)
        return h, jax.vmap(lambda h: h / jnp.sqrt((h**2).mean() + 0.1), 1, 1)(h)

    h, normed = jax.vmap(member, (0, None))(jnp.arange(1.0, 4.0), b["x"])
    return each_mean(normed.mean(0) @ p["out"], b) + h.std(), (h, normed)


def called_back(p, b):
    h = jnp.tanh(b["x"] @ p["in"])
    kind = jax.ShapeDtypeStruct(h.shape, h.dtype)

    def ranks(x):
        return np.argsort(np.argsort(np.asarray(x), 0), 0).astype(h.dtype)

    found = jax.pure_callback(ranks, kind, jax.lax.stop_gradient(h))
    return each_mean((h * found) @ p["out"], b), found


twisted = Primitive("twisted")
twisted.def_impl(lambda x: 2 * x[::-1] + x)
twisted.def_abstract_eval(lambda x: x)
ad.deflinear2(twisted, lambda ct, x: [2 * ct[::-1] + ct])
mlir.register_lowering(
    twisted, mlir.lower_fun(lambda x: 2 * x[::-1] + x, multiple_results=False)
)


def unknown(p, b):
    h = twisted.bind(jnp.tanh(b["x"] @ p["in"]))
    w = twisted.bind(p["out"])  # has no rows
    return each_mean(h @ w, b), {"h": h, "mean": twisted.bind(h.mean(0))}


UNKNOWN = {
    "in_a_region": (in_a_region, "shard_map"),
    "called_back": (called_back, "pure_callback"),
    "unknown": (unknown, "twisted"),
}


@pytest.mark.grid(1, 3)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_nothing_is_known_of_is_computed_whole_and_right(name):
    fun, primitive = UNKNOWN[name]
    args = whole_models.arguments(dtype=np.float32)
    want = jax.jit(jax.value_and_grad(fun, has_aux=True))(*args)
    got = over_micro_batches(fun, 4, accumulator_dtype="float32")(*args)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        bound = 50 * N * np.finfo(np.float32).eps * max(np.abs(y).max(), 1e-3)
        np.testing.assert_allclose(x, y, rtol=0, atol=bound)
    found = ga.batch_dependencies(fun, 4, has_aux=True)(*args)
    names = {name for name, _, _ in found.whole}
    assert names == {primitive}


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [4, 1, N])
def test_vmap_inside_is_no_other_than_the_program_that_it_writes(k):
    check(under_vmap, k)
    args = whole_models.arguments(dtype=np.float32)
    assert ga.batch_dependencies(under_vmap, 4, has_aux=True)(*args).whole == []


def collectives(p, b):
    """Those of `vmap` over rows, and over features, in one array."""

    def of_row(x):
        h = jnp.tanh(x @ p["in"])
        top, low = (
            over(jax.lax.stop_gradient(h), "rows")
            for over in (jax.lax.pmax, jax.lax.pmin)
        )
        h = h - jax.lax.psum(h, "rows") / 9 + jnp.where(h == top, h, 0.1 * low)
        return jax.vmap(lambda x: x - jax.lax.pmean(x, "f"), axis_name="f")(h)

    h = jax.vmap(of_row, axis_name="rows")(b["x"])
    return each_mean(h @ p["out"], b) + h.std(), h


def test_collectives_of_a_vmap_are_reductions_of_axes():
    check(collectives, 4)
    args = whole_models.arguments(dtype=np.float32)
    found = ga.batch_dependencies(collectives, 4, has_aux=True)(*args)
    assert found.whole == []


@pytest.mark.slow
def test_collectives_over_an_axis_around_the_call_leave_rows_where_they_are():
    def fun(p, x):
        h = jnp.tanh(x @ p["in"])
        h = h - jax.lax.pmean(h, "members")
        return jnp.sqrt((h**2).mean() + 0.1), h

    def of_members(run):
        return jax.vmap(run, (0, None), axis_name="members")

    with jax.enable_x64(True):
        params, batch = whole_models.arguments()
        params = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
        want = of_members(jax.value_and_grad(fun, has_aux=True))(params, batch["x"])
        got = of_members(over_micro_batches(fun, 4))(params, batch["x"])
        assert_close(got, want, N)


# -- Other types, and devices ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("name", ["masked_tokens", "attention", "vicreg", "mmd"])
def test_in_bfloat16_it_is_as_close_as_the_undivided_batch(name):
    """Both round what they compute, in another order; each is compared with float64."""
    fun = MODELS[name]
    args = whole_models.arguments(dtype=jnp.bfloat16)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    plain = jax.jit(jax.value_and_grad(fun, has_aux=True))(*args)
    got = over_micro_batches(fun, 4, accumulator_dtype="float32")(*args)
    assert jax.tree.map(_type, got) == jax.tree.map(_type, plain)
    with jax.enable_x64(True):
        exact = jax.tree.map(
            lambda x: x.astype("float64") if x.dtype == jnp.bfloat16 else x, args
        )
        want = jax.device_get(jax.value_and_grad(fun, has_aux=True)(*exact))

    def far(out):  # of the value and the gradients, each of its largest number
        (value, _), grads = out
        (due, _), of_due = want
        pairs = [(value, due), *zip(grads.values(), of_due.values(), strict=True)]
        return [
            float(np.abs(np.float64(x) - y).max() / (np.abs(y).max() or 1))
            for x, y in pairs
        ]

    for ours, theirs in zip(far(got), far(plain), strict=True):
        assert ours <= 2 * theirs + 4 * eps
    if name in ("masked_tokens", "attention"):  # the twin: means of the micro-batches
        others = far(apart(fun, 4)(*args))
        assert max(others) > 2 * max(far(plain)) + 4 * eps


def _type(x):
    return x.shape, x.dtype


SPECS = {"in": P(None, "data"), "mid": P("data"), "out": P("data")}


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="data_axis needs jax 0.9")
@pytest.mark.grid(2)
@pytest.mark.parametrize("name", ["attention", "experts", "dropout", "masked_tokens"])
@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_rows_and_parameters_over_devices_give_the_whole_batch(name, fsdp, devices):
    kinds = (AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("data",), kinds, devices=jax.devices()[:devices])
    with jax.enable_x64(True):
        params, batch = whole_models.arguments()
        fun = MODELS[name]
        want = jax.jit(jax.value_and_grad(fun, has_aux=True))(params, batch)
        if fsdp:
            places = {key: NamedSharding(mesh, spec) for key, spec in SPECS.items()}
            params = jax.device_put(params, places)
        split = jax.device_put(batch, NamedSharding(mesh, P("data")))
        axis = ga.DataAxis("data", mesh=mesh, param_specs=SPECS if fsdp else None)
        step = over_micro_batches(fun, 3, data_axis=axis)
        got = step(params, split)
        assert_close(got, want, N)
        if fsdp and devices > 1:
            assert got[1]["mid"].sharding.spec == P("data")
        # The twin: another first row.
        moved = split | {"x": split["x"].at[0].multiply(2.0)}
        assert differs(step(params, moved)[1], want[1]) > 1e-6
