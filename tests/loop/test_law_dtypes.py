"""What happens to models of bfloat16 and float16: what rounds, and what overflows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mean_of, mesh_of, put
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ga_optax as ga

# -- bfloat16: gradients are rounded once, also where rows meet and on a mesh ----------
#
# All numbers are integers: those of the activations and their cotangents are exact in
# bfloat16, gradients are exact in float32, and in bfloat16 they are not. So gradients
# are those of float32, to the last bit, unless something rounds them on their way.

ROWS, WIDTH, GROUPS, K = 512, 8, 16, 4
WIDE, NARROW = jnp.float32, jnp.bfloat16


def network(p, b, dtype):
    """Activations of two layers, and of the first alone, at most 64 and 8."""
    w, v = (x.astype(dtype) for x in (p["w"], p["v"]))
    first = b["x"].astype(dtype) @ w
    return (first @ v).astype(WIDE), first.astype(WIDE)


def total(p, b, dtype):
    """Rows do not meet."""
    return jnp.sum(network(p, b, dtype)[0] * b["slope"])


def deep(p, b, dtype):
    """The same in a scan."""
    layer = lambda x, w: (x @ w.astype(dtype), None)  # noqa: E731
    h, _ = jax.lax.scan(layer, b["x"].astype(dtype), jnp.stack([p["w"], p["v"]]))
    return jnp.sum(h.astype(WIDE) * b["slope"])


def sums(p, b, dtype):
    """They meet in sums, the slopes of whose absolute values are 1 or -1."""
    both = (jnp.abs(jnp.sum(h * b["sign"], 0)) for h in network(p, b, dtype))
    return total(p, b, dtype) + sum(map(jnp.sum, both))


def layers(p, b, dtype):
    """The same in a scan."""

    def layer(x, w):
        h = x @ w.astype(dtype)
        return h, jnp.abs(jnp.sum(h.astype(WIDE) * b["sign"], 0))

    h, met = jax.lax.scan(layer, b["x"].astype(dtype), jnp.stack([p["w"], p["v"]]))
    return jnp.sum(h.astype(WIDE) * b["slope"]) + jnp.sum(met)


def pairs(p, b, dtype):
    """All rows are gathered; the slope of a row counts those of its group."""
    _, first = network(p, b, dtype)
    near = (b["group"][:, None] == b["group"][None]).astype(WIDE)
    return jnp.sum(jnp.abs(first[:, None] - first[None]) * near[..., None])


def once(p, b, dtype):
    """What follows from sums over groups of rows is computed once."""
    of_group = jax.ops.segment_sum(network(p, b, dtype)[1], b["group"], GROUPS)
    return jnp.sum(of_group.astype(NARROW).astype(dtype) @ p["v"].astype(dtype))


def masked(p, b, dtype):
    """A mean over some rows, of a number that is a power of two."""
    h = network(p, b, dtype)[0] * b["slope"] * b["mask"]
    return jnp.sum(h) / jnp.sum(b["mask"]) * (ROWS // 2)


def averaged(p, b, dtype):
    """A sum that is rounded before it is divided, and added to another."""
    h = network(p, b, dtype)[0] * b["slope"]
    low = [jnp.sum(x).astype(dtype) / dtype(ROWS) for x in (h, h * b["mask"])]
    return sum(low).astype(WIDE) * ROWS


def sum_of(layer):
    """The first layer in another form, and a table."""

    def loss(p, b, dtype):
        h = layer(b["x"].astype(dtype), p["w"], dtype) @ p["v"].astype(dtype)
        h += p["v"].astype(dtype)[b["group"] % WIDTH]
        return jnp.sum(h.astype(WIDE) * b["slope"])

    return loss


def convolved(x, w, dtype):
    numbers, kernel = ("NWC", "WIO", "NWC"), w.astype(dtype)[None]
    args = x[:, None], kernel, (1,), "SAME", None, None, numbers
    return jax.lax.conv_general_dilated(*args)[:, 0]


def used_twice(x, w, dtype):
    w, first = w.astype(dtype), jnp.arange(x.shape[0])[:, None] % 2 == 0
    return jnp.where(first, x, 0) @ w + jnp.where(first, 0, x) @ w


def cast_before(p, b, dtype):
    """The same as `deep`, of matrices that are cast before the scan."""
    layer = lambda x, w: (x @ w, None)  # noqa: E731
    both = jnp.stack([p["w"], p["v"]]).astype(dtype)
    h = jax.jit(lambda x, w: jax.lax.scan(layer, x, w)[0])(b["x"].astype(dtype), both)
    return jnp.sum(h.astype(WIDE) * b["slope"])


FORMS = {
    "einsum": sum_of(lambda x, w, dtype: jnp.einsum("rk,kl->rl", x, w.astype(dtype))),
    "jitted": sum_of(lambda x, w, dtype: jax.jit(jnp.matmul)(x, w.astype(dtype))),
    "convolved": sum_of(convolved),
    "used twice": sum_of(used_twice),
    "cast before": cast_before,
}
LOSSES = (total, sums, layers, pairs, once, masked, averaged)
PLACES = {  # axes of a mesh, and where rows do not meet more
    "Auto": {},
    "Explicit": {},
    "scattered": {"grad_specs": P("data"), "sync": "each"},
}


def integers():
    rng = np.random.default_rng(0)

    def one_of(numbers, *shape):
        return jnp.asarray(rng.choice(numbers, shape), WIDE)

    params = {name: one_of([-1, 1], WIDTH, WIDTH) for name in "wv"}
    batch = {
        "x": one_of([0, 1], ROWS, WIDTH),
        "slope": one_of([1, 2, 3], ROWS, WIDTH),
        "sign": one_of([-1, 1], ROWS, WIDTH),
        "mask": jnp.asarray(rng.permutation(ROWS) < ROWS // 2, WIDE)[:, None],
        "group": jnp.asarray(rng.integers(0, GROUPS, ROWS)),
    }
    return params, batch


@functools.cache
def wide_gradient(fun):
    return jax.jit(jax.grad(lambda p, b: fun(p, b, WIDE)))


def gradients(fun, place=None, **options):
    """Those of micro-batches in bfloat16, and those in float32."""
    params, batch = integers()
    want = wide_gradient(fun)(params, batch)
    if place is not None:
        mesh = mesh_of(2, kind=getattr(AxisType, place, AxisType.Auto))
        options["data_axis"] = ga.DataAxis("data", mesh=mesh, **PLACES[place])
        params, batch = put((params, batch), mesh, (P(), P("data")))
    step = ga.value_and_grad(lambda p, b: fun(p, b, NARROW), K, **options)
    return jax.device_get((jax.jit(step)(params, batch)[1], want))


def exact(got, want):
    return all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.grid(6, 20)
@pytest.mark.parametrize(
    ("fun", "place"),
    [
        *itertools.product(LOSSES, [None, "Auto", "Explicit"]),
        *itertools.product([total, deep], ["scattered"]),
        *(pytest.param(fun, None, id=name) for name, fun in FORMS.items()),
    ],
)
def test_gradients_are_rounded_in_the_accumulator_alone(fun, place):
    got, want = gradients(fun, place)
    assert exact(got, want)
    # They are not exact in bfloat16.
    assert not exact(jax.tree.map(lambda x: np.asarray(x, NARROW), want), want)


@pytest.mark.quick
def test_a_sum_is_rounded_when_it_is_complete():
    """So rows do not meet in it, and the loss is that of all rows, to the last bit."""
    params, batch = integers()

    def fun(p, b):
        return jnp.sum(network(p, b, NARROW)[0] * b["slope"]).astype(NARROW) / 512

    found = ga.batch_dependencies(fun, K)(params, batch)
    assert (found.forward_passes, found.meetings) == (1, [])
    both = jax.value_and_grad(fun), ga.value_and_grad(fun, K)
    due, value = (jax.jit(step)(params, batch)[0] for step in both)
    assert value == due


def test_without_passes_they_are_rounded_as_by_jax():
    got, want = gradients(sums, optimize=False)
    assert not exact(got, want)
    for x, y in zip(got.values(), want.values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-7 * np.abs(y).max())


def square(p, x):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, x.astype(NARROW), p)
    return jnp.mean(jnp.square(h.astype(WIDE)))


def test_gradients_of_parameters_in_bfloat16_are_rounded_once():
    """By `u = eps / 2` of what comes out."""
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=(3, 64, 64)) / 4, NARROW)
    x = jnp.asarray(rng.normal(size=(256, 64)), WIDE)
    acc = ga.accumulator.init(p)
    _, acc = jax.jit(ga.accumulate(square, K))(acc, p, x)
    due = np.asarray(ga.accumulator.mean(acc), np.float64)
    terms = jax.vmap(jax.grad(square), (None, 0))(p, x[:, None])
    size = np.mean(np.abs(np.asarray(terms, np.float64)), 0)
    bound = float(jnp.finfo(NARROW).eps) / 2 * np.abs(due)
    bound += len(x) * np.finfo(np.float32).eps * size

    def off(step):
        got = np.asarray(jax.jit(step)(p, x)[1], np.float64)
        return np.max(np.abs(got - due) / bound)

    assert off(ga.value_and_grad(square, K)) <= 1
    # The twin: they are added up in bfloat16.
    assert off(mean_of(square, K, accumulator_dtype=NARROW)) > 1


HALF, SCALE = jnp.float16, 32768.0  # as loss scaling starts with
X = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4)) / 100, HALF)


def scaled_sum(w, x):
    return jnp.sum((x @ w.astype(HALF)).astype(jnp.float32)) * SCALE


def sum_in_half(w, x):
    return jnp.sum((x @ w.astype(HALF)) * HALF(SCALE / 2))


def root(w, x):
    return jnp.sqrt(scaled_sum(w, x) ** 2 + 1)


@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.grid(2, 12)
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("dtype", [HALF, jnp.float32], ids=["half", "float32"])
@pytest.mark.parametrize("fun", [scaled_sum, sum_in_half, root])
def test_a_scaled_sum_overflows_only_where_it_does_without(fun, dtype, optimize):
    w = jnp.ones(4, dtype)
    due, of_due = jax.jit(jax.value_and_grad(fun))(w, X)
    got, grads = jax.jit(ga.value_and_grad(fun, 8, optimize=optimize))(w, X)
    assert np.all(np.isfinite(of_due))
    assert (grads.dtype, got.dtype) == (of_due.dtype, due.dtype)
    # Products of 64 rows are rounded to 11 bits; their sum is in float32 or wider.
    size = SCALE * jnp.sum(jnp.abs(X.astype(jnp.float32)), 0)
    bound = 4 * float(jnp.finfo(HALF).eps) * size
    np.testing.assert_array_less(jnp.abs(grads - of_due), bound)
    np.testing.assert_allclose(got, due, rtol=0, atol=float(jnp.sum(bound)))
    if fun is scaled_sum:  # The twin: what overflows without it still does.
        step = ga.value_and_grad(lambda w, x: fun(w, x) * 1000, 8, optimize=optimize)
        assert not np.all(np.isfinite(jax.jit(step)(w, X)[1]))


def test_small_gradients_keep_their_digits():
    def fun(w, x):
        return jnp.sum((x @ w).astype(jnp.float32)) / SCALE * 8

    w = jnp.ones(4, HALF)
    due = jax.jit(jax.grad(fun))(w, X)
    _, got = jax.jit(ga.value_and_grad(fun, 8))(w, X)
    tiny = float(jnp.finfo(HALF).smallest_subnormal)
    np.testing.assert_array_less(jnp.abs(got - due), 65 * tiny)
    assert jnp.any(jnp.abs(due) > 64 * tiny)


# -- float8 without -0 -----------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz])
def test_xla_casts_what_rounds_to_minus_zero_to_nan_in_a_loop(dtype):
    """A plain program, as docs/recipes/language.md says. If it fails, XLA is mended."""

    def low(x):
        return x.astype(dtype).astype(jnp.float32)

    tiny = jnp.full(10, -1e-9)
    assert np.isnan(jax.jit(lambda x: jax.lax.map(low, x))(tiny)).all()
    assert (jax.jit(low)(tiny) == 0).all()
    assert (jax.jit(lambda x: jax.lax.map(low, x))(-tiny) == 0).all()
