"""Networks of other packages, `vmap` inside, and what nothing is known of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import whole_losses
from helpers import mean_of
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from test_law import assert_close, in_float64

import ga_optax as ga

pytestmark = [
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N = whole_losses.N


# -- Batch normalisation ---------------------------------------------------------------


def differs(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(x - y).max()) for x, y in pairs if x.dtype == jnp.float64)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("use_fast_variance", [False, True])
def test_statistics_of_networks_are_those_of_the_whole_batch(use_fast_variance):
    nn = pytest.importorskip("flax.linen")
    options = {"use_fast_variance": use_fast_variance, "param_dtype": jnp.float64}

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
        return jnp.mean(out**3), (new["batch_stats"], out)

    batch = whole_losses.arguments()[1]
    params, state = Network().init(jax.random.key(0), batch["x"]).values()
    got, want = in_float64(fun, params, batch, state, has_aux=True)
    new = want[0][1][0]
    assert differs(new, state) > 1e-3  # it was updated
    # Forty sums after one another; that of a bias is rounding of the others alone.
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert differs(got, want) < 40 * N * np.finfo(np.float64).eps
    # The twin: those of the last micro-batch.
    twin = mean_of(fun, 4, has_aux=True, aux="last")(params, batch, state)
    assert differs(twin[0][1][0], new) > 1e-3


# -- vmap inside and outside -----------------------------------------------------------


def ensemble(p, b):
    """An ensemble under `vmap`, each member normalised over the rows."""

    def member(scale, x):
        h = jax.vmap(lambda x: jnp.tanh(x @ p["in"] * scale))(x)
        h = jax.vmap(lambda h: h - jax.lax.pmean(h, "rows"), axis_name="rows")(h)
        return h, jax.vmap(lambda h: h / jnp.sqrt((h**2).mean() + 0.1), 1, 1)(h)

    h, normed = jax.vmap(member, (0, None))(jnp.arange(1.0, 4.0), b["x"])
    return (normed.mean(0) @ p["out"]).std() + h.std(), (h, normed)


def collectives(p, b):
    """Those of `vmap` over rows, and over features, in one array."""

    def of_row(x):
        h = jnp.tanh(x @ p["in"])
        still = jax.lax.stop_gradient(h)
        top, low = (over(still, "rows") for over in (jax.lax.pmax, jax.lax.pmin))
        h = h - jax.lax.psum(h, "rows") / 9 + jnp.where(h == top, h, 0.1 * low)
        return jax.vmap(lambda x: x - jax.lax.pmean(x, "f"), axis_name="f")(h)

    h = jax.vmap(of_row, axis_name="rows")(b["x"])
    return (h @ p["out"]).std() + h.std(), h


@pytest.mark.parametrize("fun", [ensemble, collectives])
def test_vmap_inside_is_no_other_than_the_program_that_it_writes(fun):
    with jax.enable_x64(True):
        args = whole_losses.arguments(width=4)
        assert_close(*in_float64(fun, *args, has_aux=True))
        assert ga.batch_dependencies(fun, 4, has_aux=True)(*args).whole == []


# -- What nothing is known of ----------------------------------------------------------


def called_back(p, b):
    h = jnp.tanh(b["x"] @ p["in"])
    kind = jax.ShapeDtypeStruct(h.shape, h.dtype)

    def ranks(x):
        return np.argsort(np.argsort(np.asarray(x), 0), 0).astype(h.dtype)

    found = jax.pure_callback(ranks, kind, jax.lax.stop_gradient(h))
    return ((h * found) @ p["out"]).std(), found


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
    return (h @ w).std(), {"h": h, "mean": twisted.bind(h.mean(0))}


@pytest.mark.parametrize(
    ("fun", "name"), [(called_back, "pure_callback"), (unknown, "twisted")]
)
def test_what_nothing_is_known_of_is_computed_whole_and_right(fun, name):
    args = whole_losses.arguments(dtype=np.float32, width=4)
    want = jax.jit(jax.value_and_grad(fun, has_aux=True))(*args)
    got = jax.jit(ga.value_and_grad(fun, 4, has_aux=True))(*args)
    assert_close(got, want, eps=np.finfo(np.float32).eps)
    found = ga.batch_dependencies(fun, 4, has_aux=True)(*args)
    assert {x.name for x in found.whole} == {name}
